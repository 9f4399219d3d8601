"""Side logs as arrays and as a DataFrame: what became of the messages of each segment.

Rules kept here:
- A file is read up to the size it had when the job was planned: what is settled later is not half seen, and whatever a
  record speaks of was committed in a store before anything reads that store.
- A damaged record, or one with an outcome that is not known, is passed over, as by the broker itself.
- One task per file; nothing but the package is needed where tasks run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from faregate.broker.journal import settled
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.reader import JournalReader
from faregate.errors import JournalCorrupt
from faregate.ports.topology import Topology
from faregate.spark.logs import open_log
from faregate.spark.options import Options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RECORD = np.dtype(
    {
        "names": ["offset", "queue", "outcome", "tries", "redeliveries", "time", "crc"],
        "formats": ["<u8", "<u4", "u1", "<u2", "<u2", "<f8", "<u4"],
        "offsets": [0, 8, 12, 14, 16, 20, 28],
        "itemsize": settled.RECORD_BYTES,
    }
)
_SUMMED_BYTES = 28
_SCHEMA = (
    "offset long not null, queue string, node string, outcome string not null, tries int not null, "
    "redeliveries int not null, time timestamp"
)
_NAMES = np.array([settled.NAMES.get(code, "") for code in range(256)], dtype=object)


def _crc_table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1)
    return table


_TABLE = _crc_table()


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """One segment as it was when the job was planned. Plain values: it travels to tasks."""

    base: int
    start: int
    """The first offset that is wanted."""
    end: int
    """Behind the last."""
    settled_bytes: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A subscription that was handed over at least once, and what its views have dealt with."""

    queue: int
    name: str
    node: str
    type: str
    kind: str
    address: str | None
    """Who publishes an event; whom a command goes to."""
    epoch: int
    reads_log: bool
    begin: int
    history: int
    """Log view: below this offset messages are its own although they do not name its node."""
    read: int
    """Below this offset nothing waits: what has no settlement was dealt with by a reader of the log, or is parked."""


