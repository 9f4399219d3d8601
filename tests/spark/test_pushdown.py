"""Filters decide what is read, and never what is found: the rows are always those of a full scan."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import datasource as pushed
from pyspark.sql import functions as F

import faregate as fg
from faregate.broker.journal import reader as journal_reader
from faregate.broker.journal.reader import JournalReader
from faregate.errors import InvalidOption
from faregate.ports.log import Stretch
from faregate.spark.source import batch_reader, conditions
from faregate.spark.source import pushed as remembered
from faregate.spark.source.batch_reader import BatchReader
from faregate.spark.source.conditions import Condition, of_filters
from faregate.spark.source.ranges import OffsetRange, split_spans
from faregate.spark.source.stream_reader import StreamReader
from tests.spark import pushdown_rig as rig
from tests.spark.pushdown_rig import SCHEMA
from tests.spark.rig import journal, options

Rows = list[dict[str, Any]]


@dataclass
class Sample:
    path: Path
    rows: Rows
    """All of them."""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    path = rig.write_every_form(tmp_path_factory.mktemp("pushdown") / "j")
    return Sample(path, rig.full_scan(path))


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Spark would have its files."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/nowhere")


def test_the_sample_has_every_form(sample: Sample) -> None:
    log = JournalReader(sample.path)
    bases = log.layout.segment_bases(log._disk)
    assert [log.is_sealed(base) for base in bases] == [True, True, True, False, False]
    assert [log.footer(base) is None for base in bases] == [False] * 4 + [True]
    assert log.earliest() == bases[0] == rig.SEGMENT + 1
    assert len(sample.rows) == (rig.SEGMENTS - 1) * rig.SEGMENT
    first, *_ = log.stretches(bases[0], log.latest())
    assert first.end - first.start == rig.FRAME and first.types == ["Placed"] and first.sources == ["shop"]


def compare(sample: Sample, examples: int) -> None:
    """Random filters of several queries on one DataFrame: each finds what a full scan finds."""

    @settings(deadline=None, max_examples=examples, derandomize=True, database=None, phases=[Phase.generate])
    @given(
        st.lists(st.lists(rig.filters(), max_size=3), min_size=1, max_size=2),
        st.integers(1, 4),
        st.sampled_from([{}, {}, {"types": "Paid"}, {"nodes": "web", "types": "Placed,Refund-2"}]),
    )
    def check(queries: list[list[Any]], tasks: int, chosen: dict[str, str]) -> None:
        load = rig.new_load()
        for filters in queries:
            reader = rig.pushed_reader(sample.path, load, minPartitions=tasks, **chosen)
            assert [id(each) for each in reader.pushFilters(filters)] == [id(each) for each in filters]
        found = rig.rows_of(reader)  # of the last plan, which is that of all
        every = [row for row in sample.rows if fits_options(row, chosen)]
        assert [row["offset"] for row in found if not fits_options(row, chosen)] == []
        for filters in queries:
            assert [row for row in found if rig.all_hold(filters, row)] == [
                row for row in every if rig.all_hold(filters, row)
            ]

    check()


def fits_options(row: dict[str, Any], chosen: dict[str, str]) -> bool:
    names = (("type", "types"), ("source", "nodes"))
    return all(row[column] in chosen[option].split(",") for column, option in names if option in chosen)


@pytest.mark.parametrize("examples", [100, pytest.param(3000, marks=pytest.mark.full)])
def test_random_filters_find_what_a_full_scan_finds(sample: Sample, examples: int) -> None:
    compare(sample, examples)


# --- broken on purpose -------------------------------------------------------------------------------------------


def _without_unknown(*args: Any) -> Iterator[Stretch]:
    return (each for each in _stretches(*args) if each.times is not None)


def _short(*args: Any) -> Iterator[Stretch]:
    return (each._replace(end=each.end - 1) if each.times else each for each in _stretches(*args))


def _early(*args: Any) -> Iterator[Stretch]:
    return (each._replace(times=each.times and (each.times[0],) * 2) for each in _stretches(*args))


_stretches = JournalReader.stretches
_between = Condition.may_be_between
MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "the hot tail is passed over": (JournalReader, "stretches", _without_unknown),
    "the last message of a frame is passed over": (JournalReader, "stretches", _short),
    "the end of a frame's time is its beginning": (JournalReader, "stretches", _early),
    "a frame has only its first type": (
        JournalReader,
        "stretches",
        lambda *args: (each._replace(types=each.types and each.types[:1]) for each in _stretches(*args)),
    ),
    "a frame has none of its keys": (
        JournalReader,
        "stretches",
        lambda *args: (each._replace(keys=each.keys and (lambda key: False)) for each in _stretches(*args)),
    ),
    "a frame has none of its correlations": (
        JournalReader,
        "stretches",
        lambda *args: (
            each._replace(correlations=each.correlations and (lambda text: False)) for each in _stretches(*args)
        ),
    ),
    "the last offset does not count": (
        Condition,
        "may_be_between",
        lambda self, low, high: _between(self, low, max(low, high - 1)),
    ),
    "a value may not be null": (Condition, "takes", lambda self, value: value is not None and not self.negated),
    "all of a frame must fit": (
        Condition,
        "may_be_in",
        lambda self, stretch: all(map(self.takes, stretch.types or ())) if self.column == "type" else True,
    ),
    "the opposite is not seen": (
        conditions,
        "_TESTS",
        {kind: (test, False) for kind, (test, _) in conditions._TESTS.items()},
    ),
    "a time is read without its zone": (conditions, "_EPOCH", conditions._EPOCH.replace(hour=1)),
    "only the last query is remembered": (batch_reader, "remember", lambda load, wanted: (wanted,)),
    "options are forgotten": (batch_reader, "wanted_by", lambda options: ((),)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_finds_what_is_broken(sample: Sample, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        compare(sample, 1500)


# --- skipping ----------------------------------------------------------------------------------------------------


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first offsets of the frames that are read from here on; frames of rows that follow are read with them."""
    found: list[int] = []
    true = journal_reader.read_messages

    def read(frame: Any, body: Any) -> Any:
        found.append(frame.base)
        return true(frame, body)

    monkeypatch.setattr(journal_reader, "read_messages", read)
    return found


