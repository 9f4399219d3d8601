"""How often a run looks for messages, how far it has read, and what it tells of itself.

    CHECKPOINT/commits/N      batch N is done
    CHECKPOINT/offsets/N      where it ended: the last line, as the source wrote it

Only a checkpoint in a folder of this machine can be looked at.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from faregate.errors import ConfigurationError
from faregate.units import parse_seconds


class RunProgress(NamedTuple):
    """What one batch came to."""

    batch: int | None
    """None for a run of parked messages between batches."""
    outcomes: dict[str, int]
    """handled, skipped, filtered, duplicate, dead; redelivered (failed and parked), parked (behind another),
    scheduled."""
    sent: int
    """Outgoing messages."""
    parked: int
    """How many messages are parked now."""
    low_water: int
    """Below this offset everything is handled, dead or parked."""
    seconds: float


def parse_trigger(given: str | float) -> dict[str, Any]:
    """The arguments of Spark's `trigger`: for "available-now", or how often to look. A plain number is seconds."""
    if given == "available-now":
        return {"availableNow": True}
    if isinstance(given, bool):
        raise ConfigurationError(f"trigger {given!r}: write available-now, or how often to look, such as 5s")
    seconds = parse_seconds(str(given), "trigger: available-now, or how often to look;", bare=True)
    return {"processingTime": f"{max(1, round(seconds * 1000))} milliseconds"}


def committed_end(checkpoint: str) -> int:
    """The offset behind the last batch that is done; 0 when there is none, or nobody knows."""
    parts = urlsplit(checkpoint)
    if parts.scheme not in ("", "file"):
        return 0
    folder = Path(parts.path)
    try:
        done = max((int(each.name) for each in (folder / "commits").iterdir() if each.name.isdigit()), default=None)
        if done is None:
            return 0
        return int(json.loads((folder / "offsets" / str(done)).read_text().splitlines()[-1])["0"])
    except (OSError, ValueError, KeyError, IndexError):
        return 0


def end_of(progress: Any) -> int:
    """Where a batch ended, by what Spark tells of it."""
    ends = [each["endOffset"] for each in progress["sources"]]
    numbers = [json.loads(end) if isinstance(end, str) else end for end in ends]
    return max((int(each.get("0", 0)) for each in numbers if isinstance(each, dict)), default=0)
