"""Options: every one is read, and a wrong one fails with its name and what is allowed."""

import re
from pathlib import Path

import pytest

from faregate.errors import InvalidOption
from faregate.spark import other_sources
from faregate.spark.options import FOR_READING, FOR_WRITING, PLACES, parse_options
from faregate.spark.schema import row_schema
from faregate.spark.source.bounds import EARLIEST, LATEST, AtTime, Bounds


def test_the_defaults_lose_nothing() -> None:
    found = parse_options({"path": "/data/journal"})
    assert (found.starting, found.ending, found.fail_on_data_loss) == (EARLIEST, LATEST, True)
    assert (found.max_messages, found.max_bytes, found.min_partitions, found.reader_name) == (None, None, 1, None)


def test_names_are_found_in_any_case_because_spark_changes_it() -> None:
    found = parse_options(
        {
            "PATH": "file:///data/my%20journal",
            "failondataloss": "FALSE",
            "maxmessagespertrigger": "100",
            "maxbytespertrigger": "64m",
            "minpartitions": "8",
            "types": "OrderPlaced, order-cancelled",
            "nodes": '["shop", "web"]',
            "columns": "offset,body",
            "readername": "warehouse",
            "checkpointLocation": "/anywhere",
        }
    )
    assert found.path == Path("/data/my journal")
    assert (found.max_messages, found.max_bytes, found.min_partitions) == (100, 64 << 20, 8)
    assert (found.types, found.nodes) == (("OrderPlaced", "order-cancelled"), ("shop", "web"))
    assert (found.columns, found.reader_name, found.fail_on_data_loss) == (("offset", "body"), "warehouse", False)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("earliest", "earliest"),
        ("LATEST", "latest"),
        ("17", 17),
        ("2026-11-15T09:00:00Z", AtTime(1794733200.0)),
        ("2026-11-15T10:00:00+01:00", AtTime(1794733200.0)),
        ("@1794733200", AtTime(1794733200.0)),
        ("@1794733200.5", AtTime(1794733200.5)),
    ],
)
def test_a_bound_is_a_word_an_offset_or_a_time(text: str, bound: object) -> None:
    assert parse_options({"path": "/j", "startingOffsets": text}).starting.of("0") == bound
    assert parse_options({"path": "/j", "endingOffsets": f'{{"0": "{text}"}}'}).ending.of("0") == bound


