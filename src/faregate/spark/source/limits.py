"""How far one batch of a stream goes.

Rules kept here:
- What a limit allows is shared evenly by the journals that have messages. What one does not need, the others get.
- At least one message of each is read: a limit that is too small must not stop a stream, or starve a journal.
"""

from dataclasses import dataclass

import pyarrow.compute as pc

from faregate.ports.log import LogTransport, is_outlined

MOST_STORED = 512 * 1024 * 1024
"""Of one batch where handlers follow: what they send is one unit for a journal, which takes a gigabyte at the most. A
batch that is planned stays as it is."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is there to read of one partition."""

    source: LogTransport
    begin: int
    end: int

    @property
    def count(self) -> int:
        return max(0, self.end - self.begin)


def within(waiting: dict[str, Waiting], most_rows: int | None, most_bytes: int | None) -> dict[str, int]:
    """Where a batch ends, by partition, so that it has no more messages, and no more bytes of bodies."""
    ends = {name: each.end for name, each in waiting.items()}
    ready = sorted((name for name in waiting if waiting[name].count), key=lambda name: (waiting[name].count, name))
    for done, name in enumerate(ready):
        each, shares = waiting[name], len(ready) - done
        if most_rows is not None:
            ends[name] = min(ends[name], each.begin + max(1, most_rows // shares))
        if most_bytes is not None:
            ends[name], used = _end_within(each.source, each.begin, ends[name], max(1, most_bytes // shares))
            most_bytes = max(0, most_bytes - used)
        if most_rows is not None:
            most_rows = max(0, most_rows - (ends[name] - each.begin))
    return ends


def _end_within(source: LogTransport, start: int, end: int, budget: int) -> tuple[int, int]:
    """The first offset whose message would take the bodies over the budget, and the bytes before it; one message
    always fits."""
    used, first = 0, True
    for batch in source.batches(start, end):
        lengths = pc.fill_null(pc.binary_length(batch.column("payload")), 0)
        running = pc.cumulative_sum(pc.cast(lengths, "int64"))
        if used + running[-1].as_py() > budget:
            fitting = pc.sum(pc.less_equal(running, budget - used)).as_py()
            cut: int = batch.column("offset")[fitting].as_py()
            if first and not fitting:
                return cut + 1, running[0].as_py()
            return cut, used + (running[fitting - 1].as_py() if fitting else 0)
        used += running[-1].as_py()
        first = False
    return end, used


def end_by_size(source: LogTransport, start: int, end: int, budget: int) -> int:
    """About where messages end that take so many bytes in the log, without reading them; one always fits. A log that
    cannot tell sets no limit."""
    if not is_outlined(source):
        return end
    for stretch in source.stretches(start, end):
        stored = stretch.stored or 0
        if stored > budget:
            length = stretch.end - stretch.start
            return min(end, max(start + 1, stretch.start + length * budget // stored))
        budget -= stored
    return end
