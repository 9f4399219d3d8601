"""When a run looks for messages: "available-now", or every so often."""

import re
from typing import Any

from faregate.errors import ConfigurationError

_EVERY = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_trigger(given: str | float) -> dict[str, Any]:
    """The arguments of Spark's `trigger`. A plain number is seconds."""
    if given == "available-now":
        return {"availableNow": True}
    text = str(given)
    found = _EVERY.fullmatch(text) if not isinstance(given, bool) else None
    if found is None:
        raise ConfigurationError(
            f"trigger {given!r}: write available-now, or how often to look, such as 5s, 500ms, 1m, or seconds"
        )
    seconds = float(found[1]) * _SECONDS[found[2] or "s"]
    return {"processingTime": f"{max(1, round(seconds * 1000))} milliseconds"}
