"""Sealing: a rolled segment is rewritten once, its messages as columns in large frames, for whoever reads the log.

Rules kept here:
- It is written aside, under a name that nobody else has, checked and synced there. Then the commit thread, which alone
  changes what the journal consists of, looks whether the segment is still the one that was read, and renames.
- A crash at any moment leaves one valid form. What was written aside is garbage, which the next opening removes.
- It delays nobody: it works in slices of some hundred messages, and leaves the interpreter to others after each. (What
  the footer says of a frame of 10,000 is made in one go, some milliseconds, in which Python itself lets others in.) If
  it fails or hangs, the segment stays as it is, which every reader can read.
- What was written is checked against what was read: how many messages, their offsets, and their bodies.
- Dead letters are copied as they are. Columns of version 1 are joined to large frames, too: that is what upgrading is.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from faregate.broker.journal import frame as frames
from faregate.broker.journal.bloom import bloom_of
from faregate.broker.journal.checksum import crc32
from faregate.broker.journal.content import Messages, Rows, read_messages
from faregate.broker.journal.disk import Disk, File
from faregate.broker.journal.frame import SEGMENT_BYTES, BatchRange, Footer, Frame, SegmentHeader
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.segment import Segment, new_header
from faregate.columns import write_batch
from faregate.errors import FaregateError, JournalCorrupt

log = logging.getLogger("faregate.journal")

_SUFFIX = ".sealing"
_SLICE_ROWS = 256
FRAME_ROWS = 10_000
FRAME_BYTES = 8 * 1024 * 1024
"""What a frame of columns holds at the most, roughly."""


def is_sealed(header: SegmentHeader) -> bool:
    return header.form == frames.SEALED


def remove_garbage(layout: Layout, disk: Disk) -> None:
    """What a process that ended while it sealed has left. For who holds the journal's lock."""
    for name in disk.list(layout.segments):
        if name.startswith(".") and name.endswith(_SUFFIX):
            disk.remove(layout.segments / name)


class Rewrite:
    """One segment on its way to columns."""

    def __init__(self, layout: Layout, disk: Disk, base: int) -> None:
        """Raises `JournalCorrupt` for one that cannot be read, `FileNotFoundError` for one that is gone."""
        self._disk = disk
        self._source = layout.segment(base)
        self._aside = layout.segments / f".{base:020d}-{os.urandom(6).hex()}{_SUFFIX}"
        self._data = disk.view(self._source)
        header = frames.read_segment_header(self._data)
        footer = None if header is None else frames.read_footer(self._data, header)
        if header is None or footer is None:
            raise JournalCorrupt(f"{self._source} cannot be sealed: its {'footer' if header else 'header'} is damaged")
        self._header, self._footer = header, footer
        self._bodies = 0
        """A checksum of all bodies that were read, in their order."""

    @property
    def is_done(self) -> bool:
        """Whether it is in columns already."""
        return is_sealed(self._header)

    def write(self) -> Generator[None, None, None]:
        """Write, check and sync it aside. Gives way after each slice; whoever asks for no more leaves nothing."""
        file = self._disk.create(self._aside, 0)
        try:
            written = ColumnsWriter(self._header, file)
            yield from written.take(slices_of(self._data, self._header, self._source, self._note))
            written.end(self._footer)
            file.sync()
            yield from self._check(written.segment)
        except BaseException:
            file.close()
            self.forget()
            raise
        file.close()

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.remove(self._aside)

    def put_in_place(self) -> bool:
        """In the commit thread: whether it took the place of what it was made of. If that has changed it does not."""
        try:
            found = frames.read_segment_header(self._disk.read(self._source, 0, SEGMENT_BYTES))
        except FileNotFoundError:
            found = None
        if found != self._header:
            self.forget()
            return False
        self._disk.rename(self._aside, self._source)
        return True

    def _note(self, messages: Messages) -> None:
        self._bodies = _sum_of([each.body for each in messages.all_envelopes()], self._bodies)

    def _check(self, written: Segment) -> Iterator[None]:
        """What lies aside is what was read: every frame by its CRC, all offsets in order, and the bodies."""
        data = self._disk.view(self._aside)
        header = frames.read_segment_header(data)
        messages = dead = bodies = 0
        if header == written.header:
            for frame in frames.scan(data, written.header):
                if frame.kind == frames.COLUMNS:
                    messages += frame.rows
                    batch = read_messages(frame, frames.body_of(data, frame)).batch()
                    bodies = _sum_of(batch.column("payload").to_pylist(), bodies)
                elif frame.kind == frames.DEAD_LETTERS:
                    dead += frame.rows
                yield
        footer = None if header is None else frames.read_footer(data, header)
        told = (self._footer.messages, self._footer.dead_letters, self._footer.end, self._bodies)
        if footer is None or (messages, dead, footer.end, bodies) != told or not _ranges_fit(footer, self._footer):
            raise JournalCorrupt(f"{self._aside} is not what was read, so {self._source} stays as it is")


