"""Side logs: what became of the messages of a segment. Records of 32 bytes, each with its own CRC.

Losing the last of them only delivers again, so they are written soon and synced rarely.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

HANDLED, SKIPPED, DEAD, REDELIVER, STARTED, DUPLICATE = 1, 2, 3, 4, 5, 6
"""Numbers are only ever added: a reader passes over those that it does not know, which delivers again."""
OUTCOMES = {"handled": HANDLED, "skipped": SKIPPED, "dead": DEAD, "duplicate": DUPLICATE}
NAMES = {**{code: name for name, code in OUTCOMES.items()}, REDELIVER: "redeliver", STARTED: "started"}

_RECORD = struct.Struct("<QIBxHHxxd")
_CRC = struct.Struct("<I")
RECORD_BYTES = _RECORD.size + _CRC.size


class Record(NamedTuple):
    offset: int
    queue: int
    outcome: int
    tries: int
    redeliveries: int
    time: float
    """When it happened; for REDELIVER, when it is due."""


def pack(record: Record) -> bytes:
    offset, queue, outcome, tries, redeliveries, time = record
    plain = _RECORD.pack(offset, queue, outcome, min(tries, 0xFFFF), min(redeliveries, 0xFFFF), time)
    return plain + _CRC.pack(zlib.crc32(plain))


def unpack(data: Any, start: int = 0) -> Iterator[Record]:
    """The sound records; a damaged one is passed over, since losing one only delivers again."""
    view = memoryview(data)
    for position in range(start, len(view) - RECORD_BYTES + 1, RECORD_BYTES):
        plain = view[position : position + _RECORD.size]
        if zlib.crc32(plain) == _CRC.unpack_from(view, position + _RECORD.size)[0]:
            record = Record(*_RECORD.unpack(plain))
            if record.outcome in NAMES:
                yield record
