"""Sealing: a rolled segment becomes columns, and nobody who reads or writes notices anything but speed."""

import asyncio
import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import faregate as fg
from faregate.broker.journal import dead_letters, sealing
from faregate.broker.journal import frame as frames
from faregate.broker.journal import log as log_module
from faregate.broker.journal.bloom import Bloom, bloom_of
from faregate.broker.journal.content import Rows
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.high_water import HighWater
from faregate.broker.journal.journal import Journal
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.retention import Retention, apply_retention
from faregate.broker.journal.sealing import Rewrite, Sealer, remove_garbage, seal_all
from faregate.broker.journal.verify import inspect
from faregate.errors import JournalCorrupt, JournalTooNew
from tests.journal.disk import SimulatedDisk
from tests.journal.rig import ROOT, Command, check_recovery, contents, envelope, open_log, run_script

LAYOUT = Layout(ROOT)
SCRIPT: list[Command] = [
    ("append", 1, 10), ("sync", 0, 0), ("append", 4, 900), ("dead", 2, 0), ("sync", 0, 0), ("spool", 8, 100),
    ("append", 1, 9000), ("sync", 0, 0), ("append", 3, 3000), ("sync", 0, 0), ("append", 1, 9000), ("sync", 0, 0),
    ("append", 2, 100), ("sync", 0, 0),
]  # fmt: skip
"""Two segments that are rolled, and one that is written to."""


def written() -> SimulatedDisk:
    return run_script(SCRIPT).disk.copy()


def all_of(disk: SimulatedDisk) -> object:
    """Every answer that a reader gives."""
    reader = JournalReader(ROOT, disk)
    offsets = [offset for offset, _ in reader.envelopes()]
    batches = [row for batch in reader.batches() for row in batch.to_pylist()]
    times = sorted({row["time"].timestamp() for row in batches})
    return (
        contents(disk),
        batches,
        reader.load(offsets),
        [reader.load(offsets[start::3]) for start in range(3)],
        [reader.offset_at(moment) for moment in times],
        [[row["offset"] for row in batch.to_pylist()] for batch in reader.batches(offsets[5], offsets[9])],
        (reader.earliest(), reader.latest()),
    )


def forms(disk: SimulatedDisk) -> list[int]:
    headers = [frames.read_segment_header(disk.read(LAYOUT.segment(base))) for base in LAYOUT.segment_bases(disk)]
    return [header.form for header in headers if header is not None]


# --- the same answers ---------------------------------------------------------------------------------------------


def check_same_answers() -> None:
    disk = written()
    before = all_of(disk)
    assert forms(disk) == [frames.HOT] * 3
    assert seal_all(LAYOUT, disk) == 2
    assert forms(disk) == [frames.SEALED, frames.SEALED, frames.HOT]
    assert all_of(disk) == before, "sealing changed an answer"
    assert seal_all(LAYOUT, disk) == 0, "what is sealed is sealed again"
    log = open_log(disk)
    assert log.batches, "a spooled batch would be appended again"
    log.close()


def test_both_forms_give_the_same_answers() -> None:
    check_same_answers()


def test_a_sealed_segment_is_sound_and_its_footer_says_what_is_in_each_frame(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "j")
    journal = Journal(layout.root, segment_size=8192)
    for number in range(40):
        spooled = number.to_bytes(16, "big") if number % 3 else None
        journal._log.append([envelope(f"m{number}", 500, key=f"k{number}", correlation_id="c")], [-1], batch=spooled)
        journal._log.sync()
    journal.release()
    assert seal_all(layout, journal.disk) > 1
    assert inspect(layout.root).problems == []
    base = layout.segment_bases(journal.disk)[0]
    footer = JournalReader(layout.root).footer(base)
    assert footer is not None
    [one] = footer.ranges
    assert (one.first, one.last, one.topics, one.types, one.sources) == (0, footer.end - 1, [-1], ["Noted"], ["author"])
    assert footer.first_time == one.first_time <= one.last_time == footer.last_time
    assert all(Bloom(one.keys).may_hold(f"k{number}") for number in range(footer.end))
    assert not all(Bloom(one.keys).may_hold(f"other{number}") for number in range(20))
    assert one.correlations == bloom_of(pa.array(["c"]))


