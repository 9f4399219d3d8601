"""Bad input and faults, one by one: each has a clear error or is harmless, and nothing that was confirmed is lost."""

import asyncio
import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.journal import JournalReader
from faregate.broker.journal import frame as frames
from faregate.broker.journal import settled as side_logs
from faregate.broker.journal.disk import RealDisk, RealFile
from faregate.broker.journal.journal import Journal
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.settled import Record
from faregate.broker.journal.spool import Intake, spool
from faregate.errors import JournalFailed, JournalFull, JournalLocked, JournalTooNew, NotAJournal
from faregate.message import Envelope
from faregate.ports.log import HANDLED, REDELIVER
from faregate.testing.clock import rest
from faregate.transports.journal import JournalTransport
from tests.journal.disk import SimulatedDisk
from tests.journal.station import ROOT, noted, station

SMALL_SEGMENT = 16 * 1024


class Noted(fg.Event):
    text: str


def bus_on(path: Path, seen: list[str] | None = None, segment_size: int | None = SMALL_SEGMENT) -> fg.Bus:
    """An author, and a reader if there is somewhere to put what it reads."""
    author, reader = fg.Node("author"), fg.Node("reader")
    if seen is not None:

        @reader.on(Noted, source="author")
        async def read(noted: Noted) -> None:
            seen.append(noted.text)

    url: Any = f"journal:{path}" if segment_size is None else JournalTransport(str(path), segment_size=segment_size)
    return fg.Bus(url, nodes=[author] if seen is None else [author, reader])


async def note(bus: fg.Bus, text: str) -> None:
    await bus.publish(Noted(text=text), node="author")


async def subscribe(path: Path) -> None:
    """Make the reader's queue, so that it collects what is published while the reader does not run."""
    await bus_on(path, []).prepare()


async def read_all(path: Path) -> list[str]:
    """What a reader gets that opens the journal now."""
    seen: list[str] = []
    async with bus_on(path, seen) as bus:
        await bus.idle()
    return seen


def texts(path: Path) -> list[str]:
    return [json.loads(envelope.body)["text"] for _, envelope in JournalReader(path).envelopes()]


def failing(error: int) -> Any:
    """What a method of the disk is replaced with."""

    def fail(*_: Any) -> Any:
        raise OSError(error, errno.errorcode[error])

    return fail


# --- folders ----------------------------------------------------------------------------------------------


async def test_missing_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there" / "yet"
    async with bus_on(path, segment_size=None) as bus:
        await note(bus, "a")
    assert texts(path) == ["a"]
    assert path.stat().st_mode & 0o077 == 0, "others can look into it"


async def test_a_folder_that_holds_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(NotAJournal, match=r"has files but no journal\.json.*choose an empty folder"):
        async with bus_on(tmp_path):
            pass
    assert {entry.name for entry in tmp_path.iterdir()} - {"lock"} == {"thesis.txt"}
    assert (tmp_path / "thesis.txt").read_text() == "mine"


async def test_a_journal_json_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.json").write_text('{"format": "diary", "version": 1}')
    with pytest.raises(NotAJournal, match="its format is 'diary'"):
        async with bus_on(tmp_path):
            pass


async def test_a_path_that_is_a_file_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(JournalFailed, match="cannot be opened for writing"):
        async with bus_on(tmp_path / "file"):
            pass
    assert (tmp_path / "file").read_text() == "mine"


async def test_a_journal_of_a_newer_version_is_refused_and_not_changed(tmp_path: Path) -> None:
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")
    meta = json.loads((tmp_path / "journal.json").read_text())
    (tmp_path / "journal.json").write_text(json.dumps({**meta, "version": 99, "news": True}))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(JournalTooNew, match=r"version 99 .*update Faregate"):
        async with bus_on(tmp_path):
            pass
    with pytest.raises(JournalTooNew):
        JournalReader(tmp_path)
    assert {path: path.read_bytes() for path in before} == before


async def test_a_foreign_file_is_left_alone_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await subscribe(tmp_path)
    foreign = tmp_path / "segments" / "notes.txt"
    foreign.write_text("mine")
    odd = tmp_path / "segments" / "copy of 0.seg"
    odd.write_text("mine, too")
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")
    assert f"{foreign} does not belong to the journal and is left alone" in caplog.text
    assert await read_all(tmp_path) == ["a"]
    assert (foreign.read_text(), odd.read_text()) == ("mine", "mine, too")


# --- writers ----------------------------------------------------------------------------------------------


