"""Envelopes as Arrow columns and back: what a batch of any log is. One schema, versioned with the journal's frames.

Most columns of a batch hold one value over and over (the type, the source, null); those are made without looking at
every row twice.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from itertools import repeat
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from faregate.codec import is_altered
from faregate.errors import Unwritable
from faregate.ids import PublicationKey, publication_key
from faregate.message import Envelope

_STRING, _BINARY, _TIME = pa.string(), pa.binary(), pa.timestamp("us", tz="UTC")

_FIELD_TYPES: dict[str, Any] = {
    "body": _BINARY,
    "recipients": pa.list_(_STRING),
    "depth": pa.int32(),
    "sent_at": _TIME,
    "deliver_at": _TIME,
    "expires_at": _TIME,
    "redeliveries": pa.int32(),
    "replay": pa.int32(),
    "body_digest": _BINARY,
    "headers": pa.map_(_STRING, _STRING),
}
_FIELDS = Envelope.__struct_fields__[:-1]
"""All but `delay`, which is the last."""
_COLUMN_NAMES = {"body": "payload"}
_TYPES: dict[str, Any] = {"topic": pa.int32(), **{name: _FIELD_TYPES.get(name, _STRING) for name in _FIELDS}}
_TIMES = {"sent_at", "deliver_at", "expires_at"}
_USUALLY_ALIKE = {
    *("topic", "type", "kind", "source", "recipients", "destination"),
    *("depth", "redeliveries", "replay", "content_type"),
}
"""Fields that most batches repeat one value in."""

_REPEATED = 10_000
_AT_A_TIME = 500

SCHEMA: Any = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("time", _TIME, nullable=False),
        pa.field("topic", pa.int32(), nullable=False),
        *(pa.field(_COLUMN_NAMES.get(name, name), _TYPES[name]) for name in _FIELDS),
    ]
)
"""offset: the row's place in the log. time: when it was appended. topic: the number of its route in topology.json
(-1: nobody wanted it). Then every field of the envelope, `body` as `payload`."""


def to_batch(
    envelopes: Sequence[Envelope], topics: Sequence[int], offsets: Sequence[int], time: int | Sequence[int]
) -> Any:
    """A record batch of these envelopes, appended at that time, or each at its own."""
    count = len(envelopes)
    times = array("q", (time,)) * count if isinstance(time, int) else array("q", time)
    columns = [
        _integers(array("q", offsets), pa.int64()),
        _integers(times, _TIME),
        _column(topics, "topic", count),
    ]
    columns += [
        write(values, name, count) for (name, write), values in zip(_WRITERS.items(), _by_field(envelopes), strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _by_field(envelopes: Sequence[Envelope]) -> list[list[Any]]:
    """The values of each field. Some hundred messages at a time: of ten thousand, the garbage collector would look at
    every tuple again and again, and that takes longer than the rest."""
    fields: list[list[Any]] = [[] for _ in _FIELDS]
    for start in range(0, len(envelopes), _AT_A_TIME):
        some = map(msgspec.structs.astuple, envelopes[start : start + _AT_A_TIME])
        for values, more in zip(fields, zip(*some, strict=True), strict=False):
            values += more
    return fields


def _integers(values: "array[int]", type: Any) -> Any:
    """Straight from memory: several times faster than from Python numbers one by one."""
    return pa.Array.from_buffers(type, len(values), [None, pa.py_buffer(values)])


@lru_cache(maxsize=256)
def _repeated(value: Any, name: str) -> Any:
    """A column of one value over and over, long enough for most batches; they take a slice of it."""
    type = _TYPES[name]
    return pa.nulls(_REPEATED, type) if value is None else pa.repeat(pa.scalar(value, type), _REPEATED)


def _column(values: Sequence[Any], name: str, count: int) -> Any:
    first = values[0]
    if count <= _REPEATED and (first is None or name in _USUALLY_ALIKE) and values.count(first) == count:
        return _repeated(first, name).slice(0, count)
    return pa.array(values, _TYPES[name])


def _times(values: Sequence[float | None], name: str, count: int) -> Any:
    if values.count(None) == count <= _REPEATED:
        return _repeated(None, name).slice(0, count)
    if None in values:
        return pa.array([None if value is None else round(value * 1_000_000) for value in values], _TIME)
    return _integers(array("q", [round(value * 1_000_000) for value in values if value is not None]), _TIME)


def _headers(values: Sequence[dict[str, str]], name: str, count: int) -> Any:
    if not any(values) and count <= _REPEATED:
        return _repeated((), name).slice(0, count)
    return pa.array([tuple(value.items()) for value in values], _TYPES[name])


_WRITERS = {name: _headers if name == "headers" else _times if name in _TIMES else _column for name in _FIELDS}


def to_envelopes(batch: Any) -> list[Envelope]:
    """The envelopes of a batch that has all envelope columns."""
    count = batch.num_rows
    columns: list[Any] = []
    for name in _FIELDS:
        column = batch.column(_COLUMN_NAMES.get(name, name))
        if column.null_count == count:
            columns.append(repeat(None, count))
        elif name in _TIMES:
            columns.append([None if us is None else us / 1_000_000 for us in column.view(pa.int64()).to_pylist()])
        elif name == "headers":
            columns.append([dict(pairs) for pairs in column.to_pylist()])
        elif name == "recipients":
            columns.append([tuple(names) for names in column.to_pylist()])
        else:
            columns.append(column.to_pylist())
    return [Envelope(*values) for values in zip(*columns, strict=True)]


def publication_keys(batch: Any, restricted: set[int]) -> Sequence[PublicationKey]:
    """What recognises a repetition of each row. `restricted`: topics whose rows went to their recipients only."""
    plain: list[PublicationKey] = batch.column("publication_id").to_pylist()
    replays = batch.column("replay").to_pylist()
    attempts = batch.column("attempt_id")
    topics = batch.column("topic")
    by_topic = not restricted.isdisjoint(pc.unique(topics).to_pylist())
    if not by_topic and attempts.null_count == len(plain) and not any(replays):
        return plain
    recipients: list[Any] = [()] * len(plain)
    if by_topic:
        listed = batch.column("recipients").to_pylist()
        recipients = [
            names if topic in restricted else () for topic, names in zip(topics.to_pylist(), listed, strict=True)
        ]
    return [publication_key(*row) for row in zip(plain, replays, attempts.to_pylist(), recipients, strict=True)]  # type: ignore[arg-type]


def read_batch(body: memoryview) -> Any:
    """The record batch in a frame's body, without copying it."""
    return pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)


