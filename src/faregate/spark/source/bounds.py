"""Where reading starts and ends, as users write it: `startingOffsets` and `endingOffsets`.

    earliest | latest | 17 | 2026-11-15T09:00:00Z | @1794733200 | {"0": 17}

A bare number is an offset; a time is ISO 8601 with its zone, or seconds since the epoch behind `@`, as `date` takes
them. A time without zone is refused: driver and executors may live in different ones. The JSON form names partitions;
a journal has one, "0", and of several journals each is one, by its folder. What a streaming query reports as its offset
is such a JSON, so it can be pasted.
"""

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from faregate.errors import ConfigurationError, OffsetGone
from faregate.ports.log import LogTransport

LOG_KEY = "log"
"""Beside the partitions, an offset of ours names the log that it belongs to."""

LogId = str | dict[str, str]
"""The id of a log; of several journals, the id of each by its folder."""

ALLOWED = (
    "'earliest', 'latest', an offset such as 17, a time such as 2026-11-15T09:00:00Z or @1794733200, "
    'or JSON by partition such as {"0": 17}'
)

ALLOWED_TIMES = "milliseconds since the epoch, as Kafka has them, or a time such as 2026-11-15T09:00:00Z or @1794733200"

_NUMBER = re.compile(r"\d{1,18}")
_SECONDS = re.compile(r"@(\d{1,12}(?:\.\d{1,9})?)")


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message appended then or later."""

    seconds: float


Bound = Literal["earliest", "latest"] | int | AtTime


@dataclass(frozen=True, slots=True)
class Bounds:
    """One bound for all partitions, or one for each."""

    everywhere: Bound | None = None
    by_partition: dict[str, Bound] = field(default_factory=dict)
    log: LogId | None = None
    """The log that the offsets were taken from, when they say so."""

    def of(self, partition: str) -> Bound:
        if self.everywhere is not None:
            return self.everywhere
        return self.by_partition[partition]


EARLIEST, LATEST = Bounds("earliest"), Bounds("latest")


class MalformedBound(ValueError):
    """The text is none of the forms; its message says what is wrong with it."""


def parse_bounds(text: str) -> Bounds:
    """Raises `MalformedBound`."""
    stripped = text.strip()
    if not stripped.startswith("{"):
        return Bounds(_parse(stripped))
    try:
        found = json.loads(stripped)
    except ValueError as exc:
        raise MalformedBound(f"it is not JSON: {exc}") from exc
    log = found.pop(LOG_KEY, None)
    if not found:
        raise MalformedBound("it names no partition")
    by_partition = {name: _parse(value) for name, value in found.items()}
    return Bounds(None, by_partition, log if log is None or isinstance(log, dict) else str(log))


def parse_time(text: str) -> Bounds:
    """A bound that is a time; a bare number is one here. Raises `MalformedBound`."""
    stripped = text.strip()
    if _NUMBER.fullmatch(stripped):
        return Bounds(AtTime(int(stripped) / 1000))
    found = _parse(stripped)
    if not isinstance(found, AtTime):
        raise MalformedBound(f"{stripped!r} is no time")
    return Bounds(found)


def _parse(value: Any) -> Bound:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise MalformedBound(f"an offset is not negative, as {value} is")
        return value
    if not isinstance(value, str):
        raise MalformedBound(f"{value!r} is no bound")
    if value.lower() in ("earliest", "latest"):
        return "earliest" if value.lower() == "earliest" else "latest"
    if _NUMBER.fullmatch(value):
        return int(value)
    if seconds := _SECONDS.fullmatch(value):
        return AtTime(float(seconds[1]))
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise MalformedBound(f"{value!r} is no bound") from None
    if moment.tzinfo is None:
        raise MalformedBound(f"the time {value} has no zone: write {moment.isoformat()}Z for UTC")
    return AtTime(moment.timestamp())


def resolve(bound: Bound, log: LogTransport) -> int:
    """The offset that a bound stands for now. A number stands for itself, whether it is there or not."""
    if bound == "earliest":
        return log.earliest()
    if bound == "latest":
        return log.latest()
    if isinstance(bound, AtTime):
        return log.offset_at(bound.seconds)
    return bound


def check_partitions(bounds: Bounds, option: str, partitions: list[str], log: LogId) -> None:
    """The JSON form must speak of this log, and of all of its partitions."""
    if bounds.log is not None and bounds.log != log and isinstance(bounds.log, type(log)):
        raise ConfigurationError(f"{option} holds offsets of the log {bounds.log}, and this is the log {log}")
    if bounds.everywhere is None and sorted(bounds.by_partition) != sorted(partitions):
        raise ConfigurationError(
            f"{option} must name every partition of the log once ({', '.join(sorted(partitions))}); it names "
            f"{', '.join(sorted(bounds.by_partition))}"
        )


def lost(who: str, wanted: int, log: LogTransport) -> OffsetGone | None:
    """What is said of an offset that is not in the log (any more); `who` asks for it."""
    earliest, latest = log.earliest(), log.latest()
    if wanted < earliest:
        return OffsetGone(
            f"{who} asks for offset {wanted} of {log.name}, which now begins at {earliest}: the messages from {wanted} "
            f"to {earliest - 1} were removed by retention before they were read. Start from {earliest} or later, or "
            "set failOnDataLoss=false to go on without them"
        )
    if wanted > latest:
        return OffsetGone(
            f"{who} asks for offset {wanted} of {log.name}, which ends at {latest}: it was restored from an older "
            "state, or the offset was never there"
        )
    return None
