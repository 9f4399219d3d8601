"""When a recurring function of a node is called: by a cron expression, or every so many seconds.

Rules kept here:
- A tick is a moment on the wall clock, the same in every process: cron in its time zone, periods as multiples since the
  epoch. Ticks are milliseconds since the epoch, and grow.
- Daylight saving, as in Debian's cron: what runs at an hour of its own runs once a day. In the hour that is left out it
  runs when the clock goes on, in the hour that comes twice it runs in the first. What runs every hour, or more often,
  follows the time that passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Literal, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from faregate.errors import ConfigurationError, check_delay
from faregate.message import Command, MessageMeta, check_name

Missed = Literal["skip", "last", "all"]
MOST_MISSED = 100
"""So many missed ticks are made up for, at most: the latest."""
GRACE_MS = 60_000
"""A tick that is no later than this has not been missed."""
_SHORTEST = 1.0


class Tick(Command):
    """What a function that is declared with `@node.every(…)` is called with. Each schedule has a class of its own; its
    wire name is `tick-` and the name of the schedule."""

    schedule: str
    due: datetime
    """When it was due, in UTC; it may be called later."""


class Times(Protocol):
    """The ticks of a schedule, in milliseconds since the epoch."""

    def after(self, moment: int) -> int | None:
        """The first one that is later; None: there is none any more."""

    def before(self, moment: int) -> Iterator[int]:
        """Those up to that moment, the latest first."""


@dataclass(frozen=True, slots=True)
class Schedule:
    name: str
    when: str
    """As people write it."""
    zone: str
    missed: Missed
    times: Times
    message: type[Tick]

    def due(self, last: int, now: int) -> list[int]:
        """Which ticks behind the last one are made now, in order."""
        found: list[int] = []
        for tick in self.times.before(now):
            if tick <= last or len(found) == (MOST_MISSED if self.missed == "all" else 1):
                break
            found.append(tick)
        if self.missed == "skip" and found and found[0] < now - GRACE_MS:
            return []
        return found[::-1]

    def tick(self, at: int) -> Tick:
        return self.message(schedule=self.name, due=datetime.fromtimestamp(at / 1000, UTC))

    def key(self, at: int) -> str:
        """The idempotency key of a tick: the same in every process."""
        return f"{self.name}@{at}"


@dataclass(frozen=True, slots=True)
class Period:
    milliseconds: int

    def after(self, moment: int) -> int | None:
        return (moment // self.milliseconds + 1) * self.milliseconds

    def before(self, moment: int) -> Iterator[int]:
        tick = moment // self.milliseconds * self.milliseconds
        while tick > 0:
            yield tick
            tick -= self.milliseconds


@dataclass(frozen=True, slots=True)
class Cron:
    expression: str
    zone: tzinfo

    def after(self, moment: int) -> int | None:
        return next((tick for tick in self._walk(moment) if tick > moment), None)

    def before(self, moment: int) -> Iterator[int]:
        last = moment + 1
        for tick in self._walk(moment + 1000, reverse=True):  # it begins with the whole second before
            if tick < last:  # two that daylight saving puts into one moment are one
                last = tick
                yield tick

    def _walk(self, moment: int, *, reverse: bool = False) -> Iterator[int]:
        start = datetime.fromtimestamp(moment / 1000, UTC).astimezone(self.zone)
        for found in CronSim(self.expression, start, reverse=reverse):
            yield round(found.timestamp() * 1000)


def read_times(when: object, zone: object, what: str) -> tuple[Times, str, str]:
    """The ticks, and how people write them. Raises `ConfigurationError`."""
    if not isinstance(zone, str):
        raise ConfigurationError(f"{what}: tz is the name of a time zone, such as 'Europe/Madrid'; got {zone!r}")
    if isinstance(when, int | float | timedelta) and not isinstance(when, bool):
        seconds = check_delay(when, f"{what}: the seconds of every()")
        if seconds < _SHORTEST or seconds * 1000 != int(seconds * 1000):
            raise ConfigurationError(f"{what}: every() takes whole milliseconds, from 1 s on; got {seconds:g} s")
        if zone != "UTC":
            raise ConfigurationError(f"{what}: tz= is for cron; every {seconds:g} s is the same in every time zone")
        return Period(int(seconds * 1000)), f"every {seconds:g} s", zone
    if not isinstance(when, str):
        raise ConfigurationError(
            f"{what}: every() takes a cron expression such as '0 3 * * *', or seconds; got {when!r}"
        )
    if len(when.split()) != 5:
        raise ConfigurationError(
            f"{what}: {when!r} has {len(when.split())} fields, and cron has 5: minute, hour, day of the month, month, "
            "day of the week, for example '0 3 * * *'"
        )
    try:
        cron = Cron(" ".join(when.split()), UTC if zone == "UTC" else ZoneInfo(zone))
        if cron.after(0) is None:
            raise ConfigurationError(f"{what}: {when!r} never comes")
    except CronSimError as exc:
        raise ConfigurationError(f"{what}: {when!r} is no cron expression: {exc}") from exc
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise ConfigurationError(
            f"{what}: there is no time zone {zone!r} here; it takes names such as 'Europe/Madrid' (on a system without "
            "a time zone database: pip install tzdata)"
        ) from exc
    return cron, cron.expression, zone


def check_missed(given: object, what: str) -> Missed:
    if given == "skip" or given == "last" or given == "all":
        return given
    raise ConfigurationError(f"{what}: missed is 'skip', 'last' or 'all'; got {given!r}")


def tick_class(name: str, node: str) -> type[Tick]:
    """The message class of one schedule."""
    wire = check_name(f"tick-{name}", "the wire name of a schedule")
    made: Callable[..., type[Tick]] = MessageMeta  # type: ignore[assignment]
    return made(
        "Tick", (Tick,), {"__module__": __name__, "__qualname__": f"Tick.{node}.{name}"}, wire=wire, frozen=True
    )
