"""Rates: throughput, errors and latency in windows of time, per node and type, from what the log wrote down.

Rules kept here:
- A message counts in the window in which it ended at its node; what has not ended does not count.
- Latency runs from when it was sent, or was due, to its end; only handled messages have one.
- Copies of a message that only a store knows of are duplicates but for the first, and ended no earlier than they came.
- Errors are dead letters, and deliveries that went back for another try.
- What a log engine dealt with (it settles nothing in queues) ended when its ledger row or its dead letter says so, in
  its store or, of a node without one, in a journal. What leaves neither has no time, and is left out.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from faregate.errors import ConfigurationError
from faregate.ports.log import DUPLICATE, FILTERED, LogPart
from faregate.spark.jobs import audit_evidence as seen
from faregate.spark.jobs.deliveries import Ends, exploded, message_ids
from faregate.spark.jobs.settlements import JournalPlan, batch_of, by_task, plan_journal
from faregate.spark.jobs.stores import StoreUrls, open_stores
from faregate.units import parse_seconds

_TIMED = "node string, place int, type string, hi long, lo long, outcome int, ended double, due double, redelivered int"
_ACCURACY = 10_000


def window_seconds(text: str) -> float:
    """`10s`, `5m`, `1h`, `1d` in seconds. Raises `ConfigurationError`."""
    seconds = parse_seconds(text.lower(), "the window")
    if not seconds:
        raise ConfigurationError(f"the window {text!r} is no length of time: write 10s, 5m, 1h or 1d")
    return seconds


def rates(
    spark: SparkSession,
    *,
    journal: str | Path,
    store: StoreUrls = None,
    window: str = "10s",
    start: int | None = None,
    end: int | None = None,
) -> DataFrame:
    """A row per window, node and type: from, to, node, type, ended, handled, skipped, filtered, duplicate, dead,
    redelivered, per_second (what ended), error_rate (dead and redelivered of all deliveries), p50, p95, p99 (seconds).
    In order.

    `start` and `end` are offsets. Raises `ConfigurationError`, `JournalNotFound` and their like.
    """
    seconds = window_seconds(window)
    databases = open_stores(store)
    plan = plan_journal(journal, start, end)
    rows = by_task(spark, plan.segments, lambda segment: _timed(plan, segment), _TIMED)
    recorded = seen.dead_letters(spark, plan)
    if databases:
        recorded = recorded.unionByName(seen.stored(spark, databases, (), plan.nodes, ("ledger", "dead_states")))
    kind = F.col("kind")
    last = (
        recorded.where(kind.isin(*_RECORDED))
        .groupBy(F.col("node").alias("place"), "hi", "lo")
        # Who has a ledger row was handled in the end, whatever came before: the lowest kind counts.
        .agg(F.min(F.struct("kind", "at")).alias("last"))
    )
    waiting = rows.where(F.col("outcome") == 0).join(last, ["place", "hi", "lo"])
    outcome: Column = F.lit(3)
    for code, meant in _RECORDED.items():
        outcome = F.when(F.col("last.kind") == code, F.lit(meant)).otherwise(outcome)
    # Of several copies (a stream has all of them) the first was dealt with, and the others were recognised.
    copy = F.row_number().over(Window.partitionBy("place", "hi", "lo").orderBy("due"))
    by_log = waiting.withColumn("copy", copy).select(
        *(name for name in rows.columns if name not in ("outcome", "ended")),
        F.when(F.col("copy") == 1, outcome).otherwise(F.lit(DUPLICATE)).alias("outcome"),
        F.when(F.col("copy") == 1, F.col("last.at")).otherwise(F.greatest("last.at", "due")).alias("ended"),
    )
    rows = rows.where(F.col("outcome") != 0).unionByName(by_log)
    ended = rows.where(F.col("ended").isNotNull() & (F.col("outcome") != 0))
    number = F.floor(F.col("ended") / seconds)
    counts = {name: F.sum((F.col("outcome") == code).cast("long")) for name, code in _OUTCOMES.items()}
    latency = F.when(F.col("outcome") == 1, F.greatest(F.col("ended") - F.col("due"), F.lit(0.0)))
    return (
        ended.groupBy(number.alias("number"), "node", "type")
        .agg(
            F.count("*").alias("ended"),
            *(count.alias(name) for name, count in counts.items()),
            F.sum("redelivered").alias("redelivered"),
            F.percentile_approx(latency, [0.5, 0.95, 0.99], _ACCURACY).alias("p"),
        )
        .select(
            F.timestamp_seconds(F.col("number") * seconds).alias("from"),
            F.timestamp_seconds((F.col("number") + 1) * seconds).alias("to"),
            "node",
            "type",
            "ended",
            *_OUTCOMES,
            "redelivered",
            (F.col("ended") / seconds).alias("per_second"),
            ((F.col("dead") + F.col("redelivered")) / (F.col("ended") + F.col("redelivered"))).alias("error_rate"),
            *(F.col("p")[place].alias(name) for place, name in enumerate(("p50", "p95", "p99"))),
        )
        .orderBy("from", "node", "type")
    )


_OUTCOMES = {"handled": 1, "skipped": 2, "filtered": FILTERED, "duplicate": DUPLICATE, "dead": 3}
_RECORDED = {
    seen.LEDGER: 1,
    seen.LEDGER_SKIPPED: 2,
    seen.LEDGER_FILTERED: FILTERED,
    seen.OPEN: 3,
    seen.DISCARDED: 3,
    seen.DEAD_LETTER: 3,
}
"""What a record outside the side logs says of a message that has no settlement."""


def _timed(plan: JournalPlan, segment: LogPart) -> Iterator[Any]:
    ends = Ends(plan, segment)
    names = np.array(plan.nodes, dtype=object)
    for batch, rows, places, _ in exploded(plan, segment):
        offsets = batch.column("offset").to_numpy()[rows]
        hi, lo = message_ids(batch, rows, places, plan.nodes)
        columns = {
            "node": names[places],
            "place": places,
            "type": batch.column("type").take(pa.array(rows)),
            "hi": hi,
            "lo": lo,
            "outcome": ends.outcomes(offsets, places),
            "ended": pa.array(ends.times(offsets, places), from_pandas=True),
            "due": _due(batch)[rows],
            "redelivered": ends.redelivered(offsets, places),
        }
        yield batch_of(_TIMED, len(rows), columns)


def _due(batch: Any) -> Any:
    """When each could first have been handled: sent, or due; a message without either, when it was appended."""
    micros = [batch.column(name).cast(pa.int64()) for name in ("sent_at", "deliver_at", "time")]
    sent, deliver, appended = micros
    known = pc.if_else(pc.greater(pc.fill_null(sent, 0), 0), sent, appended)
    later = pc.max_element_wise(known, deliver, skip_nulls=True)
    return later.to_numpy(zero_copy_only=False) / 1e6
