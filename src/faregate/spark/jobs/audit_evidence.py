"""All that is known of messages, as rows of numbers: what the audit groups by (node, message id).

    kind  0, 1, 2, 3, 6, 7  a copy in the log: waiting, handled, skipped, dead, duplicate, filtered (the side log's
                            codes)
          9                 a copy that a reader of the log has dealt with
          10, 11, 12        a ledger row: handled, skipped, filtered
          20, 21, 22, 23    a dead letter: open, replayed, discarded, resolved
          24                a dead letter in the log: there is no store
          30                parked
          40                an effect in business data
          50                what its handler sent
          60                a body in the log that is not the one its digest was made of; its node is -1

Rules kept here:
- Every column has a fixed width, so that grouping millions of rows needs no objects. A kind is a bit of a long later,
  and so below 63.
- A node is its place in the list of those that the log knows; rows of other nodes are left out.
- Ledger rows are in the order in which they were committed (`written`), by no clock; those of one transaction may be
  equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from faregate.columns import altered_offsets
from faregate.errors import ConfigurationError
from faregate.ports.log import LogPart
from faregate.ports.store import Part, Table
from faregate.spark.jobs.deliveries import FIELDS, digest_longs, id_pairs, read_dead_letters, read_deliveries
from faregate.spark.jobs.settlements import JournalPlan, batch_of, by_task
from faregate.spark.jobs.stores import JobStore, id_of

LEDGER, LEDGER_SKIPPED, LEDGER_FILTERED, PARKED, EFFECT = 10, 11, 12, 30, 40
OPEN, REPLAYED, DISCARDED, RESOLVED, DEAD_LETTER = 20, 21, 22, 23, 24
OUTPUTS, ALTERED, NOBODY = 50, 60, -1
_LEDGER = {"skipped": LEDGER_SKIPPED, "filtered": LEDGER_FILTERED}
_DEAD = {"open": OPEN, "replayed": REPLAYED, "discarded": DISCARDED, "resolved": RESOLVED}

STORED = (
    "node int, hi long, lo long, kind int, key string, position long, written long, at double, digest long, sent int, "
    "sent_hi long, sent_lo long"
)
_NO_IDS = bytes(16)


@dataclass(frozen=True, slots=True)
class Effects:
    """A query for the message ids in a node's business data."""

    node: str
    database: JobStore
    sql: str
    complete: bool
    """Whether each handled message of a type that has effects there must have one."""


def parse_effects(given: Sequence[str], databases: Sequence[JobStore], nodes: Sequence[str]) -> tuple[Effects, ...]:
    """`NODE:SQL`; `NODE?:SQL` when not every message has one. Raises `ConfigurationError`, also for a bad query."""
    found = []
    for text in given:
        head, colon, sql = text.partition(":")
        node, optional = head.strip().removesuffix("?"), head.strip().endswith("?")
        if not colon or not sql.strip() or not node.replace("-", "").replace("_", "").isalnum():
            if len(nodes) != 1:
                raise ConfigurationError(
                    f"effects {text!r} do not name their node: write NODE:SELECT …, with one of {', '.join(nodes)}"
                )
            node, optional, sql = nodes[0], False, text
        if node not in nodes:
            raise ConfigurationError(
                f"effects {text!r}: no node {node!r} gets messages of this log; those that do: {', '.join(nodes)}"
            )
        database = next((each for each in databases if each.holds(node)), None)
        if database is None:
            raise ConfigurationError(f"effects {text!r}: no store is given for the node {node}")
        for rows in database.reader.query(sql, limit=1):
            id_of(rows[0][0])
        found.append(Effects(node, database, sql, not optional))
    return tuple(found)


def deliveries(spark: SparkSession, plan: JournalPlan) -> DataFrame:
    """The copies in the log, and the bodies there that were altered: `FIELDS`."""

    def read(segment: LogPart) -> Iterator[Any]:
        for batch, delivered in read_deliveries(plan, segment):
            yield delivered
            if offsets := altered_offsets(batch):
                count = len(offsets)
                same = {"node": [NOBODY] * count, "lo": [0] * count, "kind": [ALTERED] * count}
                yield batch_of(FIELDS, count, {**same, "hi": offsets, "offset": offsets})

    return by_task(spark, plan.segments, read, FIELDS)


def dead_letters(spark: SparkSession, plan: JournalPlan) -> DataFrame:
    """The dead letters in the log, of nodes without a store: `STORED`. One task: there are few."""
    places = {node: index for index, node in enumerate(plan.nodes)}

    def read(_: int) -> Iterator[Any]:
        for rows in read_dead_letters(plan):
            own = [row for row in rows if row[0] in places]
            if own:
                yield _batch("dead_letters", own, places)

    return by_task(spark, [0], read, STORED)


def stored(
    spark: SparkSession,
    databases: Sequence[JobStore],
    effects: Sequence[Effects],
    nodes: Sequence[str],
    tables: Sequence[Table] = ("ledger", "dead_states", "parked"),
) -> DataFrame:
    """What the stores know: `STORED`."""
    places = {node: index for index, node in enumerate(nodes)}
    tasks: list[tuple[JobStore, Part] | Effects] = [
        (database, part) for database in databases for table in tables for part in database.reader.parts(table)
    ]

    def read(task: tuple[JobStore, Part] | Effects) -> Iterator[Any]:
        if isinstance(task, Effects):
            for rows in task.database.reader.query(task.sql):
                yield _batch("effects", [(task.node, id_of(row[0]), None) for row in rows], places)
            return
        database, part = task
        for rows in database.read(part):
            own = [row for row in rows if row[0] in places]
            if own:
                yield _batch(part.table, own, places)

    return by_task(spark, [*tasks, *effects], read, STORED)


def _batch(kind: str, rows: list[tuple[Any, ...]], places: dict[str, int]) -> Any:
    columns = list(zip(*rows, strict=True))
    hi, lo = id_pairs(columns[1])
    found: dict[str, Any] = {"node": [places[node] for node in columns[0]], "hi": hi, "lo": lo, "at": columns[2]}
    if kind == "ledger":
        found |= {"key": columns[2], "position": columns[3], "at": columns[4], "written": columns[6]}
        found["kind"] = [_LEDGER.get(outcome, LEDGER) for outcome in columns[5]]
        found |= {"digest": digest_longs(columns[7]), "sent": columns[8]}
        if any(columns[9]):
            found["sent_hi"], found["sent_lo"] = id_pairs([ids or _NO_IDS for ids in columns[9]])
    elif kind == "dead_states":
        found["kind"] = [_DEAD[status] for status in columns[3]]
    else:
        found["kind"] = [{"dead_letters": DEAD_LETTER, "parked": PARKED, "effects": EFFECT}[kind]] * len(rows)
    return batch_of(STORED, len(rows), found)
