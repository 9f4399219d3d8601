"""The audit: does every recipient of every publication have exactly what it should, by all that was written down?

    published = handled + skipped + filtered + dead + parked + in flight + missing, per recipient

Rules kept here:
- It runs nothing of the bus: log, side logs, stores and business data are read as they lie.
- Judged is every message that the log still has. Copies of one publication count once.
- Safe beside a running bus: side logs are cut off at the moment of planning, stores are read later, so whatever was
  settled must be in its store; what moves meanwhile counts as in flight. `at_rest` allows nothing in flight.
- Ledger rows below a node's floor were removed on purpose, and dead letters may have been: a message appended before
  it is not missed.
- A reader of the log (a node on Spark) settles nothing. What it has read past must be in the ledger, parked or dead; of
  a handler that keeps no ledger it is taken as handled, and a note says so. Marks are read first, then parked messages,
  then the other tables: a message only ever moves in that direction.
- Order is the order of the commits; no clock is asked. A stretch of a key in another order is one finding, however
  long it is.
- What handlers sent is counted against their ledger rows; what the log and the ledger say of a body is compared with
  the body itself; and what was never published must have no ledger row and no effect.
- What a filter did not take has no effect. It was settled so; where no settlements are kept, the ledger has a row that
  says so.
- What must be in a ledger is known from the log: it keeps how each subscription remembers.
- One job, two shuffles: all evidence grouped by (node, message id), then put in order by key. Linear in its input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from faregate.errors import ConfigurationError
from faregate.ports.log import FILTERED
from faregate.spark.jobs import audit_evidence as seen
from faregate.spark.jobs.audit_outputs import outputs
from faregate.spark.jobs.audit_result import FLAGS, Audit, Judged, judge, make_findings, outbox_findings
from faregate.spark.jobs.deliveries import PASSED
from faregate.spark.jobs.settlements import JournalPlan, plan_journal
from faregate.spark.jobs.stores import JobStore, StoreUrls, floors, nodes_in, open_stores, with_marks

_TRIES = 3
_FIRST_IDS = 1.5e9
"""Seconds: ids that begin with an earlier time begin with no time, but with a hash."""
_NO_EFFECT = ("filtered", "in_flight", "parked", "dead", "no_letter")
"""Classes of messages that have none."""
_SENT = ("sent", "sent_hi", "sent_lo", "outs", "out_hi", "out_lo")


def audit(
    spark: SparkSession,
    *,
    journal: str | Path,
    store: StoreUrls = None,
    effects: Sequence[str] = (),
    at_rest: bool = False,
    unordered: Sequence[str] = (),
    limit: int = 10_000,
) -> Audit:
    """Audit a log, the stores of its nodes (one URL, or a mapping of node to URL) and their business data.

    `effects`: `NODE:SQL`, each a query for the message ids in business data; `NODE?:SQL` when a handled message need
    not have one. `unordered`: queues (`billing.OrderPlaced.shop`), or nodes, whose order is not promised
    (`fg.Parallel`, `ByKey(strict=False)`). `limit`: how many findings are listed; all are counted. Raises
    `ConfigurationError` for what cannot be audited.
    """
    if limit < 1:
        raise ConfigurationError(f"limit={limit} lists nothing: ask for one finding or more")
    case = prepare(journal, store, effects, unordered, at_rest)
    plan, databases = case.plan, case.databases
    messages = _grouped(spark, case)
    floor = floors(databases)
    for _ in range(_TRIES):
        rows = _classed(messages, case, floor)
        judged = judge(_counted(rows), plan, databases, at_rest)
        raised = floors(databases)
        if raised == floor or judged.ok:
            break
        floor = raised  # retention went on meanwhile: what it took is not missing
    listed = [] if judged.ok else make_findings(_bad_rows(rows, judged, limit), plan, judged)
    unsent, outbox = outbox_findings(databases, plan.everyone, limit) if at_rest else (0, [])
    return judged.result(spark, plan, floor, [*listed, *outbox][:limit], unsent)


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be audited."""

    plan: JournalPlan
    databases: tuple[JobStore, ...]
    queries: tuple[seen.Effects, ...]
    unordered: Sequence[str]
    at_rest: bool

    def places(self, wanted: Callable[[str], bool]) -> list[int]:
        """The nodes for which this holds, by their places."""
        return [index for index, name in enumerate(self.plan.nodes) if wanted(name)]