def slices_of(
    data: Any, header: SegmentHeader, path: Path, note: Callable[[Messages], None] | None = None
) -> Iterator[tuple[Frame, Any]]:
    """The frames of a segment in order: their messages as record batches of a slice each; the bodies of others. `note`
    is told of what was read. Raises `JournalCorrupt`."""
    at_byte = SEGMENT_BYTES
    group: Rows | None = None
    last: Frame | None = None
    while True:
        frame = frames.read_header(data, at_byte, header.segment_id)
        if frame is None or not frames.is_sound(data, frame):
            raise JournalCorrupt(f"{path} is damaged at byte {at_byte}: it stays as it is")
        body = frames.body_of(data, frame)
        found = read_messages(frame, body) if frame.kind in frames.MESSAGES and frame.rows else None
        if found is not None and note is not None:
            note(found)
        if isinstance(found, Rows) and group is not None and group.takes(found, _SLICE_ROWS, FRAME_BYTES):
            group.add(found)
        else:
            if group is not None and last is not None:
                yield from _cut(last, group)
            group = found if isinstance(found, Rows) else None
            if frame.kind == frames.FOOTER:
                return
            if group is None:
                yield frame, body if found is None else found.batch()
        last, at_byte = frame, frame.end


def _cut(frame: Frame, group: Rows) -> Iterator[tuple[Frame, Any]]:
    """A large frame, or small ones together, in slices; the frame is the last of them."""
    for part in group.cut(_SLICE_ROWS):
        yield frame, part.batch()


def _ranges_fit(footer: Footer, before: Footer) -> bool:
    expected = before.base
    for each in footer.ranges:
        if each.first < expected or each.last < each.first or each.last >= footer.end:
            return False
        expected = each.last + 1
    return True


def range_of(batch: Any, at_byte: int) -> BatchRange:
    """What the footer says of a frame of columns that stands there."""
    offsets, times = batch.column("offset"), batch.column("time").view(pa.int64())
    types, sources, topics = (pc.unique(batch.column(name)).to_pylist() for name in ("type", "source", "topic"))
    blooms = (bloom_of(batch.column(name)) for name in ("key", "correlation_id"))
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    return BatchRange(at_byte, first, last, times[0].as_py(), times[-1].as_py(), topics, types, sources, *blooms)


def _sum_of(bodies: Iterable[bytes | None], before: int) -> int:
    return crc32(b"".join(filter(None, bodies)), before)


