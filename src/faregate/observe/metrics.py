"""The metrics of a bus, in one table, whoever exports them. They are read when somebody asks, and cost nothing else.

What is `measured` (how long tries took, failures, retries, what was published) is there only where the bus has an
observer that measures. How much waits in a queue is asked of the transport, on the event loop of the bus (`refresh`);
what it said last is what is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from faregate.errors import FaregateError
from faregate.observe.measuring import BOUNDS, Measuring, Tries
from faregate.ports.schemes import public_name

if TYPE_CHECKING:
    from faregate.bus.bus import Bus, QueueDepth
    from faregate.ports.presence import OutboxStatus

log = logging.getLogger("faregate.bus")

_REFRESH_SECONDS = 2.0
OUTCOMES = ("handled", "skipped", "duplicate", "filtered", "redelivered", "dead")
_PLACE = ("node", "type", "source")


class Metric(NamedTuple):
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...]


METRICS = {
    "messages": Metric("counter", "{message}", "Messages, by how they ended.", (*_PLACE, "outcome")),
    "waiting_messages": Metric("gauge", "{message}", "Messages that wait to be handled.", _PLACE),
    "busy_lanes": Metric("gauge", "{lane}", "Lanes that are at work.", _PLACE),
    "paused": Metric("gauge", "1", "1 while a subscription is paused, else 0.", _PLACE),
    "outbox_messages": Metric("gauge", "{message}", "Messages in the outbox that wait to be sent.", ("store",)),
    "outbox_oldest_seconds": Metric("gauge", "s", "For how long the oldest of them waits.", ("store",)),
    "alarms": Metric("counter", "{alarm}", "Alarms, by kind.", ("kind",)),
    # measured:
    "try_seconds": Metric("histogram", "s", "How long the tries of handlers took.", _PLACE),
    "retries": Metric("counter", "{try}", "Tries that were not the first of their message.", _PLACE),
    "failures": Metric("counter", "{try}", "Tries that failed, by the class of the error.", (*_PLACE, "error")),
    "published": Metric("counter", "{message}", "Messages that the transport confirmed.", ("node", "type")),
}

Sample = tuple[tuple[str, ...], float]
"""The values of the labels, and the value."""


class BusMetrics:
    """Of one running bus. Made on its event loop."""

    def __init__(self, bus: Bus, measuring: Measuring | None) -> None:
        self.bus = bus
        self._measuring = measuring
        self._loop = asyncio.get_running_loop()
        self._waiting: list[QueueDepth] = []

    async def refresh(self) -> None:
        """Ask the transport how much waits."""
        try:
            async with asyncio.timeout(_REFRESH_SECONDS):
                self._waiting = await self.bus.waiting()
        except (FaregateError, TimeoutError) as exc:
            self._waiting = []
            log.debug("how much waits is not known now: %s", exc)

    def refresh_from_thread(self) -> None:
        """The same for whoever reads in a thread of its own; on the event loop nobody can wait for it."""
        if asyncio._get_running_loop() is self._loop or not self._loop.is_running():
            return
        asked = asyncio.run_coroutine_threadsafe(self.refresh(), self._loop)
        try:
            asked.result(2 * _REFRESH_SECONDS)
        except TimeoutError:
            asked.cancel()

    @property
    def tries(self) -> Sequence[Tries]:
        """For the histogram."""
        return () if self._measuring is None else self._measuring.tries

    def read(self, name: str) -> Iterator[Sample]:
        """The samples of a counter or a gauge."""
        if name in ("outbox_messages", "outbox_oldest_seconds"):
            for store, found in self._outboxes().items():
                sizes, ages = [each.waiting for each in found], [each.oldest_seconds or 0.0 for each in found]
                yield (store,), sum(sizes) if name == "outbox_messages" else max(ages)
        elif name == "alarms":
            yield from (((kind,), count) for kind, count in sorted(self.bus.alarms.items()))
        elif name == "waiting_messages":
            for depth in self._waiting:
                if depth.waiting is not None:
                    yield (depth.node, depth.type, depth.source or ""), depth.waiting
        elif name in ("messages", "busy_lanes", "paused"):
            yield from self._counted(name)
        elif self._measuring is not None:
            yield from _measured(self._measuring, name)

    def _outboxes(self) -> dict[str, list[OutboxStatus]]:
        """By what a page calls their stores: files of one name in two folders are one to it."""
        found: dict[str, list[OutboxStatus]] = {}
        for outbox in self.bus.outboxes():
            found.setdefault(public_name(outbox.store), []).append(outbox)
        return found

    def _counted(self, name: str) -> Iterator[Sample]:
        for counts in self.bus.counts():
            place = (counts.node, counts.type, counts.source or "")
            if name == "busy_lanes":
                yield place, counts.busy
            elif name == "paused":
                yield place, counts.paused
            else:
                ends = counts._asdict()
                yield from (((*place, each), ends[each]) for each in OUTCOMES if each in ends)


def _measured(measuring: Measuring, name: str) -> Iterator[Sample]:
    if name == "published":
        yield from list(measuring.published.items())
        return
    for tries in measuring.tries:
        if name == "retries":
            yield tries.place, tries.retries
        else:
            yield from (((*tries.place, error), count) for error, count in list(tries.failures.items()))


def buckets(tries: Tries) -> list[tuple[str, float]]:
    """How many tries took up to each bound, as a histogram of Prometheus has them: each with all shorter ones."""
    found, total = [], 0
    for bound, count in zip([*map(str, BOUNDS), "+Inf"], list(tries.buckets), strict=True):
        total += count
        found.append((bound, float(total)))
    return found
