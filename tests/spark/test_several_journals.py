"""Several journals in one read: lists, patterns, the column that names them, and streams over them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows, ReadMinRows

from faregate.broker.journal.reader import JournalReader
from faregate.errors import ConfigurationError, InvalidOption, JournalNotFound, OffsetGone
from faregate.spark.format import FaregateSource
from faregate.spark.logs import open_partitions
from faregate.spark.options import Options, parse_options
from faregate.spark.schema import COLUMNS, row_schema
from faregate.spark.source.batch_reader import BatchReader
from faregate.spark.source.stream_reader import StreamReader
from tests.spark.rig import append, empty_journal, journal, note, options, truncate

SCHEMA = row_schema(("journal", "offset"))


def rows(chosen: Options) -> list[tuple[str, int]]:
    """(name of the folder, offset) of every row, without Spark."""
    reader = BatchReader(chosen, SCHEMA)
    batches = [batch for span in reader.partitions() for batch in reader.read(span)]
    return sorted(
        (Path(name).name, offset)
        for batch in batches
        for name, offset in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )


def numbered(**counts: int) -> list[tuple[str, int]]:
    return sorted((name, offset) for name, count in counts.items() for offset in range(count))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the journals `a` of 20 messages and `b` of 5, and something else."""
    journal(tmp_path / "data/a", 20)
    journal(tmp_path / "data/b", 5)
    (tmp_path / "data/checkpoint").mkdir()
    (tmp_path / "data/notes.txt").write_text("not a journal")
    return tmp_path / "data"


# --- which ------------------------------------------------------------------------------------------------


def test_journals_are_listed_or_match_a_pattern(data: Path) -> None:
    both = numbered(a=20, b=5)
    assert rows(options(data / "*")) == both
    assert rows(options(f"{data}/a,{data}/b")) == both  # type: ignore[arg-type]
    assert rows(parse_options({"paths": json.dumps([f"{data}/a", f"file://{data}/b"])})) == both
    assert rows(options(f"{data}/[b-z], {data}/a, {data}/?")) == both  # type: ignore[arg-type]
    assert rows(options(data / "[b-z]")) == numbered(b=5)


def test_a_folder_that_is_there_is_meant_itself_whatever_its_name(tmp_path: Path) -> None:
    for name in ("[a]", "a,b", "a*"):
        found = options(journal(tmp_path / name, 3))
        assert not found.several and found.path == tmp_path / name
    journal(tmp_path / "a", 1)
    assert rows(options(tmp_path / "[a]")) == numbered(**{"[a]": 3})


def test_what_matches_nothing_or_twice_is_refused(data: Path) -> None:
    with pytest.raises(JournalNotFound, match=r"no journal matches .*/x-"):
        open_partitions(options(data / "x-*"))
    with pytest.raises(JournalNotFound, match=r"there is no journal in .*/c"):
        open_partitions(options(f"{data}/a,{data}/c"))  # type: ignore[arg-type]
    shutil.copytree(data / "a", data / "a-backup")
    with pytest.raises(ConfigurationError, match=r"/a and .*/a-backup are the same journal .* name one of them"):
        open_partitions(options(data / "*"))
    with pytest.raises(InvalidOption, match="braces are not known here"):
        options(data / "{a,b}")


def test_the_journal_is_a_column_where_there_are_several_or_it_is_asked_for(data: Path) -> None:
    one, several = FaregateSource({"path": f"{data}/a"}), FaregateSource({"path": f"{data}/[a]*"})
    assert one.schema().fieldNames() == list(COLUMNS)
    assert several.schema().fieldNames() == ["journal", *COLUMNS]
    assert rows(options(data / "a", columns="journal,offset")) == numbered(a=20)


