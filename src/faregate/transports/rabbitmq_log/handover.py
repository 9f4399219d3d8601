"""A subscription from its queues to the log view of a RabbitMQ, and back.

Rules kept here:
- What counts is the note in STREAM.bindings. Before it everything is as it was; what is left to do after it only tidies
  up. So a crash leaves one view or the other, and the same handover may be asked for again.
- The mark (`rabbitmq/log_view.py`) is made before anything else is looked at, and taken away last. While it is there no
  bus begins to consume the queues; if one does already, the handover is refused.
- To the log: from the lowest offset of what waits in the queues, which is searched for in the stream by ids. Then the
  queues are emptied and deleted. What is in them and was not yet in the stream when it was searched is published anew.
- To the queue: what is not done is put into it, then it is bound, then what came into the log meanwhile is put there.
- A message reaches the stream and the queues a little apart, and no fence tells that all have arrived. So a node with a
  store reads the last minute of the log again, and what is put into a queue may be there twice: the ledger recognises
  it. A node without a store wants its publishers to rest, and so does one whose keys must not be passed.
"""

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from msgspec.structs import replace

from faregate.errors import ConfigurationError, ViewTaken
from faregate.ids import slot_of
from faregate.message import Envelope
from faregate.ports.log import LogTransport, Outcomes, Waits
from faregate.ports.queue import Binding
from faregate.ports.topology import Reading, Topology
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel, Publication
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.log_view import lead_to_stream, mark_view, unmark_view
from faregate.transports.rabbitmq.migration import consumed, empty_queue, envelope_in, look_through
from faregate.transports.rabbitmq.survey import SeenQueue, left_over, look_at
from faregate.transports.rabbitmq.topology import (
    arguments_of,
    declare,
    declare_queue,
    partition_queues,
    undeclare,
)
from faregate.transports.rabbitmq.wire import properties_of
from faregate.transports.rabbitmq_log.exchange import Exchange

_AT_ONCE = 1_000
_APART_SECONDS = 60.0
"""More than the time between the arrival of a message in the stream and in the queues."""
_SETTLE_SECONDS = 2.0


class NotedLog(LogTransport, Protocol):
    """A log with notes of who reads what."""

    def topology(self) -> Topology: ...

    def bind(self, binding: Binding) -> None: ...

    def hand_over(self, binding: Binding, reading: Reading) -> bool: ...


