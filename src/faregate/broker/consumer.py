"""A consumer of a queue: its credit, its selector, and how much it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from faregate.broker.entry import AVAILABLE, EntryLine
from faregate.broker.in_flight import InFlight
from faregate.broker.selector import Selector

if TYPE_CHECKING:
    from faregate.broker.delivery import BrokerDelivery
    from faregate.broker.queue import Queue


@dataclass(eq=False)
class QueueConsumer:
    """Gets at most as many deliveries as it has credit. Made by `Queue.attach`."""

    queue: Queue
    deliver: Callable[[BrokerDelivery], None]
    window: bool
    selector: Selector | None
    exclusive: bool
    single_active: bool
    credit: int = 0
    paused: bool = False
    held: InFlight = field(default_factory=InFlight)
    """Its deliveries that have not ended."""
    line: EntryLine | None = None
    """A selector's own line of entries that it has not examined yet in their present availability."""

    def __post_init__(self) -> None:
        if self.selector is not None:
            self.line = EntryLine(AVAILABLE, fresh_turn=1)

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
