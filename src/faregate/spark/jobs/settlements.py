"""What a log holds when a job is planned, and what became of its messages as a DataFrame.

Rules kept here:
- Settlements are read as far as there were some when the job was planned: what is settled later is not half seen, and
  whatever one speaks of was committed in a store before anything reads that store.
- A part of the log is read by one task; nothing but the package is needed where tasks run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from faregate.ports.log import OUTCOME_NAMES, LogPart, LogTransport
from faregate.ports.schemes import hide_password
from faregate.ports.topology import QueueRecord, Reading
from faregate.spark.logs import log_place, open_log, open_settled, open_subscribed
from faregate.spark.options import Place
from faregate.spark.source.reading import together

_SCHEMA = (
    "offset long not null, queue string, node string, outcome string not null, tries int not null, "
    "redeliveries int not null, time timestamp"
)
_NAMES = np.array([OUTCOME_NAMES.get(code, "") for code in range(256)], dtype=object)


@dataclass(frozen=True, slots=True)
class HandedOverQueue:
    """A subscription that was handed over at least once, and what its views have dealt with."""

    queue: QueueRecord
    reading: Reading
    read: int
    """Below this offset nothing waits: what has no settlement was dealt with by a reader of the log, or is parked."""

    @property
    def reads_log(self) -> bool:
        return self.reading.view == "log"


@dataclass(frozen=True, slots=True)
class JournalPlan:
    path: Place
    earliest: int
    latest: int
    segments: tuple[LogPart, ...]
    queues: tuple[QueueRecord, ...]
    """All but the dead-letter queues."""
    everyone: tuple[str, ...]
    """All nodes that the log knows, also those that only publish."""
    handed_over: tuple[HandedOverQueue, ...]
    ways: Mapping[int, tuple[str, ...]]
    """By queue, how its consumers have told what they had handled: `ledger`, `tokens`, `off`, `nothing`, `unknown`."""
    begins: float
    """When the first message that the log still has was appended."""

    def keeps_ledger(self, node: str) -> bool:
        """Whether every handler of a node has told by the ledger what it had handled, at all times."""
        return all(self.ways.get(queue.number) == ("ledger",) for queue in self.queues if queue.node == node)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({queue.node for queue in self.queues}))

    @property
    def shown(self) -> str:
        """Where the log is, for people."""
        return hide_password(str(self.path))


def plan_journal(path: str | Path, start: int | None = None, end: int | None = None) -> JournalPlan:
    """What there is now, from `start` up to `end`. Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`."""
    place = log_place(path)
    log = open_log(place)
    earliest, latest = log.earliest(), log.latest()
    parts = tuple(log.parts(start, latest if end is None else min(end, latest)))
    topology = open_subscribed(place).topology()
    queues = tuple(each for each in topology.queues if not each.is_dead_letter_queue)
    # An event's topic is addressed by who publishes it.
    heard = {each.address for each in topology.topics if each.kind == "event" and each.address is not None}
    everyone = tuple(sorted({each.node for each in topology.queues} | heard))
    ways = {queue.number: topology.ways(queue.name) for queue in queues}
    found = [(queue, topology.reading(queue.name)) for queue in queues]
    handed_over = tuple(HandedOverQueue(queue, reading, reading.offset) for queue, reading in found if reading.epoch)
    return JournalPlan(place, earliest, latest, parts, queues, everyone, handed_over, ways, _begins(log))


def _begins(log: LogTransport) -> float:
    first = next((batch for batch in log.batches(log.earliest()) if batch.num_rows), None)
    return 0.0 if first is None else first.column("time")[0].value / 1e6


def settlements(spark: SparkSession, journal: str | Path) -> DataFrame:
    """The records of a journal's side logs: offset, queue, node, outcome, tries, redeliveries, time.

    For `redeliver` the time is when the message is due; `started` has none. Of segments that retention removed there
    are none any more.
    """
    plan = plan_journal(journal)
    queues = {queue.number: queue for queue in plan.queues}

    def read(segment: LogPart) -> Iterator[Any]:
        found = open_settled(plan.path).settlements(segment)
        found = found.filter(pc.is_in(found.column("queue"), value_set=pa.array(list(queues), pa.int32())))
        settled = [queues[number] for number in found.column("queue").to_pylist()]
        times = found.column("time").to_numpy()
        columns = {
            "offset": found.column("offset"),
            "queue": [queue.name for queue in settled],
            "node": [queue.node for queue in settled],
            "outcome": _NAMES[found.column("outcome").to_numpy()],
            "tries": found.column("tries"),
            "redeliveries": found.column("redeliveries"),
            "time": pa.array((times * 1e6).astype("i8"), pa.timestamp("us", tz="UTC"), mask=times <= 0),
        }
        yield from pa.table(columns).to_batches(max_chunksize=10_000)

    return by_task(spark, plan.segments, read, _SCHEMA)


_ARROW = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
}


def batch_of(fields: str, count: int, columns: Mapping[str, Any]) -> Any:
    """A record batch of what Spark calls `node int, offset long`; a column that is not given is null."""
    schema = pa.schema([(name, _ARROW[type]) for name, type in (field.split() for field in fields.split(", "))])
    given = [(columns.get(field.name), field.type) for field in schema]
    arrays = [pa.nulls(count, type) if values is None else pa.array(values, type) for values, type in given]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def by_task(spark: SparkSession, items: Any, read: Any, schema: str, each: int = 1) -> DataFrame:
    """Rows that a function reads for each of some plain items, a task for so many of them. The function yields record
    batches with the schema's columns in order, of one type for an item, as small ones are put together; types that are
    close are cast."""
    wanted = list(items)
    if not wanted:
        return spark.createDataFrame([], schema)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for place in batch.column(0).to_pylist():
                yield from together(read(wanted[place]))

    return spark.range(0, len(wanted), 1, -(-len(wanted) // each)).mapInArrow(run, schema)
