"""Writing with real Spark: batch writes, streams through the bus and back, replays, new checkpoints, two writers."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from tests.spark.rig import append, empty_journal, journal, note, run_bus, spooled

pytestmark = pytest.mark.services
WAIT = 60


def notes(spark: SparkSession, *texts: str) -> DataFrame:
    rows = [("Noted", f'{{"text":"{text}"}}') for text in texts]
    return spark.createDataFrame(rows, "type string, body string")


def test_a_batch_write_reaches_the_handlers(spark: SparkSession, tmp_path: Path) -> None:
    path = empty_journal(tmp_path / "j")
    run_bus(path)  # so that the journal knows who handles the command
    events = notes(spark, "1", "2", "3", "4").repartition(3)
    events.write.format("faregate").option("source", "author").mode("append").save(str(path))
    commands = notes(spark, "5").selectExpr(
        "'Do' type", "body", "'author' source", "'reader' destination", "map('tenant', 't') headers", "now() sent_at"
    )
    commands.write.format("faregate").mode("append").save(str(path))
    assert sorted(len(batch) for batch in spooled(path)) == [1, 4]
    assert sorted(run_bus(path)) == ["1", "2", "3", "4", "5"]
    assert not list((path / "staging").iterdir())


def test_a_write_that_cannot_be_is_refused_with_the_reason(spark: SparkSession, tmp_path: Path) -> None:
    path = empty_journal(tmp_path / "j")
    write = notes(spark, "1").write.format("faregate").mode("append")
    with pytest.raises(PySparkException, match="UnfitColumns: who publishes"):
        write.save(str(path))
    with pytest.raises(PySparkException, match="JournalNotFound: there is no journal in"):
        write.option("source", "author").save(str(tmp_path / "nowhere"))
    assert spooled(path) == []


def test_a_task_that_is_tried_again_does_not_double(spark: SparkSession, tmp_path: Path) -> None:
    path = empty_journal(tmp_path / "j")

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            raise RuntimeError("the first attempt dies behind its last row")

    frame = notes(spark, "1", "2", "3").coalesce(1).mapInArrow(fail_once, "type string, body string")
    frame.write.format("faregate").option("source", "author").mode("append").save(str(path))
    assert sorted(run_bus(path)) == ["1", "2", "3"]
    assert not list((path / "staging").iterdir())


def copy(spark: SparkSession, to: Path, checkpoint: Path, source: Path) -> StreamingQuery:
    """Publish what is in one journal again, on the bus of another."""
    frame = spark.readStream.format("faregate").option("columns", "type,source,body").load(str(source))
    return (
        frame.writeStream.format("faregate")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(to))
    )


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(WAIT), "the query did not end"


def forget_commit(checkpoint: Path, batch: int) -> None:
    """As if the driver had died before Spark noted that the batch was done."""
    (checkpoint / f"commits/{batch}").unlink()
    (checkpoint / f"commits/.{batch}.crc").unlink(missing_ok=True)


def test_a_replayed_batch_is_written_once_and_a_new_checkpoint_writes_anew(spark: SparkSession, tmp_path: Path) -> None:
    source, path, checkpoint = journal(tmp_path / "from", 20), empty_journal(tmp_path / "to"), tmp_path / "checkpoint"
    finish(copy(spark, path, checkpoint, source))
    assert sorted(map(int, run_bus(path))) == list(range(20))
    forget_commit(checkpoint, 0)
    append(source, [note(n) for n in range(20, 25)])
    finish(copy(spark, path, checkpoint, source))
    assert sorted(map(int, run_bus(path))) == list(range(20, 25))
    # The driver died inside the sink's commit, behind the spool file: its own record is missing too.
    forget_commit(checkpoint, 1)
    shutil.rmtree(path / "sinks")
    finish(copy(spark, path, checkpoint, source))
    assert run_bus(path) == []
    finish(copy(spark, path, tmp_path / "another checkpoint", source))
    assert sorted(map(int, run_bus(path))) == list(range(25))


def test_two_queries_write_to_one_journal(spark: SparkSession, tmp_path: Path) -> None:
    path = empty_journal(tmp_path / "to")
    sources = [tmp_path / "one", tmp_path / "two"]
    for first, source in enumerate(sources):
        append(source, [note(2 * n + first) for n in range(10)])
    queries = [copy(spark, path, tmp_path / f"checkpoint-{source.name}", source) for source in sources]
    for query in queries:
        finish(query)
    assert len(spooled(path)) == 2
    assert sorted(map(int, run_bus(path))) == list(range(20))
