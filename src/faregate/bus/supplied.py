"""What a transport lacks, supplied by the bus: later tries, scheduled messages, expiry, dead letters, order.

A node with a store needs none of these from its transport. Rules kept here:
- A message that has to wait is a row in the node's store before its delivery is settled, and is handed in when it is
  due. The row goes with the commit of its message's effects. If the transport delivers a message that waits here, that
  copy is settled.
- What waits is handed in by one instance: by the owner of its partition, or by whoever claimed it.
- In a strict key, or a serial subscription, what comes later parks behind what waits, in order; when the first is done
  the next is due. Whether it has to is asked when its turn has come (`admit`), so that the lanes keep the order.
- The starts of a parked message are counted before a handler begins; one that does not end its process takes its start
  back. A message that the transport delivers again without knowing how often it was started is parked first, for that.
  One that was started too often is a dead letter in the store. So is one that expired; the core sees to that.
- A first delivery costs no statement, unless its key has parked messages.
- While the store is away a message waits in memory, and then goes back to the transport. In an ordered subscription its
  partition is let go instead, and taken up anew: only so everything keeps its place.
- Where messages have several keys, their parked rows are one line in the store, and who of them waits for whom is known
  to the owner of the partition (`parked_lines.py`).
- What cannot be supplied is refused when the bus is made, by the name of the subscription.

Longer than most files because all of this is about the same few rows: where one is parked, the others find it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from heapq import heappop, heappush
from typing import Any, NamedTuple, cast

from faregate.bus.leases import LeasedFeed, Partition
from faregate.core.dead_letter import dead_letter
from faregate.core.unit import TRANSACTION_LOST
from faregate.core.work import Work
from faregate.errors import ConfigurationError, StaleLock
from faregate.ids import message_id_of
from faregate.message import Envelope, too_late_at
from faregate.node.subscription import Subscription
from faregate.ports.clock import Clock, Timer
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding, Capability, Delivery, Held, Outcome, QueueTransport
from faregate.ports.store import BEHIND, NEXT, Parked, Store, Transaction

log = logging.getLogger("faregate.bus")

SUPPLIED: frozenset[Capability] = frozenset({"dead letters", "delay", "expire"})
"""To nodes with a store."""
_IN_ORDER: frozenset[Capability] = frozenset({"order", "place"})
_LOOK_SECONDS = 1.0
"""How often it looks for rows of other processes."""
_CLAIM_SECONDS = 30.0
"""For how long an instance that died keeps others from what it was trying again."""
_STORE_DOWN_SECONDS = 10.0
_OUT = 200
"""How many parked messages of a node are handed in at a time."""


def check_capabilities(transport: QueueTransport, url: str, subscription: Subscription, has_store: bool) -> bool:
    """Whether the bus has to supply something. Raises `ConfigurationError` for what it cannot."""
    missing = SUPPLIED - transport.capabilities
    unordered = _IN_ORDER - transport.capabilities if subscription.ordered else None
    if unordered and not is_leased(transport, subscription):
        raise ConfigurationError(
            f"{subscription} asks for order, and the transport {url} cannot keep it: it lacks {_names(unordered)}. "
            "Take another transport, or a subscription without order="
        )
    if (missing or unordered) and not has_store:
        raise ConfigurationError(
            f"{subscription} needs a store: the transport {url} lacks {_names(missing | (unordered or set()))}, which "
            "the bus supplies to nodes that have one. "
            f"Give it one: fg.Bus(…, store={{{subscription.node!r}: '…'}})"
        )
    return has_store and (bool(missing) or "order" not in transport.capabilities)


def is_leased(transport: QueueTransport, subscription: Subscription) -> bool:
    """Whether its messages are in partitions, each of which one instance consumes at a time."""
    parted = "partitions" in transport.capabilities and not transport.capabilities >= _IN_ORDER
    return parted and subscription.ordered


def _names(capabilities: frozenset[Capability]) -> str:
    return ", ".join(f'"{each}"' for each in sorted(capabilities))


class Entrance(NamedTuple):
    """What is needed of a subscription."""

    binding: Binding
    take: Callable[[Delivery], None]
    tell_dead: Callable[[Delivery, str, str], None]
    is_paused: Callable[[], bool]


class Supplied:
    """A delivery with what its transport lacks; it expires at `until`."""

    def __init__(
        self,
        held: Held,
        waiting: "Waiting",
        entrance: Entrance,
        partition: Partition | None,
        redeliveries: int = 0,
        until: float | None = None,
    ) -> None:
        binding = entrance.binding
        self.held = held
        self.entrance = entrance
        self.partition = partition
        self.row = held.row if isinstance(held, ParkedHold) else None
        self.is_counted = False
        """Whether its start is counted in the store."""
        self._waiting = waiting
        self._until = until
        self.envelope = held.envelope
        self.redelivered = held.redelivered
        self.position = held.position
        self.lock_seconds = held.lock_seconds
        self.redeliveries = redeliveries
        self.key = None if binding.key_of is None else binding.key_of(held.envelope)
        self.order_key = None if partition is None else binding.order_key(self.key)
        """What later ones wait behind; None: nobody waits."""
        self.letter: DeadLetter | None = None
        self.renew = held.renew
        self.settle = held.settle

    @property
    def tries(self) -> int:
        return self.held.tries

    @property
    def expired(self) -> bool:
        return self._until is not None and self._until <= self._waiting.clock.time()

    @property
    def is_behind(self) -> bool:
        """Whether earlier ones of its key wait."""
        key, partition = self.order_key, self.partition
        if key is None or partition is None or not partition.is_behind(key, self.key):
            return False
        return self.row is None or self.row.key is None

    @property
    def has_unknown_starts(self) -> bool:
        return self.row is None and self.redelivered and not self.held.tries

    @property
    def may_be_parked(self) -> bool:
        """Whether a row of it may wait; where there is an order, `is_behind` says so."""
        return self.redelivered and self.row is None and self.order_key is None

    def start(self) -> None:
        if not self.expired:
            self.held.start()

    async def hold(self, transaction: Transaction) -> None:
        """What is committed about it counts only while it is this instance's. Raises `LeaseLost`."""
        if self.partition is not None:
            await self.partition.hold(transaction)

    async def release(self, *, begun: bool = True) -> None:
        await self._waiting.give_back(self, begun=begun)

    async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
        """What is parked comes when it is due: behind what was handed in and parked before, whatever waits in the
        transport."""
        await self._waiting.put_off(self, delay, self.redeliveries + (1 if counted else 0))

    async def dead_letter(self, reason: str, error: str) -> None:
        raise AssertionError(f"{self.envelope}: a dead letter belongs in the store ({reason}: {error})")


