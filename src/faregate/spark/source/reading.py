"""Reading one range of a log as Arrow batches of rows. Runs in executors; needs the package and the folder alone.

Rules kept here:
- Frames go to Spark as they are, projected but not copied, unless they are small: then they are put together, because
  a batch costs Spark as much as a thousand rows.
- Messages that retention removed meanwhile are an error that names both offsets, or, with failOnDataLoss=false, a
  warning. Never silence.
- What is not wanted is not read where the log knows of it (`Outlined`); the rest of it is left out row by row.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from faregate.errors import OffsetGone
from faregate.ports.log import LogTransport, is_outlined
from faregate.spark.logs import open_partition
from faregate.spark.options import Options, shown
from faregate.spark.schema import RANGES, Projection, batches_to_rows, rows_to_batch
from faregate.spark.source.bounds import lost
from faregate.spark.source.conditions import ALL, Wanted, fitting, may_be_in, of_options
from faregate.spark.source.ranges import OffsetRange

log = logging.getLogger("faregate.spark")

BATCH_ROWS = 10_000
BATCH_BYTES = 8 * 1024 * 1024
"""Small frames are put together up to this."""


def read_range(options: Options, schema: StructType, span: OffsetRange, wanted: Wanted | None = None) -> Iterator[Any]:
    """The rows of a range, in order, as record batches of exactly Spark's Arrow schema: those that are wanted, or that
    the options choose."""
    if options.ranges:
        return iter([rows_to_batch([astuple(span)], _RANGE_ROW)])
    journal = span.partition if options.several else shown(options.path)
    return together(map(Projection(schema, journal), _found(options, span, wanted or wanted_by(options))))


def wanted_by(options: Options) -> Wanted:
    return (of_options(options.types, options.nodes),)


def spans_of(source: LogTransport, start: int, end: int, wanted: Wanted) -> Iterator[tuple[int, int]]:
    """What to read between two offsets to have all that is wanted, in order: from, and up to."""
    if wanted == ALL or not is_outlined(source):
        yield start, end
        return
    first = behind = -1
    for stretch in source.stretches(start, end):
        if not may_be_in(wanted, stretch):
            if behind >= 0:
                yield first, behind
            behind = -1
        else:
            first = stretch.start if behind < 0 else first
            behind = stretch.end
    if behind >= 0:
        yield first, behind


_RANGE_ROW: Any = to_arrow_schema(RANGES, timezone="UTC")


def messages_of(options: Options, rows: Any) -> Iterator[Any]:
    """The record batches of the log that rows of `RANGES` stand for."""
    for row in batches_to_rows([rows]):
        yield from together(_found(options, OffsetRange(*row), wanted_by(options)))


def ends_in(rows: Any) -> list[int]:
    """Where ranges end, by rows of `RANGES`."""
    found: list[int] = rows.column("end").to_pylist()
    return found


def _found(options: Options, span: OffsetRange, wanted: Wanted) -> Iterator[Any]:
    """The batches of a range with what is wanted of them."""
    stored = _stored(open_partition(options, span.partition), span, options.fail_on_data_loss, wanted)
    return (fitting(wanted, batch) for batch in stored)


def _stored(source: LogTransport, span: OffsetRange, fail: bool, wanted: Wanted) -> Iterator[Any]:
    start = span.start
    if source.latest() < span.end:
        # A planned range was durable once. A log that is shorter now would quietly give fewer rows.
        lose(lost("a planned read", span.end, source), fail)
    while start < min(span.end, source.latest()):
        try:
            for first, behind in spans_of(source, start, span.end, wanted):
                start = first
                for batch in source.batches(first, behind, rows=BATCH_ROWS):
                    yield batch
                    start = batch.column("offset")[-1].as_py() + 1
            return
        except OffsetGone as exc:
            loss = lost("a planned read", start, source)
            if loss is None:
                raise  # the log ends before the range does: nothing to go on from
            lose(loss, fail, exc)
            start = source.earliest()


def lose(loss: OffsetGone | None, fail: bool, cause: Exception | None = None) -> None:
    """Raises it, if there is one, or warns of it where losses are allowed."""
    if loss is not None and fail:
        raise loss from cause
    if loss is not None:
        log.warning("failOnDataLoss=false: %s", loss)


def chosen(batch: Any, types: Sequence[str], nodes: Sequence[str]) -> Any:
    """The messages of these types, published by these nodes; where none are named, of all."""
    return fitting((of_options(types, nodes),), batch)


def together(batches: Iterator[Any]) -> Iterator[Any]:
    """The same rows in larger batches, as far as these are small. All must have one schema."""
    waiting: list[Any] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        own = batch.nbytes
        if waiting and (rows + batch.num_rows > BATCH_ROWS or size + own > BATCH_BYTES):
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows, size = rows + batch.num_rows, size + own
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    [joined] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined
