"""When a run looks for messages: "available-now", or every so often."""

from typing import Any

from faregate.errors import ConfigurationError
from faregate.units import parse_seconds


def parse_trigger(given: str | float) -> dict[str, Any]:
    """The arguments of Spark's `trigger`. A plain number is seconds."""
    if given == "available-now":
        return {"availableNow": True}
    if isinstance(given, bool):
        raise ConfigurationError(f"trigger {given!r}: write available-now, or how often to look, such as 5s")
    seconds = parse_seconds(str(given), "trigger: available-now, or how often to look;", bare=True)
    return {"processingTime": f"{max(1, round(seconds * 1000))} milliseconds"}
