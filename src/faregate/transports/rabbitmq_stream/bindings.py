"""Who subscribed to what, and when: in a stream beside the messages, STREAM.bindings, of which nothing is ever removed.

A publisher on RabbitMQ does not know who gets its messages. So whoever binds or unbinds a queue notes it here, as a
message whose body is JSON: node, type, kind, source, `bound` (false: it ended) and how the node remembers what it
handled. Another program can do that, too, with a message to the queue STREAM.bindings. A handover between the views of
a subscription is a note, too: with `reading`, as `faregate.ports.topology.Reading` has it.

Rules kept here:
- A subscription gets what was appended at the broker's time of its note, or later, until the note that ends it.
- A handover says which epoch it begins. Of two that begin the same, the first counts. A reader of the log gets what is
  at the offset that its note names, or behind it, also if it was appended before the note.
- The numbers of queues and topics follow from the order of the notes, and so are the same for every reader.
"""

from bisect import bisect_right

import msgspec

from faregate.message import Envelope, Kind
from faregate.ports.queue import Binding, Remembers
from faregate.ports.topology import Reading, Topology
from faregate.transports.rabbitmq_stream.connection import Connection
from faregate.transports.rabbitmq_stream.entries import decode, encode
from faregate.transports.rabbitmq_stream.following import Following

NOBODY = -1
Route = tuple[int, tuple[str, ...]]
"""The number of a topic, and the nodes that it leads to."""
_Topic = tuple[str, str | None, str]


class Note(msgspec.Struct, omit_defaults=True):
    node: str
    type: str
    kind: Kind
    source: str | None = None
    bound: bool = True
    remembers: Remembers | None = None
    reading: Reading | None = None

    @property
    def binding(self) -> Binding:
        return Binding(self.node, self.type, self.kind, self.source, remembers=self.remembers)


_read_note = msgspec.json.Decoder(Note).decode


class Bindings:
    """Of one thread at a time."""

    def __init__(self, stream: str) -> None:
        self._following = Following(f"{stream}.bindings")
        self._start_again()

    def _start_again(self) -> None:
        self.topology = Topology()
        self._times: dict[_Topic, list[int]] = {}
        self._routes: dict[_Topic, list[Route]] = {}
        self._readers: dict[_Topic, list[tuple[int, int, str]]] = {}
        """(offset, time, node): what was there, or behind it, before that time, this node gets, too."""

    def note(self, connection: Connection, binding: Binding, *, bound: bool) -> None:
        """Note that a subscription began or ended now; what is noted already is left as it is."""
        self.catch_up(connection)
        if self._changes(binding, bound=bound):
            self._publish(
                connection, Note(binding.node, binding.type, binding.kind, binding.source, bound, binding.remembers)
            )

    def hand_over(self, connection: Connection, binding: Binding, reading: Reading) -> bool:
        """Note that a subscription is consumed through another view now. False: somebody else was first."""
        self._publish(
            connection,
            Note(binding.node, binding.type, binding.kind, binding.source, True, binding.remembers, reading),
        )
        self.catch_up(connection)
        return self.topology.reading(binding.queue) == reading

    def _publish(self, connection: Connection, note: Note) -> None:
        body = msgspec.json.encode(note)
        self._following.publish(connection, [encode(Envelope(type="faregate-binding", body=body))], {})

    def catch_up(self, connection: Connection) -> None:
        for at, milliseconds, record in self._following.more(connection):
            if at == 0:
                self._start_again()
            try:
                note = _read_note(decode(record).body)
            except msgspec.DecodeError:
                continue  # of a program that is newer, or knows no better
            self._apply(milliseconds * 1000, note)

    def route(self, envelope: Envelope, time: int, offset: int) -> Route:
        """Where a message went that was appended at that time, in microseconds."""
        topic = (envelope.kind, envelope.source if envelope.kind == "event" else envelope.destination, envelope.type)
        found = self._route(topic, time)
        for first, until, node in self._readers.get(topic, ()):
            if offset >= first and time < until and node not in found[1]:
                found = self._route(topic, until)[0], (*found[1], node)
        return found

    def _route(self, topic: _Topic, time: int) -> Route:
        times = self._times.get(topic)
        place = bisect_right(times, time) - 1 if times else -1
        return self._routes[topic][place] if place >= 0 else (NOBODY, ())

    def _changes(self, binding: Binding, *, bound: bool) -> bool:
        known = self.topology.queue(binding.queue)
        if not bound:
            return known is not None and self.topology.is_bound(known)
        return self.topology.copy().add(binding)

    def _apply(self, time: int, note: Note) -> None:
        binding = note.binding
        topic = (binding.kind, binding.source if binding.kind == "event" else binding.node, binding.type)
        reading = note.reading
        if reading is not None and reading.epoch != self.topology.reading(binding.queue).epoch + 1:
            return
        if note.bound:
            self.topology.add(binding)
        elif (queue := self.topology.queue(binding.queue)) is not None:
            self.topology.remove(queue)
        current = self.topology.topic(*topic)
        numbers = () if current is None else current.queues
        nodes = sorted({queue.node for queue in self.topology.queues if queue.number in numbers})
        times = self._times.setdefault(topic, [])
        times.append(max(time, times[-1]) if times else time)
        self._routes.setdefault(topic, []).append((NOBODY if current is None else current.number, tuple(nodes)))
        if reading is not None:
            self.topology.hand_over(binding.queue, reading.view, reading.offset, reading.history)
            if reading.view == "log":
                first = max(reading.offset, reading.history)
                self._readers.setdefault(topic, []).append((first, times[-1], binding.node))
