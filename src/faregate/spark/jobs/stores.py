"""Tables of stores as DataFrames, read by the tasks through the databases' own drivers: no JDBC, no jars.

Rules kept here:
- Nothing is written: SQLite is opened read-only, PostgreSQL in a read-only transaction.
- A SQLite ledger is split by its row numbers, a task for every half a million; other tables and PostgreSQL's are one
  task each, streamed.
- What is no store of ours is refused on the driver with one sentence, before a job runs.
- No password is shown.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa

from faregate.broker.journal.reader import JournalReader
from faregate.errors import ConfigurationError, StoreUnavailable
from faregate.ports.clock import SystemClock
from faregate.ports.extras import needs_extra
from faregate.ports.schemes import hide_password, open_store, url_for_workers
from faregate.spark.jobs.settlements import JournalPlan, by_task
from faregate.spark.runs.views import low_water_name, reader_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS = 10_000
_LEDGER_TASK = 500_000
_TIMEOUT = 30.0
StoreUrls = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class StoreReader:
    """One database, and the nodes whose it is; None for all."""

    url: str = field(repr=False)
    nodes: tuple[str, ...] | None = None

    @property
    def is_sqlite(self) -> bool:
        return self.url.startswith("sqlite:")

    @property
    def shown(self) -> str:
        return hide_password(self.url)

    def holds(self, node: str) -> bool:
        return self.nodes is None or node in self.nodes

    def counts_sent(self) -> bool:
        """Whether its ledger keeps what handlers sent; a store that an older version has set up does not."""
        sql = (
            "select count(*) from pragma_table_info('faregate_ledger') where name = 'sent'"
            if self.is_sqlite
            else "select count(*) from pg_attribute where attrelid = 'faregate_ledger'::regclass and attname = 'sent'"
        )
        return bool(self.fetch(sql)[0][0])

    def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows, on the driver, of something small."""
        return [row for rows in self.stream(sql, values) for row in rows]

    def stream(self, sql: str, values: Sequence[Any] = ()) -> Iterator[list[tuple[Any, ...]]]:
        """Rows, some thousands at a time. Raises `StoreUnavailable`, or `ConfigurationError` for a bad statement."""
        yield from (self._sqlite if self.is_sqlite else self._postgres)(sql, values)

    def _sqlite(self, sql: str, values: Sequence[Any]) -> Iterator[list[tuple[Any, ...]]]:
        path = self.url.partition(":")[2]
        try:
            with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=_TIMEOUT)) as connection:
                cursor = connection.execute(sql, values)
                while rows := cursor.fetchmany(_ROWS):
                    yield rows
        except sqlite3.DatabaseError as exc:
            raise self._failure(exc, sql) from exc

    def _postgres(self, sql: str, values: Sequence[Any]) -> Iterator[list[tuple[Any, ...]]]:
        with needs_extra("postgres", self.shown):
            import psycopg
        try:
            with psycopg.connect(self.url, connect_timeout=5) as connection:
                connection.read_only = True
                with connection.cursor("faregate_job") as cursor:
                    cursor.itersize = _ROWS
                    cursor.execute(sql.encode(), values or None)
                    while rows := cursor.fetchmany(_ROWS):
                        yield rows
        except psycopg.OperationalError as exc:
            raise StoreUnavailable(f"cannot read {self.shown}: {' '.join(str(exc).split())}") from exc
        except psycopg.Error as exc:
            raise self._failure(exc, sql) from exc

    def _failure(self, exc: Exception, sql: str) -> Exception:
        told = " ".join(str(exc).split())
        if "not a database" in told:
            return ConfigurationError(f"{self.shown} is a file, but not a SQLite database: name another path")
        if "locked" in told or "unable to open" in told or "disk I/O" in told:
            return StoreUnavailable(f"cannot read {self.shown}: {told}")
        return ConfigurationError(f"{self.shown} refuses {' '.join(sql.split())!r}: {told}")


def open_stores(store: StoreUrls) -> tuple[StoreReader, ...]:
    """The databases that are meant. Raises `ConfigurationError` for what is no store, or was never set up."""
    if store is None:
        return ()
    given = [(url, node) for node, url in store.items()] if isinstance(store, Mapping) else [(store, None)]
    by_url: dict[str, list[str] | None] = {}
    for url, node in given:
        known = by_url.setdefault(_absolute(url_for_workers(url)), None if node is None else [])
        if node is not None and known is not None:
            known.append(node)
    databases = tuple(StoreReader(url, None if nodes is None else tuple(nodes)) for url, nodes in by_url.items())
    for database in databases:
        _check(database)
    return databases


def _absolute(url: str) -> str:
    scheme, colon, path = url.partition(":")
    if colon and scheme == "memory":
        raise ConfigurationError("a memory: store ends with the process of its bus: there is nothing to read here")
    if not colon or scheme not in ("sqlite", "postgres", "postgresql"):
        raise ConfigurationError(
            f"{hide_password(url)!r} names no store that jobs can read: sqlite:PATH, postgresql://…"
        )
    if scheme != "sqlite":
        open_store(url, SystemClock())  # opens nothing yet, and refuses what is no URL
        return url
    if not Path(path).is_file():
        raise ConfigurationError(f"there is no file {path}: {url} was never set up by a bus")
    return f"sqlite:{Path(path).absolute()}"


def _check(database: StoreReader) -> None:
    names = (
        "select name from sqlite_master where name = 'faregate_ledger'"
        if database.is_sqlite
        else "select to_regclass('faregate_ledger')::text"
    )
    if [name for (name,) in database.fetch(names) if name is not None] == []:
        raise ConfigurationError(f"{database.shown} has no tables of Faregate: it is the store of no bus")


