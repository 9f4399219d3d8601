"""Where reading starts and ends, as users write it: `startingOffsets` and `endingOffsets`.

    earliest | latest | 17 | 2026-11-15T09:00:00Z | @1794733200 | {"0": 17}

A bare number is an offset; a time is ISO 8601 with its zone, or seconds since the epoch behind `@`, as `date` takes
them. A time without zone is refused: driver and executors may live in different ones. The JSON form names partitions;
a journal has one, "0". What a streaming query reports as its offset is such a JSON, so it can be pasted.
"""

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from faregate.broker.journal.errors import OffsetGone
from faregate.errors import ConfigurationError
from faregate.ports.log import LogTransport

LOG_KEY = "log"
"""Beside the partitions, an offset of ours names the log that it belongs to."""

ALLOWED = (
    "'earliest', 'latest', an offset such as 17, a time such as 2026-11-15T09:00:00Z or @1794733200, "
    'or JSON by partition such as {"0": 17}'
)

_NUMBER = re.compile(r"\d{1,18}")
_EPOCH = re.compile(r"@(\d{1,12}(?:\.\d{1,9})?)")


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message appended then or later."""

    seconds: float


Position = Literal["earliest", "latest"] | int | AtTime


@dataclass(frozen=True, slots=True)
class Positions:
    """One position for all partitions, or one for each."""

    everywhere: Position | None = None
    by_partition: dict[str, Position] = field(default_factory=dict)
    log: str | None = None
    """The log that the offsets were taken from, when they say so."""

    def of(self, partition: str) -> Position:
        if self.everywhere is not None:
            return self.everywhere
        return self.by_partition[partition]


EARLIEST, LATEST = Positions("earliest"), Positions("latest")


class MalformedPosition(ValueError):
    """The text is none of the forms; its message says what is wrong with it."""


def parse_positions(text: str) -> Positions:
    """Raises `MalformedPosition`."""
    stripped = text.strip()
    if not stripped.startswith("{"):
        return Positions(_parse(stripped))
    try:
        found = json.loads(stripped)
    except ValueError as exc:
        raise MalformedPosition(f"it is not JSON: {exc}") from exc
    log = found.pop(LOG_KEY, None)
    if not found:
        raise MalformedPosition("it names no partition")
    return Positions(None, {name: _parse(value) for name, value in found.items()}, None if log is None else str(log))


def _parse(value: Any) -> Position:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise MalformedPosition(f"an offset is not negative, as {value} is")
        return value
    if not isinstance(value, str):
        raise MalformedPosition(f"{value!r} is no position")
    if value.lower() in ("earliest", "latest"):
        return "earliest" if value.lower() == "earliest" else "latest"
    if _NUMBER.fullmatch(value):
        return int(value)
    if epoch := _EPOCH.fullmatch(value):
        return AtTime(float(epoch[1]))
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise MalformedPosition(f"{value!r} is no position") from None
    if moment.tzinfo is None:
        raise MalformedPosition(f"the time {value} has no zone: write {value}Z for UTC")
    return AtTime(moment.timestamp())


def resolve(position: Position, log: LogTransport) -> int:
    """The offset that a position stands for now. A number stands for itself, whether it is there or not."""
    if position == "earliest":
        return log.earliest()
    if position == "latest":
        return log.latest()
    if isinstance(position, AtTime):
        return log.offset_at(position.seconds)
    return position


def check_partitions(positions: Positions, option: str, partitions: list[str], log: str) -> None:
    """The JSON form must speak of this log, and of all of its partitions."""
    if positions.log is not None and positions.log != log:
        raise ConfigurationError(f"{option} holds offsets of the log {positions.log}, and this is the log {log}")
    if positions.everywhere is None and sorted(positions.by_partition) != sorted(partitions):
        raise ConfigurationError(
            f"{option} must name every partition of the log once ({', '.join(sorted(partitions))}); it names "
            f"{', '.join(sorted(positions.by_partition))}"
        )


def gone(option_or_checkpoint: str, wanted: int, earliest: int, name: str) -> OffsetGone:
    """What is said when messages were removed before they were read."""
    return OffsetGone(
        f"{option_or_checkpoint} asks for offset {wanted} of {name}, which now begins at {earliest}: the messages from "
        f"{wanted} to {earliest - 1} were removed by retention before they were read. Start from {earliest} or later, "
        "or set failOnDataLoss=false to go on without them"
    )


def not_there(option_or_checkpoint: str, wanted: int, latest: int, name: str) -> OffsetGone:
    """What is said when the log ends before the wanted offset."""
    return OffsetGone(
        f"{option_or_checkpoint} asks for offset {wanted} of {name}, which ends at {latest}: it was restored from an "
        "older state, or the offset was never there"
    )