def prepare(
    journal: str | Path,
    store: StoreUrls,
    effects: Sequence[str] = (),
    unordered: Sequence[str] = (),
    at_rest: bool = False,
) -> Case:
    """Looked at before a session is needed. Raises as `audit` does."""
    plan = plan_journal(journal)
    databases = open_stores(store)
    plan = with_marks(plan, databases)
    _check(plan, databases, store, unordered)
    return Case(plan, databases, seen.parse_effects(effects, databases, plan.nodes), unordered, at_rest)


def _check(plan: JournalPlan, databases: Sequence[JobStore], store: StoreUrls, unordered: Sequence[str]) -> None:
    if not plan.segments:
        raise ConfigurationError(f"the log {plan.shown} has no messages: there is nothing to audit")
    named = [node for node in store if node not in plan.everyone] if isinstance(store, Mapping) else []
    if named:
        raise ConfigurationError(
            f"the log {plan.shown} knows no node {', '.join(named)}; there are {', '.join(plan.everyone)}"
        )
    known = nodes_in(databases, "ledger")
    if known and known.isdisjoint(plan.everyone):
        given = " and ".join(each.reader.url for each in databases)
        raise ConfigurationError(
            f"{given} is another store: it is of {', '.join(sorted(known))}, and the log {plan.shown} of "
            f"{', '.join(plan.everyone)}"
        )
    names = {queue.name for queue in plan.queues} | set(plan.nodes)
    for name in unordered:
        if name not in names:
            raise ConfigurationError(f"there is no queue or node {name!r}; there are {', '.join(sorted(names))}")


def _known(spark: SparkSession, case: Case) -> DataFrame:
    """What is known apart from the copies in the log: `STORED`."""
    plan, databases, queries = case.plan, case.databases, case.queries
    in_log = seen.dead_letters(spark, plan)
    if not databases:
        return in_log
    if case.at_rest or not any(each.reads_log for each in plan.handed_over):
        return in_log.unionByName(seen.stored(spark, databases, queries, plan.nodes))
    parked = seen.stored(spark, databases, (), plan.nodes, ("parked",))
    parked = parked.localCheckpoint() if hasattr(spark, "sparkContext") else parked.cache()
    later = seen.stored(spark, databases, queries, plan.nodes, ("ledger", "dead_states"))
    return in_log.unionByName(parked).unionByName(later)


def _grouped(spark: SparkSession, case: Case) -> DataFrame:
    """One row per (node, message id), with all that is known of it."""
    known = _known(spark, case).withColumn("key", F.when(F.col("key").isNotNull(), F.xxhash64("key")))
    evidence = seen.deliveries(spark, case.plan).unionByName(known, allowMissingColumns=True)
    if case.databases:
        sent = outputs(spark, case.plan, case.databases).withColumn("kind", F.lit(seen.OUTPUTS))
        evidence = evidence.unionByName(sent, allowMissingColumns=True)
    else:
        evidence = evidence.select(
            "*", *(F.lit(None).cast("long").alias(name) for name in ("outs", "out_hi", "out_lo"))
        )
    kind = F.col("kind")
    is_copy, in_ledger = kind < seen.LEDGER, kind.between(seen.LEDGER, seen.LEDGER_FILTERED)

    def count(*kinds: int) -> Column:
        return F.sum(F.when(kind.isin(*kinds), 1).otherwise(0))

    # All of a message first come to one task: adding up before that has next to nothing to add, and widens the rows.
    together = evidence.repartition("node", "hi", "lo")
    return together.groupBy("node", "hi", "lo").agg(
        F.sum(F.when(is_copy, 1).otherwise(0)).alias("copies"),
        count(0).alias("waiting_n"),
        count(1).alias("handled_n"),
        count(2).alias("skipped_n"),
        count(3).alias("dead_n"),
        count(6).alias("duplicate_n"),
        count(FILTERED).alias("filtered_n"),
        count(PASSED).alias("passed_n"),
        count(seen.DEAD_LETTER).alias("dead_letter_n"),
        F.max(F.when(in_ledger, kind)).alias("ledger"),
        F.max(F.when(kind.between(seen.OPEN, seen.RESOLVED), kind)).alias("letter"),
        count(seen.PARKED).alias("parked_n"),
        count(seen.EFFECT).alias("effects"),
        count(seen.ALTERED).alias("altered_n"),
        F.sum("runs").alias("runs"),
        F.max("queue").alias("queue"),
        F.min("offset").alias("offset"),
        F.min("appended").alias("appended"),
        F.max("token").alias("token"),
        F.max("delayed").alias("delayed"),
        F.max("key").alias("key"),
        F.max("position").alias("position"),
        F.max("written").alias("written"),
        F.max(F.when(in_ledger, F.col("at"))).alias("at"),
        F.min(F.when(is_copy, F.col("digest"))).alias("least_digest"),
        F.max(F.when(is_copy, F.col("digest"))).alias("digest"),
        F.max(F.when(in_ledger, F.col("digest"))).alias("handled_digest"),
        *(F.max(name).alias(name) for name in _SENT),
    )