def floors(databases: Sequence[StoreReader]) -> dict[str, float]:
    """By node, up to when ledger rows were removed."""
    found: dict[str, float] = {}
    for database in databases:
        for node, floor in database.fetch("select node, floor from faregate_floor"):
            if database.holds(node):
                found[node] = floor
    return found


def nodes_in(databases: Sequence[StoreReader], table: str) -> set[str]:
    """The nodes that have a row. SQLite jumps from one to the next in the index; so does this on PostgreSQL."""
    found: set[str] = set()
    for database in databases:
        sql = (
            f"with recursive n(node) as (select min(node) from {table} union all "
            f"select (select min(node) from {table} l where l.node > n.node) from n where n.node is not null) "
            "select node from n where node is not null"
        )
        found |= {node for (node,) in database.fetch(sql) if database.holds(node)}
    return found


def with_marks(plan: JournalPlan, databases: Sequence[StoreReader]) -> JournalPlan:
    """The plan with how far the readers of the log have come: by the low-water marks in their stores, or, of a node
    that has none there, by the position under which retention waits for it."""
    marks: dict[tuple[str, str], int] = {}
    for database in databases if plan.handed_over else ():
        for node, mark, position in database.fetch(
            "select node, key, position from faregate_positions where handler = ''"
        ):
            if database.holds(node):
                marks[node, mark] = position
    marked = {node for node, _ in marks}
    read = {each.name: each.offset for each in JournalReader(plan.path).reader_offsets()} if plan.handed_over else {}
    handed_over = []
    for each in plan.handed_over:
        if each.reads_log:
            at = marks.get((each.node, low_water_name(each.name, each.epoch)), 0)
            at = at if each.node in marked else read.get(reader_name(each.node), 0)
            each = replace(each, read=max(each.begin, at))
        handed_over.append(each)
    return replace(plan, handed_over=tuple(handed_over))


@dataclass(frozen=True, slots=True)
class Reading:
    """One task's statement."""

    database: StoreReader
    sql: str
    values: tuple[Any, ...] = ()


def readings(databases: Sequence[StoreReader], columns: str, table: str) -> list[Reading]:
    """The statements that read a table, a task for each."""
    found = []
    for database in databases:
        if table == "faregate_ledger" and database.is_sqlite:
            [(low, high)] = database.fetch("select min(seq), max(seq) from faregate_ledger")
            if low is None:
                continue
            for start in range(low, high + 1, _LEDGER_TASK):
                sql = f"select {columns} from {table} where seq between ? and ?"
                found.append(Reading(database, sql, (start, min(high, start + _LEDGER_TASK - 1))))
        else:
            found.append(Reading(database, f"select {columns} from {table}"))
    return found


def id_of(value: Any) -> bytes:
    """An id as a store, or a user's table, may hold it: 16 bytes, a UUID, or its text."""
    if isinstance(value, bytes | memoryview) and len(value) == 16:
        return bytes(value)
    if hasattr(value, "bytes"):
        return bytes(value.bytes)
    text = value.decode() if isinstance(value, bytes) else str(value)
    try:
        plain = bytes.fromhex(text.replace("-", ""))
    except ValueError:
        plain = b""
    if len(plain) != 16:
        raise ConfigurationError(f"{text[:50]!r} is no message id: the query must give ctx.message_id in its column")
    return plain


_TABLES = {
    "ledger": ("node, message_id, key, position, handled_at, outcome", "node string, message_id string, key string, "
               "position long, handled_at double, outcome string"),
    "parked": ("node, message_id, due_at, tries, key, position", "node string, message_id string, due_at double, "
               "tries int, key string, position long"),
    "outbox": ("seq, node, message_id, ordinal, destination, key, dispatched_at", "seq long, node string, "
               "message_id string, ordinal int, destination string, key string, dispatched_at double"),
    "dead": (
        "node, message_id, publication_id, type, source, correlation_id, key, queue, reason, error, tries, "
        "redeliveries, first_failed_at, last_failed_at, copies, replays, status, changed_by, changed_at, envelope",
        "node string, message_id string, publication_id string, type string, source string, correlation_id string, "
        "key string, queue string, reason string, error string, tries int, redeliveries int, first_failed_at double, "
        "last_failed_at double, copies int, replays int, status string, changed_by string, changed_at double, "
        "envelope binary",
    ),
}  # fmt: skip
"""By name, the columns as they are asked for, and as Spark has them. Times are seconds since the epoch."""


def store_table(spark: "SparkSession", store: StoreUrls, name: str) -> "DataFrame":
    """`ledger`, `dead`, `parked` or `outbox` of one store or several; of a mapping, only the nodes' own rows."""
    columns, schema = _TABLES[name]
    databases = open_stores(store)
    names = columns.split(", ")
    place = names.index("message_id")
    node_at = names.index("node")
    types = _arrow_types(schema)

    def read(reading: Reading) -> Iterator[Any]:
        for rows in reading.database.stream(reading.sql, reading.values):
            own = [[*row] for row in rows if reading.database.holds(row[node_at])]
            for row in own:
                if row[place] is not None:
                    digits = id_of(row[place]).hex()
                    row[place] = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
            if own:
                arrays = [pa.array(values, kind) for values, kind in zip(zip(*own, strict=True), types, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, names=names)

    return by_task(spark, readings(databases, columns, f"faregate_{name}"), read, schema)


def _arrow_types(schema: str) -> list[Any]:
    kinds = {"string": pa.string(), "long": pa.int64(), "int": pa.int32(), "double": pa.float64()}
    return [kinds.get(field.split()[1], pa.binary()) for field in schema.split(", ")]
