"""What handlers sent, and whether it arrived: the publications that each message caused.

    (scheduled) -> outbox -> (spool) -> log          or, when nobody takes it, a dead letter of the sender

Rules kept here:
- They are looked for in that direction, so that one that moves meanwhile is found at least once; where it is found
  twice it counts once.
- A message that a replay has published under a new identity was not sent by a handler.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from faregate.columns import to_batch
from faregate.message import Envelope
from faregate.ports.log import LogPart
from faregate.spark.jobs.deliveries import id_pairs
from faregate.spark.jobs.replay import REPLAYED_FROM
from faregate.spark.jobs.settlements import JournalPlan, batch_of, by_task, plan_journal
from faregate.spark.jobs.stores import JobStore, parsed_id
from faregate.spark.logs import open_appendable, open_log

OUTPUTS = "node int, hi long, lo long, out_hi long, out_lo long"
"""The sender, the message that it handled, and what that caused."""
_SEGMENTS = 4
"""How many one task looks through: most have little to find, and starting a task takes as long as reading two."""
_unpack = msgspec.msgpack.Decoder(Envelope).decode


def outputs(spark: SparkSession, plan: JournalPlan, databases: Sequence[JobStore]) -> DataFrame:
    """By (node, message id): `outs`, how many publications it caused, and their ids combined by exclusive or."""
    found = [*_in_stores(databases), *open_appendable(plan.path).waiting()]
    later = plan_journal(plan.path)  # behind the outbox: what has left it by now is in the log
    rows = by_task(spark, later.segments, lambda segment: _in_log(plan, segment), OUTPUTS, _SEGMENTS)
    if found:
        batch = to_batch(found, [-1] * len(found), range(len(found)), 0)
        moving = [tuple(row.values()) for made in _caused(batch, plan.nodes) for row in made.to_pylist()]
        rows = rows.unionByName(spark.createDataFrame(moving, OUTPUTS))
    return (
        rows.repartition("node", "hi", "lo")
        .dropDuplicates()
        .groupBy("node", "hi", "lo")
        .agg(F.count("*").alias("outs"), F.bit_xor("out_hi").alias("out_hi"), F.bit_xor("out_lo").alias("out_lo"))
    )


def _in_log(plan: JournalPlan, segment: LogPart) -> Iterator[Any]:
    for batch in open_log(plan.path).batches(segment.start, segment.end):
        yield from _caused(batch, plan.nodes)


def _caused(batch: Any, senders: Sequence[str]) -> Iterator[Any]:
    """What handlers of these nodes sent, of a batch of the log: `OUTPUTS`."""
    causations = batch.column("causation_id")
    if causations.null_count == len(causations):
        return
    nodes = pa.array(senders, pa.string())
    caused = pc.and_(pc.is_valid(causations), pc.is_in(batch.column("source"), value_set=nodes))
    rows = batch.filter(pc.and_(caused, pc.invert(_replayed(batch.column("headers")))))
    if not rows.num_rows:
        return
    causes = [parsed_id(text or "") for text in rows.column("causation_id").to_pylist()]
    made = [parsed_id(text or "") for text in rows.column("publication_id").to_pylist()]
    sound = [place for place, pair in enumerate(zip(causes, made, strict=True)) if None not in pair]
    hi, lo = id_pairs([causes[place] or b"" for place in sound])
    out_hi, out_lo = id_pairs([made[place] or b"" for place in sound])
    places = pc.index_in(rows.column("source"), value_set=nodes).take(pa.array(sound, pa.int64()))
    columns = {"node": places, "hi": hi, "lo": lo, "out_hi": out_hi, "out_lo": out_lo}
    yield batch_of(OUTPUTS, len(sound), columns)


def _replayed(headers: Any) -> Any:
    """Which rows a replay has made of others."""
    marked = np.zeros(len(headers), bool)
    if pc.any(pc.equal(headers.keys, REPLAYED_FROM)).as_py():
        marked[:] = [any(name == REPLAYED_FROM for name, _ in pairs or ()) for pairs in headers.to_pylist()]
    return pa.array(marked)


def _in_stores(databases: Sequence[JobStore]) -> Iterator[Envelope]:
    """What is due later or was cancelled, what waits in an outbox, and, read behind it, what left it for the dead
    letters."""
    for database in databases:
        yield from (_unpack(packed) for _, packed in database.rows("scheduled"))
        yield from (_unpack(packed) for _, packed in database.rows("waiting"))
        yield from (_unpack(packed) for _, packed in database.rows("unroutable"))
