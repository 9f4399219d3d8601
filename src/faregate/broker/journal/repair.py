"""How a damaged journal is set right: the logic of `faregate journal repair`.

Rules kept here:
- Repair deletes nothing. What it replaces, cuts off or takes out lies in quarantine/ afterwards.
- Offsets stay: where messages are lost, theirs stay empty.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from faregate.broker.journal import frame as frames
from faregate.broker.journal import settled
from faregate.broker.journal.disk import PRIVATE_FILE, RealDisk, sync_path
from faregate.broker.journal.findings import Inspection, Progress
from faregate.broker.journal.high_water import pack, read_high_water
from faregate.broker.journal.layout import Layout, Meta, check_meta, find_json, raise_version, write_json
from faregate.broker.journal.lock import WriterLock
from faregate.broker.journal.scan import Damage, Scan, sound_mark, walk
from faregate.broker.journal.sealing import range_of
from faregate.broker.journal.segment import Memory, Segment, new_header
from faregate.broker.journal.snapshot import Snapshot
from faregate.broker.journal.verify import Inspector
from faregate.errors import JournalCorrupt


def repair(root: Path, *, act: bool, progress: Progress | None = None) -> tuple[Inspection, Inspection | None]:
    """Find what is wrong and, when asked to `act`, set it right; what was found before and what is left afterwards.

    Raises `JournalLocked` while a process writes to the journal, and what `inspect` raises.
    """
    layout = Layout(root)
    with contextlib.suppress(JournalCorrupt):
        check_meta(layout, RealDisk())
    lock = WriterLock(root, "stop that process, then repair")
    try:
        before = Inspector(layout, RealDisk(), progress, locked_here=True).run()
        if not act or not before.steps:
            return before, None
        with contextlib.suppress(JournalCorrupt):  # what is written anew is of this version
            raise_version(layout, RealDisk(), check_meta(layout, RealDisk()))
        for step in before.steps:
            name, *arguments = step.act
            _ACTS[name](layout, *arguments)
        return before, Inspector(layout, RealDisk(), progress, locked_here=True).run()
    finally:
        lock.release()


def _set_aside(layout: Layout, path: Path) -> None:
    layout.set_aside(path, RealDisk())


def _replace(layout: Layout, path: Path, data: bytes) -> None:
    """Give a file new content; the old one goes to quarantine. At no moment is there none."""
    if path.exists():
        kept = layout.place_in_quarantine(path.name, RealDisk())
        try:
            kept.hardlink_to(path)
        except OSError:
            shutil.copyfile(path, kept)
            kept.chmod(PRIVATE_FILE)
            sync_path(kept)
        sync_path(kept.parent)
    RealDisk().replace(path, data)


def _new_meta(layout: Layout) -> None:
    _replace(layout, layout.meta, msgspec.json.encode(Meta(id=os.urandom(8).hex())))


def _write_mark(layout: Layout) -> None:
    disk = RealDisk()
    if layout.high_water.exists() and read_high_water(layout.high_water, disk) is None:
        _set_aside(layout, layout.high_water)
    disk.replace(layout.high_water, pack(sound_mark(layout, disk)[0]))


def _cut_tail(layout: Layout, path: Path, at_byte: int, size: int) -> None:
    tail = RealDisk().read(path, at_byte).rstrip(b"\0")
    RealDisk().replace(layout.place_in_quarantine(f"{path.name}.tail-{at_byte}", RealDisk()), tail)
    file = RealDisk().open(path)
    file.truncate(at_byte)
    file.sync()
    file.truncate(size)
    file.sync()
    file.close()


def _clean_side_log(layout: Layout, path: Path) -> None:
    """Without its damaged records. What the snapshot has counted of it shrinks with it."""
    data = memoryview(RealDisk().view(path))
    base = int(path.stem)
    snapshot = find_json(layout.snapshot, RealDisk(), Snapshot)
    counted = snapshot.settled.get(base, 0) if snapshot is not None else 0
    kept = bytearray()
    kept_of_counted, size = 0, settled.RECORD_BYTES
    for at_byte, record in zip(range(0, len(data), size), settled.walk(data), strict=False):
        if record is not None:
            kept += data[at_byte : at_byte + size]
            kept_of_counted += size if at_byte < counted else 0
    if snapshot is not None and kept_of_counted < counted:
        snapshot.settled[base] = kept_of_counted
        write_json(layout.snapshot, RealDisk(), snapshot)
    _replace(layout, path, bytes(kept))


def _write_segment(layout: Layout, base: int, end: int, lost: list[tuple[int, int]], stop: int) -> None:
    """A sealed segment of the sound frames there are, with their offsets, up to `end`.

    `stop` (if not 0) is where the whole commits end; a part of a batch behind it is not taken.
    """
    path = layout.segment(base)
    data = RealDisk().view(path) if path.exists() else b""
    header = frames.read_segment_header(data)
    scan = Scan(base, data, header, len(data))
    old = scan.footer
    file = Memory()
    form = scan.header.form or frames.SEALED  # one of version 1 has none
    segment = Segment(new_header(base, scan.header.commit, scan.header.time, form), file)
    segment.start()
    commit, end_so_far = scan.header.commit, base
    ranges: list[frames.BatchRange] = []
    for found in walk(data, None if header is None else header.segment_id, len(data)):
        if isinstance(found, Damage) or found[0].kind == frames.FOOTER or found[0].base < end_so_far:
            continue
        frame, content = found
        if stop and frame.at_byte >= stop:
            break
        types = content.types() if frame.kind in frames.MESSAGES else {}
        if form == frames.SEALED and frame.kind == frames.COLUMNS and frame.rows:
            ranges.append(range_of(content.batch(), segment.at_byte))
        segment.copy(frame, frames.body_of(data, frame), types)
        commit, end_so_far = max(commit, frame.commit), max(end_so_far, frame.base + frame.rows)
    footer = segment.footer(max(end, end_so_far), commit)
    if ranges:
        footer.first_time, footer.ranges = scan.segment.first_time, ranges
    if old is not None:
        footer.batches = sorted({*footer.batches, *old.batches})
        footer.compacted = old.compacted
        footer.last_commit = max(footer.last_commit, old.last_commit)
    elif not scan.wrong and scan.gaps:
        footer.compacted = True  # nothing is damaged, and yet offsets are missing: it was compacted
    footer.lost = sorted({*lost, *scan.lost_before})
    segment.end(footer)
    _replace(layout, path, bytes(file.data))


_ACTS: dict[str, Callable[..., None]] = {
    "write-mark": _write_mark,
    "set-aside": _set_aside,
    "new-meta": _new_meta,
    "clean-side-log": _clean_side_log,
    "write-segment": _write_segment,
    "cut-tail": _cut_tail,
}
