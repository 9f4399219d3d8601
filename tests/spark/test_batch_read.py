"""Batch reads: the rows are the journal's messages, the bounds are kept, and what is missing is said."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.sealing import seal_all
from faregate.errors import ConfigurationError, JournalCorrupt, OffsetGone
from faregate.spark.format import FaregateSource
from faregate.spark.options import InvalidOption, Options
from faregate.spark.schema import COLUMNS, check_schema, row_schema
from faregate.spark.source.batch_reader import BatchReader
from faregate.spark.source.ranges import OffsetRange
from tests.spark.rig import SCHEMA, append, empty_journal, journal, note, options, truncate

FULL = {
    "kind": "command",
    "recipients": ("billing", "audit"),
    "destination": "billing",
    "correlation_id": "c",
    "causation_id": "d",
    "depth": 3,
    "key": "k",
    "attempt_id": "a",
    "sent_at": 1794733200.25,
    "deliver_at": 1794733201.0,
    "expires_at": 1794733202.0,
    "redeliveries": 2,
    "replay": 1,
    "content_type": "application/msgpack",
    "content_encoding": "gzip",
    "key_id": "i",
    "algorithm": "g",
    "payload_ref": "p",
    "body_digest": b"0123456789abcdef",
    "traceparent": "00-1-2-01",
    "headers": {"tenant": "x", "user": "y"},
}


def read(chosen: Options, schema: StructType = SCHEMA) -> list[Any]:
    """What Spark's tasks would get, without Spark."""
    reader = BatchReader(chosen, schema)
    return [batch for span in reader.partitions() for batch in reader.read(span)]


def offsets(chosen: Options) -> list[int]:
    return [offset for batch in read(chosen) for offset in batch.column("offset").to_pylist()]


@pytest.mark.services
def test_every_column_reaches_spark_as_it_was_published(spark: SparkSession, tmp_path: Path) -> None:
    append(tmp_path / "j", [note(0, **FULL), note(1)])
    frame = spark.read.format("faregate").load(str(tmp_path / "j"))
    assert frame.schema == SCHEMA
    assert [field.name for field in frame.schema.fields if not field.nullable] == ["offset", "appended_at"]
    full, plain = (row.asDict() for row in frame.orderBy("offset").collect())
    for name, value in FULL.items():
        if name.endswith("_at"):
            assert full[name].timestamp() == value
        else:
            assert full[name] == (list(value) if name == "recipients" else value), name
    assert (full["offset"], full["publication_id"], full["body"]) == (0, "note-0", b'{"text":"0"}')
    assert (plain["kind"], plain["destination"], plain["recipients"], plain["headers"]) == ("event", None, [], {})


@pytest.mark.services
def test_columns_and_schema_prune_and_filters_choose(spark: SparkSession, tmp_path: Path) -> None:
    rows = [note(n, type="Kept" if n % 2 else "Other", source="shop" if n % 3 else "web") for n in range(30)]
    append(tmp_path / "j", rows)
    read = spark.read.format("faregate").option("types", "Kept").option("nodes", "web,nobody")
    frame = read.option("columns", "body,offset").option("minPartitions", "3").load(str(tmp_path / "j"))
    assert frame.columns == ["body", "offset"]
    assert frame.rdd.getNumPartitions() == 3
    assert sorted(row.offset for row in frame.collect()) == [n for n in range(30) if n % 2 and not n % 3]
    pruned = spark.read.format("faregate").schema("offset long, recipients array<string>").load(str(tmp_path / "j"))
    assert pruned.agg({"offset": "sum"}).first() == (sum(range(30)),)


@pytest.mark.services
def test_an_empty_journal_has_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    assert spark.read.format("faregate").load(str(empty_journal(tmp_path / "j"))).count() == 0


@pytest.mark.services
def test_errors_can_be_read_in_what_spark_raises(spark: SparkSession, tmp_path: Path) -> None:
    source = spark.read.format("faregate")
    with pytest.raises(AnalysisException, match="JournalNotFound: there is no journal in"):
        source.load(str(tmp_path / "nowhere"))
    journal(tmp_path / "j", 300)
    with pytest.raises(AnalysisException, match="InvalidOption: there is no option 'type' of faregate: did you mean"):
        spark.read.format("faregate").option("type", "Noted").load(str(tmp_path / "j"))
    earliest = truncate(tmp_path / "j")
    planned = spark.read.format("faregate").option("startingOffsets", "3").load(str(tmp_path / "j"))
    with pytest.raises(PySparkException, match=f"asks for offset 3 of the journal .* now begins at {earliest}"):
        planned.count()
    allowed = spark.read.format("faregate").option("startingOffsets", "3").option("failOnDataLoss", "false")
    assert allowed.load(str(tmp_path / "j")).count() == 300 - earliest


def test_batches_have_exactly_the_schema_that_spark_derives(tmp_path: Path) -> None:
    journal(tmp_path / "j", 25)
    for columns in ((), ("headers", "recipients", "sent_at"), ("offset",)):
        schema = row_schema(columns)
        for batch in read(options(tmp_path / "j"), schema):
            assert batch.schema.equals(to_arrow_schema(schema, timezone="UTC"), check_metadata=True)
    nullable = row_schema(("offset",)).jsonValue()
    nullable["fields"][0]["nullable"] = True
    [batch] = read(options(tmp_path / "j"), StructType.fromJson(nullable))
    assert batch.schema.field("offset").nullable


def seal(path: Path) -> None:
    """Roll what is written to, and have it in columns."""
    layout, disk = Layout(path), RealDisk()
    log = Log(layout, disk)
    log.roll()
    log.close()
    Log(layout, disk).close()
    assert seal_all(layout, disk)