def test_a_footer_that_is_kept_keeps_no_file_open(tmp_path: Path) -> None:
    """An archive keeps those of all segments."""
    layout = Layout(tmp_path / "j")
    prepare(layout, RealDisk())
    log = Log(layout, RealDisk())
    for number in range(12):
        log.append([envelope(f"m{number}", key="k")], [-1])
        log.roll()
    log.close()
    Log(layout, RealDisk()).close()  # which begins a segment behind the last one
    assert seal_all(layout, RealDisk()) == 12
    reader = JournalReader(layout.root)
    before = len([*Path("/proc/self/fd").iterdir()])
    kept = [reader.footer(base) for base in layout.segment_bases(RealDisk())[:-1]]
    reader._open.clear()
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    assert [Bloom(footer.ranges[0].keys).may_hold("k") for footer in kept if footer] == [True] * 12


@pytest.mark.parametrize("name", ["keys", "correlations", "types", "sources", "topics", "first_time"])
def test_what_a_footer_says_wrongly_of_a_frame_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = written()
    true = sealing.range_of
    wrong: dict[str, Any] = {"keys": bloom_of(pa.array(["other"])), "correlations": bloom_of(pa.array(["other"]))}
    wrong |= {"types": ["Other"], "sources": ["other"], "topics": [7], "first_time": 999}
    monkeypatch.setattr(
        sealing, "range_of", lambda *given: msgspec.structs.replace(true(*given), **{name: wrong[name]})
    )
    assert seal_all(LAYOUT, disk) > 0
    assert any("something else of its frames" in each.what for each in inspect(ROOT, disk).problems)


def test_large_frames_are_cut_and_small_ones_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "FRAME_ROWS", 7)
    monkeypatch.setattr(sealing, "_SLICE_ROWS", 3)
    check_same_answers()


