"""What a load measures: when messages were confirmed and handled, and how long that took. Two numbers a message."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

_WIDTHS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_MOST_WINDOWS = 60
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


class Durations:
    """When something ended, in the order in which it did, and how many seconds it had taken."""

    def __init__(self) -> None:
        self.at = array("d")
        self.took = array("d")

    def add(self, at: float, took: float) -> None:
        self.at.append(at)
        self.took.append(took)

    def since(self, start: float) -> "Durations":
        """Those that began at that moment or later."""
        found = Durations()
        for at, took in zip(self.at, self.took, strict=True):
            if at - took >= start:
                found.add(at, took)
        return found

    def summary(self) -> dict[str, float | int | None]:
        ordered = sorted(self.took)
        found: dict[str, float | int | None] = {"count": len(ordered)}
        found |= {name: percentile(ordered, share) for name, share in _PERCENTILES.items()}
        return found | {"max": ordered[-1] if ordered else None}


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that is at least as large as that share of all."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * len(ordered) * 1000) // 1000) - 1))]


class Meter:
    def __init__(self) -> None:
        self.published = Durations()
        self.handled: dict[tuple[str, str], Durations] = {}
        """By node and type; also what handlers sent."""
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        """What publishing failed with, by the first line."""
        self.late = Durations()
        """How long after its turn a message was sent, where there is a rate."""

    def ended(self, node: str, type: str, at: float, took: float) -> None:
        found = self.handled.get((node, type))
        if found is None:
            found = self.handled[node, type] = Durations()
        found.add(at, took)


def windows(start: float, end: float, series: dict[str, Durations]) -> tuple[float, list[dict[str, Any]]]:
    """The time between, cut into equal windows: how wide they are, and for each what ended in it. A last part that is
    no whole window is left out, as its rate would mislead."""
    span = max(end - start, 0.0)
    width = next((width for width in _WIDTHS if span / width <= _MOST_WINDOWS), _WIDTHS[-1])
    found = []
    for number in range(int(span / width)):
        left, right = start + number * width, start + (number + 1) * width
        row: dict[str, Any] = {"second": round(number * width, 3)}
        for name, durations in series.items():
            first, last = bisect_left(durations.at, left), bisect_left(durations.at, right)
            took = sorted(durations.took[first:last])
            row[name] = (last - first) / width
            row |= {f"{name}_p50": percentile(took, 0.5), f"{name}_p99": percentile(took, 0.99)}
        found.append(row)
    return width, found


def merged(parts: Iterable[Durations]) -> Durations:
    """All of them, in the order in which they ended."""
    found = Durations()
    for at, took in sorted(pair for part in parts for pair in zip(part.at, part.took, strict=True)):
        found.add(at, took)
    return found