def test_small_frames_are_put_together_and_large_ones_are_not_copied(tmp_path: Path) -> None:
    journal(tmp_path / "small", 500, per_frame=1)
    assert [batch.num_rows for batch in read(options(tmp_path / "small"))] == [500]
    journal(tmp_path / "large", 20_000, per_frame=10_000)
    seal(tmp_path / "large")
    before = pa.total_allocated_bytes()
    found = read(options(tmp_path / "large"))
    assert [batch.num_rows for batch in found] == [10_000, 10_000]
    # What is not copied lies in the mapped file, and not in Arrow's memory.
    assert pa.total_allocated_bytes() - before < sum(batch.nbytes for batch in found) / 100


def test_bounds_are_offsets_times_or_words(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 20)
    later = JournalReader(path).high_water().time / 1_000_000 + 0.000_001
    append(path, [note(n) for n in range(20, 30)])
    assert offsets(options(path)) == list(range(30))
    assert offsets(options(path, startingOffsets=25)) == list(range(25, 30))
    assert offsets(options(path, startingOffsets='{"0": 25}', endingOffsets='{"0": 27}')) == [25, 26]
    assert offsets(options(path, startingOffsets=f"@{later:.6f}")) == list(range(20, 30))
    assert offsets(options(path, endingOffsets=f"@{later:.6f}")) == list(range(20))
    assert offsets(options(path, startingOffsets="latest")) == []
    assert offsets(options(path, startingOffsets="2999-01-01T00:00:00Z")) == []
    assert offsets(options(path, startingOffsets=30, endingOffsets=30)) == []
    assert sorted(offsets(options(path, minPartitions=7))) == list(range(30))


def test_bounds_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 20)
    with pytest.raises(ConfigurationError, match="startingOffsets 9 lies behind endingOffsets 4"):
        offsets(options(path, startingOffsets=9, endingOffsets=4))
    with pytest.raises(ConfigurationError, match=r"must name every partition of the log once \(0\); it names 0, 1"):
        offsets(options(path, startingOffsets='{"0": 1, "1": 2}'))
    with pytest.raises(ConfigurationError, match="holds offsets of the log other"):
        offsets(options(path, startingOffsets='{"0": 1, "log": "other"}'))
    with pytest.raises(OffsetGone, match=r"startingOffsets asks for offset 99 .* ends at 20"):
        offsets(options(path, startingOffsets=99))
    with pytest.raises(OffsetGone, match=r"endingOffsets asks for offset 99 .* ends at 20"):
        offsets(options(path, endingOffsets=99))
    assert offsets(options(path, startingOffsets=18, endingOffsets=99, failOnDataLoss="false")) == [18, 19]


def test_a_planned_range_that_retention_removes_fails_or_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = journal(tmp_path / "j", 300)
    strict, lenient = (BatchReader(options(path, failOnDataLoss=flag), SCHEMA) for flag in ("true", "false"))
    [span] = strict.partitions()
    earliest = truncate(path)
    with pytest.raises(OffsetGone, match=f"asks for offset 0 .* begins at {earliest}"):
        list(strict.read(span))
    rows = [offset for batch in lenient.read(span) for offset in batch.column("offset").to_pylist()]
    assert rows == list(range(earliest, 300))
    assert f"the messages from 0 to {earliest - 1} were removed" in caplog.text


def test_a_planned_range_that_a_restored_log_no_longer_has_fails(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 20)
    beyond = OffsetRange("0", 15, 30)
    with pytest.raises(OffsetGone, match=r"a planned read asks for offset 30 .* which ends at 20"):
        list(BatchReader(options(path), SCHEMA).read(beyond))
    lenient = BatchReader(options(path, failOnDataLoss="false"), SCHEMA)
    assert [batch.num_rows for batch in lenient.read(beyond)] == [5]
    assert list(lenient.read(OffsetRange("0", 25, 30))) == []


def test_an_option_without_effect_is_refused(tmp_path: Path) -> None:
    path = str(journal(tmp_path / "j", 1))
    with pytest.raises(InvalidOption, match="option source is for writing; to read what a node published, use nodes"):
        FaregateSource({"path": path, "source": "shop"}).reader(SCHEMA)
    with pytest.raises(InvalidOption, match="option types is for reading and does nothing in a write"):
        FaregateSource({"path": path, "types": "A"}).writer(SCHEMA, False)
    with pytest.raises(InvalidOption, match="option columns and a schema are two ways to name columns"):
        FaregateSource({"path": path, "columns": "body"}).reader(row_schema(("offset",)))
    FaregateSource({"path": path, "columns": "body"}).streamReader(row_schema(("body",)))


def test_a_journal_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 1)
    meta = Layout(path).meta
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "version": 99}))
    with pytest.raises(ConfigurationError, match=r"is written in version 99 of the format .* update Faregate"):
        read(options(path))


def test_damaged_bytes_are_never_rows(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 10)
    segment = Layout(path).segment(0)
    data = bytearray(segment.read_bytes())
    at = data.index(b'"text":"5"')
    data[at] ^= 1
    segment.write_bytes(data)
    with pytest.raises(JournalCorrupt, match="is damaged at byte"):
        read(options(path))


def test_a_schema_of_other_columns_or_types_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="names 'payload', which is no column"):
        check_schema(StructType().add("payload", "binary"))
    with pytest.raises(ConfigurationError, match="the schema says offset string; it is bigint"):
        check_schema(StructType().add("offset", "string"))
    check_schema(row_schema(tuple(COLUMNS)))
