"""What a task of the handler job runs: the engine of this worker process, on the rows of a partition.

A worker process is used for many tasks. Its engine stays, with its event loop and open store; after an error it is
closed, and the next task makes another.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql.types import LongType, StringType, StructType

from faregate.spark.runs.engine import Engine
from faregate.spark.runs.spec import RunSpec
from faregate.spark.schema import batches_to_rows, rows_to_batch

COUNTS = StructType().add("outcome", StringType()).add("count", LongType())
_ARROW: Any = pa.schema([("outcome", pa.string()), ("count", pa.int64())])

_CLOSE_SECONDS = 5.0

_engines: dict[str, tuple[asyncio.AbstractEventLoop, Engine]] = {}


def handle_partition(spec: RunSpec) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """For `mapInArrow` over work rows; gives how the messages ended."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        rows = batches_to_rows(batches)
        first = next(rows, None)
        if first is None:
            return
        loop, engine = _engine(spec)
        try:
            counts = loop.run_until_complete(engine.run(chain([first], rows)))
        except BaseException:
            _discard(spec.id)
            raise
        yield rows_to_batch(list(counts.items()), _ARROW)

    return run


def _engine(spec: RunSpec) -> tuple[asyncio.AbstractEventLoop, Engine]:
    known = _engines.get(spec.id)
    if known is None:
        for other in list(_engines):  # of an earlier run in this process
            _discard(other)
        loop = asyncio.new_event_loop()
        engine = Engine(spec)
        known = _engines[spec.id] = (loop, engine)
        try:
            loop.run_until_complete(engine.open())
        except BaseException:
            _discard(spec.id)
            raise
    return known


def _discard(run: str) -> None:
    """Close an engine, whatever state it is in. First itself: its store's own tasks must live until it is closed."""
    loop, engine = _engines.pop(run)
    try:
        loop.run_until_complete(asyncio.wait_for(engine.close(), _CLOSE_SECONDS))
    except (Exception, asyncio.CancelledError):
        pass  # it is discarded because it failed
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_CLOSE_SECONDS))
        loop.close()
