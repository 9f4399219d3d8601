"""Ranges of the log to typed rows. Runs in executors.

    ranges -> (fields of the class ..., _message, _error)

Rules kept here:
- Bodies are decoded as for handlers: by the content type, with our codecs and the registered ones, decompressed, within
  a limit. Fields that the class lacks are passed over, and fields that the body lacks have the class's default.
- An event's class reads events, and a command's reads commands: both may have one name on the wire.
- No message fails the query. One that cannot be decoded, or whose values do not fit their columns, is a row as well:
  its fields are null, and `_error` has the reason and the body as it is in the log.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from faregate.codec import BodyReader
from faregate.errors import ConfigurationError, Undecodable
from faregate.message import Envelope, Kind
from faregate.plain import plain
from faregate.spark.options import Options
from faregate.spark.schema import Projection, row_schema
from faregate.spark.source.conditions import Condition, fitting
from faregate.spark.source.reading import messages_of
from faregate.spark.typed.fields import converted, members_of, struct_of
from faregate.spark.typed.travel import Traveller, unpack_class

MESSAGE, ERROR = "_message", "_error"
_ENVELOPE = row_schema(
    ("offset", "appended_at", "sent_at", "publication_id", "source", "key", "correlation_id", "causation_id", "headers")
)
_FAILURE = StructType(
    [
        StructField("reason", StringType()),
        StructField("body", BinaryType()),
        StructField("content_type", StringType()),
        StructField("content_encoding", StringType()),
    ]
)
_BODY = ("payload", "content_type", "content_encoding", "payload_ref")
_UNFIT = (pa.ArrowException, ValueError, TypeError, OverflowError, AttributeError)
"""What Arrow and the conversions raise for a value that does not fit its column."""
_SHOWN = 100
"""Letters of such a value; the whole body is in the row."""


@dataclass(frozen=True)
class TypedSpec:
    """What travels to the workers."""

    traveller: Traveller
    name: str
    schema: StructType
    limit: int
    kind: Kind | None = None
    """None: whatever has this name."""


def schema_of(cls: type) -> StructType:
    """The rows of a message class. Raises `ConfigurationError`."""
    fields = struct_of(members_of(cls)).fields
    for each in fields:
        if each.name.lower() in (MESSAGE, ERROR):  # to Spark, upper and lower case are the same
            raise ConfigurationError(
                f"{cls.__name__} has a field {each.name!r}: {MESSAGE} and {ERROR} are columns of fg.spark.read itself; "
                "give the field another name in Python, and keep its name on the wire with msgspec.field(name=…)"
            )
    return StructType([*fields, StructField(MESSAGE, _ENVELOPE, False), StructField(ERROR, _FAILURE)])


def typed_rows(spec: TypedSpec, options: Options) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For `mapInArrow` over ranges of the source, which was read with these options."""

    wanted = () if spec.kind is None else (Condition("kind", "in", (spec.kind,)),)

    def decode(batches: Iterable[Any]) -> Iterator[Any]:
        decoder = Decoder(spec)
        for ranges in batches:
            for batch in messages_of(options, ranges):
                yield decoder.rows(fitting((wanted,), batch))

    return decode


class Decoder:
    """Decodes into one class."""

    def __init__(self, spec: TypedSpec) -> None:
        cls = unpack_class(spec.traveller)
        if schema_of(cls) != spec.schema:
            raise ConfigurationError(
                f"{spec.name} has other fields in a worker than in the driver: install the same version in both"
            )
        self._reader = BodyReader(cls, limit=spec.limit)
        self._members = members_of(cls)
        self._schema: Any = to_arrow_schema(spec.schema, timezone="UTC")
        self._envelope = Projection(_ENVELOPE)

    def rows(self, batch: Any) -> Any:
        """A batch of the log as typed rows."""
        bodies = [batch.column(name).to_pylist() for name in _BODY]
        decoded = [self._read(*row) for row in zip(*bodies, strict=True)]
        try:
            columns = self._columns(decoded)
        except _UNFIT:
            decoded = [self._fitting(each) for each in decoded]
            columns = self._columns(decoded)
        envelope: Any = self._schema.field(MESSAGE).type
        message = pa.StructArray.from_arrays(self._envelope(batch).columns, fields=list(envelope))
        return pa.RecordBatch.from_arrays([*columns, message, self._errors(decoded, bodies)], schema=self._schema)

    def _read(self, body: bytes, content_type: str, encoding: str | None, elsewhere: str | None) -> Any:
        """The message, or why there is none."""
        if elsewhere is not None:
            return Undecodable(f"the body is kept at {elsewhere}, and not in the log")
        envelope = Envelope(body=body, content_type=content_type, content_encoding=encoding)
        try:
            return self._reader.read(envelope)
        except Undecodable as exc:
            return exc

    def _columns(self, decoded: list[Any]) -> list[Any]:
        failed = [isinstance(each, Undecodable) for each in decoded]
        if not any(failed):
            return [self._array(member, decoded) for member in self._members]
        good = list(compress(decoded, [not each for each in failed]))
        numbers = iter(range(len(good)))
        places = pa.array([None if each else next(numbers) for each in failed], pa.int64())
        return [self._array(member, good).take(places) for member in self._members]

    def _array(self, member: Any, messages: list[Any]) -> Any:
        return pa.array(converted(member.column, map(member.get, messages)), self._schema.field(member.name).type)

    def _fitting(self, message: Any) -> Any:
        """The message, or what does not fit of it."""
        if isinstance(message, Undecodable):
            return message
        for member in self._members:
            try:
                self._array(member, [message])
            except _UNFIT:
                column = member.column.type.simpleString()
                return Undecodable(f"{member.name} does not fit its column, {column}: {_shown(member, message)}")
        return message

    def _errors(self, decoded: list[Any], bodies: list[list[Any]]) -> Any:
        type: Any = self._schema.field(ERROR).type
        if not any(isinstance(each, Undecodable) for each in decoded):
            return pa.nulls(len(decoded), type)
        rows = zip(decoded, *bodies[:3], strict=True)
        return pa.array(
            [
                dict(zip(_FAILURE.fieldNames(), (plain(str(each)), *raw), strict=True))
                if isinstance(each, Undecodable)
                else None
                for each, *raw in rows
            ],
            type,
        )


def _shown(member: Any, message: Any) -> str:
    """Its value, as far as its class can show it."""
    try:
        return repr(member.get(message))[:_SHOWN]
    except Exception as exc:  # it is somebody else's
        return f"its value cannot be shown ({type(exc).__name__})"
