"""The query of the fast path, and its handle."""

import time
from collections import Counter
from collections.abc import Callable
from math import ceil
from typing import Any

from pyspark.sql import DataFrame, functions
from pyspark.sql.streaming.query import StreamingQuery

from faregate.errors import ConfigurationError
from faregate.node.node import Node
from faregate.spark.logs import open_appendable, open_log, options_of
from faregate.spark.options import Place
from faregate.spark.runs.driver import LoopThread
from faregate.spark.runs.progress import RunProgress, end_of
from faregate.spark.runs.rows import WORK, work_rows
from faregate.spark.runs.spec import RunSpec, node_of
from faregate.spark.runs.stateless import COUNTED, OUTPUT, handle_as_they_come, handle_ordered, needs_order
from faregate.spark.runs.views import reader_name
from faregate.spark.schema import STAGED


def check_stateless(node: Node) -> None:
    """Raises `ConfigurationError` for a node that cannot do without a store."""
    needs = ["schema="] if node.schema is not None else []
    for subscription in node.subscriptions.values():
        needs += [f"identity= of {subscription}"] if subscription.business_key is not None else []
        needs += [f"dedup='tokens' of {subscription}"] if subscription.dedup == "tokens" else []
        requeues = any(policy.requeue is not None for policy in subscription.failures)
        needs += [f"requeue= of {subscription}"] if requeues else []
    if needs:
        raise ConfigurationError(f"node {node.name!r} needs a store for {', '.join(needs)}: run(…, store=…)")


_LOOK_SECONDS = 0.05
_COUNTS = "faregate"


def batch_counts(progress: Any) -> dict[str, int]:
    """How the messages of a batch ended, by what Spark tells of it; without what did not happen."""
    row = (progress["observedMetrics"] or {}).get(_COUNTS)
    return {} if row is None else {name: row[name] for name in COUNTED if row[name]}


class StatelessRun:
    """A node without a store that runs on Spark."""

    query: StreamingQuery

    def __init__(
        self, spec: RunSpec, path: Place, partitions: int, on_progress: Callable[[RunProgress], None] | None
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.sent = 0
        self._spec = spec
        self._path = path
        self._partitions = partitions
        self._on_progress = on_progress
        self._told = -1

    def start(self, stream: DataFrame, checkpoint: str, trigger: dict[str, Any]) -> None:
        if needs_order(node_of(self._spec)):
            rows = stream.mapInArrow(work_rows(self._spec, self._path), WORK)
            shuffled = rows.repartitionById(self._partitions, "bucket")
            handled = shuffled.mapInArrow(handle_ordered(self._spec, self._path), OUTPUT)
        else:
            handled = stream.mapInArrow(handle_as_they_come(self._spec, self._path), OUTPUT)
        counted = handled.observe(_COUNTS, *(functions.sum(name).alias(name) for name in COUNTED))
        self.query = (
            counted.select(*STAGED.fieldNames())
            .writeStream.format("faregate")
            .option("checkpointLocation", checkpoint)
            .options(**options_of(self._path))
            .trigger(**trigger)
            .start()
        )

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the run ends, at most `timeout` whole seconds; whether it has. Raises what it failed with."""
        left = None if timeout is None else ceil(timeout)
        while left is None or left > 0:
            ended = bool(self.query.awaitTermination(1))
            if self._tell() and not ended:
                self._take_in()
            left = None if left is None else left - 1
            if ended:
                self._settle()
                return True
        return not self.query.isActive

    def stop(self) -> None:
        """Finish the batch that runs, and end. One that has just begun runs again next time."""
        begun = self._last_batch()
        while self.query.isActive and self.query.status["isTriggerActive"] and self._last_batch() == begun:
            time.sleep(_LOOK_SECONDS)
        self.query.stop()
        self._tell()
        self._settle()

    def _last_batch(self) -> int:
        progress: Any = self.query.lastProgress
        return -1 if progress is None else int(progress["batchId"])

    def _tell(self) -> bool:
        """Tell of the batches since the last time; whether there were any."""
        told = self._told
        finished: list[Any] = self.query.recentProgress
        for progress in finished:
            if progress["batchId"] <= self._told:
                continue
            self._told = progress["batchId"]
            seconds = progress["durationMs"].get("triggerExecution", 0) / 1000
            counts = batch_counts(progress)
            sent = counts.pop("sent", 0)
            self.outcomes.update(counts)
            self.sent += sent
            if self._on_progress is not None:
                self._on_progress(RunProgress(self._told, counts, sent, 0, end_of(progress), seconds))
        return self._told > told

    def _settle(self) -> None:
        """Note how far it has read, and see that what it sent gets into the log."""
        progress: Any = self.query.lastProgress
        read = 0 if progress is None else end_of(progress)
        if read:
            open_log(self._path).save_reader_offset(reader_name(self._spec.node_name), read)
        self._take_in()

    def _take_in(self) -> None:
        """Nobody else does while no bus runs."""
        loop = LoopThread()
        try:
            loop.run(open_appendable(self._path).take_in())
        finally:
            loop.close()
