"""What works on journals works on every form of a segment: hot, rolled, sealed, and those of version 1."""

import asyncio
import collections
import errno
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from faregate.broker.journal import frame as frames
from faregate.broker.journal import journal as journal_module
from faregate.broker.journal import log as log_module
from faregate.broker.journal import sealing, verify
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.high_water import HighWater, pack
from faregate.broker.journal.layout import Layout, Meta, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.repair import repair
from faregate.broker.journal.retention import Retention, apply_retention
from faregate.broker.journal.sealing import Sealer, seal_all
from faregate.broker.journal.spool import read_spooled, spool
from faregate.broker.journal.verify import inspect
from faregate.message import Envelope
from faregate.testing import FakeClock
from tests.journal.disk import SimulatedDisk
from tests.journal.rig import envelope
from tests.journal.station import NOTED, ROOT, Station, noted

LAYOUT = Layout(ROOT)
DISK = RealDisk()


def write(path: Path, commits: int = 10, rows: int = 50, *, seals: bool = True, **more: Any) -> Layout:
    """A journal with one segment that is rolled, or sealed, and one behind it."""
    layout = Layout(path)
    prepare(layout, DISK)
    ticks = itertools.count(1_700_000_000_000_000, 1000)
    log = Log(layout, DISK, segment_size=4 << 20, clock=lambda: next(ticks))
    for commit in range(commits):
        log.append([envelope(f"{commit}.{row}", 100, **more) for row in range(rows)], [-1] * rows)
        log.sync()
    log.roll()
    log.close()
    Log(layout, DISK, segment_size=4 << 20, clock=lambda: next(ticks)).close()
    if seals:
        seal_all(layout, DISK)
    return layout


def names(layout: Layout) -> list[str]:
    return [each.publication_id for _, each in JournalReader(layout.root).envelopes()]


# --- repair and verify --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["a frame", "no footer"])
def test_a_sealed_segment_is_repaired_until_it_is_sound(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "FRAME_ROWS", 100)
    monkeypatch.setattr(sealing, "_SLICE_ROWS", 50)
    layout = write(tmp_path / "j")
    path = layout.segment(0)
    data = bytearray(path.read_bytes())
    found = [frame for frame, _ in JournalReader(layout.root).segment_frames(0)]
    assert len(found) == 5
    before = names(layout)
    if damage == "a frame":
        data[found[2].at_byte + 500] ^= 1
        lost = set(before[200:300])
    else:
        del data[-30:]
        lost = set()
    path.write_bytes(data)
    told, after = repair(layout.root, act=True)
    assert told.problems and after is not None and after.problems == [] and after.steps == []
    assert names(layout) == [name for name in before if name not in lost]
    footer = JournalReader(layout.root).footer(0)
    assert footer is not None and len(footer.ranges) == (4 if lost else 5)


def test_sound_frames_of_one_commit_behind_damage_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "FRAME_ROWS", 256)
    layout = write(tmp_path / "j", commits=1, rows=1000)
    found = [frame for frame, _ in JournalReader(layout.root).segment_frames(0)]
    assert len({frame.commit for frame in found}) == 1 and len(found) == 4
    before = names(layout)
    data = bytearray(layout.segment(0).read_bytes())
    data[found[1].at_byte + 500] ^= 1
    layout.segment(0).write_bytes(data)
    repair(layout.root, act=True)
    assert names(layout) == [*before[:256], *before[512:]]


def test_verifying_beside_a_writer_that_seals_meanwhile_finds_nothing(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "j")
    prepare(layout, DISK)
    log = Log(layout, DISK, segment_size=64 * 1024)

    def put(count: int) -> None:
        for _ in range(count):
            log.append([envelope("m", 1000)], [-1])
            log.sync()

    put(20)

    class Slow(verify.Inspector):
        def _look_at_segments(self, mark: Any) -> None:
            put(100)
            assert seal_all(layout, DISK)
            super()._look_at_segments(mark)

    inspector = Slow(layout, DISK, None)
    inspector._live = True
    assert inspector.run().problems == []
    log.close()


