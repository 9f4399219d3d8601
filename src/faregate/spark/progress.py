"""How far streams are behind, and how fast they are: `spark.streams.addListener(fg.spark.ProgressListener())`.

Spark lets sources written in Python say neither metrics nor a description of themselves (`sources[].metrics` and
`description` of a query's progress). They may say where the log ends, and so the lag can be computed outside.

Rules kept here:
- Of a query that reads nothing of ours, nothing is said.
- What a callback raises is logged, and the query goes on.
"""

import json
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
    StreamingQueryProgress,
)

from faregate.spark.source.bounds import LOG_KEY

log = logging.getLogger("faregate.spark")


class StreamProgress(NamedTuple):
    """What Spark tells of a query after a batch."""

    query: str
    """Its name, or its id when it has none."""
    batch: int
    rows: int
    """Rows of the batch, of all its sources."""
    input_rows_per_second: float
    processed_rows_per_second: float
    lags: dict[str, int]
    """How many messages wait, by log: a journal's folder where the query reads several, else the id of the log."""

    @property
    def lag(self) -> int:
        """How many messages wait, in all logs."""
        return sum(self.lags.values())


_NOTHING: dict[str, Any] = {"rows": 0, "input_rows_per_second": 0.0, "processed_rows_per_second": 0.0}


class ProgressListener(StreamingQueryListener):
    """Logs the lag and the rates of each query that reads a log of Faregate, after each batch.

    `on_progress` is called with each `StreamProgress`, in a thread of Spark's; also, with rates and lag of 0, while
    there is nothing to read.
    """

    def __init__(self, on_progress: Callable[[StreamProgress], None] | None = None) -> None:
        self._on_progress = on_progress
        self._latest: dict[str, StreamProgress] = {}
        """By the id of the run."""
        self._lock = threading.Lock()

    def latest(self) -> list[StreamProgress]:
        """Of each query that runs, the last."""
        with self._lock:
            return list(self._latest.values())

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Nothing is known of it yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        found = read_progress(event.progress)
        if found is None:
            return
        log.info(
            "query %s, batch %d: %d messages behind; %d rows, %.1f a second came in, %.1f a second were processed",
            *(found.query, found.batch, found.lag, found.rows),
            *(found.input_rows_per_second, found.processed_rows_per_second),
        )
        self._tell(str(event.progress.runId), found)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        with self._lock:
            last = self._latest.get(str(event.runId))
        if last is not None:
            self._tell(str(event.runId), last._replace(**_NOTHING, lags=dict.fromkeys(last.lags, 0)))

    def _tell(self, run: str, progress: StreamProgress) -> None:
        with self._lock:
            self._latest[run] = progress
        if self._on_progress is not None:
            try:
                self._on_progress(progress)
            except Exception:
                log.exception(
                    "on_progress failed for batch %d of query %s; the query goes on", progress.batch, progress.query
                )

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        with self._lock:
            self._latest.pop(str(event.runId), None)


def read_progress(progress: StreamingQueryProgress) -> StreamProgress | None:
    """None for a query that reads no log of ours."""
    lags: dict[str, int] = {}
    ours = False
    for source in progress.sources:
        end, latest = _offset(source.endOffset), _offset(source.latestOffset)
        if end is None:
            continue
        ours = True
        for name, number in (latest or end).items():
            if name != LOG_KEY and name in end:
                label = name if isinstance(end[LOG_KEY], dict) else end[LOG_KEY]
                lags[label] = max(lags.get(label, 0), number - end[name])
    if not ours:
        return None
    return StreamProgress(
        query=progress.name or str(progress.id),
        batch=progress.batchId,
        rows=progress.numInputRows,
        input_rows_per_second=_finite(progress.inputRowsPerSecond),
        processed_rows_per_second=_finite(progress.processedRowsPerSecond),
        lags=lags,
    )


def _offset(text: str | None) -> dict[str, Any] | None:
    """An offset of ours; those of other sources are of any form."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) and LOG_KEY in found else None


def _finite(rate: float | None) -> float:
    """Spark divides by the time since the last batch, and there is none before the first."""
    return 0.0 if rate is None or rate != rate or rate in (float("inf"), float("-inf")) else rate
