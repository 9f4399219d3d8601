"""The entries of a chunk, which is what a broker delivers; and batches of entries, which is what it is given.

A batch is one entry to the broker, with one number: it is in the stream as a whole or not at all. Each of its records
has an offset of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct

from rstream import schema
from rstream.compression import CompressionHelper, CompressionType

from faregate.errors import MessageTooLarge

_BATCH = 0x80
_size = Struct(">I").unpack_from
_batch_head = Struct(">BHII")
MOST_RECORDS = 60_000
"""In a batch; its head has two bytes for their number."""
_OVERHEAD = 64
"""More than the bytes of a frame that are not entries."""


def records(chunk: schema.Deliver) -> Iterator[bytes]:
    """In the order of their offsets, of which the first is `chunk.chunk_first_offset`."""
    data, at = chunk.data, 0
    for _ in range(chunk.num_entries):
        if data[at] & _BATCH:
            kind, count, whole, size = _batch_head.unpack_from(data, at)
            at += _batch_head.size
            packed = data[at : at + size]
            codec = CompressionType((kind & 0x70) >> 4)
            yield from _records(CompressionHelper.uncompress(packed, codec, whole), count)
            at += size
        else:
            size = _size(data, at)[0]
            at += 4 + size
            yield data[at - size : at]


def _records(data: bytes, count: int) -> Iterator[bytes]:
    at = 0
    for _ in range(count):
        size = _size(data, at)[0]
        at += 4 + size
        yield data[at - size : at]


def behind(chunk: schema.Deliver) -> int:
    """The offset behind its last record."""
    return chunk.chunk_first_offset + chunk.num_records


def cut(entries: Iterable[bytes], frame_max: int) -> Iterator[list[bytes]]:
    """As few batches as fit into frames; the same entries are cut the same. Raises `MessageTooLarge`."""
    found: list[bytes] = []
    room = frame_max - _OVERHEAD
    for entry in entries:
        size = len(entry) + 4
        if size > frame_max - _OVERHEAD:
            raise MessageTooLarge(
                f"a message of {len(entry):,} bytes is more than the broker takes, {frame_max:,} bytes in a frame "
                "(stream.frame_max in its configuration)"
            )
        if size > room or len(found) == MOST_RECORDS:
            yield found
            found = []
            room = frame_max - _OVERHEAD
        found.append(entry)
        room -= size
    if found:
        yield found


def batch_frame(publisher: int, number: int, entries: Sequence[bytes]) -> schema.PublishSubBatching:
    data = b"".join(part for entry in entries for part in (len(entry).to_bytes(4, "big"), entry))
    return schema.PublishSubBatching(publisher, 1, number, _BATCH, len(entries), len(data), len(data), data)
