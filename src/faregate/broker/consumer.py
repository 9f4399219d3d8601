"""A consumer of a queue: its credit, its selector, and how much it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from faregate.broker.entry import AVAILABLE, EntryLine
from faregate.broker.in_flight import InFlight
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
        self.held = InFlight()
        """Its deliveries that have not ended."""

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
        if self.window:
            self.credit += count
            self.queue.signal()
        self.held.land(count)

    async def drain(self) -> None:
        self.paused = True
        await self.held.landed()

    async def close(self) -> None:
        self.queue.detach(self)
