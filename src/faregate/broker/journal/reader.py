"""The log view of a journal, for any process: messages by offset or time, up to the high-water mark, never further.

Every frame's CRC is checked when it is read. Nothing is locked: a segment that was rolled never changes, and of the one
that is written to only the part below the mark is looked at. A rolled segment is replaced once by its sealed form: who
has the old file open goes on reading it, and both give the same messages at the same offsets. So what is remembered is
remembered by a segment's id, which differs, and reading stops by offset: the byte of a mark is only that of the hot
segment that it was taken of.
"""

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow.compute as pc

from faregate.broker.journal import frame as frames
from faregate.broker.journal.bloom import Bloom
from faregate.broker.journal.content import READ_ERRORS, Messages, Outline, Rows, read_messages
from faregate.broker.journal.disk import Disk, RealDisk
from faregate.broker.journal.frame import SEGMENT_BYTES, Footer, SegmentHeader
from faregate.broker.journal.high_water import HighWater, read_high_water
from faregate.broker.journal.layout import Layout, check_meta, read_json
from faregate.columns import to_envelopes
from faregate.errors import JournalCorrupt, JournalTooNew, OffsetGone
from faregate.message import Envelope, check_name
from faregate.ports.log import ReaderOffset, Stretch
from faregate.ports.topology import Topology

T = TypeVar("T")
_POLL_SECONDS = 0.05
_OPEN_SEGMENTS = 8
_KEPT_COLUMNS, _KEPT_ROWS = 8, 2
"""Frames that were read last. Columns lie in the mapped file, rows in memory."""
_GROUP_ROWS, _GROUP_BYTES = 10_000, 8 * 1024 * 1024
"""Frames of rows that follow each other are read together, up to this."""
_PLACES_EVERY = 256 * 1024


class SegmentView(NamedTuple):
    data: Any
    header: SegmentHeader
    footer: Footer | None


class _Walk:
    """How far somebody is in a segment."""

    __slots__ = ("at_byte", "expected")

    at_byte: int
    expected: int
    """The offset that follows."""


