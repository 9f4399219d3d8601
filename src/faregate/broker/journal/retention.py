"""Retention: which segments go. It is apart from settlement: what still waits is kept, whatever its age."""

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow.compute as pc

from faregate.broker.journal import frame as frames
from faregate.broker.journal.content import read_messages
from faregate.broker.journal.disk import Disk
from faregate.broker.journal.frame import Footer
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.segment import Memory, Segment, new_header
from faregate.columns import write_batch

log = logging.getLogger("faregate.journal")

WEEK = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long messages stay in the log view: `seconds` since they were appended, and at most `bytes` in all.

    Named readers keep what they have not read, whatever these say. The segment that is written to always stays.
    """

    seconds: float | None = WEEK
    bytes: int | None = None


def apply_retention(
    layout: Layout,
    disk: Disk,
    reader: JournalReader,
    retention: Retention,
    runs: list[tuple[int, int]],
    now: int,
    upto: int | None = None,
) -> list[int]:
    """Remove or compact the segments that are no longer kept; returns the bases of those that are gone.

    `runs` are the stretches of offsets that still wait somewhere, in order; they say nothing of what was appended
    from `upto` on.
    """
    bases = layout.segment_bases(disk)
    sizes = {base: disk.size(layout.segment(base)) for base in bases}
    total = sum(sizes.values())
    slowest = min((each.offset for each in reader.reader_offsets()), default=None)
    gone = []
    kept = False
    for base in bases[:-1]:
        footer = reader.footer(base)
        if footer is None or (upto is not None and footer.end > upto) or (slowest is not None and footer.end > slowest):
            break
        old = retention.seconds is not None and now - footer.last_time > retention.seconds * 1_000_000
        large = retention.bytes is not None and total > retention.bytes
        if not old and not large:
            break
        waiting = [run for run in runs if run[0] < footer.end and run[1] >= base]
        if not waiting and not kept:
            disk.remove(layout.segment(base))
            gone.append(base)
            total -= sizes[base]
            log.info("%s is removed by retention", layout.segment(base))
            continue
        kept = True  # the segments behind one that stays are emptied, not removed: offsets have no holes
        if not footer.compacted:
            total -= sizes[base] - compact(layout, disk, reader, base, footer, waiting)
    return gone


def compact(
    layout: Layout, disk: Disk, reader: JournalReader, base: int, footer: Footer, waiting: list[tuple[int, int]]
) -> int:
    """Rewrite a segment with only what still waits, and its dead letters; offsets stay. Returns its new size."""
    file = Memory()
    segment = Segment(new_header(base, footer.last_commit, footer.first_time, frames.SEALED), file)
    segment.start()
    for frame, body in reader.segment_frames(base):
        if frame.kind in frames.MESSAGES:
            kept = _still_waiting(read_messages(frame, body).batch(), waiting)
            if kept is None:
                continue
            first = kept.column("offset")[0].as_py()
            frame = frame._replace(kind=frames.COLUMNS, rows=kept.num_rows, base=first)
            body = write_batch(kept)
        segment.copy(frame, body, {})
    told: dict[str, Any] = {"messages": segment.messages, "bytes": segment.at_byte, "index": segment.index[:1]}
    told |= {"types": {}, "ranges": []}
    size = segment.end(msgspec.structs.replace(footer, **told, compacted=True))
    disk.replace(layout.segment(base), bytes(file.data))
    reader.forget(base)
    log.info("%s is compacted to the %d messages that still wait", layout.segment(base), segment.messages)
    return size


def _still_waiting(batch: Any, waiting: list[tuple[int, int]]) -> Any:
    offsets = batch.column("offset")
    mask = None
    for first, last in waiting:
        inside = pc.and_(pc.greater_equal(offsets, first), pc.less_equal(offsets, last))
        mask = inside if mask is None else pc.or_(mask, inside)
    kept = batch.filter(mask) if mask is not None else None
    return kept if kept is not None and kept.num_rows else None
