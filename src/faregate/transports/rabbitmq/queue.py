"""`amqp://…`: RabbitMQ as a queue transport. See docs/rabbitmq.md for what is declared, and for what it promises.

It has its own later tries, expiry and dead letters for nodes without a store; nodes with one keep these there
(`Binding.parks`). It keeps the order of a queue, and hands partitions to one consumer at a time; order by key is the
bus's.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from secrets import token_hex

from aiormq.exceptions import ChannelNotFoundEntity

from faregate.errors import BrokerUnavailable, OutcomeUnknown, QueueNotFound, Unroutable, ViewTaken
from faregate.message import Envelope
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.presence import Heartbeat, Instruction
from faregate.ports.queue import Binding, Capability, Delivery, Held, check_command, dead_letter_queue
from faregate.transports.rabbitmq.address import parse_address
from faregate.transports.rabbitmq.channels import BatchChannel, Publication
from faregate.transports.rabbitmq.consumer import QueueConsumer, Session
from faregate.transports.rabbitmq.delivery import RabbitmqDelivery
from faregate.transports.rabbitmq.endings import Endings
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.link import LOST, Link, said_by
from faregate.transports.rabbitmq.log_view import ask_for_mark, declare_stream, lead_no_more, lead_to_stream, note
from faregate.transports.rabbitmq.names import EXCHANGE, TO, dead_queue, queue_at, reply_queue, routing_key
from faregate.transports.rabbitmq.presence import announce, heed, overhear
from faregate.transports.rabbitmq.publisher import Publisher
from faregate.transports.rabbitmq.replies import ReplyQueue, send_replies
from faregate.transports.rabbitmq.topology import (
    declare,
    declare_exchanges,
    declare_queue,
    partition_queues,
    quorum,
    routes_of,
    undeclare,
    waiting_in,
)  # fmt: skip
from faregate.transports.rabbitmq.wire import check_headers, properties_of

_LOOK_SECONDS = 0.02
_ROUTABLE_SECONDS = 60.0
_CHANNELS = 8
_ANNOUNCE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Queue:
    """What can be consumed by a name."""

    name: str
    binding: Binding
    is_dead: bool = False


class RabbitmqQueue:
    capabilities: frozenset[Capability] = frozenset(
        {"browse", "count", "dead letters", "delay", "expire", "partitions", "reply"}
    )

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self._url = url
        self._address = parse_address(url)
        self._stream = self._address.stream
        self.clock = clock or SystemClock()
        self._bindings: dict[str, Binding] = {}
        self._queues: dict[str, _Queue] = {}
        self._unbound: set[str] = set()
        self._consumers: set[QueueConsumer] = set()
        self._reply_queues: list[ReplyQueue] = []
        self._routable: dict[str, float] = {}
        """Until when a command's topic counts as one that leads somewhere."""
        self._open = False

    async def open(self) -> None:
        who = f"faregate/{socket.gethostname()}-{os.getpid()}"
        self._publishing, self._consuming = (Link(self._address, f"{who}/{what}") for what in ("publish", "consume"))
        await self._publishing.open()
        try:
            await self._consuming.open()
        except BaseException:
            await self._publishing.close()
            raise
        self._publisher = Publisher(self._publishing, self._declare_exchanges, self._address.confirm_seconds)
        self._endings = Endings(self._publishing, self._publisher, self.clock)
        self._publisher.start()
        self._failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._open = True
        try:
            await self.on_channel(self._declare_exchanges)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        for consumer in list(self._consumers):
            await consumer.close()
        for replies in self._reply_queues:
            await replies.close()
        await self._endings.close()
        await self._publisher.close()
        await self._consuming.close()
        await self._publishing.close()

    async def failed(self) -> Exception:
        """It comes back from whatever happens to its connection."""
        return await asyncio.shield(self._failed)

    # --- queues ----------------------------------------------------------------------------------------------

    async def bind(self, binding: Binding) -> None:
        """Raises `ViewTaken` for a subscription that reads the log, not its queue."""
        await self._check_view(binding)
        await self.on_channel(lambda channel: self._declare(channel, binding))
        await self._check_view(binding)
        await self._note(binding, bound=True)
        former = self._bindings.get(binding.queue)
        if former is not None:
            for name in partition_queues(former):
                del self._queues[name]
        self._bindings[binding.queue] = binding
        self._unbound.discard(binding.queue)
        for name in partition_queues(binding):
            self._queues[name] = _Queue(name, binding)
        self._queues.setdefault(
            dead_letter_queue(binding.node), _Queue(dead_queue(binding.node), binding, is_dead=True)
        )

    async def unbind(self, queue: str) -> None:
        binding = self._binding(queue)
        await self.on_channel(lambda channel: self._undeclare(channel, binding))
        await self._note(binding, bound=False)
        self._unbound.add(queue)
        self._routable.clear()

    async def _declare_exchanges(self, channel: BatchChannel) -> None:
        await declare_exchanges(channel)
        if self._stream is not None:
            await declare_stream(channel, self._stream)

    async def _declare(self, channel: BatchChannel, binding: Binding) -> None:
        await declare(channel, binding)
        if self._stream is not None:
            await lead_to_stream(channel, self._stream, binding)

    async def _undeclare(self, channel: BatchChannel, binding: Binding) -> None:
        if self._stream is not None:
            await lead_no_more(channel, self._stream, binding)
        await undeclare(channel, binding)

    async def _check_view(self, binding: Binding) -> None:
        if self._stream is None or await self._publisher.publish([ask_for_mark(binding.queue)]):
            return
        raise ViewTaken(
            f"{binding.queue} is consumed through the log, the stream {self._stream}, on Spark: run it there, or leave "
            f"node {binding.node!r} out of this bus, or bring it back with "
            f"'faregate spark handover MODULE:BUS {binding.node} --to queue'"
        )

    async def _note(self, binding: Binding, *, bound: bool) -> None:
        if self._stream is not None:
            await self._publisher.publish([note(self._stream, binding, bound=bound)])

    @property
    def log_place(self) -> str | None:
        return None if self._stream is None else self._url

    async def partitions(self, queue: str) -> list[str]:
        return partition_queues(self._binding(queue))

    async def abandon(self, binding: Binding) -> None:
        """On several channels: each unbinding is a round trip."""
        routes = list(routes_of(binding))

        async def leave(channel: BatchChannel, number: int) -> None:
            for queue, exchange, key in routes[number::_CHANNELS]:
                await channel.queue_unbind(queue, exchange, routing_key=key)

        works = [partial(leave, number=number) for number in range(min(_CHANNELS, len(routes)))]
        await asyncio.gather(*map(self.on_channel, works))

    @property
    def queue_names(self) -> list[str]:
        """What the queues of all that was bound here are called on the broker."""
        return [queue.name for queue in self._queues.values()]

    def _binding(self, queue: str) -> Binding:
        found = self._bindings.get(queue)
        if found is None:
            raise QueueNotFound(
                f"nobody bound the queue {queue} here; bound are: {', '.join(self._bindings) or 'none'}"
            )
        return found

    async def on_channel(self, work: Callable[[BatchChannel], Awaitable[None]]) -> None:
        """On a channel of its own: the broker closes it for every mistake."""
        with said_by(self._address.url):
            channel = await self._publishing.channel(BatchChannel)
            try:
                await work(channel)
            finally:
                with suppress(*LOST):
                    await channel.close()

    # --- publishing ------------------------------------------------------------------------------------------

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        """A batch with commands that are not known to lead somewhere is published in two steps: the first command of
        each kind, and the rest when these have found their queues."""
        first = self._unproven(envelopes) if len(envelopes) > 1 else []
        rest = [envelope for envelope in envelopes if envelope not in first] if first else envelopes
        left = envelopes
        try:
            if first:
                await self._publish(first)
                left = rest
            await self._publish(rest)
        except BrokerUnavailable as exc:
            if left is envelopes:
                raise
            raise OutcomeUnknown(f"{_names(left)}: {exc}; those before it were sent", publications=left) from exc
        except OutcomeUnknown as exc:
            raise OutcomeUnknown(f"{_names(left)}: {exc}", publications=left) from exc

    def _unproven(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        now = self.clock.monotonic()
        first: dict[str, Envelope] = {}
        for envelope in envelopes:
            if envelope.kind == "command":
                check_command(envelope, [str(envelope.destination)])
                topic = f"{envelope.destination}.{envelope.type}"
                if self._routable.get(topic, 0.0) < now:
                    first.setdefault(topic, envelope)
        return list(first.values())

    async def _publish(self, envelopes: Sequence[Envelope]) -> None:
        publications: list[Publication] = []
        commands: dict[int, Envelope] = {}
        for envelope in envelopes:
            if envelope.headers or envelope.key:
                check_headers(envelope)
            properties = properties_of(envelope)
            if envelope.kind == "command":
                check_command(envelope, [str(envelope.destination)])
                commands[len(publications)] = envelope
            if envelope.recipients:
                slot = routing_key(envelope).rpartition(".")[2]
                publications += [
                    Publication(TO, f"{queue_at(node, envelope)}.{slot}", properties, envelope.body)
                    for node in envelope.recipients
                ]
            else:
                publications.append(Publication(EXCHANGE, routing_key(envelope), properties, envelope.body))
        if not publications:
            return
        returned = await self._publisher.publish(publications)
        for place, text in returned.items():
            if place in commands:
                command = commands[place]
                self._routable.pop(f"{command.destination}.{command.type}", None)
                raise Unroutable(
                    f"no node {command.destination!r} handles the command {command}: {text}. Start that node, "
                    "or send it elsewhere"
                )
        until = self.clock.monotonic() + _ROUTABLE_SECONDS
        for command in commands.values():
            self._routable[f"{command.destination}.{command.type}"] = until

    async def put(self, publications: Sequence[Publication]) -> None:
        """Publish them as they are. Raises `Unroutable` when no queue takes one of them."""
        returned = await self._publisher.publish(publications)
        if returned:
            raise Unroutable(next(iter(returned.values())))

    async def announce(self, heartbeats: Sequence[Heartbeat]) -> None:
        try:
            async with asyncio.timeout(_ANNOUNCE_SECONDS):
                await self.on_channel(lambda channel: announce(channel, heartbeats))
        except TimeoutError:
            raise BrokerUnavailable(f"RabbitMQ did not take them within {_ANNOUNCE_SECONDS:g} s") from None

    async def heed(self, nodes: Sequence[str], asked: Callable[[Instruction], None]) -> None:
        await self.on_channel(lambda channel: heed(channel, nodes, asked))

    async def overhear(self, heard: Callable[[Heartbeat], None]) -> None:
        await self.on_channel(lambda channel: overhear(channel, heard))

    # --- consuming -------------------------------------------------------------------------------------------

    async def consume(self, queue: str, on_delivery: Callable[[Held], None], *, prefetch: int) -> QueueConsumer:
        found = self._queues.get(queue)
        if found is None:
            raise QueueNotFound(f"nobody bound the queue {queue} here; bound are: {', '.join(self._queues) or 'none'}")
        binding = found.binding
        take = self._letters(binding, on_delivery) if found.is_dead else self._deliveries(binding, on_delivery)

        async def declare_again(channel: BatchChannel) -> None:
            if found.is_dead:  # its binding is of some subscription, and may be of a former generation
                await declare_queue(channel, found.name, quorum())
            else:
                await self._declare(channel, binding)

        consumer = QueueConsumer(
            self._consuming,
            found.name,
            take,
            declare_again,
            prefetch=prefetch,
            ordered=binding.partitions is not None and not found.is_dead,
            on_close=self._consumers.discard,
        )
        self._consumers.add(consumer)
        try:
            await consumer.open()
        except BaseException:  # nobody else could close it
            await consumer.close()
            raise
        return consumer

    def _deliveries(self, binding: Binding, hand_on: Callable[[Delivery], None]) -> "Take":
        endings, time = self._endings, self.clock.time
        parted = (binding.partitions or 1) > 1

        def take(session: Session, message: Arrived) -> None:
            delivery = RabbitmqDelivery(session, message, binding, endings, time())
            if parted and endings.lacks_slot(delivery, message.routing_key):
                return
            if binding.parks:
                if delivery.redelivered:
                    delivery.count_deliveries()
                hand_on(delivery)
            elif endings.judge(delivery):
                hand_on(delivery)

        return take

    def _letters(self, binding: Binding, hand_on: Callable[[Delivery], None]) -> "Take":
        def take(session: Session, message: Arrived) -> None:
            delivery = RabbitmqDelivery(session, message, binding, self._endings, 0.0)
            delivery.expires_at = None
            delivery.letter = self._endings.letter_of(delivery)
            hand_on(delivery)

        return take

    # --- capabilities ----------------------------------------------------------------------------------------

    async def dead_letter(self, node: str, envelope: Envelope, reason: str, error: str) -> None:
        await self.on_channel(lambda channel: declare_queue(channel, dead_queue(node), quorum()))
        await self._endings.add_dead(node, envelope, reason, error)

    async def add_letters(self, letters: Sequence[DeadLetter]) -> None:
        """Dead letters that others made."""

        async def prepare(channel: BatchChannel) -> None:
            for node in sorted({letter.node for letter in letters}):
                await declare_queue(channel, dead_queue(node), quorum())

        await self.on_channel(prepare)
        for letter in letters:
            await self._endings.add_letter(letter)

    async def dead_letters(self, node: str, limit: int = 1000) -> list[DeadLetter]:
        found = self._queues.get(dead_letter_queue(node))
        letters: list[DeadLetter] = []
        if found is None:
            return letters

        async def look(channel: BatchChannel) -> None:
            session = Session(channel, ordered=True, changed=lambda: None)
            while len(letters) < limit:
                message = await channel.basic_get(found.name)
                if message.delivery_tag is None:
                    return
                arrived = Arrived(message.delivery_tag, False, "", message.header.properties, message.body)
                delivery = RabbitmqDelivery(session, arrived, found.binding, self._endings, 0.0)
                letters.append(self._endings.letter_of(delivery))

        with suppress(ChannelNotFoundEntity):
            await self.on_channel(look)
        return letters

    async def open_replies(self, on_reply: Callable[[Envelope], None]) -> str:
        name = reply_queue(f"{socket.gethostname()}-{os.getpid()}-{token_hex(8)}")
        queue = ReplyQueue(self._consuming, name, on_reply)
        self._reply_queues.append(queue)
        await queue.open()
        return queue.name

    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        return await send_replies(self._publisher, envelopes)

    @property
    def is_connected(self) -> bool:
        return self._open and self._publishing.is_connected and self._consuming.is_connected

    async def waiting(self, queue: str) -> int:
        """What is ready in all its partitions, without what is out."""
        names = partition_queues(self._binding(queue))
        ready = 0

        async def count(channel: BatchChannel) -> None:
            nonlocal ready
            ready = sum([await waiting_in(channel, name) for name in names])

        await self.on_channel(count)
        return ready

    async def idle(self) -> None:
        """Nothing is ready in the queues that are bound here, nothing is out to this process, and nothing that it has
        put off waits. What other processes hold is not seen."""
        quiet = 0
        while quiet < 2:  # what is on its way between two places is seen the second time
            quiet = quiet + 1 if await self._is_quiet() else 0
            await asyncio.sleep(_LOOK_SECONDS)

    async def _is_quiet(self) -> bool:
        bound = {each.name for each in self._queues.values() if each.is_dead or each.binding.queue not in self._unbound}
        ready = 0

        async def count(channel: BatchChannel) -> None:
            nonlocal ready
            for queue in self._queues.values():
                if queue.name in bound and not queue.is_dead:
                    ready += await waiting_in(channel, queue.name)

        def is_out() -> bool:
            return self._endings.busy or any(each.out for each in self._consumers if each.queue in bound)

        if is_out():
            return False
        await self.on_channel(count)
        return not ready and not is_out()


Take = Callable[[Session, Arrived], None]


def _names(envelopes: Sequence[Envelope]) -> str:
    more = f" and {len(envelopes) - 1} more" if len(envelopes) > 1 else ""
    return f"{envelopes[0]}{more}"
