"""The journal keeps every promise of the log port, and for every promise a reader that breaks it is caught."""

from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faregate.broker.journal import JournalReader
from faregate.broker.journal.frame import SEGMENT_BYTES
from faregate.broker.journal.high_water import HighWater
from faregate.message import Envelope
from faregate.ports.log import ReaderOffset
from faregate.testing.log_suite import LOG_CASES, journal_log_subject, run_log_case
from tests.conformance.faults import Faults

FAULTS = Faults(LOG_CASES)
breaks = FAULTS.breaks


@pytest.mark.parametrize("name", LOG_CASES)
async def test_the_journal_as_a_log(name: str, tmp_path: Path) -> None:
    await run_log_case(name, partial(journal_log_subject, tmp_path / "journal"))


@breaks("an_empty_log_has_nothing_to_read")
class InventsAMessage(JournalReader):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        yield from super().envelopes(start, end)
        yield 99, Envelope(publication_id="x", body=b"x")


@breaks("messages_come_back_as_they_were")
class LosesHeaders(JournalReader):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        for offset, envelope in super().envelopes(start, end):
            yield offset, msgspec.structs.replace(envelope, headers={})


@breaks("offsets_follow_the_order_of_appending")
class NumbersFromOne(JournalReader):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        for offset, envelope in super().envelopes(start, end):
            yield offset + 1, envelope


@breaks("a_range_is_read_from_start_to_before_end")
class IncludesTheEnd(JournalReader):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        return super().envelopes(start, None if end is None else end + 1)


@breaks("batches_are_cut_to_the_wanted_rows")
class IgnoresRows(JournalReader):
    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[Any]:
        return super().batches(start, end)


@breaks("what_is_not_durable_is_not_read")
class ReadsPastTheMark(JournalReader):
    """Takes whatever frames it finds for readable."""

    def high_water(self) -> HighWater:
        mark = super().high_water()
        data = self.layout.segment(mark.segment).read_bytes()
        from faregate.broker.journal import frame as frames

        header = frames.read_segment_header(data)
        assert header is not None
        offset, at_byte = mark.offset, SEGMENT_BYTES
        for frame in frames.scan(data, header):
            offset, at_byte = frame.base + frame.rows, frame.end
        return mark._replace(offset=offset, at_byte=at_byte)


@breaks("an_open_reader_sees_what_is_appended_later")
class NeverLooksAgain(JournalReader):
    """Remembers the first mark it saw."""

    def high_water(self) -> HighWater:
        self._seen = getattr(self, "_seen", None) or super().high_water()
        return self._seen


@breaks("an_offset_is_found_by_time")
class FindsTheTimeBefore(JournalReader):
    def offset_at(self, time: float) -> int:
        return max(0, super().offset_at(time) - 1)


@breaks("time_in_the_log_never_goes_back")
class ShowsTheWallClock(JournalReader):
    """Gives every batch the time it was read at, newest first."""

    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[Any]:
        return reversed(list(super().batches(start, end, rows=rows)))  # type: ignore[return-value]


@breaks("reading_what_was_removed_is_an_error", "reading_from_beyond_the_end_is_an_error")
class SkipsWhatIsGone(JournalReader):
    def _check_start(self, start: int, stop: int) -> None:
        pass


@breaks("a_named_reader_keeps_its_offset_and_never_goes_back")
class MovesReadersBack(JournalReader):
    def save_reader_offset(self, name: str, offset: int) -> None:
        self.forget_reader(name)
        super().save_reader_offset(name, offset)


@breaks("retention_waits_for_named_readers")
class KeepsNoReaders(JournalReader):
    def save_reader_offset(self, name: str, offset: int) -> None:
        pass

    def reader_offsets(self) -> list[ReaderOffset]:
        return []


@breaks("following_waits_for_what_comes")
class FollowsInCircles(JournalReader):
    async def follow(self, start: int, *, poll: float = 0.0) -> AsyncIterator[tuple[int, Envelope]]:
        while True:
            for found in self.envelopes(start):
                yield found


def test_every_case_has_a_fault() -> None:
    FAULTS.check()


@FAULTS.pairs()
async def test_a_reader_that_breaks_the_promise_is_caught(
    case: str, fault: type[JournalReader], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError):
        await run_log_case(case, partial(journal_log_subject, tmp_path / "journal", fault))
