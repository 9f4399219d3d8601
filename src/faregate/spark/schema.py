"""The rows that Spark sees, and how journal columns become them.

Rules kept here:
- One table says which columns there are; docs/spark.md repeats it for people.
- A row's columns are the journal's, `payload` as `body` and `time` as `appended_at`. The route number (`topic`) stays
  inside: `recipients` says the same in names.
- Between our own steps messages travel as frames: a row is thousands of them, as they stand in the log. Spark handles a
  row of bytes as fast as a row of two numbers, so what a message costs it is gone.
- The Arrow schema of every batch equals the one that Spark derives from its own, field by field: Spark refuses others.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from faregate.columns import SCHEMA
from faregate.errors import ConfigurationError, InvalidOption

_STRING, _TIME = StringType(), TimestampType()


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    stored: str
    """Its name in the journal."""
    type: DataType
    nullable: bool = True


def _column(name: str, type: DataType = _STRING, *, stored: str | None = None, nullable: bool = True) -> Column:
    return Column(name, stored or name, type, nullable)


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        _column("offset", LongType(), nullable=False),
        _column("appended_at", _TIME, stored="time", nullable=False),
        _column("publication_id"),
        _column("type"),
        _column("kind"),
        _column("source"),
        _column("destination"),
        _column("recipients", ArrayType(_STRING)),
        _column("key"),
        _column("body", BinaryType(), stored="payload"),
        _column("headers", MapType(_STRING, _STRING)),
        _column("correlation_id"),
        _column("causation_id"),
        _column("marker", IntegerType()),
        _column("sent_at", _TIME),
        _column("deliver_at", _TIME),
        _column("expires_at", _TIME),
        _column("redeliveries", IntegerType()),
        _column("replay", IntegerType()),
        _column("content_type"),
        _column("content_encoding"),
        _column("body_digest", BinaryType()),
        _column("payload_ref"),
        _column("attempt_id"),
        _column("key_id"),
        _column("algorithm"),
        _column("traceparent"),
    )
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
    chosen = [COLUMNS[name] for name in columns or COLUMNS]
    return StructType([StructField(column.name, column.type, column.nullable) for column in chosen])


def check_schema(schema: StructType) -> None:
    """A schema that the user gave instead of `columns`: any of the columns, with their types."""
    if schema == FRAMES:
        return
    for field in schema.fields:
        column = COLUMNS.get(field.name)
        if column is None:
            raise ConfigurationError(f"the schema names {field.name!r}, which is no column; there are {list(COLUMNS)}")
        if field.dataType.simpleString() != column.type.simpleString():
            raise ConfigurationError(
                f"the schema says {field.name} {field.dataType.simpleString()}; it is {column.type.simpleString()}"
            )


class Projection:
    """Journal batches to the rows of a schema, without copying the columns."""

    def __init__(self, schema: StructType) -> None:
        self.schema: Any = to_arrow_schema(schema, timezone="UTC")
        stored = [COLUMNS[name].stored for name in schema.fieldNames()]
        self._places = [SCHEMA.get_field_index(name) for name in stored]
        self._casts = [SCHEMA.field(at).type != to for at, to in zip(self._places, self.schema.types, strict=True)]

    def __call__(self, batch: Any) -> Any:
        columns = [
            batch.column(place).cast(type) if cast else batch.column(place)
            for place, type, cast in zip(self._places, self.schema.types, self._casts, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
