"""Gives an ordered subscription another number of partitions: a new generation of queues. Instances may go on running.

Rules kept here:
- The store notes the new generation when its leases are ours. So nobody consumes it before we release them, whatever
  starts and however often this is interrupted. Instances see what is noted, let go of what they hold, and follow.
- The new queues are bound before the earlier ones are unbound. What lands in both is recognised by its id.
- Nothing of an earlier queue is moved before its lease is ours, for ever, and nobody consumes it.
- An instance that has just started with the earlier number may bind earlier queues after they were unbound. So a fence
  is put into each of these before: what is behind it is in the new queues, too, and goes to their end.
- What waits in front of the fence is parked in the store, in order, for the partition that its key is in now: first
  what was parked for earlier partitions, then what was in their queues. What the new queues hold parks behind that.
- Every step may be the last one, and running it again goes on. The lease of the first new partition is released first
  of all: as long as it is ours, what is in front of the fences is not all moved.
"""

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from pamqp.commands import Basic

from faregate.errors import ConfigurationError
from faregate.ids import slot_of
from faregate.message import Envelope
from faregate.ports.queue import Binding
from faregate.ports.store import NEXT, REPARTITION, Parked, Store, Transaction
from faregate.transports.rabbitmq.channels import BatchChannel, Publication
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.migration import (
    Told,
    alone,
    as_it_was,
    claim_for_ever,
    envelope_in,
    holder_of,
    row_of,
    take_out,
    with_slots,
)
from faregate.transports.rabbitmq.names import FENCE, TO, moving_queue
from faregate.transports.rabbitmq.queue import RabbitmqQueue
from faregate.transports.rabbitmq.survey import SeenQueue, as_noted, left_over, look_at
from faregate.transports.rabbitmq.topology import arguments_of, declare, is_partition, partition_queues, queue_of_slot

_LOOK_SECONDS = 0.2


async def repartition(transport: RabbitmqQueue, wanted: Binding, store: Store, to: int, told: Told) -> bool:
    """Have so many partitions; False: it has. It waits for instances that still hold earlier ones, and says so."""
    async with alone(transport, wanted.queue):
        await store.note_generation(wanted.node, wanted.queue, wanted.partitions or 1)
        binding = await as_noted(wanted, store)
        await _check(transport, binding)
        finished = await _Change(transport, binding, store, told).finish()
        had_no_order = (await look_at(transport, binding.queue, "left over")).exists
        if binding.partitions == to and not had_no_order:
            return finished
        # Earlier queues are found by counting up to the first that is missing: here none is.
        await transport.on_channel(lambda channel: declare(channel, binding))
        await _advance(binding, store, to)
        told(f"noted generation {binding.generation + 1} of {binding.queue}", 0)
        await _Change(transport, await as_noted(wanted, store), store, told).finish()
        return True


async def _check(transport: RabbitmqQueue, binding: Binding) -> None:
    """Its queues are as they should be."""
    for name in partition_queues(binding):
        seen = await look_at(transport, name, "current", arguments_of(binding))
        if seen.difference is not None or (await look_at(transport, moving_queue(name), "moving")).exists:
            raise ConfigurationError(f"{name} is not as it should be: run `faregate rabbitmq migrate` first")


async def _advance(binding: Binding, store: Store, to: int) -> None:
    node, following = binding.node, replace(binding, generation=binding.generation + 1, partitions=to)
    for name in partition_queues(following):
        if await claim_for_ever(store, node, name, REPARTITION) is None:
            raise ConfigurationError(f"{name} is held by {await holder_of(store, node, name)} before it is there")
    if not await store.next_generation(node, binding.queue, binding.generation, to):
        raise ConfigurationError(f"another process has changed the partitions of {binding.queue} just now")


