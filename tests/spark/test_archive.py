"""The option `archive`: a read over both sides is the read of the journal before retention, batch and stream."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as pushed

from faregate.broker.journal.archive import archive_journal
from faregate.broker.journal.reader import JournalReader
from faregate.errors import OffsetGone
from faregate.spark.options import InvalidOption, Options, parse_options
from faregate.spark.source.batch_reader import BatchReader
from faregate.spark.source.stream_reader import StreamReader
from tests.archive.rig import BEGIN, DAY, TYPES, Written, full_segments
from tests.archive.s3_server import s3_server
from tests.spark import pushdown_rig
from tests.spark.rig import SCHEMA, options


def rows(reader: Any, spans: list[Any]) -> Any:
    """What Spark's tasks would get, without Spark."""
    return pa.Table.from_batches([batch for span in spans for batch in reader.read(span)]).combine_chunks()


def batch(chosen: Options) -> Any:
    reader = BatchReader(chosen, SCHEMA)
    return rows(reader, reader.partitions())


def triggers(chosen: Options) -> Iterator[Any]:
    """The batches of a stream until it has come to the end."""
    reader = StreamReader(chosen, SCHEMA)
    start = reader.initialOffset()
    while True:
        end = reader.latestOffset(start, reader.getDefaultReadLimit())
        if end == start:
            return
        yield rows(reader, reader.partitions(start, end))
        start = end


@pytest.fixture
def archived(tmp_path: Path) -> tuple[Written, str]:
    written, target = full_segments(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    archive_journal(written.root, target)
    return written, target


CHOICES: list[dict[str, object]] = [
    {},
    {"minPartitions": 7},
    {"startingOffsets": 5, "endingOffsets": 50},
    {"startingOffsets": f"@{BEGIN + DAY}"},
    {"startingOffsets": f"@{BEGIN + 1.5 * DAY}", "endingOffsets": f"@{BEGIN + 3 * DAY}"},
    {"types": TYPES[1]},
    {"types": "OrderPlaced", "nodes": "web", "minPartitions": 3},
]


def test_batches_over_both_sides_are_those_before_retention(archived: tuple[Written, str]) -> None:
    written, target = archived
    before = [batch(options(written.root, **choice)) for choice in CHOICES]
    assert len(written.expire()) == 3
    after = [batch(options(written.root, archive=target, **choice)) for choice in CHOICES]
    for choice, expected, found in zip(CHOICES, before, after, strict=True):
        assert found.equals(expected), choice
        assert found.num_rows, choice


def test_streams_over_both_sides_are_those_before_retention(archived: tuple[Written, str]) -> None:
    written, target = archived
    limits: list[dict[str, object]] = [{}, {"maxMessagesPerTrigger": 9}, {"maxBytesPerTrigger": 150}]
    before = [list(triggers(options(written.root, **limit))) for limit in limits]
    written.expire()
    after = [list(triggers(options(written.root, archive=target, **limit))) for limit in limits]
    assert after == before
    assert [len(found) for found in after] == [1, 8, 10]


def test_a_stream_goes_on_although_retention_was_faster(archived: tuple[Written, str]) -> None:
    """The checkpoint of a query that read the journal alone is below what there still is."""
    written, target = archived
    start = {"0": 10, "log": JournalReader(written.root).meta.id}
    written.expire()
    alone, both = (StreamReader(options(written.root, **more), SCHEMA) for more in ({}, {"archive": target}))
    with pytest.raises(OffsetGone, match="the checkpoint asks for offset 10"):
        alone.latestOffset(start, alone.getDefaultReadLimit())
    end = both.latestOffset(start, both.getDefaultReadLimit())
    assert rows(both, both.partitions(start, end)).column("offset")[0].as_py() == 11


def test_a_gap_between_the_sides_is_data_loss(archived: tuple[Written, str], caplog: pytest.LogCaptureFixture) -> None:
    written, target = archived
    [reader] = JournalReader(written.root).reader_offsets()
    JournalReader(written.root).forget_reader(reader.name)
    written.append(range(64, 70), roll=True)
    written.expire()
    with pytest.raises(OffsetGone, match="the messages from 63 to 66 are missing"):
        batch(options(written.root, archive=target))
    with pytest.raises(OffsetGone, match="the messages from 63 to 66 are missing"):
        list(triggers(options(written.root, archive=target)))
    assert batch(options(written.root, archive=target, endingOffsets=63)).num_rows == 60
    assert batch(options(written.root, archive=target, startingOffsets=67)).num_rows == 6
    allowed = batch(options(written.root, archive=target, failOnDataLoss="false"))
    assert allowed.num_rows == 66
    assert "failOnDataLoss=false: the messages from 63 to 66 are missing" in caplog.text


FILTERS: list[list[Any]] = [
    [pushed.GreaterThan(("appended_at",), datetime.fromtimestamp(BEGIN + DAY, UTC))],
    [pushed.EqualTo(("type",), TYPES[1])],
    [pushed.GreaterThanOrEqual(("offset",), 21), pushed.EqualTo(("source",), "web")],
]


@pytest.mark.parametrize("filters", FILTERS)
def test_segments_of_the_archive_in_which_nothing_fits_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: list[Any]
) -> None:
    """The files of one of them are not even there."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    written, target = Written(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    written.append(range(21))
    written.now += 2 * DAY
    written.append(range(21, 40), TYPES[1], roll=True)
    written.append([40], roll=True)
    archive_journal(written.root, target)
    expected = [row for row in pushdown_rig.full_scan(written.root) if pushdown_rig.all_hold(filters, row)]
    written.expire()
    for file in (tmp_path / "a").glob("day=*/type=*/*-00000000000000000000.parquet"):
        file.unlink()
    reader = pushdown_rig.pushed_reader(written.root, pushdown_rig.new_load(), archive=target)
    assert reader.pushFilters(filters) == filters
    found = [row for row in pushdown_rig.rows_of(reader) if pushdown_rig.all_hold(filters, row)]
    assert found == expected and len(found) >= 10
    with pytest.raises(OffsetGone, match="the messages 0 to 20 are not in the archive"):
        pushdown_rig.rows_of(pushdown_rig.pushed_reader(written.root, pushdown_rig.new_load(), archive=target))


def test_the_option_names_a_place_and_shows_no_secret() -> None:
    found = parse_options({"path": "/j", "archive": "file:///data/my%20archive"})
    assert found.archive == "file:///data/my%20archive"
    assert parse_options({"path": "/j", "archive": "s3://bucket/prefix"}).archive == "s3://bucket/prefix"
    with pytest.raises(InvalidOption, match=r"option archive: '/data/a' is no place .*: write .* file:/data/a"):
        parse_options({"path": "/j", "archive": "/data/a"})
    with pytest.raises(InvalidOption) as refused:
        parse_options({"path": "/j", "archive": "s3a://me:secret@bucket/prefix"})
    assert "s3a://bucket/prefix" in str(refused.value)
    assert "secret" not in str(refused.value)


# --- in Spark -----------------------------------------------------------------------------------------------------


def load(spark: SparkSession, written: Written, **more: str) -> DataFrame:
    return spark.read.format("faregate").options(minPartitions="3", **more).load(str(written.root))


@pytest.mark.services
def test_spark_reads_archive_and_journal_as_one_log(
    spark: SparkSession, archived: tuple[Written, str], tmp_path: Path
) -> None:
    written, target = archived
    before = load(spark, written).orderBy("offset").collect()
    assert len(before) == 64
    written.expire()
    assert load(spark, written).count() == 4
    frame = load(spark, written, archive=target)
    assert frame.schema == SCHEMA
    assert frame.orderBy("offset").collect() == before
    stream = spark.readStream.format("faregate").option("archive", target).option("maxMessagesPerTrigger", "25")
    query = (
        stream.load(str(written.root))
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    query.awaitTermination()
    assert spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect() == before


@pytest.mark.services
def test_spark_reads_an_archive_in_an_object_store_and_the_journal_as_one_log(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The driver plans by the manifests, and workers, which are other processes, fetch the files."""
    written = full_segments(tmp_path / "j")
    before = load(spark, written).orderBy("offset").collect()
    assert len(before) == 64
    with s3_server() as server:
        target = server.uri("bucket/logs/shop")
        archive_journal(written.root, target)
        assert len(written.expire()) == 3
        assert load(spark, written, archive=target).orderBy("offset").collect() == before
        out, checkpoint = str(tmp_path / "out"), str(tmp_path / "checkpoint")
        stream = spark.readStream.format("faregate").options(archive=target, maxMessagesPerTrigger=25)
        sink = stream.load(str(written.root)).writeStream.format("parquet").option("checkpointLocation", checkpoint)
        sink.trigger(availableNow=True).start(out).awaitTermination()
        assert spark.read.parquet(out).orderBy("offset").collect() == before
        server.refused = True
        with pytest.raises(PySparkException, match="the archive s3://bucket/logs/shop cannot be used") as refused:
            load(spark, written, archive=target).count()
        assert "sec%2Fret" not in str(refused.value) and "sec/ret" not in str(refused.value)


