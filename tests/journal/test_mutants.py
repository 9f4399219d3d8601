"""The checks of the journal catch journals that are broken on purpose: each passes on the real one, on mutants not.

What power losses leave is checked by the oracle in `rig`; checks that it does not have are here, and take the mutant.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from faregate.broker.durable import DurableBroker
from faregate.broker.entry import Entry
from faregate.broker.journal import frame as frames
from faregate.broker.journal import spool as spool_module
from faregate.broker.journal.high_water import HighWater
from faregate.broker.journal.items import Append, Item
from faregate.broker.journal.journal import Journal
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.recovery import Recovered
from faregate.broker.journal.spool import spool, waiting
from faregate.broker.queue import Queue
from faregate.errors import FaregateError, JournalFailed
from faregate.message import Envelope
from faregate.ports.log import OUTCOMES
from tests.journal import station as station_module
from tests.journal.disk import SimulatedDisk
from tests.journal.rig import (
    ROOT,
    SMALL_SEGMENT,
    Command,
    History,
    LogFactory,
    check_contents,
    check_every_state,
    check_recovery,
    open_log,
    run_script,
)
from tests.journal.station import NOTED, Station, noted, station
from tests.journal.test_damage import state_of

LAYOUT = Layout(ROOT)
SYNC: Command = ("sync", 0, 0)
TWO_GROUPS: list[Command] = [("append", 2, 10), SYNC, ("append", 1, 700), SYNC]
SPOOLED: list[Command] = [("spool", 8, 10), SYNC, ("append", 1, 10), SYNC]
TWO_SEGMENTS: list[Command] = [("spool", 1, 9000), SYNC, ("append", 1, 9000), SYNC]


def opens(kind: type[Log]) -> LogFactory:
    """Like `rig.open_log`, for a mutant."""

    def factory(disk: SimulatedDisk) -> Log:
        prepare(LAYOUT, disk)
        return kind(LAYOUT, disk, segment_size=SMALL_SEGMENT)

    return factory


# --- logs that promise too much ---------------------------------------------------------------------------


class SkipsSync(Log):
    """Moves the mark, and never syncs."""

    def sync(self) -> None:
        self._unsynced = 0
        self._move_mark(self._current())


class ConfirmsEarly(Log):
    """Says that a group is durable when it is written, and syncs it with the next one."""

    late = False

    def sync(self) -> None:
        if self.late:
            super().sync()
        self.late = True


class MovesMarkEarly(Log):
    """Lets readers see, and recovery expect, what is not synced yet."""

    def sync(self) -> None:
        self._move_mark(self._current())
        super().sync()


class SplitsBatches(Log):
    """Writes a batch of several frames as that many units: a part of it can be lost."""

    def append(self, envelopes: Sequence[Envelope], topics: Sequence[int], *, batch: bytes | None = None) -> range:
        first = self.next_offset
        for n in range(len(envelopes)):
            super().append(envelopes[n : n + 1], topics[n : n + 1], batch=batch)
        return range(first, self.next_offset)


class ForgetsBatches(Log):
    """Does not know after opening which batches of the spool it has."""

    def _recover(self) -> None:
        super()._recover()
        self.batches.clear()


class RollsWithoutBatches(Log):
    """Forgets them when a segment is rolled."""

    def roll(self) -> None:
        self._current().batches.clear()
        super().roll()


class ForgetsToReserve(Log):
    """Gives the offset of the last message away again after opening."""

    def _recover(self) -> None:
        super()._recover()
        self.next_offset = max(0, self.next_offset - 1)


MUTANTS: list[tuple[type[Log], list[Command], str]] = [
    (SkipsSync, TWO_GROUPS, "taken for damage|are lost"),
    (MovesMarkEarly, TWO_GROUPS, "taken for damage"),
    (SplitsBatches, SPOOLED, "part of a unit|would be appended"),
    (ForgetsBatches, SPOOLED, "would be appended again"),
    (RollsWithoutBatches, TWO_SEGMENTS, "would be appended again"),
    (ForgetsToReserve, TWO_GROUPS, "the mark does not cover|not found again"),
]


@pytest.mark.parametrize("script", [TWO_GROUPS, SPOOLED, TWO_SEGMENTS], ids=["groups", "spooled", "segments"])
def test_the_oracle_passes_the_real_log(script: list[Command]) -> None:
    assert check_every_state(script) > 20


@pytest.mark.parametrize(("mutant", "script", "what"), MUTANTS, ids=[mutant.__name__ for mutant, _, _ in MUTANTS])
def test_the_oracle_catches_a_log_that(mutant: type[Log], script: list[Command], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        check_every_state(script, opens(mutant))


def check_what_it_leaves(script: Sequence[Command], factory: LogFactory = open_log) -> None:
    """Only the writer is on trial: what it leaves is opened by the real log."""
    history = run_script(script, factory)
    for moment, left in history.disk.crash_states():
        check_recovery(left, history.confirmed(moment), history.units)


def test_the_oracle_catches_a_log_that_confirms_early() -> None:
    check_what_it_leaves(TWO_GROUPS)
    with pytest.raises(AssertionError, match="confirmed messages are lost"):
        check_what_it_leaves(TWO_GROUPS, opens(ConfirmsEarly))


# --- damage -----------------------------------------------------------------------------------------------


def damaged(offset_of: Callable[[bytes], int]) -> History:
    """A journal of confirmed messages with one bit flipped in its segment."""
    history = run_script([("append", 2, 300), SYNC, ("append", 1, 300), SYNC])
    left = history.disk.copy()
    path = LAYOUT.segment(0)
    data = bytearray(left.read(path))
    data[offset_of(bytes(data))] ^= 1
    left.replace(path, bytes(data))
    return History(left, history.units)


def in_the_first_body(data: bytes) -> int:
    return data.index(b"0.00.00.0") + 5


def in_the_last_body(data: bytes) -> int:
    return data.index(b"1.01.01.0") + 5


def check_damage_is_loud(offset_of: Callable[[bytes], int], factory: LogFactory = open_log) -> None:
    """Either somebody says that something is damaged, or everything is there, unchanged."""
    history = damaged(offset_of)
    try:
        factory(history.disk).close()
        check_contents(history.disk, history.units, history.units)
    except FaregateError as exc:
        assert LAYOUT.segment(0).name in str(exc), f"the error does not say where: {exc}"


class CutsWhatTheMarkCovers(Log):
    """Takes every damaged end for a torn one."""

    def _reopen(self, base: int, mark: HighWater | None) -> None:
        super()._reopen(base, None)


@pytest.mark.parametrize("where", [in_the_first_body, in_the_last_body])
def test_damage_is_loud_in_the_real_log(where: Callable[[bytes], int]) -> None:
    check_damage_is_loud(where)


@pytest.mark.parametrize("where", [in_the_first_body, in_the_last_body])
def test_a_journal_that_skips_the_crc_is_caught(where: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "is_sound", lambda data, frame: True)
    with pytest.raises(AssertionError, match="a message is not what was written"):
        check_damage_is_loud(where)


def test_a_log_that_cuts_a_damaged_tail_which_the_mark_covers_is_caught() -> None:
    with pytest.raises(AssertionError, match="confirmed messages are lost"):
        check_damage_is_loud(in_the_last_body, opens(CutsWhatTheMarkCovers))


# --- whole journals ---------------------------------------------------------------------------------------


def power_losses(disk: SimulatedDisk, start: int) -> Iterator[tuple[int, SimulatedDisk]]:
    """What is left after losing power at any moment from `start` on."""
    return disk.crash_states(range(start, len(disk.history) + 1))


def simulated(it: Station) -> SimulatedDisk:
    assert isinstance(it.disk, SimulatedDisk)
    return it.disk


def use(monkeypatch: pytest.MonkeyPatch, kind: type[Journal]) -> None:
    monkeypatch.setattr(station_module, "Journal", kind)


async def check_confirmed_is_there() -> None:
    """Once `publish` has returned, every power loss leaves the message."""
    async with station(segment_size=SMALL_SEGMENT) as it:
        disk = simulated(it)
        await it.publish(noted("before"))
        if it.broker._keeping is not None:
            await it.broker._keeping  # whose calls have the commit thread sync
        for name in ("a", "b"):
            await it.publish(noted(name))
            disk.note(name)
        moments = {str(step.note): n for n, step in enumerate(disk.history) if step.operation == "note"}
    for name, moment in moments.items():
        for _, left in power_losses(disk.at(moment + 1), moment + 1):
            assert name in stored(left), f"{name} was confirmed and is lost"


def stored(disk: SimulatedDisk) -> list[str]:
    """What the log holds once the journal was opened."""
    opened = Journal(ROOT, disk=disk, segment_size=SMALL_SEGMENT)
    found = [envelope.publication_id for _, envelope in JournalReader(ROOT, disk).envelopes()]
    opened.release()
    return found


class TellsBeforeTheSync(Journal):
    """Confirms a group that is written, and syncs it when the next one comes."""

    def _in_thread_commit(self, group: list[Item]) -> list[tuple[Item, Sequence[int], BaseException | None]]:
        real = self._log.sync
        real()
        self._log.sync = lambda: None  # type: ignore[method-assign]
        try:
            return super()._in_thread_commit(group)
        finally:
            self._log.sync = real  # type: ignore[method-assign]


async def test_a_publication_that_was_confirmed_survives_every_power_loss() -> None:
    await check_confirmed_is_there()


async def test_a_journal_that_confirms_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, TellsBeforeTheSync)
    with pytest.raises(AssertionError, match="was confirmed and is lost"):
        await check_confirmed_is_there()


# --- dead letters -----------------------------------------------------------------------------------------


async def check_a_dead_letter_is_somewhere() -> None:
    """A message that dies waits in its queue until its dead letter is durable, whenever power is lost."""
    async with station(segment_size=SMALL_SEGMENT) as it:
        disk = simulated(it)
        await it.publish(noted("a"))
        it.consume()
        delivery = await it.take("a")
        start = len(disk.history)
        await delivery.dead_letter("handler-failed", "it broke")
        await it.settled()
        end = len(disk.history)
    ways = 0
    for _, left in power_losses(disk.at(end), start):
        found, _ = state_of(left)
        assert any(name.startswith("a") for names in found.values() for name in names), "it is in no queue"
        ways += 1
    assert ways > 5, "there is nothing to be seen in so few states"


def marks_dead_early(broker: DurableBroker, queue: Queue, entry: Entry, reason: str, error: str) -> None:
    """Marks a message as dead, durably, and writes its dead letter after that."""
    broker._journal.settle_now(broker._records(queue, [entry], [OUTCOMES["dead"]], 0.0))
    broker._journal._sync_side_logs()
    broker._write_letter(broker._describe(queue, entry, reason, error), None, None)


async def test_a_message_that_dies_is_always_in_its_queue_or_a_dead_letter() -> None:
    await check_a_dead_letter_is_somewhere()


async def test_a_journal_that_marks_a_message_dead_before_its_dead_letter_is_durable_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DurableBroker, "_make_dead_letter", marks_dead_early)
    with pytest.raises(AssertionError, match="it is in no queue"):
        await check_a_dead_letter_is_somewhere()


# --- the spool --------------------------------------------------------------------------------------------

BATCH = [f"s{n}" for n in range(5)]


class RemembersNoPublications(Journal):
    """The real one, long after: other messages have pushed the batch out of what is known by publication id."""

    def recover(self, window: int = 0) -> Recovered:
        return super().recover(0)


async def check_spooled_once(monkeypatch: pytest.MonkeyPatch, kind: type[Journal]) -> None:
    """Whenever power is lost while a batch is taken in: afterwards it is in the log, whole and once."""
    monkeypatch.setattr(spool_module, "_ROWS_PER_FRAME", 2)
    use(monkeypatch, kind)
    async with station(segment_size=SMALL_SEGMENT) as it:
        disk = simulated(it)
        await it.publish(noted("before"))
        spool(LAYOUT, disk, [noted(name) for name in BATCH], "batch")
        start = len(disk.history)
        await take_in(it)
        end = len(disk.history)
    ways = 0
    for _, left in power_losses(disk.at(end), start):
        async with station(NOTED, disk=left, segment_size=SMALL_SEGMENT) as again:
            await take_in(again)
            found = [envelope.publication_id for _, envelope in JournalReader(ROOT, left).envelopes()]
            assert found == ["before", *BATCH], f"the log holds {found}"
            assert not waiting(LAYOUT, left), "the batch is still there, to be appended again"
        ways += 1
    assert ways > 5, "there is nothing to be seen in so few states"


async def take_in(it: Station) -> None:
    it.broker.take_in_spool()
    await it.settled()


class TakesBatchesTwice(RemembersNoPublications):
    """Does not look whether a batch is in the log already."""

    def spooled(self) -> list[Path]:
        self._log.batches.clear()
        return super().spooled()


class RemovesBatchesEarly(RemembersNoPublications):
    """Takes the file away before what was in it is synced."""

    def _in_thread_commit(self, group: list[Item]) -> list[tuple[Item, Sequence[int], BaseException | None]]:
        for item in group:
            if isinstance(item, Append) and item.batch is not None:
                self.disk.remove(item.batch)
        return super()._in_thread_commit(group)


async def test_a_spooled_batch_is_in_the_log_whole_and_once_after_every_power_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await check_spooled_once(monkeypatch, RemembersNoPublications)


@pytest.mark.parametrize("mutant", [TakesBatchesTwice, RemovesBatchesEarly])
async def test_a_journal_that_appends_a_batch_twice_or_loses_it_is_caught(
    mutant: type[Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match="the log holds"):
        await check_spooled_once(monkeypatch, mutant)


async def test_a_journal_that_loses_a_part_of_a_spooled_batch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = spool_module.read_spooled
    monkeypatch.setattr(
        spool_module,
        "read_spooled",
        lambda path, disk: real(path, disk)._replace(envelopes=real(path, disk).envelopes[:2]),
    )
    with pytest.raises(AssertionError, match="the log holds"):
        await check_spooled_once(monkeypatch, RemembersNoPublications)


# --- failing disks ----------------------------------------------------------------------------------------


class GoesOnAfterAFailedSync(Log):
    """Forgets that the disk failed: the next sync of the same pages may succeed without having written them."""

    def sync(self) -> None:
        try:
            super().sync()
        finally:
            self._failure = None


def check_failed_sync_is_final(kind: type[Log]) -> None:
    disk = SimulatedDisk()
    log = opens(kind)(disk)
    log.append([noted("a")], [-1])
    disk.fail("sync", 5, times=1)
    with pytest.raises(JournalFailed):
        log.sync()
    try:
        log.append([noted("b")], [-1])
        log.sync()
    except JournalFailed:
        return
    raise AssertionError("something was confirmed after a failed sync")


def test_a_failed_sync_is_final_in_the_real_log() -> None:
    check_failed_sync_is_final(Log)


def test_a_log_that_goes_on_after_a_failed_sync_is_caught() -> None:
    with pytest.raises(AssertionError, match="after a failed sync"):
        check_failed_sync_is_final(GoesOnAfterAFailedSync)
