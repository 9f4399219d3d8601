"""What the log says about a run: how much happened in each second, and how long orders took from end to end.

An order and everything it caused share a correlation id, so the log alone tells when it was placed and when shipped.
Copies of a message count once.
"""

from collections import Counter
from typing import NamedTuple

from faregate.ports.schemes import open_log

STEPS = {"OrderPlaced": "placed", "charge-card": "billed", "CardCharged": "charged", "OrderShipped": "shipped"}
"""The types of the shop, and what a message of each says has just happened."""
PERCENTS = (50, 95, 99)


class Timeline(NamedTuple):
    seconds: int
    steps: dict[str, list[int]]
    """For each step how many there were in each second."""
    latencies: list[tuple[float, ...] | None]
    """For each second the percentiles of the latencies of the orders that were shipped in it."""
    overall: tuple[float, ...]

    @property
    def messages(self) -> int:
        return sum(map(sum, self.steps.values()))


def read_timeline(log: str, began: float) -> Timeline:
    """Of the log with this URL."""
    counts: dict[str, Counter[int]] = {step: Counter() for step in STEPS.values()}
    placed: dict[str, float] = {}
    taken: dict[int, list[float]] = {}
    known: set[str] = set()
    last = 0
    for batch in open_log(log).batches():
        names = ("publication_id", "type", "correlation_id", "sent_at")
        for id, type, correlation, sent in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            if id in known:
                continue
            known.add(id)
            moment = sent if isinstance(sent, float) else sent.timestamp()
            second = max(0, int(moment - began))
            last = max(last, second)
            counts[STEPS[type]][second] += 1
            if type == "OrderPlaced":
                placed.setdefault(correlation, moment)
            elif type == "OrderShipped" and correlation in placed:
                taken.setdefault(second, []).append(moment - placed[correlation])
    every = [latency for found in taken.values() for latency in found]
    return Timeline(
        last + 1,
        {step: [found[second] for second in range(last + 1)] for step, found in counts.items()},
        [percentiles(taken[second]) if second in taken else None for second in range(last + 1)],
        percentiles(every) if every else (),
    )


def percentiles(values: list[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in PERCENTS)
