"""Topics: which queues a publication goes to.

A publication that names its recipients goes to their queues only, by a partial route of its topic.
"""

from itertools import count
from typing import NamedTuple

from faregate.broker.queue import Queue
from faregate.message import Envelope
from faregate.ports.queue import Binding

Topic = tuple[str, str | None, str]
"""(kind, source of an event or destination of a command, type)"""


class Route(NamedTuple):
    """Where one topic leads: the queues, and the nodes that own them."""

    queues: tuple[Queue, ...]
    recipients: tuple[str, ...]
    number: int
    """Given once; another set of queues is another number."""
    partial: bool = False
    """It leads to some of the topic's queues, for publications that named their recipients."""


NOWHERE = Route((), (), -1)


class Topics:
    def __init__(self) -> None:
        self._routes: dict[Topic, Route] = {}
        self._partial: dict[tuple[Topic, tuple[str, ...]], Route] = {}
        """By topic and recipients; a queue is made once, so these stay right whatever is bound and unbound."""
        self._numbers = count()

    def add(self, binding: Binding, queue: Queue) -> None:
        """Lead the binding's topic to its queue as well."""
        topic = _topic(binding)
        route = self._routes.get(topic, NOWHERE)
        if queue not in route.queues:
            queues, recipients = (*route.queues, queue), (*route.recipients, binding.node)
            self._routes[topic] = Route(queues, recipients, next(self._numbers))

    def remove(self, binding: Binding, queue: Queue) -> None:
        """Lead the binding's topic to its queue no longer."""
        topic = _topic(binding)
        route = self._routes.get(topic, NOWHERE)
        if queue in route.queues:
            left = [pair for pair in zip(route.queues, route.recipients, strict=True) if pair[0] is not queue]
            if left:
                queues, recipients = zip(*left, strict=True)
                self._routes[topic] = Route(queues, recipients, next(self._numbers))
            else:
                del self._routes[topic]

    def route(self, envelope: Envelope) -> Route:
        address = envelope.source if envelope.kind == "event" else envelope.destination
        topic = (envelope.kind, address, envelope.type)
        route = self._routes.get(topic, NOWHERE)
        wanted = envelope.recipients
        return route if not wanted or wanted == route.recipients else self._restricted(topic, route, wanted)

    def _restricted(self, topic: Topic, route: Route, wanted: tuple[str, ...]) -> Route:
        """The part of a route that leads to these recipients; the route itself when that is all of it."""
        pairs = [pair for pair in zip(route.queues, route.recipients, strict=True) if pair[1] in wanted]
        if not pairs:
            # The recipients stay as they were given: without them a second attempt would go to everybody.
            return Route((), wanted, -1, partial=True)
        if len(pairs) == len(route.queues):
            return route
        queues, recipients = zip(*pairs, strict=True)
        known = self._partial.get((topic, recipients))
        if known is None:
            known = Route(queues, recipients, next(self._numbers), partial=True)
            self._partial[topic, recipients] = known
        return known


def _topic(binding: Binding) -> Topic:
    return (binding.kind, binding.source if binding.kind == "event" else binding.node, binding.type)
