"""Rows that Spark writes become publications: the sink's input columns to the columns of a log.

Rules kept here:
- `type` and `body` must be there; who publishes is the column or the option `source`. The rest is optional and gets
  what `bus.publish` would have given it.
- A row's publication id is the one given, so that the bus recognises a repetition, or a hash of where the row stood:
  (query, batch, partition, ordinal). Nothing that differs between two runs enters it.
- A column of another name or type is refused on the driver, before anything runs; a bad value fails the task.
"""

import time
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from faregate import ids
from faregate.columns import SCHEMA
from faregate.errors import UnfitColumns, UnfitValue
from faregate.message import Envelope, check_name
from faregate.ports.topology import Topology
from faregate.spark.schema import COLUMNS, stored

_GIVEN_BY_THE_LOG = ("offset", "appended_at", "recipients", "redeliveries", "attempt_id", "key_id", "algorithm")
_NEEDED = ("type", "body")
WRITABLE = (*_NEEDED, *(name for name in COLUMNS if name not in (*_NEEDED, *_GIVEN_BY_THE_LOG)))
"""The columns that a publisher may fill."""


def check_columns(schema: StructType, source: str | None) -> None:
    """Raises `UnfitColumns`, which names the column and what to do about it."""
    names = schema.fieldNames()
    for fld in schema.fields:
        if fld.name not in WRITABLE:
            hint = "the log fills it itself: drop it" if fld.name in COLUMNS else f"allowed are {list(WRITABLE)}"
            raise UnfitColumns(f"faregate cannot write a column {fld.name!r}; {hint}")
        allowed = _allowed_types(fld.name)
        if fld.dataType.simpleString() not in allowed:
            raise UnfitColumns(
                f"column {fld.name} is {fld.dataType.simpleString()} and must be {' or '.join(allowed)}: cast it"
            )
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise UnfitColumns(f"faregate needs the columns type and body to write messages; missing: {missing}")
    if "source" not in names and source is None:
        raise UnfitColumns("who publishes? Give a column source, or option source with the name of the node")


def _allowed_types(name: str) -> list[str]:
    own = COLUMNS[name].dataType.simpleString()
    if name == "body":
        return ["binary", "string"]
    return ["int", "smallint", "tinyint"] if own == "int" else [own]


