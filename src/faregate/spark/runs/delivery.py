"""A message from the log as the core sees it: the delivery port, without a broker.

Rules kept here:
- Its position is its offset. `redeliver` parks it in the store, with when and how often; that is a commit of its own,
  and it happens only if no other attempt of the same task has dealt with the message meanwhile.
- Settling says nothing to anybody: the ledger, the position and the removal from the parked were in the commit.
- When the store is gone, every way to end a delivery raises: the task fails, and Spark runs it again.
"""

from collections.abc import Awaitable, Callable

from faregate.message import Envelope, too_late_at
from faregate.node.subscription import Subscription
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Outcome

Park = Callable[["LogDelivery", float, bool], Awaitable[None]]
End = Callable[["LogDelivery", str], Awaitable[None]]
Release = Callable[["LogDelivery"], bool]


class LogDelivery:
    __slots__ = (
        "_end",
        "_park",
        "_release",
        "arrived_at",
        "bucket",
        "envelope",
        "key",
        "line",
        "parked",
        "position",
        "redeliveries",
        "tries",
    )

    def __init__(
        self,
        position: int,
        bucket: int,
        line: str | None,
        key: str | None,
        envelope: Envelope,
        appended_at: float,
        redeliveries: int,
        parked: bool,
        park: Park,
        end: End,
        release: Release,
    ) -> None:
        self.position = position
        self.bucket = bucket
        self.line = line
        """What it is in order with: its key, or "" where all of a subscription are one line; None: nothing."""
        self.key = key
        self.envelope = envelope
        self.arrived_at = appended_at
        """When it was appended; for a parked one, when it was sent."""
        self.redeliveries = redeliveries
        self.tries = redeliveries
        self.parked = parked
        """Whether it comes from the store, not from the log."""
        self._park = park
        self._end = end
        self._release = release

    @property
    def redelivered(self) -> bool:
        return self.parked

    @property
    def letter(self) -> DeadLetter | None:
        return None

    @property
    def lock_seconds(self) -> float:
        return float("inf")

    def start(self) -> None:
        self.tries += 1

    def renew(self) -> None:
        """Nobody else can have it."""

    async def settle(self, outcome: Outcome) -> None:
        await self._end(self, outcome)

    async def release(self, *, begun: bool = True) -> None:
        """It waits behind what has to be tried again; or the task ends early, and it is in the log."""
        self._release(self)

    async def redeliver(self, delay: float, *, counted: bool = True) -> None:
        await self._park(self, delay, counted)

    async def dead_letter(self, reason: str, error: str) -> None:
        raise AssertionError(f"{self.envelope}: with a store, giving up is a commit there ({reason}: {error})")


def has_expired(subscription: Subscription, delivery: LogDelivery, now: float) -> bool:
    """Whether it waited longer than its sender or its subscription allows."""
    until = too_late_at(delivery.envelope, subscription.expires, delivery.arrived_at)
    return until is not None and until <= now
