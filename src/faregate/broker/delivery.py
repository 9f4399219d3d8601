"""One acquisition of one entry by one consumer: the queue transport port's `Delivery` on the embedded broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from faregate.broker.entry import Entry
from faregate.errors import StaleLock
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Outcome

if TYPE_CHECKING:
    from faregate.broker.queue import Queue


class BrokerDelivery(msgspec.Struct, gc=False, eq=False):
    """Carries the lock token of its acquisition, so that ending it late is refused by the queue.

    A struct without garbage-collector tracking, as an entry is: one is made for every delivery. Whoever keeps one keeps
    its queue; a closed queue leads to nobody, so no cycle is left.
    """

    queue: Queue
    entry: Entry
    lock: int
    envelope: Envelope
    key: str | None
    redelivered: bool

    @property
    def redeliveries(self) -> int:
        return self.entry.redeliveries

    @property
    def tries(self) -> int:
        return self.entry.tries

    @property
    def position(self) -> int:
        """The offset in the journal; without one the position in the queue."""
        entry = self.entry
        return entry.position if entry.offset < 0 else entry.offset

    @property
    def expired(self) -> bool:
        return self.queue.has_expired(self.entry)

    @property
    def letter(self) -> DeadLetter | None:
        return self.entry.letter

    @property
    def lock_seconds(self) -> float:
        return self.queue.lock_seconds

    def start(self) -> None:
        [stale] = self.queue.start_all([self])
        if stale is not None:
            raise stale

    def renew(self) -> None:
        self.queue.renew(self.entry, self.lock)

    async def settle(self, outcome: Outcome) -> None:
        [stale] = self.queue.settle_all([self], [outcome])
        if stale is not None:
            raise stale

    def start_all(self, deliveries: Sequence[BrokerDelivery]) -> list[StaleLock | None]:
        return self.queue.start_all(deliveries)

    def settle_all(self, deliveries: Sequence[BrokerDelivery], outcomes: Sequence[Outcome]) -> list[StaleLock | None]:
        return self.queue.settle_all(deliveries, outcomes)

    async def release(self, *, begun: bool = True) -> None:
        self.queue.release(self.entry, self.lock, forgive=True, begun=begun)

    async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
        self.queue.redeliver(self.entry, self.lock, delay, counted=counted, behind=behind)

    async def dead_letter(self, reason: str, error: str) -> None:
        self.queue.dead_letter(self.entry, self.lock, reason, error)
