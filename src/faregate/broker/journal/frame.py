"""The bytes of a journal: segment header, frames, footer, trailer. Pure functions; docs/journal.md specifies them.

Rules kept here:
- A frame is one group commit and one atomic unit: it is valid as a whole, by its CRC, or it is not there.
- Every frame names its segment's id, a random number, and the CRC of the frame before it: bytes that merely look like
  a frame (a payload may hold anything) are not taken for one.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from faregate.broker.journal.checksum import crc32

VERSION = 2
"""What is written; version 1 is read."""
FRAME_MAGIC = b"FGJ\x01"
SEGMENT_MAGIC = b"FGSEG\x00\x00\x01"
SEALED_MAGIC = b"FGSEALED"

COLUMNS, DEAD_LETTERS, FOOTER, ROWS, PARTS = 1, 2, 3, 4, 5
"""What the body of a frame holds. Rows and columns are messages; parts are in the spool alone."""
MESSAGES = frozenset({COLUMNS, ROWS})
_KINDS = {1: {COLUMNS, DEAD_LETTERS, FOOTER}, 2: {COLUMNS, DEAD_LETTERS, FOOTER, ROWS, PARTS}}
"""By version of the frame."""

HOT, SEALED = 1, 2
"""Forms of a segment: written to, or written to once, its messages in rows; or rewritten, its messages in columns. A
segment of version 1 has no form."""

_FRAME = struct.Struct("<4sHHIIIIQQqQ16sHHI")
_SEGMENT = struct.Struct("<8sIIQQQqIxxxxxxxxxxxx")
_TRAILER = struct.Struct("<QI4x8s")
FRAME_BYTES = _FRAME.size
SEGMENT_BYTES = _SEGMENT.size
TRAILER_BYTES = _TRAILER.size
NO_BATCH, NO_SEGMENT = bytes(16), 0
"""Of a frame that belongs to no batch; of one that is in no segment, but in the spool."""
_CRC_AT, _NO_CRC = 12, bytes(4)
"""Where the CRC stands in a header, and what stands there while it is computed."""
LONGEST_BODY = LARGEST_BATCH = 1 << 30
"""A length beyond this is damage, not a frame, nor a batch, which is read as a whole: nothing is allocated for it."""


class Frame(NamedTuple):
    """Where a frame stands in its segment, and its header, field by field."""

    at_byte: int
    kind: int
    length: int
    crc: int
    previous: int
    rows: int
    commit: int
    base: int
    """The offset of its first row, were there no gaps; rows carry their own offsets."""
    time: int
    """Microseconds since the epoch; never less than the frame before."""
    segment_id: int
    batch: bytes
    part: int
    parts: int
    since: int
    """How many frames were written before it since the last sync: those may be missing though it is there."""

    @property
    def body(self) -> int:
        return self.at_byte + FRAME_BYTES

    @property
    def end(self) -> int:
        return self.at_byte + FRAME_BYTES + padded(self.length)


class SegmentHeader(NamedTuple):
    version: int
    form: int
    segment_id: int
    base: int
    commit: int
    time: int


NO_BLOOM = msgspec.Raw(b"null")
"""Of segments that an older version sealed."""


class BatchRange(msgspec.Struct, array_like=True):
    """What is in one frame of columns, so that a reader can pass over it."""

    at_byte: int
    first: int
    last: int
    """Offsets."""
    first_time: int
    last_time: int
    topics: list[int]
    types: list[str]
    sources: list[str]
    keys: msgspec.Raw = NO_BLOOM
    correlations: msgspec.Raw = NO_BLOOM
    """Bloom filters (`bloom`), as they stand in the JSON: most who read a footer want none of them."""


class Footer(msgspec.Struct, omit_defaults=True):
    """What a segment says of itself that is not written to any more, so that opening need not read it."""

    base: int
    end: int
    """The offset that the next segment starts with."""
    first_time: int
    last_time: int
    messages: int
    dead_letters: int = msgspec.field(name="poison")  # the name in the file
    bytes: int
    last_commit: int
    types: dict[str, int]
    index: list[tuple[int, int, int]]
    """Now and then a frame's (base offset, time, byte): where to start looking."""
    batches: list[str] = []
    """The spooled batches in it, in hexadecimal."""
    lost: list[tuple[int, int]] = []
    """Offsets (first, last) that a repair could not save; the log view passes over them."""
    compacted: bool = False
    """Only messages that still waited were kept: the log view starts behind it."""
    ranges: list[BatchRange] = []
    """Of each frame of columns in a sealed segment."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A file beside a spooled batch, with some of its frames."""

    name: str
    pieces: int
    """Each a batch of its own, one behind the other."""
    bytes: int


