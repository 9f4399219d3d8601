"""What a transport lacks, supplied by the bus: later tries, scheduled messages, expiry, dead letters.

A node with a store needs none of these from its transport. Rules kept here:
- A message that has to wait is a row in the node's store before its delivery is settled, and is handed in when it is
  due. The row is removed once the message is done; after a crash in between, the ledger recognises the copy. If the
  transport delivers a message that waits here, that copy is settled.
- While the store is away a message waits in memory, and then goes back to the transport.
- A message that was started too often is a dead letter in the store before its delivery is settled. So is one that
  expired; the core sees to that.
- What cannot be supplied is refused when the bus is made, by the name of the subscription.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from heapq import heappop, heappush
from typing import Any, NamedTuple

from faregate.core.dead_letter import dead_letter
from faregate.core.unit import TRANSACTION_LOST
from faregate.errors import ConfigurationError, StaleLock
from faregate.ids import message_id_of
from faregate.message import Envelope, too_late_at
from faregate.node.subscription import Subscription
from faregate.ports.clock import Clock, Timer
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding, Capability, Delivery, Held, Outcome, QueueTransport
from faregate.ports.store import Parked, Store

log = logging.getLogger("faregate.bus")

SUPPLIED: frozenset[Capability] = frozenset({"dead letters", "delay", "expire"})
"""To nodes with a store."""
_IN_ORDER: frozenset[Capability] = frozenset({"order", "place"})
_LOOK_SECONDS = 1.0
"""How often it looks for rows of other processes."""
_OUT = 200
"""How many parked messages of a node are handed in at a time."""


def check_capabilities(transport: QueueTransport, url: str, subscription: Subscription, has_store: bool) -> bool:
    """Whether the bus has to supply something. Raises `ConfigurationError` for what it cannot."""
    binding = subscription.binding(0)
    missing = SUPPLIED - transport.capabilities
    unordered = _IN_ORDER - transport.capabilities if binding.key_of is not None or binding.serial else None
    if unordered:
        raise ConfigurationError(
            f"{subscription} asks for order, and the transport {url} cannot keep it: it lacks {_names(unordered)}. "
            "Take another transport, or a subscription without order="
        )
    if missing and not has_store:
        raise ConfigurationError(
            f"{subscription} needs a store: the transport {url} lacks {_names(missing)}, which the bus supplies to "
            f"nodes that have one. Give it one: fg.Bus(…, store={{{subscription.node!r}: '…'}})"
        )
    return bool(missing)


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

    def __init__(self, held: Held, waiting: "Waiting", redeliveries: int = 0, until: float | None = None) -> None:
        self._held = held
        self._waiting = waiting
        self._until = until
        self.envelope = held.envelope
        self.redelivered = held.redelivered
        self.position = held.position
        self.lock_seconds = held.lock_seconds
        self.redeliveries = redeliveries
        self.key: str | None = None
        self.letter: DeadLetter | None = None
        self.renew = held.renew
        self.settle = held.settle
        self.release = held.release

    @property
    def tries(self) -> int:
        return self._held.tries

    @property
    def expired(self) -> bool:
        return self._until is not None and self._until <= self._waiting.clock.time()

    def start(self) -> None:
        if not self.expired:
            self._held.start()

    async def redeliver(self, delay: float, *, counted: bool = True) -> None:
        redeliveries = self.redeliveries + (1 if counted else 0)
        await self._waiting.put_off(self._held, self.redeliveries, delay, redeliveries)

    async def dead_letter(self, reason: str, error: str) -> None:
        raise AssertionError(f"{self.envelope}: a dead letter belongs in the store ({reason}: {error})")


class ParkedHold:
    """A parked message that was handed in. Its row stays until it ends."""

    redelivered = True
    lock_seconds = 60.0

    def __init__(self, row: Parked, waiting: "Waiting") -> None:
        self._row = row
        self._waiting = waiting
        self.envelope = row.envelope
        self.position = row.position
        self.tries = row.redeliveries

    def start(self) -> None:
        self.tries += 1

    def renew(self) -> None:
        """There is no lock to lose."""

    async def settle(self, outcome: Outcome) -> None:
        await self._waiting.unpark(self._row)

    async def release(self, *, begun: bool = True) -> None:
        self._waiting.back(self._row)


class Waiting:
    """The messages of one node that wait in its store."""

    def __init__(self, node: str, store: Store, clock: Clock, keep_dead: Callable[[Delivery], None]) -> None:
        self._node = node
        self._store = store
        self.clock = clock
        self._keep_dead = keep_dead
        self._entrances: dict[tuple[str, str | None], Entrance] = {}
        self._out: set[str] = set()
        """The ids of messages that are handed in."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None
        self._at = float("inf")
        """When it looks next, by the monotonic clock."""
        self._due: list[float] = []
        """When messages that were parked here are due, by the same clock: a heap."""
        self._left_out = 0
        """How many rows the last look could not hand in: the next one reads that many more."""
        self._changed = asyncio.Event()
        self._stopping = False

    def add(self, entrance: Entrance) -> Callable[[Held], None]:
        """Returns what takes the deliveries of this subscription."""
        self._entrances[entrance.binding.type, entrance.binding.source] = entrance
        return lambda held: self._arrived(entrance, held)

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

    async def idle(self) -> None:
        """Return once nothing waits for a later try; what is scheduled does not count."""
        while True:
            self._changed.clear()
            rows = await self._rows(float("inf"))
            if not any(row.redeliveries or row.envelope.deliver_at is None for row in rows):
                return
            await self._changed.wait()

    def _arrived(self, entrance: Entrance, held: Held) -> None:
        if held.redelivered:
            self._background(self._take_copy(entrance, held))
        else:
            self._take(entrance, held)

    async def _take_copy(self, entrance: Entrance, held: Held) -> None:
        """The process that parked it may have died before it settled the delivery: then the row counts."""
        try:
            async with self._store.transaction() as transaction:
                rows = await transaction.parked_with(self._node, [message_id_of(held.envelope, self._node)], [])
        except TRANSACTION_LOST as exc:
            log.warning("whether %s waits in its store cannot be seen now: %s", held.envelope, exc)
            rows = []  # then it runs before its time, and the ledger recognises the parked one
        if not rows:
            self._take(entrance, held)
            return
        with suppress(StaleLock):
            await held.settle("skipped")

    def _take(self, entrance: Entrance, held: Held, redeliveries: int = 0, *, is_due: bool = False) -> None:
        envelope, now = held.envelope, self.clock.time()
        if held.tries >= entrance.binding.max_deliveries:
            self._dead_letter(entrance, held, "max-deliveries", f"it was started {held.tries} times and never ended")
        elif not is_due and envelope.deliver_at is not None and envelope.deliver_at > now:
            self._background(self.put_off(held, 0, envelope.deliver_at - now, 0))
        else:
            entrance.take(Supplied(held, self, redeliveries, too_late_at(envelope, entrance.binding.expires, now)))

    def _dead_letter(self, entrance: Entrance, held: Held, reason: str, error: str) -> None:
        dead = Supplied(held, self)
        message_id = message_id_of(held.envelope, self._node)
        dead.letter = dead_letter(self._node, message_id, dead, reason, error, self.clock.time())
        self._keep_dead(dead)
        entrance.tell_dead(dead, reason, error)

    async def put_off(self, held: Held, before: int, delay: float, redeliveries: int) -> None:
        """Hand it in again after the delay, with so many redeliveries; until now it had `before`."""
        row = self._row(held, self.clock.time() + delay, redeliveries)
        try:
            async with self._store.transaction() as transaction:
                await transaction.park(self._node, [(row, before if isinstance(held, ParkedHold) else None)])
        except TRANSACTION_LOST as exc:
            log.warning("%s waits without its store: %s", held.envelope, exc)
            self.clock.call_later(delay, lambda: self._background(_release(held)))
            return
        if isinstance(held, ParkedHold):
            self._out.discard(row.message_id)
        else:
            with suppress(StaleLock):  # another copy comes, and finds this row
                await held.settle("skipped")
        heappush(self._due, self.clock.monotonic() + delay)
        self._look_in(delay)

    def _row(self, held: Held, due: float, redeliveries: int) -> Parked:
        message_id = message_id_of(held.envelope, self._node)
        return Parked(message_id, due, redeliveries, None, held.position or 0, held.envelope)

    # --- what waits in the store -------------------------------------------------------------------------------

    def back(self, row: Parked) -> None:
        """It was handed in, and nobody began on it."""
        self._out.discard(row.message_id)
        self._look_in(_LOOK_SECONDS)

    async def unpark(self, row: Parked) -> None:
        async with self._store.transaction() as transaction:
            await transaction.unpark(self._node, {row.message_id: row.position})
        self._out.discard(row.message_id)
        self._changed.set()
        self._look_in(0.0)

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
        try:
            rows = await self._rows(self.clock.time(), _OUT + self._left_out)
            self._left_out = sum(not self._hand_in(row) for row in rows)
        except TRANSACTION_LOST as exc:
            log.warning("what waits in the store of %s cannot be read now: %s", self._node, exc)
        now = self.clock.monotonic()
        while self._due and self._due[0] <= began:
            heappop(self._due)
        self._look_in(min(_LOOK_SECONDS, max(0.0, self._due[0] - now)) if self._due else _LOOK_SECONDS)

    async def _rows(self, due: float, limit: int = (1 << 63) - 1) -> list[Parked]:
        async with self._store.transaction() as transaction:
            found = await transaction.parked(self._node, due, limit)
            await transaction.roll_back()  # it only read
        return found

    def _hand_in(self, row: Parked) -> bool:
        envelope: Envelope = row.envelope
        entrance = self._entrances.get((envelope.type, envelope.source if envelope.kind == "event" else None))
        if entrance is None or entrance.is_paused() or self._stopping or row.message_id in self._out:
            return False  # messages of a subscription that is gone wait for it
        self._out.add(row.message_id)
        self._take(entrance, ParkedHold(row, self), row.redeliveries, is_due=True)
        return True

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        if self._stopping:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _release(held: Held) -> None:
    with suppress(StaleLock):  # it is with the transport already
        await held.release()
