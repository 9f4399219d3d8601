"""A subscription from its queues to the log view of a RabbitMQ, and back.

Rules kept here:
- What counts is the note in STREAM.bindings. Before it everything is as it was; what is left to do after it only tidies
  up. So a crash leaves one view or the other, and the same handover may be asked for again: `tidy` does what is left.
- The mark (`rabbitmq/log_view.py`) is made before anything else is looked at, and taken away last. While it is there no
  bus begins to consume the queues; if one does already, the handover is refused, and the mark is taken away.
- One handover of a subscription at a time (`migration.alone`).
- To the log: from the lowest offset of what waits in the queues, which is searched for in the stream by ids. Then the
  queues are emptied and deleted. What is in them and was not yet in the stream when it was searched is published anew.
- To the queue: what is not done is put into it, then it is bound, then what came into the log meanwhile is put there,
  up to a fence: a message to the stream alone, which readers do not see. It stands behind whatever was on its way there
  when the queue was bound, however late that arrives.
- A message reaches the stream and the queues a little apart. So a node with a store reads the last minute of the log
  again, and what is put into a queue may be there twice: the ledger recognises it. A node without a store wants its
  publishers to rest, and so does one whose keys must not be passed.
"""

import asyncio
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
from faregate.transports.rabbitmq.migration import alone, consumed, empty_queue, envelope_in, look_through
from faregate.transports.rabbitmq.names import view_mark
from faregate.transports.rabbitmq.survey import SeenQueue, left_over, look_at
from faregate.transports.rabbitmq.topology import (
    arguments_of,
    declare,
    declare_queue,
    partition_queues,
    queue_of_slot,
    undeclare,
)
from faregate.transports.rabbitmq.wire import properties_of
from faregate.transports.rabbitmq_log.exchange import Exchange
from faregate.transports.rabbitmq_stream.entries import FENCE

