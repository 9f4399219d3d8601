"""Stretches of a log that tasks read in parallel.

Pure: the same bounds give the same ranges, whenever and wherever they are asked for.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pyspark.sql.datasource import InputPartition

TASK_MESSAGES = 250_000
"""What one task reads at the most: enough that starting it does not show, few enough to share the work."""
LEAST_HANDLED, MOST_HANDLED = 2_000, 500_000
"""Where handlers follow: fewer are not worth a task of their own, and starting one takes a while in three processes."""


@dataclass(frozen=True)
class OffsetRange(InputPartition):
    """The messages of one partition of the log from `start` up to, not including, `end`."""

    partition: str
    start: int
    end: int


def split(starts: dict[str, int], ends: dict[str, int], least: int, most: int = TASK_MESSAGES) -> list[OffsetRange]:
    """Even ranges of at most `most` messages, at least `least` of them where there are as many offsets, or a multiple
    of that: `least` tasks run at a time, and all of them should have work until the end."""
    lengths = {name: max(0, ends[name] - starts[name]) for name in sorted(ends)}
    total = sum(lengths.values())
    found: list[OffsetRange] = []
    for name, length in lengths.items():
        if not length:
            continue
        share = max(1, -(-least * length // total))
        pieces = min(length, share * -(-length // (most * share)))
        bounds = [starts[name] + length * number // pieces for number in range(pieces + 1)]
        found += [OffsetRange(name, first, last) for first, last in pairwise(bounds)]
    return found


def split_spans(spans: dict[str, list[tuple[int, int]]], least: int) -> list[OffsetRange]:
    """The same of what is to be read of each partition, from and up to. A range may reach over what lies between them:
    its task passes over that again."""
    lengths = {name: sum(end - start for start, end in found) for name, found in spans.items()}
    behind = {name: list(accumulate(end - start for start, end in found)) for name, found in spans.items()}

    def placed(name: str, count: int, at: int) -> int:
        """The offset where so many are before it, in the span of that number."""
        return spans[name][at][1] - behind[name][at] + count

    return [
        OffsetRange(
            name := each.partition,
            placed(name, each.start, bisect_right(behind[name], each.start)),
            placed(name, each.end, bisect_left(behind[name], each.end)),
        )
        for each in split(dict.fromkeys(lengths, 0), lengths, least)
    ]