def test_the_offset_that_a_query_reports_can_be_pasted() -> None:
    found = parse_options({"path": "/j", "startingOffsets": '{"0": 17, "log": "abc"}'}).starting
    assert found == Bounds(None, {"0": 17}, "abc")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("startingOffsets", "soon", "'soon' is no bound; allowed are 'earliest', 'latest', an offset such as 17"),
        ("startingOffsets", "-1", "allowed are"),
        ("startingOffsets", '{"0": -1}', "an offset is not negative"),
        ("startingOffsets", '{"0": 1', "it is not JSON"),
        ("startingOffsets", "{}", "it names no partition"),
        ("endingOffsets", "2026-11-15T09:00:00", "has no zone: write 2026-11-15T09:00:00Z for UTC"),
        ("endingOffsets", '{"0": true}', "True is no bound"),
        ("failOnDataLoss", "maybe", "true or false"),
        ("maxMessagesPerTrigger", "0", "a whole number, 1 or more"),
        ("maxMessagesPerTrigger", "1e3", "a whole number, 1 or more"),
        ("maxBytesPerTrigger", "64X", "such as 1000000 or 64M"),
        ("minPartitions", "-2", "a whole number, 1 or more"),
        ("types", "Order Placed", "not a valid name"),
        ("nodes", " , ", "names separated by commas"),
        ("columns", "[1]", "a JSON array of names"),
        ("readerName", "../etc", "not a valid name"),
        ("source", "", "not a valid name"),
        ("path", "s3a://bucket/journal", "a folder that driver and executors can reach"),
        ("path", "journal:./data", "give the folder alone"),
        ("path", " ", "the journal's folder"),
        ("url", "kafka://host", "no log of a package that is installed here"),
    ],
)
def test_a_malformed_option_is_named_with_what_is_allowed(name: str, value: str, said: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parse_options({"path": "/j", name: value})
    assert f"option {name}" in str(caught.value)
    assert said in str(caught.value)


def test_an_unknown_option_is_an_error_and_the_nearest_name_is_given() -> None:
    with pytest.raises(InvalidOption, match="no option 'startingOffset' of faregate: did you mean 'startingOffsets'"):
        parse_options({"path": "/j", "startingOffset": "latest"})
    with pytest.raises(InvalidOption, match="there are path, startingOffsets"):
        parse_options({"path": "/j", "zzz": "1"})


def test_options_of_other_sources_that_mean_the_same_are_taken() -> None:
    found = parse_options(
        {
            "path": "/j",
            "maxOffsetsPerTrigger": "7",
            "startingTimestamp": "1794733200500",
            "endingTimestamp": "@1794733300",
        }
    )
    assert found.max_messages == 7
    assert found.starting.of("0") == AtTime(1794733200.5), "Kafka counts milliseconds"
    assert found.ending.of("0") == AtTime(1794733300.0)
    assert parse_options({"path": "/j", "startingTimestamp": "2026-11-15T09:00:00Z"}).starting == Bounds(
        AtTime(1794733200.0)
    )
    assert {"maxOffsetsPerTrigger", "startingTimestamp", "endingTimestamp"} < set(FOR_READING)
    for name, value, said in (
        ("startingTimestamp", "earliest", "'earliest' is no time; allowed are milliseconds since the epoch"),
        ("startingTimestamp", "2026-11-15", "has no zone"),
        ("maxOffsetsPerTrigger", "0", "option maxOffsetsPerTrigger is '0': it must be a whole number"),
    ):
        with pytest.raises(InvalidOption, match=said):
            parse_options({"path": "/j", name: value})
    with pytest.raises(InvalidOption, match="options startingOffsets and startingTimestamp mean the same"):
        parse_options({"path": "/j", "startingTimestamp": "1", "startingOffsets": "latest"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("maxFilesPerTrigger", "maxFilesPerTrigger is Delta's: say maxMessagesPerTrigger"),
        ("startingversion", "startingVersion is Delta's: say startingOffsets"),
        ("ignoreChanges", "ignoreChanges is Delta's: a log only grows"),
        ("subscribe", "subscribe is Kafka's: say path"),
        ("includeHeaders", "includeHeaders is Kafka's: headers is a column anyway"),
        ("startingOffsetsByTimestamp", "Kafka's: say startingOffsets, which takes a time, too"),
        ("kafka.bootstrap.servers", "kafka.bootstrap.servers is Kafka's: there is no Kafka here, say path"),
        ("latestFirst", "latestFirst is of Spark's files: messages are read in order"),
    ],
)
def test_other_options_of_other_sources_are_refused_with_the_right_name(name: str, said: str) -> None:
    with pytest.raises(InvalidOption, match=f"there is no option '{name}' of faregate: ") as caught:
        parse_options({"path": "/j", name: "1"})
    assert said in str(caught.value)


def test_every_right_name_is_an_option() -> None:
    known = {name.lower() for name in (*FOR_READING, *FOR_WRITING, *PLACES)}
    for name, instead in other_sources.all_hints():
        assert name.lower() not in known, name
        for said in re.findall(r"\bsay (\w+)", instead):
            assert said.lower() in known or said == "how", instead


def test_the_path_must_be_given() -> None:
    with pytest.raises(InvalidOption, match="option path is missing"):
        parse_options({})


def test_an_address_of_folders_may_be_a_pattern_or_have_a_hash() -> None:
    assert parse_options({"path": "file:/data/j?"}).places == (Path("/data/j?"),)
    assert parse_options({"path": "file:///data/my%20#1"}).path == Path("/data/my #1")


@pytest.mark.parametrize("text", ["2026-11-15", "2026-11-15T09", "2026-11-15 09:00:00.5"])
def test_what_is_said_of_a_time_without_zone_can_be_written(text: str) -> None:
    with pytest.raises(InvalidOption, match="has no zone") as caught:
        parse_options({"path": "/j", "startingTimestamp": text})
    [said] = re.findall(r"write (\S+) for UTC", str(caught.value))
    assert isinstance(parse_options({"path": "/j", "startingTimestamp": said}).starting.of("0"), AtTime)


def test_columns_must_be_columns() -> None:
    with pytest.raises(InvalidOption, match="option columns names payload; there are journal, offset, appended_at"):
        row_schema(("offset", "payload"))
    with pytest.raises(InvalidOption, match="twice"):
        row_schema(("offset", "offset"))
