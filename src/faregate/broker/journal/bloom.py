"""Which texts may be in a frame of columns: Bloom filters of its keys and correlations, which its footer keeps.

Types and sources are few, so a footer lists them. Keys and correlations may differ from message to message; of these a
reader who looks for one need only know where it is not.

Rules kept here:
- A text that is there is never denied. One that is not is, but for about one in thirty.
- The bits are part of the format: docs/journal.md says how they follow from the texts.
"""

from functools import cached_property
from typing import Any
from zlib import crc32

import msgspec
import pyarrow as pa

BITS_FOR_EACH = 10
"""For each different text; null is none. Two of them are set."""
_SPREAD = 2_654_435_761


def bloom_of(texts: Any) -> msgspec.Raw:
    """Of an Arrow column of strings, as a footer keeps it."""
    hashes = set(map(crc32, texts.drop_null().cast(pa.binary()).to_pylist()))
    size = (BITS_FOR_EACH * len(hashes) + 7) & ~7
    marks = bytearray(size)
    for value in hashes:
        first, second = _places(value, size)
        marks[first] = marks[second] = 1
    [_, packed] = pa.Array.from_buffers(pa.uint8(), size, [None, pa.py_buffer(marks)]).cast(pa.bool_()).buffers()
    return msgspec.Raw(msgspec.json.encode(packed.to_pybytes()[: size // 8]))


class Bloom:
    """One of a footer, unpacked when it is first asked."""

    def __init__(self, stored: msgspec.Raw) -> None:
        self._stored = stored

    @cached_property
    def _bits(self) -> bytes | None:
        return msgspec.json.decode(self._stored, type=bytes | None)

    def may_hold(self, text: str) -> bool:
        bits = self._bits
        if bits is None:
            return True
        size = 8 * len(bits)
        return bool(size) and all(bits[at >> 3] >> (at & 7) & 1 for at in _places(crc32(text.encode()), size))


def _places(value: int, size: int) -> tuple[int, int]:
    return value % size, (value * _SPREAD >> 16) % size
