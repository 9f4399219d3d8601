"""What must be measured while it happens: how long handlers take, how often they fail, what is published.

Rules kept here:
- All else that is known of a bus is counted anyway, and read when somebody asks (`metrics.py`).
- Numbers are kept here, in lists and dictionaries, and handed on when they are read: to record one value with the SDK
  of OpenTelemetry takes longer than to handle a message.
- Only the event loop's thread writes them. Whoever reads them from another may see one message more or less.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from faregate.core.context import Context
from faregate.core.handler import Call
from faregate.core.observer import Observer, Publish
from faregate.message import Envelope
from faregate.node.subscription import Subscription

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the durations that are counted together, in seconds."""


class Tries:
    """The tries of the handler of one subscription."""

    __slots__ = ("buckets", "failures", "place", "retries", "seconds")

    def __init__(self, place: tuple[str, str, str]) -> None:
        self.place = place
        """Node, type and source."""
        self.buckets = [0] * (len(BOUNDS) + 1)
        """How many took up to each bound, and behind that how many took longer."""
        self.seconds = 0.0
        self.retries = 0
        """How many of them were not the first one of their message here."""
        self.failures: Counter[str] = Counter()
        """By the class of the error."""

    def add(self, seconds: float, attempt: int) -> None:
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds
        if attempt > 1:
            self.retries += 1


class Measuring(Observer):
    def __init__(self, on_failed_try: Callable[[Context, Exception], None] | None = None) -> None:
        self._on_failed_try = on_failed_try
        self._tries: dict[tuple[str, str, str], Tries] = {}
        self.published: Counter[tuple[str, str]] = Counter()
        """By node and type: what the transport confirmed."""

    @property
    def tries(self) -> list[Tries]:
        """How long the tries of each subscription took."""
        return list(self._tries.values())

    def around_try(self, subscription: Subscription, call: Call) -> Call:
        place = subscription.node, subscription.message_type.wire, subscription.source or ""
        tries = self._tries.setdefault(place, Tries(place))
        tell = self._on_failed_try

        async def measured(ctx: Context, first: Any) -> Any:
            begin = perf_counter()
            try:
                result = await call(ctx, first)
            except Exception as exc:  # anything else is no end of a try: it runs again, or the process stops
                tries.failures[type(exc).__name__] += 1
                tries.add(perf_counter() - begin, ctx._attempt)
                if tell is not None:
                    tell(ctx, exc)
                raise
            tries.add(perf_counter() - begin, ctx._attempt)
            return result

        return measured

    def around_transport(self, publish: Publish) -> Publish:
        published = self.published

        async def counted(envelopes: Sequence[Envelope]) -> None:
            await publish(envelopes)
            for envelope in envelopes:
                published[envelope.source, envelope.type] += 1

        return counted
