"""Topics: which queues a publication goes to. Changes are versioned."""

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


NOWHERE = Route((), (), -1)


class Topics:
    def __init__(self) -> None:
        self.version = 0
        self._routes: dict[Topic, Route] = {}

    def add(self, binding: Binding, queue: Queue) -> None:
        """Lead the binding's topic to its queue as well."""
        address = binding.source if binding.kind == "event" else binding.node
        topic = (binding.kind, address, binding.type)
        queues, recipients, _ = self._routes.get(topic, NOWHERE)
        if queue not in queues:
            self._routes[topic] = Route((*queues, queue), (*recipients, binding.node), self.version)
            self.version += 1

    def route(self, envelope: Envelope) -> Route:
        address = envelope.source if envelope.kind == "event" else envelope.destination
        return self._routes.get((envelope.kind, address, envelope.type), NOWHERE)