def moment(row: dict[str, Any]) -> Any:
    return row["appended_at"]


def test_frames_that_nobody_looks_for_are_not_read(sample: Sample, frames: list[int]) -> None:
    everything = BatchReader(options(sample.path), SCHEMA)
    assert rig.rows_of(everything) == sample.rows
    whole = len(frames)
    assert whole == 3 * rig.SEGMENT // rig.FRAME + 2  # two are not sealed

    def read(*filters: Any, **more: object) -> int:
        frames.clear()
        reader = rig.pushed_reader(sample.path, rig.new_load(), **more)
        reader.pushFilters([*filters])
        rig.rows_of(reader)
        return len(frames)

    early, late = sample.rows[15], sample.rows[-1]
    assert read(pushed.EqualTo(("offset",), early["offset"])) == 1
    assert read(pushed.LessThan(("appended_at",), moment(sample.rows[0]))) == 2, "what is hot is read"
    assert read(pushed.LessThanOrEqual(("appended_at",), moment(early))) in (3, 4, 5)
    assert read(pushed.GreaterThanOrEqual(("appended_at",), moment(late))) == 2
    assert read(pushed.EqualTo(("type",), "Nothing")) == read(pushed.In(("source",), ("nobody",))) == 2
    assert 2 < read(pushed.StringStartsWith(("type",), "Ref")) < whole
    assert 2 < read(pushed.Not(pushed.EqualTo(("source",), "web"))) < whole
    assert read(types="Nothing") == read(nodes="nobody") == 2
    assert read(pushed.EqualTo(("key",), "nobody's")) == 2
    assert read(pushed.EqualTo(("correlation_id",), early["correlation_id"])) == 3
    assert read(pushed.In(("correlation_id",), (early["correlation_id"], "c-none"))) == 3
    # This key is in every frame, and of the others a footer says nothing: only rows are left out.
    assert read(pushed.EqualTo(("key",), "k1")) == read(pushed.IsNull(("sent_at",))) == whole
    assert read(pushed.Not(pushed.EqualTo(("key",), "k1"))) == read(pushed.IsNull(("key",))) == whole
    assert read(pushed.StringStartsWith(("correlation_id",), "none")) == whole


