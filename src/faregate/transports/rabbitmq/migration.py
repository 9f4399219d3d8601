"""Makes a queue anew that is declared otherwise, without losing a message.

Beside the queue there is QUEUE.moving for that time. Rules kept here:
- At every moment one of the two takes what comes: the next one is bound before the other is unbound. What lands in both
  is recognised by its id.
- A message leaves a queue when the broker has confirmed it in the other, or the store has committed it.
- Every step may be the last one. What is on the broker says what is left to do, so running it again goes on from there.
- Without order, what waits goes to QUEUE.moving and back. The partition of an ordered subscription could not keep its
  order so: what comes meanwhile would be before what is brought back. What waits there is parked in the store instead,
  behind what is parked already, and whatever comes parks behind that. Until it is all there the lease of the partition
  is the migration's, for as long as that takes: no instance consumes it, not even after an interruption.
- It refuses while somebody consumes. AMQP does not show who holds a message and does not consume.
- One migration of a queue at a time: it has an exclusive queue, which ends with its connection.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from aiormq.exceptions import ChannelLockedResource
from pamqp.commands import Basic

from faregate.errors import BrokerUnavailable, ConfigurationError
from faregate.ids import message_id_of
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding
from faregate.ports.store import BEHIND, MIGRATION, NEXT, Parked, Store
from faregate.transports.rabbitmq.channels import BatchChannel, Publication
from faregate.transports.rabbitmq.delay import LAST, arrival
from faregate.transports.rabbitmq.endings import NO_SLOT, slot_missing
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.names import dead_queue, moving_queue
from faregate.transports.rabbitmq.queue import RabbitmqQueue
from faregate.transports.rabbitmq.survey import SeenQueue, look_at
from faregate.transports.rabbitmq.topology import (
    arguments_of,
    declare_exchange,
    declare_queue,
    partition_queues,
    quorum,
    routes_of,
)
from faregate.transports.rabbitmq.wire import envelope_of, properties_of

_FOR_EVER = 100 * 365 * 86_400.0
_AT_ONCE = 200
_LOOK_SECONDS = 60.0
_QUIET_SECONDS = 0.3
"""For how long nothing comes from a queue that says it has nothing."""

Told = Callable[[str, int], None]
"""Called with what is done, and how many messages are where they stay by it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One queue, as it should be."""

    name: str
    node: str
    arguments: dict[str, Any]
    routes: list[tuple[str, str]]
    """(exchange, routing key) of each binding."""
    ordered: Binding | None = None
    """Of the partition of an ordered subscription."""

    @property
    def moving(self) -> str:
        return moving_queue(self.name)

    @property
    def moving_arguments(self) -> dict[str, Any]:
        """Any number may consume it: we do."""
        return {name: value for name, value in self.arguments.items() if name != "x-single-active-consumer"}


def plans_of(binding: Binding) -> list[Plan]:
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in partition_queues(binding)}
    for queue, exchange, key in routes_of(binding):
        found[queue].append((exchange, key))
    if binding.partitions is None:  # later tries of a node without a store come back by its name
        found[binding.queue].append((LAST, arrival(binding.queue)))
    ordered = None if binding.partitions is None else binding
    return [Plan(name, binding.node, arguments_of(binding), routes, ordered) for name, routes in found.items()]


def dead_plan(node: str) -> Plan:
    return Plan(dead_queue(node), node, quorum(), [])


async def migrate(transport: RabbitmqQueue, plan: Plan, store: Store | None, told: Told) -> bool:
    """Make it as it should be; False: it is. Raises `ConfigurationError` while somebody consumes it."""
    async with alone(transport, plan.name):
        queue = await look_at(transport, plan.name, "current", plan.arguments)
        moving = await look_at(transport, plan.moving, "moving")
        if not moving.exists and queue.exists and queue.difference is None:
            return plan.ordered is not None and store is not None and await _release_left(store, plan)
        if not moving.exists and not queue.exists:
            await _declare(transport, plan, plan.name, plan.arguments)
            told(f"made {plan.name}", 0)
            return True
        if queue.consumers and (queue.difference is not None or plan.ordered is not None):
            raise consumed(plan.name, queue.consumers)
        lease: _Lease | None = None
        away, back = _to(transport, plan, plan.moving), _to(transport, plan, plan.name)
        if plan.ordered is not None:
            assert store is not None, "an ordered subscription has a store"
            lease = await _Lease.claim(store, plan, plan.ordered, transport)
            away = back = lease.park
        if queue.difference is not None:
            await _declare(transport, plan, plan.moving, plan.moving_arguments)
            await _unbind(transport, plan, plan.name)
            moved = await empty_queue(transport, plan.name, away)
            told(f"emptied {plan.name}", moved if lease is not None else 0)  # else they are counted on their way back
        await _declare(transport, plan, plan.name, plan.arguments)
        await _unbind(transport, plan, plan.moving)
        told(f"made {plan.name} anew", await empty_queue(transport, plan.moving, back))
        if lease is not None:
            await lease.release()
        return True


@asynccontextmanager
async def alone(transport: RabbitmqQueue, queue: str) -> AsyncIterator[None]:
    """Nobody else moves its messages. Raises `ConfigurationError` when somebody does."""
    name = f"{queue}.migration"

    async def lock(channel: BatchChannel) -> None:
        try:
            await channel.queue_declare(name, exclusive=True)
        except ChannelLockedResource as exc:
            raise ConfigurationError(f"another process works on {queue} now: wait for it") from exc

    async def unlock(channel: BatchChannel) -> None:
        await channel.queue_delete(name)

    await transport.on_channel(lock)
    try:
        yield
    finally:
        with suppress(BrokerUnavailable):  # then it ends with the connection
            await transport.on_channel(unlock)


def consumed(queue: str, consumers: int) -> ConfigurationError:
    return ConfigurationError(
        f"somebody consumes {queue} ({consumers}): stop the instances of its node, and then run this again. Publishers "
        "may go on"
    )


async def _declare(transport: RabbitmqQueue, plan: Plan, name: str, arguments: dict[str, Any]) -> None:
    """With all that leads to the queue of this plan."""

    async def declare(channel: BatchChannel) -> None:
        await declare_queue(channel, name, arguments)
        if any(exchange == LAST for exchange, _ in plan.routes):
            await declare_exchange(channel, LAST)
        for exchange, key in plan.routes:
            await channel.queue_bind(name, exchange, routing_key=key)

    await transport.on_channel(declare)


async def _unbind(transport: RabbitmqQueue, plan: Plan, name: str) -> None:
    async def unbind(channel: BatchChannel) -> None:
        for exchange, key in plan.routes:
            await channel.queue_unbind(name, exchange, routing_key=key)

    await transport.on_channel(unbind)


# --- what waits ---------------------------------------------------------------------------------------------------

Move = Callable[[Sequence[Arrived]], Awaitable[None]]
"""Put messages elsewhere; they are safe there when it returns."""


def _to(transport: RabbitmqQueue, plan: Plan, to: str) -> Move:
    async def move(messages: Sequence[Arrived]) -> None:
        await transport.put([Publication("", to, as_it_was(each, plan.node), each.body) for each in messages])

    return move


async def empty_queue(transport: RabbitmqQueue, name: str, move: Move) -> int:
    """Move what waits in a queue that nothing leads to, and delete it; how many they were."""

    async def delete(channel: BatchChannel) -> None:
        await channel.queue_delete(name)

    moved = await take_out(transport, name, move, lambda: _unconsumed(transport, name))
    await transport.on_channel(delete)
    return moved


async def _unconsumed(transport: RabbitmqQueue, name: str) -> SeenQueue:
    seen = await look_at(transport, name, "moving")
    if seen.consumers:
        raise consumed(name, seen.consumers)
    return seen


async def take_out(
    transport: RabbitmqQueue,
    name: str,
    move: Move,
    look: Callable[[], Awaitable[SeenQueue]],
    until: Callable[[Arrived], bool] | None = None,
) -> int:
    """Move what waits in a queue, in its order, or what waits there in front of a certain message; how many they were.
    `look` looks at the queue once nobody consumes it. Raises `BrokerUnavailable` when that message does not come."""
    moved, is_over = 0, False
    while not is_over and (await look()).waiting:

        async def take(channel: BatchChannel) -> None:
            nonlocal moved, is_over
            count, is_over = await _take_all(channel, name, move, until or (lambda _: False))
            moved += count

        await transport.on_channel(take)
        await _until_left(transport, name)
    if until is not None and not is_over:
        raise BrokerUnavailable(f"RabbitMQ did not hand out all that was put into {name}: run this again")
    return moved


async def _take_all(channel: BatchChannel, name: str, move: Move, until: Callable[[Arrived], bool]) -> tuple[int, bool]:
    """How many, and whether the one that it ends at has come. By consuming: a queue with a single active consumer
    answers no `get`."""
    arrived: asyncio.Queue[Arrived] = asyncio.Queue()
    channel.incoming.delivered = arrived.put_nowait
    lost = channel.closing
    moved = 0
    await channel.basic_qos(prefetch_count=_AT_ONCE)
    await channel.basic_consume(name, _unused)
    while not lost.done():
        batch: list[Arrived] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(_QUIET_SECONDS):
                batch.append(await arrived.get())
        if not batch:
            break
        while not arrived.empty():
            batch.append(arrived.get_nowait())
        wanted = list(takewhile(lambda each: not until(each), batch))
        if wanted:
            await move(wanted)
            await channel.write(channel.acknowledgements([], wanted[-1].delivery_tag, []))
        moved += len(wanted)
        if len(wanted) < len(batch):
            return moved, True
    return moved, False


async def look_through(transport: RabbitmqQueue, seen: SeenQueue) -> list[Arrived]:
    """What waits in a queue that nobody consumes; it stays there. Raises `BrokerUnavailable` when it does not come."""
    found: list[Arrived] = []

    async def look(channel: BatchChannel) -> None:
        arrived: asyncio.Queue[Arrived] = asyncio.Queue()
        channel.incoming.delivered = arrived.put_nowait
        await channel.basic_consume(seen.name, _unused)
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                while len(found) < seen.waiting:
                    found.append(await arrived.get())
        except TimeoutError as exc:
            raise BrokerUnavailable(
                f"RabbitMQ has {seen.waiting} messages in {seen.name}, and handed out {len(found)} of them"
            ) from exc
        while not arrived.empty():
            found.append(arrived.get_nowait())

    if seen.waiting:
        await transport.on_channel(look)
        await _until_left(transport, seen.name)
    return found


async def _until_left(transport: RabbitmqQueue, name: str) -> None:
    """The broker has seen that we consume no more: what was on its way to us is back."""
    for _ in range(100):
        if not (await look_at(transport, name, "moving")).consumers:
            return
        await asyncio.sleep(0.05)


async def _unused(message: object) -> None:
    """The channel hands deliveries over by itself."""
    raise AssertionError(message)


def envelope_in(message: Arrived, node: str) -> Envelope:
    return envelope_of(message.properties, message.body, message.routing_key, node)


def as_it_was(message: Arrived, node: str) -> Basic.Properties:
    """Its properties, with what only its routing key said, which is another one now."""
    properties, envelope = message.properties, envelope_in(message, node)
    if not properties.message_type or not properties.app_id:
        said = properties_of(envelope)
        properties.headers = {**(said.headers or {}), **(properties.headers or {})}
        properties.message_type = properties.message_type or envelope.type or None
        properties.app_id = properties.app_id or envelope.source or None
    properties.user_id = None  # the broker takes it from nobody else
    properties.delivery_mode = 2
    return properties


async def _release_left(store: Store, plan: Plan) -> bool:
    """Everything was done but this; whether it was."""
    for lease in await store.leases(plan.node, [plan.name]):
        if lease.owner == MIGRATION:
            await store.release_lease(plan.node, plan.name, MIGRATION, lease.epoch, 0)
            return True
    return False


async def claim_for_ever(store: Store, node: str, queue: str, owner: str) -> int | None:
    """Its epoch; that of an interrupted run, if it is this owner's already. None: it is another's."""
    found = next(iter(await store.leases(node, [queue])), None)
    if found is not None and found.owner == owner:
        return found.epoch
    return await store.claim_lease(node, queue, owner, _FOR_EVER)


async def holder_of(store: Store, node: str, queue: str) -> str:
    """Who has its lease, in words."""
    found = next(iter(await store.leases(node, [queue])), None)
    if found is None or found.left <= 0:
        return "nobody"
    left = "" if found.left > _FOR_EVER / 2 else f" for {found.left:.0f} s more"
    return f"{found.owner or found.wanted_by}{left}"


async def with_slots(transport: RabbitmqQueue, binding: Binding, messages: Sequence[Arrived]) -> list[Arrived]:
    """Without those that are dead letters for lack of a slot in the partitions where they wait: now they are."""
    kept, letters = [], []
    for message in messages:
        envelope = envelope_in(message, binding.node)
        error = slot_missing(binding, envelope, message.routing_key)
        if error is None:
            kept.append(message)
        else:
            now = transport.clock.time()
            letters.append(DeadLetter.of(binding.node, envelope, NO_SLOT, error, now, queue=binding.queue))
    if letters:
        await transport.add_letters(letters)
    return kept


def row_of(binding: Binding, envelope: Envelope, queue: str, now: float) -> Parked:
    """As the bus parks what waits behind others, and what is scheduled."""
    key, due = None, now
    if envelope.deliver_at is not None and envelope.deliver_at > now:
        due = envelope.deliver_at
    else:
        key = binding.order_key(None if binding.key_of is None else binding.key_of(envelope))
    return Parked(message_id_of(envelope, binding.node), due if key is None else BEHIND, 0, key, NEXT, envelope, queue)


class _Lease:
    """The partition is ours: nobody consumes it before all that waits is parked, in order."""

    def __init__(self, store: Store, queue: str, binding: Binding, transport: RabbitmqQueue, epoch: int) -> None:
        self._store = store
        self._queue = queue
        self._binding = binding
        self._transport = transport
        self._epoch = epoch

    @classmethod
    async def claim(cls, store: Store, plan: Plan, binding: Binding, transport: RabbitmqQueue) -> "_Lease":
        epoch = await claim_for_ever(store, plan.node, plan.name, MIGRATION)
        if epoch is None:
            raise ConfigurationError(
                f"{plan.name} is held by {await holder_of(store, plan.node, plan.name)}: stop the instances of "
                f"{plan.node}, and then run this again"
            )
        return cls(store, plan.name, binding, transport, epoch)

    async def park(self, messages: Sequence[Arrived]) -> None:
        node, queue, now = self._binding.node, self._queue, self._transport.clock.time()
        kept = await with_slots(self._transport, self._binding, messages)
        rows = [row_of(self._binding, envelope_in(message, node), queue, now) for message in kept]
        async with self._store.transaction() as transaction:
            await transaction.hold_lease(node, queue, self._epoch)
            await transaction.park(node, [(row, None) for row in rows])
            for key in sorted({row.key for row in rows if row.key is not None}):
                await transaction.next_of_key(node, queue, key, now)

    async def release(self) -> None:
        await self._store.release_lease(self._binding.node, self._queue, MIGRATION, self._epoch, 0)
