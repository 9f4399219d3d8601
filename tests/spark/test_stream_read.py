"""Streaming reads: each message in one batch, limits, available-now, restarts, and messages that are gone."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows

from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.sealing import seal_all
from faregate.errors import ConfigurationError, OffsetGone
from faregate.spark.options import InvalidOption
from faregate.spark.source.stream_reader import StreamReader
from tests.spark.rig import SCHEMA, SMALL_SEGMENT, append, empty_journal, journal, note, options, truncate

WAIT = 60


def reader(path: Path, **given: object) -> StreamReader:
    return StreamReader(options(path, **given), SCHEMA)


def drain(stream: StreamReader, start: dict[str, Any], limit: ReadLimit | None = None) -> list[int]:
    """The ends of the batches until there is nothing more."""
    ends = []
    while (end := stream.latestOffset(start, limit or stream.getDefaultReadLimit())) != start:
        ends.append(end["0"])
        start = end
    return ends


# --- limits and ends, without Spark -----------------------------------------------------------------------


def test_a_stream_starts_where_it_is_told(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 20)
    assert reader(path).initialOffset()["0"] == 0
    assert reader(path, startingOffsets="latest").initialOffset()["0"] == 20
    assert reader(path, startingOffsets=7).initialOffset()["0"] == 7
    assert reader(path, startingOffsets="2999-01-01T00:00:00Z").initialOffset()["0"] == 20
    assert reader(empty_journal(tmp_path / "empty")).initialOffset()["0"] == 0


def test_limits_bound_each_batch_and_leave_nothing(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 20)  # bodies of 12 bytes, from 10 on of 13
    start = reader(path).initialOffset()
    assert drain(reader(path), start) == [20]
    assert drain(reader(path, maxMessagesPerTrigger=8), start) == [8, 16, 20]
    assert drain(reader(path, maxBytesPerTrigger=40), start) == [3, 6, 9, 12, 15, 18, 20]
    assert drain(reader(path, maxBytesPerTrigger=1), start) == list(range(1, 21))
    assert drain(reader(path, maxMessagesPerTrigger=8, maxBytesPerTrigger=60), start) == [5, 10, 14, 18, 20]
    assert drain(reader(path, maxMessagesPerTrigger=2, maxBytesPerTrigger=60), start) == list(range(2, 21, 2))


@pytest.mark.parametrize("sealed", [True, False])
def test_what_handlers_read_in_one_batch_is_bounded_by_its_size_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """Small messages, large ones, small ones: a batch that is too large for the journal would be planned for ever."""
    path = tmp_path / "j"
    append(path, [note(number, body=b"x" * (2000 if 400 <= number < 600 else 20)) for number in range(1000)])
    if sealed:
        seal_all(Layout(path), RealDisk())
    log, end = JournalReader(path), JournalReader(path).latest()
    sizes = [sum(len(body) for body in batch.column("payload").to_pylist()) for batch in log.batches()]
    assert sum(each.stored or 0 for each in log.stretches(0, end)) > sum(sizes) > 300_000
    budget = 100_000
    monkeypatch.setattr("faregate.spark.source.stream_reader.MOST_STORED", budget)
    ranges = {"rows": "ranges", "maxMessagesPerTrigger": 1000}
    start = reader(path, **ranges).initialOffset()
    ends = drain(reader(path, **ranges), start)
    assert ends[-1] == 1000 and len(ends) < 20
    for first, behind in pairwise([0, *ends]):
        bodies = sum(2000 if 400 <= number < 600 else 20 for number in range(first, behind))
        assert bodies < budget + SMALL_SEGMENT, f"{first} to {behind} have {bodies} bytes"
    assert drain(reader(path, maxMessagesPerTrigger=1000), start) == [1000], (
        "rows are for Spark: they have no such bound"
    )
    assert drain(reader(path, rows="ranges"), start) == [1000], "who asks for all at once gets it: Spark's trigger once"
    monkeypatch.setattr("faregate.spark.source.stream_reader.MOST_STORED", 1)
    assert drain(reader(path, **ranges), {**start, "0": 990}) == [*range(991, 1001)]


def test_the_limit_that_spark_names_is_the_one_that_counts(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 20)
    stream = reader(path, maxMessagesPerTrigger=5)
    start = stream.initialOffset()
    assert stream.getDefaultReadLimit() == ReadMaxRows(5)
    assert reader(path, maxBytesPerTrigger="1K").getDefaultReadLimit() == ReadMaxBytes(1024)
    assert reader(path).getDefaultReadLimit() == ReadAllAvailable()
    assert stream.latestOffset(start, ReadAllAvailable())["0"] == 20
    assert stream.latestOffset(start, ReadMinRows(20))["0"] == 20
    assert stream.latestOffset(start, ReadMinRows(21)) == start


def test_available_now_ends_where_the_log_ended_when_it_began(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 20)
    stream = reader(path, maxMessagesPerTrigger=8)
    stream.prepareForTriggerAvailableNow()
    append(path, [note(n) for n in range(20, 40)])
    assert drain(stream, stream.initialOffset()) == [8, 16, 20]
    assert drain(stream, stream.initialOffset(), ReadMinRows(100)) == [20]
    latest = stream.reportLatestOffset()
    assert latest is not None and latest["0"] == 40
    beyond = {**latest, "0": 30}  # a batch of an earlier run had gone further
    assert stream.latestOffset(beyond, ReadAllAvailable()) == beyond


def test_partitions_depend_on_nothing_but_the_bounds(tmp_path: Path) -> None:
    stream = reader(tmp_path / "there is no journal here", minPartitions=2)
    start, end = {"0": 10, "log": "x"}, {"0": 20, "log": "x"}
    assert [(span.start, span.end) for span in stream.partitions(start, end)] == [(10, 15), (15, 20)]  # type: ignore[attr-defined]
    assert stream.partitions(end, end) == []


def test_messages_that_are_gone_stop_the_stream_or_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = journal(tmp_path / "j", 300)
    start = reader(path).initialOffset()
    earliest = truncate(path)
    with pytest.raises(OffsetGone, match=f"the checkpoint asks for offset 0 .* begins at {earliest}"):
        reader(path).latestOffset(start, ReadAllAvailable())
    lenient = reader(path, failOnDataLoss="false", maxMessagesPerTrigger=10)
    assert lenient.latestOffset(start, ReadMaxRows(10))["0"] == earliest + 10
    assert f"the messages from 0 to {earliest - 1} were removed" in caplog.text
    with pytest.raises(OffsetGone, match=f"startingOffsets asks for offset 2 .* begins at {earliest}"):
        reader(path, startingOffsets=2).initialOffset()


def test_a_log_that_ends_before_the_checkpoint_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = journal(tmp_path / "j", 20)
    ahead = {**reader(path).initialOffset(), "0": 25}
    with pytest.raises(OffsetGone, match=r"the checkpoint asks for offset 25 .* which ends at 20: it was restored"):
        reader(path).latestOffset(ahead, ReadAllAvailable())
    lenient = reader(path, failOnDataLoss="false")
    assert [lenient.latestOffset(ahead, ReadAllAvailable()) for _ in range(3)] == [ahead] * 3
    assert len(caplog.records) == 1, "Spark asks over and over; it is logged once"


def test_a_checkpoint_of_another_journal_is_refused(tmp_path: Path) -> None:
    start = reader(journal(tmp_path / "one", 5)).initialOffset()
    with pytest.raises(ConfigurationError, match=r"the checkpoint belongs to the log .* Use a new checkpointLocation"):
        reader(journal(tmp_path / "two", 9)).latestOffset(start, ReadAllAvailable())


def test_a_stream_has_no_ending_offsets(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"option endingOffsets is for batch reads: .*availableNow"):
        reader(tmp_path, endingOffsets=5)


def test_only_a_named_reader_holds_retention_back(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 20)
    nameless = reader(path)
    nameless.commit(nameless.latestOffset(nameless.initialOffset(), ReadAllAvailable()))
    assert JournalReader(path).reader_offsets() == []
    named = reader(path, readerName="warehouse", startingOffsets=5)
    start = named.initialOffset()
    assert [(kept.name, kept.offset) for kept in JournalReader(path).reader_offsets()] == [("warehouse", 5)]
    named.commit(named.latestOffset(start, ReadMaxRows(5)))
    assert [(kept.name, kept.offset) for kept in JournalReader(path).reader_offsets()] == [("warehouse", 10)]


# --- queries ----------------------------------------------------------------------------------------------

Start = Callable[..., StreamingQuery]


@pytest.fixture
def seen() -> list[tuple[int, list[int]]]:
    """(batch id, offsets) of every batch that a query handed over."""
    return []


@pytest.fixture
def start(spark: SparkSession, tmp_path: Path, seen: list[tuple[int, list[int]]]) -> Start:
    """Start a query on the journal `j` with one checkpoint; the same again is a restart."""

    def note_offsets(frame: DataFrame, batch: int) -> None:
        seen.append((batch, sorted(row.offset for row in frame.select("offset").collect())))

    def begin(*, now: bool = True, **given: object) -> StreamingQuery:
        stream = spark.readStream.format("faregate").options(**{name: str(value) for name, value in given.items()})
        writer = stream.load(str(tmp_path / "j")).writeStream.foreachBatch(note_offsets)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        return (writer.trigger(availableNow=True) if now else writer.trigger(processingTime="0 seconds")).start()

    return begin


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(WAIT), "the query did not end"


@pytest.mark.services
def test_available_now_repeated_while_messages_arrive_reads_each_once(
    start: Start, seen: list[tuple[int, list[int]]], tmp_path: Path
) -> None:
    path = journal(tmp_path / "j", 25)
    query = start(maxMessagesPerTrigger=10)
    finish(query)
    assert [offsets for _, offsets in seen] == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert query.lastProgress is not None
    assert json.loads(query.lastProgress.sources[0].endOffset) == {"0": 25, "log": JournalReader(path).meta.id}
    append(path, [note(n) for n in range(25, 32)])
    finish(start())
    rounds = len(seen)
    finish(start())  # nothing new: a fixpoint
    assert len(seen) == rounds
    assert [offset for _, offsets in seen for offset in offsets] == list(range(32))


@pytest.mark.services
def test_a_batch_that_was_not_committed_is_read_again_the_same_after_a_restart(
    start: Start, seen: list[tuple[int, list[int]]], tmp_path: Path
) -> None:
    path = journal(tmp_path / "j", 20)
    finish(start())
    append(path, [note(n) for n in range(20, 30)])
    (tmp_path / "checkpoint/commits/0").unlink()
    (tmp_path / "checkpoint/commits/.0.crc").unlink(missing_ok=True)
    finish(start(minPartitions=3))
    assert seen == [(0, list(range(20))), (0, list(range(20))), (1, list(range(20, 30)))]
    # ... also when retention has taken it in between: then it fails, and says which offsets.
    (tmp_path / "checkpoint/commits/1").unlink()
    (tmp_path / "checkpoint/commits/.1.crc").unlink(missing_ok=True)
    append(path, [note(n) for n in range(30, 400)])
    earliest = truncate(path)
    assert earliest > 20
    with pytest.raises(PySparkException, match=f"asks for offset 20 of the journal .* begins at {earliest}"):
        finish(start())


@pytest.mark.services
def test_a_stream_on_an_empty_journal_waits_and_takes_what_comes(
    start: Start, seen: list[tuple[int, list[int]]], tmp_path: Path
) -> None:
    path = empty_journal(tmp_path / "j")
    query = start(now=False, readerName="waiting")
    try:
        query.processAllAvailable()
        assert [offsets for _, offsets in seen] in ([], [[]])  # Spark makes a first batch of nothing
        for first in (0, 5):
            append(path, [note(n) for n in range(first, first + 5)])
            query.processAllAvailable()
    finally:
        query.stop()
    assert [offset for _, offsets in seen for offset in offsets] == list(range(10))
    # It is told of a batch when the next one is made, so it may be one behind, never ahead.
    [kept] = JournalReader(path).reader_offsets()
    assert kept.name == "waiting" and kept.offset in (0, 5)


@pytest.mark.services
def test_a_journal_made_anew_under_a_running_checkpoint_is_noticed(start: Start, tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 5)
    finish(start())
    shutil.rmtree(path)
    journal(path, 50)
    with pytest.raises(PySparkException, match="ConfigurationError: the checkpoint belongs to the log"):
        finish(start())


def test_a_query_with_ending_offsets_fails_before_it_reads(spark: SparkSession, tmp_path: Path) -> None:
    """Spark tells the source that it is a stream only when the query has started."""
    path = journal(tmp_path / "j", 5)
    stream = spark.readStream.format("faregate").option("endingOffsets", 5).load(str(path))
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    with pytest.raises(PySparkException, match=r"option endingOffsets is for batch reads: .*availableNow"):
        query.awaitTermination()
    assert query.lastProgress is None
