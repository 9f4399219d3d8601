"""A consumer of a queue: its credit, its selector, and how much it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from faregate.broker.entry import AVAILABLE, EntryLine
from faregate.broker.selector import Selector

if TYPE_CHECKING:
    from faregate.broker.delivery import BrokerDelivery
    from faregate.broker.queue import Queue


class QueueConsumer:
    """Gets at most as many deliveries as it has credit. Made by `Queue.attach`."""

    def __init__(
        self,
        queue: Queue,
        deliver: Callable[[BrokerDelivery], None],
        *,
        window: bool,
        selector: Selector | None,
        exclusive: bool,
        single_active: bool,
    ) -> None:
        self.queue = queue
        self.deliver = deliver
        self.window = window
        self.selector = selector
        self.line = None if selector is None else EntryLine(AVAILABLE, fresh_turn=1)
        """A selector's own line of entries that it has not examined yet in their present availability."""
        self.exclusive = exclusive
        self.single_active = single_active
        self.credit = 0
        self.paused = False
        self.out = 0
        """How many deliveries it has that have not ended."""
        self._drained: list[asyncio.Future[None]] = []

    def grant(self, credit: int) -> None:
        """Allow that many more deliveries."""
        if credit < 0:
            raise ValueError(f"credit cannot be taken back; got {credit}")
        self.credit += credit
        self.queue.signal()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.queue.signal()

    def ended(self, count: int) -> None:
        """So many of its deliveries have ended."""
        self.out -= count
        if self.window:
            self.credit += count
            self.queue.signal()
        if self._drained and not self.out:
            for drained in self._drained:
                if not drained.done():
                    drained.set_result(None)
            self._drained.clear()

    async def drain(self) -> None:
        self.paused = True
        if self.out:
            drained = asyncio.get_running_loop().create_future()
            self._drained.append(drained)
            await drained

    async def close(self) -> None:
        self.queue.detach(self)