def test_rows_that_nobody_looks_for_do_not_reach_spark(sample: Sample) -> None:
    for filters in (
        [pushed.EqualTo(("key",), "k1"), pushed.Not(pushed.In(("type",), ("Paid",)))],
        [pushed.EqualTo(("correlation_id",), sample.rows[200]["correlation_id"])],
        [pushed.GreaterThan(("sent_at",), sample.rows[-9]["sent_at"])],
    ):
        reader = rig.pushed_reader(sample.path, rig.new_load())
        reader.pushFilters(filters)
        found = rig.rows_of(reader)
        assert found and found == [row for row in sample.rows if rig.all_hold(filters, row)]


def test_options_skip_in_streams_too(sample: Sample, frames: list[int]) -> None:
    stream = StreamReader(options(sample.path, types="Paid", nodes="web"), SCHEMA)
    begin = stream.initialOffset()
    spans = stream.partitions(begin, stream.latestOffset(begin, stream.getDefaultReadLimit()))
    found = [row for span in spans for batch in stream.read(span) for row in batch.to_pylist()]
    assert found == [row for row in sample.rows if (row["type"], row["source"]) == ("Paid", "web")]
    assert len(frames) < 3 * rig.SEGMENT // rig.FRAME


def test_what_is_to_be_read_is_shared_evenly_by_tasks() -> None:
    spans = {"0": [(10, 20), (50, 60), (60, 61)]}
    assert split_spans(spans, 1) == [OffsetRange("0", 10, 61)]
    assert split_spans(spans, 2) == [OffsetRange("0", 10, 20), OffsetRange("0", 50, 61)]
    assert split_spans(spans, 3) == [OffsetRange("0", 10, 17), OffsetRange("0", 17, 54), OffsetRange("0", 54, 61)]
    assert split_spans({"0": [], "1": [(5, 5)]}, 3) == []


def test_a_filter_that_is_not_understood_is_left_to_spark() -> None:
    assert (
        of_filters(
            [
                pushed.EqualTo(("headers", "tenant"), "x"),
                pushed.EqualTo(("body",), b"x"),
                pushed.EqualTo(("depth",), 3),
                pushed.EqualTo(("offset",), "3"),
                pushed.In(("key",), ("a", None)),
                pushed.EqualTo(("sent_at",), rig.datetime(2026, 1, 1)),
                pushed.EqualNullSafe(("key",), None),
            ]
        )
        == ()
    )


def test_with_many_different_filters_everything_is_read(tmp_path: Path) -> None:
    load = rig.new_load()
    wanted = [remembered.remember(load, (Condition("offset", "in", (n,)),)) for n in range(remembered.MOST + 1)]
    assert [len(each) for each in wanted[:-1]] == [*range(1, remembered.MOST + 1)]
    assert wanted[-1] == conditions.ALL
    [noted] = tmp_path.iterdir()
    assert msgspec.json.decode(noted.read_bytes().splitlines()[0]) == [["offset", "in", [0], False]]
    assert noted.stat().st_mode & 0o077 == 0


def test_the_option_is_not_for_hands_nor_for_streams(tmp_path: Path) -> None:
    journal(tmp_path / "j", 1)
    with pytest.raises(InvalidOption, match="cannot be set by hand"):
        options(tmp_path / "j", pushFilters="true")
    with pytest.raises(InvalidOption, match="pushFilters is for batch reads"):
        StreamReader(options(tmp_path / "j", pushFilters=rig.new_load()), SCHEMA)


# --- in Spark ----------------------------------------------------------------------------------------------------

