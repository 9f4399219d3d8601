"""A stream of a real broker keeps the promises of the log port, and readers that break them are caught."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from faregate.message import Envelope
from faregate.testing.log_capability_suite import capability_cases, run_capability_case
from faregate.testing.log_suite import LOG_CASES, run_log_case
from faregate.transports.rabbitmq_stream import RabbitmqStreamLog
from tests.presence import address
from tests.rabbitmq_stream.streams import stream_subject

pytestmark = pytest.mark.services

BROKERS = "retention_waits_for_named_readers"
"""Retention is the broker's, and waits for nobody: a reader that is late is told, never served less."""
OF_TWO_VIEWS = (
    "a_subscription_that_is_new_reads_the_log_from_its_beginning",
    "a_log_view_begins_with_what_waits_in_the_queue",
    "a_queue_gets_back_what_is_not_done",
)
"""A stream alone says that it has no queues; see `test_log_view.py` for one that stands beside some."""
ARGUMENTS = {
    "reading_what_was_removed_is_an_error": {
        "max_length_bytes": "100000",
        "stream_max_segment_size_bytes": "30000",
    }
}


@pytest.fixture
def server() -> str:
    return address("FAREGATE_TEST_RABBITMQ_STREAM")


@pytest.mark.parametrize("name", [name for name in LOG_CASES if name != BROKERS])
async def test_a_stream_as_a_log(name: str, server: str) -> None:
    await run_log_case(name, partial(stream_subject, server, **ARGUMENTS.get(name, {})))


@pytest.mark.parametrize("name", [each for each in capability_cases(RabbitmqStreamLog) if each not in OF_TWO_VIEWS])
async def test_the_capabilities_of_a_stream_as_a_log(name: str, server: str) -> None:
    await run_capability_case(name, partial(stream_subject, server))


class LosesHeaders(RabbitmqStreamLog):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        for offset, envelope in super().envelopes(start, end):
            yield offset, msgspec.structs.replace(envelope, headers={})


class ReadsWholeChunks(RabbitmqStreamLog):
    def _chunks(self, start: int, end: int | None) -> Iterator[Any]:
        return super()._chunks(start - start % 50, end)


class SkipsWhatIsGone(RabbitmqStreamLog):
    def _check(self, start: int, latest: int) -> None:
        pass


class ForgetsNames(RabbitmqStreamLog):
    def append(self, envelopes: Sequence[Envelope], name: str | None = None) -> None:
        super().append(envelopes)


class HasOneNameForAll(RabbitmqStreamLog):
    def append(self, envelopes: Sequence[Envelope], name: str | None = None) -> None:
        super().append(envelopes, name or "unnamed")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("messages_come_back_as_they_were", LosesHeaders),
        ("a_range_is_read_from_start_to_before_end", ReadsWholeChunks),
        ("reading_what_was_removed_is_an_error", SkipsWhatIsGone),
        ("reading_from_beyond_the_end_is_an_error", SkipsWhatIsGone),
        ("a_name_is_appended_once", ForgetsNames),
        ("what_has_no_name_is_new", HasOneNameForAll),
    ],
)
async def test_a_stream_that_breaks_a_promise_is_caught(name: str, fault: type[Any], server: str) -> None:
    run = run_log_case if name in LOG_CASES else run_capability_case
    with pytest.raises(AssertionError):
        await run(name, partial(stream_subject, server, fault, **ARGUMENTS.get(name, {})))
