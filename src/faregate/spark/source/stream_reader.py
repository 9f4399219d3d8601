"""A streaming read: offsets for Spark's checkpoint, limits per trigger, and a fixed end for available-now.

Rules kept here:
- An offset is {"0": the next offset to read, "log": the log's id}. A checkpoint of another log is refused: its
  numbers would mean other messages.
- Offsets never go back. What a limit leaves waits for the next trigger; every message is in exactly one batch.
- `partitions` is arithmetic; whether the messages are still there is asked when a batch is made and when it is read.
- `commit` is a hint for retention and only given when `readerName` asks: Spark calls it a batch late, and recovery
  never depends on it.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from faregate.errors import ConfigurationError
from faregate.ports.log import LogTransport
from faregate.spark.logs import OpenLog, open_partitions
from faregate.spark.options import Options
from faregate.spark.source.bounds import LOG_KEY, check_partitions, lost, resolve
from faregate.spark.source.ranges import HANDLED_MESSAGES, LEAST_HANDLED, TASK_MESSAGES, OffsetRange, split
from faregate.spark.source.reading import lose, read_range

Offset = dict[str, Any]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType) -> None:
        options.refuse(
            ["endingOffsets"],
            "is for batch reads: a stream has no end; to read what is there and stop, use trigger(availableNow=True)",
        )
        options.refuse(["pushFilters"], "is for batch reads: Spark does not tell a stream its filters")
        self._options = options
        self._schema = schema
        self._target: dict[str, int] | None = None
        """Where available-now ends; None for the other triggers."""
        self._warned = ""
        """The last loss that was logged: Spark asks a hundred times a second."""

    # --- where ---------------------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:
        """Asked once in a query's life; later the checkpoint says where to go on."""
        opened = open_partitions(self._options)
        check_partitions(self._options.starting, "startingOffsets", list(opened.partitions), opened.log_id)
        starts: dict[str, int] = {}
        for name, source in opened.partitions.items():
            bound = self._options.starting.of(name)
            starts[name] = resolve(bound, source)
            if isinstance(bound, int):
                starts[name] = self._present(bound, source, "startingOffsets")
        self._keep_reader_offset(starts)
        return self._offset(opened, starts)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = {name: source.latest() for name, source in open_partitions(self._options).partitions.items()}

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_messages is not None:
            return ReadMaxRows(self._options.max_messages)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset | None:
        opened = open_partitions(self._options)
        return self._offset(opened, {name: source.latest() for name, source in opened.partitions.items()})

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """How far the next batch goes. Raises `OffsetGone` when messages behind `start` were removed unread."""
        opened = open_partitions(self._options)
        starts = self._starts(opened, start)
        ends: dict[str, int] = {}
        for name, source in opened.partitions.items():
            begin = self._present(starts[name], source, "the checkpoint")
            available = source.latest() if self._target is None else self._target[name]
            ends[name] = max(starts[name], self._limited(source, begin, available, limit, len(opened.partitions)))
        return self._offset(opened, ends)

    def _limited(self, source: LogTransport, begin: int, available: int, limit: ReadLimit, shares: int) -> int:
        if begin >= available or isinstance(limit, ReadAllAvailable):
            return available
        if isinstance(limit, ReadMinRows):
            # Available-now must reach its end, however little is left.
            return available if self._target is not None or available - begin >= limit.min_rows else begin
        end = available
        if isinstance(limit, ReadMaxRows):
            end = min(end, begin + max(1, limit.max_rows // shares))
        # Spark's limits cannot be combined, so the second of ours is applied here.
        most_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        return end if most_bytes is None else _end_within(source, begin, end, max(1, most_bytes // shares))

    def _present(self, wanted: int, source: LogTransport, who: str) -> int:
        """The offset to go on from: the wanted one, or what is left when losses are allowed."""
        loss = lost(who, wanted, source)
        if loss is None:
            return wanted
        if str(loss) != self._warned:
            lose(loss, self._options.fail_on_data_loss)
            self._warned = str(loss)
        return max(wanted, source.earliest())

    # --- what ----------------------------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        starts, ends = _numbers(start), _numbers(end)
        least, most = self._options.min_partitions, TASK_MESSAGES
        if self._options.frames:
            total = sum(ends.values()) - sum(starts.get(name, 0) for name in ends)
            least, most = min(least, -(-total // LEAST_HANDLED)), HANDLED_MESSAGES
        return [*split({name: starts.get(name, 0) for name in ends}, ends, least, most)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, OffsetRange)
        return read_range(self._options, self._schema, partition)

    def commit(self, end: Offset) -> None:
        self._keep_reader_offset(_numbers(end))

    def stop(self) -> None:
        """Nothing is held open between calls."""

    def _keep_reader_offset(self, offsets: dict[str, int]) -> None:
        if self._options.reader_name is not None:
            for name, source in open_partitions(self._options).partitions.items():
                source.save_reader_offset(self._options.reader_name, offsets[name])

    # --- offsets -------------------------------------------------------------------------------------------

    def _offset(self, opened: OpenLog, numbers: dict[str, int]) -> Offset:
        return {**numbers, LOG_KEY: opened.log_id}

    def _starts(self, opened: OpenLog, start: Offset) -> dict[str, int]:
        if start.get(LOG_KEY) != opened.log_id:
            raise ConfigurationError(
                f"the checkpoint belongs to the log {start.get(LOG_KEY)}, and {opened.name} is the log "
                f"{opened.log_id}: it was made anew, or another path was given. Use a new checkpointLocation"
            )
        return _numbers(start)


def _numbers(offset: Offset) -> dict[str, int]:
    return {name: number for name, number in offset.items() if name != LOG_KEY}


def _end_within(source: LogTransport, start: int, end: int, budget: int) -> int:
    """The first offset whose message would take the bodies over the budget; one message always fits."""
    first = True
    for batch in source.batches(start, end):
        lengths = pc.fill_null(pc.binary_length(batch.column("payload")), 0)
        running = pc.cumulative_sum(pc.cast(lengths, "int64"))
        if running[-1].as_py() > budget:
            fitting = pc.sum(pc.less_equal(running, budget)).as_py()
            cut: int = batch.column("offset")[fitting].as_py()
            return cut + 1 if first and not fitting else cut
        budget -= running[-1].as_py()
        first = False
    return end
