"""Lag and rates of streams, by the listener: what Spark tells of ours is read, and of others nothing is said."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryTerminatedEvent,
    StreamingQueryProgress,
)

import faregate as fg
from tests.spark.rig import journal

ID, RUN = "9d1f0a55-7f43-4c07-a5a2-e9cd9f3c1f5a", "7a0b3f5e-61e5-4a8b-9e52-94b3a8f5f0b1"


def event(*sources: dict[str, Any], **more: Any) -> QueryProgressEvent:
    """What Spark sends after a batch, with these (endOffset, latestOffset) of its sources."""
    told = {
        **{"id": ID, "runId": RUN, "name": "totals", "timestamp": "2026-11-15T09:00:00.000Z", "batchId": 3},
        **{"batchDuration": 5, "durationMs": {}, "eventTime": {}, "stateOperators": [], "observedMetrics": {}},
        **{"numInputRows": 10, "inputRowsPerSecond": 5.0, "processedRowsPerSecond": 20.0},
        "sources": [
            {
                **{"description": "a class", "startOffset": None, "numInputRows": 10, "metrics": {}},
                **{"inputRowsPerSecond": 5.0, "processedRowsPerSecond": 20.0, **source},
            }
            for source in sources
        ],
        "sink": {"description": "a sink", "numOutputRows": -1, "metrics": {}},
        **more,
    }
    return QueryProgressEvent(StreamingQueryProgress.fromJson(told))


def source(end: object, latest: object) -> dict[str, Any]:
    return {"endOffset": json.dumps(end), "latestOffset": json.dumps(latest)}


ONE = source({"0": 10, "log": "abc"}, {"0": 25, "log": "abc"})
SEVERAL = source(
    {"/data/a": 10, "/data/b": 5, "log": {"/data/a": "x", "/data/b": "y"}},
    {"/data/a": 10, "/data/b": 9, "/data/c": 7, "log": {"/data/a": "x", "/data/b": "y", "/data/c": "z"}},
)
KAFKA = source({"topic": {"0": 5}}, {"topic": {"0": 50}})


def test_the_lag_is_how_many_messages_are_behind_the_end_of_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[fg.spark.StreamProgress] = []
    listener = fg.spark.ProgressListener(seen.append)
    with caplog.at_level(logging.INFO, "faregate.spark"):
        listener.onQueryProgress(event(ONE, KAFKA))
        listener.onQueryProgress(event(SEVERAL, name=None))
    one, several = seen
    assert one == ("totals", 3, 10, 5.0, 20.0, {"abc": 15})
    assert one.lag == 15
    assert (several.query, several.lags, several.lag) == (ID, {"/data/a": 0, "/data/b": 4}, 4)
    assert listener.latest() == [several], "of one run the last"
    assert caplog.messages[0] == (
        "query totals, batch 3: 15 messages behind; 10 rows, 5.0 a second came in, 20.0 a second were processed"
    )


def test_of_two_sources_that_read_one_log_the_one_that_is_further_behind_counts() -> None:
    seen: list[fg.spark.StreamProgress] = []
    done = source({"0": 25, "log": "abc"}, {"0": 25, "log": "abc"})
    for sources in ((ONE, done), (done, ONE)):
        fg.spark.ProgressListener(seen.append).onQueryProgress(event(*sources))
    assert [each.lags for each in seen] == [{"abc": 15}, {"abc": 15}]


def test_nothing_is_said_of_queries_that_read_no_log() -> None:
    seen: list[fg.spark.StreamProgress] = []
    listener = fg.spark.ProgressListener(seen.append)
    for other in ({"endOffset": "17", "latestOffset": None}, {"endOffset": None, "latestOffset": None}, KAFKA):
        listener.onQueryProgress(event(other))
    listener.onQueryProgress(event({"endOffset": "not JSON", "latestOffset": ""}))
    assert seen == listener.latest() == []


def test_a_callback_that_fails_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(progress: fg.spark.StreamProgress) -> None:
        raise RuntimeError("no disk")

    fg.spark.ProgressListener(fail).onQueryProgress(event(ONE))
    [record] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.getMessage() == "on_progress failed for batch 3 of query totals; the query goes on"
    assert record.exc_info is not None


def test_a_query_with_nothing_to_read_has_no_lag_and_one_that_ended_is_forgotten() -> None:
    seen: list[fg.spark.StreamProgress] = []
    listener = fg.spark.ProgressListener(seen.append)
    idle = QueryIdleEvent.fromJson({"id": ID, "runId": RUN, "timestamp": "2026-11-15T09:00:10.000Z"})
    listener.onQueryIdle(idle)
    assert seen == [], "it may be a query that reads no log"
    listener.onQueryProgress(event(ONE, inputRowsPerSecond=float("nan")))
    assert seen[0].input_rows_per_second == 0, "before the first batch there is no time to divide by"
    listener.onQueryIdle(idle)
    assert seen[1:] == listener.latest() == [("totals", 3, 0, 0.0, 0.0, {"abc": 0})]
    ended = {"id": ID, "runId": RUN, "exception": None, "errorClassOnException": None}
    listener.onQueryTerminated(QueryTerminatedEvent.fromJson(ended))
    assert listener.latest() == []


@pytest.mark.services
def test_a_query_of_spark_tells_its_lag(spark: SparkSession, tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 25)
    seen: list[fg.spark.StreamProgress] = []
    done = threading.Event()

    def see(progress: fg.spark.StreamProgress) -> None:
        seen.append(progress)
        if progress.lag == 0:
            done.set()

    listener = fg.spark.ProgressListener(see)
    spark.streams.addListener(listener)
    try:
        query = (
            spark.readStream.format("faregate")
            .option("maxOffsetsPerTrigger", 10)
            .load(str(path))
            .writeStream.format("noop")
            .queryName("lagging")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)
        assert done.wait(120), "Spark tells listeners a moment later"
    finally:
        spark.streams.removeListener(listener)
    assert [(each.query, each.batch, each.rows, each.lag) for each in seen[:3]] == [
        ("lagging", 0, 10, 15),
        ("lagging", 1, 10, 5),
        ("lagging", 2, 5, 0),
    ]
