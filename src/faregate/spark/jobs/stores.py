"""Tables of stores as DataFrames, read by the tasks through the stores' own readers: no JDBC, no jars.

Rules kept here:
- Nothing is written.
- What is no store of ours is refused on the driver with one sentence, before a job runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pyspark.sql import DataFrame, SparkSession

from faregate.errors import ConfigurationError
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store, url_for_workers
from faregate.ports.store import COLUMNS, Part, Readable, StoreReader, Table
from faregate.spark.jobs.settlements import JournalPlan, batch_of, by_task
from faregate.spark.logs import open_log
from faregate.spark.runs.views import low_water_name, reader_name
from faregate.stores.sql.columns import id_text

StoreUrls = str | Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class JobStore:
    """One store as a job reads it, and the nodes whose it is; None for all."""

    reader: StoreReader
    nodes: tuple[str, ...] | None = None

    def holds(self, node: str) -> bool:
        return self.nodes is None or node in self.nodes

    def read(self, part: Part) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a part that are the nodes' own."""
        node_at = COLUMNS[part.table].index("node")
        for rows in self.reader.rows(part):
            if own := rows if self.nodes is None else [row for row in rows if row[node_at] in self.nodes]:
                yield own

    def rows(self, table: Table) -> Iterator[tuple[Any, ...]]:
        """All of them, on the driver, of something small."""
        for part in self.reader.parts(table):
            for rows in self.read(part):
                yield from rows


def open_stores(store: StoreUrls) -> tuple[JobStore, ...]:
    """The databases that are meant. Raises `ConfigurationError` for what is no store, or was never set up."""
    if store is None:
        return ()
    given = [(url, node) for node, url in store.items()] if isinstance(store, Mapping) else [(store, None)]
    readers: dict[str, StoreReader] = {}
    nodes: dict[str, list[str]] = {}
    for url, node in given:
        database_id, reader = _reader(url_for_workers(url))
        readers.setdefault(database_id, reader)
        nodes.setdefault(database_id, []).extend([] if node is None else [node])
    for reader in readers.values():
        if not reader.version():
            raise ConfigurationError(f"{reader.url} has no tables of Faregate: it is the store of no bus")
    return tuple(JobStore(reader, tuple(nodes[database_id]) or None) for database_id, reader in readers.items())


def _reader(url: str) -> tuple[str, StoreReader]:
    """How a store is read, and what tells it from others."""
    store = open_store(url, SystemClock())
    if not isinstance(store, Readable):
        raise ConfigurationError(f"{store.url} cannot be read by a job: {type(store).__name__} has no reader()")
    return store.database_id, store.reader()


def floors(databases: Sequence[JobStore]) -> dict[str, float]:
    """By node, up to when ledger rows were removed."""
    found = [(each, *floor) for each in databases for floor in each.reader.floors().items()]
    return {node: floor for database, node, floor in found if database.holds(node)}


def nodes_in(databases: Sequence[JobStore], table: Literal["ledger", "business_keys"]) -> set[str]:
    """The nodes that have a row."""
    return {node for each in databases for node in each.reader.nodes(table) if each.holds(node)}


def with_marks(plan: JournalPlan, databases: Sequence[JobStore]) -> JournalPlan:
    """The plan with how far the readers of the log have come: by the low-water marks in their stores, or, of a node
    that has none there, by the position under which retention waits for it."""
    marks: dict[tuple[str, str], int] = {}
    for database in databases if plan.handed_over else ():
        marks |= {mark: at for mark, at in database.reader.low_water().items() if database.holds(mark[0])}
    marked = {node for node, _ in marks}
    read = {each.name: each.offset for each in open_log(plan.path).reader_offsets()} if plan.handed_over else {}
    handed_over = []
    for each in plan.handed_over:
        if each.reads_log:
            node, name = each.queue.node, low_water_name(each.queue.name, each.reading.epoch)
            at = marks.get((node, name), 0) if node in marked else read.get(reader_name(node), 0)
            each = replace(each, read=max(each.reading.offset, at))
        handed_over.append(each)
    return replace(plan, handed_over=tuple(handed_over))


def id_of(value: Any) -> bytes:
    """An id as a user's table may hold it: 16 bytes, a UUID, or its text."""
    if isinstance(value, bytes | memoryview) and len(value) == 16:
        return bytes(value)
    if hasattr(value, "bytes"):
        return bytes(value.bytes)
    text = value.decode() if isinstance(value, bytes) else str(value)
    found = parsed_id(text)
    if found is None:
        raise ConfigurationError(f"{text[:50]!r} is no message id: the query must give ctx.message_id in its column")
    return found


def parsed_id(text: str) -> bytes | None:
    """A UUID as 16 bytes; None for what a foreign sender made up."""
    try:
        digits = bytes.fromhex(text.replace("-", ""))
    except ValueError:
        return None
    return digits if len(digits) == 16 else None


_TYPES = {
    **dict.fromkeys(("seq", "position"), "long"),
    **dict.fromkeys(("tries", "redeliveries", "copies", "replays", "ordinal"), "int"),
    "envelope": "binary",
}
"""How Spark has columns that are neither text nor times, which are seconds since the epoch."""
_EVIDENCE = 4
"""The last columns of a ledger are for the audit."""


def store_table(
    spark: SparkSession, store: StoreUrls, name: Literal["ledger", "dead", "parked", "outbox"]
) -> DataFrame:
    """`ledger`, `dead`, `parked` or `outbox` of one store or several; of a mapping, only the nodes' own rows."""
    names = COLUMNS[name][: -_EVIDENCE if name == "ledger" else None]
    fields = ", ".join(f"{each} {_TYPES.get(each, 'double' if each.endswith('_at') else 'string')}" for each in names)

    def read(task: tuple[JobStore, Part]) -> Iterator[Any]:
        database, part = task
        for rows in database.read(part):
            columns = dict(zip(COLUMNS[name], zip(*rows, strict=True), strict=True))
            columns["message_id"] = tuple(each and id_text(each) for each in columns["message_id"])
            yield batch_of(fields, len(rows), columns)

    tasks = [(database, part) for database in open_stores(store) for part in database.reader.parts(name)]
    return by_task(spark, tasks, read, fields)
