"""When recurring functions are called: cron and periods, daylight saving, missed ticks, and what is refused."""

from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import faregate as fg
from faregate.node.every import MOST_MISSED, Schedule, read_times, tick_class

MINUTE, HOUR = 60_000, 3_600_000


def ms(text: str, zone: str = "UTC") -> int:
    return round(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def utc(tick: int) -> str:
    return datetime.fromtimestamp(tick / 1000, UTC).strftime("%Y-%m-%d %H:%M")


def following(when: Any, start: str, count: int, zone: str = "UTC") -> list[str]:
    times, _, _ = read_times(when, zone, "a schedule")
    found, at = [], ms(start)
    for _ in range(count):
        tick = times.after(at)
        assert tick is not None and tick > at
        found.append(utc(tick))
        at = tick
    assert [utc(tick) for tick in islice(times.before(at), count)] == found[::-1], "not the same ways back"
    return found


@pytest.mark.parametrize(
    ("when", "start", "expected"),
    [
        ("0 3 * * *", "2026-01-01 03:00", ["2026-01-02 03:00", "2026-01-03 03:00"]),
        ("*/20 9-10 * * *", "2026-01-01 09:30", ["2026-01-01 09:40", "2026-01-01 10:00", "2026-01-01 10:20"]),
        ("0 0 29 2 *", "2026-01-01 00:00", ["2028-02-29 00:00", "2032-02-29 00:00"]),
        ("0 0 31 * *", "2026-01-31 00:00", ["2026-03-31 00:00", "2026-05-31 00:00"]),
        ("0 12 * * MON-FRI", "2026-01-02 12:00", ["2026-01-05 12:00", "2026-01-06 12:00"]),
        ("0 12 13 * FRI", "2026-02-01 00:00", ["2026-02-06 12:00", "2026-02-13 12:00", "2026-02-20 12:00"]),
        ("30 4 1,15 JAN,JUL *", "2026-01-01 04:30", ["2026-01-15 04:30", "2026-07-01 04:30"]),
        ("0 0 * * 7", "2026-01-01 00:00", ["2026-01-04 00:00", "2026-01-11 00:00"]),
        ("  5   * * * * ", "2026-01-01 00:00", ["2026-01-01 00:05", "2026-01-01 01:05"]),
    ],
)
def test_cron(when: str, start: str, expected: list[str]) -> None:
    assert following(when, start, len(expected)) == expected


def test_a_period_is_the_same_in_every_process() -> None:
    assert following(90, "2026-01-01 00:00", 2) == ["2026-01-01 00:01", "2026-01-01 00:03"]
    assert following(timedelta(hours=6), "2026-01-01 05:59", 2) == ["2026-01-01 06:00", "2026-01-01 12:00"]


def test_what_runs_once_a_day_runs_once_on_the_days_of_daylight_saving() -> None:
    # In Madrid 02:00 to 03:00 is left out on 2026-03-29, and comes twice on 2026-10-25.
    spring = following("30 2 * * *", "2026-03-27 12:00", 3, "Europe/Madrid")
    assert spring == ["2026-03-28 01:30", "2026-03-29 01:00", "2026-03-30 00:30"], "when the clock goes on, at 3:00"
    autumn = following("30 2 * * *", "2026-10-23 12:00", 3, "Europe/Madrid")
    assert autumn == ["2026-10-24 00:30", "2026-10-25 00:30", "2026-10-26 01:30"], "in the first of the two hours"


def test_what_runs_every_hour_follows_the_time_that_passes() -> None:
    spring = following("0 * * * *", "2026-03-28 23:30", 4, "Europe/Madrid")
    assert spring == [f"2026-03-29 0{hour}:00" for hour in range(4)]
    autumn = following("0 * * * *", "2026-10-24 22:30", 4, "Europe/Madrid")
    assert autumn == ["2026-10-24 23:00", *(f"2026-10-25 0{hour}:00" for hour in range(3))]


def test_two_ticks_that_daylight_saving_puts_into_one_moment_are_one() -> None:
    assert following("0 2,3 * * *", "2026-03-28 12:00", 2, "Europe/Madrid") == ["2026-03-29 01:00", "2026-03-30 00:00"]


def test_an_hour_that_comes_twice_is_over_when_it_has_come_once() -> None:
    times, _, _ = read_times("30 2 * * *", "Europe/Madrid", "a schedule")
    in_the_second_hour = ms("2026-10-25 01:10")
    assert utc(times.after(in_the_second_hour) or 0) == "2026-10-26 01:30"


def schedule(when: Any, missed: Any) -> Schedule:
    times, text, zone = read_times(when, "UTC", "a schedule")
    return Schedule("nightly", text, zone, missed, times, tick_class("nightly", "shop"))


NIGHTS = [ms(f"2026-01-0{day} 03:00") for day in range(1, 8)]


@pytest.mark.parametrize(
    ("missed", "now", "made"),
    [
        ("last", NIGHTS[3] + HOUR, NIGHTS[3:4]),
        ("all", NIGHTS[3] + HOUR, NIGHTS[1:4]),
        ("skip", NIGHTS[3] + HOUR, []),
        ("skip", NIGHTS[3] + MINUTE // 2, NIGHTS[3:4]),
        ("last", NIGHTS[3], NIGHTS[3:4]),
        ("all", NIGHTS[1] - 1, []),
        ("last", NIGHTS[0] - HOUR, []),
    ],
)
def test_missed_ticks(missed: str, now: int, made: list[int]) -> None:
    assert schedule("0 3 * * *", missed).due(NIGHTS[0], now) == made


def test_what_is_made_up_for_is_bounded() -> None:
    now = NIGHTS[6]
    found = schedule("* * * * *", "all").due(NIGHTS[0], now)
    assert found == [now - MINUTE * back for back in reversed(range(MOST_MISSED))]


def declared(when: Any, **options: Any) -> fg.Node:
    node = fg.Node("shop")

    @node.every(when, **options)
    async def nightly(tick: fg.Tick) -> None: ...

    return node


@pytest.mark.parametrize(
    ("when", "options", "said"),
    [
        ("0 3 * *", {}, "has 4 fields, and cron has 5"),
        ("0 0 3 * * *", {}, "has 6 fields, and cron has 5"),
        ("61 3 * * *", {}, "Bad minute"),
        ("0 0 31 2 *", {}, "no cron expression|never comes"),
        ("x", {}, "1 fields"),
        (0.5, {}, "from 1 s on"),
        (True, {}, "takes a cron expression"),
        (None, {}, "takes a cron expression"),
        (-1, {}, "seconds"),
        (60, {"tz": "Europe/Madrid"}, "same in every time zone"),
        ("0 3 * * *", {"tz": "Europe/Nowhere"}, "no time zone 'Europe/Nowhere'"),
        ("0 3 * * *", {"tz": "../etc"}, "no time zone"),
        ("0 3 * * *", {"tz": 2}, "tz is the name"),
        ("0 3 * * *", {"missed": "some"}, "'skip', 'last' or 'all'"),
        ("0 3 * * *", {"name": "a b"}, "not a valid name"),
    ],
)
def test_what_is_refused_at_declaration(when: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=said):
        declared(when, **options)


def test_a_schedule_has_one_function_and_a_handler_that_takes_a_tick() -> None:
    node = declared("0 3 * * *")
    with pytest.raises(fg.HandlerConflict, match="'nightly' already"):

        @node.every(60)
        async def nightly(tick: fg.Tick) -> None: ...

    with pytest.raises(fg.WrongSignature):

        @node.every(60, name="other")
        async def other(tick: fg.Event) -> None: ...


def test_annotations_may_name_what_is_local_where_the_function_is_declared() -> None:
    class Local:
        pass

    node = fg.Node("shop")

    @node.every(60)
    async def nightly(tick: fg.Tick, local: "Local") -> None: ...

    [subscription] = node.subscriptions.values()
    assert subscription.handler.extra == (Local,)
