"""The frames of a segment, of a side log and of a spooled batch: which are sound, and what lies between them.

Rules kept here:
- Nothing is changed, and nothing is believed but what a CRC vouches for.
- Verify and repair both look through these eyes: what one calls damage the other sets right.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from faregate.broker.journal import dead_letters
from faregate.broker.journal import frame as frames
from faregate.broker.journal.content import READ_ERRORS, read_messages
from faregate.broker.journal.disk import Disk
from faregate.broker.journal.frame import (
    NO_BLOOM,
    SEGMENT_BYTES,
    TRAILER_BYTES,
    BatchRange,
    Footer,
    Frame,
    Part,
    SegmentHeader,
)
from faregate.broker.journal.high_water import HighWater
from faregate.broker.journal.layout import Layout, is_part
from faregate.broker.journal.sealing import range_of
from faregate.broker.journal.segment import Memory, Segment

_CHUNK = 1 << 20
_IN_A_PART = frames.MESSAGES | {frames.DEAD_LETTERS}
_IN_A_BATCH = _IN_A_PART | {frames.PARTS}


class Damage(NamedTuple):
    """Bytes that are no sound frame, up to where the next one starts or the end."""

    at_byte: int
    end: int
    is_tail: bool


class NotWhole(NamedTuple):
    """Where a spooled batch is damaged, or lacks something: the file, and the byte in it."""

    path: Path
    at_byte: int


def walk(data: Any, segment_id: int | None, limit: int) -> Iterator[tuple[Frame, Any] | Damage]:
    """The sound frames with what is in them, and the damage between them. Zeros at the end are neither."""
    at_byte, last = SEGMENT_BYTES, (-1, -1)
    while at_byte < limit:
        found = sound_frame(data, at_byte, segment_id, limit)
        if found is None:
            found = _next_sound(data, at_byte, segment_id, limit, last)
            if found is None:
                if not _only_zeros(data, at_byte, limit):
                    yield Damage(at_byte, limit, True)
                return
            yield Damage(at_byte, found[0].at_byte, False)
        frame = found[0]
        segment_id, last, at_byte = frame.segment_id, (frame.commit, frame.base), frame.end
        yield found


def sound_frame(data: Any, at_byte: int, segment_id: int | None, limit: int) -> tuple[Frame, Any] | None:
    frame = frames.read_header(data, at_byte, segment_id)
    if frame is None or frame.end > limit or not frames.is_sound(data, frame):
        return None
    body = frames.body_of(data, frame)
    try:
        content: Any
        if frame.kind in frames.MESSAGES:
            content = read_messages(frame, body)
            count = content.count
        elif frame.kind == frames.DEAD_LETTERS:
            content = dead_letters.decode(body)
            count = len(content)
        elif frame.kind == frames.PARTS:
            content = msgspec.json.decode(body, type=list[Part])
            count = len(content)
        else:
            content, count = msgspec.json.decode(body, type=Footer), 0
    except (*READ_ERRORS, ValueError, OSError):
        return None
    return (frame, content) if count == frame.rows else None


def walk_batch(path: Path, disk: Disk, read: Callable[[Path], Any]) -> Iterator[tuple[Frame, Any] | NotWhole]:
    """The frames of a spooled batch with what is in them, up to where it is not whole. Raises `OSError`; where the
    batch was taken in meanwhile, `FileNotFoundError`."""
    for found in _walk_file(path, read(path), 1, _IN_A_BATCH):
        if isinstance(found, NotWhole) or found[0].kind != frames.PARTS:
            yield found
            continue
        parts: list[Part] = found[1]
        named = {part.name for part in parts if is_part(part.name, path.name) and part.pieces > 0}
        if len(named) < len(parts) or sum(part.bytes for part in parts) > frames.LARGEST_BATCH:
            yield NotWhole(path, 0)
            return
        for part in parts:
            for each in _walk_part(path, part, disk, read):
                yield each
                if isinstance(each, NotWhole):
                    return


def _walk_part(
    path: Path, part: Part, disk: Disk, read: Callable[[Path], Any]
) -> Iterator[tuple[Frame, Any] | NotWhole]:
    file = path.with_name(part.name)
    try:
        if disk.is_file(file) and disk.size(file) == part.bytes:
            yield from _walk_file(file, read(file), part.pieces, _IN_A_PART)
        else:
            yield NotWhole(file, 0)
    except FileNotFoundError:
        disk.size(path)  # raises as well if the batch was taken in: its parts go behind it
        yield NotWhole(file, 0)


def _walk_file(path: Path, data: Any, pieces: int, kinds: frozenset[int]) -> Iterator[tuple[Frame, Any] | NotWhole]:
    at_byte = 0
    for _ in range(pieces):
        previous = part = 0
        parts = 1
        while part < parts:
            found = sound_frame(data, at_byte, frames.NO_SEGMENT, len(data))
            if found is None or found[0].kind not in kinds or (found[0].part, found[0].previous) != (part, previous):
                yield NotWhole(path, at_byte)
                return
            yield found
            frame = found[0]
            at_byte, previous, parts, part = frame.end, frame.crc, frame.parts, part + 1
    if at_byte != len(data):
        yield NotWhole(path, at_byte)


def _next_sound(
    data: Any, start: int, segment_id: int | None, limit: int, last: tuple[int, int]
) -> tuple[Frame, Any] | None:
    """The first one behind `last`, by commit and first offset: a large commit is several frames once it is sealed."""
    for frame in frames.search(data, start, limit, segment_id):
        found = sound_frame(data, frame.at_byte, segment_id, limit)
        if found is not None and ((frame.commit, frame.base) > last or frame.kind == frames.FOOTER):
            return found
    return None


def _only_zeros(data: Any, start: int, stop: int) -> bool:
    return not any(data[at : min(at + _CHUNK, stop)].strip(b"\0") for at in range(start, stop, _CHUNK))


class Scan:
    """Everything about the frames of one segment."""

    def __init__(self, base: int, data: Any, header: SegmentHeader | None, limit: int) -> None:
        self.header = header or SegmentHeader(frames.VERSION, frames.HOT, 0, base, 0, 0)
        self.segment = Segment(self.header, Memory())
        self.footer: Footer | None = None
        self.lost_before: list[tuple[int, int]] = []
        """Offsets that an earlier repair found lost: no problem any more."""
        self.wrong: list[tuple[int, str, tuple[int, int] | None]] = []
        self.tail: int | None = None
        """Where bytes start that no sound frame follows."""
        self.unknown: str | None = None
        """What a frame is that a later version has written."""
        self.end = base
        self.commit, self.time = self.header.commit, self.header.time
        self._last_commit = -1  # not the header's: compaction writes the last commit there
        self.whole = SEGMENT_BYTES
        """Where the last whole commit ends: behind it there may be parts of a batch whose rest is missing."""
        self.whole_end = base
        self.frames = 0
        self.ranges: list[BatchRange] = []
        """Of the frames of columns in a sealed segment."""
        self.topics: dict[int, int] = {}
        """Topic numbers, and the first byte of a frame where each is used."""
        self.altered: list[tuple[int, int]] = []
        """Where frames stand, and offsets of messages in them whose body is not the one their digest was made of."""
        self.gaps: list[tuple[int, tuple[int, int]]] = []
        """Offsets that are missing although nothing is damaged (compacted, repaired, or a problem), by byte."""
        self._read(data, limit, None if header is None else header.segment_id)

    def _read(self, data: Any, limit: int, segment_id: int | None) -> None:
        damage: Damage | None = None
        previous: int | None = 0
        for found in walk(data, segment_id, limit):
            if isinstance(found, Damage):
                damage, previous = found, None
                self.unknown = self.unknown or frames.describe_unknown(data, found.at_byte)
                if found.is_tail:
                    self.tail = found.at_byte
                continue
            frame, content = found
            if previous is not None and frame.previous != previous:
                self.wrong.append((frame.at_byte, "does not follow the frame before it", None))
            previous = frame.crc
            if frame.kind == frames.FOOTER:
                self.footer = content
                self.lost_before = content.lost
            elif self.footer is not None:
                self.wrong.append((frame.at_byte, "stands behind the footer, where nobody reads it", None))
                self.footer = None
            if damage is not None:
                lost = (self.end, frame.base - 1) if frame.base > self.end else None
                self.wrong.append((damage.at_byte, f"is damaged up to byte {damage.end}", lost))
                damage = None
            elif frame.base > self.end:
                self.gaps.append((frame.at_byte, (self.end, frame.base - 1)))
            elif frame.base < self.end:
                self.wrong.append((frame.at_byte, f"has offset {frame.base} again", None))
            if frame.kind != frames.FOOTER:
                self._count(frame, content)

    def _count(self, frame: Frame, content: Any) -> None:
        self.frames += 1
        self.end = max(self.end, frame.base + frame.rows)
        again = frame.commit == self._last_commit and self.header.form == frames.SEALED  # a large one, in two frames
        if frame.commit <= self._last_commit and not again:
            self.wrong.append((frame.at_byte, f"has commit number {frame.commit} behind {self._last_commit}", None))
        self._last_commit = frame.commit
        if frame.time < self.time:
            self.wrong.append((frame.at_byte, "is older than the frame before it", None))
        types: Mapping[str, int] = {}
        if frame.kind in frames.MESSAGES and frame.rows:
            self.end = max(self.end, content.last + 1)
            if content.first < frame.base or content.last - content.first + 1 < frame.rows:
                self.wrong.append((frame.at_byte, "has rows whose offsets do not fit", None))
            self.altered += [(frame.at_byte, offset) for offset in content.altered()]
            for topic in content.topic_numbers():
                self.topics.setdefault(topic, frame.at_byte)
            types = content.types()
            if frame.kind == frames.COLUMNS and self.header.form == frames.SEALED:
                self.ranges.append(range_of(content.batch(), frame.at_byte))
        self.commit, self.time = max(self.commit, frame.commit), max(self.time, frame.time)
        first = not self.segment.messages and not self.segment.dead_letters
        self.segment.count(frame, types)
        if first and frame.kind == frames.COLUMNS and frame.rows:  # the header has the time of its last row
            self.segment.first_time = next(iter(content.times()))[1]
        if frame.part + 1 >= frame.parts:
            self.whole, self.whole_end = frame.end, self.end

    def footer_differences(self, footer: Footer, size: int) -> Iterator[str]:
        """What the footer says that is not so."""
        true = self.segment.footer(self.end, self.commit)
        names = ["base", "messages", "dead_letters", "bytes"]
        if not footer.compacted and self.frames:
            names += ["first_time", "last_time", "types"]
        for name in names:
            if getattr(footer, name) != getattr(true, name):
                yield f"its footer says {name} {getattr(footer, name)}, and it is {getattr(true, name)}"
        if footer.end < self.end or footer.last_commit < self.commit:
            yield "its footer ends before its frames do"
        known = set(footer.index) - set(true.index)
        if known and not footer.compacted:
            yield f"its footer points to a frame at {min(known)[2]}, where none is"
        if footer.ranges and not _are_true(footer.ranges, self.ranges):
            yield "its footer says something else of its frames than what is in them, so a search may pass over some"
        is_joined = footer.compacted or self.header.form == frames.SEALED  # its frames name no batches
        if not is_joined and not set(footer.batches) <= set(true.batches):
            yield "its footer names spooled batches that are not in it"
        if footer.bytes + frames.FRAME_BYTES + TRAILER_BYTES > size:
            yield "its footer is cut off"


def _are_true(told: list[BatchRange], found: list[BatchRange]) -> bool:
    """An older version told nothing of keys and correlations."""
    if len(told) != len(found):
        return False
    pairs = zip(told, found, strict=True)
    return all(true in (own, msgspec.structs.replace(own, keys=NO_BLOOM, correlations=NO_BLOOM)) for true, own in pairs)


def sound_mark(layout: Layout, disk: Disk) -> tuple[HighWater, bool]:
    """How far the log goes by its frames alone, as opening it would find, and whether the last segment is sealed.

    For a journal that nobody writes to.
    """
    for base in reversed(layout.segment_bases(disk)):
        data = disk.read(layout.segment(base))
        header = frames.read_segment_header(data)
        if header is None:
            continue
        footer = frames.read_footer(data, header)
        if footer is not None:
            return HighWater(footer.end, footer.last_commit, base, footer.bytes, footer.last_time), True
        mark = HighWater(base, header.commit, base, SEGMENT_BYTES, header.time)
        for frame in frames.scan(data, header):
            if frame.kind != frames.FOOTER and frame.part + 1 >= frame.parts:
                mark = HighWater(frame.base + frame.rows, frame.commit, base, frame.end, max(mark.time, frame.time))
        return mark, False
    return HighWater(0, 0, 0, SEGMENT_BYTES, 0), False