_AT_ONCE = 1_000
_APART_SECONDS = 60.0
"""More than the time between the arrival of a message in the stream and in the queues."""
_SETTLE_SECONDS = 2.0
"""More than a broker needs to route by a new binding on all its nodes."""


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
        return self._exchange.run(lambda transport: self._to_log(transport, binding))

    async def _to_log(self, transport: RabbitmqQueue, binding: Binding) -> Reading:
        async with alone(transport, binding.queue):
            reading = await asyncio.to_thread(self.reading, binding.queue)
            if reading.view != "log":
                reading = await self._begin(transport, binding)
                await asyncio.to_thread(self._note, binding, reading)  # if it fails nobody knows: the mark stays
            await self._end(transport, binding, reading)
        return reading

    async def _begin(self, transport: RabbitmqQueue, binding: Binding) -> Reading:
        """No bus begins on it from now on, unless this raises: `ViewTaken` for one that has a queue and was not known
        to, and as `log_reading`."""
        await transport.on_channel(lambda channel: mark_view(channel, binding.queue))
        try:
            seen = [each async for each in _queues(transport, binding)]
            is_known = (await asyncio.to_thread(self._log.topology)).queue(binding.queue) is not None
            if seen and not is_known:
                raise ViewTaken(
                    f"RabbitMQ has a queue {seen[0].name}, of which the stream {self._stream} knows nothing: start its "
                    f"bus once with ?stream={self._stream}, stop it, and then hand over"
                )
            _check_unused(seen)
            await transport.on_channel(lambda channel: lead_to_stream(channel, self._stream, binding))
            return await asyncio.to_thread(self.log_reading, binding)
        except BaseException:
            await transport.on_channel(lambda channel: unmark_view(channel, binding.queue))
            raise

    def tidy(self, binding: Binding) -> None:
        """Do what a crash behind the note, or in front of it, has left to do."""
        self._exchange.run(lambda transport: self._tidy(transport, binding))

    async def _tidy(self, transport: RabbitmqQueue, binding: Binding) -> None:
        if (await asyncio.to_thread(self.reading, binding.queue)).view == "log":
            is_left = bool([each async for each in _queues(transport, binding)])
        else:
            is_left = (await look_at(transport, view_mark(binding.queue), "left over")).exists
        if is_left:
            async with alone(transport, binding.queue):
                await self._end(transport, binding, await asyncio.to_thread(self.reading, binding.queue))

    async def _end(self, transport: RabbitmqQueue, binding: Binding, reading: Reading) -> None:
        """What is left to do behind the note."""
        if reading.view == "log":
            await self._empty(transport, binding, reading)
        else:
            await transport.on_channel(lambda channel: unmark_view(channel, binding.queue))

    async def _empty(self, transport: RabbitmqQueue, binding: Binding, reading: Reading) -> None:
        """Nothing leads to its queues any more, and what is in them is in the log."""
        known = _Known(self._log, reading.offset)

        async def move(messages: Sequence[Arrived]) -> None:
            found = [envelope_in(message, binding.node) for message in messages]
            lacking = await asyncio.to_thread(known.lacking, found)
            await transport.publish(lacking)  # each names its recipient, this node

        queues = [each async for each in _queues(transport, binding)]
        _check_unused(queues)
        if queues:
            await transport.on_channel(lambda channel: undeclare(channel, binding))
        for queue in queues:
            await empty_queue(transport, queue.name, move)

    def take_queue(self, binding: Binding, start: int, done: Outcomes, parked: Iterable[Waits] = ()) -> Reading:
        waits = {each.offset: each for each in parked}
        return self._exchange.run(lambda transport: self._to_queue(transport, binding, start, done, waits))

    async def _to_queue(
        self, transport: RabbitmqQueue, binding: Binding, start: int, done: Outcomes, waits: dict[int, Waits]
    ) -> Reading:
        async def put(first: int, end: int) -> None:
            own = self._own(binding, first, end)
            while some := await asyncio.to_thread(lambda: list(islice(own, _AT_ONCE))):
                await self._put(transport, binding, some, await asyncio.to_thread(done, some), waits)

        async with alone(transport, binding.queue):
            former = await asyncio.to_thread(self.reading, binding.queue)
            if former.view == "queue":
                await self._end(transport, binding, former)
                return former
            start = max(start, await asyncio.to_thread(self._log.earliest))
            latest = await asyncio.to_thread(self._log.latest)
            await _declare_anew(transport, binding)
            await put(start, latest)
            await transport.on_channel(lambda channel: declare(channel, binding))
            await asyncio.sleep(_SETTLE_SECONDS)
            await transport.put([Publication("", self._stream, properties_of(Envelope(type=FENCE)), b"")])
            await put(latest, await asyncio.to_thread(self._log.latest))
            reading = Reading("queue", former.epoch + 1, start)
            await asyncio.to_thread(self._note, binding, reading)
            await self._end(transport, binding, reading)
        return reading

    async def _put(
        self,
        transport: RabbitmqQueue,
        binding: Binding,
        some: Sequence[tuple[int, Envelope]],
        ended: dict[int, str],
        waits: dict[int, Waits],
    ) -> None:
        """Into its own queues alone, what is not done: the stream has it."""
        names = partition_queues(binding)
        left = [_as_it_waits(each, waits.get(at)) for at, each in some if at not in ended or at in waits]
        if left:
            await transport.put(
                [
                    Publication("", queue_of_slot(names, slot_of(each.key)), properties_of(each), each.body)
                    for each in left
                ]
            )

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


class _Known:
    """The ids that a log has from an offset on; each message of it is read once. Of one thread at a time."""

    def __init__(self, log: NotedLog, start: int) -> None:
        self._log = log
        self._ids: set[str] = set()
        self._next = start

    def lacking(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """Those that it does not have by now, each once."""
        start, end = max(self._next, self._log.earliest()), self._log.latest()
        self._ids.update(envelope.publication_id for _, envelope in self._log.envelopes(start, end))
        self._next = end
        found = {each.publication_id: each for each in envelopes}
        return [each for each in found.values() if each.publication_id not in self._ids]


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


def _as_it_waits(envelope: Envelope, waits: Waits | None) -> Envelope:
    return envelope if waits is None else replace(envelope, redeliveries=waits.redeliveries, deliver_at=waits.due)
