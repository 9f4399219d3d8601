"""A batch read: bounds are resolved when Spark plans it, then every task reads its range."""

from collections.abc import Iterable, Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from faregate.errors import ConfigurationError
from faregate.ports.log import LogTransport
from faregate.spark.logs import open_partitions
from faregate.spark.options import Options
from faregate.spark.source.bounds import Bound, check_partitions, lost, resolve
from faregate.spark.source.conditions import of_filters
from faregate.spark.source.pushed import remember
from faregate.spark.source.ranges import OffsetRange, split_spans
from faregate.spark.source.reading import lose, read_range, spans_of, wanted_by


class BatchReader(DataSourceReader):
    """Reads what lies between `startingOffsets` and `endingOffsets` at the moment of planning.

    It has no `pushFilters`: Spark refuses a source that has it unless a setting is on.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wanted = wanted_by(options)

    def partitions(self) -> list[InputPartition]:
        """Raises `OffsetGone` when part of what was asked for is not there."""
        opened = open_partitions(self._options)
        names = list(opened.partitions)
        for option, bounds in (("startingOffsets", self._options.starting), ("endingOffsets", self._options.ending)):
            check_partitions(bounds, option, names, opened.log_id)
        starts: dict[str, int] = {}
        spans: dict[str, list[tuple[int, int]]] = {}
        for name, source in opened.partitions.items():
            starting, ending = self._options.starting.of(name), self._options.ending.of(name)
            starts[name], end = self._bounds(starting, ending, source)
            spans[name] = [*spans_of(source, starts[name], end, self._wanted)]
        # Spark takes an empty list for a source without partitions, and reads it whole.
        empty = [OffsetRange(name, starts[name], starts[name]) for name in names[:1]]
        return [*(split_spans(spans, self._options.min_partitions) or empty)]

    def _bounds(self, starting: Bound, ending: Bound, source: LogTransport) -> tuple[int, int]:
        start, end, fail = resolve(starting, source), resolve(ending, source), self._options.fail_on_data_loss
        earliest, latest = source.earliest(), source.latest()
        if isinstance(starting, int) and isinstance(ending, int) and start > end:
            raise ConfigurationError(f"startingOffsets {start} lies behind endingOffsets {end}")
        # A bound that is no number stands for what there is: nothing is missing below or above it.
        if isinstance(starting, int):
            lose(lost("startingOffsets", start, source), fail)
        if isinstance(ending, int) and end > latest:
            lose(lost("endingOffsets", end, source), fail)
        start, end = max(start, earliest), min(end, latest)
        return start, max(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, OffsetRange)
        return read_range(self._options, self._schema, partition, self._wanted)


class PushedReader(BatchReader):
    """The same for `fg.spark.messages`: it reads what Spark's filters may want.

    All filters go back to Spark, which asks them of every row again: what is read may be for several queries.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        [chosen] = wanted_by(self._options)
        pushed = remember(self._options.load, of_filters(filters))
        self._wanted = tuple((*chosen, *conditions) for conditions in pushed)
        return filters
