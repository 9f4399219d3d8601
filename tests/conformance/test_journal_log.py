"""The journal keeps every promise of the log port, and for every promise a reader that breaks it is caught."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faregate.broker.journal.frame import SEGMENT_BYTES
from faregate.broker.journal.high_water import HighWater
from faregate.broker.journal.views import ClosedJournal
from faregate.columns import to_envelopes
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import LogPart, Outcomes, Piece, ReaderOffset, Staged, Stretch, Waits
from faregate.ports.queue import Binding
from faregate.ports.topology import Reading
from faregate.testing.log_capability_suite import CAPABILITY_CASES, capability_cases, run_capability_case
from faregate.testing.log_suite import LOG_CASES, journal_log_subject, run_log_case
from faregate.transports.journal_log import JournalLog
from tests.conformance.faults import Faults

FAULTS = Faults([*LOG_CASES, *CAPABILITY_CASES])
breaks = FAULTS.breaks


@pytest.mark.parametrize("name", LOG_CASES)
async def test_the_journal_as_a_log(name: str, tmp_path: Path) -> None:
    await run_log_case(name, partial(journal_log_subject, tmp_path / "journal"))


@pytest.mark.parametrize("name", CAPABILITY_CASES)
async def test_the_capabilities_of_the_journal_as_a_log(name: str, tmp_path: Path) -> None:
    await run_capability_case(name, partial(journal_log_subject, tmp_path / "journal"))


def test_a_log_passes_the_parts_of_the_capabilities_that_it_has() -> None:
    class Readable:
        """A log that is a source and nothing else."""

    assert capability_cases(JournalLog) == list(CAPABILITY_CASES)
    assert capability_cases(Readable) == []


@breaks("an_empty_log_has_nothing_to_read")
class InventsAMessage(JournalLog):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        yield from super().envelopes(start, end)
        yield 99, Envelope(publication_id="x", body=b"x")


@breaks("messages_come_back_as_they_were")
class LosesHeaders(JournalLog):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        for offset, envelope in super().envelopes(start, end):
            yield offset, msgspec.structs.replace(envelope, headers={})


@breaks("offsets_follow_the_order_of_appending")
class NumbersFromOne(JournalLog):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        for offset, envelope in super().envelopes(start, end):
            yield offset + 1, envelope


@breaks("a_range_is_read_from_start_to_before_end")
class IncludesTheEnd(JournalLog):
    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        return super().envelopes(start, None if end is None else end + 1)


@breaks("batches_are_cut_to_the_wanted_rows")
class IgnoresRows(JournalLog):
    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[Any]:
        return super().batches(start, end)


@breaks("what_is_not_durable_is_not_read")
class ReadsPastTheMark(JournalLog):
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
class NeverLooksAgain(JournalLog):
    """Remembers the first mark it saw."""

    def high_water(self) -> HighWater:
        self._seen = getattr(self, "_seen", None) or super().high_water()
        return self._seen


@breaks("a_stretch_says_nothing_wrong_of_its_messages")
class ForgetsTheTail(JournalLog):
    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        return (each._replace(end=each.end - 1) for each in super().stretches(start, end))


@breaks("a_stretch_says_nothing_wrong_of_its_messages")
class NamesOtherTypes(JournalLog):
    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        return (each._replace(types=["Type0"]) for each in super().stretches(start, end))


@breaks("a_stretch_says_nothing_wrong_of_its_messages")
class DeniesKeys(JournalLog):
    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        return (each._replace(keys=lambda key: key == "key-1") for each in super().stretches(start, end))


@breaks("a_stretch_says_nothing_wrong_of_its_messages")
class DeniesCorrelations(JournalLog):
    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        return (each._replace(correlations=lambda text: False) for each in super().stretches(start, end))


@breaks("an_offset_is_found_by_time")
class FindsTheTimeBefore(JournalLog):
    def offset_at(self, time: float) -> int:
        return max(0, super().offset_at(time) - 1)


@breaks("time_in_the_log_never_goes_back")
class ShowsTheWallClock(JournalLog):
    """Gives every batch the time it was read at, newest first."""

    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[Any]:
        return reversed(list(super().batches(start, end, rows=1)))  # type: ignore[return-value]


@breaks("reading_what_was_removed_is_an_error", "reading_from_beyond_the_end_is_an_error")
class SkipsWhatIsGone(JournalLog):
    def _check_start(self, start: int, stop: int) -> None:
        pass


@breaks("a_named_reader_keeps_its_offset_and_never_goes_back")
class MovesReadersBack(JournalLog):
    def save_reader_offset(self, name: str, offset: int) -> None:
        self.forget_reader(name)
        super().save_reader_offset(name, offset)


@breaks("retention_waits_for_named_readers")
class KeepsNoReaders(JournalLog):
    def save_reader_offset(self, name: str, offset: int) -> None:
        pass

    def reader_offsets(self) -> list[ReaderOffset]:
        return []


@breaks("following_waits_for_what_comes")
class FollowsInCircles(JournalLog):
    async def follow(self, start: int, *, poll: float = 0.0) -> AsyncIterator[tuple[int, Envelope]]:
        while True:
            for found in self.envelopes(start):
                yield found


@breaks("messages_are_loaded_by_their_offsets")
class LoadsNeighbours(JournalLog):
    def load(self, offsets: list[int]) -> list[Envelope]:
        return super().load([max(0, offset - 1) for offset in offsets])


@breaks("parts_are_the_log_once")
class PartsOverlap(JournalLog):
    def parts(self, start: int | None = None, end: int | None = None) -> list[LogPart]:
        return [LogPart(each.base, each.start, each.end + 1, each.settled) for each in super().parts(start, end)]


@breaks("a_name_is_appended_once")
class ForgetsNames(JournalLog):
    def append(self, envelopes: Sequence[Envelope], name: str | None = None) -> None:
        super().append(envelopes)


@breaks("what_has_no_name_is_new")
class HasOneNameForAll(JournalLog):
    def append(self, envelopes: Sequence[Envelope], name: str | None = None) -> None:
        super().append(envelopes, name or "unnamed")


@breaks("what_was_appended_waits_or_can_be_read")
class ForgetsWhatWaits(JournalLog):
    def waiting(self) -> Iterator[Envelope]:
        return iter(())


@breaks("a_commit_takes_what_it_names_in_its_order")
class CommitsInItsOwnOrder(JournalLog):
    def commit(self, origin: str, batch: int, staged: Sequence[Staged], *, once: bool) -> None:
        super().commit(origin, batch, sorted(staged, key=lambda each: each.name or ""), once=once)


@breaks("a_batch_is_committed_once", "what_is_discarded_is_never_read")
class AppendsWhatIsStaged(JournalLog):
    """Has one phase for two."""

    def stage(self, origin: str, batch: int, attempt: str, pieces: Iterable[Piece]) -> Staged:
        self.append([envelope for piece in pieces for envelope in to_envelopes(piece)])
        return super().stage(origin, batch, attempt, [])


@breaks("another_batch_of_the_same_number_is_refused")
class KnowsBatchesByNumberAlone(JournalLog):
    def commit(self, origin: str, batch: int, staged: Sequence[Staged], *, once: bool) -> None:
        super().commit(origin, batch, staged, once=False)


@breaks("dead_letters_are_staged_with_the_messages")
class LosesDeadLetters(JournalLog):
    def dead_letters(self, start: int) -> Iterator[list[DeadLetter]]:
        return iter(())


@breaks("a_subscription_that_is_new_reads_the_log_from_its_beginning", "a_log_view_begins_with_what_waits_in_the_queue")
class BeginsAtTheEnd(JournalLog):
    def handover(self) -> ClosedJournal:
        log = self

        class Held(ClosedJournal):
            def take_log(self, binding: Binding) -> Reading:
                self.bind(binding)
                return self._hand_over(binding.queue, "log", log.latest(), 0)

        return Held(self.path)


@breaks("a_queue_gets_back_what_is_not_done")
class FillsTheQueueWithAll(JournalLog):
    def handover(self) -> ClosedJournal:
        class Held(ClosedJournal):
            def take_queue(self, binding: Binding, start: int, done: Outcomes, parked: Iterable[Waits] = ()) -> Reading:
                return super().take_queue(binding, start, lambda messages: {}, parked)

        return Held(self.path)


@breaks("what_became_of_messages_is_told")
class TellsWhatWasSettledLater(JournalLog):
    def settlements(self, part: LogPart) -> Any:
        return super().settlements(LogPart(part.base, part.start, part.end, 1 << 20))


def test_every_case_has_a_fault() -> None:
    FAULTS.check()


@FAULTS.pairs()
async def test_a_reader_that_breaks_the_promise_is_caught(case: str, fault: type[JournalLog], tmp_path: Path) -> None:
    run = run_log_case if case in LOG_CASES else run_capability_case
    with pytest.raises(AssertionError):
        await run(case, partial(journal_log_subject, tmp_path / "journal", fault))