@dataclass
class BatchSealer:
    """Seals the rows of one task. `origin` is where they come from, the same for every attempt."""

    origin: str
    source: str | None
    topology: Topology
    ordinal: int = 0
    _seen: dict[str, set[Any]] = field(default_factory=dict)

    def seal(self, rows: Any) -> Any:
        """A record batch of Spark's as one of the log's. Raises `UnfitValue`, `Unroutable`."""
        count = rows.num_rows
        given = {name: rows.column(at) for at, name in enumerate(rows.schema.names)}
        columns = {name: self._plain(name, values) for name, values in given.items()}
        columns["source"] = self._sources(columns.get("source"), count)
        for name in ("type", "source", "destination"):
            if name in columns:
                self._check_names(name, columns[name])
        for name in _NEEDED:
            if columns[name].null_count:
                raise UnfitValue(f"column {name} is null in {columns[name].null_count} rows; a message must have it")
        columns["kind"] = self._kinds(columns, count)
        columns["publication_id"] = self._publication_ids(columns, count)
        columns["correlation_id"] = _or(columns.get("correlation_id"), columns["publication_id"])
        columns["sent_at"] = _or(columns.get("sent_at"), _repeat(time.time_ns() // 1000, "sent_at", count))
        columns["body_digest"] = _digests(columns, count)
        self.ordinal += count
        return as_stored(columns, count)

    def _plain(self, name: str, values: Any) -> Any:
        wanted = stored(name).type
        if name == "headers":
            return _headers(values)
        return values if values.type == wanted else values.cast(wanted)

    def _sources(self, values: Any, count: int) -> Any:
        if values is not None and values.null_count and self.source is None:
            raise UnfitValue(f"column source is null in {values.null_count} rows, and there is no option source")
        return _or(values, _repeat(self.source, "source", count))

    def _check_names(self, name: str, values: Any) -> None:
        known = self._seen.setdefault(name, {None})
        for value in pc.unique(values).to_pylist():
            if value not in known:
                known.add(check_name(value, f"column {name}: the value"))

    def _kinds(self, columns: dict[str, Any], count: int) -> Any:
        destination = columns.get("destination")
        if destination is None:
            destination = pa.nulls(count, pa.string())
        implied = pc.if_else(pc.is_valid(destination), "command", "event")
        kinds = _or(columns.get("kind"), implied)
        if not pc.all(pc.equal(kinds, implied), min_count=0).as_py():
            odd = kinds.filter(pc.not_equal(kinds, implied))[0].as_py()
            raise UnfitValue(
                f"column kind is {odd!r} where it cannot be: a 'command' has a destination, an 'event' has none"
            )
        commands = pc.is_valid(destination)
        pairs = zip(destination.filter(commands).to_pylist(), columns["type"].filter(commands).to_pylist(), strict=True)
        known = self._seen.setdefault("command", set())
        for node, wire in set(pairs) - known:
            self.topology.check_command(Envelope(type=wire, kind="command", source=self.source or "", destination=node))
            known.add((node, wire))
        return kinds

    def _publication_ids(self, columns: dict[str, Any], count: int) -> Any:
        given = columns.get("publication_id")
        if given is not None and not given.null_count:
            return given
        types, sources = columns["type"].to_pylist(), columns["source"].to_pylist()
        derived = [
            ids.idempotent_id(source, wire, f"{self.origin}/{ordinal}")
            for ordinal, (source, wire) in enumerate(zip(sources, types, strict=True), self.ordinal)
        ]
        return _or(given, pa.array(derived, pa.string()))


def as_stored(columns: dict[str, Any], count: int) -> Any:
    """A record batch of the log from these columns of messages; what is missing gets the envelope's default."""
    # The log numbers them when it takes them in.
    given = {"offset": pa.array(np.arange(count)), "payload": columns["body"], **columns}
    return pa.RecordBatch.from_arrays(
        [_or(given.get(each), _missing(each, count)) for each in SCHEMA.names], schema=SCHEMA
    )


_DEFAULTS: dict[str, Any] = {
    **dict(zip(Envelope.__struct_fields__, Envelope.__struct_defaults__, strict=True)),
    **{"time": 0, "topic": -1, "recipients": [], "headers": []},
}


@lru_cache(maxsize=256)
def _missing(name: str, count: int) -> Any:
    """A column of the log that nobody gave; most batches have the same number of rows."""
    return _repeat(_DEFAULTS.get(name), name, count)


def _or(values: Any, otherwise: Any) -> Any:
    if values is None:
        return otherwise
    return pc.coalesce(values, otherwise) if values.null_count else values


def _repeat(value: Any, name: str, count: int) -> Any:
    type = stored(name).type
    return pa.nulls(count, type) if value is None else pa.repeat(pa.scalar(value, type), count)


def _headers(values: Any) -> Any:
    """No headers instead of null; a header without a value is refused."""
    rows = [dict(pairs or ()) for pairs in values.to_pylist()]
    if any(value is None for row in rows for value in row.values()):
        raise UnfitValue("column headers has a header without a value: every header is a text")
    return pa.array([tuple(row.items()) for row in rows], SCHEMA.field("headers").type)


def _digests(columns: dict[str, Any], count: int) -> Any:
    """Of the plain bodies, so that the bus notices two bodies under one id. Of compressed ones it is not known here."""
    given, encoding = columns.get("body_digest"), columns.get("content_encoding")
    if encoding is not None and encoding.null_count < count:
        return given if given is not None else pa.nulls(count, pa.binary())
    if given is not None and not given.null_count:
        return given
    bodies = columns["body"].to_pylist()
    return _or(given, pa.array([sha256(body).digest()[:16] for body in bodies], pa.binary()))