class ColumnsWriter:
    """Puts slices together to large frames."""

    def __init__(self, source: SegmentHeader, file: File, *, joins: bool = False) -> None:
        """`joins`: also what has gaps between its offsets."""
        self._joins = joins
        self.segment = Segment(new_header(source.base, source.commit, source.time, frames.SEALED), file)
        self.segment.start()
        self._ranges: list[BatchRange] = []
        self._waiting: list[Any] = []
        self._rows = self._bytes = 0
        self._next = 0
        """The offset that would follow."""
        self._last: Frame | None = None

    def take(self, slices: Iterator[tuple[Frame, Any]]) -> Iterator[None]:
        for frame, content in slices:
            if isinstance(content, pa.RecordBatch):
                self._add(frame, content)
            else:
                self._flush()
                self.segment.copy(frame, content, {})
            yield
        self._flush()

    def _add(self, frame: Frame, batch: Any) -> None:
        first, size = batch.column("offset")[0].as_py(), batch.nbytes
        full = self._rows + batch.num_rows > FRAME_ROWS or self._bytes + size > FRAME_BYTES
        if self._waiting and (full or (first != self._next and not self._joins)):
            self._flush()
        self._waiting.append(batch)
        self._rows, self._bytes, self._last = self._rows + batch.num_rows, self._bytes + size, frame
        self._next = batch.column("offset")[-1].as_py() + 1

    def _flush(self) -> None:
        if not self._waiting or self._last is None:
            return
        [batch] = pa.Table.from_batches(self._waiting).combine_chunks().to_batches()
        self._waiting, self._rows, self._bytes = [], 0, 0
        told = range_of(batch, self.segment.at_byte)
        self._ranges.append(told)
        where: dict[str, int] = {"base": told.first, "time": told.last_time, "commit": self._last.commit}
        self.segment.write(write_batch(batch), {}, kind=frames.COLUMNS, rows=batch.num_rows, **where)

    def end(self, footer: Footer, **more: Any) -> int:
        """With the footer that was there before, but for what is different now; how long the segment is then."""
        told = {"bytes": self.segment.at_byte, "index": self.segment.index, "ranges": self._ranges, **more}
        return self.segment.end(msgspec.structs.replace(footer, **told))


class Sealer:
    """A thread that seals what was rolled, the oldest first. `in_commit_thread` runs something there, and waits."""

    def __init__(self, layout: Layout, disk: Disk, in_commit_thread: Callable[[Callable[[], object]], None]) -> None:
        self._layout = layout
        self._disk = disk
        self._in_commit_thread = in_commit_thread
        self._wanted = threading.Event()
        self._stopped = False
        self._done: set[int] = set()
        """What is sealed, or cannot be; the latter is not tried again before the next start, unless the disk failed."""
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Something was rolled, or may have been before."""
        self._wanted.set()
        if (self._thread is None or not self._thread.is_alive()) and not self._stopped:
            thread = threading.Thread(target=self._run, name="faregate-sealer", daemon=True)
            thread.start()  # before `stop`, in another thread, can see it and join it
            self._thread = thread

    def stop(self, seconds: float = 1.0) -> None:
        """What is half done is left behind; a thread that hangs, too."""
        self._stopped = True
        self._wanted.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _run(self) -> None:
        while not self._stopped:
            self._wanted.wait()
            self._wanted.clear()
            for base in self._bases():
                if self._stopped:
                    return
                if base not in self._done:
                    self._seal(base)

    def _bases(self) -> list[int]:
        try:
            return self._layout.segment_bases(self._disk)[:-1]
        except OSError as exc:
            log.warning("the segments of %s cannot be listed, so none is sealed now: %s", self._layout.root, exc)
            return []

    def _seal(self, base: int) -> None:
        try:
            rewrite = Rewrite(self._layout, self._disk, base)
            if rewrite.is_done:
                self._done.add(base)
                return
            slices = rewrite.write()
            try:
                for _ in slices:
                    if self._stopped:
                        return
                    time.sleep(0.0005)
            finally:
                slices.close()
            try:
                self._in_commit_thread(rewrite.put_in_place)
            except BaseException:
                rewrite.forget()
                raise
            self._done.add(base)
        except FileNotFoundError:
            return  # retention was faster
        except (OSError, FaregateError) as exc:
            if not isinstance(exc, OSError):
                self._done.add(base)
            log.warning("segment %d of %s is not sealed, and stays readable as it is: %s", base, self._layout.root, exc)
        except Exception:
            self._done.add(base)
            log.exception("segment %d of %s cannot be sealed; it stays readable as it is", base, self._layout.root)


def seal_all(layout: Layout, disk: Disk, progress: Callable[[int, int], None] | None = None) -> int:
    """Seal every segment that is rolled, at once; how many that were. For who holds the journal's lock."""
    bases = layout.segment_bases(disk)[:-1]
    sealed = 0
    for number, base in enumerate(bases):
        rewrite = Rewrite(layout, disk, base)
        if not rewrite.is_done:
            for _ in rewrite.write():
                pass
            sealed += rewrite.put_in_place()
        if progress is not None:
            progress(number + 1, len(bases))
    return sealed
