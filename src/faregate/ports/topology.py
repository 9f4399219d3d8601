"""Who subscribed to what of a log: queues and topics, by numbers that are given once and never reused.

A journal keeps it in topology.json.

A subscription is consumed through one view at a time: its queue, or the log. Its record says which, since when, and
from which offset on; see `TwoViews` in `log.py`.
"""

from collections.abc import Collection
from typing import Literal, TypeVar

import msgspec

from faregate.message import Envelope, Kind
from faregate.ports.queue import Binding, Remembers, check_command, dead_letter_queue

T = TypeVar("T")
View = Literal["queue", "log"]


class Reading(msgspec.Struct, omit_defaults=True):
    """Through which view a subscription is consumed; the default is what every queue begins with."""

    view: View = "queue"
    epoch: int = 0
    """Grows with every handover."""
    offset: int = 0
    """Where this view began: what lies before is not its business."""
    history: int = 0
    """Log view: messages below this offset are its own though they do not name its node, which was unknown then."""


FROM_THE_BEGINNING = Reading()


class QueueRecord(msgspec.Struct):
    number: int
    name: str
    node: str
    type: str | None = None
    kind: Kind | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if self.is_dead_letter_queue:  # journals that were written earlier call it {node}-poison
            self.name = dead_letter_queue(self.node)

    @property
    def is_dead_letter_queue(self) -> bool:
        return self.type is None

    @property
    def address(self) -> str | None:
        """Who publishes its events; whom its commands go to."""
        return self.source if self.kind == "event" else self.node


class TopicRecord(msgspec.Struct, omit_defaults=True):
    """A topic and the queues it led to from some moment on.

    The last record of a topic is the current one. A partial record is never current. It lists the queues of
    publications that named their recipients, so that a row of the log needs only the number of its record.
    """

    number: int
    kind: Kind
    address: str | None
    type: str
    queues: list[int]
    partial: bool = False
    """Left out when false, so that the checksums of older files still fit."""


def _known(found: dict[str, T] | msgspec.UnsetType) -> dict[str, T]:
    return {} if isinstance(found, msgspec.UnsetType) else found


