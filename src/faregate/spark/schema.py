"""The rows that Spark sees, and how the columns of a log become them.

Rules kept here:
- One table says which columns there are; docs/spark/reading.md repeats it for people.
- A row's columns are the log's, `payload` as `body` and `time` as `appended_at`. The route number (`topic`) stays
  inside: `recipients` says the same in names.
- `journal`, which says where a message was read, is a column where several journals are read, or where it is asked for.
- Between our own steps messages do not travel: a row is a range of offsets, and the step that handles them reads the
  log itself. What a message would cost Spark on its way from one Python process to another is gone.
- The Arrow schema of every batch equals the one that Spark derives from its own, field by field: Spark refuses others.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

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

JOURNAL = "journal"
READABLE = {JOURNAL: StructField(JOURNAL, StringType(), False), **COLUMNS}
"""All that can be asked for."""

RANGES = (
    StructType().add("partition", StringType(), False).add("start", LongType(), False).add("end", LongType(), False)
)
"""An `OffsetRange` as one row: messages that whoever gets it reads from the log."""

STAGED = StructType().add("staged", BinaryType(), False)
"""What handlers give to the sink: a `Staged`, which says in which file their task put its messages already."""


def row_schema(columns: tuple[str, ...] = (), *, ranges: bool = False, several: bool = False) -> StructType:
    """The rows' schema, of these columns alone when some are given. Raises `InvalidOption`."""
    if ranges:
        if several:
            raise InvalidOption("option rows: ranges are read from one journal, and option path names several")
        if columns:
            raise InvalidOption(f"option columns is for rows=messages; ranges have {', '.join(RANGES.fieldNames())}")
        return RANGES
    unknown = [name for name in columns if name not in READABLE]
    if unknown:
        raise InvalidOption(f"option columns names {', '.join(unknown)}; there are {', '.join(READABLE)}")
    if len(set(columns)) != len(columns):
        raise InvalidOption(f"option columns names a column twice: {', '.join(columns)}")
    return StructType([READABLE[name] for name in columns or (READABLE if several else COLUMNS)])


def check_schema(schema: StructType) -> None:
    """A schema that the user gave instead of `columns`: any of the columns, with their types."""
    if schema == RANGES:
        return
    for field in schema.fields:
        column = READABLE.get(field.name)
        if column is None:
            raise ConfigurationError(f"the schema names {field.name!r}, which is no column; there are {list(READABLE)}")
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

    def __init__(self, schema: StructType, journal: str = "") -> None:
        self.schema: Any = to_arrow_schema(schema, timezone="UTC")
        self._journal = journal
        self._columns = [self._found(name, to) for name, to in zip(schema.fieldNames(), self.schema.types, strict=True)]

    def _found(self, name: str, wanted: Any) -> tuple[int | None, Any, bool]:
        """Where the log has a column, its type for Spark, and whether it must be made to have it."""
        if name == JOURNAL:
            return None, wanted, False
        at = SCHEMA.get_field_index(stored(name).name)
        return at, wanted, SCHEMA.field(at).type != wanted

    def __call__(self, batch: Any) -> Any:
        columns = [self._column(batch, *found) for found in self._columns]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, batch: Any, at: int | None, type: Any, cast: bool) -> Any:
        if at is None:
            return pa.repeat(pa.scalar(self._journal, type), batch.num_rows)
        return batch.column(at).cast(type) if cast else batch.column(at)
