"""Whoever looks at the work of a bus or of a Spark run: the one port between the core and `faregate.observe`.

Rules kept here:
- An observer is asked when something is compiled (a subscription's pipeline, a sender, a dispatcher), and hands back
  what it was given, or the same with its own around it. So the core has no test and no call for it: without observers
  it runs what it ran before.
- What it adds must return or raise exactly what it wraps. It may not look at what a handler returns.
- The first observer is the outermost.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from faregate.core.handler import Call
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.node.subscription import Subscription

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


def check_observers(given: object) -> Observers:
    """What `observe=` takes: one, several or none. Raises `ConfigurationError`."""
    found = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    for each in found:
        if not isinstance(each, Observer):
            raise ConfigurationError(
                f"observe= takes fg.observe.OpenTelemetry(), fg.observe.Prometheus() or a list of such; got {each!r}"
            )
    return found


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
