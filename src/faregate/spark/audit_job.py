"""The audit: does every recipient of every publication have exactly what it should, by all that was written down?

    published = handled + skipped + dead + parked + in flight + missing, per recipient

Rules kept here:
- It runs nothing of the bus: journal, side logs, stores and business data are read as they lie.
- What is judged: messages that the log still has, from the first offset it has on; copies of one publication once.
- Safe beside a running bus: side logs are cut off at the moment of planning, stores are read later, so whatever was
  settled must be in its store; what moves meanwhile counts as in flight. `at_rest` allows nothing in flight.
- Ledger rows below a node's floor were removed on purpose: a message appended before it is not missed.
- A reader of the log (a node on Spark) settles nothing. What it has read past must be in the ledger, parked or dead; of
  a handler that keeps no ledger it is taken as handled, and a note says so. Marks are read first, then parked messages,
  then the other tables: a message only ever moves in that direction.
- Order is that of the commits, by no clock.
- One job, two shuffles: all evidence grouped by (node, message id), then put in order by key. Linear in its input.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Column, Window
from pyspark.sql import functions as F

from faregate.errors import ConfigurationError
from faregate.spark import audit_evidence as seen
from faregate.spark.audit_result import BAD, Audit, Judged, judge, make_findings, outbox_findings
from faregate.spark.jobs_deliveries import PASSED
from faregate.spark.jobs_settled import JournalPlan, plan_journal
from faregate.spark.jobs_store import Database, StoreUrls, floors, nodes_in, open_stores, with_marks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TRIES = 3


def audit(
    spark: "SparkSession",
    *,
    journal: str | Path,
    store: StoreUrls = None,
    effects: Sequence[str] = (),
    at_rest: bool = False,
    unordered: Sequence[str] = (),
    limit: int = 10_000,
) -> Audit:
    """Audit a journal, the stores of its nodes (one URL, or a mapping of node to URL) and their business data.

    `effects`: `NODE:SQL`, each a query for the message ids in business data; `NODE?:SQL` when a handled message need
    not have one. `unordered`: queues (`billing.OrderPlaced.shop`), or nodes, whose order is not promised
    (`fg.Parallel`, `ByKey(strict=False)`). `limit`: how many findings are listed; all are counted. Raises
    `ConfigurationError` for what cannot be audited.
    """
    if limit < 1:
        raise ConfigurationError(f"limit={limit} lists nothing: ask for one finding or more")
    databases, plan, queries = prepare(journal, store, effects, unordered)
    loose = [number for number, name, node, _ in plan.queues if name in unordered or node in unordered]
    messages = _grouped(spark, plan, databases, queries, at_rest)
    floor = floors(databases)
    by_identity = nodes_in(databases, "faregate_identities")
    for _ in range(_TRIES):
        rows = _classed(messages, plan, databases, queries, floor, by_identity, loose, at_rest)
        judged = judge(_counted(rows), plan, databases, at_rest)
        raised = floors(databases)
        if raised == floor or judged.ok:
            break
        floor = raised  # retention went on meanwhile: what it took is not missing
    listed = [] if judged.ok else make_findings(_bad_rows(rows, judged, limit), plan, judged)
    unsent, outbox = outbox_findings(databases, plan.everyone, limit) if at_rest else (0, [])
    return judged.result(spark, plan, floor, [*listed, *outbox][:limit], unsent)


def prepare(
    journal: str | Path, store: StoreUrls, effects: Sequence[str] = (), unordered: Sequence[str] = ()
) -> tuple[tuple[Database, ...], JournalPlan, tuple[seen.Effects, ...]]:
    """What is to be audited, looked at before a session is needed. Raises as `audit` does."""
    plan = plan_journal(journal)
    databases = open_stores(store)
    plan = with_marks(plan, databases)
    _check(plan, databases, store, unordered)
    return databases, plan, seen.parse_effects(effects, databases, plan.nodes)


def _check(plan: JournalPlan, databases: Sequence[Database], store: StoreUrls, unordered: Sequence[str]) -> None:
    if not plan.segments:
        raise ConfigurationError(f"the journal {plan.path} has no messages: there is nothing to audit")
    if isinstance(store, str) or store is None:
        named: list[str] = []
    else:
        named = [node for node in store if node not in plan.everyone]
    if named:
        raise ConfigurationError(
            f"the journal {plan.path} knows no node {', '.join(named)}; there are {', '.join(plan.everyone)}"
        )
    known = nodes_in(databases, "faregate_ledger")
    if known and known.isdisjoint(plan.everyone):
        raise ConfigurationError(
            f"{' and '.join(each.shown for each in databases)} is another store: it is of {', '.join(sorted(known))}, "
            f"and the journal {plan.path} of {', '.join(plan.everyone)}"
        )
    names = {name for _, name, _, _ in plan.queues} | set(plan.nodes)
    for name in unordered:
        if name not in names:
            raise ConfigurationError(f"there is no queue or node {name!r}; there are {', '.join(sorted(names))}")


def _known(
    spark: "SparkSession",
    plan: JournalPlan,
    databases: Sequence[Database],
    queries: Sequence[seen.Effects],
    at_rest: bool,
) -> "DataFrame":
    """What is known apart from the copies in the journal: `STORED`."""
    given_up = seen.given_up(spark, plan)
    if not databases:
        return given_up
    if at_rest or not any(each.reads_log for each in plan.handed_over):
        return given_up.unionByName(seen.stored(spark, databases, queries, plan.nodes))
    parked = seen.stored(spark, databases, (), plan.nodes, ("parked",))
    parked = parked.localCheckpoint() if hasattr(spark, "sparkContext") else parked.cache()
    later = seen.stored(spark, databases, queries, plan.nodes, ("ledger", "dead"))
    return given_up.unionByName(parked).unionByName(later)


def _grouped(
    spark: "SparkSession",
    plan: JournalPlan,
    databases: Sequence[Database],
    queries: Sequence[seen.Effects],
    at_rest: bool,
) -> "DataFrame":
    """One row per (node, message id), with all that is known of it."""
    copies = seen.deliveries(spark, plan).select(
        "*",
        F.lit(None).cast("long").alias("key"),
        F.lit(None).cast("long").alias("position"),
        F.lit(None).cast("long").alias("written"),
    )
    known = _known(spark, plan, databases, queries, at_rest).select(
        "node",
        "hi",
        "lo",
        "kind",
        F.lit(None).cast("int").alias("queue"),
        F.lit(None).cast("long").alias("offset"),
        F.lit(None).cast("double").alias("appended"),
        F.lit(None).cast("boolean").alias("token"),
        F.lit(None).cast("boolean").alias("delayed"),
        F.when(F.col("key").isNotNull(), F.xxhash64("key")).alias("key"),
        "position",
        "written",
    )
    evidence = copies.unionByName(known)
    kind = F.col("kind")

    def count(*kinds: int) -> Column:
        return F.sum(F.when(kind.isin(*kinds), 1).otherwise(0))

    return evidence.groupBy("node", "hi", "lo").agg(
        F.sum(F.when(kind < seen.LEDGER, 1).otherwise(0)).alias("copies"),
        count(0).alias("waiting_n"),
        count(1).alias("handled_n"),
        count(2).alias("skipped_n"),
        count(3).alias("dead_n"),
        count(6).alias("duplicate_n"),
        count(PASSED).alias("passed_n"),
        count(seen.POISON).alias("poison_n"),
        F.max(F.when(kind.isin(seen.LEDGER, seen.LEDGER_SKIPPED), kind)).alias("ledger"),
        F.max(F.when(kind.between(seen.OPEN, seen.RESOLVED), kind)).alias("buried"),
        count(seen.PARKED).alias("parked_n"),
        count(seen.EFFECT).alias("effects"),
        F.max("queue").alias("queue"),
        F.min("offset").alias("offset"),
        F.min("appended").alias("appended"),
        F.max("token").alias("token"),
        F.max("delayed").alias("delayed"),
        F.max("key").alias("key"),
        F.max("position").alias("position"),
        F.max("written").alias("written"),
    )


def _classed(
    messages: "DataFrame",
    plan: JournalPlan,
    databases: Sequence[Database],
    queries: Sequence[seen.Effects],
    floor: dict[str, float],
    by_identity: set[str],
    loose: Sequence[int],
    at_rest: bool,
) -> "DataFrame":
    """The same rows with what they are, and whether they are double, out of order, or an effect without a record."""
    node, buried = F.col("node"), F.col("buried")
    stored = [index for index, name in enumerate(plan.nodes) if any(each.holds(name) for each in databases)]
    complete = {each.node for each in queries if each.complete}
    complete -= {each.node for each in queries if not each.complete}
    wanted = [index for index, name in enumerate(plan.nodes) if name in complete]
    remembered: Column = F.lit(0.0)
    for index, name in enumerate(plan.nodes):
        if name in floor:
            remembered = F.when(node == index, F.lit(floor[name])).otherwise(remembered)
    excused = F.col("token") | ~node.isin(*stored) | (F.col("appended") < remembered)
    # A business key that was seen before is a duplicate that leaves nothing in the ledger.
    repeated = excused | node.isin(*(index for index, name in enumerate(plan.nodes) if name in by_identity))
    passed = F.col("passed_n") > 0
    ended = (F.col("handled_n") + F.col("duplicate_n") > 0) | (passed & (F.col("parked_n") == 0) & buried.isNull())
    bare = (F.col("effects") == 0) & node.isin(*wanted)
    given_up = buried.isin(seen.OPEN, seen.DISCARDED) | ((buried == seen.REPLAYED) & (F.col("waiting_n") == 0))
    handled = F.when(bare & (ended | F.lit(at_rest)), F.lit("effectless")).otherwise(F.lit("handled"))
    what = (
        F.when(F.col("copies") == 0, "beyond")
        .when(F.col("ledger") == seen.LEDGER, handled)
        .when(F.col("ledger") == seen.LEDGER_SKIPPED, "skipped")
        .when(F.col("handled_n") > 0, F.when(excused, handled).otherwise("unrecorded"))
        .when(given_up, "dead")
        .when(F.col("duplicate_n") > 0, F.when(repeated, handled).otherwise("unrecorded"))
        .when(F.col("skipped_n") > 0, "skipped")
        .when(F.col("parked_n") > 0, "parked")
        .when(F.col("waiting_n") > 0, "in_flight")
        .when(F.col("poison_n") > 0, "dead")
        .when(passed & (buried == seen.RESOLVED), handled)
        .when(passed & repeated, F.when(bare, "effectless").otherwise("trusted"))
        .when(passed, F.when(bare, "passed_bare").otherwise("passed"))
        .when(F.lit(at_rest) & node.isin(*stored) & buried.isNull(), "unburied")
        .otherwise("dead")
    )
    # What has no key, or was delayed, has no order: each is a key of its own.
    free = F.col("key").isNull() | F.col("delayed") | F.col("queue").isin(*loose) | F.col("queue").isNull()
    line = (F.when(free, -1).otherwise(F.col("queue")), F.when(free, F.col("lo")).otherwise(F.col("key")))
    before = Window.partitionBy("node", *line).orderBy("written").rangeBetween(Window.unboundedPreceding, -1)
    double = (F.col("effects") > 1) | ((F.col("ledger") == seen.LEDGER) & (F.col("handled_n") > 1))
    return messages.select(
        "*",
        what.alias("class"),
        F.coalesce(double, F.lit(False)).alias("double"),
        (F.lit(at_rest) & (F.col("effects") > 0) & what.isin("in_flight", "parked", "dead", "unburied")).alias("ghost"),
        (~free & (F.max("position").over(before) > F.col("position")) if databases else F.lit(False)).alias("disorder"),
    )


def _counted(rows: "DataFrame") -> list[Any]:
    def number(flag: str) -> Column:
        return F.sum(F.col(flag).cast("long")).alias(flag)

    return (
        rows.groupBy("node", "queue", "class")
        .agg(
            F.count("*").alias("messages"),
            number("double"),
            number("ghost"),
            F.sum(F.coalesce(F.col("disorder").cast("long"), F.lit(0))).alias("disorder"),
            F.sum("duplicate_n").alias("duplicate"),
            F.sum((F.col("effects") > 0).cast("long")).alias("with_effects"),
            F.sum(F.col("ledger").isNotNull().cast("long")).alias("in_ledger"),
        )
        .collect()
    )


def _bad_rows(rows: "DataFrame", judged: Judged, limit: int) -> list[Any]:
    wrong = F.col("double") | F.col("ghost") | F.coalesce(F.col("disorder"), F.lit(False))
    for name, queues in judged.bad_queues.items():
        if queues:
            wrong = wrong | ((F.col("class") == name) & F.col("queue").isin(*queues))
    assert set(judged.bad_queues) <= set(BAD)
    columns = ("node", "hi", "lo", "queue", "offset", "class", "double", "ghost", "disorder", "effects", "handled_n")
    return rows.where(wrong).select(*columns).limit(limit).collect()
