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
- One job, two shuffles: all evidence grouped by (node, message id), then put in order by key, with little left of a
  message but its verdict and its place. Linear in its input. Where somebody was late, a second job says where each
  stretch begins; nothing else is taken from it, as a running bus has gone on meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from faregate.errors import ConfigurationError
from faregate.ports.log import DUPLICATE, FILTERED, HANDLED, SKIPPED
from faregate.spark.jobs import audit_evidence as seen
from faregate.spark.jobs.audit_outputs import outputs
from faregate.spark.jobs.audit_result import Audit, Judged, judge, make_findings, outbox_findings
from faregate.spark.jobs.audit_verdicts import class_of, is_of_class, is_wrong, told, verdict
from faregate.spark.jobs.deliveries import PASSED, UNSETTLED
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
        counts = _counted(_late(rows) if databases else rows)
        disorder = {row["node"]: 1 for row in counts if row["late"]}
        if disorder:  # seldom; only then it pays to find where each stretch begins
            rows = _disorder(rows)
            disorder |= _stretches(rows)
        judged = judge(counts, disorder, plan, databases, at_rest)
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

    def count(those: Column) -> Column:
        return F.sum(F.when(those, 1).otherwise(0))

    # All of a message first come to one task: adding up before that has next to nothing to add, and widens the rows.
    gathered = evidence.repartition("node", "hi", "lo")
    groups = gathered.groupBy("node", "hi", "lo").agg(
        F.bit_or(F.call_function("shiftleft", F.lit(1).cast("long"), kind)).alias("kinds"),  # by a column, not a number
        count(is_copy).alias("copies"),
        count(kind == HANDLED).alias("handled_n"),
        count(kind == DUPLICATE).alias("duplicate_n"),
        count(kind == seen.EFFECT).alias("effects"),
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
    ledger = _highest_of(seen.LEDGER, seen.LEDGER_SKIPPED, seen.LEDGER_FILTERED)
    letter = _highest_of(seen.OPEN, seen.REPLAYED, seen.DISCARDED, seen.RESOLVED)
    return groups.select("*", ledger.alias("ledger"), letter.alias("letter"))


def _has(kind: int) -> Column:
    """Whether there is evidence of this kind of a message."""
    return F.col("kinds").bitwiseAND(1 << kind) != 0


def _highest_of(*kinds: int) -> Column:
    """Of ascending kinds the last that there is evidence of; null if there is none."""
    return reduce(lambda lower, kind: F.when(_has(kind), kind).otherwise(lower), kinds, F.lit(None).cast("int"))


def _classed(messages: DataFrame, case: Case, floor: dict[str, float]) -> DataFrame:
    """The same rows with what they are and what is wrong with them, `verdict`; the `line` that they are in, and whether
    that has no order, `free`. Whether the order was kept (`late`, `disorder`, `overtaken`) is found later."""
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
    passed = _has(PASSED)
    taken = _has(HANDLED) | _has(DUPLICATE)
    settled = taken | passed
    ended = taken | (passed & ~_has(seen.PARKED) & letter.isNull())
    bare = (F.col("effects") == 0) & node.isin(*wanted)
    is_dead = letter.isin(seen.OPEN, seen.DISCARDED) | ((letter == seen.REPLAYED) & ~_has(UNSETTLED))
    handled = F.when(bare & (ended | F.lit(at_rest)), class_of("effectless")).otherwise(class_of("handled"))
    unrecorded = F.when(bare, class_of("unrecorded_bare")).otherwise(class_of("unrecorded"))
    what = (
        F.when(F.col("copies") == 0, class_of("beyond"))
        .when(F.col("ledger") == seen.LEDGER, handled)
        .when(F.col("ledger") == seen.LEDGER_SKIPPED, class_of("skipped"))
        .when(F.col("ledger") == seen.LEDGER_FILTERED, class_of("filtered"))
        .when(_has(HANDLED), F.when(excused, handled).otherwise(unrecorded))
        .when(is_dead, class_of("dead"))
        .when(_has(DUPLICATE), F.when(repeated, handled).otherwise(unrecorded))
        .when(_has(SKIPPED), class_of("skipped"))
        .when(_has(FILTERED), class_of("filtered"))
        .when(_has(seen.PARKED), class_of("parked"))
        .when(_has(UNSETTLED), class_of("in_flight"))
        .when(_has(seen.DEAD_LETTER), class_of("dead"))
        .when(passed & (letter == seen.RESOLVED), handled)
        .when(passed & repeated, F.when(bare, class_of("effectless")).otherwise(class_of("trusted")))
        .when(passed, F.when(bare, class_of("passed_bare")).otherwise(class_of("passed")))
        .when(F.lit(at_rest) & node.isin(*stored) & letter.isNull() & ~forgotten, class_of("no_letter"))
        .otherwise(class_of("dead"))
    )
    # What has no key, or was delayed, has no order: each is a key of its own.
    free = F.col("key").isNull() | F.col("delayed") | F.col("queue").isin(*loose) | F.col("queue").isNull()
    line = F.when(free, F.col("lo")).otherwise(F.xxhash64("node", "queue", "key"))
    several = (F.col("effects") > 1) | ((F.col("ledger") == seen.LEDGER) & (F.col("handled_n") > 1))
    # A handler that remembers nothing may have its effect each time that it runs.
    off = [number for number, ways in plan.ways.items() if "off" in ways]
    again = F.coalesce(F.col("queue").isin(*off) & (F.col("effects") <= F.col("runs")), F.lit(False))
    judged = (F.col("copies") > 0) & (F.coalesce("position", "offset") >= plan.earliest)
    counted = judged & (F.col("ledger") == seen.LEDGER) & F.col("sent").isNotNull() & (settled | F.lit(at_rest))
    counted &= F.col("at") >= remembered  # behind the floor a dead letter of what it sent may have gone
    signs = {
        "double": several & ~again,
        "again": several & again,
        "ghost": F.lit(at_rest) & (F.col("effects") > 0) & is_of_class(what, *_NO_EFFECT),
        "not_sent": counted & (F.coalesce("outs", F.lit(0)) < F.col("sent")),
        "sent_other": counted & (F.coalesce("outs", F.lit(0)) >= F.col("sent")) & _differs("out", "sent"),
        "uncounted": judged & (F.col("ledger") == seen.LEDGER) & F.col("sent").isNull(),
        "altered": _has(seen.ALTERED) | (judged & _is_another_body()),
        "unpublished": (F.col("copies") == 0) & _must_be_in_log(case, floor),
        "with_effects": F.col("effects") > 0,
        "in_ledger": F.col("ledger").isNotNull(),
    }
    later = {"late": F.lit(False), "disorder": F.lit(False), "overtaken": F.lit(None).cast("long")}
    return messages.withColumns({"verdict": verdict(what, signs), "free": free, "line": line, **later})


def _late(rows: DataFrame) -> DataFrame:
    """The same with `late` for a message that was committed behind one that follows it in the log: there is none where
    the order was kept. One sort."""
    return rows.withColumn("late", ~F.col("free") & F.coalesce(F.col("position") < _highest_before(), F.lit(False)))


def _disorder(rows: DataFrame) -> DataFrame:
    """The same with `overtaken`, the lowest position that a message of a line was committed before, and `disorder` for
    the first of a stretch that was committed in another order than that of the log. Two sorts."""
    backward = Window.partitionBy("line").orderBy(F.desc("written"), F.desc("position"))
    lowest_left = F.min("position").over(backward.rowsBetween(Window.unboundedPreceding, Window.currentRow))
    begins = _highest_before().isNull() | (_highest_before() <= lowest_left)
    disorder = F.coalesce(begins & (F.col("position") > lowest_left), F.lit(False))
    return rows.withColumns({"overtaken": lowest_left, "disorder": ~F.col("free") & disorder})


def _highest_before() -> Column:
    """Of those of a line that were committed before a message. Those of one transaction have the order of the log."""
    forward = Window.partitionBy("line").orderBy("written", "position")
    return F.max("position").over(forward.rowsBetween(Window.unboundedPreceding, -1))


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


def _counted(rows: DataFrame) -> list[dict[str, Any]]:
    """How many messages there are, by node, queue and verdict, and whether one of them was late; of each sign, how many
    have it."""
    found = (
        rows.groupBy("node", "queue", "verdict")
        .agg(F.count("*").alias("messages"), F.sum("duplicate_n").alias("duplicate"), F.max("late").alias("late"))
        .collect()
    )
    return [
        {**row.asDict(), **{name: row["messages"] * sign for name, sign in signs.items()}, "class": kind}
        for row in found
        for kind, signs in [told(row["verdict"])]
    ]


def _stretches(rows: DataFrame) -> dict[int, int]:
    """By node, how many stretches of a line were committed in another order than that of the log."""
    found = rows.where("disorder").groupBy("node").agg(F.count("*").alias("stretches")).collect()
    return {row["node"]: row["stretches"] for row in found}


def _bad_rows(rows: DataFrame, judged: Judged, limit: int) -> list[dict[str, Any]]:
    number = F.col("verdict")
    wrong = is_wrong(number) | F.col("disorder")
    for name, queues in judged.bad_queues.items():
        wrong |= is_of_class(number, name) & F.col("queue").isin(*queues)
    about = ("node", "hi", "lo", "queue", "offset", "verdict", "ledger", "effects", "handled_n", "disorder")
    found = rows.where(wrong).select(*about, "overtaken", *_SENT).limit(limit).collect()
    return [{**row.asDict(), **signs, "class": kind} for row in found for kind, signs in [told(row["verdict"])]]
