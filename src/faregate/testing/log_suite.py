"""What every log transport promises, as named cases; used like `queue_suite`.

A subject appends envelopes durably and gives a reader; a case raises AssertionError when a promise is broken. What a
log may be able to do beyond this is in `log_capability_suite`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faregate import ids
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.retention import Retention, apply_retention
from faregate.errors import OffsetGone
from faregate.message import Envelope
from faregate.ports.log import LogTransport
from faregate.testing.cases import Cases, refused, run_case
from faregate.transports.journal_log import JournalLog


@dataclass
class LogSubject:
    """A log under test."""

    reader: LogTransport
    append: Callable[[Sequence[Envelope]], None]
    """Append durably."""
    write: Callable[[Sequence[Envelope]], None]
    """Append without making it durable."""
    pass_time: Callable[[float], None]
    """Let seconds pass on the log's clock."""
    now: Callable[[], float]
    drop_before_last_segment: Callable[[], None]
    """Remove the oldest messages as retention would, all but the newest few."""


MakeLog = Callable[[], AbstractAsyncContextManager[LogSubject]]
LOG_CASES = Cases[LogSubject]()
case = LOG_CASES.add


async def run_log_case(name: str, make: MakeLog) -> None:
    """Run one case against a fresh subject."""
    await run_case(LOG_CASES[name], make)


@asynccontextmanager
async def journal_log_subject(
    path: Path, reader: Callable[[Path], LogTransport] = JournalLog, segment_size: int = 64 * 1024
) -> AsyncIterator[LogSubject]:
    """A journal with small segments."""
    disk, layout = RealDisk(), Layout(path)
    prepare(layout, disk)
    clock = [1_700_000_000_000_000]
    logs: list[Log] = []

    def write(envelopes: Sequence[Envelope]) -> None:
        if not logs:  # where nothing is appended from within, others may open the journal
            logs.append(Log(layout, disk, segment_size=segment_size, clock=lambda: clock[0]))
        logs[0].append(envelopes, [-1] * len(envelopes))

    def append(envelopes: Sequence[Envelope]) -> None:
        write(envelopes)
        logs[0].sync()

    def pass_time(seconds: float) -> None:
        clock[0] += round(seconds * 1_000_000)

    def drop() -> None:
        apply_retention(layout, disk, JournalReader(path, disk), Retention(seconds=0), [], clock[0] + 1)

    try:
        yield LogSubject(reader(path), append, write, pass_time, lambda: clock[0] / 1_000_000, drop)
    finally:
        for log in logs:
            log.close()


def message(text: str, **more: object) -> Envelope:
    fields: dict[str, Any] = {"type": "Noted", "source": "author", **more}
    return Envelope(publication_id=ids.root_id(), body=text.encode(), **fields)


def texts(subject: LogSubject, start: int = 0, end: int | None = None) -> list[str]:
    return [envelope.body.decode() for _, envelope in subject.reader.envelopes(start, end)]


def fill(subject: LogSubject, count: int) -> None:
    """Enough messages for several segments."""
    for first in range(0, count, 50):
        subject.append([message(f"{number}", headers={"pad": "x" * 200}) for number in range(first, first + 50)])


@case
def an_empty_log_has_nothing_to_read(subject: LogSubject) -> None:
    assert subject.reader.earliest() == subject.reader.latest() == 0
    assert texts(subject) == []


@case
def messages_come_back_as_they_were(subject: LogSubject) -> None:
    sent = Envelope(
        publication_id="p", type="Noted", kind="command", source="s", body=b"\x00\xff", recipients=("a", "b"),
        destination="d", correlation_id="c", causation_id="m", depth=7, key="k", attempt_id="t", sent_at=1.5,
        deliver_at=2.25, expires_at=3.125, redeliveries=2, replay=1, content_type="x/y", content_encoding="gzip",
        key_id="i", algorithm="l", payload_ref="r", body_digest=b"\x01" * 16, traceparent="00-1", headers={"h": "ü"},
    )  # fmt: skip
    subject.append([sent, message("plain")])
    [(first, got), (second, plain)] = subject.reader.envelopes()
    assert got == sent, f"{got} is not {sent}"
    assert (first, second) == (0, 1)
    assert (plain.destination, plain.headers, plain.deliver_at) == (None, {}, None)


@case
def offsets_follow_the_order_of_appending(subject: LogSubject) -> None:
    fill(subject, 1000)
    offsets = [offset for offset, _ in subject.reader.envelopes()]
    assert offsets == list(range(1000)), "offsets have gaps or are out of order"
    assert texts(subject) == [f"{number}" for number in range(1000)]


@case
def a_range_is_read_from_start_to_before_end(subject: LogSubject) -> None:
    fill(subject, 500)
    assert texts(subject, 120, 275) == [f"{number}" for number in range(120, 275)]
    assert texts(subject, 499) == ["499"]
    assert texts(subject, 500) == []


