"""One acquisition of one entry by one consumer: the queue transport port's `Delivery` on the embedded broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from faregate.broker.entry import Entry
from faregate.errors import StaleLock
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Outcome

if TYPE_CHECKING:
    from faregate.broker.queue import Queue


class BrokerDelivery:
    """Carries the lock token of its acquisition, so that ending it late is refused by the queue."""

    __slots__ = ("_entry", "_lock", "_queue", "envelope", "key", "redelivered")

    def __init__(self, queue: Queue, entry: Entry, redelivered: bool) -> None:
        self._queue = queue
        self._entry = entry
        self._lock = entry.lock
        self.envelope: Envelope = entry.envelope
        self.key = entry.key
        self.redelivered = redelivered

    @property
    def redeliveries(self) -> int:
        return self._entry.redeliveries

    @property
    def tries(self) -> int:
        return self._entry.tries

    @property
    def position(self) -> int:
        """The offset in the journal; without one the position in the queue."""
        entry = self._entry
        return entry.position if entry.offset < 0 else entry.offset

    @property
    def expired(self) -> bool:
        return self._queue.has_expired(self._entry)

    @property
    def letter(self) -> DeadLetter | None:
        return self._entry.letter

    @property
    def lock_seconds(self) -> float:
        return self._queue.lock_seconds

    def start(self) -> None:
        [stale] = self._queue.start_all([(self._entry, self._lock)])
        if stale is not None:
            raise stale

    def renew(self) -> None:
        self._queue.renew(self._entry, self._lock)

    async def settle(self, outcome: Outcome) -> None:
        [stale] = self._queue.settle_all([(self._entry, self._lock)], [outcome])
        if stale is not None:
            raise stale

    def start_all(self, deliveries: Sequence[BrokerDelivery]) -> list[StaleLock | None]:
        return self._queue.start_all([(each._entry, each._lock) for each in deliveries])

    def settle_all(self, deliveries: Sequence[BrokerDelivery], outcomes: Sequence[Outcome]) -> list[StaleLock | None]:
        return self._queue.settle_all([(each._entry, each._lock) for each in deliveries], outcomes)

    async def release(self, *, begun: bool = True) -> None:
        self._queue.release(self._entry, self._lock, forgive=True, begun=begun)

    async def redeliver(self, delay: float, *, counted: bool = True) -> None:
        self._queue.redeliver(self._entry, self._lock, delay, counted=counted)

    async def dead_letter(self, reason: str, error: str) -> None:
        self._queue.dead_letter(self._entry, self._lock, reason, error)