async def test_a_second_writer_in_the_same_process_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        with pytest.raises(JournalLocked, match=r"is written by process \d+: one process runs the nodes"):
            async with bus_on(tmp_path):
                pass
        await note(bus, "a")
    assert await read_all(tmp_path) == ["a"], "the lock is free again once the first one has closed"


async def test_a_second_writer_in_another_process_is_refused(tmp_path: Path) -> None:
    script = f"""
import sys
from faregate.broker.journal.journal import Journal
from faregate.errors import JournalLocked
try:
    Journal({str(tmp_path)!r})
except JournalLocked as exc:
    print(exc)
    sys.exit(7)
"""

    def other() -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    journal = Journal(tmp_path)
    refused = other()
    assert refused.returncode == 7, refused.stderr
    assert "is written by process" in refused.stdout
    journal.release()
    assert other().returncode == 0


# --- the clock --------------------------------------------------------------------------------------------


def test_times_in_the_log_never_go_back_when_the_clock_does(tmp_path: Path) -> None:
    disk, layout = RealDisk(), Layout(tmp_path)
    prepare(layout, disk)
    told = iter([5_000_000, 9_000_000, 4_000_000, 10_000_000])
    now = [0]

    def clock() -> int:
        now[0] = next(told, now[0])
        return now[0]

    log = Log(layout, disk, segment_size=SMALL_SEGMENT, clock=clock)
    for name in "abc":
        log.append([noted(name)], [-1])
    log.sync()
    log.close()
    log = Log(layout, disk, clock=lambda: 1_000_000)  # set back further while nothing ran
    log.append([noted("d")], [-1])
    log.sync()
    log.close()
    reader = JournalReader(tmp_path)
    times = [frame.time for frame, _ in reader.segment_frames(0)]
    assert times == sorted(times)
    assert [envelope.publication_id for _, envelope in reader.envelopes()] == ["a", "b", "c", "d"]
    assert reader.offset_at(9.0) == 0, "found by time: the first one that is not before it"
    assert reader.offset_at(9.5) == 2
    assert reader.offset_at(11.0) == reader.latest()


async def test_a_clock_that_goes_back_between_two_runs_loses_nothing() -> None:
    hour = 3600 * 1_000_000
    async with station(segment_size=SMALL_SEGMENT) as it:
        it.how["clock"] = lambda: 10_000_000 * hour
        await it.restart()
        await it.publish(noted("a", size=9000))
        it.how["clock"] = lambda: hour
        await it.restart()
        await it.publish(noted("b", size=9000))
        await it.publish(noted("c"))
        assert await it.waiting() == ["a", "b", "c"]


# --- the spool --------------------------------------------------------------------------------------------


def spooled_note(text: str) -> Envelope:
    return Envelope(publication_id=text, type="Noted", source="author", body=json.dumps({"text": text}).encode())


