"""Queues and topics of a journal, kept in topology.json. Numbers are given once and never reused."""

import msgspec

from faregate.message import Kind
from faregate.ports.queue import Binding, poison_queue


class QueueRecord(msgspec.Struct):
    number: int
    name: str
    node: str
    type: str | None = None
    kind: Kind | None = None
    source: str | None = None

    @property
    def is_poison(self) -> bool:
        return self.type is None


class TopicRecord(msgspec.Struct):
    """A topic and the queues it led to from some moment on; the last record of a topic is the current one."""

    number: int
    kind: Kind
    address: str | None
    type: str
    queues: list[int]


class Topology(msgspec.Struct):
    version: int = 0
    queues: list[QueueRecord] = []
    topics: list[TopicRecord] = []
    checksum: str = ""
    """CRC-32 of this file's content with an empty checksum, in hexadecimal."""

    def add(self, binding: Binding) -> bool:
        """Add the binding's queues and lead its topic there; whether anything changed."""
        before = self.version
        self._queue(poison_queue(binding.node), binding.node)
        queue = self._queue(binding.queue, binding.node, binding)
        address = binding.source if binding.kind == "event" else binding.node
        current = self.topic(binding.kind, address, binding.type)
        if current is None or queue.number not in current.queues:
            queues = [*(current.queues if current else ()), queue.number]
            self.topics.append(TopicRecord(len(self.topics), binding.kind, address, binding.type, queues))
            self.version += 1
        return self.version != before

    def add_poison_queue(self, node: str) -> bool:
        before = self.version
        self._queue(poison_queue(node), node)
        return self.version != before

    def topic(self, kind: Kind, address: str | None, type: str) -> TopicRecord | None:
        """The current record of a topic."""
        wanted = (kind, address, type)
        return next(
            (topic for topic in reversed(self.topics) if (topic.kind, topic.address, topic.type) == wanted), None
        )

    def _queue(self, name: str, node: str, binding: Binding | None = None) -> QueueRecord:
        for queue in self.queues:
            if queue.name == name:
                return queue
        queue = QueueRecord(len(self.queues), name, node)
        if binding is not None:
            queue.type, queue.kind, queue.source = binding.type, binding.kind, binding.source
        self.queues.append(queue)
        self.version += 1
        return queue
