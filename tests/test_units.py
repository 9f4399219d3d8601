"""Lengths of time, sizes and moments as text."""

import pytest

from faregate.broker.journal.retention import Retention
from faregate.errors import ConfigurationError
from faregate.transports.journal import JournalTransport
from faregate.units import age, bytes_text, iso, parse_bytes, parse_seconds, seconds_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("10s", 10),
        ("5m", 300),
        ("5 min", 300),
        (" 1.5h ", 5_400),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("0s", 0),
        ("1e3s", 1_000),
    ],
)
def test_a_length_of_time_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text, "window") == seconds


@pytest.mark.parametrize("text", ["", "10", "5M", "5 D", "-1s", "infs", "nans", "1e999s", "s", "1 2s", "1y"])
def test_what_is_no_length_of_time_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^window '.*' is no length of time: write 10s"):
        parse_seconds(text, "window")


def test_a_number_alone_is_seconds_only_where_that_is_said() -> None:
    assert parse_seconds("2.5", "retain", bare=True) == 2.5
    with pytest.raises(ConfigurationError, match="or a number of seconds"):
        parse_seconds("soon", "retain", bare=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000000", 1_000_000),
        ("64M", 64 << 20),
        ("64 MB", 64 << 20),
        ("1kib", 1_024),
        ("10G", 10 << 30),
        ("1.5T", 3 << 39),
    ],
)
def test_a_size_is_a_number_of_bytes_or_of_powers_of_1024(text: str, size: int) -> None:
    assert parse_bytes(text, "retain_bytes") == size


@pytest.mark.parametrize("text", ["", "64X", "-1", "infinity", "M", "1 0"])
def test_what_is_no_size_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^retain_bytes '.*' is no size: write"):
        parse_bytes(text, "retain_bytes")


def test_a_journal_reads_its_retention_from_its_url() -> None:
    assert JournalTransport("./data?retain=7d&retain_bytes=10G").retention == Retention(604_800, 10 << 30)
    assert JournalTransport("./data?retain=forever").retention == Retention(None, None)
    assert JournalTransport("./data?retain=3600").retention == Retention(3_600, None)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (-5, "just now"),
        (0.4, "just now"),
        (59, "59 s ago"),
        (185, "3 min ago"),
        (7_300, "2 h ago"),
        (86_400, "1 day ago"),
        (200_000, "2 days ago"),
    ],
)
def test_ages_are_what_people_say(seconds: float, told: str) -> None:
    assert age(1_000_000.0, 1_000_000.0 + seconds) == told


def test_lengths_sizes_and_moments_are_shown_in_the_unit_that_fits() -> None:
    assert [seconds_text(each) for each in (0.0004, 0.25, 1.25, 2_000)] == ["0 ms", "250 ms", "1.2 s", "2,000.0 s"]
    assert [bytes_text(each) for each in (0, 1_023, 1_536, 5 << 30, 3 << 50)] == [
        "0 bytes",
        "1,023 bytes",
        "1.5 KiB",
        "5.0 GiB",
        "3,072.0 TiB",
    ]
    assert iso(1.5) == "1970-01-01T00:00:01.500Z"
