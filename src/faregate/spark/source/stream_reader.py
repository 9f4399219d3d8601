"""A streaming read: offsets for Spark's checkpoint, limits per trigger, and a fixed end for available-now.

Rules kept here:
- An offset is {"0": the next offset to read, "log": the log's id}; of several journals {folder: the next offset to
  read, …, "log": {folder: the journal's id, …}}. A checkpoint of another log is refused: its numbers would mean other
  messages.
- A journal that is new joins with a batch that reads nothing of it. So an offset says where each begins, and reading
  begins there also after a restart. One that is gone is a loss.
- Offsets never go back. What a limit leaves waits for the next trigger; every message is in exactly one batch.
- `partitions` is arithmetic; whether the messages are still there is asked when a batch is made and when it is read.
- `commit` is a hint for retention and only given when `readerName` asks: Spark calls it a batch late, and recovery
  never depends on it.
"""

from collections.abc import Iterator
from typing import Any

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

from faregate.errors import ConfigurationError, OffsetGone
from faregate.ports.log import LogTransport
from faregate.spark.logs import OpenLog, open_partitions
from faregate.spark.options import ENDING, NO_END, Options
from faregate.spark.source.bounds import LOG_KEY, check_partitions, lost, resolve
from faregate.spark.source.limits import MOST_STORED, Waiting, end_by_size, within
from faregate.spark.source.ranges import LEAST_HANDLED, MOST_HANDLED, OffsetRange, split
from faregate.spark.source.reading import lose, read_range

Offset = dict[str, Any]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Options, schema: StructType) -> None:
        options.refuse(ENDING, NO_END)
        options.refuse(["pushFilters"], "is for batch reads: Spark does not tell a stream its filters")
        self._options = options
        self._schema = schema
        self._target: dict[str, int] | None = None
        """Where available-now ends; None for the other triggers."""
        self._warned: dict[str, str] = {}
        """The last loss that was logged, by journal: Spark asks a hundred times a second."""

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
        ids, ends = self._known(opened, start)
        waiting: dict[str, Waiting] = {}
        for name, source in opened.partitions.items():
            if name in ends:
                begin = self._present(ends[name], source, "the checkpoint")
                # A journal that joined meanwhile is left for a later run.
                available = source.latest() if self._target is None else self._target.get(name, begin)
                waiting[name] = Waiting(source, begin, available)
            elif self._target is None or name in self._target:
                ends[name] = source.earliest()
                ids[name] = source.log_id
        for name, end in self._limited(waiting, limit).items():
            ends[name] = max(ends[name], end)
        return {**ends, LOG_KEY: ids if self._options.several else opened.log_id}

    def _limited(self, waiting: dict[str, Waiting], limit: ReadLimit) -> dict[str, int]:
        if isinstance(limit, ReadMinRows):
            # Available-now must reach its end, however little is left.
            enough = self._target is not None or sum(each.count for each in waiting.values()) >= limit.min_rows
            return {name: each.end if enough else each.begin for name, each in waiting.items()}
        if isinstance(limit, ReadAllAvailable):
            return within(waiting, None, None)
        # Spark's limits cannot be combined, so the second of ours is applied here.
        most_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        most_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        ends = within(waiting, most_rows, most_bytes)
        if not self._options.ranges or self._options.archive is not None:
            return ends
        return {
            name: end_by_size(waiting[name].source, waiting[name].begin, end, MOST_STORED) for name, end in ends.items()
        }

    def _present(self, wanted: int, source: LogTransport, who: str) -> int:
        """The offset to go on from: the wanted one, or what is left when losses are allowed."""
        loss = lost(who, wanted, source)
        if loss is None:
            return wanted
        self._lose(source.name, loss)
        return max(wanted, source.earliest())

    def _lose(self, name: str, loss: OffsetGone) -> None:
        if self._warned.get(name) != str(loss):
            lose(loss, self._options.fail_on_data_loss)
            self._warned[name] = str(loss)

    # --- what ----------------------------------------------------------------------------------------------

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        ends = _numbers(end)
        starts = {**ends, **_numbers(start)}
        least = self._options.min_partitions
        if not self._options.ranges:
            return [*split(starts, ends, least)]
        total = sum(ends.values()) - sum(starts.values())
        return [*split(starts, ends, min(least, -(-total // LEAST_HANDLED)), MOST_HANDLED)]

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
                if name in offsets:
                    source.save_reader_offset(self._options.reader_name, offsets[name])

    # --- offsets -------------------------------------------------------------------------------------------

    def _offset(self, opened: OpenLog, numbers: dict[str, int]) -> Offset:
        return {**numbers, LOG_KEY: opened.log_id}

    def _known(self, opened: OpenLog, start: Offset) -> tuple[dict[str, str], dict[str, int]]:
        """The journals of a checkpoint: their ids, where there are several, and where to go on."""
        given, own = start.get(LOG_KEY), opened.log_id
        if not isinstance(given, dict) or not isinstance(own, dict):
            self._check_id(opened.name, given, own)
            return {}, _numbers(start)
        for name, log_id in given.items():
            if name in own:
                self._check_id(f"the journal {name}", log_id, own[name])
            else:
                self._lose(name, _gone(name, start[name]))
        return dict(given), _numbers(start)

    def _check_id(self, name: str, given: object, own: object) -> None:
        if given != own:
            raise ConfigurationError(
                f"the checkpoint belongs to the log {given}, and {name} is the log {own}: it was made anew, or another "
                "path was given. Use a new checkpointLocation"
            )


def _gone(name: str, read: int) -> OffsetGone:
    return OffsetGone(
        f"the journal {name}, which the checkpoint has read up to {read}, is not there any more. Bring it back, or set "
        "failOnDataLoss=false to go on without it"
    )


def _numbers(offset: Offset) -> dict[str, int]:
    return {name: number for name, number in offset.items() if name != LOG_KEY}