def test_what_is_for_one_journal_refuses_several(data: Path) -> None:
    with pytest.raises(InvalidOption, match="ranges are read from one journal"):
        FaregateSource({"path": f"{data}/*", "rows": "ranges"})
    source = FaregateSource({"path": f"{data}/*", "source": "author"})
    with pytest.raises(InvalidOption, match=r"a write goes to one journal; option path names .*/data/\*"):
        source.writer(row_schema(("type", "body")), overwrite=False)


def test_bounds_are_for_all_journals_or_for_each(data: Path) -> None:
    assert rows(options(data / "*", startingOffsets=3)) == [*((f"{'a'}", n) for n in range(3, 20)), ("b", 3), ("b", 4)]
    each = json.dumps({f"{data}/a": 18, f"{data}/b": "latest"})
    assert rows(options(data / "*", startingOffsets=each)) == [("a", 18), ("a", 19)]
    with pytest.raises(ConfigurationError, match="must name every partition of the log once"):
        rows(options(data / "*", startingOffsets=json.dumps({f"{data}/a": 18})))
    # What a stream reports can be pasted here, too.
    reported = StreamReader(options(data / "*"), SCHEMA).initialOffset()
    assert rows(options(data / "*", startingOffsets=json.dumps(reported))) == numbered(a=20, b=5)
    reported["log"][f"{data}/a"] = "another"
    with pytest.raises(ConfigurationError, match="holds offsets of the log"):
        rows(options(data / "*", startingOffsets=json.dumps(reported)))


# --- streams, without Spark -------------------------------------------------------------------------------


def stream(data: Path, **given: object) -> StreamReader:
    return StreamReader(options(data / "*", **given), SCHEMA)


def ends(reader: StreamReader, start: dict[str, Any], limit: ReadLimit | None = None) -> list[dict[str, int]]:
    """The ends of the batches, by the name of the folder, until there is nothing more."""
    found = []
    while (end := reader.latestOffset(start, limit or reader.getDefaultReadLimit())) != start:
        found.append({Path(name).name: number for name, number in end.items() if name != "log"})
        start = end
    return found


def test_an_offset_names_each_journal(data: Path) -> None:
    start = stream(data).initialOffset()
    ids = {f"{data}/{name}": JournalReader(data / name).meta.id for name in ("a", "b")}
    assert start == {f"{data}/a": 0, f"{data}/b": 0, "log": ids}
    end = stream(data).latestOffset(start, ReadAllAvailable())
    assert json.dumps(end) == json.dumps({f"{data}/a": 20, f"{data}/b": 5, "log": ids}), "Spark compares the text"
    spans = stream(data, minPartitions=4).partitions(start, end)
    read = [batch.column("offset").to_pylist() for span in spans for batch in stream(data).read(span)]
    assert sorted(offset for each in read for offset in each) == sorted([*range(20), *range(5)])


def test_a_limit_is_shared_and_what_one_journal_leaves_the_other_gets(data: Path) -> None:
    start = stream(data).initialOffset()
    assert ends(stream(data, maxMessagesPerTrigger=8), start) == [
        {"a": 4, "b": 4},
        {"a": 11, "b": 5},
        {"a": 19, "b": 5},
        {"a": 20, "b": 5},
    ]
    # Bodies have 12 bytes, from 10 on 13.
    assert ends(stream(data, maxBytesPerTrigger=96), start)[:2] == [{"a": 4, "b": 4}, {"a": 10, "b": 5}]
    assert ends(stream(data), start, ReadMaxRows(1))[0] == {"a": 1, "b": 1}, "no journal starves"
    assert ends(stream(data), start, ReadMaxBytes(1))[0] == {"a": 1, "b": 1}
    assert ends(stream(data), start, ReadMinRows(25)) == [{"a": 20, "b": 5}]
    assert ends(stream(data), start, ReadMinRows(26)) == []