def test_a_repair_of_version_1_says_first_that_the_journal_is_newer(tmp_path: Path) -> None:
    layout = write(tmp_path / "j")
    DISK.replace(layout.meta, b'{"format":"faregate-journal","version":1,"id":"x"}')
    data = bytearray(layout.segment(0).read_bytes())
    data[500] ^= 1
    layout.segment(0).write_bytes(data)
    repair(layout.root, act=True)
    assert JournalReader(layout.root).meta == Meta(version=2, id="x")


# --- version 1 ----------------------------------------------------------------------------------------------------


def test_a_journal_of_version_1_to_which_nothing_was_published_opens_and_goes_on(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "j")
    prepare(layout, DISK)
    DISK.replace(layout.meta, b'{"format":"faregate-journal","version":1,"id":"x"}')
    header = frames.pack_segment_header(frames.SegmentHeader(1, 0, 99, 0, 0, 1))
    DISK.replace(layout.segment(0), header + bytes(4096))
    DISK.replace(layout.high_water, pack(HighWater(0, 0, 0, frames.SEGMENT_BYTES, 1)))
    for number in range(3):
        log = Log(layout, DISK)
        log.append([envelope(f"m{number}")], [-1])
        log.sync()
        log.close()
    assert names(layout) == ["m0", "m1", "m2"]


def test_what_is_spooled_to_a_journal_of_version_1_is_of_version_1(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "j")
    prepare(layout, DISK)
    sent = [envelope("a"), envelope("b")]
    for version in (1, 2):
        DISK.replace(layout.meta, b'{"format":"faregate-journal","version":%d,"id":"x"}' % version)
        path = spool(layout, DISK, sent, f"batch{version}")
        data = path.read_bytes()
        assert int.from_bytes(data[4:6], "little") == version
        assert int.from_bytes(data[6:8], "little") == (frames.COLUMNS if version == 1 else frames.ROWS)
        assert read_spooled(path, DISK).envelopes == sent


# --- retention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seals", [True, False], ids=["sealed", "rolled"])
def test_compacting_joins_what_is_kept(tmp_path: Path, seals: bool) -> None:
    layout = write(tmp_path / "j", commits=2000, rows=1, seals=seals)
    before = names(layout)
    waiting = [(offset, offset) for offset in range(0, 2000, 2)]
    size = DISK.size(layout.segment(0))
    apply_retention(layout, DISK, JournalReader(layout.root), Retention(seconds=0), waiting, 1 << 60)
    assert DISK.size(layout.segment(0)) < 0.75 * size
    reader = JournalReader(layout.root)
    assert [each.publication_id for each in reader.load(list(range(0, 2000, 2)))] == before[::2]
    assert len([frame for frame, _ in reader.segment_frames(0)]) == 1
    assert inspect(layout.root).problems == []


# --- the sealer's own house ---------------------------------------------------------------------------------------


def test_a_rename_that_fails_leaves_nothing_aside_and_a_folder_that_cannot_be_listed_ends_nobody() -> None:
    disk = SimulatedDisk()
    prepare(LAYOUT, disk)
    log = Log(LAYOUT, disk, segment_size=4096)
    for number in range(20):
        log.append([envelope(f"m{number}", 900)], [-1])
        log.sync()
    log.close()
    sealer = Sealer(LAYOUT, disk, lambda function: function())  # type: ignore[arg-type,return-value]
    fault = disk.fail("rename", errno.EIO, name="*.sealing")
    sealer._seal(0)
    assert fault.hits == 1 and not [name for name in disk.list(LAYOUT.segments) if name.endswith(".sealing")]
    fault.lift()
    real, disk.list = disk.list, _refuse  # type: ignore[method-assign]
    assert sealer._bases() == []
    disk.list = real  # type: ignore[method-assign]
    sealer._seal(0)
    assert JournalReader(ROOT, disk).is_sealed(0)


def _refuse(path: Path) -> list[str]:
    raise OSError(errno.EIO, "no")


