"""Side logs: what became of the messages of a segment. Records of 32 bytes, each with its own CRC.

Losing the last of them only delivers again, so they are written soon and synced rarely.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from typing import Any, NamedTuple

from faregate.broker.journal.checksum import crc32
from faregate.ports.log import OUTCOME_NAMES

_RECORD = struct.Struct("<QIBxHHxxd")
_CRC = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CRC.size


Row = tuple[int, int, int, int, int, float]
"""The same as a record, without names: they are made by the thousand."""


class Record(NamedTuple):
    offset: int
    queue: int
    outcome: int
    tries: int
    redeliveries: int
    time: float
    """When it happened; for REDELIVER and REQUEUE, when it is due."""


def pack(record: Row) -> bytes:
    try:
        plain = _RECORD.pack(*record)
    except struct.error:  # counts beyond what there is room for
        offset, queue, outcome, tries, redeliveries, time = record
        plain = _RECORD.pack(offset, queue, outcome, min(tries, 0xFFFF), min(redeliveries, 0xFFFF), time)
    return plain + _CRC.pack(crc32(plain))


def pack_all(records: Sequence[Row]) -> bytes:
    """One behind the other. A message has two of them, so nothing here is done for one after the other."""
    try:
        plain = list(starmap(_RECORD.pack, records))
    except struct.error:
        return b"".join(map(pack, records))
    return b"".join(chain.from_iterable(zip(plain, map(_CRC.pack, map(crc32, plain)), strict=True)))


def whole(size: int) -> int:
    """How many bytes of a side log are whole records; the last one may be torn."""
    return size // RECORD_BYTES * RECORD_BYTES


def walk(data: Any, start: int = 0) -> Iterator[Record | None]:
    """The whole records, None for a damaged one."""
    view = memoryview(data)
    for position in range(start, len(view) - RECORD_BYTES + 1, RECORD_BYTES):
        plain = view[position : position + _RECORD.size]
        sound = crc32(plain) == _CRC.unpack_from(view, position + _RECORD.size)[0]
        record = Record(*_RECORD.unpack(plain)) if sound else None
        yield record if record is not None and record.outcome in OUTCOME_NAMES else None
