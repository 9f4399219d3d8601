"""Envelopes as Arrow columns and back. One schema, versioned with the frame format.

Most columns of a batch hold one value over and over (the type, the source, null); those are made without looking at
every row twice.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import msgspec
import pyarrow as pa

from faregate.message import Envelope

_STRING, _BINARY, _TIME = pa.string(), pa.binary(), pa.timestamp("us", tz="UTC")

_FIELD_TYPES: dict[str, Any] = {
    "body": _BINARY,
    "recipients": pa.list_(_STRING),
    "marker": pa.int32(),
    "sent_at": _TIME,
    "deliver_at": _TIME,
    "expires_at": _TIME,
    "redeliveries": pa.int32(),
    "replay": pa.int32(),
    "body_digest": _BINARY,
    "headers": pa.map_(_STRING, _STRING),
}
_FIELDS = Envelope.__struct_fields__
_COLUMN_NAMES = {"body": "payload"}
_TYPES = [_FIELD_TYPES.get(name, _STRING) for name in _FIELDS]
_TIMES = {"sent_at", "deliver_at", "expires_at"}

SCHEMA: Any = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("time", _TIME, nullable=False),
        pa.field("topic", pa.int32(), nullable=False),
        *(pa.field(_COLUMN_NAMES.get(name, name), type) for name, type in zip(_FIELDS, _TYPES, strict=True)),
    ]
)
"""offset: the row's place in the log. time: when it was appended. topic: the number of its route in topology.json
(-1: nobody wanted it). Then every field of the envelope, `body` as `payload`."""

ENVELOPE_COLUMNS = tuple(_COLUMN_NAMES.get(name, name) for name in _FIELDS)


def to_batch(envelopes: Sequence[Envelope], topics: Sequence[int], offsets: Sequence[int], time: int) -> Any:
    """A record batch of these envelopes."""
    count = len(envelopes)
    columns = [
        pa.array(offsets, pa.int64()),
        _constant(time, _TIME, count),
        _column(topics, pa.int32(), count),
    ]
    by_field = zip(*map(msgspec.structs.astuple, envelopes), strict=True)
    for name, type, values in zip(_FIELDS, _TYPES, by_field, strict=True):
        if name in _TIMES:
            columns.append(_times(values, count))
        elif name == "headers":
            columns.append(_headers(values, count))
        else:
            columns.append(_column(values, type, count))
    return pa.record_batch(columns, schema=SCHEMA)


def _constant(value: Any, type: Any, count: int) -> Any:
    if value is None:
        return pa.nulls(count, type)
    return pa.repeat(pa.scalar(value, type), count) if count > 1 else pa.array([value], type)


def _column(values: Sequence[Any], type: Any, count: int) -> Any:
    first = values[0]
    if count > 1 and values[1] is first and values.count(first) == count:
        return _constant(first, type, count)
    return pa.array(values, type)


def _times(values: Sequence[float | None], count: int) -> Any:
    first = values[0]
    if values.count(first) == count:
        return _constant(None if first is None else round(first * 1_000_000), _TIME, count)
    return pa.array([None if value is None else round(value * 1_000_000) for value in values], _TIME)


def _headers(values: Sequence[dict[str, str]], count: int) -> Any:
    return pa.array(
        [tuple(value.items()) for value in values] if any(values) else ((),) * count, SCHEMA.field("headers").type
    )


def to_envelopes(batch: Any) -> list[Envelope]:
    """The envelopes of a batch that has all envelope columns."""
    count = batch.num_rows
    columns: list[Any] = []
    for name in _FIELDS:
        column = batch.column(_COLUMN_NAMES.get(name, name))
        if column.null_count == count:
            columns.append(repeat(None, count))
        elif name in _TIMES:
            columns.append([None if us is None else us / 1_000_000 for us in column.cast(pa.int64()).to_pylist()])
        elif name == "headers":
            columns.append([dict(pairs) for pairs in column.to_pylist()])
        elif name == "recipients":
            columns.append([tuple(names) for names in column.to_pylist()])
        else:
            columns.append(column.to_pylist())
    return [Envelope(*values) for values in zip(*columns, strict=True)]


def read_batch(body: memoryview) -> Any:
    """The record batch in a frame's body, without copying it."""
    return pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)


def write_batch(batch: Any) -> Any:
    """The bytes of a record batch as they stand in a frame."""
    return batch.serialize()
