"""Which partitions of an ordered subscription this instance of its node consumes: leases in the node's store.

Rules kept here:
- An instance claims what is free. Who has at least two fewer than whoever has most asks that one to let one go, one at
  a time, so that all end with the same number, or one more.
- Letting go is orderly: nothing more of the partition begins, what runs ends and is settled, the consumer closes, which
  brings back the rest in order, and then the lease goes. What is fetched is never released one by one.
- A lease that could not be renewed in time is as good as lost: nothing more of it begins, and its consumer closes.
- Which partitions there are the store has noted, as a generation. When it has noted another, this instance lets go of
  all that it holds, and then follows. Whoever noted it has the leases of the new ones until they may be consumed. Only
  then nothing may lead to the former ones any more; this instance may have bound them late, so it sees to that, whether
  it gets a lease of the new ones or not.
- Every commit of what a partition brought holds the lease (`LeasedFeed`). So a deposed owner commits nothing, however
  late it learns of it: the order of a key follows from that, and from no clock.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol, cast

from faregate.bus.parked_lines import ParkedLines
from faregate.core.feed import QueueFeed
from faregate.core.unit import TRANSACTION_LOST
from faregate.core.work import Work
from faregate.errors import FaregateError, LeaseLost
from faregate.ports.clock import Clock
from faregate.ports.queue import Binding, Consumer, Delivery, Held, Partitioned, QueueTransport
from faregate.ports.store import REPARTITION, Lease, Store, Transaction

log = logging.getLogger("faregate.bus")

LEASE_SECONDS = 10.0
_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 5.0


class Plan(NamedTuple):
    claim: list[str]
    ask: Lease | None
    let_go: str | None


def plan(instance: str, queues: Sequence[str], leases: Sequence[Lease]) -> Plan:
    """What to do about these partitions, as their leases are now."""
    kept = {each.queue for each in leases if each.owner is None and each.wanted_by == instance}
    taken = {each.queue: each for each in leases if each.left > 0 and each.queue not in kept}
    held = Counter(each.owner for each in taken.values() if each.owner is not None)
    free = [queue for queue in queues if queue not in taken]
    asked = ((each, each.wanted_by) for each in taken.values() if each.owner == instance)
    let_go = next((each.queue for each, by in asked if by is not None and held[instance] >= held[by] + 2), None)
    ask = None
    if not free and not any(each.wanted_by == instance for each in taken.values()):
        most = max(held, key=lambda owner: held[owner], default="")
        if held[most] >= held[instance] + 2:
            ask = next((each for each in taken.values() if each.owner == most and each.wanted_by is None), None)
    return Plan(free, ask, let_go)


class Partition:
    """One that this instance holds."""

    def __init__(self, node: str, queue: str, epoch: int, until: float, *, several: bool = False) -> None:
        """`several`: its messages may have several keys."""
        self.node = node
        self.queue = queue
        self.epoch = epoch
        self.until = until
        """By the monotonic clock of this process."""
        self.keys: set[str] = set()
        """The keys with parked messages: later ones park behind them."""
        self.lines = ParkedLines() if several else None
        """Instead of these, where messages may have several keys."""
        self.parking = asyncio.Lock()
        """Held while rows of its keys come, or go outside of their lanes."""
        self.ended = False
        """Whether nothing more of it begins here."""
        self.consumer: Consumer | None = None
        self.arriving = True
        """Whether its consumer is still being made; it is let go after that, so that the consumer is closed, too."""

    def is_held(self, now: float) -> bool:
        return not self.ended and now < self.until

    def is_behind(self, order_key: str, key: str | None) -> bool:
        """Whether a message has to wait for one that is parked."""
        return order_key in self.keys if self.lines is None else self.lines.is_behind(key)

    def enter(self, message_id: str, order_key: str, key: str | None) -> None:
        """It is about to be parked: later ones wait behind it from now on."""
        if self.lines is None:
            self.keys.add(order_key)
        else:
            self.lines.enter(message_id, key)

    async def hold(self, transaction: Transaction) -> None:
        """Nobody takes it over before the transaction ends. Raises `LeaseLost`."""
        try:
            await transaction.hold_lease(self.node, self.queue, self.epoch)
        except LeaseLost:
            self.ended, self.until = True, 0.0
            raise


class OfPartition(Delivery, Protocol):
    partition: Partition | None


class LeasedFeed(QueueFeed):
    keeps_outcomes = False

    async def record(self, transaction: Transaction, works: Sequence[Work]) -> None:
        found: dict[Partition, list[Delivery]] = {}
        for work in works:
            partition = cast(OfPartition, work.delivery).partition
            if partition is not None:
                found.setdefault(partition, []).append(work.delivery)
        for partition in sorted(found, key=lambda each: each.queue):
            try:
                await partition.hold(transaction)
            except LeaseLost as exc:
                exc.deliveries = found[partition]
                raise

    async def dead_letter(self, transaction: Transaction, work: Work) -> None:
        await self.record(transaction, [work])


class LeasedConsumer:
    """Consumes the partitions that this instance holds, as they come and go."""

    def __init__(
        self,
        binding: Binding,
        store: Store,
        transport: QueueTransport,
        instance: str,
        clock: Clock,
        prefetch: int,
        *,
        take: Callable[[Partition, Held], None],
        move_in: Callable[[Partition], Awaitable[None]],
        move_out: Callable[[Partition, bool], Awaitable[None]],
    ) -> None:
        """`move_in` comes before a partition's first delivery. `move_out` forgets what has not begun, and waits for the
        end of what has if it is told to."""
        self._binding = binding
        self._store = store
        self._transport = transport
        self._instance = instance
        self._clock = clock
        self._prefetch = prefetch
        self._take = take
        self._move_in = move_in
        self._move_out = move_out
        self._queues: list[str] = []
        self._held: dict[str, Partition] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._renew_at = 0.0
        self._is_current = True
        """Whether its partitions are those that the store has noted."""
        self._former: list[Binding] = []
        self._abandoning: asyncio.Task[None] | None = None
        self._paused = False
        self._wake = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def partitions(self) -> list[str]:
        """Those that it consumes now."""
        return sorted(queue for queue, each in self._held.items() if not each.ended)

    async def start(self) -> None:
        self._queues = await cast(Partitioned, self._transport).partitions(self._binding.queue)
        await self._look()
        self._task = asyncio.create_task(self._run(), name=f"leases-{self._binding.queue}")

    def pause(self) -> None:
        """Let all of them go; others may have them meanwhile."""
        self._paused = True
        for partition in list(self._held.values()):
            self._let_go(partition)

    def resume(self) -> None:
        self._paused = False
        self._wake.set()

    async def close(self) -> None:
        self._closed = True
        self._wake.set()
        tasks = [*filter(None, [self._task, self._abandoning]), *self._leaving.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)  # what it says to the store need not be cut off
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for partition in list(self._held.values()):
            await self._leave(partition, wait=False)

    async def _run(self) -> None:
        while not self._closed:
            timer = self._clock.call_later(_LOOK_SECONDS, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            self._wake.clear()
            if self._closed:
                return
            try:
                await self._look()
            except TRANSACTION_LOST as exc:
                log.warning("the leases of %s cannot be seen to now: %s", self._binding.queue, exc)
            except Exception:
                log.exception("the leases of %s cannot be seen to now", self._binding.queue)

    async def _look(self) -> None:
        now = self._clock.monotonic()
        for partition in list(self._held.values()):
            if not partition.is_held(now):
                self._let_go(partition)
        if now >= self._renew_at:
            await self._renew(now)
        await self._follow()
        if not self._is_current or (self._paused and not self._former):
            return
        node = self._binding.node
        leases = await self._store.leases(node, self._queues)
        is_moved = all(each.owner != REPARTITION for each in leases if each.queue == self._queues[0])
        if self._former and is_moved and (self._abandoning is None or self._abandoning.done()):
            self._abandoning = asyncio.create_task(self._abandon())
        if self._paused:
            return
        todo = plan(self._instance, self._queues, leases)
        for queue in todo.claim:
            if queue not in self._held and not self._paused:
                await self._claim(queue)
        if todo.ask is not None:
            await self._store.ask_for_lease(node, todo.ask.queue, todo.ask.epoch, self._instance)
        if todo.let_go in self._held and not self._leaving:
            self._let_go(self._held[todo.let_go])

    async def _follow(self) -> None:
        """Have the partitions that the store has noted, as soon as nothing of the former ones is held."""
        found = await self._store.generation(self._binding.node, self._binding.queue)
        self._is_current = found is None or found.number == self._binding.generation
        if found is None or self._is_current:
            return
        for partition in list(self._held.values()):
            self._let_go(partition)
        if self._held:
            return  # it looks again when they are gone
        binding = replace(self._binding, generation=found.number, partitions=found.partitions)
        await self._transport.bind(binding)
        self._queues = await cast(Partitioned, self._transport).partitions(binding.queue)
        self._former.append(self._binding)
        self._binding, self._is_current = binding, True
        log.info("%s has %d partitions now (generation %d)", binding.queue, found.partitions, found.number)

    async def _abandon(self) -> None:
        """What fails is tried again when it looks next."""
        try:
            while self._former:
                await cast(Partitioned, self._transport).abandon(self._former[0])
                del self._former[0]
        except FaregateError as exc:
            log.warning("something may still lead to former partitions of %s: %s", self._binding.queue, exc)

    async def _renew(self, now: float) -> None:
        held = [each for each in self._held.values() if now < each.until]
        epochs = {each.queue: each.epoch for each in held}
        renewed = await self._store.renew_leases(self._binding.node, self._instance, epochs, LEASE_SECONDS)
        for partition in held:
            partition.until = now + LEASE_SECONDS if partition.queue in renewed else 0.0
        self._renew_at = now + LEASE_SECONDS / 3

    async def _claim(self, queue: str) -> None:
        now = self._clock.monotonic()
        epoch = await self._store.claim_lease(self._binding.node, queue, self._instance, LEASE_SECONDS)
        if epoch is None:
            return
        partition = self._held[queue] = Partition(
            self._binding.node, queue, epoch, now + LEASE_SECONDS, several=self._binding.several
        )

        def take(held: Held) -> None:
            if not partition.ended:
                self._take(partition, held)

        try:
            await self._move_in(partition)
            prefetch = max(2, self._prefetch // (self._binding.partitions or 1))
            partition.consumer = await self._transport.consume(queue, take, prefetch=prefetch)
        except BaseException:
            partition.ended = True
            raise
        finally:
            partition.arriving = False
            if partition.ended or self._paused:
                self._let_go(partition)

    def _let_go(self, partition: Partition) -> None:
        partition.ended = True
        if partition.arriving or partition.queue in self._leaving:
            return
        if partition.consumer is not None:
            partition.consumer.pause()
        orderly = self._clock.monotonic() < partition.until
        task = asyncio.create_task(self._leave(partition, wait=orderly))
        self._leaving[partition.queue] = task
        task.add_done_callback(lambda _: self._leaving.pop(partition.queue, None))

    async def _leave(self, partition: Partition, *, wait: bool) -> None:
        partition.ended = True
        await self._move_out(partition, wait)
        if partition.consumer is not None:
            await partition.consumer.close()
        keep_seconds = LEASE_SECONDS if self._is_current else 0.0  # nobody wants a former one any more
        with suppress(*TRANSACTION_LOST):  # then it runs out
            await self._store.release_lease(
                partition.node, partition.queue, self._instance, partition.epoch, keep_seconds
            )
        self._held.pop(partition.queue, None)
        self._wake.set()
