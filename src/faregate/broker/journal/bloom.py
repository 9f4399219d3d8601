"""Which texts may be in a frame of columns: Bloom filters of its keys and correlations, which its footer keeps.

Types and sources are few, so a footer lists them. Keys and correlations may differ from message to message; of these a
reader who looks for one need only know where it is not.

Rules kept here:
- A text that is there is never denied. One that is not is, but for about one in thirty.
- The bits are part of the format: docs/journal.md says how they follow from the texts.
"""

from typing import Any
from zlib import crc32

import pyarrow as pa

BITS_FOR_EACH = 10
"""Of the different texts, nulls aside. Two of them are set for each."""
_SPREAD = 2_654_435_761


def bloom_of(texts: Any) -> bytes:
    """Of an Arrow column of strings."""
    hashes = set(map(crc32, texts.drop_null().cast(pa.binary()).to_pylist()))
    size = (BITS_FOR_EACH * len(hashes) + 7) & ~7
    marks = bytearray(size)
    for value in hashes:
        first, second = _places(value, size)
        marks[first] = marks[second] = 1
    [_, packed] = pa.Array.from_buffers(pa.uint8(), size, [None, pa.py_buffer(marks)]).cast(pa.bool_()).buffers()
    bits: bytes = packed.to_pybytes()
    return bits[: size // 8]


def may_hold(bloom: bytes, text: str) -> bool:
    size = 8 * len(bloom)
    if not size:
        return False
    return all(bloom[place >> 3] >> (place & 7) & 1 for place in _places(crc32(text.encode()), size))


def _places(value: int, size: int) -> tuple[int, int]:
    return value % size, (value * _SPREAD >> 16) % size