def write_batch(batch: Any) -> Any:
    """The bytes of a record batch as they stand in a frame."""
    return batch.serialize()


_DIGEST_BYTES = 16
_SCHEMA_BYTES = SCHEMA.serialize().size
_PACKED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


def pack_batch(batch: Any) -> Any:
    """The same, compressed: for what is copied and synced, and read once. `read_batch` reads it, too."""
    stream = pa.BufferOutputStream()
    pa.ipc.RecordBatchStreamWriter(stream, SCHEMA, options=_PACKED).write_batch(batch)
    return stream.getvalue()[_SCHEMA_BYTES:]  # a stream begins with its schema, which frames do without


def write_envelopes(envelopes: Sequence[Envelope], topics: Sequence[int], offsets: Sequence[int], moment: int) -> Any:
    """The bytes of messages as they stand in a frame. Raises `Unwritable`."""
    try:
        return write_batch(to_batch(envelopes, topics, offsets, moment))
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as exc:
        raise Unwritable(f"a message cannot be written to the journal: {exc}") from exc


def body_bytes(batch: Any) -> int:
    """Of all messages together."""
    found: int | None = pc.sum(pc.binary_length(batch.column("payload"))).as_py()
    return found or 0


def altered_offsets(batch: Any) -> list[int]:
    """Where a body is not the one that its digest was made of. What is encrypted or kept elsewhere is passed over."""
    if _are_as_digested(batch):
        return []
    names = ("offset", "payload", "content_encoding", "body_digest", "algorithm", "payload_ref")
    rows = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    return [
        offset
        for offset, body, encoding, digest, algorithm, elsewhere in rows
        if digest and algorithm is None and elsewhere is None and is_altered(body or b"", encoding, digest)
    ]


def _are_as_digested(batch: Any) -> bool:
    """Whether all bodies are plain, and those that their digests were made of: nearly always, and found out for all at
    once."""
    digests, unusual = batch.column("body_digest"), ("content_encoding", "algorithm", "payload_ref")
    if digests.null_count or any(batch.column(name).null_count < len(batch) for name in unusual):
        return False
    made = [sha256(body or b"").digest()[:_DIGEST_BYTES] for body in batch.column("payload").to_pylist()]
    return bool(digests.to_pylist() == made)
