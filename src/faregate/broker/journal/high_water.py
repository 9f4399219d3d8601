"""The durable high-water mark: how far everything is synced, for other processes to read.

It is written after the sync it speaks of, so it never promises too much, and it is a witness: what it covered and is
damaged later was confirmed, and is corruption, not a torn tail.
"""

import struct
from pathlib import Path
from typing import NamedTuple

from faregate.broker.journal.checksum import crc32
from faregate.broker.journal.disk import Disk

_MARK = struct.Struct("<8sQQQQq")
_CRC = struct.Struct("<I4x")
MAGIC = b"FGHIGH\x00\x01"


class HighWater(NamedTuple):
    offset: int
    """The first offset that is not covered."""
    commit: int
    segment: int
    """The base of the segment that is written to."""
    at_byte: int
    """Where the covered frames of that segment end."""
    time: int


def pack(mark: HighWater) -> bytes:
    plain = _MARK.pack(MAGIC, *mark)
    return plain + _CRC.pack(crc32(plain))


def read_high_water(path: Path, disk: Disk) -> HighWater | None:
    """None when there is none, or when it is being written right now or is damaged."""
    if path.name not in disk.list(path.parent):
        return None
    data = disk.read(path)
    if len(data) < _MARK.size + _CRC.size:
        return None
    if crc32(data[: _MARK.size]) != _CRC.unpack_from(data, _MARK.size)[0]:
        return None
    magic, *fields = _MARK.unpack_from(data)
    return HighWater(*fields) if magic == MAGIC else None
