"""What a run tells of itself."""

import json
from typing import Any, NamedTuple

from pyspark.sql.streaming.query import StreamingQuery


class RunProgress(NamedTuple):
    """What one batch came to."""

    batch: int | None
    """None for a run of parked messages between batches."""
    outcomes: dict[str, int]
    """handled, skipped, duplicate, dead; redelivered (failed and parked), parked (behind another), scheduled."""
    sent: int
    """Outgoing messages."""
    parked: int
    """How many messages are parked now."""
    low_water: int
    """Below this offset everything is handled, dead or parked."""
    seconds: float


def end_offset(query: StreamingQuery) -> int:
    """Where the last finished batch of a query ended; 0 when there is none."""
    progress: Any = query.lastProgress
    return 0 if progress is None else end_of(progress)


def end_of(progress: Any) -> int:
    """Where a batch ended, by what Spark tells of it."""
    ends = [each["endOffset"] for each in progress["sources"]]
    numbers = [json.loads(end) if isinstance(end, str) else end for end in ends]
    return max((int(each.get("0", 0)) for each in numbers if isinstance(each, dict)), default=0)
