"""Which processes send from the outbox of one store: each holds one of a few leases, its place.

Rules kept here:
- A process announces itself before it commits anything, and looks for others once a second, and before it consumes a
  partition that another had.
- The one with the lowest place sends what nobody else will: what `fg.outbox` left, and what a process left that died.
- Who finds no place counts as one of many, and never as the lowest.

Only transports with "partitions" are used by several processes that run the same nodes; others need none.
"""

import asyncio
import logging

from faregate.bus.leases import LEASE_SECONDS
from faregate.core.unit import TRANSACTION_LOST
from faregate.ports.clock import Clock, Timer
from faregate.ports.store import Store

log = logging.getLogger("faregate.bus")

PLACES = [f"outbox-{number:02d}" for number in range(64)]
_NO_NODE = ""
"""Leases of the store, and of none of its nodes."""
_LOOK_SECONDS = 1.0


class OutboxPlace:
    def __init__(self, store: Store, instance: str, clock: Clock) -> None:
        self._store = store
        self._instance = instance
        self._clock = clock
        self._place: str | None = None
        self._epoch = 0
        self._renew_at = 0.0
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None
        self.is_alone = False
        self.is_lowest = False

    async def start(self) -> None:
        await self.look()
        self._timer = self._clock.call_later(_LOOK_SECONDS, self._look_soon)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await self._task
        if self._place is not None:
            await self._store.release_lease(_NO_NODE, self._place, self._instance, self._epoch, 0)

    def _look_soon(self) -> None:
        self._task = asyncio.create_task(self._look_again())
        self._timer = self._clock.call_later(_LOOK_SECONDS, self._look_soon)

    async def _look_again(self) -> None:
        try:
            await self.look()
        except TRANSACTION_LOST as exc:
            self.is_alone = self.is_lowest = False
            log.warning("who else sends from %s cannot be seen now: %s", self._store.url, exc)

    async def look(self) -> None:
        """Keep the place, and see who else is there."""
        now = self._clock.monotonic()
        if self._place is not None and now >= self._renew_at:
            kept = await self._store.renew_leases(_NO_NODE, self._instance, {self._place: self._epoch}, LEASE_SECONDS)
            self._renew_at = now + LEASE_SECONDS / 3
            if not kept:
                self._place = None
        taken = {each.queue for each in await self._store.leases(_NO_NODE, PLACES) if each.is_held}
        for place in PLACES if self._place is None else ():
            epoch = await self._store.claim_lease(_NO_NODE, place, self._instance, LEASE_SECONDS)
            if epoch is not None:
                self._place, self._epoch, self._renew_at = place, epoch, now + LEASE_SECONDS / 3
                break
        others = taken - {self._place}
        self.is_alone = self._place is not None and not others
        self.is_lowest = self._place is not None and all(self._place < each for each in others)
