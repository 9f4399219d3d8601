"""Tables and views in SQL: what Spark adds of its own passes, what is misspelt does not, and nothing is deleted."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from faregate.errors import InvalidOption
from faregate.spark.format import FaregateSource
from faregate.spark.schema import COLUMNS, row_schema
from faregate.spark.source.batch_reader import BatchReader
from tests.spark.rig import append, journal, note, run_bus


def created(path: object, **given: str) -> dict[str, str]:
    """What Spark 4.3 sends when a table is created."""
    options = {"path": f"file:{path}", "location": f"file:{path}", "owner": "me", "provider": "faregate", **given}
    return {**options, **{f"option.{name}": value for name, value in given.items()}}


# --- without Spark ----------------------------------------------------------------------------------------


def test_the_options_of_a_table_travel_in_its_schema(tmp_path: Path) -> None:
    path = journal(tmp_path / "my 100%20 journal", 20)
    schema = FaregateSource(created(path, startingoffsets="5", columns="offset,type")).schema()
    assert schema.fieldNames() == ["offset", "type"]
    reader = FaregateSource({}).reader(schema)
    assert isinstance(reader, BatchReader)
    assert [(span.start, span.end) for span in reader.partitions()] == [(5, 20)]  # type: ignore[attr-defined]
    later = FaregateSource({"startingoffsets": "15"}).reader(schema)
    assert [(span.start, span.end) for span in later.partitions()] == [(15, 20)]  # type: ignore[attr-defined]
    assert FaregateSource({"path": str(path)}).schema() == row_schema(), "a plain read has nothing of that"


def test_an_option_of_a_query_replaces_that_of_its_table_by_whichever_name(tmp_path: Path) -> None:
    schema = FaregateSource(
        created(journal(tmp_path / "j", 20), startingoffsets="5", maxoffsetspertrigger="3")
    ).schema()
    batch = FaregateSource({"startingtimestamp": "0"}).reader(schema)
    assert [(span.start, span.end) for span in batch.partitions()] == [(0, 20)]  # type: ignore[attr-defined]
    stream = FaregateSource({"maxmessagespertrigger": "7"}).streamReader(schema)
    assert stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())["0"] == 12
    with pytest.raises(InvalidOption, match="options startingOffsets and startingTimestamp mean the same"):
        FaregateSource({"startingoffsets": "1", "startingtimestamp": "0"}).reader(schema)


def test_a_table_of_several_journals_keeps_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        journal(tmp_path / name, 3)
    monkeypatch.chdir(tmp_path)
    schema = FaregateSource(
        {"option.paths": "a,b", "paths": "a,b", "owner": "me", "provider": "faregate", "mine": "a property"}
    ).schema()
    monkeypatch.chdir("/")
    assert schema.fieldNames() == ["journal", *COLUMNS]
    assert len(FaregateSource({}).reader(schema).partitions()) == 2


def test_what_a_table_cannot_have_is_refused_when_it_is_created(tmp_path: Path) -> None:
    path = journal(tmp_path / "j", 3)
    with pytest.raises(InvalidOption, match="there is no option 'startingoffset' of faregate: did you mean"):
        FaregateSource(created(path, startingoffset="5"))
    with pytest.raises(InvalidOption, match="there is no option 'owner'"):
        FaregateSource({"path": str(path), "owner": "me"})
    with pytest.raises(InvalidOption, match="option source is for writing, and a table is read"):
        FaregateSource(created(path, source="author"))
    url = "rabbitmq-stream://guest:secret@localhost/?stream=orders"
    with pytest.raises(
        InvalidOption, match=r"guest:\*\*\*@localhost.* has a password, which .* use CREATE TEMPORARY VIEW"
    ):
        FaregateSource({"option.url": url, "url": url, "owner": "me", "provider": "faregate"})
    with pytest.raises(InvalidOption, match=r"option path is missing: .* TABLE named columns"):
        FaregateSource({"owner": "me", "provider": "faregate"})


def test_a_write_goes_by_its_options_alone(tmp_path: Path) -> None:
    """Spark hands a row's metadata on, so the schema may be that of the table that the row was read from."""
    schema = FaregateSource(created(journal(tmp_path / "j", 3), columns="type,body,source")).schema()
    with pytest.raises(InvalidOption, match=r"a write says where .* INSERT INTO goes through CREATE TEMPORARY VIEW"):
        FaregateSource({}).writer(schema, overwrite=False)