def test_a_journal_that_is_new_joins_from_its_beginning(data: Path) -> None:
    reader = stream(data, startingOffsets="latest", readerName="all")
    start = reader.initialOffset()
    journal(data / "c", 300)
    earliest = truncate(data / "c")
    joined = reader.latestOffset(start, ReadAllAvailable())
    assert joined[f"{data}/c"] == earliest > 0
    assert reader.partitions(start, joined) == [], "the batch in which it joins has nothing of it"
    reader.commit(start)
    end = reader.latestOffset(joined, ReadAllAvailable())
    assert [(span.start, span.end) for span in reader.partitions(joined, end)] == [(earliest, 300)]  # type: ignore[attr-defined]
    reader.commit(end)
    assert [kept.offset for kept in JournalReader(data / "c").reader_offsets()] == [300]


def test_available_now_ends_with_the_journals_that_were_there(data: Path) -> None:
    start = stream(data).initialOffset()
    journal(data / "c", 7)
    reader = stream(data)
    reader.prepareForTriggerAvailableNow()
    journal(data / "d", 9)
    append(data / "a", [note(20)])
    assert ends(reader, start) == [{"a": 20, "b": 5, "c": 0}, {"a": 20, "b": 5, "c": 7}]
    assert ends(stream(data), start)[-1] == {"a": 21, "b": 5, "c": 7, "d": 9}


def test_a_journal_that_is_gone_is_a_loss(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = stream(data).latestOffset(stream(data).initialOffset(), ReadAllAvailable())
    (data / "b").rename(data.parent / "b")
    append(data / "a", [note(20)])
    with pytest.raises(OffsetGone, match="/b, which the checkpoint has read up to 5, is not there any more"):
        stream(data).latestOffset(start, ReadAllAvailable())
    lenient = stream(data, failOnDataLoss="false")
    for _ in range(3):
        assert ends(lenient, start) == [{"a": 21, "b": 5}]
    assert len(caplog.records) == 1
    (data.parent / "b").rename(data / "b")
    append(data / "b", [note(5)])
    assert ends(stream(data), start) == [{"a": 21, "b": 6}], "it goes on where it was"


def test_a_checkpoint_of_other_journals_is_refused(data: Path) -> None:
    start = stream(data).initialOffset()
    shutil.rmtree(data / "b")
    empty_journal(data / "b")
    with pytest.raises(ConfigurationError, match=r"belongs to the log .*, and the journal .*/b is the log"):
        stream(data).latestOffset(start, ReadAllAvailable())
    of_one = StreamReader(options(data / "a"), SCHEMA).initialOffset()
    with pytest.raises(ConfigurationError, match="Use a new checkpointLocation"):
        stream(data).latestOffset(of_one, ReadAllAvailable())
    with pytest.raises(ConfigurationError, match="Use a new checkpointLocation"):
        StreamReader(options(data / "a"), SCHEMA).latestOffset(start, ReadAllAvailable())


# --- with Spark -------------------------------------------------------------------------------------------


@pytest.mark.services
def test_spark_reads_several_journals_in_a_batch_and_as_a_stream(spark: SparkSession, data: Path) -> None:
    listed = spark.read.format("faregate").load([f"{data}/a", f"{data}/b"])
    assert listed.columns == ["journal", *COLUMNS]
    counts = {Path(row["journal"]).name: row["count"] for row in listed.groupBy("journal").count().collect()}
    assert counts == {"a": 20, "b": 5}
    with pytest.raises(AnalysisException, match="JournalNotFound: no journal matches"):
        spark.read.format("faregate").load(f"{data}/x*")

    seen: list[tuple[str, int]] = []

    def run() -> None:
        query = (
            spark.readStream.format("faregate")
            .option("maxMessagesPerTrigger", 10)
            .load(f"{data}/*")
            .writeStream.foreachBatch(
                lambda frame, _: seen.extend((Path(row["journal"]).name, row["offset"]) for row in frame.collect())
            )
            .option("checkpointLocation", str(data / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    run()
    assert sorted(seen) == numbered(a=20, b=5)
    journal(data / "c", 3)
    append(data / "b", [note(5)])
    run()
    assert sorted(seen) == numbered(a=20, b=6, c=3)