WHERE = [
    "offset between 70 and 75 or offset = 300",
    "offset = 100 and appended_at > timestamp'2020-01-01 00:00:00'",
    "appended_at >= timestamp'{late}' and type <> 'Paid'",
    "type = 'Paid' and source = 'web'",
    "type like 'Ref%' and key is null",
    "type in ('Placed', 'Nothing') and not source in ('web')",
    "key = 'k3' and correlation_id > 'c150'",
    "sent_at < timestamp'{late}' and key is not null and depth = 1",
    "lower(type) = 'paid' and offset % 7 = 0",
    "false",
    "true",
]


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    """A session in another time zone, in which the setting is off."""
    name, zone = "spark.sql.python.filterPushdown.enabled", "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    spark.conf.unset(name)
    spark.conf.set(zone, "Asia/Tokyo")
    yield spark
    spark.conf.set(zone, before)
    spark.conf.unset(name)


def numbered(found: list[DataFrame]) -> list[tuple[int, int]]:
    """(number of the query, offset), in one job."""
    each = [frame.select(F.lit(number).alias("query"), "offset") for number, frame in enumerate(found)]
    return sorted(tuple(row) for row in reduce(DataFrame.union, each).collect())


@pytest.mark.services
def test_spark_finds_what_it_finds_in_a_full_scan(pushing: SparkSession, sample: Sample) -> None:
    late = moment(sample.rows[200]).astimezone(rig.timezone(rig.timedelta(hours=9))).strftime("%F %T.%f")
    where = [each.format(late=late) for each in WHERE]
    plain = pushing.read.format("faregate").load(str(sample.path))
    expected = numbered([plain.filter(each) for each in where])
    assert {query for query, _ in expected} == {*range(len(WHERE))} - {WHERE.index("false")}
    apart = [fg.spark.messages(pushing, sample.path).filter(each) for each in where]
    assert numbered(apart) == expected
    together = fg.spark.messages(pushing, f"journal:{sample.path}")
    assert numbered([together.filter(each) for each in where[:-1]]) == [
        row for row in expected if row[0] < len(where) - 1
    ]


@pytest.mark.services
def test_queries_on_one_dataframe_do_not_read_with_the_filters_of_another(
    pushing: SparkSession, sample: Sample
) -> None:
    """As they would where Spark shares a plan."""
    log = fg.spark.messages(pushing, sample.path, columns=["type", "key"], minPartitions=2)
    assert log.columns == ["type", "key"]
    paid = sum(row["type"] == "Paid" for row in sample.rows)
    assert log.filter("type = 'Paid'").count() == paid
    assert log.filter("key = 'k1' or key = 'k2'").count() == sum(row["key"] in ("k1", "k2") for row in sample.rows)
    assert log.count() == len(sample.rows)
    fg.spark.messages(pushing, sample.path).createOrReplaceTempView("pushed_log")
    joined = "select count(*) from pushed_log a join pushed_log b using (offset) where a.type = 'Paid' and b.key = 'k1'"
    assert pushing.sql(joined).first() == (sum((row["type"], row["key"]) == ("Paid", "k1") for row in sample.rows),)
    assert pushing.sql("select count(*) from pushed_log").first() == (len(sample.rows),)


@pytest.mark.services
def test_journals_may_be_a_list_and_options_what_python_has(
    pushing: SparkSession, sample: Sample, tmp_path: Path
) -> None:
    other = journal(tmp_path / "other", 3)
    found = fg.spark.messages(pushing, [sample.path, f"journal:{other}"], types=None)
    assert {row["journal"] for row in found.filter("offset >= 0").collect()} == {str(sample.path), str(other)}
    late = moment(sample.rows[-1])
    expected = sum(moment(row) >= late for row in sample.rows)
    assert fg.spark.messages(pushing, sample.path, startingOffsets=late).count() == expected


@pytest.mark.services
def test_without_the_setting_spark_names_it(pushing: SparkSession, sample: Sample) -> None:
    log = fg.spark.messages(pushing, sample.path)
    pushing.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    with pytest.raises(PySparkException, match=r"spark\.sql\.python\.filterPushdown\.enabled"):
        log.count()
    with pytest.raises(InvalidOption, match="there is no option 'type'"):
        fg.spark.messages(pushing, sample.path, type="Paid")
    with pytest.raises(InvalidOption, match="option rows is not for"):
        fg.spark.messages(pushing, sample.path, rows="ranges")
