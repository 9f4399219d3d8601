"""Options: every one is read, and a wrong one fails with its name and what is allowed."""

from pathlib import Path

import pytest

from faregate.spark.options import InvalidOption, parse_options
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


def test_the_path_must_be_given() -> None:
    with pytest.raises(InvalidOption, match="option path is missing"):
        parse_options({})


def test_columns_must_be_columns() -> None:
    with pytest.raises(InvalidOption, match="option columns names payload; there are journal, offset, appended_at"):
        row_schema(("offset", "payload"))
    with pytest.raises(InvalidOption, match="twice"):
        row_schema(("offset", "offset"))