def _classed(messages: DataFrame, case: Case, floor: dict[str, float]) -> DataFrame:
    """The same rows with what they are, and what is wrong with them: `FLAGS`."""
    plan, databases, at_rest, unordered = case.plan, case.databases, case.at_rest, case.unordered
    node, letter = F.col("node"), F.col("letter")
    stored = case.places(lambda name: any(each.holds(name) for each in databases))
    complete = {each.node for each in case.queries if each.complete}
    complete -= {each.node for each in case.queries if not each.complete}
    wanted = case.places(complete.__contains__)
    with_business_keys = case.places(nodes_in(databases, "business_keys").__contains__)
    loose = [each.number for each in plan.queues if each.name in unordered or each.node in unordered]
    remembered: Column = F.lit(0.0)
    for index, name in enumerate(plan.nodes):
        if name in floor:
            remembered = F.when(node == index, F.lit(floor[name])).otherwise(remembered)
    forgotten = F.col("appended") < remembered
    excused = F.col("token") | ~node.isin(*stored) | forgotten
    # A business key that was seen before is a duplicate that leaves nothing in the ledger.
    repeated = excused | node.isin(*with_business_keys)
    passed = F.col("passed_n") > 0
    settled = (F.col("handled_n") + F.col("duplicate_n") > 0) | passed
    ended = (F.col("handled_n") + F.col("duplicate_n") > 0) | (passed & (F.col("parked_n") == 0) & letter.isNull())
    bare = (F.col("effects") == 0) & node.isin(*wanted)
    is_dead = letter.isin(seen.OPEN, seen.DISCARDED) | ((letter == seen.REPLAYED) & (F.col("waiting_n") == 0))
    handled = F.when(bare & (ended | F.lit(at_rest)), F.lit("effectless")).otherwise(F.lit("handled"))
    unrecorded = F.when(bare, "unrecorded_bare").otherwise("unrecorded")
    what = (
        F.when(F.col("copies") == 0, "beyond")
        .when(F.col("ledger") == seen.LEDGER, handled)
        .when(F.col("ledger") == seen.LEDGER_SKIPPED, "skipped")
        .when(F.col("ledger") == seen.LEDGER_FILTERED, "filtered")
        .when(F.col("handled_n") > 0, F.when(excused, handled).otherwise(unrecorded))
        .when(is_dead, "dead")
        .when(F.col("duplicate_n") > 0, F.when(repeated, handled).otherwise(unrecorded))
        .when(F.col("skipped_n") > 0, "skipped")
        .when(F.col("filtered_n") > 0, "filtered")
        .when(F.col("parked_n") > 0, "parked")
        .when(F.col("waiting_n") > 0, "in_flight")
        .when(F.col("dead_letter_n") > 0, "dead")
        .when(passed & (letter == seen.RESOLVED), handled)
        .when(passed & repeated, F.when(bare, "effectless").otherwise("trusted"))
        .when(passed, F.when(bare, "passed_bare").otherwise("passed"))
        .when(F.lit(at_rest) & node.isin(*stored) & letter.isNull() & ~forgotten, "no_letter")
        .otherwise("dead")
    )
    # What has no key, or was delayed, has no order: each is a key of its own.
    free = F.col("key").isNull() | F.col("delayed") | F.col("queue").isin(*loose) | F.col("queue").isNull()
    line = (F.when(free, -1).otherwise(F.col("queue")), F.when(free, F.col("lo")).otherwise(F.col("key")))
    several = (F.col("effects") > 1) | ((F.col("ledger") == seen.LEDGER) & (F.col("handled_n") > 1))
    # A handler that remembers nothing may have its effect each time that it runs.
    off = [number for number, ways in plan.ways.items() if "off" in ways]
    again = F.coalesce(F.col("queue").isin(*off) & (F.col("effects") <= F.col("runs")), F.lit(False))
    overtaken, disorder = _disorder(line) if databases else (F.lit(None).cast("long"), F.lit(False))
    judged = (F.col("copies") > 0) & (F.coalesce("position", "offset") >= plan.earliest)
    counted = judged & (F.col("ledger") == seen.LEDGER) & F.col("sent").isNotNull() & (settled | F.lit(at_rest))
    counted &= F.col("at") >= remembered  # behind the floor a dead letter of what it sent may have gone
    flags = {
        "double": several & ~again,
        "again": several & again,
        "ghost": F.lit(at_rest) & (F.col("effects") > 0) & what.isin(*_NO_EFFECT),
        "disorder": ~free & disorder,
        "not_sent": counted & (F.coalesce("outs", F.lit(0)) < F.col("sent")),
        "sent_other": counted & (F.coalesce("outs", F.lit(0)) >= F.col("sent")) & _differs("out", "sent"),
        "uncounted": judged & (F.col("ledger") == seen.LEDGER) & F.col("sent").isNull(),
        "altered": (F.col("altered_n") > 0) | (judged & _is_another_body()),
        "unpublished": (F.col("copies") == 0) & _must_be_in_log(case, floor),
    }
    return messages.select(
        "*",
        what.alias("class"),
        overtaken.alias("overtaken"),
        *(F.coalesce(flag, F.lit(False)).alias(name) for name, flag in flags.items()),
    )


