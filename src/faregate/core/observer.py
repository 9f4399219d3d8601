"""Whoever looks at the work of a bus or of a Spark run: the one port between the core and `faregate.observe`.

Rules kept here:
- An observer is asked when something is compiled (a subscription's pipeline, a sender, a dispatcher), and hands back
  what it was given, or the same with its own around it. So the core has no test and no call for it: without observers
  it runs what it ran before.
- What it adds must return or raise exactly what it wraps. It may not look at what a handler returns. What its own
  telemetry raises meanwhile goes to `Mishaps`: a message that is out, or handled, stays so.
- The first observer is the outermost.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from faregate.core.handler import Call
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.node.subscription import Subscription
from faregate.ports import faults

log = logging.getLogger("faregate.bus")

Step = Callable[..., Awaitable[None]]
"""A step of the pipeline, called with the context of a message (twice, where a middleware calls it)."""
Publish = Callable[[Sequence[Envelope]], Awaitable[None]]

TRACESTATE = "tracestate"
"""The header for the second half of W3C's trace context; the first is a field of the envelope."""


class TraceContext(NamedTuple):
    """W3C's trace context of what caused a message, as it travels with it."""

    traceparent: str
    tracestate: str | None = None


def passed_on(cause: Envelope) -> TraceContext | None:
    """What a message carries into those that its handler sends, where nobody here traces."""
    if cause.traceparent is None:
        return None
    return TraceContext(cause.traceparent, cause.headers.get(TRACESTATE))


class Observer:
    """Leaves everything as it is. A subclass overrides what it wants to see."""

    def around_handling(self, subscription: Subscription, step: Step) -> Step:
        """Around all that is done to handle a message in one run: resources, middlewares, its tries. It may give the
        context a `_trace`, which goes into what the handler sends."""
        return step

    def around_try(self, subscription: Subscription, call: Call) -> Call:
        """Around one try of the handler."""
        return call

    def around_publish(self, publish: Publish, *, outbox: bool = False) -> Publish:
        """Around publishing messages, straight away or through the outbox. `outbox`: around sending what was recorded
        there, by others than who runs now."""
        return publish

    def around_transport(self, publish: Publish) -> Publish:
        """Around the transport's own publish: what comes back from it is confirmed."""
        return publish

    def stamp(self, envelope: Envelope) -> None:
        """A message is recorded by code that has no bus (`fg.outbox`): give it the trace context at hand."""

    def watch(self, bus: Any) -> None:
        """This bus runs from now on."""

    def unwatch(self, bus: Any) -> None:
        """It does not any more."""


Observers = Sequence[Observer]

_ENDING = (KeyboardInterrupt, SystemExit, faults.Crash)
"""What is to end the process, wherever it is raised."""


class Mishaps:
    """What telemetry raises is told, and decides nothing. As a warning once for each place: one that fails for every
    message would fill the log."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, place: str, exc: BaseException) -> None:
        """Raises nothing but what is to end the process."""
        if isinstance(exc, _ENDING) or (isinstance(exc, BaseExceptionGroup) and exc.subgroup(_ENDING)):
            raise exc
        level = logging.DEBUG if place in self._told else logging.WARNING
        self._told.add(place)
        with suppress(Exception):  # who exports log records may be down with the rest
            log.log(level, "telemetry failed: %s. Messages go on without it", place, exc_info=exc)

    def guard(self, place: str, call: Callable[..., object], *args: object) -> None:
        """Call what may fail. For what is done seldom; around the rest stands a `try` of its own, which costs less."""
        try:
            call(*args)
        except BaseException as exc:
            self.tell(place, exc)


def check_observers(given: object) -> Observers:
    """What `observe=` takes: one, several or none. Raises `ConfigurationError`."""
    found = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    for each in found:
        if not isinstance(each, Observer):
            raise ConfigurationError(
                f"observe= takes fg.observe.OpenTelemetry(), fg.observe.Prometheus() or a list of such; got {each!r}"
            )
    if len({id(each) for each in found}) < len(found):
        raise ConfigurationError("observe= has the same observer twice, which would count everything twice: give one")
    return found


def watch(observers: Observers, bus: Any) -> None:
    """Tell them that it runs. One that cannot watch it keeps it from nothing."""
    for observer in observers:
        Mishaps().guard(f"{type(observer).__name__} cannot watch the bus", observer.watch, bus)


def unwatch(observers: Observers, bus: Any) -> None:
    """Tell them that it does not any more."""
    for observer in observers:
        Mishaps().guard(f"{type(observer).__name__} cannot let go of the bus", observer.unwatch, bus)


def observed(observers: Observers, publish: Publish, *, outbox: bool = False) -> Publish:
    """What publishes, with the observers around it."""
    for observer in reversed(observers):
        publish = observer.around_publish(publish, outbox=outbox)
    return publish


def confirmed(observers: Observers, publish: Publish) -> Publish:
    """The transport's own publish, with the observers around it."""
    for observer in reversed(observers):
        publish = observer.around_transport(publish)
    return publish