@pytest.mark.services
def test_spark_reads_the_files_alone_by_day_and_type(
    spark: SparkSession, archived: tuple[Written, str], tmp_path: Path
) -> None:
    _, target = archived
    found = spark.read.parquet(target).groupBy("day", "type").count().orderBy("day", "type").collect()
    assert [(str(row["day"]), row["type"], row["count"]) for row in found] == [
        ("2026-11-17", "OrderCancelled", 5),
        ("2026-11-17", "OrderPlaced", 5),
        ("2026-11-18", "OrderCancelled", 5),
        ("2026-11-18", "OrderPlaced", 15),
        ("2026-11-19", "OrderCancelled", 5),
        ("2026-11-19", "OrderPlaced", 15),
        ("2026-11-20", "OrderPlaced", 10),
    ]


@pytest.mark.services
def test_spark_says_what_is_wrong_with_an_archive(
    spark: SparkSession, archived: tuple[Written, str], tmp_path: Path
) -> None:
    written, target = archived
    with pytest.raises(AnalysisException, match="NotAnArchive: there is no archive in"):
        load(spark, written, archive=f"file:{tmp_path / 'nowhere'}")
    other = full_segments(tmp_path / "other")
    with pytest.raises(AnalysisException, match=r"NotAnArchive: .* is the archive of the log"):
        load(spark, other, archive=target)
    [reader] = JournalReader(written.root).reader_offsets()
    JournalReader(written.root).forget_reader(reader.name)
    written.append(range(64, 70), roll=True)
    written.expire()
    with pytest.raises(PySparkException, match="the messages from 63 to 66 are missing"):
        load(spark, written, archive=target).count()
    assert load(spark, written, archive=target, failOnDataLoss="false").count() == 66