class _Change:
    """From the queues of earlier generations to those of the current one."""

    def __init__(self, transport: RabbitmqQueue, binding: Binding, store: Store, told: Told) -> None:
        self._transport = transport
        self._binding = binding
        self._store = store
        self._told = told
        self._names = partition_queues(binding)

    async def finish(self) -> bool:
        """Whether there was something left to do."""
        leases = await self._store.leases(self._binding.node, self._names)
        ours = {each.queue: each.epoch for each in leases if each.owner == REPARTITION}
        is_moved = self._names[0] not in ours
        # What had no order is no earlier generation until there is a later one.
        earlier = [each for each in await self._earlier() if each.partitions is not None or not is_moved]
        if not earlier and not ours:
            return False
        await self._transport.on_channel(lambda channel: declare(channel, self._binding))
        if not is_moved:
            await self._take_over(earlier, ours)
        for name in self._names:  # the first of them first
            if name in ours:
                await self._store.release_lease(self._binding.node, name, REPARTITION, ours[name], 0)
        for each in earlier:
            await self._transport.abandon(each)
            for name in reversed(partition_queues(each)):  # those before it are how one is found
                await self._take_out(name, self._pass_on)
                await self._transport.on_channel(partial(_delete, name))
        return True

    async def _earlier(self) -> list[Binding]:
        """What there are queues of, earlier generations first."""
        queue, counts = self._binding.queue, Counter[str]()
        async for seen in left_over(self._transport, self._binding):
            counts[seen.name.rpartition("-")[0] if seen.name != queue else queue] += 1
        return [
            replace(self._binding, partitions=None)
            if prefix == queue
            else replace(self._binding, generation=int(prefix.removeprefix(f"{queue}.g")), partitions=count)
            for prefix, count in counts.items()
        ]

    async def _take_over(self, earlier: Sequence[Binding], epochs: dict[str, int]) -> None:
        names = [name for each in earlier for name in partition_queues(each)]
        for name in names:
            await self._until_ours(name)
        for name in names:
            await self._left_alone(name)
            await self._transport.put([Publication("", name, _fence(), b"")])
        for each in earlier:
            await self._transport.abandon(each)
        parking = _Parking(self._binding, self._names, epochs, self._store, self._transport)
        if count := await parking.what_is_parked():
            self._told("took over what waited for a later try", count)
        for each in earlier:
            for name in partition_queues(each):
                moved = await self._take_out(name, partial(parking.what_comes, each), _is_fence)
                self._told(f"took over {name}", moved)

    async def _until_ours(self, name: str) -> None:
        node, is_told = self._binding.node, False
        while await claim_for_ever(self._store, node, name, REPARTITION) is None:
            if not is_told:
                self._told(f"{name} is held by {await holder_of(self._store, node, name)}: waiting", 0)
                is_told = True
            await asyncio.sleep(_LOOK_SECONDS)

    async def _left_alone(self, name: str) -> SeenQueue:
        """It, once nobody consumes it. Who has no lease any more goes, or is taken for dead by the broker."""
        is_told = False
        while (seen := await look_at(self._transport, name, "left over")).consumers:
            if not is_told:
                self._told(f"somebody still consumes {name}: waiting", 0)
                is_told = True
            await asyncio.sleep(_LOOK_SECONDS)
        return seen

    async def _take_out(
        self,
        name: str,
        move: Callable[[Sequence[Arrived]], Awaitable[None]],
        until: Callable[[Arrived], bool] | None = None,
    ) -> int:
        return await take_out(self._transport, name, move, lambda: self._left_alone(name), until)

    async def _pass_on(self, messages: Sequence[Arrived]) -> None:
        """To the end of the partitions that they are in now: they are there already, and recognised by their ids."""
        node, queue = self._binding.node, self._binding.queue
        copies = [
            Publication(TO, f"{queue}.{_slot(each)}", as_it_was(each, node), each.body)
            for each in messages
            if not _is_fence(each)
        ]
        if copies:
            await self._transport.put(copies)


async def _delete(name: str, channel: BatchChannel) -> None:
    await channel.queue_delete(name)


def _fence() -> Basic.Properties:
    return Basic.Properties(message_id=uuid.uuid4().hex, message_type=FENCE, delivery_mode=2)


def _is_fence(message: Arrived) -> bool:
    return message.properties.message_type == FENCE


def _slot(message: Arrived) -> str:
    return message.routing_key.rpartition(".")[2]


class _Parking:
    """Parks messages for the partitions that they are in now, under the leases of all of these."""

    def __init__(
        self,
        binding: Binding,
        names: Sequence[str],
        epochs: dict[str, int],
        store: Store,
        transport: RabbitmqQueue,
    ) -> None:
        self._binding = binding
        self._names = names
        self._epochs = epochs
        self._store = store
        self._transport = transport

    async def what_is_parked(self) -> int:
        """For partitions of earlier generations, whether their queues are there or not; how many they were."""
        node = self._binding.node
        async with self._store.transaction() as transaction:
            rows = [
                row
                for row in await transaction.parked(node)
                if row.queue is not None and is_partition(self._binding, row.queue) and row.queue not in self._names
            ]
            moved = [
                row._replace(queue=self._partition(row.envelope, slot_of(row.envelope.key)), position=NEXT)
                for row in rows
            ]
            await transaction.unpark(node, {row.message_id: row.position for row in rows})
            await self._park(transaction, moved)
        return len(rows)

    async def what_comes(self, earlier: Binding, messages: Sequence[Arrived]) -> None:
        """From these partitions."""
        node, now = self._binding.node, self._transport.clock.time()
        rows = []
        for message in await with_slots(self._transport, earlier, messages):
            envelope = envelope_in(message, node)
            rows.append(row_of(self._binding, envelope, self._partition(envelope, _slot(message)), now))
        async with self._store.transaction() as transaction:
            await self._park(transaction, rows)

    async def _park(self, transaction: Transaction, rows: Sequence[Parked]) -> None:
        node = self._binding.node
        for name in sorted({str(row.queue) for row in rows}):
            await transaction.hold_lease(node, name, self._epochs[name])
        await transaction.park(node, [(row, None) for row in rows])
        for queue, key in sorted({(str(row.queue), row.key) for row in rows if row.key is not None}):
            await transaction.next_of_key(node, queue, key, self._transport.clock.time())

    def _partition(self, envelope: Envelope, slot: str) -> str:
        """What came to a single partition without its slot is in order, and goes where its key is now."""
        key_of = self._binding.key_of
        if not slot.isdigit() and key_of is not None:
            slot = slot_of(key_of(envelope))
        return queue_of_slot(self._names, slot)