class Topology(msgspec.Struct):
    version: int = 0
    queues: list[QueueRecord] = []
    topics: list[TopicRecord] = []
    checksum: str = ""
    """CRC-32 of this file's content with an empty checksum, in hexadecimal."""
    readings: dict[str, Reading] | msgspec.UnsetType = msgspec.UNSET
    """By queue, for those that were handed over at least once. Left out when empty, as `TopicRecord.partial` is."""
    remembered: dict[str, list[Remembers | Literal["unknown"]]] | msgspec.UnsetType = msgspec.UNSET
    """By queue, how its consumers knew what they had handled, each way once; `unknown` for the time before this was
    kept. Left out when empty, too."""

    def copy(self) -> "Topology":
        """One that can be changed without changing this one. Records and mappings are replaced, never changed."""
        lists = ([*self.queues], [*self.topics])
        return Topology(self.version, *lists, self.checksum, self.readings, self.remembered)

    def reading(self, queue: str) -> Reading:
        """How a queue's subscription is consumed."""
        return _known(self.readings).get(queue, FROM_THE_BEGINNING)

    def hand_over(self, queue: str, view: View, offset: int, history: int = 0) -> Reading:
        """From that offset on it is consumed through this view."""
        fresh = Reading(view, self.reading(queue).epoch + 1, offset, history)
        self.readings = {**_known(self.readings), queue: fresh}
        self.version += 1
        return fresh

    def add(self, binding: Binding) -> bool:
        """Add the binding's queues and lead its topic there; whether anything changed."""
        before = self.version
        self._queue(dead_letter_queue(binding.node), binding.node)
        is_new = self.queue(binding.queue) is None
        queue = self._queue(binding.queue, binding.node, binding)
        if binding.remembers is not None:
            self._remember(binding.queue, binding.remembers, is_new=is_new)
        address = binding.source if binding.kind == "event" else binding.node
        current = self.topic(binding.kind, address, binding.type)
        if current is None or queue.number not in current.queues:
            queues = [*(current.queues if current else ()), queue.number]
            self._topic(binding.kind, address, binding.type, queues)
        return self.version != before

    def add_dead_letter_queue(self, node: str) -> bool:
        before = self.version
        self._queue(dead_letter_queue(node), node)
        return self.version != before

    def add_partial(self, kind: Kind, address: str | None, type: str, queues: Collection[int]) -> bool:
        """Let publications of a topic go to these of its queues."""
        if self.leading(kind, address, type, queues, partial=True) is not None:
            return False
        self._topic(kind, address, type, sorted(queues), partial=True)
        return True

    def remove(self, queue: QueueRecord) -> bool:
        """Stop leading its topic to a queue; whether it led there."""
        current = self.topic_of(queue)
        if current is None or queue.number not in current.queues:
            return False
        left = [number for number in current.queues if number != queue.number]
        self._topic(current.kind, current.address, current.type, left)
        return True

    def queue(self, name: str) -> QueueRecord | None:
        return next((queue for queue in self.queues if queue.name == name), None)

    def topic(self, kind: Kind, address: str | None, type: str) -> TopicRecord | None:
        """The current record of a topic; None when it leads nowhere, or nowhere any more."""
        wanted = (kind, address, type, False)
        for each in reversed(self.topics):
            if (each.kind, each.address, each.type, each.partial) == wanted:
                return each if each.queues else None
        return None

    def topic_of(self, queue: QueueRecord) -> TopicRecord | None:
        """The current record of the topic that a queue is, or was, bound to."""
        if queue.kind is None or queue.type is None:
            return None
        return self.topic(queue.kind, queue.address, queue.type)

    def is_bound(self, queue: QueueRecord) -> bool:
        current = self.topic_of(queue)
        return current is not None and queue.number in current.queues

    def leading(
        self, kind: Kind, address: str | None, type: str, queues: Collection[int], *, partial: bool
    ) -> TopicRecord | None:
        """The last record of a topic that leads, or led, to exactly these queues."""
        wanted = (kind, address, type, partial)
        for each in reversed(self.topics):
            if (each.kind, each.address, each.type, each.partial) == wanted and set(each.queues) == set(queues):
                return each
        return None

    def nodes(self, kind: Kind, address: str | None, type: str) -> set[str]:
        """The nodes that a topic leads to now."""
        current = self.topic(kind, address, type)
        numbers = () if current is None else current.queues
        return {queue.node for queue in self.queues if queue.number in numbers}

    def check_command(self, envelope: Envelope) -> None:
        """Raises `Unroutable` for a command that has no way now."""
        if envelope.kind == "command":
            check_command(envelope, self.nodes("command", envelope.destination, envelope.type))

    def ways(self, queue: str) -> tuple[str, ...]:
        """How a queue's consumers knew what they had handled."""
        return tuple(_known(self.remembered).get(queue, ["unknown"]))

    def _remember(self, queue: str, way: Remembers, *, is_new: bool) -> None:
        known = _known(self.remembered)
        ways = known.get(queue, [] if is_new else ["unknown"])
        if way not in ways:
            self.remembered = {**known, queue: [*ways, way]}
            self.version += 1

    def _topic(self, kind: Kind, address: str | None, type: str, queues: list[int], *, partial: bool = False) -> None:
        self.topics.append(TopicRecord(len(self.topics), kind, address, type, queues, partial))
        self.version += 1

    def _queue(self, name: str, node: str, binding: Binding | None = None) -> QueueRecord:
        known = self.queue(name)
        if known is not None:
            return known
        wanted = (binding.type, binding.kind, binding.source) if binding is not None else (None, None, None)
        queue = QueueRecord(len(self.queues), name, node, *wanted)
        self.queues.append(queue)
        self.version += 1
        return queue