class RabbitmqHandover:
    """Of one thread at a time."""

    def __init__(self, log: NotedLog, exchange: Exchange, stream: str) -> None:
        self._log = log
        self._exchange = exchange
        self._stream = stream

    def __enter__(self) -> "RabbitmqHandover":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held: the mark stays as long as the log is read."""

    def reading(self, queue: str) -> Reading:
        return self._log.topology().reading(queue)

    def bind(self, binding: Binding) -> None:
        self._log.bind(binding)

    def count(self, binding: Binding, start: int) -> int:
        begun = max(start, self.reading(binding.queue).offset, self._log.earliest())
        return sum(1 for _ in self._own(binding, begun, self._log.latest()))

    def waiting(self, binding: Binding) -> list[int]:
        """Raises `ConfigurationError` while somebody consumes it, and for what is not in the stream."""
        if self._log.topology().queue(binding.queue) is None:
            return []
        wanted = self._exchange.run(lambda transport: _waiting_ids(transport, binding))
        found: list[int] = []
        if wanted:
            for offset, envelope in self._log.envelopes(self._log.earliest()):
                if envelope.publication_id in wanted:
                    wanted.discard(envelope.publication_id)
                    found.append(offset)
        if wanted:
            raise ConfigurationError(
                f"{len(wanted)} messages wait in {binding.queue} that are not in the stream {self._stream}, or not any "
                "more: run the bus until the queue is empty, then hand over"
            )
        return found

    def log_reading(self, binding: Binding) -> Reading:
        latest, epoch = self._log.latest(), self.reading(binding.queue).epoch + 1
        if self._log.topology().queue(binding.queue) is None:
            return Reading("log", epoch, self._log.earliest(), latest)
        waiting = self.waiting(binding)
        lowest = waiting[0] if waiting else latest
        if binding.remembers in ("ledger", "tokens"):
            lowest = min(lowest, self._log.offset_at(time.time() - _APART_SECONDS))
        return Reading("log", epoch, lowest)

    def take_log(self, binding: Binding) -> Reading:
        is_known = self._log.topology().queue(binding.queue) is not None
        self._exchange.run(lambda transport: self._begin(transport, binding, is_known=is_known))
        reading = self.log_reading(binding)
        self._note(binding, reading)
        self._exchange.run(lambda transport: self._empty(transport, binding, reading))
        return reading

    async def _begin(self, transport: RabbitmqQueue, binding: Binding, *, is_known: bool) -> None:
        """No bus begins on it from now on. Raises `ViewTaken` for one that has a queue and was not known to."""
        await transport.on_channel(lambda channel: mark_view(channel, binding.queue))
        try:
            seen = [each async for each in _queues(transport, binding)]
            if seen and not is_known:
                raise ViewTaken(
                    f"RabbitMQ has a queue {seen[0].name}, of which the stream {self._stream} knows nothing: start its "
                    f"bus once with ?stream={self._stream}, stop it, and then hand over"
                )
            _check_unused(seen)
        except BaseException:
            await transport.on_channel(lambda channel: unmark_view(channel, binding.queue))
            raise
        await transport.on_channel(lambda channel: lead_to_stream(channel, self._stream, binding))

    async def _empty(self, transport: RabbitmqQueue, binding: Binding, reading: Reading) -> None:
        """Nothing leads to its queues any more, and what is in them is in the log."""

        async def move(messages: Sequence[Arrived]) -> None:
            found = {each.publication_id: each for each in (envelope_in(message, binding.node) for message in messages)}
            for _, envelope in self._log.envelopes(reading.offset):
                found.pop(envelope.publication_id, None)
            await transport.publish(list(found.values()))  # each names its recipient, this node

        queues = [each async for each in _queues(transport, binding)]
        if queues:
            await transport.on_channel(lambda channel: undeclare(channel, binding))
        for queue in queues:
            await empty_queue(transport, queue.name, move)

    def take_queue(self, binding: Binding, start: int, done: Outcomes, parked: Iterable[Waits] = ()) -> Reading:
        waits = {each.offset: each for each in parked}
        start, latest = max(start, self._log.earliest()), self._log.latest()
        self._exchange.run(lambda transport: _declare_anew(transport, binding))
        self._put(binding, self._own(binding, start, latest), done, waits)
        self._exchange.run(lambda transport: transport.on_channel(lambda channel: declare(channel, binding)))
        time.sleep(_SETTLE_SECONDS)
        self._put(binding, self._own(binding, latest, self._log.latest()), done, waits)
        reading = Reading("queue", self.reading(binding.queue).epoch + 1, start)
        self._note(binding, reading)
        self._exchange.run(lambda transport: transport.on_channel(lambda channel: unmark_view(channel, binding.queue)))
        return reading

    def _put(
        self, binding: Binding, own: Iterator[tuple[int, Envelope]], done: Outcomes, waits: dict[int, Waits]
    ) -> None:
        """Into its own queues alone, what is not done: the stream has it."""
        names = partition_queues(binding)
        while some := list(islice(own, _AT_ONCE)):
            ended = done(some)
            left = [_as_it_waits(each, waits.get(at)) for at, each in some if at not in ended or at in waits]
            put = [Publication("", _queue_of(each, names), properties_of(each), each.body) for each in left]
            if put:
                self._exchange.run(lambda transport, put=put: transport.put(put))  # type: ignore[misc]

    def _note(self, binding: Binding, reading: Reading) -> None:
        if not self._log.hand_over(binding, reading):
            raise ViewTaken(f"somebody else has just handed {binding.queue} over: look, and then run this again")

    def _own(self, binding: Binding, start: int, end: int) -> Iterator[tuple[int, Envelope]]:
        """What the log has for this subscription."""
        history = self.reading(binding.queue).history
        for offset, envelope in self._log.envelopes(start, end):
            to = envelope.source if binding.kind == "event" else envelope.destination
            wanted = binding.source if binding.kind == "event" else binding.node
            if (envelope.type, envelope.kind, to) == (binding.type, binding.kind, wanted) and (
                binding.node in envelope.recipients or (offset < history and not envelope.replay)
            ):
                yield offset, envelope


# --- on the broker ------------------------------------------------------------------------------------------------


async def _queues(transport: RabbitmqQueue, binding: Binding) -> AsyncIterator[SeenQueue]:
    """Those that it has, or had before it was changed."""
    for name in partition_queues(binding):
        seen = await look_at(transport, name, "current")
        if seen.exists:
            yield seen
    async for seen in left_over(transport, binding):
        yield seen


def _check_unused(seen: Sequence[SeenQueue]) -> None:
    for each in seen:
        if each.consumers:
            raise consumed(each.name, each.consumers)


async def _waiting_ids(transport: RabbitmqQueue, binding: Binding) -> set[str]:
    found: set[str] = set()
    async for queue in _queues(transport, binding):
        _check_unused([queue])

        for message in await look_through(transport, queue):
            found.add(envelope_in(message, binding.node).publication_id)
    return found


async def _declare_anew(transport: RabbitmqQueue, binding: Binding) -> None:
    """Its queues, empty, and nothing leads to them."""

    async def remake(channel: BatchChannel) -> None:
        for queue in queues:
            await channel.queue_delete(queue.name)
        for name in partition_queues(binding):
            await declare_queue(channel, name, arguments_of(binding))

    queues = [each async for each in _queues(transport, binding)]
    await transport.on_channel(remake)


def _queue_of(envelope: Envelope, names: Sequence[str]) -> str:
    """As the bindings have it (`topology.routes_of`)."""
    slot = slot_of(envelope.key)
    return names[int(slot) % len(names) if slot.isdigit() else 0]


def _as_it_waits(envelope: Envelope, waits: Waits | None) -> Envelope:
    return envelope if waits is None else replace(envelope, redeliveries=waits.redeliveries, deliver_at=waits.due)
