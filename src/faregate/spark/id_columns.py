"""Ids of whole columns: what `faregate.ids` makes of one message, for thousands at a time.

A column of ids is a matrix of bytes, a row of 36 characters for each. What a hash is taken of is put together by
columns, and so is the text made of the digest; left for each id is one SHA-256. A test compares the two, id by id.
"""

from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_LENGTH = 36
_ROOT = r"^[0-9a-f]{8}-[0-9a-f]{4}-"
_HEX = np.array([list(f"{value:02x}".encode()) for value in range(256)], np.uint8)
_VARIANT = np.zeros(256, np.uint8)
for _place, _digit in enumerate("0123456789abcdef"):
    _VARIANT[ord(_digit)] = ord("89ab"[_place % 4])

Ids = np.ndarray[Any, np.dtype[np.uint8]]


def are_ids(column: Any) -> bool:
    """Whether every text of an Arrow column can be a row here: a UUID, as far as its root part goes."""
    lengths = pc.all(pc.equal(pc.binary_length(column), _LENGTH), skip_nulls=False).as_py()
    return bool(lengths) and bool(pc.all(pc.match_substring_regex(column, _ROOT)).as_py())


def from_arrow(column: Any) -> Ids:
    """Of a column for which `are_ids` holds."""
    _, offsets, data = column.buffers()
    start = int(np.frombuffer(offsets, np.int32)[column.offset])
    return np.frombuffer(data, np.uint8)[start : start + _LENGTH * len(column)].reshape(-1, _LENGTH)


def to_arrow(ids: Ids) -> Any:
    offsets = np.arange(0, _LENGTH * (len(ids) + 1), _LENGTH, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(ids))]
    return pa.Array.from_buffers(pa.string(), len(ids), buffers)


def message_ids(publications: Ids, recipient: str) -> Ids:
    """`ids.message_id`."""
    return _derived(publications, ["7:message36:", publications, f"{len(recipient)}:{recipient}"])


def publication_ids(correlations: Ids, causations: Ids, *, node: str, handler: str, type: str, slot: int) -> Ids:
    """`ids.publication_id`."""
    tail = "".join(f"{len(each)}:{each}" for each in (handler, type, f"#{slot}"))
    return _derived(correlations, ["11:publication36:", correlations, f"{len(node)}:{node}36:", causations, tail])


def _derived(roots: Ids, hashed: list[str | Ids]) -> Ids:
    count = len(roots)
    parts = [
        np.broadcast_to(np.frombuffer(part.encode(), np.uint8), (count, len(part.encode())))
        if isinstance(part, str)
        else part
        for part in hashed
    ]
    whole = np.hstack(parts)
    data, length = whole.tobytes(), whole.shape[1]
    digests = b"".join([sha256(data[at : at + length]).digest() for at in range(0, count * length, length)])
    digits = _HEX[np.frombuffer(digests, np.uint8).reshape(count, 32)[:, :10]].reshape(count, 20)
    made = np.empty((count, _LENGTH), np.uint8)
    made[:, :13] = roots[:, :13]
    made[:, (13, 18, 23)] = ord("-")
    made[:, 14] = ord("8")
    made[:, 15:18] = digits[:, 0:3]
    made[:, 19] = _VARIANT[digits[:, 18]]
    made[:, 20:23] = digits[:, 3:6]
    made[:, 24:36] = digits[:, 6:18]
    return made