# --- power losses, with snapshots by amount, rolling and sealing ---------------------------------------------------


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))])
async def test_power_may_be_lost_whenever_snapshots_are_taken_and_segments_sealed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_SNAPSHOT_BYTES", 1500)
    monkeypatch.setattr(journal_module, "_SNAPSHOT_SHARE", 0)
    monkeypatch.setattr(log_module, "MOST_FRAMES", 12)
    chance, disk, clock = random.Random(seed), SimulatedDisk(), FakeClock()
    station = await Station(disk, clock, [NOTED], segment_size=chance.choice([6000, 16_000]), seals=True).open()
    station.consume()
    numbers = itertools.count()
    for _ in range(chance.randint(10, 60)):
        sent = [f"m{next(numbers)}" for _ in range(chance.choice([1, 1, 1, 3, 30]))]
        await station.publish(*(noted(name, size=chance.choice([10, 200, 900])) for name in sent))
        disk.note(("confirmed", sent))
        if chance.random() < 0.6:
            await station.settled()
            for delivery in [each for each in station.got if chance.random() < 0.7]:
                station.got.remove(delivery)
                disk.note(("ended", [delivery.envelope.publication_id]))
                if chance.random() < 0.1:
                    await delivery.dead_letter("bad", "it is bad")
                else:
                    delivery.start()
                    await delivery.settle("handled")
    await station.settled()
    await asyncio.sleep(0.02)
    history = list(disk.history)
    for _ in range(6):
        moment = chance.randint(0, len(history))
        left = disk.crash(lambda most: chance.randint(0, most), moment)
        if LAYOUT.meta in left.files():
            await check_left(left, clock, [step.note for step in history[:moment] if step.operation == "note"])
    await station.close()


async def check_left(left: SimulatedDisk, clock: FakeClock, notes: list[Any]) -> None:
    confirmed = {name for what, found in notes if what == "confirmed" for name in found}
    ended = {name for what, found in notes if what == "ended" for name in found}
    again = await Station(left, clock, [NOTED], segment_size=16_000, seals=True).open()
    dead = {each.letter.envelope.publication_id for queue in again.broker._queues.values() for each in queue.browse()
            if each.letter is not None}  # fmt: skip
    got = collections.Counter(await again.drain())
    assert max(got.values(), default=1) == 1, "something is there twice"
    assert confirmed - ended <= got.keys() | dead, "confirmed, and lost"
    log = [each.publication_id for _, each in JournalReader(ROOT, left).envelopes()]
    assert len(log) == len(set(log)) and confirmed <= set(log)
    await again.publish(noted("later"))
    await again.close()
    last = await Station(left.copy(), clock, [NOTED], segment_size=16_000, seals=True).open()
    assert await last.drain() == ["later"]
    await last.close()
    problems = inspect(ROOT, last.disk).problems
    assert [each for each in problems if each.path.parent != LAYOUT.settled] == []


def test_numbers_that_no_column_holds_are_refused() -> None:
    disk = SimulatedDisk()
    prepare(LAYOUT, disk)
    log = Log(LAYOUT, disk)
    wrong: list[dict[str, Any]] = [
        {"deliver_at": 1e13}, {"expires_at": float("inf")}, {"sent_at": float("nan")}, {"sent_at": -1e13},
        {"depth": 1 << 31}, {"redeliveries": 1 << 40}, {"replay": -(1 << 32)}, {"key": 5}, {"headers": {"a": 1}},
        {"body": "text"},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(Exception, match="cannot be written to the journal"):
            log.append([Envelope(publication_id="x", **fields)], [-1])
    log.append([Envelope(publication_id="x", deliver_at=9e12, depth=(1 << 31) - 1, sent_at=-5.0)], [-1])
    log.sync()
    log.roll()
    Log(LAYOUT, disk).close()
    assert seal_all(LAYOUT, disk) == 1
    [(_, found)] = JournalReader(ROOT, disk).envelopes()
    assert (found.deliver_at, found.depth, found.sent_at) == (9e12, (1 << 31) - 1, -5.0)
