"""`fg.spark.read` and `fg.spark.read_stream`: the messages of one class as a DataFrame with its fields as columns.

They are format("faregate") with another way to say what the rows are: its options are theirs, except those that choose
rows and columns.
"""

from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from faregate.errors import ConfigurationError, InvalidOption
from faregate.message import describe_either
from faregate.spark import register
from faregate.spark.logs import options_of_all
from faregate.spark.options import ENDING, NO_END, as_texts, parse_options
from faregate.spark.schema import RANGES
from faregate.spark.typed.decode import TypedSpec, schema_of, typed_rows
from faregate.spark.typed.travel import pack_class

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""More than a bus allows unless it is told to: this only keeps a few bad bytes from filling a worker's memory."""
_OURS = {
    "types": "the class says which type is read; call it once for each class",
    "columns": "the columns are the fields of the class; select from the result",
    "rows": "a row is a message; for ranges of offsets use spark.read.format('faregate')",
    "schema": "the schema is that of the class",
    "pushfilters": "its filters are Spark's own; those of fg.spark.messages decide what is read",
    "path": "the log is the second argument",
    "url": "the log is the second argument",
}


def read(
    spark: SparkSession,
    source: str | Path,
    message: type,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    **options: Any,
) -> DataFrame:
    """The messages of one class as rows: its fields as typed columns, `_message` with what the envelope says of it, and
    `_error` for one that cannot be decoded. `options` are those of `format("faregate")`, such as
    `startingOffsets=…`, `endingOffsets=…`, `nodes=…`.

    `source` is a journal's folder, or the URL of a log. A body of more than `max_message_bytes`, unpacked, is not
    decoded.

    Raises `ConfigurationError` for a class whose fields cannot be columns, `InvalidOption`, and what Spark makes of
    `JournalNotFound`.
    """
    return _load(spark, source, message, max_message_bytes, options, stream=False)


def read_stream(
    spark: SparkSession,
    source: str | Path,
    message: type,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    **options: Any,
) -> DataFrame:
    """The same as a stream: for `writeStream`, with the options of streams, such as `maxMessagesPerTrigger=…`."""
    return _load(spark, source, message, max_message_bytes, options, stream=True)


def _load(
    spark: SparkSession, source: str | Path, cls: type, limit: int, options: dict[str, Any], *, stream: bool
) -> DataFrame:
    found = describe_either(cls)
    if not isinstance(limit, int) or limit < 1:
        raise ConfigurationError(f"max_message_bytes is a number of bytes, 1 at least, and not {limit!r}")
    for name, value in options.items():
        if value is not None and name.lower() in _OURS:
            raise InvalidOption(f"option {name} is not for fg.spark.read: {_OURS[name.lower()]}")
    schema = schema_of(cls)
    spec = TypedSpec(pack_class(cls), found.wire, schema, limit, found.kind if found.declared else None)
    given = as_texts({**options, **options_of_all(source), "types": found.wire})
    parsed = parse_options(given)
    if parsed.several:
        raise InvalidOption(
            f"fg.spark.read reads one journal: call it for each of {', '.join(parsed.named)}, and union the rows"
        )
    if stream:  # Spark itself says only when a query starts that it is one
        parsed.refuse(ENDING, NO_END)
    register(spark)
    reader = spark.readStream if stream else spark.read
    ranges: DataFrame = reader.format("faregate").options(**given, rows="ranges").load()
    return ranges.select(*RANGES.fieldNames()).mapInArrow(typed_rows(spec, parsed), schema)
