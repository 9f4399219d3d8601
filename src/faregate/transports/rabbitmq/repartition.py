"""Gives an ordered subscription another number of partitions: a new generation of queues.

Rules kept here:
- No instance consumes meanwhile: it refuses as long as one does. Publishers may go on.
- The store notes the new generation when the leases of the earlier one are ours, for ever, and those of the new one,
  until all is done. So nobody consumes either, whatever starts, and however often this is interrupted.
- The new queues are bound before the earlier ones are unbound. What lands in both is recognised by its id.
- What waits in an earlier queue is parked in the store, in order, for the partition that its key is in now: first what
  was parked for earlier partitions, then what was in their queues. Whatever the new queues hold parks behind that.
- Every step may be the last one. Queues of earlier generations say what is left to do: running it again goes on.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from faregate.errors import ConfigurationError
from faregate.ids import slot_of
from faregate.ports.queue import Binding
from faregate.ports.store import NEXT, REPARTITION, Parked, Store, Transaction
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.migration import (
    Told,
    alone,
    claim_for_ever,
    consumed,
    empty_queue,
    envelope_in,
    row_of,
)
from faregate.transports.rabbitmq.names import EXCHANGE, TO, moving_queue, topic
from faregate.transports.rabbitmq.queue import RabbitmqQueue
from faregate.transports.rabbitmq.survey import SeenQueue, as_noted, left_over, look_at
from faregate.transports.rabbitmq.topology import SLOTS, arguments_of, declare, partition_queues


async def repartition(transport: RabbitmqQueue, wanted: Binding, store: Store, to: int, told: Told) -> bool:
    """Have so many partitions; False: it has. Raises `ConfigurationError` while somebody consumes."""
    async with alone(transport, wanted.queue):
        await store.note_generation(wanted.node, wanted.queue, wanted.partitions or 1)
        binding = await as_noted(wanted, store)
        await _check(transport, binding)
        finished = await _finish(transport, binding, store, told)
        if binding.partitions == to:
            return finished
        await _advance(binding, store, to)
        told(f"noted generation {binding.generation + 1} of {binding.queue}", 0)
        await _finish(transport, await as_noted(wanted, store), store, told)
        return True


async def _check(transport: RabbitmqQueue, binding: Binding) -> None:
    """Its queues are as they should be, and nobody consumes them."""
    for name in partition_queues(binding):
        seen = await look_at(transport, name, "current", arguments_of(binding))
        if seen.consumers:
            raise consumed(name, seen.consumers)
        if seen.difference is not None or (await look_at(transport, moving_queue(name), "moving")).exists:
            raise ConfigurationError(f"{name} is not as it should be: run `faregate rabbitmq migrate` first")


async def _advance(binding: Binding, store: Store, to: int) -> None:
    node, following = binding.node, replace(binding, generation=binding.generation + 1, partitions=to)
    for name in partition_queues(following):
        await claim_for_ever(store, node, name, REPARTITION)
    claimed: dict[str, int] = {}
    try:
        for name in partition_queues(binding):
            claimed[name] = await claim_for_ever(store, node, name, REPARTITION)
    except ConfigurationError:
        for name, epoch in claimed.items():
            await store.release_lease(node, name, REPARTITION, epoch, 0)
        raise
    if not await store.next_generation(node, binding.queue, binding.generation, to):
        raise ConfigurationError(f"another process has changed the partitions of {binding.queue} just now")


async def _finish(transport: RabbitmqQueue, binding: Binding, store: Store, told: Told) -> bool:
    """Take over what is left in queues of earlier generations, and let the current one be consumed."""
    earlier = [each async for each in left_over(transport, binding)]
    names = partition_queues(binding)
    ours = {each.queue: each for each in await store.leases(binding.node, names) if each.owner == REPARTITION}
    if not earlier and not ours:
        return False
    epochs = {name: await claim_for_ever(store, binding.node, name, REPARTITION) for name in names}
    await transport.on_channel(lambda channel: declare(channel, binding))
    for each in earlier:
        if each.consumers:
            raise consumed(each.name, each.consumers)
        await transport.on_channel(lambda channel, name=each.name: _unbind(channel, binding, name))  # type: ignore[misc]
    move = _Takeover(binding, names, epochs, store, transport.clock.time)
    for each in earlier:
        await claim_for_ever(store, binding.node, each.name, REPARTITION)
    if count := await move.what_is_parked():
        told("took over what waited for a later try", count)
    for each in _in_turn(earlier):
        told(f"emptied {each.name}", await empty_queue(transport, each.name, move.what_comes))
    for name, epoch in epochs.items():
        await store.release_lease(binding.node, name, REPARTITION, epoch, 0)
    return True


def _in_turn(earlier: Sequence[SeenQueue]) -> list[SeenQueue]:
    """Earlier generations first, and the last queue of each: those before it are how it is found."""
    generations: dict[str, list[SeenQueue]] = {}
    for each in earlier:
        generations.setdefault(each.name.rpartition("-")[0], []).append(each)
    return [each for queues in generations.values() for each in reversed(queues)]


async def _unbind(channel: BatchChannel, binding: Binding, name: str) -> None:
    """Whatever led to it: nobody knows how many they were."""
    for slot in ("*", "-", *map(str, range(SLOTS))):
        await channel.queue_unbind(name, EXCHANGE, routing_key=f"{topic(binding)}.{slot}")
        await channel.queue_unbind(name, TO, routing_key=f"{binding.queue}.{slot}")


class _Takeover:
    """Parks messages for the partitions that they are in now, under the leases of all of these."""

    def __init__(
        self, binding: Binding, names: Sequence[str], epochs: dict[str, int], store: Store, time: Callable[[], float]
    ) -> None:
        self._binding = binding
        self._names = names
        self._epochs = epochs
        self._store = store
        self._time = time

    async def what_is_parked(self) -> int:
        """For partitions of earlier generations, whether their queues are there or not; how many they were."""
        node, ours = self._binding.node, f"{self._binding.queue}.g"
        async with self._store.transaction() as transaction:
            rows = [
                row
                for row in await transaction.parked(node)
                if row.queue is not None and row.queue.startswith(ours) and row.queue not in self._names
            ]
            moved = [row._replace(queue=self._partition(slot_of(row.envelope.key)), position=NEXT) for row in rows]
            await transaction.unpark(node, {row.message_id: row.position for row in rows})
            await self._park(transaction, moved)
        return len(rows)

    async def what_comes(self, messages: Sequence[Arrived]) -> None:
        node, now = self._binding.node, self._time()
        rows = []
        for message in messages:
            partition = self._partition(message.routing_key.rpartition(".")[2])
            rows.append(row_of(self._binding, envelope_in(message, node), partition, now))
        async with self._store.transaction() as transaction:
            await self._park(transaction, rows)

    async def _park(self, transaction: Transaction, rows: Sequence[Parked]) -> None:
        node = self._binding.node
        for name in sorted({str(row.queue) for row in rows}):
            await transaction.hold_lease(node, name, self._epochs[name])
        await transaction.park(node, [(row, None) for row in rows])
        for queue, key in sorted({(str(row.queue), row.key) for row in rows if row.key is not None}):
            await transaction.next_of_key(node, queue, key, self._time())

    def _partition(self, slot: str) -> str:
        """As the bindings have it (`topology.routes_of`)."""
        return self._names[int(slot) % len(self._names) if slot.isdigit() else 0]
