"""The append-only log: segments of frames. Synchronous, single-threaded, without queues: bytes in, bytes durable.

It writes hot segments, whose messages are rows. A full one is rolled: it gets its footer, and the next one begins. That
it is rewritten as columns later (`sealing.py`) is no matter of the log.

Rules kept here:
- `sync` returns after the frames written before it are durable; only then does the high-water mark cover them.
- A failed write or sync leaves the log failed for good: what the disk holds is unknown from then on.
  No room on the disk is not such a failure: nothing was written.
- A batch of several frames lies in one segment; until its last frame is synced it is not there.
- Opening truncates a torn tail only if nothing behind it, and no high-water mark, shows that it was confirmed.
- Opening reads the hot segment from the last `LogPoint` on, which was synced when it was taken.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from faregate.broker.journal import dead_letters
from faregate.broker.journal import frame as frames
from faregate.broker.journal.content import READ_ERRORS, read_messages, write_rows
from faregate.broker.journal.disk import Disk, is_full
from faregate.broker.journal.frame import FRAME_BYTES, NO_BATCH, SEGMENT_BYTES, TRAILER_BYTES, Footer
from faregate.broker.journal.high_water import HighWater, pack, read_high_water
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.segment import Segment, new_header
from faregate.errors import JournalCorrupt, JournalFailed, JournalFull, JournalTooNew, MessageTooLarge
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter

log = logging.getLogger("faregate.journal")

SEGMENT_SIZE = 64 * 1024 * 1024
MOST_ROWS = 10_000
MOST_BYTES = 8 * 1024 * 1024
"""What one frame holds at the most."""
MOST_FRAMES = 20_000
"""What one segment holds at the most: opening reads the frames of the hot one, one after another, to know what was
published last. Of sealed ones that takes no time."""
_BESIDE_BODY = 300
"""What a message takes beside its body, roughly."""


def now_us() -> int:
    return time.time_ns() // 1000


class LogPoint(msgspec.Struct):
    """How far the hot segment had come at some moment, all of it synced: what opening need not read again."""

    segment: int
    segment_id: int
    at_byte: int
    previous: int
    """The CRC of the last frame."""
    offset: int
    commit: int
    time: int
    frames: int
    messages: int
    dead_letters: int
    first_time: int
    last_time: int
    types: dict[str, int]
    index: list[tuple[int, int, int]]
    batches: list[str]

    def restore(self, segment: Segment) -> None:
        segment.at_byte, segment.previous = self.at_byte, self.previous
        segment.frames, segment.messages, segment.dead_letters = self.frames, self.messages, self.dead_letters
        segment.first_time, segment.last_time = self.first_time, self.last_time
        segment.types, segment.index = Counter(self.types), list(self.index)
        segment.batches = set(map(bytes.fromhex, self.batches))


class Log:
    def __init__(
        self,
        layout: Layout,
        disk: Disk,
        *,
        segment_size: int = SEGMENT_SIZE,
        clock: Callable[[], int] = now_us,
        point: LogPoint | None = None,
    ) -> None:
        self._point = point
        self._layout = layout
        self._disk = disk
        self._segment_size = segment_size
        self._clock = clock
        self._mark = disk.open(layout.high_water)
        self._segment: Segment | None = None
        self._failure: JournalFailed | None = None
        self._unsynced = 0
        """How many frames were written since the last sync."""
        self.written = 0
        """Bytes of frames since it was opened."""
        self.next_offset = 0
        self.commit = 0
        self.time = 0
        self.batches: set[bytes] = set()
        """Spooled batches that are in the log; they must not be appended again."""
        self.bases: list[int] = []
        """The first offsets of the segments there are."""
        self.places: list[tuple[int, int]] = []
        """First offset and byte of some frames of the hot segment, as its point has them."""
        self.truncated = 0
        """How many bytes of a torn tail opening took away."""
        self._recover()

    # --- writing ------------------------------------------------------------------------------------------

    def append(self, envelopes: Sequence[Envelope], topics: Sequence[int], *, batch: bytes | None = None) -> range:
        """Write messages as one atomic unit; returns their offsets. Not durable before `sync`.

        `batch` marks a batch from the spool. Raises `JournalFull` with nothing written, or `JournalFailed`.
        """
        first = self.next_offset
        offsets = range(first, first + len(envelopes))
        moment = self._next_time()
        pieces = [(envelopes[a:b], topics[a:b]) for a, b in _pieces(envelopes)]
        bodies = [(write_rows(*piece), piece[0]) for piece in pieces]
        if max([len(body) for body, _ in bodies]) > frames.LONGEST_BODY:
            raise MessageTooLarge(f"a message is over what a journal takes, {frames.LONGEST_BODY} bytes")
        mark = batch if batch is not None else (os.urandom(16) if len(bodies) > 1 else NO_BATCH)
        self._make_room(sum([FRAME_BYTES + frames.padded(len(body)) for body, _ in bodies]), moment)
        for part, (body, rows) in enumerate(bodies):
            types = {rows[0].type: 1} if len(rows) == 1 else Counter([envelope.type for envelope in rows])
            marks: dict[str, Any] = {"batch": mark, "part": part, "parts": len(bodies)}
            self._write(body, types, kind=frames.ROWS, rows=len(rows), time=moment, **marks)
            self.next_offset += len(rows)
        if batch is not None:
            self._current().batches.add(batch)
            self.batches.add(batch)
        return offsets

    def append_dead_letters(self, letters: Sequence[DeadLetter]) -> list[int]:
        """Write dead letters; they have offsets of their own, and readers of messages do not see them."""
        body = dead_letters.encode(letters)
        moment = self._next_time()
        self._make_room(FRAME_BYTES + frames.padded(len(body)), moment)
        first = self.next_offset
        self._write(body, {}, kind=frames.DEAD_LETTERS, rows=len(letters), time=moment)
        self.next_offset += len(letters)
        return list(range(first, self.next_offset))

    def _write(self, body: Any, types: Mapping[str, int], *, part: int = 0, **more: Any) -> None:
        marks: dict[str, Any] = {"commit": self.commit + 1, "since": self._unsynced, "part": part}
        try:
            self._current().write(body, types, base=self.next_offset, **marks, **more)
        except OSError as exc:
            if is_full(exc) and not part:
                raise self._full(exc) from exc
            raise self.fail("writing", exc) from exc
        self.commit += 1
        self._unsynced += 1
        self.written += FRAME_BYTES + len(body)

    def sync(self) -> None:
        """Make everything written durable, then move the high-water mark."""
        if self._segment is not None or self._failure is not None:  # else sealed, and nothing written since
            self._sync()

    def _sync(self) -> None:
        segment = self._current()
        try:
            segment.file.sync()
        except OSError as exc:
            raise self.fail("syncing", exc) from exc
        self._unsynced = 0
        self._move_mark(segment)

    def _move_mark(self, segment: Segment) -> None:
        mark = HighWater(self.next_offset, self.commit, segment.header.base, segment.at_byte, self.time)
        try:
            self._mark.write(0, (pack(mark),))
        except OSError as exc:
            raise self.fail("moving the high-water mark", exc) from exc

    def fail(self, doing: str, exc: OSError) -> JournalFailed:
        """From now on nothing is confirmed. Trying again could confirm what the disk has lost."""
        self._failure = JournalFailed(
            f"{doing} the journal in {self._layout.root} failed ({exc.strerror or exc}): nothing more is confirmed; "
            "what was confirmed before is safe. Check the disk, then start again"
        )
        log.critical("%s", self._failure)
        return self._failure

    def _full(self, exc: OSError) -> JournalFull:
        return JournalFull(
            f"the disk of {self._layout.root} has no room ({exc.strerror}): nothing was written; make room, try again"
        )

    def _current(self) -> Segment:
        if self._failure is not None:
            raise self._failure
        assert self._segment is not None
        return self._segment

    def _next_time(self) -> int:
        """Now; never before what is in the log already, also when the clock was set back."""
        self.time = max(self.time, self._clock())
        return self.time

    def _make_room(self, size: int, moment: int) -> None:
        size += FRAME_BYTES + TRAILER_BYTES  # of the footer
        if self._segment is None and self._failure is None:
            # The last one was sealed and the disk had no room for the next.
            self._start_segment(moment, size)
        segment = self._current()
        if segment.at_byte + size <= segment.size and segment.frames < MOST_FRAMES:
            return
        if segment.messages or segment.dead_letters:
            self.roll()
            self._start_segment(moment, size)
            return
        try:
            segment.size = segment.at_byte + size
            segment.file.truncate(segment.size)
        except OSError as exc:
            raise self.fail("growing a segment of", exc) from exc

    def _start_segment(self, moment: int, room: int = 0) -> None:
        path, size = self._layout.segment(self.next_offset), max(self._segment_size, SEGMENT_BYTES + room)
        try:
            file = self._disk.create(path, size)
        except OSError as exc:
            if is_full(exc):
                raise self._full(exc) from exc
            raise self.fail("making a segment of", exc) from exc
        segment = Segment(new_header(self.next_offset, self.commit, moment), file, size)
        try:
            segment.start()
            file.sync()  # frames without a header before them would look like damage
        except OSError as exc:
            raise self.fail("writing", exc) from exc
        self._segment = segment
        self.bases.append(self.next_offset)

    def roll(self) -> None:
        """End the current segment with its footer; it is not written to again. Raises `JournalFull` when there is no
        room for the footer, and the segment goes on, or `JournalFailed`."""
        segment = self._current()
        try:
            segment.file.sync()  # a footer that is there says that everything before it is
            try:
                size = segment.end(segment.footer(self.next_offset, self.commit))
            except OSError as exc:
                if is_full(exc):  # only messages have their space reserved; whatever is written next replaces it
                    raise self._full(exc) from exc
                raise
            segment.file.truncate(size)
            segment.file.sync()
            segment.file.close()
        except OSError as exc:
            raise self.fail("rolling a segment of", exc) from exc
        self._move_mark(segment)
        self._segment = None
        self._unsynced = 0

    def point(self) -> LogPoint | None:
        """How far the hot segment has come; None while something of it is not synced."""
        segment = self._segment
        if segment is None or self._unsynced or self._failure is not None:
            return None
        return LogPoint(
            segment=segment.header.base,
            segment_id=segment.header.segment_id,
            at_byte=segment.at_byte,
            previous=segment.previous,
            offset=self.next_offset,
            commit=self.commit,
            time=self.time,
            frames=segment.frames,
            messages=segment.messages,
            dead_letters=segment.dead_letters,
            first_time=segment.first_time,
            last_time=segment.last_time,
            types=dict(segment.types),
            index=list(segment.index),
            batches=[batch.hex() for batch in segment.batches],
        )

    def close(self) -> None:
        if self._segment is not None:
            self._segment.file.close()
        self._mark.close()

    # --- opening ------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        bases = self._layout.segment_bases(self._disk)
        mark = read_high_water(self._layout.high_water, self._disk)
        if mark is not None and (not bases or bases[-1] < mark.segment):
            raise JournalCorrupt(
                f"{self._layout.segment(mark.segment)} is missing, and messages in it were confirmed: restore it, or "
                "run 'faregate journal repair'"
            )
        expected = bases[0] if bases else 0
        for base in bases:
            if base != expected:
                raise JournalCorrupt(
                    f"{self._layout.segment(expected)} is missing: the next segment there is starts at offset {base}. "
                    "Restore it, or run 'faregate journal repair'"
                )
            if base != bases[-1]:
                expected = self._read_rolled(base).end
        if bases:
            self._reopen(bases[-1], mark)
        else:
            self._start_segment(self._next_time())
        self.bases = self._layout.segment_bases(self._disk)
        self._sync()

    def _read_rolled(self, base: int) -> Footer:
        path = self._layout.segment(base)
        data = self._disk.view(path)
        header = frames.read_segment_header(data)
        footer = frames.read_footer(data, header) if header else None
        if footer is None:
            raise JournalCorrupt(
                f"{path} is damaged at its {'end' if header else 'start'} (its "
                f"{'footer' if header else 'header'} cannot be read): run 'faregate journal verify' to see what is lost"
            )
        self._take_over(footer)
        return footer

    def _take_over(self, footer: Footer) -> None:
        """The log goes on behind this segment."""
        self.next_offset, self.commit, self.time = footer.end, footer.last_commit, footer.last_time
        self.batches.update(map(bytes.fromhex, footer.batches))

    def _reopen(self, base: int, mark: HighWater | None) -> None:
        path = self._layout.segment(base)
        data = self._disk.view(path)
        header = frames.read_segment_header(data)
        if header is None:
            self._replace_headless(base, data, mark)
            return
        self.next_offset = base
        self.commit, self.time = max(self.commit, header.commit), max(self.time, header.time)
        footer = frames.read_footer(data, header)
        if footer is not None:
            self._take_over(footer)
            self._go_on_behind(base)
            return
        segment = Segment(header, self._disk.open(path), len(data))
        if self._is_before(header, mark) and self._point is not None:
            self._point.restore(segment)
            self.places = [*((first, at) for first, _, at in self._point.index), (self._point.offset, segment.at_byte)]
            self.next_offset, self.commit = self._point.offset, self._point.commit
            self.time = max(self.time, self._point.time)
        kept = self._scan(segment, data)
        unknown = frames.describe_unknown(data, kept)
        if unknown is not None:
            raise JournalTooNew(f"{path} {unknown}")
        if mark is not None and mark.segment == base and segment.at_byte < mark.at_byte:
            raise self._corrupt(path, segment.at_byte, f"confirmed up to byte {mark.at_byte}")
        later = frames.later_frame(data, header, kept, self.commit)
        if later is not None:
            raise self._corrupt(path, segment.at_byte, f"a sound frame of a later commit follows at {later.at_byte}")
        self._cut_tail(segment, data)
        self._segment = segment
        if header.version < frames.VERSION:  # no frame of rows may follow here
            self.roll()
            self._go_on_behind(base)

    def _go_on_behind(self, base: int) -> None:
        """Start a segment behind that one; in its place, if there is nothing in it."""
        if self.next_offset == base:
            self._disk.remove(self._layout.segment(base))
        self._start_segment(self._next_time())

    def _is_before(self, header: frames.SegmentHeader, mark: HighWater | None) -> bool:
        """Whether the point is of this segment, and within what was confirmed."""
        point = self._point
        if point is None or mark is None or mark.segment != header.base:
            return False
        return point.segment_id == header.segment_id and point.at_byte <= mark.at_byte and point.offset <= mark.offset

    def _corrupt(self, path: Any, at_byte: int, why: str) -> JournalCorrupt:
        return JournalCorrupt(
            f"{path} is damaged at byte {at_byte}: {why}, so this is not a torn end but corruption. Nothing was "
            "changed; 'faregate journal verify' shows what is lost, 'faregate journal repair' sets it aside"
        )

    def _scan(self, segment: Segment, data: Any) -> int:
        """Count every whole commit; returns where the sound frames end, those of an unfinished batch included."""
        unfinished: list[frames.Frame] = []
        end = segment.at_byte
        for frame in frames.scan(data, segment.header, segment.at_byte, segment.previous):
            if frame.kind == frames.FOOTER:
                break  # rolling was interrupted: the segment goes on where its messages end
            end = frame.end
            unfinished.append(frame)
            if frame.part + 1 < frame.parts:
                continue
            for counted in unfinished:
                segment.count(counted, self._types(segment.header.base, data, counted))
                self.next_offset = counted.base + counted.rows
                self.commit, self.time = counted.commit, max(self.time, counted.time)
            unfinished.clear()
        if unfinished:
            self.commit = unfinished[-1].commit
        self.batches |= segment.batches
        return end

    def _types(self, base: int, data: Any, frame: frames.Frame) -> Mapping[str, int]:
        if frame.kind not in frames.MESSAGES:
            return {}
        try:
            return read_messages(frame, frames.body_of(data, frame)).types()
        except (*READ_ERRORS, ValueError) as exc:
            why = f"its messages cannot be read ({exc}), though their checksum is right"
            raise self._corrupt(self._layout.segment(base), frame.at_byte, why) from exc

    def _cut_tail(self, segment: Segment, data: Any) -> None:
        """Make everything behind the last commit zeros again."""
        torn = frames.written_end(data, segment.at_byte) - segment.at_byte
        if torn:
            self.truncated = torn
            log.warning("%s: a torn tail of %d bytes is removed; it was never confirmed", self._layout.root, torn)
            segment.file.truncate(segment.at_byte)
            segment.file.sync()
            segment.file.truncate(segment.size)

    def _replace_headless(self, base: int, data: Any, mark: HighWater | None) -> None:
        """A segment whose header never reached the disk holds nothing that was confirmed, unless the mark says so."""
        path = self._layout.segment(base)
        confirmed = mark is not None and mark.segment == base and mark.at_byte > SEGMENT_BYTES
        if confirmed or frames.FRAME_MAGIC in bytes(memoryview(data)):
            raise self._corrupt(path, 0, "its header cannot be read but there are frames in it")
        self.next_offset = base
        self._disk.remove(path)
        self._start_segment(self._next_time())


def _pieces(envelopes: Sequence[Envelope]) -> list[tuple[int, int]]:
    """Cut into stretches that fit a frame."""
    whole = sum([len(envelope.body) for envelope in envelopes]) + _BESIDE_BODY * len(envelopes)
    if whole <= MOST_BYTES and len(envelopes) <= MOST_ROWS:
        return [(0, len(envelopes))]
    pieces: list[tuple[int, int]] = []
    start = size = 0
    for number, envelope in enumerate(envelopes):
        size += len(envelope.body) + _BESIDE_BODY
        if number > start and (size > MOST_BYTES or number - start >= MOST_ROWS):
            pieces.append((start, number))
            start, size = number, len(envelope.body) + _BESIDE_BODY
    pieces.append((start, len(envelopes)))
    return pieces
