"""Ids of whole columns: what `faregate.ids` makes of one message, for thousands at a time.

A column of ids is a matrix of bytes, a row of 36 characters for each. What a hash is taken of is put together by
columns, and so is the text made of the digest; left for each id is one SHA-256. The layout is that of `faregate.ids`;
a test compares the two, id by id.
"""

from binascii import hexlify, unhexlify
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from faregate.ids import FIRST, LENGTH, ROOT, SECOND, THIRD, VARIANT, VARIANT_AT, framed

_VARIANT = np.zeros(256, np.uint8)
for _digit, _variant in VARIANT.items():
    _VARIANT[ord(_digit)] = ord(_variant)
_DIGEST = sha256().digest_size
_DIGESTED = 10
"""Bytes of a digest that an id is made of."""
_ID = f"{LENGTH}:"
"""What stands before an id that is hashed."""

_IS_DIGIT = np.isin(np.arange(256), np.frombuffer(b"0123456789abcdef", np.uint8))
_ROOT_DIGITS, _ROOT_DASHES = [*range(8), *range(9, ROOT)], [8, ROOT]
_DIGITS_AT = [at for at in range(LENGTH) if at not in (8, 13, 18, 23)]
_TEXT = pa.string()

Ids = np.ndarray[Any, np.dtype[np.uint8]]


def digests(texts: Iterable[bytes], length: int) -> Ids:
    """The first so many bytes of the SHA-256 of each, as rows of a matrix."""
    whole = b"".join([sha256(text).digest() for text in texts])
    return np.ascontiguousarray(np.frombuffer(whole, np.uint8).reshape(-1, _DIGEST)[:, :length])


def are_ids(column: Any) -> bool:
    """Whether every text of an Arrow column can be a row here: a UUID, as far as its root part goes."""
    lengths = pc.all(pc.equal(pc.binary_length(column), LENGTH), skip_nulls=False).as_py()
    if not lengths:
        return False
    rows = from_arrow(column)
    return bool(_IS_DIGIT[rows[:, _ROOT_DIGITS]].all() and (rows[:, _ROOT_DASHES] == ord("-")).all())


def from_arrow(column: Any, length: int = LENGTH) -> Ids:
    """Of a column for which `are_ids` holds, or of bytes that are all as long, without a null."""
    _, offsets, data = column.buffers()
    start = int(np.frombuffer(offsets, np.int32)[column.offset])
    return np.frombuffer(data, np.uint8)[start : start + length * len(column)].reshape(-1, length)


def as_longs(ids: Ids) -> tuple[Any, Any]:
    """The 16 bytes of each id as two arrays of longs."""
    digits = np.ascontiguousarray(ids[:, _DIGITS_AT])
    pairs = np.frombuffer(unhexlify(digits.data), ">i8").reshape(-1, 2).astype("i8")
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


def to_arrow(rows: Ids, type: Any = _TEXT) -> Any:
    """An Arrow column of texts, or of bytes, that are all as long."""
    count, length = rows.shape
    offsets = np.arange(0, length * (count + 1), length, dtype=np.int32)
    return pa.Array.from_buffers(type, count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows))])


def message_ids(publications: Ids, recipient: str) -> Ids:
    """`ids.message_id`."""
    return _derived(publications, [framed("message") + _ID, publications, framed(recipient)])


def publication_ids(correlations: Ids, causations: Ids, *, node: str, handler: str, type: str, slot: int) -> Ids:
    """`ids.publication_id`."""
    parts: list[str | Ids] = [framed("publication") + _ID, correlations, framed(node) + _ID, causations]
    return _derived(correlations, [*parts, framed(handler, type, f"#{slot}")])


def _derived(roots: Ids, hashed: list[str | Ids]) -> Ids:
    count = len(roots)
    parts = [
        np.broadcast_to(np.frombuffer(part.encode(), np.uint8), (count, len(part.encode())))
        if isinstance(part, str)
        else part
        for part in hashed
    ]
    whole = np.hstack(parts)
    # A row as bytes: numpy makes a list of them ten times faster than slicing does.
    texts = whole.view(f"V{whole.shape[1]}").ravel().tolist()
    digits = np.frombuffer(hexlify(digests(texts, _DIGESTED).data), np.uint8).reshape(count, 2 * _DIGESTED)
    made = np.empty((count, LENGTH), np.uint8)
    made[:, :ROOT] = roots[:, :ROOT]
    made[:, (13, 18, 23)] = ord("-")
    made[:, 14] = ord("8")
    made[:, 15:18] = digits[:, FIRST]
    made[:, 19] = _VARIANT[digits[:, VARIANT_AT]]
    made[:, 20:23] = digits[:, SECOND]
    made[:, 24:36] = digits[:, THIRD]
    return made
