"""The one writer of segments: a header, frames one behind the other, and the footer that ends them.

Rules kept here:
- A frame's place, the chain of CRCs and the numbers for the footer move on together, once the bytes are written.
- Nothing here syncs, and errors of the file are the caller's: the log fails for good, a repair stops.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from faregate.broker.journal import frame as frames
from faregate.broker.journal.disk import File
from faregate.broker.journal.frame import NO_BATCH, SEGMENT_BYTES, Footer, Frame, SegmentHeader
from faregate.errors import MessageTooLarge

_INDEX_EVERY = 256 * 1024


def new_header(base: int, commit: int, time: int, form: int = frames.HOT) -> SegmentHeader:
    return SegmentHeader(frames.VERSION, form, int.from_bytes(os.urandom(8), "little"), base, commit, time)


class Memory:
    """A file of bytes in memory, written from its beginning to its end."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, at: int, buffers: Sequence[Any]) -> int:
        self.data += b"".join(buffers)
        return len(self.data) - at

    def sync(self) -> None: ...
    def truncate(self, size: int) -> None: ...
    def close(self) -> None: ...


class Segment:
    """A segment that is written to, or only counted."""

    def __init__(self, header: SegmentHeader, file: File, size: int = 0) -> None:
        self.header = header
        self.file = file
        self.size = size
        self.at_byte = SEGMENT_BYTES
        self.previous = 0
        self.frames = 0
        self.messages = 0
        self.dead_letters = 0
        self.types: Counter[str] = Counter()
        self.first_time = header.time
        self.last_time = header.time
        self.index: list[tuple[int, int, int]] = []
        self.batches: set[bytes] = set()

    def start(self) -> None:
        self.file.write(0, (frames.pack_segment_header(self.header),))

    def write(
        self, body: Any, types: Mapping[str, int], *, kind: int, rows: int, base: int, time: int, **more: Any
    ) -> None:
        """Write a frame behind the last one; `more` is what else its header says."""
        chain: dict[str, Any] = {"previous": self.previous, "segment_id": self.header.segment_id}
        header, padding, crc = frames.pack_frame(body, kind=kind, rows=rows, base=base, time=time, **chain, **more)
        end = self.at_byte + self.file.write(self.at_byte, (header, body, padding))
        self._move_on(kind, rows, types, base, time, crc, end)

    def copy(self, frame: Frame, body: Any, types: Mapping[str, int]) -> None:
        """Write a frame of another segment here; what was a part of a batch is whole by itself."""
        self.write(body, types, kind=frame.kind, rows=frame.rows, base=frame.base, time=frame.time, commit=frame.commit)
        if frame.batch != NO_BATCH:
            self.batches.add(frame.batch)

    def count(self, frame: Frame, types: Mapping[str, int]) -> None:
        """Take a frame that is there already into the numbers that the footer will hold."""
        self.at_byte = frame.at_byte
        self._move_on(frame.kind, frame.rows, types, frame.base, frame.time, frame.crc, frame.end)
        if frame.batch != NO_BATCH:
            self.batches.add(frame.batch)

    def _move_on(
        self, kind: int, rows: int, types: Mapping[str, int], base: int, time: int, crc: int, end: int
    ) -> None:
        if not self.messages and not self.dead_letters:
            self.first_time = time
        if kind in frames.MESSAGES:
            self.messages += rows
            for name, count in types.items():
                self.types[name] += count
        else:
            self.dead_letters += rows
        self.last_time = time
        self.frames += 1
        if not self.index or self.at_byte - self.index[-1][2] >= _INDEX_EVERY:
            self.index.append((base, time, self.at_byte))
        self.at_byte, self.previous = end, crc

    def footer(self, end: int, commit: int) -> Footer:
        return Footer(
            base=self.header.base,
            end=end,
            first_time=self.first_time,
            last_time=self.last_time,
            messages=self.messages,
            dead_letters=self.dead_letters,
            bytes=self.at_byte,
            last_commit=commit,
            types=dict(self.types),
            index=self.index,
            batches=[batch.hex() for batch in self.batches],
        )

    def end(self, footer: Footer) -> int:
        """Write the footer, behind which nothing follows; returns how long the segment is then."""
        body = msgspec.json.encode(footer)
        header, padding, _ = frames.pack_frame(
            body,
            kind=frames.FOOTER,
            previous=self.previous,
            rows=0,
            commit=footer.last_commit,
            base=footer.end,
            time=footer.last_time,
            segment_id=self.header.segment_id,
        )
        return self.at_byte + self.file.write(self.at_byte, (header, body, padding, frames.pack_trailer(self.at_byte)))


def batch_frames(bodies: Iterable[tuple[int, Any, int]], parts: int) -> Iterator[tuple[bytes, Any, bytes]]:
    """The frames of a batch for the spool, of (kind, body, rows) each: chained, and without a place in a segment."""
    previous = 0
    for part, (kind, body, rows) in enumerate(bodies):
        if memoryview(body).nbytes > frames.LONGEST_BODY:
            raise MessageTooLarge(
                f"{rows} messages are over what a frame of the journal takes, {frames.LONGEST_BODY} bytes"
            )
        version = 1 if kind in (frames.COLUMNS, frames.DEAD_LETTERS) else frames.VERSION  # an older program reads 1
        header, padding, previous = frames.pack_frame(
            body, kind=kind, previous=previous, rows=rows, part=part, parts=parts, version=version
        )
        yield header, body, padding