@dataclass(frozen=True, slots=True)
class JournalPlan:
    path: Path
    earliest: int
    latest: int
    segments: tuple[SegmentPlan, ...]
    queues: tuple[tuple[int, str, str, str], ...]
    """Number, name, node and type of every queue that is no dead-letter queue."""
    everyone: tuple[str, ...]
    """All nodes that the journal knows, also those that only publish."""
    handed_over: tuple[HandedOver, ...] = ()
    ways: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By queue, how its consumers have told what they had handled: `ledger`, `tokens`, `off`, `nothing`, `unknown`."""

    begins: float = 0.0
    """When the first message that the log still has was appended."""

    def keeps_ledger(self, node: str) -> bool:
        """Whether every handler of a node has told by the ledger what it had handled, at all times."""
        return all(self.ways.get(number) == ("ledger",) for number, _, each, _ in self.queues if each == node)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(sorted({node for _, _, node, _ in self.queues}))


def plan_journal(path: str | Path, start: int | None = None, end: int | None = None) -> JournalPlan:
    """What there is now, from `start` up to `end`. Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`."""
    folder = Path(str(path).removeprefix("journal:").partition("?")[0]).absolute()
    open_log(Options(folder))
    reader, disk = JournalReader(folder), RealDisk()
    names = set(disk.list(reader.layout.settled))
    sizes = {}
    bases = reader.layout.segment_bases(disk)
    for base in bases:
        side = reader.layout.settled_log(base)
        # What is settled from here on is left out: its message counts as waiting.
        sizes[base] = disk.size(side) // settled.RECORD_BYTES * settled.RECORD_BYTES if side.name in names else 0
    earliest, latest = reader.earliest(), reader.latest()
    first = max(earliest, start or 0)
    stop = latest if end is None else min(end, latest)
    topology = _topology(reader)
    spans = [
        SegmentPlan(base, max(base, first), min(following, stop), sizes[base])
        for base, following in zip(bases, [*bases[1:], latest], strict=False)
        if max(base, first) < min(following, stop)
    ]
    queues = tuple((each.number, each.name, each.node, each.type) for each in topology.queues if each.type is not None)
    # An event's topic is addressed by who publishes it.
    heard = {each.address for each in topology.topics if each.kind == "event" and each.address is not None}
    everyone = tuple(sorted({each.node for each in topology.queues} | heard))
    ways = {number: topology.ways(name) for number, name, _, _ in queues}
    return JournalPlan(
        folder, earliest, latest, tuple(spans), queues, everyone, _handed_over(topology), ways, _begins(reader)
    )


def _begins(reader: JournalReader) -> float:
    first = next((batch for batch in reader.batches(reader.earliest()) if batch.num_rows), None)
    return 0.0 if first is None else first.column("time")[0].value / 1e6


def _handed_over(topology: Topology) -> tuple[HandedOver, ...]:
    found = []
    for queue in topology.queues:
        reading = topology.reading(queue.name)
        if reading.epoch and queue.type is not None and queue.kind is not None:
            found.append(
                HandedOver(
                    queue=queue.number,
                    name=queue.name,
                    node=queue.node,
                    type=queue.type,
                    kind=queue.kind,
                    address=queue.source if queue.kind == "event" else queue.node,
                    epoch=reading.epoch,
                    reads_log=reading.view == "log",
                    begin=reading.offset,
                    history=reading.history,
                    read=reading.offset,
                )
            )
    return tuple(found)


def _topology(reader: JournalReader) -> Topology:
    """It is replaced as a whole; a reader that meets the moment of replacing looks again."""
    try:
        return reader.topology()
    except JournalCorrupt:
        return reader.topology()


def side_log(journal: Path, segment: SegmentPlan) -> Any:
    """The sound records of a segment, as an array of `RECORD`."""
    if not segment.settled_bytes:
        return np.empty(0, RECORD)
    path = JournalReader(journal).layout.settled_log(segment.base)
    with path.open("rb") as file:
        data = file.read(segment.settled_bytes)
    count = len(data) // settled.RECORD_BYTES
    records = np.frombuffer(data, RECORD, count)
    plain = np.frombuffer(data, np.uint8, count * settled.RECORD_BYTES).reshape(count, settled.RECORD_BYTES)
    sound = checksums(plain) == records["crc"]
    known = np.isin(records["outcome"], list(settled.NAMES))
    return records[sound & known]


def checksums(plain: Any) -> Any:
    """The CRC-32 that each record should have, from its bytes: all records a byte at a time."""
    sums = np.full(len(plain), 0xFFFFFFFF, np.uint32)
    for place in range(_SUMMED_BYTES):
        sums = _TABLE[(sums ^ plain[:, place]) & 0xFF] ^ (sums >> np.uint32(8))
    return sums ^ np.uint32(0xFFFFFFFF)


def settlements(spark: "SparkSession", journal: str | Path) -> "DataFrame":
    """The records of a journal's side logs: offset, queue, node, outcome, tries, redeliveries, time.

    For `redeliver` the time is when the message is due; `started` has none. Of segments that retention removed there
    are none any more.
    """
    plan = plan_journal(journal)
    names = {number: (name, node) for number, name, node, _ in plan.queues}

    def read(segment: SegmentPlan) -> Iterator[Any]:
        found = side_log(plan.path, segment)
        found = found[np.isin(found["queue"], list(names))]
        pairs = [names[number] for number in found["queue"].tolist()]
        times = pa.array((found["time"] * 1e6).astype("i8"), pa.timestamp("us", tz="UTC"), mask=found["time"] <= 0)
        columns = {
            "offset": found["offset"].astype("i8"),
            "queue": [name for name, _ in pairs],
            "node": [node for _, node in pairs],
            "outcome": _NAMES[found["outcome"]],
            "tries": found["tries"].astype("i4"),
            "redeliveries": found["redeliveries"].astype("i4"),
            "time": times,
        }
        table = pa.table(columns)
        yield from table.to_batches(max_chunksize=10_000)

    return by_task(spark, plan.segments, read, _SCHEMA)


def by_task(spark: "SparkSession", items: Any, read: Any, schema: str) -> "DataFrame":
    """Rows that a function reads for each of some plain items, a task for each item. The function yields record batches
    with the schema's columns in order; types that are close are cast."""
    wanted = list(items)
    if not wanted:
        return spark.createDataFrame([], schema)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            for place in batch.column(0).to_pylist():
                yield from read(wanted[place])

    return spark.range(0, len(wanted), 1, len(wanted)).mapInArrow(run, schema)