MUTANTS: dict[str, Any] = {
    "a row is lost": (Rows, "batch", lambda self, real=Rows.batch: real(self).slice(0, max(1, self.count - 1))),
    "dead letters are lost": (sealing.Segment, "copy", lambda self, frame, body, types: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_sealing_that_loses_something_is_refused(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = written()
    before = all_of(disk)
    target, name, broken = MUTANTS[mutant]
    monkeypatch.setattr(target, name, broken)
    with pytest.raises(JournalCorrupt, match="stays as it is"):
        seal_all(LAYOUT, disk)
    monkeypatch.undo()
    assert all_of(disk) == before
    assert [name for name in disk.list(LAYOUT.segments) if name.startswith(".")] == []


def test_sealing_that_changes_an_envelope_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rows.batch

    def late(self: Rows) -> Any:
        self._times = [moment + 1 for moment in self._times]
        return real(self)

    monkeypatch.setattr(Rows, "batch", late)
    disk = written()
    monkeypatch.undo()
    before = all_of(disk)
    monkeypatch.setattr(Rows, "batch", late)
    seal_all(LAYOUT, disk)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="sealing changed an answer"):
        assert all_of(disk) == before, "sealing changed an answer"


# --- power losses, and orphans ------------------------------------------------------------------------------------


def test_power_lost_while_sealing_leaves_one_valid_form() -> None:
    history = run_script(SCRIPT)
    disk = history.disk
    start = len(disk.history)
    for base in LAYOUT.segment_bases(disk)[:-1]:
        rewrite = Rewrite(LAYOUT, disk, base)
        for _ in rewrite.write():
            pass
        assert rewrite.put_in_place()
    ways = 0
    for moment, left in disk.crash_states(range(start, len(disk.history) + 1)):
        remove_garbage(LAYOUT, left)
        assert [name for name in left.list(LAYOUT.segments) if name.endswith(".sealing")] == []
        check_recovery(left, history.confirmed(moment), history.units)
        ways += 1
    assert ways > 20


def test_renaming_before_the_sync_is_caught() -> None:
    history = run_script(SCRIPT)
    disk = history.disk
    start = len(disk.history)
    rewrite = Rewrite(LAYOUT, disk, 0)
    real = disk.create

    class Unsynced:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def sync(self) -> None: ...

    disk.create = lambda path, size: Unsynced(real(path, size))  # type: ignore[assignment,return-value]
    for _ in rewrite.write():
        pass
    assert rewrite.put_in_place()
    with pytest.raises(AssertionError):
        for moment, left in disk.crash_states(range(start, len(disk.history) + 1)):
            remove_garbage(LAYOUT, left)
            check_recovery(left, history.confirmed(moment), history.units)


def test_a_rewrite_of_what_has_changed_meanwhile_renames_nothing() -> None:
    for change in ("removed", "compacted", "sealed by another"):
        disk = written()
        rewrite = Rewrite(LAYOUT, disk, 0)
        for _ in rewrite.write():
            pass
        if change == "removed":
            disk.remove(LAYOUT.segment(0))
        elif change == "compacted":
            reader = JournalReader(ROOT, disk)
            apply_retention(LAYOUT, disk, reader, Retention(seconds=0), [(1, 1)], 1 << 60)
        else:
            seal_all(LAYOUT, disk)
        before = disk.files().get(LAYOUT.segment(0))
        assert not rewrite.put_in_place()
        assert disk.files().get(LAYOUT.segment(0)) == before
        assert [name for name in disk.list(LAYOUT.segments) if name.startswith(".")] == []


def test_what_a_killed_writer_left_aside_is_removed_at_the_next_opening() -> None:
    disk = written()
    disk.replace(LAYOUT.segments / ".00000000000000000000-0011223344aa.sealing", b"half")
    disk.replace(LAYOUT.segments / "notes.txt", b"not ours")
    journal = Journal(ROOT, disk=disk, segment_size=16 * 1024)
    journal.release()
    assert "notes.txt" in disk.list(LAYOUT.segments)
    assert not any(name.endswith(".sealing") for name in disk.list(LAYOUT.segments))


# --- readers ------------------------------------------------------------------------------------------------------


class Stale(JournalReader):
    """Takes its mark before a segment is rolled and sealed, and looks at the segment afterwards."""

    old: HighWater

    def high_water(self) -> HighWater:
        return self.old


def test_a_reader_that_took_the_mark_before_its_segment_was_sealed_sees_no_corruption() -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    for number in range(3):
        log.append([envelope(f"m{number}", 3000)], [-1])
        log.sync()
    mark = JournalReader(ROOT, disk).high_water()
    for number in range(3, 9):
        log.append([envelope(f"m{number}", 3000)], [-1])
        log.sync()
    assert seal_all(LAYOUT, disk) >= 1
    stale = Stale(ROOT, disk)
    stale.old = mark
    assert [each.publication_id for _, each in stale.envelopes()] == ["m0", "m1", "m2"]
    assert [each.publication_id for each in stale.load([0, 2])] == ["m0", "m2"]
    log.close()


def test_a_reader_that_is_in_a_segment_while_it_is_sealed_sees_every_message_once() -> None:
    disk = written()
    reader = JournalReader(ROOT, disk)
    expected = [offset for offset, _ in reader.envelopes()]
    seen: list[int] = []
    for number, batch in enumerate(reader.batches(0, rows=1)):
        seen += batch.column("offset").to_pylist()
        if number == 1:
            seal_all(LAYOUT, disk)
    assert seen == expected
    assert [each.publication_id for each in reader.load(expected)] == [
        each.publication_id for each in JournalReader(ROOT, disk).load(expected)
    ]


class Noted(fg.Event):
    number: int
    text: str


@pytest.mark.parametrize("many", [1, 25])
async def test_while_segments_are_sealed_under_it_a_follower_sees_every_message_once(tmp_path: Path, many: int) -> None:
    author, reader = fg.Node("author"), fg.Node("reader")
    handled: list[int] = []

    @reader.on(Noted, source="author")
    async def read(noted: Noted) -> None:
        handled.append(noted.number)

    from faregate.transports.journal import JournalTransport

    transport = JournalTransport(str(tmp_path / "j"), segment_size=32 * 1024)
    seen: list[int] = []
    async with fg.Bus(transport, nodes=[author, reader]) as bus:

        async def follow() -> None:
            async for offset, _ in JournalReader(tmp_path / "j").follow(0, poll=0.001):
                seen.append(offset)
                if len(seen) == 1500:
                    return

        following = asyncio.create_task(follow())
        for first in range(0, 1500, many):
            notes = [Noted(number=number, text="x" * 100) for number in range(first, first + many)]
            await bus.publish_many(notes, node="author")
        async with asyncio.timeout(60):
            await following
            await bus.idle()
            while not is_sealed_but_last(transport.journal):  # noqa: ASYNC110 (a thread does it)
                await asyncio.sleep(0.01)
    assert seen == list(range(1500)) and sorted(handled) == list(range(1500))
    found = [envelope.body for _, envelope in JournalReader(tmp_path / "j").envelopes()]
    assert len(set(found)) == 1500
    assert inspect(tmp_path / "j").problems == []


def is_sealed_but_last(journal: Journal) -> bool:
    bases = journal.layout.segment_bases(journal.disk)
    reader = JournalReader(journal.layout.root)
    return len(bases) > 3 and all(reader.is_sealed(base) for base in bases[:-1])


# --- what goes wrong ----------------------------------------------------------------------------------------------


def sealer(disk: SimulatedDisk) -> Sealer:
    return Sealer(LAYOUT, disk, lambda function: function())


def until(is_so: Any) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def test_a_full_disk_leaves_the_segment_as_it_is_and_it_is_sealed_later(caplog: pytest.LogCaptureFixture) -> None:
    disk = written()
    before = all_of(disk)
    thread = sealer(disk)
    disk.full = True
    thread.look()
    until(lambda: "stays readable as it is" in caplog.text)
    assert forms(disk) == [frames.HOT] * 3 and all_of(disk) == before
    disk.full = False
    thread.look()
    until(lambda: forms(disk) == [frames.SEALED, frames.SEALED, frames.HOT])
    thread.stop()
    assert all_of(disk) == before


def test_a_write_that_fails_while_sealing_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for operation in ("create", "write", "sync", "rename"):
        disk = written()
        before = all_of(disk)
        fault = disk.fail(operation, errno.EIO, name="*.sealing")
        thread = sealer(disk)
        caplog.clear()
        thread.look()
        until(lambda: "stays readable as it is" in caplog.text)
        thread.stop()
        fault.lift()
        assert all_of(disk) == before, operation


def test_a_damaged_segment_is_not_sealed_and_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    disk = written()
    path = LAYOUT.segment(0)
    data = bytearray(disk.read(path))
    data[400] ^= 1
    disk.replace(path, bytes(data))
    thread = sealer(disk)
    thread.look()
    until(lambda: forms(disk) == [frames.HOT, frames.SEALED, frames.HOT])
    thread.stop()
    assert "damaged at byte" in caplog.text
    assert disk.read(path) == bytes(data)


async def test_sealing_that_hangs_delays_neither_a_publish_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, over = threading.Event(), threading.Event()

    def hang(self: Rewrite) -> Iterator[None]:
        hanging.set()
        over.wait(60)
        yield

    monkeypatch.setattr(Rewrite, "write", hang)
    from faregate.transports.journal import JournalTransport

    author, reader = fg.Node("author"), fg.Node("reader")

    @reader.on(Noted, source="author")
    async def read(noted: Noted) -> None: ...

    transport = JournalTransport(str(tmp_path / "j"), segment_size=16 * 1024)
    async with asyncio.timeout(30):
        async with fg.Bus(transport, nodes=[author, reader]) as bus:
            for number in range(200):
                await bus.publish(Noted(number=number, text="x" * 200), node="author")
            await asyncio.to_thread(hanging.wait, 20)
            await bus.publish(Noted(number=200, text="x"), node="author")
    over.set()
    assert JournalReader(tmp_path / "j").latest() == 201


def test_a_sealed_segment_without_its_footer_is_damage_that_is_named() -> None:
    disk = written()
    seal_all(LAYOUT, disk)
    path = LAYOUT.segment(0)
    disk.replace(path, disk.read(path)[:-30])
    with pytest.raises(JournalCorrupt, match=r"00000000000000000000\.seg is damaged at its end"):
        list(JournalReader(ROOT, disk).envelopes())
    with pytest.raises(JournalCorrupt, match=r"00000000000000000000\.seg is damaged at its end"):
        open_log(disk)


def test_a_damaged_row_frame_is_named_with_its_place_and_what_is_lost() -> None:
    disk = written()
    path = LAYOUT.segment(0)
    data = bytearray(disk.read(path))
    data[frames.SEGMENT_BYTES + 90] ^= 1
    disk.replace(path, bytes(data))
    with pytest.raises(JournalCorrupt, match=r"00000000000000000000\.seg is damaged at byte 64"):
        list(JournalReader(ROOT, disk).envelopes())


@pytest.mark.parametrize("where", ["reading", "opening"])
def test_a_frame_of_a_kind_that_is_not_known_is_no_damage_but_too_new(where: str) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    log.append([envelope("a")], [-1])
    log.sync()
    segment = log._current()
    segment.write(b"something new", {}, kind=9, rows=1, base=log.next_offset, time=log.time, commit=log.commit + 1)
    log.next_offset += 1
    log.commit += 1
    log.sync()
    log.close()
    with pytest.raises(JournalTooNew, match="kind 9, version 2, which this Faregate does not know: update Faregate"):
        if where == "reading":
            list(JournalReader(ROOT, disk).envelopes())
        else:
            open_log(disk)


def test_dead_letters_stay_what_they_are() -> None:
    disk = written()
    seal_all(LAYOUT, disk)
    found = [
        record.envelope.publication_id
        for _, body in JournalReader(ROOT, disk).dead_letter_frames(0)
        for record in dead_letters.decode(body)
    ]
    assert found == ["2.0", "2.1"]


def test_the_log_rolls_where_its_row_frames_end() -> None:
    """A segment of rows that is rolled has its footer: opening, retention and backup never need it sealed."""
    disk = written()
    for base in LAYOUT.segment_bases(disk)[:-1]:
        footer = JournalReader(ROOT, disk).footer(base)
        assert footer is not None and footer.ranges == [] and footer.messages > 0
    assert isinstance(open_log(disk), Log)


def test_a_segment_of_many_small_frames_is_rolled_before_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads the frames of the hot segment one after another, so there are not too many of them."""
    monkeypatch.setattr(log_module, "MOST_FRAMES", 5)
    disk = SimulatedDisk()
    log = open_log(disk)
    for number in range(12):
        log.append([envelope(f"m{number}")], [-1])
        log.sync()
    log.close()
    assert LAYOUT.segment_bases(disk) == [0, 5, 10]
    again = open_log(disk)
    for number in range(12, 16):
        again.append([envelope(f"m{number}")], [-1])
        again.sync()
    again.close()
    assert LAYOUT.segment_bases(disk) == [0, 5, 10, 15], "what was there before it was opened counts"
    assert len(list(JournalReader(ROOT, disk).envelopes())) == 16


def test_stopping_while_its_thread_starts_waits_for_nothing_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(threading.Thread):
        def start(self) -> None:
            starting.stop()  # as another thread may, just now
            super().start()

    starting = Sealer(LAYOUT, SimulatedDisk(), lambda work: None)
    monkeypatch.setattr("faregate.broker.journal.sealing.threading.Thread", Late)
    starting.look()
    assert starting._thread is not None
    starting._thread.join(10)
    assert not starting._thread.is_alive()