class JournalReader:
    """Reads a journal that this or another process writes."""

    def __init__(self, path: str | Path, disk: Disk | None = None) -> None:
        self.layout = Layout(Path(path))
        self._disk = disk or RealDisk()
        self.meta = check_meta(self.layout, self._disk)
        self._open: OrderedDict[int, SegmentView] = OrderedDict()
        self._read: OrderedDict[tuple[int, int], Messages] = OrderedDict()
        """Frames that were read last, by segment id and byte."""
        self._seen: tuple[HighWater, list[int]] | None = None
        """The mark and the segments as `load` saw them last. What is below the mark stays there while it waits."""
        self._places: dict[int, list[tuple[int, int]]] = {}
        """By id of a segment without a footer: first offset and byte of some frames, where to start looking."""

    # --- where ---------------------------------------------------------------------------------------------

    def high_water(self) -> HighWater:
        """How far messages may be read now."""
        for _ in range(100):
            mark = read_high_water(self.layout.high_water, self._disk)
            if mark is not None:
                return mark
            if not self.layout.segment_bases(self._disk):
                return HighWater(0, 0, 0, SEGMENT_BYTES, 0)
        raise JournalCorrupt(f"{self.layout.high_water} is damaged; open the journal for writing to have it made again")

    def earliest(self) -> int:
        """The first offset that there still is."""
        mark = self.high_water()
        for base in self._readable_bases(mark):
            footer = self._view(base, mark).footer
            if footer is None or not footer.compacted:
                return base
        return mark.offset

    def latest(self) -> int:
        """The offset behind the last message that may be read."""
        return self.high_water().offset

    def offset_at(self, time: float) -> int:
        """The first offset appended at that time or later; `latest` when there is none yet."""
        wanted = round(time * 1_000_000)
        mark = self.high_water()
        for base in self._readable_bases(mark):
            view = self._view(base, mark)
            if view.footer is not None and (view.footer.compacted or view.footer.last_time < wanted):
                continue
            for frame in self._frames(base, view, mark, 0):
                if frame.time < wanted or frame.kind not in frames.MESSAGES or not frame.rows:
                    continue
                if frame.kind == frames.ROWS:  # all of one commit
                    return frame.base
                times = self._decode(base, view, frame, read_messages).times()
                return next(offset for offset, moment in times if moment >= wanted)
        return mark.offset

    def topology(self) -> Topology:
        """It is replaced as a whole; who meets the moment of replacing looks again."""
        try:
            return read_json(self.layout.topology, self._disk, Topology)
        except JournalCorrupt:
            return read_json(self.layout.topology, self._disk, Topology)

    # --- messages ------------------------------------------------------------------------------------------

    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[Any]:
        """Arrow record batches of the messages from offset `start` up to, not including, `end` (default: latest).

        `rows` cuts larger batches. Raises `OffsetGone` when `start` was removed by retention, `JournalCorrupt`.
        """
        mark = self.high_water()
        stop = mark.offset if end is None else min(end, mark.offset)
        self._check_start(start, stop)
        for messages in self._stored(start, stop, mark, read_messages):
            batch = messages.batch()
            if messages.first < start or messages.last >= stop:
                offsets = batch.column("offset")
                batch = batch.filter(pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, stop)))
            step = rows or max(1, batch.num_rows)
            for first in range(0, batch.num_rows, step):
                yield batch.slice(first, step)

    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        """What is between two offsets, by the footers: frames of sealed segments, the others as a whole."""
        mark = self.high_water()
        for base, view in self._segments(start, min(end, mark.offset), mark):
            footer = view.footer
            if start < base:  # what retention removed
                yield Stretch(start, base)
                start = base
            following, stored = (mark.offset, mark.at_byte) if footer is None else (footer.end, footer.bytes)
            each_stored = stored / max(1, following - base)
            if footer is None or footer.compacted or not footer.ranges:
                behind = min(end, following)
                yield Stretch(start, behind, stored=round(each_stored * (behind - start)))
            else:
                for each in footer.ranges:
                    if each.last >= start and each.first < end:
                        times = (each.first_time, each.last_time)
                        first, behind = max(start, each.first), min(end, each.last + 1)
                        size = round(each_stored * (behind - first))
                        blooms = Bloom(each.keys).may_hold, Bloom(each.correlations).may_hold
                        yield Stretch(first, behind, times, each.types, each.sources, size, *blooms)
            start = min(end, following)
        if start < end:
            yield Stretch(start, end)

    def stored(self, start: int, stop: int, read: Callable[[frames.Frame, Any], T]) -> Iterator[T]:
        """All that is stored between two offsets, also what retention kept only because it still waits. `read` is one
        of those in `content`."""
        return self._stored(start, stop, self.high_water(), read)

    def knows(self, segment_id: int, places: list[tuple[int, int]]) -> None:
        """First offset and byte of some frames of the segment that is written to, in order."""
        self._places = {segment_id: places}

    def _stored(self, start: int, stop: int, mark: HighWater, read: Callable[[frames.Frame, Any], T]) -> Iterator[T]:
        """The messages of frames in which there are some of these."""
        for base, view in self._segments(start, stop, mark):
            walk = _Walk()
            for frame in self._frames(base, view, mark, start, walk):
                if frame.kind not in frames.MESSAGES or not frame.rows or frame.base >= stop:
                    continue
                found = self._decode(base, view, frame, read)
                if isinstance(found, Rows | Outline):
                    self._gather(base, view, mark, found, walk)
                yield found

    def _gather(self, base: int, view: SegmentView, mark: HighWater, rows: Rows | Outline, walk: "_Walk") -> None:
        """Read the frames of rows that follow together with this one. What is wrong with one is said by who comes to
        it."""
        limit = mark.at_byte if base == mark.segment and view.footer is None else len(view.data)
        more = frames.row_frames(view.data, walk.at_byte, limit, view.header.segment_id, rows.end)
        try:
            walk.at_byte = rows.gather(memoryview(view.data), more, _GROUP_ROWS, _GROUP_BYTES) or walk.at_byte
        except (*READ_ERRORS, ValueError) as exc:
            raise JournalCorrupt(
                f"{self.layout.segment(base)} holds messages behind offset {rows.first} that cannot be read, though "
                f"their checksum is right: {exc}"
            ) from exc
        walk.expected = rows.end

    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        """(offset, envelope) of the messages from `start` up to `end`."""
        for batch in self.batches(start, end):
            yield from zip(batch.column("offset").to_pylist(), to_envelopes(batch), strict=True)

    async def follow(self, start: int, *, poll: float = _POLL_SECONDS) -> AsyncIterator[tuple[int, Envelope]]:
        """(offset, envelope) from `start` on, waiting for what is not there yet, for ever."""
        while True:
            stop = self.latest()
            for found in self.envelopes(start, stop):
                yield found
            start = max(start, stop)
            await asyncio.sleep(poll)

    def load(self, offsets: list[int]) -> list[Envelope]:
        """The envelopes at these offsets, which are in order."""
        if not offsets:
            return []
        if self._seen is None or self._seen[0].offset <= offsets[-1]:
            mark = self.high_water()
            self._seen = mark, self._readable_bases(mark)
        mark, bases = self._seen
        found: list[Envelope] = []
        done = 0
        while done < len(offsets):
            before = done
            base = bases[max(0, bisect_right(bases, offsets[done]) - 1)]
            view = self._view(base, mark)
            for frame in self._frames(base, view, mark, offsets[done]):
                if frame.kind not in frames.MESSAGES or not frame.rows:
                    continue
                messages = self._messages(base, view, frame)
                count = bisect_right(offsets, messages.last, lo=done) - done
                if count:
                    wanted = offsets[done : done + count]
                    there = messages.envelopes_at(wanted)
                    if len(there) != count:
                        raise JournalCorrupt(
                            f"{count - len(there)} of the offsets {wanted[0]} to {wanted[-1]} are gone from "
                            f"{self.layout.segment(base)}"
                        )
                    found += there
                    done += count
                if done == len(offsets) or (view.footer is not None and offsets[done] >= view.footer.end):
                    break
            if done == before:
                raise JournalCorrupt(f"offset {offsets[done]} is not in {self.layout.segment(base)}")
        return found

    def footer(self, base: int) -> Footer | None:
        """What a segment says of itself; None while it is written to."""
        return self._view(base, self.high_water()).footer

    def is_sealed(self, base: int) -> bool:
        """Whether its messages are in columns, for good."""
        header = self._view(base, self.high_water()).header
        return header.form == frames.SEALED or header.version < frames.VERSION

    def segment_frames(self, base: int) -> Iterator[tuple[frames.Frame, memoryview]]:
        """The frames of one segment with their bodies, checked."""
        mark = self.high_water()
        view = self._view(base, mark)
        for frame in self._frames(base, view, mark, 0):
            yield frame, self._body(base, view, frame)

    def forget(self, base: int) -> None:
        """The segment was rewritten: look at it anew."""
        self._open.pop(base, None)
        self._seen = None

    def dead_letter_frames(self, start: int) -> Iterator[tuple[frames.Frame, Any]]:
        """The frames of dead letters from an offset on, with their bodies."""
        mark = self.high_water()
        for base, view in self._segments(start, mark.offset, mark):
            if view.footer is not None and not view.footer.dead_letters:
                continue
            for frame in self._frames(base, view, mark, start):
                if frame.kind == frames.DEAD_LETTERS:
                    yield frame, self._body(base, view, frame)

    # --- named readers -------------------------------------------------------------------------------------

    def reader_offsets(self) -> list[ReaderOffset]:
        """The named readers; retention keeps what they have not read."""
        paths = self.layout.files(self.layout.readers, self._disk)
        return [read_json(path, self._disk, ReaderOffset) for path in paths]

    def save_reader_offset(self, name: str, offset: int) -> None:
        """Remember how far a named reader has come; never moves it back."""
        path = self.layout.readers / f"{check_name(name, 'the reader')}.json"
        known = [each.offset for each in self.reader_offsets() if each.name == name]
        if not known or offset > known[0]:
            self._disk.replace(path, msgspec.json.encode(ReaderOffset(name, offset)))

    def forget_reader(self, name: str) -> None:
        self._disk.remove(self.layout.readers / f"{check_name(name, 'the reader')}.json")

    # --- within segments -----------------------------------------------------------------------------------

    def _check_start(self, start: int, stop: int) -> None:
        earliest = self.earliest()
        if start < earliest:
            raise OffsetGone(
                f"the messages before offset {earliest} were removed from {self.layout.root} by retention; reading was "
                f"to start at {start}"
            )
        if start > max(stop, self.latest()):
            raise OffsetGone(f"offset {start} is not in {self.layout.root} yet: it ends at {self.latest()}")

    def _segments(self, start: int, stop: int, mark: HighWater) -> Iterator[tuple[int, SegmentView]]:
        bases = self._readable_bases(mark)
        first = max(0, bisect_right(bases, start) - 1)
        for base in bases[first:]:
            if base >= stop:
                return
            yield base, self._view(base, mark)

    def _readable_bases(self, mark: HighWater) -> list[int]:
        """The segments up to the one that the mark is in; one behind it may be in the making."""
        return [base for base in self.layout.segment_bases(self._disk) if base <= mark.segment]

    def _view(self, base: int, mark: HighWater) -> SegmentView:
        """A segment's bytes. One that is written to is looked at anew once it is sealed or has grown."""
        known = self._open.get(base)
        if known is not None and (
            known.footer is not None or (base == mark.segment and mark.at_byte <= len(known.data))
        ):
            self._open.move_to_end(base)
            return known
        path = self.layout.segment(base)
        try:
            data = self._disk.view(path)
        except FileNotFoundError:
            raise OffsetGone(f"{path} was removed by retention while it was read") from None
        header = frames.read_segment_header(data)
        if header is None:
            raise JournalCorrupt(f"{path} is damaged at byte 0: its header cannot be read")
        # The one that is written to may be cut to its size at any moment, so its end is not looked at in memory. A
        # sealed one is not written to, whatever a mark says that was read before; nor is one that has its trailer.
        written_to = base == mark.segment and header.form != frames.SEALED and not self._is_rolled(path, len(data))
        footer = None if written_to else frames.read_footer(data, header)
        if footer is None and header.form == frames.SEALED:
            raise JournalCorrupt(
                f"{path} is damaged at its end: its footer cannot be read. Run 'faregate journal verify' to see what "
                "is lost, 'faregate journal repair' to set it aside"
            )
        view = self._open[base] = SegmentView(data, header, footer)
        while len(self._open) > _OPEN_SEGMENTS:
            self._open.popitem(last=False)
        return view

    def _is_rolled(self, path: Path, size: int) -> bool:
        """Also one that a repair has written: offsets may be lost there, and only its footer says so."""
        at_byte = max(0, size - frames.TRAILER_BYTES)
        return self._disk.read(path, at_byte, frames.TRAILER_BYTES).endswith(frames.SEALED_MAGIC)

    def _frames(
        self, base: int, view: SegmentView, mark: HighWater, start: int, walk: "_Walk | None" = None
    ) -> Iterator[frames.Frame]:
        """The headers of the readable frames that hold `start` or something later. Whoever reads some of them itself
        moves the `walk` on."""
        written_to = base == mark.segment and view.footer is None
        limit = mark.at_byte if written_to else len(view.data)
        gaps = view.footer is not None and (view.footer.compacted or bool(view.footer.lost))
        walk = walk or _Walk()
        walk.at_byte, walk.expected = SEGMENT_BYTES, base
        if view.footer is not None and view.footer.index:
            found = bisect_right(view.footer.index, start, key=lambda entry: entry[0]) - 1
            walk.expected, _, walk.at_byte = view.footer.index[max(0, found)]
        places = self._places_of(view)
        if places:
            found = bisect_right(places, start, key=lambda entry: entry[0]) - 1
            if found >= 0:
                walk.expected, walk.at_byte = places[found]
        while walk.at_byte < limit:
            at_byte = walk.at_byte
            frame = frames.read_header(view.data, at_byte, view.header.segment_id)
            # A frame that is passed over is not summed up: its offsets must join those of its neighbours.
            if frame is None or (frame.base != walk.expected and not gaps):
                raise self._damaged(base, at_byte)
            if (gaps or frame.kind == frames.FOOTER) and not frames.is_sound(view.data, frame):
                raise self._damaged(base, at_byte)
            if frame.kind == frames.FOOTER:
                return
            if places is not None and (not places or at_byte - places[-1][1] >= _PLACES_EVERY):
                places.append((frame.base, at_byte))
            walk.at_byte, walk.expected = frame.end, frame.base + frame.rows
            if walk.expected > start or gaps:
                yield frame
        if written_to and walk.expected != mark.offset:
            raise self._damaged(base, walk.at_byte)

    def _places_of(self, view: SegmentView) -> list[tuple[int, int]] | None:
        if view.footer is not None:  # which has an index
            return None
        if view.header.segment_id not in self._places:
            self._places.clear()  # one segment is written to at a time
        return self._places.setdefault(view.header.segment_id, [])

    def _messages(self, base: int, view: SegmentView, frame: frames.Frame) -> Messages:
        """The same as `_decode`, for who comes back to a frame soon."""
        key = (view.header.segment_id, frame.at_byte)
        found = self._read.get(key)
        if found is None:
            found = self._decode(base, view, frame, read_messages)
            if frame.rows > 1:
                self._read[key] = found
            while len(self._read) > (_KEPT_ROWS if isinstance(found, Rows) else _KEPT_COLUMNS):
                self._read.popitem(last=False)
        return found

    def _decode(self, base: int, view: SegmentView, frame: frames.Frame, read: Callable[[frames.Frame, Any], T]) -> T:
        try:
            return read(frame, self._body(base, view, frame))
        except (*READ_ERRORS, ValueError) as exc:
            raise JournalCorrupt(
                f"{self.layout.segment(base)} holds messages at byte {frame.at_byte} (offset {frame.base}) that cannot "
                f"be read, though their checksum is right: {exc}"
            ) from exc

    def _body(self, base: int, view: SegmentView, frame: frames.Frame) -> memoryview:
        """Checked."""
        if not frames.is_sound(view.data, frame):
            raise self._damaged(base, frame.at_byte)
        return frames.body_of(view.data, frame)

    def _damaged(self, base: int, at_byte: int) -> JournalCorrupt | JournalTooNew:
        unknown = frames.describe_unknown(self._open[base].data, at_byte) if base in self._open else None
        if unknown is not None:
            return JournalTooNew(f"{self.layout.segment(base)} {unknown}")
        return JournalCorrupt(
            f"{self.layout.segment(base)} is damaged at byte {at_byte}: run 'faregate journal verify' to see what "
            "is lost, 'faregate journal repair' to set it aside"
        )
