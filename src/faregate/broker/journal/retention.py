"""Retention: which segments go. It is apart from settlement: what still waits is kept, whatever its age."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from faregate.broker.journal import frame as frames
from faregate.broker.journal.disk import Disk
from faregate.broker.journal.frame import Footer, Frame
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.sealing import ColumnsWriter, slices_of
from faregate.broker.journal.segment import Memory

log = logging.getLogger("faregate.journal")

WEEK = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long messages stay in the log view: `seconds` since they were appended, and at most `bytes` in all.

    Named readers keep what they have not read, whatever these say. The segment that is written to always stays.
    """

    seconds: float | None = WEEK
    bytes: int | None = None

    def is_over(self, footer: Footer, total: int, now: int) -> bool:
        """Whether a segment goes that is the oldest in a journal of so many bytes."""
        old = self.seconds is not None and now - footer.last_time > self.seconds * 1_000_000
        return old or (self.bytes is not None and total > self.bytes)


def keeps_all(layout: Layout, disk: Disk, reader: JournalReader, retention: Retention, now: int) -> bool:
    """Whether retention has nothing to remove, whoever reads and whatever waits."""
    bases = layout.segment_bases(disk)
    footer = reader.footer(bases[0]) if len(bases) > 1 else None
    total = sum(disk.size(layout.segment(base)) for base in bases)
    return footer is None or not retention.is_over(footer, total, now)


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
        if not retention.is_over(footer, total, now):
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
    path = layout.segment(base)
    data = disk.view(path)
    header = frames.read_segment_header(data)
    assert header is not None, path  # its footer was read before
    written = ColumnsWriter(header._replace(commit=footer.last_commit, time=footer.first_time), file, joins=True)
    for _ in written.take(_kept(slices_of(data, header, path), waiting)):
        pass
    segment = written.segment
    size = written.end(footer, messages=segment.messages, index=segment.index[:1], types={}, compacted=True)
    disk.replace(layout.segment(base), bytes(file.data))
    reader.forget(base)
    log.info("%s is compacted to the %d messages that still wait", layout.segment(base), segment.messages)
    return size


def _kept(slices: Iterator[tuple[Frame, Any]], waiting: list[tuple[int, int]]) -> Iterator[tuple[Frame, Any]]:
    """Of messages those that still wait; dead letters."""
    for frame, content in slices:
        kept = _still_waiting(content, waiting) if isinstance(content, pa.RecordBatch) else content
        if kept is not None:
            yield frame, kept


def _still_waiting(batch: Any, waiting: list[tuple[int, int]]) -> Any:
    offsets = batch.column("offset")
    mask = None
    for first, last in waiting:
        inside = pc.and_(pc.greater_equal(offsets, first), pc.less_equal(offsets, last))
        mask = inside if mask is None else pc.or_(mask, inside)
    kept = batch.filter(mask) if mask is not None else None
    return kept if kept is not None and kept.num_rows else None
