"""Damage is loud or harmless: a flipped bit anywhere in a journal, missing and cut files, foreign files, failing disks.

After every fault either all that was confirmed is still there, or there is an error that names the file.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from faregate.broker.journal import frame as frames
from faregate.broker.journal.journal import Journal
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.recovery import Single
from faregate.broker.journal.sealing import Rewrite
from faregate.columns import to_envelopes
from faregate.errors import FaregateError
from tests.journal.disk import SimulatedDisk
from tests.journal.station import NOTED, ROOT, noted, station

LAYOUT = Layout(ROOT)
SEGMENT = 16 * 1024

OpenJournal = Callable[[SimulatedDisk], Journal]


def open_journal(disk: SimulatedDisk) -> Journal:
    return Journal(ROOT, disk=disk, segment_size=SEGMENT)


async def sample() -> SimulatedDisk:
    """A journal with everything in it: a sealed segment, a rolled one, one being written to, dead letters, side logs, a
    snapshot.

    `m0` and `m5` are handled, `m1` was tried and waits for redelivery, `m2` is a dead letter; everything else waits.
    """
    async with station(NOTED, segment_size=SEGMENT) as it:
        for n in range(4):
            await it.publish(noted(f"m{n}", size=2500))
        it.consume()
        await it.handle("m0")
        first = await it.take("m1")
        first.start()
        await first.redeliver(1000)
        await (await it.take("m2")).dead_letter("handler-failed", "it broke")
        await it.restart()
        for n in range(4, 12):
            await it.publish(noted(f"m{n}", size=2500))
        it.consume()
        await it.handle("m5")
        await it.settled()
        disk = it.disk.copy()  # type: ignore[attr-defined]
    seal(disk, LAYOUT.segment_bases(disk)[0])
    return disk  # type: ignore[no-any-return]


def seal(disk: SimulatedDisk, base: int) -> None:
    rewrite = Rewrite(LAYOUT, disk, base)
    for _ in rewrite.write():
        pass
    assert rewrite.put_in_place()


def state_of(disk: SimulatedDisk, factory: OpenJournal = open_journal) -> tuple[dict[str, list[str]], list[str]]:
    """(what waits, by queue; what the log holds), read as a process would that opens the journal."""
    journal = factory(disk)
    waiting: dict[str, list[str]] = {}
    names = {queue.number: queue.name for queue in journal.topology.queues}
    for number, found in journal.recover().queues.items():
        offsets = [
            offset
            for piece in found.pieces
            for offset in ([piece.entry.offset] if isinstance(piece, Single) else list(piece.offsets))
        ]
        waiting[names[number]] = [
            *(f"{one.publication_id}:{len(one.body)}" for one in journal.reader.load(offsets)),
            *(record.envelope.publication_id for _, record in found.dead_letters),
        ]
    reader = JournalReader(ROOT, disk)
    stored = [f"{one.publication_id}:{len(one.body)}" for batch in reader.batches() for one in to_envelopes(batch)]
    return waiting, stored


def check_damage(disk: SimulatedDisk, damaged: Path, expected: object, factory: OpenJournal = open_journal) -> str:
    """Open a damaged journal: raises AssertionError when something is missing and nobody says so."""
    waiting, stored = expected  # type: ignore[misc]
    try:
        found, log = state_of(disk, factory)
    except FaregateError as exc:
        assert str(damaged) in str(exc) or str(ROOT) in str(exc), f"the error does not name {damaged}: {exc}"
        if damaged.suffix == ".seg":
            assert damaged.name in str(exc), f"the error does not name {damaged}: {exc}"
            assert re.search(r"byte \d+|at its (start|end)|missing", str(exc)), f"nor where: {exc}"
        return "loud"
    for queue, names in waiting.items():
        lost = [name for name in names if name not in found.get(queue, [])]
        assert not lost, f"{lost} are silently gone from {queue}"
        extra = [name for name in found[queue] if name not in names]
        assert damaged.suffix == ".log" or not extra, f"{extra} came back to {queue}"
    assert log == stored, "the log silently lost or changed something"
    return "harmless"


@cache
def sampled() -> dict[str, object]:
    return {}


@pytest.fixture
async def disk() -> SimulatedDisk:
    kept = sampled()
    if "disk" not in kept:
        kept["disk"] = await sample()
        kept["expected"] = state_of(kept["disk"].copy())  # type: ignore[attr-defined]
    return kept["disk"].copy()  # type: ignore[attr-defined,no-any-return]


KINDS = {frames.COLUMNS: "columns", frames.DEAD_LETTERS: "dead letters", frames.FOOTER: "footer", frames.ROWS: "rows"}


def regions(disk: SimulatedDisk) -> dict[str, tuple[Path, range]]:
    """The parts of a journal's files, by name."""
    files = disk.files()
    segments = sorted(path for path in files if path.suffix == ".seg")
    found: dict[str, tuple[Path, range]] = {}
    for label, path in (("sealed", segments[0]), ("rolled", segments[1]), ("active", segments[-1])):
        data = files[path]
        header = frames.read_segment_header(data)
        assert header is not None
        found[f"{label} segment header"] = (path, range(frames.SEGMENT_BYTES))
        listed = list(frames.scan(data, header))
        for number, frame in enumerate(listed):
            kind = KINDS[frame.kind]
            found[f"{label} {kind} {number} header"] = (path, range(frame.at_byte, frame.body))
            found[f"{label} {kind} {number} body"] = (path, range(frame.body, frame.body + frame.length, 61))
            found[f"{label} {kind} {number} padding"] = (path, range(frame.body + frame.length, frame.end))
        if label != "active":
            found[f"{label} trailer"] = (path, range(len(data) - frames.TRAILER_BYTES, len(data)))
        else:
            found["zeros behind the last frame"] = (path, range(listed[-1].end, len(data), 997))
    for path in (LAYOUT.meta, LAYOUT.topology, LAYOUT.snapshot, LAYOUT.high_water):
        found[path.name] = (path, range(len(files[path])))
    side = next(path for path in sorted(files) if path.suffix == ".log")
    found["side log"] = (side, range(len(files[side])))
    return found


REGIONS = [
    *(f"{label} segment header" for label in ("sealed", "rolled", "active")),
    *(f"sealed columns 0 {part}" for part in ("header", "body", "padding")),
    *(f"rolled rows {n} {part}" for n in range(2) for part in ("header", "body", "padding")),
    *(f"active rows 0 {part}" for part in ("header", "body", "padding")),
    "sealed trailer",
    "rolled trailer",
    "zeros behind the last frame",
    "journal.json",
    "topology.json",
    "snapshot.json",
    "high-water",
    "side log",
]


def flip(disk: SimulatedDisk, path: Path, position: int, bit: int) -> None:
    data = bytearray(disk.read(path))
    data[position] ^= 1 << bit
    disk.replace(path, bytes(data))


@pytest.mark.parametrize("region", REGIONS)
async def test_a_flipped_bit_is_loud_or_harmless(region: str, disk: SimulatedDisk) -> None:
    path, positions = regions(disk)[region]
    expected = sampled()["expected"]
    silent = []
    for position in positions:
        for bit in (0, 1, 6):
            damaged = disk.copy()
            flip(damaged, path, position, bit)
            try:
                check_damage(damaged, path, expected)
            except AssertionError as exc:
                silent.append(f"byte {position - positions.start} bit {bit}: {exc}")
    assert not silent, f"{len(silent)} flips in {region} went unnoticed: {silent[:5]}"