def padded(length: int) -> int:
    """Frames start at multiples of 8, as Arrow wants its buffers."""
    return (length + 7) & ~7


def pack_frame(
    body: Any,
    *,
    kind: int,
    previous: int,
    rows: int,
    commit: int = 0,
    base: int = 0,
    time: int = 0,
    segment_id: int = 0,
    batch: bytes = NO_BATCH,
    part: int = 0,
    parts: int = 1,
    since: int = 0,
    version: int = VERSION,
) -> tuple[bytes, bytes, int]:
    """The header, the padding behind the body, and the CRC."""
    length = memoryview(body).nbytes
    fields = (rows, commit, base, time, segment_id, batch, part, parts, since)
    bare = _FRAME.pack(FRAME_MAGIC, version, kind, length, 0, previous, *fields)
    crc = crc32(body, crc32(bare))
    header = _FRAME.pack(FRAME_MAGIC, version, kind, length, crc, previous, *fields)
    return header, bytes(padded(length) - length), crc


def read_header(data: Any, at_byte: int, segment_id: int | None = None) -> Frame | None:
    """The header at a byte, unless no frame of this segment can stand there. The body is not checked."""
    if at_byte + FRAME_BYTES > len(data):
        return None
    magic, version, *fields = _FRAME.unpack_from(data, at_byte)
    frame = Frame(at_byte, *fields)
    if magic != FRAME_MAGIC or frame.kind not in _KINDS.get(version, ()) or frame.length > LONGEST_BODY:
        return None
    if (segment_id is not None and frame.segment_id != segment_id) or frame.end > len(data):
        return None
    if frame.kind == PARTS and segment_id != NO_SEGMENT:
        return None
    return frame


def row_frames(data: Any, at_byte: int, limit: int, segment_id: int, base: int) -> Iterator[tuple[int, int, int, int]]:
    """(first byte of its body, end of its body, time, rows) of frames of rows, sound ones, as long as one follows
    another without a gap. Somebody else says what is there when they end before the limit.

    The same as `read_header` and `is_sound`, for who reads a hundred thousand of them.
    """
    view, unpack = memoryview(data), _FRAME.unpack_from
    after_crc = _CRC_AT + len(_NO_CRC)
    while at_byte + FRAME_BYTES <= limit:
        magic, version, kind, length, crc, _, rows, _, first, time, its_segment, _, _, _, _ = unpack(view, at_byte)
        body = at_byte + FRAME_BYTES
        end = body + length
        if magic != FRAME_MAGIC or kind != ROWS or version != VERSION or its_segment != segment_id or first != base:
            return
        sum_before = crc32(_NO_CRC, crc32(view[at_byte : at_byte + _CRC_AT]))
        if end > limit or crc32(view[at_byte + after_crc : end], sum_before) != crc:
            return
        yield body, end, time, rows
        base += rows
        at_byte = (end + 7) & ~7


def describe_unknown(data: Any, at_byte: int) -> str | None:
    """What a frame is that stands there whole, and that this version cannot read; None: there is none."""
    if at_byte + FRAME_BYTES > len(data):
        return None
    magic, version, *fields = _FRAME.unpack_from(data, at_byte)
    frame = Frame(at_byte, *fields)
    known = magic != FRAME_MAGIC or frame.kind in _KINDS.get(version, ())
    if known or frame.length > LONGEST_BODY or frame.end > len(data) or not is_sound(data, frame):
        return None
    return f"holds a frame of kind {frame.kind}, version {version}, which this Faregate does not know: update Faregate"