# --- in SQL -----------------------------------------------------------------------------------------------


@pytest.fixture
def tables(spark: SparkSession) -> Iterator[list[str]]:
    """Names that are dropped in the end."""
    names: list[str] = []
    yield names
    for name in names:
        spark.sql(f"DROP TABLE IF EXISTS {name}")


@pytest.mark.services
def test_a_table_is_read_in_batches_and_as_a_stream(spark: SparkSession, tmp_path: Path, tables: list[str]) -> None:
    path = journal(tmp_path / "my journal", 20)
    tables += ["notes", "some_notes"]
    spark.sql(
        f"CREATE TABLE notes USING faregate OPTIONS (path '{path}', failOnDataLoss 'true') "
        "COMMENT 'what was noted' TBLPROPERTIES ('team' = 'shop')"
    )
    assert spark.sql("SELECT count(*), max(offset) FROM notes WHERE type = 'Noted'").first() == (20, 19)
    assert spark.sql("SELECT count(*) FROM notes WITH (startingOffsets = '15')").first() == (5,)
    append(path, [note(20)])
    assert spark.table("notes").count() == 21
    spark.sql(f"CREATE TABLE some_notes USING faregate OPTIONS (columns 'offset,key') LOCATION '{path}'")
    assert spark.table("some_notes").columns == ["offset", "key"]
    seen: list[int] = []
    query = (
        spark.readStream.table("notes")
        .writeStream.foreachBatch(lambda frame, _: seen.extend(row.offset for row in frame.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert sorted(seen) == list(range(21))

    for statement in ("INSERT INTO some_notes VALUES (1, 'k')", "INSERT INTO notes SELECT * FROM notes"):
        with pytest.raises(PySparkException, match=r"a write says where .* CREATE TEMPORARY VIEW"):
            spark.sql(statement)
    with pytest.raises(PySparkException, match="there is no option 'startingoffset' of faregate"):
        spark.sql(f"CREATE TABLE misspelt USING faregate OPTIONS (path '{path}', startingOffset '5')")
    with pytest.raises(PySparkException, match="does not support truncates"):
        spark.sql("TRUNCATE TABLE notes")
    spark.sql("DROP TABLE notes PURGE")
    assert spark.read.format("faregate").load(str(path)).count() == 21, "a dropped table leaves the journal"


@pytest.mark.services
def test_a_temporary_view_is_read_and_another_one_is_written(spark: SparkSession, tmp_path: Path) -> None:
    for name in ("a", "b"):
        journal(tmp_path / f"data/{name}", 3)
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW every_note USING faregate OPTIONS (path '{tmp_path}/data/*')")
    counts = spark.sql("SELECT journal, count(*) FROM every_note GROUP BY journal").collect()
    assert sorted(counts) == [(f"{tmp_path}/data/a", 3), (f"{tmp_path}/data/b", 3)]

    to = tmp_path / "to"
    run_bus(to)
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW published (type STRING, key STRING, body STRING) "
        f"USING faregate OPTIONS (path '{to}', source 'author')"
    )
    spark.sql("""INSERT INTO published VALUES ('Noted', 'k', '{"text": "by hand"}')""")
    spark.sql("INSERT INTO published (type, body) SELECT type, string(body) FROM every_note WHERE offset = 2")
    assert sorted(run_bus(to)) == ["2", "2", "by hand"]
    with pytest.raises(PySparkException, match="a bus cannot be overwritten"):
        spark.sql("INSERT OVERWRITE published VALUES ('Noted', 'k', '{}')")
    with pytest.raises(PySparkException, match="option source is for writing"):
        spark.sql("SELECT * FROM published").collect()