@pytest.mark.parametrize("left", ["half of it", "nothing", "no frame at all"])
async def test_a_half_written_batch_is_set_aside_loudly_and_the_others_go_on(
    left: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await subscribe(tmp_path)
    layout, disk = Layout(tmp_path), RealDisk()
    spool(layout, disk, [spooled_note("first")], "1")
    half = spool(layout, disk, [spooled_note("half")], "2")
    spool(layout, disk, [spooled_note("last")], "3")
    data = half.read_bytes()
    half.write_bytes({"half of it": data[: len(data) // 2], "nothing": b"", "no frame at all": b"?" * 5000}[left])
    kept = half.read_bytes()
    seen: list[str] = []
    async with bus_on(tmp_path, seen) as bus:
        await bus.idle()
        async with asyncio.timeout(10):
            while len(seen) < 2:  # what is in the spool is not in flight before it is taken in
                await rest()
    assert seen == ["first", "last"]
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert f"{half} is not a whole batch" in record.getMessage()
    assert "quarantine" in record.getMessage()
    assert bus.alarms == {"unreadable-batch": 1}
    assert (layout.quarantine / half.name).read_bytes() == kept
    assert list(layout.spool.iterdir()) == []


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
@pytest.mark.parametrize("what", ["a folder", "a link to nothing", "a link to a batch", "a pipe", "no permission"])
async def test_what_cannot_be_read_stays_in_the_spool_with_an_alarm_and_the_others_go_on(
    what: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(tmp_path)
    layout, disk = Layout(tmp_path), RealDisk()
    odd = layout.spool / "2.batch"

    def leave() -> None:
        spool(layout, disk, [spooled_note("first")], "1")
        if what == "a folder":
            odd.mkdir()
        elif what == "a pipe":
            os.mkfifo(odd)
        elif what == "no permission":
            _forbid_reading(odd, monkeypatch)
        else:
            target = tmp_path / "elsewhere"
            if what == "a link to a batch":
                target.write_bytes((layout.spool / "1.batch").read_bytes())
            odd.symlink_to(target)
        spool(layout, disk, [spooled_note("last")], "3")

    if when == "at the start":
        leave()
    seen: list[str] = []
    alarms: list[fg.Alarm] = []
    bus = bus_on(tmp_path, seen)
    bus.on_alarm(alarms.append)
    async with bus:
        if when == "while it runs":
            leave()
        async with asyncio.timeout(10):
            while len(seen) < 2:
                await rest()
        spool(layout, disk, [spooled_note("later")], "4")
        async with asyncio.timeout(10):
            while len(seen) < 3:
                await rest()
    assert seen == ["first", "last", "later"]
    assert [(alarm.kind, alarm.message_id) for alarm in alarms] == [("unreadable-batch", "2.batch")]
    assert f"{odd} cannot be taken in" in alarms[0].text and "(chown), or take it away" in alarms[0].text
    assert [path.name for path in layout.spool.iterdir()] == ["2.batch"]


def _forbid_reading(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run as root too, who may read everything."""
    odd.write_bytes(b"of somebody else")
    read = RealDisk.read

    def refused(disk: RealDisk, path: Path, position: int = 0, length: int = -1) -> bytes:
        if path == odd:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(disk, path, position, length)

    monkeypatch.setattr(RealDisk, "read", refused)


def test_a_batch_that_cannot_be_read_is_tried_again_after_ever_longer_pauses_and_told_once() -> None:
    disk, now, told, tries = SimulatedDisk(), 0.0, list[str](), list[float]()
    layout = Layout(ROOT)
    prepare(layout, disk)
    path = spool(layout, disk, [spooled_note("a")], "1")
    intake = Intake(layout, disk, lambda mark: False, lambda name, text: told.append(text), lambda: now)
    fault = disk.fail("read", errno.EIO, name=path.name)
    while now < 400:
        for batch in intake.look():
            assert intake.read(batch) is None
            tries.append(now)
        now += 0.5
    assert tries == [0, 1, 3, 7, 15, 31, 63, 123, 183, 243, 303, 363]
    assert len(told) == 1 and f"{path} cannot be taken in: " in told[0]
    fault.lift()
    now += 60
    assert intake.look() == [path]
    found = intake.read(path)
    assert found is not None and [each.publication_id for each in found.envelopes] == ["a"]
    assert intake.look() == [], "it is on its way"


def test_what_is_set_aside_never_takes_the_place_of_what_was_set_aside_before() -> None:
    disk, layout, told = SimulatedDisk(), Layout(ROOT), list[str]()
    intake = Intake(layout, disk, lambda mark: False, lambda name, text: told.append(text))
    for content in (b"damaged", b"damaged otherwise"):
        disk.replace(layout.spool / "1.batch", content)
        assert [intake.read(path) for path in intake.look()] == [None]
    assert {path.name: data for path, data in disk.files().items()} == {
        "1.batch": b"damaged",
        "1.batch.2": b"damaged otherwise",
    }
    assert str(layout.quarantine / "1.batch.2") in told[1]


async def test_a_batch_that_the_log_cannot_take_is_set_aside_and_the_journal_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with station() as it:
        spool(Layout(ROOT), it.disk, [noted("too much")], "1")
        monkeypatch.setattr(frames, "LONGEST_BODY", 60)
        it.broker.take_in_spool()
        await it.settled()
        monkeypatch.undo()
        await it.publish(noted("after"))
        assert await it.waiting() == ["after"]
        assert it.disk.list(Layout(ROOT).quarantine) == ["1.batch"]


async def test_a_batch_whose_file_cannot_be_removed_is_in_the_log_once_and_the_journal_goes_on() -> None:
    async with station() as it:
        disk = it.disk
        assert isinstance(disk, SimulatedDisk)
        spool(Layout(ROOT), disk, [noted("a")], "1")
        fault = disk.fail("remove", errno.EACCES, name="1.batch")
        for _ in range(3):
            it.broker.take_in_spool()
            await it.settled()
        fault.lift()
        await it.publish(noted("b"))
        assert await it.waiting() == ["a", "b"]


async def test_what_root_leaves_in_the_spool_belongs_to_the_owner_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", lambda _, *owner, **how: given.append(owner))
    stat = Path.stat

    def owned(path: Path, **how: Any) -> Any:
        found = stat(path, **how)
        return os.stat_result((*found[:4], 1234, 56, *found[6:])) if path == tmp_path else found

    monkeypatch.setattr(Path, "stat", owned)
    RealDisk().replace(tmp_path / "1.batch", b"")
    assert given == [(1234, 56)]


async def test_a_batch_that_is_still_being_written_is_not_looked_at(tmp_path: Path) -> None:
    await subscribe(tmp_path)
    unfinished = Layout(tmp_path).spool / ".1.batch.77.new"
    unfinished.write_bytes(b"half")
    assert await read_all(tmp_path) == []
    assert unfinished.read_bytes() == b"half"


# --- settlements ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [HANDLED, REDELIVER])
@pytest.mark.parametrize(("offset", "queue"), [(4_000_000, 0), (0, 77), (4_000_000, 77)])
async def test_a_settlement_for_an_unknown_offset_or_queue_is_ignored(
    offset: int, queue: int, outcome: int, tmp_path: Path
) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")
        await note(bus, "b")
    with Layout(tmp_path).settled_log(0).open("ab") as file:
        file.write(side_logs.pack(Record(offset, queue, outcome, 1, 1, 0.0)))
    assert await read_all(tmp_path) == ["a", "b"]
    assert await read_all(tmp_path) == []


async def test_a_side_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")
    path = Layout(tmp_path).settled_log(0)
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(JournalFailed, match=rf"cannot be opened: .*{path}"):
        await read_all(tmp_path)
    path.rmdir()
    assert await read_all(tmp_path) == ["a"]


# --- no room ----------------------------------------------------------------------------------------------


async def test_without_room_for_a_new_segment_publishing_is_refused_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a" * 9000)
        with monkeypatch.context() as full:
            full.setattr(RealDisk, "create", failing(errno.ENOSPC))
            for _ in range(2):
                with pytest.raises(JournalFull, match=r"has no room .*nothing was written; make room, try again"):
                    await note(bus, "b" * 9000)
        await note(bus, "c" * 9000)
        await note(bus, "d")
    assert await read_all(tmp_path) == ["a" * 9000, "c" * 9000, "d"]


async def test_without_room_for_a_new_segment_a_process_that_ends_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a" * 9000)
        monkeypatch.setattr(RealDisk, "create", failing(errno.ENOSPC))
        with pytest.raises(JournalFull):
            await note(bus, "b" * 9000)
    monkeypatch.undo()
    assert await read_all(tmp_path) == ["a" * 9000]


async def test_without_room_for_a_write_publishing_is_refused_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")
        with monkeypatch.context() as full:
            full.setattr(RealFile, "write", failing(errno.ENOSPC))
            with pytest.raises(JournalFull, match="has no room"):
                await note(bus, "b")
        await note(bus, "c")
    assert texts(tmp_path) == ["a", "c"]
    assert await read_all(tmp_path) == ["a", "c"]


@pytest.mark.parametrize("partly", [0, 1, 64, 300])
async def test_a_write_that_ends_for_lack_of_room_leaves_nothing_of_itself(partly: int) -> None:
    async with station(segment_size=SMALL_SEGMENT) as it:
        assert isinstance(it.disk, SimulatedDisk)
        await it.publish(noted("a"))
        it.disk.fail("write", errno.ENOSPC, name="*.seg", times=1, partly=partly)
        with pytest.raises(JournalFull):
            await it.publish(noted("b", size=2000))
        await it.publish(noted("c"))
        await it.kill()
        assert [one.publication_id for _, one in JournalReader(ROOT, it.disk).envelopes()] == ["a", "c"]
        assert await it.drain() == ["a", "c"]


async def test_without_room_to_end_a_segment_publishing_is_refused_until_there_is() -> None:
    async with station(segment_size=SMALL_SEGMENT) as it:
        assert isinstance(it.disk, SimulatedDisk)
        published = ["0"]
        await it.publish(noted("0"))
        reserved = it.disk.size(Layout(ROOT).segment(0))
        it.disk.full = True
        with pytest.raises(JournalFull, match=r"has no room .*nothing was written; make room, try again"):
            while len(published) < reserved:
                await it.publish(noted(f"{len(published)}"))
                published.append(f"{len(published)}")
        with pytest.raises(JournalFull):
            await it.publish(noted("never", size=2000))
        it.disk.full = False
        await it.publish(noted("then", size=2000))
        await it.kill()
        assert [one.publication_id for _, one in JournalReader(ROOT, it.disk).envelopes()] == [*published, "then"]
        assert await it.drain() == [*published, "then"]


@pytest.mark.parametrize("partly", [0, 1, 64, 300])
async def test_a_footer_that_ends_for_lack_of_room_leaves_nothing_of_itself(partly: int) -> None:
    async with station(segment_size=SMALL_SEGMENT) as it:
        assert isinstance(it.disk, SimulatedDisk)
        await it.publish(noted("a"))
        it.disk.fail("write", errno.ENOSPC, name="*.seg", times=1, partly=partly)
        with pytest.raises(JournalFull):
            await it.publish(noted("b", size=SMALL_SEGMENT))
        await it.publish(noted("c"))
        await it.kill()
        assert [one.publication_id for _, one in JournalReader(ROOT, it.disk).envelopes()] == ["a", "c"]
        assert await it.drain() == ["a", "c"]


async def test_no_room_when_a_journal_is_made_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RealDisk, "create", failing(errno.ENOSPC))
    with pytest.raises(JournalFull, match="has no room"):
        async with bus_on(tmp_path / "j"):
            pass
    monkeypatch.undo()
    async with bus_on(tmp_path / "j") as bus:
        await note(bus, "a")
    assert texts(tmp_path / "j") == ["a"]


# --- failing disks ----------------------------------------------------------------------------------------


async def test_after_a_failed_sync_nothing_is_confirmed_and_what_was_confirmed_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")
        with monkeypatch.context() as broken:
            broken.setattr(RealFile, "sync", failing(errno.EIO))
            with pytest.raises(JournalFailed, match=r"syncing the journal in .* failed .*nothing more is confirmed"):
                await note(bus, "b")
        for text in ("c", "d"):
            with pytest.raises(JournalFailed, match="Check the disk, then start again"):
                await note(bus, text)
        with pytest.raises(JournalFailed):
            await bus.idle()
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)
    found = await read_all(tmp_path)
    assert found[0] == "a"
    assert set(found) <= {"a", "b"}, "what was refused at once is there"


async def test_a_failed_sync_fails_everyone_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")
        monkeypatch.setattr(RealFile, "sync", failing(errno.EIO))
        with pytest.raises(JournalFailed):
            await bus.publish_many([Noted(text=str(n)) for n in range(100)], node="author")
        monkeypatch.undo()
        with pytest.raises(JournalFailed):
            await bus.publish_many([Noted(text=str(n)) for n in range(100)], node="author")
    assert texts(tmp_path)[0] == "a"


async def test_a_failed_write_is_final_and_what_was_confirmed_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")
        with monkeypatch.context() as broken:
            broken.setattr(RealFile, "write", failing(errno.EIO))
            with pytest.raises(JournalFailed, match="writing the journal"):
                await note(bus, "b")
        with pytest.raises(JournalFailed):
            await note(bus, "c")
    assert await read_all(tmp_path) == ["a"]


async def test_a_sync_that_fails_while_a_segment_is_rolled_is_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a" * 9000)
        with monkeypatch.context() as broken:
            broken.setattr(RealFile, "truncate", failing(errno.EIO))
            with pytest.raises(JournalFailed, match="rolling a segment"):
                await note(bus, "b" * 9000)
        with pytest.raises(JournalFailed):
            await note(bus, "c")
    assert await read_all(tmp_path) == ["a" * 9000]


# --- read-only disks --------------------------------------------------------------------------------------


async def test_a_disk_that_becomes_read_only_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a" * 9000)
        monkeypatch.setattr(RealDisk, "create", failing(errno.EROFS))
        with pytest.raises(JournalFailed, match=r"making a segment of the journal in .* failed .*EROFS"):
            await note(bus, "b" * 9000)
        with pytest.raises(JournalFailed):
            await note(bus, "c")
    monkeypatch.undo()
    assert await read_all(tmp_path) == ["a" * 9000]


async def test_a_journal_on_a_read_only_disk_cannot_be_opened_for_writing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscribe(tmp_path)
    async with bus_on(tmp_path) as bus:
        await note(bus, "a")

    monkeypatch.setattr("faregate.broker.journal.disk.os.open", failing(errno.EROFS))
    with pytest.raises(JournalFailed, match="cannot be opened for writing: EROFS"):
        Journal(tmp_path)
    monkeypatch.undo()
    assert await read_all(tmp_path) == ["a"]


@pytest.mark.parametrize("what", ["create", *(name for name in ("open", "make_folder", "replace"))])
async def test_whatever_a_read_only_disk_refuses_first_when_a_journal_is_made_the_error_names_the_journal(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RealDisk, what, failing(errno.EROFS))
    with pytest.raises(JournalFailed, match=f"{tmp_path}.*EROFS"):
        Journal(tmp_path / "j")
    monkeypatch.undo()
    Journal(tmp_path / "j").release()