def body_of(data: Any, frame: Frame) -> memoryview:
    return memoryview(data)[frame.body : frame.body + frame.length]


def is_sound(data: Any, frame: Frame) -> bool:
    """Whether header and body are what was written."""
    view = memoryview(data)
    at_byte = frame.at_byte
    crc = crc32(_NO_CRC, crc32(view[at_byte : at_byte + _CRC_AT]))
    return crc32(view[at_byte + _CRC_AT + len(_NO_CRC) : frame.body + frame.length], crc) == frame.crc


def scan(data: Any, header: SegmentHeader, at_byte: int = SEGMENT_BYTES, previous: int = 0) -> Iterator[Frame]:
    """The sound frames of a segment, chained to each other; ends where the chain does. `previous`: the CRC of the frame
    that ends at `at_byte`."""
    while True:
        frame = read_header(data, at_byte, header.segment_id)
        if frame is None or frame.previous != previous or not is_sound(data, frame):
            return
        yield frame
        previous, at_byte = frame.crc, frame.end


_ZEROS = bytes(1 << 16)


def written_end(data: Any, start: int) -> int:
    """Where the zeros begin that reach to the end, at `start` or behind it: a segment is as long as it may become."""
    view = memoryview(data)
    end = len(view)
    while end > start:
        block = bytes(view[max(start, end - len(_ZEROS)) : end])
        if block != _ZEROS[: len(block)]:
            return end - len(block) + len(block.rstrip(b"\0"))
        end -= len(block)
    return start


def later_frame(data: Any, header: SegmentHeader, at_byte: int, commit: int) -> Frame | None:
    """A sound frame of a later sync behind damage: then the damage is corruption, not a torn tail.

    Frames between two syncs may reach the disk in any order: a frame whose missing predecessors, back to `commit`,
    were all written since the same sync as itself shows nothing.
    """
    for frame in search(data, at_byte, written_end(data, at_byte), header.segment_id):
        if frame.commit - commit - 1 > frame.since and is_sound(data, frame):
            return frame
    return None


def search(data: Any, start: int, stop: int, segment_id: int | None) -> Iterator[Frame]:
    """Whatever looks like the header of a frame. The bodies are not checked."""
    view = bytes(memoryview(data)[start:stop])
    found = view.find(FRAME_MAGIC)
    while found >= 0:
        frame = None if (start + found) % 8 else read_header(data, start + found, segment_id)
        if frame is not None:
            yield frame
        found = view.find(FRAME_MAGIC, found + 1)


def pack_segment_header(header: SegmentHeader) -> bytes:
    return _SEGMENT.pack(SEGMENT_MAGIC, *header, crc32(_SEGMENT.pack(SEGMENT_MAGIC, *header, 0)))


def read_segment_header(data: Any) -> SegmentHeader | None:
    """None when these bytes do not begin a segment."""
    if len(data) < SEGMENT_BYTES:
        return None
    magic, *fields, crc = _SEGMENT.unpack_from(data, 0)
    if magic != SEGMENT_MAGIC or crc32(_SEGMENT.pack(magic, *fields, 0)) != crc:
        return None
    return SegmentHeader(*fields)


def pack_trailer(footer_at: int) -> bytes:
    return _TRAILER.pack(footer_at, crc32(footer_at.to_bytes(8, "little")), SEALED_MAGIC)


def read_footer(data: Any, header: SegmentHeader) -> Footer | None:
    """The footer of a sealed segment; None when it is not sealed (or the footer is damaged)."""
    if len(data) < SEGMENT_BYTES + FRAME_BYTES + TRAILER_BYTES:
        return None
    at_byte, crc, magic = _TRAILER.unpack_from(data, len(data) - TRAILER_BYTES)
    if magic != SEALED_MAGIC or crc32(at_byte.to_bytes(8, "little")) != crc:
        return None
    frame = read_header(data, at_byte, header.segment_id)
    if frame is None or frame.kind != FOOTER or not is_sound(data, frame):
        return None
    # Of a copy: the filters in it are views, and one that is kept would keep the whole file open.
    return msgspec.json.decode(bytes(body_of(data, frame)), type=Footer)