def _disorder(line: tuple[Column, ...]) -> tuple[Column, Column]:
    """The lowest position that a message of a line was committed before, and whether it is the first of a stretch that
    was committed in another order than that of the log. Those of one transaction have the order of the log."""
    forward = Window.partitionBy("node", *line).orderBy("written", "position")
    backward = Window.partitionBy("node", *line).orderBy(F.desc("written"), F.desc("position"))
    highest_before = F.max("position").over(forward.rowsBetween(Window.unboundedPreceding, -1))
    lowest_left = F.min("position").over(backward.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    begins = highest_before.isNull() | (highest_before < lowest_left)
    return lowest_left, begins & (F.col("position") > lowest_left)


def _differs(one: str, other: str) -> Column:
    """Whether two combined ids are not the same."""
    parts = [F.coalesce(f"{one}_{part}", F.lit(0)) != F.coalesce(f"{other}_{part}", F.lit(0)) for part in ("hi", "lo")]
    return parts[0] | parts[1]


def _is_another_body() -> Column:
    """Whether the body that was handled is in none of the copies; of more than two different ones nobody can tell."""
    own, least, most = F.col("handled_digest"), F.col("least_digest"), F.col("digest")
    return (own != least) & (own != most) & ((least == most) | (F.col("copies") <= 2))


def _must_be_in_log(case: Case, floor: dict[str, float]) -> Column:
    """Whether what the log does not have cannot have been there.

    A ledger row says where its message was. (One without a place is of an idempotency key that was sent with tokens.)
    An effect says nothing: what has no ledger row was never handled where every handler of its node keeps the ledger
    and nothing was removed from it; else the log must be whole. What is older than the log is of another one.
    """
    plan, at_rest = case.plan, case.at_rest
    node, position, in_ledger = F.col("node"), F.col("position"), F.col("ledger").isNotNull()
    effects = F.col("effects") > 0
    here = (position >= plan.earliest) & (F.lit(at_rest) | (position < plan.latest))
    here = (here | (position.isNull() & effects)) & (F.col("at") >= plan.begins)
    whole = case.places(lambda name: not plan.earliest or (name not in floor and plan.keeps_ledger(name)))
    made = F.shiftright("hi", 16) / 1000.0
    older = made.between(_FIRST_IDS, plan.begins)
    return F.when(in_ledger, here).otherwise(F.lit(at_rest) & effects & node.isin(*whole) & ~older)


def _counted(rows: DataFrame) -> list[Any]:
    return (
        rows.groupBy("node", "queue", "class")
        .agg(
            F.count("*").alias("messages"),
            *(F.sum(F.col(flag).cast("long")).alias(flag) for flag in (*FLAGS, "again", "uncounted")),
            F.sum("duplicate_n").alias("duplicate"),
            F.sum((F.col("effects") > 0).cast("long")).alias("with_effects"),
            F.sum(F.col("ledger").isNotNull().cast("long")).alias("in_ledger"),
        )
        .collect()
    )


def _bad_rows(rows: DataFrame, judged: Judged, limit: int) -> list[Any]:
    wrong: Column = F.lit(False)
    for flag in FLAGS:
        wrong = wrong | F.col(flag)
    for name, queues in judged.bad_queues.items():
        wrong = wrong | ((F.col("class") == name) & F.col("queue").isin(*queues))
    about = ("node", "hi", "lo", "queue", "offset", "class", "ledger", "effects", "handled_n", "overtaken")
    return rows.where(wrong).select(*about, *FLAGS, *_SENT).limit(limit).collect()