class ParkedHold:
    """A parked message that was handed in. Its row stays until it ends."""

    redelivered = True
    lock_seconds = 60.0
    position = None

    def __init__(self, row: Parked, waiting: "Waiting") -> None:
        self.row = row
        self.waiting = waiting
        self.is_removed = False
        """Whether its row went with the commit of its effects."""
        self.following: Parked | None = None
        """Of its key, when its row was removed."""
        self.envelope = row.envelope
        self.tries = row.starts

    def start(self) -> None:
        """It is counted in the store."""

    def renew(self) -> None:
        """There is no lock to lose."""

    async def settle(self, outcome: Outcome) -> None:
        await self.waiting.end(self)

    async def release(self, *, begun: bool = True) -> None:
        self.waiting.forget(self.row.message_id)


class SuppliedFeed(LeasedFeed):
    async def record(self, transaction: Transaction, works: Sequence[Work]) -> None:
        await super().record(transaction, works)
        # Of a claim that is not concluded yet, a copy has to come should this process die: its row stays until then.
        held = [cast(Supplied, work.delivery).held for work in works if work.attempt_id is None]
        parked = [each for each in held if isinstance(each, ParkedHold)]
        if parked:
            await parked[0].waiting.remove(transaction, parked)


class Waiting:
    """The messages of one node that wait in its store."""

    def __init__(
        self,
        node: str,
        store: Store,
        clock: Clock,
        keep_dead: Callable[[Delivery], None],
        instance: str,
        look_around: Callable[[], Awaitable[None]],
    ) -> None:
        """`look_around` comes before this instance handles what another has handled until now."""
        self._node = node
        self._store = store
        self.clock = clock
        self._keep_dead = keep_dead
        self._instance = instance
        self._look_around = look_around
        self._entrances: dict[tuple[str, str | None], Entrance] = {}
        self._partitions: dict[str, Partition] = {}
        self._out: dict[str, str | None] = {}
        """The ids of messages that are handed in, with their partitions."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None
        self._at = float("inf")
        """When it looks next, by the monotonic clock."""
        self._due: list[float] = []
        """When messages that were parked here are due, by the same clock: a heap."""
        self._left_out = 0
        """How many rows the last look could not hand in: the next one reads that many more."""
        self._has_more = False
        """Whether the last look may have left some that are due."""
        self._has_claimed = False
        self._changed = asyncio.Event()
        self._stopping = False

    def add(self, entrance: Entrance) -> None:
        self._entrances[entrance.binding.type, entrance.binding.source] = entrance

    def start(self) -> None:
        self._look_in(0.0)

    async def stop(self) -> None:
        """Hand in nothing more. The consumer gives back what is not parked by now."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Other instances need not wait for what this one had claimed."""
        if self._has_claimed:
            with suppress(*TRANSACTION_LOST):
                async with self._store.transaction() as transaction:
                    await transaction.keep_claimed(self._node, self._instance, 0)

    async def idle(self) -> None:
        """Return once nothing waits for a later try; what is scheduled does not count."""
        while True:
            self._changed.clear()
            async with self._store.transaction() as transaction:
                rows = await transaction.parked(self._node)
                await transaction.roll_back()  # it only read
            if not any(row.redeliveries or row.envelope.deliver_at is None for row in rows):
                return
            await self._changed.wait()

    # --- partitions ------------------------------------------------------------------------------------------

    async def move_in(self, partition: Partition) -> None:
        """This instance consumes a partition from now on, and hands in what waits of it."""
        await self._look_around()
        async with self._store.transaction() as transaction:
            partition.keys = set(await transaction.parked_keys(self._node, partition.queue))
            rows = await transaction.parked(self._node) if partition.lines is not None and partition.keys else []
            await transaction.roll_back()  # it only read
        self._partitions[partition.queue] = partition
        if partition.lines is not None:
            own = [row for row in rows if row.queue == partition.queue]
            await self._let_in(partition, partition.lines.line_up(own, self._key_of))
        self._look_in(0.0)

    def move_out(self, partition: Partition) -> None:
        if self._partitions.get(partition.queue) is partition:
            del self._partitions[partition.queue]
        for message_id in [each for each, queue in self._out.items() if queue == partition.queue]:
            self.forget(message_id)

    # --- what the transport delivers -------------------------------------------------------------------------

    def take(self, entrance: Entrance, held: Held, partition: Partition | None = None) -> None:
        """From the transport, or a row that is due."""
        envelope, now = held.envelope, self.clock.time()
        row = held.row if isinstance(held, ParkedHold) else None
        until = too_late_at(envelope, entrance.binding.expires, now)
        delivery = Supplied(held, self, entrance, partition, 0 if row is None else row.redeliveries, until)
        if held.tries >= entrance.binding.max_deliveries:
            self._dead_letter(delivery)
        elif row is None and envelope.deliver_at is not None and envelope.deliver_at > now:
            self._background(self._schedule(delivery, envelope.deliver_at - now))
        else:
            entrance.take(delivery)

    async def _schedule(self, delivery: Supplied, delay: float) -> None:
        delivery.order_key = None  # nobody waits for it
        with suppress(StaleLock):  # it is another's by now
            await self.put_off(delivery, delay, 0)

    def _dead_letter(self, delivery: Supplied) -> None:
        reason, error = "max-deliveries", f"it was started {delivery.tries} times and never ended"
        message_id = message_id_of(delivery.envelope, self._node)
        delivery.letter = dead_letter(self._node, message_id, delivery, reason, error, self.clock.time())
        self._keep_dead(delivery)
        delivery.entrance.tell_dead(delivery, reason, error)

    # --- when their turn has come ----------------------------------------------------------------------------

    async def admit(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Those on which a handler may begin. The others are parked, or another's, or come again."""
        admitted: list[Delivery] = []
        others: dict[Partition | None, list[Supplied]] = {}
        now = self.clock.monotonic()
        for each in cast(list[Supplied], deliveries):
            partition = each.partition
            if partition is not None and not partition.is_held(now):
                self._drop(each)  # closing its consumer brings it back
            elif each.is_counted or not (each.row is not None or each.is_behind or each.has_unknown_starts):
                admitted.append(each)
            else:
                others.setdefault(partition, []).append(each)
                if each.row is None or each.is_behind:
                    self._enter(each)
        repeated = [each for each in cast(list[Supplied], admitted) if each.may_be_parked]
        if repeated:
            parked = await self._settle_copies(repeated)
            admitted = [each for each in admitted if each not in parked]
        for partition, group in others.items():
            admitted += await self._park_or_count(partition, group)
        return admitted

    async def _settle_copies(self, repeated: Sequence[Supplied]) -> set[Delivery]:
        """Those of which a row waits: whoever parked it could not settle it any more."""
        by_id = {message_id_of(each.envelope, self._node): each for each in repeated}
        try:
            async with self._store.transaction() as transaction:
                rows = await transaction.parked_with(self._node, list(by_id), [])
                await transaction.roll_back()  # it only read
        except TRANSACTION_LOST as exc:
            log.warning("whether %s waits already cannot be read now: %s", repeated[0].envelope, exc)
            return set()  # their handlers' transactions fail in the same way
        copies = [by_id[row.message_id] for row in rows]
        for each in copies:
            await self._settle_parked(each)
        return set(copies)

    async def _park_or_count(self, partition: Partition | None, group: Sequence[Supplied]) -> list[Supplied]:
        """Park what has to wait behind others, or has starts that nobody counted; count the start of what is parked."""
        parking = [each for each in group if each.row is None or each.is_behind]
        starting = {each.row.message_id: each for each in group if each.row is not None and each not in parking}
        for each in parking:
            self._enter(each)
        now = self.clock.time()
        try:
            async with _alone(partition), self._store.transaction() as transaction:
                for each in group[:1]:
                    await each.hold(transaction)
                # What was scheduled gets a new place, behind what came before its time.
                scheduled = {each.row.message_id: each.row.position for each in parking if each.row is not None}
                await transaction.unpark(self._node, scheduled)
                await transaction.park(self._node, [(self._row(each, now, BEHIND), None) for each in parking])
                first: list[Parked | None] = []
                if partition is not None and partition.lines is None:
                    for key in sorted({each.order_key for each in parking if each.order_key is not None}):
                        first.append(await transaction.next_of_key(self._node, partition.queue, key, now))
                starts = await transaction.count_starts(self._node, list(starting))
        except (StaleLock, *TRANSACTION_LOST) as exc:
            log.warning("%s and %d more wait without their store: %s", group[0].envelope, len(group) - 1, exc)
            self._come_again(partition, group, _STORE_DOWN_SECONDS)
            return []
        for each in parking:
            await self._settle_parked(each)
        for row in filter(None, first):
            self._hand_in_due(row)
        await self._parked_behind(partition, parking)
        if any(each.order_key is None for each in parking):
            self._look_in(0.0)
        return [each for message_id, each in starting.items() if self._may_start(each, starts.get(message_id))]

    def _may_start(self, delivery: Supplied, starts: int | None) -> bool:
        if starts is None:  # another has seen it to its end
            self._drop(delivery)
            partition = delivery.partition
            if partition is not None and partition.lines is not None:
                left = partition.lines.leave(message_id_of(delivery.envelope, self._node))
                self._background(self._let_in(partition, left))
            return False
        cast(ParkedHold, delivery.held).tries = starts
        delivery.is_counted = True
        if starts <= delivery.entrance.binding.max_deliveries:
            return True
        cast(ParkedHold, delivery.held).tries -= 1
        self._dead_letter(delivery)
        return False

    async def give_back(self, delivery: Supplied, *, begun: bool) -> None:
        """To its place: no handler has begun on it, or it does not count."""
        partition = delivery.partition
        if partition is not None and not partition.is_held(self.clock.monotonic()):
            self._drop(delivery)
        elif delivery.row is None and delivery.is_behind:
            await self._park_or_count(partition, [delivery])
        elif delivery.row is None:
            await delivery.held.release(begun=begun)
        else:
            if delivery.is_counted:
                with suppress(*TRANSACTION_LOST):
                    async with self._store.transaction() as transaction:
                        await transaction.count_starts(self._node, [delivery.row.message_id], -1)
            self._drop(delivery)
            self._look_in(_LOOK_SECONDS)

    async def put_off(self, delivery: Supplied, delay: float, redeliveries: int) -> None:
        """Hand it in again after the delay, with so many redeliveries. Raises `StaleLock`, also as `LeaseLost`."""
        row, partition = delivery.row, delivery.partition
        parked = self._row(delivery, self.clock.time(), self.clock.time() + delay)._replace(redeliveries=redeliveries)
        self._enter(delivery)
        try:
            async with self._store.transaction() as transaction:
                await delivery.hold(transaction)
                await transaction.park(self._node, [(parked, row and row.redeliveries)])
                if delivery.is_counted:
                    await transaction.count_starts(self._node, [parked.message_id], -1)
        except TRANSACTION_LOST as exc:
            log.warning("%s waits without its store: %s", delivery.envelope, exc)
            self._come_again(partition, [delivery], delay)
            return
        await self._settle_parked(delivery)
        if partition is not None and partition.lines is not None:
            partition.lines.committed([parked.message_id])
        heappush(self._due, self.clock.monotonic() + delay)
        self._look_in(delay)

    def _row(self, delivery: Supplied, now: float, due: float) -> Parked:
        message_id, key = message_id_of(delivery.envelope, self._node), delivery.order_key
        queue = None if delivery.partition is None else delivery.partition.queue
        place = NEXT if delivery.held.position is None else delivery.held.position
        if key is None and due == BEHIND:
            due = now
        starts = 0 if delivery.row is None else delivery.row.starts
        return Parked(message_id, due, delivery.redeliveries, key, place, delivery.envelope, queue, starts)

    async def _settle_parked(self, delivery: Supplied) -> None:
        """Its row counts from now on."""
        if delivery.row is not None:
            self._drop(delivery)
            return
        with suppress(StaleLock):  # another copy comes, and finds the row
            await delivery.held.settle("skipped")

    def _come_again(self, partition: Partition | None, group: Sequence[Supplied], delay: float) -> None:
        """The store does not answer."""
        if partition is not None:
            partition.ended = True
        for each in group:
            if each.row is not None:
                self._drop(each)
            elif partition is None:
                self.clock.call_later(delay, lambda held=each.held: self._background(_release(held)))  # type: ignore[misc]

    def _drop(self, delivery: Supplied) -> None:
        if delivery.row is not None:
            self.forget(delivery.row.message_id)

    def forget(self, message_id: str) -> None:
        """It was handed in, and is not any more."""
        self._out.pop(message_id, None)

    def forget_all(self) -> None:
        """A test crashed us."""
        self._out.clear()

    # --- those with several keys -------------------------------------------------------------------------------

    def _enter(self, delivery: Supplied) -> None:
        partition, key = delivery.partition, delivery.order_key
        if partition is not None and key is not None:
            partition.enter(message_id_of(delivery.envelope, self._node), key, delivery.key)

    async def _parked_behind(self, partition: Partition | None, parked: Sequence[Supplied]) -> None:
        """Their rows are there."""
        if partition is not None and partition.lines is not None:
            ids = [message_id_of(each.envelope, self._node) for each in parked if each.order_key is not None]
            await self._let_in(partition, partition.lines.committed(ids))

    async def _let_in(self, partition: Partition, first: list[str]) -> None:
        """Nobody is before these any more."""
        if not first or partition.lines is None:
            return
        try:
            async with self._store.transaction() as transaction:
                await partition.hold(transaction)
                rows = await partition.lines.make_due(transaction, self._node, first, self.clock.time())
        except (StaleLock, *TRANSACTION_LOST) as exc:
            log.warning("what waits in %s is looked for anew: %s", partition.queue, exc)
            partition.ended = True
            return
        for row in rows:
            self._hand_in_due(row)

    # --- what waits in the store -------------------------------------------------------------------------------

    async def remove(self, transaction: Transaction, parked: Sequence[ParkedHold]) -> None:
        """With the commit: their rows go, and the next of their keys are due."""
        await transaction.unpark(self._node, {each.row.message_id: each.row.position for each in parked})
        for each in parked:
            each.is_removed = True
            partition = self._partitions.get(each.row.queue or "")
            if partition is not None and partition.lines is not None:
                continue
            if each.row.queue is not None and each.row.key is not None:
                each.following = await transaction.next_of_key(
                    self._node, each.row.queue, each.row.key, self.clock.time()
                )

    async def end(self, parked: ParkedHold) -> None:
        """It is done; without a commit of its own, if it was handled before."""
        row = parked.row
        partition = self._partitions.get(row.queue or "")
        if not parked.is_removed:
            async with _alone(partition):
                async with self._store.transaction() as transaction:
                    await self.remove(transaction, [parked])
                self._follow(parked, partition)
        else:
            self._follow(parked, partition)
        if partition is not None and partition.lines is not None:
            await self._let_in(partition, partition.lines.leave(row.message_id))
        self._changed.set()
        if self._has_more and len(self._out) <= _OUT // 2:
            self._look_in(0.0)

    def _follow(self, parked: ParkedHold, partition: Partition | None) -> None:
        self.forget(parked.row.message_id)
        if parked.following is not None:
            self._hand_in_due(parked.following)
        elif parked.row.key is not None and partition is not None:
            partition.keys.discard(parked.row.key)

    def _look_in(self, seconds: float) -> None:
        at = self.clock.monotonic() + seconds
        if self._stopping or at >= self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = at
        self._timer = self.clock.call_later(seconds, lambda: self._background(self._look()))

    async def _look(self) -> None:
        """Hand in what is due."""
        self._at, self._timer = float("inf"), None
        began = self.clock.monotonic()
        queues = [queue for queue, each in self._partitions.items() if each.is_held(began)]
        most = _OUT + self._left_out
        try:
            async with self._store.transaction() as transaction:
                rows = await transaction.claim_parked(
                    self._node, queues, self.clock.time(), most, self._instance, _CLAIM_SECONDS
                )
                if all(row.queue is not None for row in rows):
                    await transaction.roll_back()  # it only read
                else:
                    self._has_claimed = True
            self._has_more = len(rows) >= most
            self._left_out = sum(not self._hand_in(row) for row in rows)
        except TRANSACTION_LOST as exc:
            log.warning("what waits in the store of %s cannot be read now: %s", self._node, exc)
        except Exception:
            log.exception("what waits in the store of %s cannot be read now", self._node)
        now = self.clock.monotonic()
        while self._due and self._due[0] <= began:
            heappop(self._due)
        self._look_in(min(_LOOK_SECONDS, max(0.0, self._due[0] - now)) if self._due else _LOOK_SECONDS)

    def _hand_in_due(self, row: Parked) -> None:
        """The first of a key, at once: no need to look for it."""
        if row.due <= self.clock.time():
            self._hand_in(row)

    def _hand_in(self, row: Parked) -> bool:
        entrance = self._entrance_of(row.envelope)
        if entrance is None or entrance.is_paused() or self._stopping or row.message_id in self._out:
            return False  # messages of a subscription that is gone wait for it
        partition = None if row.queue is None else self._partitions.get(row.queue)
        if row.queue is not None and (partition is None or partition.ended):
            return False
        self._out[row.message_id] = row.queue
        self.take(entrance, ParkedHold(row, self), partition)
        return True

    def _entrance_of(self, envelope: Envelope) -> Entrance | None:
        return self._entrances.get((envelope.type, envelope.source if envelope.kind == "event" else None))

    def _key_of(self, envelope: Envelope) -> str | None:
        entrance = self._entrance_of(envelope)
        return None if entrance is None or entrance.binding.key_of is None else entrance.binding.key_of(envelope)

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        if self._stopping:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _alone(partition: Partition | None) -> AbstractAsyncContextManager[None]:
    """Whether a key has rows, and which is the first, is asked and answered by one at a time."""
    return nullcontext() if partition is None else partition.parking


async def _release(held: Held) -> None:
    with suppress(StaleLock):  # it is with the transport already
        await held.release()