@case
def batches_are_cut_to_the_wanted_rows(subject: LogSubject) -> None:
    fill(subject, 500)
    batches = list(subject.reader.batches(10, 490, rows=20))
    assert max(batch.num_rows for batch in batches) <= 20
    offsets = [offset for batch in batches for offset in batch.column("offset").to_pylist()]
    assert offsets == list(range(10, 490))


@case
def messages_are_loaded_by_their_offsets(subject: LogSubject) -> None:
    fill(subject, 1000)
    found = [envelope.body.decode() for envelope in subject.reader.load([3, 4, 470, 999])]
    assert found == ["3", "4", "470", "999"], f"loaded {found}"


@case
def parts_are_the_log_once(subject: LogSubject) -> None:
    fill(subject, 1000)
    for first, last, start, end in ((None, None, 0, 1000), (120, 875, 120, 875), (700, 5000, 700, 1000)):
        parts = subject.reader.parts(first, last)
        offsets = [offset for part in parts for offset in range(part.start, part.end)]
        assert offsets == list(range(start, end)), f"the parts are {parts}"


@case
def what_is_not_durable_is_not_read(subject: LogSubject) -> None:
    subject.append([message("durable")])
    subject.write([message("not yet")])
    assert texts(subject) == ["durable"], "read past what is synced"
    assert subject.reader.latest() == 1


@case
def an_open_reader_sees_what_is_appended_later(subject: LogSubject) -> None:
    subject.append([message("a")])
    assert texts(subject) == ["a"]
    fill(subject, 1000)
    assert len(texts(subject)) == 1001
    assert texts(subject, 1000) == ["999"]


@case
def an_offset_is_found_by_time(subject: LogSubject) -> None:
    start = subject.now()
    for number in range(5):
        subject.append([message(f"{number}")])
        subject.pass_time(10)
    assert subject.reader.offset_at(start - 100) == 0
    assert subject.reader.offset_at(start + 20) == 2
    assert subject.reader.offset_at(start + 21) == 3
    assert subject.reader.offset_at(start + 1000) == 5


@case
def time_in_the_log_never_goes_back(subject: LogSubject) -> None:
    subject.append([message("a")])
    subject.pass_time(10)
    subject.append([message("b")])
    subject.pass_time(-3600)
    subject.append([message("c")])
    times = [time for batch in subject.reader.batches() for time in batch.column("time").to_pylist()]
    assert times == sorted(times), "the clock was set back and the log with it"


@case
def reading_what_was_removed_is_an_error(subject: LogSubject) -> None:
    fill(subject, 1000)
    subject.drop_before_last_segment()
    earliest = subject.reader.earliest()
    assert 0 < earliest < 1000, f"the earliest offset is {earliest}"
    assert texts(subject, earliest) == [f"{number}" for number in range(earliest, 1000)]
    _is_gone(subject, 0)
    _is_gone(subject, earliest - 1)


@case
def reading_from_beyond_the_end_is_an_error(subject: LogSubject) -> None:
    subject.append([message("a")])
    _is_gone(subject, 2)


def _is_gone(subject: LogSubject, start: int) -> None:
    with refused(OffsetGone, f"reading from {start} was no error", naming=str(start)):
        texts(subject, start)


@case
def a_named_reader_keeps_its_offset_and_never_goes_back(subject: LogSubject) -> None:
    fill(subject, 100)
    subject.reader.save_reader_offset("spark", 40)
    subject.reader.save_reader_offset("other", 7)
    subject.reader.save_reader_offset("spark", 30)
    found = {each.name: each.offset for each in subject.reader.reader_offsets()}
    assert found == {"spark": 40, "other": 7}, f"offsets are {found}"
    subject.reader.forget_reader("other")
    subject.reader.forget_reader("unknown")
    assert [each.name for each in subject.reader.reader_offsets()] == ["spark"]


@case
def retention_waits_for_named_readers(subject: LogSubject) -> None:
    fill(subject, 1000)
    subject.reader.save_reader_offset("slow", 0)
    subject.drop_before_last_segment()
    assert subject.reader.earliest() == 0, "what a named reader has not read was removed"
    subject.reader.save_reader_offset("slow", 1000)
    subject.drop_before_last_segment()
    assert subject.reader.earliest() > 0, "a named reader that has read everything still holds the log"


@case
async def following_waits_for_what_comes(subject: LogSubject) -> None:
    subject.append([message("a")])
    following = subject.reader.follow(0)
    assert (await anext(following))[1].body == b"a"
    waiting = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0)
    assert not waiting.done(), "something came that was not appended"
    subject.append([message("b")])
    offset, envelope = await waiting
    assert (offset, envelope.body) == (1, b"b")
    await following.aclose()  # type: ignore[attr-defined]
