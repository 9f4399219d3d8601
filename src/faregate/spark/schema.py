"""The rows that Spark sees, and how the columns of a log become them.

Rules kept here:
- One table says which columns there are; docs/spark/reading.md repeats it for people.
- A row's columns are the log's, `payload` as `body` and `time` as `appended_at`. The route number (`topic`) stays
  inside: `recipients` says the same in names.
- Between our own steps messages travel as frames: a row is thousands of them, as they stand in the log. Spark handles a
  row of bytes as fast as a row of two numbers, so what a message costs it is gone.
- The Arrow schema of every batch equals the one that Spark derives from its own, field by field: Spark refuses others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from faregate.columns import SCHEMA
from faregate.errors import ConfigurationError, InvalidOption

_STORED = {"appended_at": "time", "body": "payload"}
_ORDER = """
    offset appended_at publication_id type kind source destination recipients key body headers correlation_id
    causation_id depth sent_at deliver_at expires_at redeliveries replay content_type content_encoding body_digest
    payload_ref attempt_id key_id algorithm traceparent
"""


def stored(name: str) -> Any:
    """The field of the log that a column is."""
    return SCHEMA.field(_STORED.get(name, name))


COLUMNS = {
    name: StructField(name, from_arrow_type(stored(name).type), stored(name).nullable) for name in _ORDER.split()
}

FRAMES = (
    StructType().add("offset", LongType(), False).add("count", IntegerType(), False).add("frame", BinaryType(), False)
)
"""Messages of the log as one row: the offset of the first, how many, and the bytes of their record batch. A row
without messages says where a range ends."""

STAGED = StructType().add("staged", BinaryType(), False)
"""What handlers give to the sink: a `Staged`, which says in which file their task put its messages already."""


def row_schema(columns: tuple[str, ...] = (), *, frames: bool = False) -> StructType:
    """The rows' schema, of these columns alone when some are given. Raises `InvalidOption`."""
    if frames:
        if columns:
            raise InvalidOption(f"option columns is for rows=messages; frames have {', '.join(FRAMES.fieldNames())}")
        return FRAMES
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise InvalidOption(f"option columns names {', '.join(unknown)}; there are {', '.join(COLUMNS)}")
    if len(set(columns)) != len(columns):
        raise InvalidOption(f"option columns names a column twice: {', '.join(columns)}")
    return StructType([COLUMNS[name] for name in columns or COLUMNS])


def check_schema(schema: StructType) -> None:
    """A schema that the user gave instead of `columns`: any of the columns, with their types."""
    if schema == FRAMES:
        return
    for field in schema.fields:
        column = COLUMNS.get(field.name)
        if column is None:
            raise ConfigurationError(f"the schema names {field.name!r}, which is no column; there are {list(COLUMNS)}")
        given, own = field.dataType.simpleString(), column.dataType.simpleString()
        if given != own:
            raise ConfigurationError(f"the schema says {field.name} {given}; it is {own}")


def rows_to_batch(rows: Sequence[Sequence[Any]], schema: Any) -> Any:
    """One row or more as a record batch of an Arrow schema."""
    columns = zip(zip(*rows, strict=True), schema.types, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(values, type) for values, type in columns], schema=schema)


def batches_to_rows(batches: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


class Projection:
    """Batches of a log to the rows of a schema, without copying the columns."""

    def __init__(self, schema: StructType) -> None:
        self.schema: Any = to_arrow_schema(schema, timezone="UTC")
        self._places = [SCHEMA.get_field_index(stored(name).name) for name in schema.fieldNames()]
        self._casts = [SCHEMA.field(at).type != to for at, to in zip(self._places, self.schema.types, strict=True)]

    def __call__(self, batch: Any) -> Any:
        columns = [
            batch.column(place).cast(type) if cast else batch.column(place)
            for place, type, cast in zip(self._places, self.schema.types, self._casts, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
