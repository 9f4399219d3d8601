"""Appending once: what a crash in the middle leaves, and what is known of a query that comes again."""

from collections.abc import Iterator
from typing import Any

import pytest

from faregate.columns import to_batch
from faregate.errors import BatchDiffers, ConfigurationError, OutcomeUnknown
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.schemes import open_log
from faregate.transports.rabbitmq_stream import connection as connections
from tests.presence import address
from tests.rabbitmq_stream.streams import new_stream

pytestmark = pytest.mark.services


@pytest.fixture
def stream() -> Iterator[str]:
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM")) as url:
        yield url


def large(count: int) -> list[Envelope]:
    """About four of them fit into a frame."""
    return [Envelope(f"p{number}", body=bytes(200_000)) for number in range(count)]


def ids_in(log: Any) -> list[str]:
    return [envelope.publication_id for _, envelope in log.envelopes()]


class Cut:
    """Ends the connection when so many batches were sent."""

    def __init__(self, after: int) -> None:
        self.left = after
        self.frame = connections.batch_frame

    def __call__(self, publisher: int, number: int, entries: Any) -> Any:
        if not self.left:
            raise OSError("the cable is cut")
        self.left -= 1
        return self.frame(publisher, number, entries)


def test_the_rest_of_a_batch_is_appended_when_it_comes_again(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log, messages = open_log(stream), large(30)
    with monkeypatch.context() as patched:
        patched.setattr(connections, "batch_frame", Cut(3))
        with pytest.raises(OutcomeUnknown, match=r"30 messages .* were not confirmed: the cable is cut"):
            log.append(messages, "batch")
    while len(ids_in(log)) < 1:
        pass  # the broker takes in what it got
    log.append(messages, "batch")
    assert ids_in(log) == [each.publication_id for each in messages]
    log.append([*messages, *large(5)], "batch")
    assert len(ids_in(log)) == 30, "a batch that is complete took in more"


def test_many_names_are_remembered(stream: str) -> None:
    log = open_log(stream)
    for _ in range(2):
        for number in range(255):
            log.append([Envelope(f"p{number}")], f"name {number} ü")
    assert ids_in(log) == [f"p{number}" for number in range(255)]


def staged(log: Any, text: str, batch: int = 0) -> Any:
    return log.stage("query", batch, "0", [to_batch([Envelope(text, body=text.encode())], [-1], [0], 0)])


def test_a_commit_that_was_cut_is_finished(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(stream)
    pieces = [to_batch([each], [-1], [0], 0) for each in large(12)]
    prepared = log.stage("query", 0, "0", pieces)
    with monkeypatch.context() as patched:
        patched.setattr(connections, "batch_frame", Cut(3))  # the note, and two of the messages
        with pytest.raises(OutcomeUnknown):
            log.commit("query", 0, [prepared], once=True)
    while not ids_in(log):
        pass  # the broker takes in what it got
    other = open_log(stream)
    with pytest.raises(BatchDiffers, match="had 12 messages"):
        other.commit("query", 0, [staged(log, "another")], once=True)
    other.commit("query", 0, [prepared], once=True)
    assert ids_in(log) == [f"p{number}" for number in range(12)]


def test_a_batch_of_which_nothing_was_published_may_be_another(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(stream)
    first = staged(log, "first")
    with monkeypatch.context() as patched:
        patched.setattr(connections, "batch_frame", Cut(1))
        with pytest.raises(OutcomeUnknown):
            log.commit("query", 0, [first], once=True)
    open_log(stream).commit("query", 0, [staged(log, "another")], once=True)
    assert ids_in(log) == ["another"]


def test_a_batch_that_nobody_remembers_is_refused(stream: str) -> None:
    log = open_log(stream)
    log.commit("query", 5, [staged(log, "a", 5)], once=True)
    with pytest.raises(BatchDiffers, match="batch 4 of query query was committed before and is no longer remembered"):
        log.commit("query", 4, [staged(log, "b", 4)], once=True)
    assert ids_in(log) == ["a"]


def test_a_query_that_the_broker_has_forgotten_is_known(stream: str) -> None:
    with new_stream(address("FAREGATE_TEST_RABBITMQ_STREAM"), stream_max_segment_size_bytes="20000") as url:
        log = open_log(url)
        log.commit("query", 0, [staged(log, "a")], once=True)
        for number in range(300):
            log.append([Envelope(f"{number}", body=bytes(1000))], f"name {number}")
        open_log(url).commit("query", 0, [staged(log, "a")], once=True)
        assert ids_in(log).count("a") == 1


def test_dead_letters_need_a_store(stream: str) -> None:
    letter = DeadLetter.of("reader", Envelope("p"), "failed", "it is bad", 5.0, queue="q", tries=3)
    with pytest.raises(ConfigurationError, match="keeps no dead letters: give the node a store"):
        open_log(stream).stage("query", 0, "0", [[letter]])
