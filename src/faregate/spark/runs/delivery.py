"""A message from the log as the core sees it: the delivery port, without a broker.

Rules kept here:
- Its position is its offset.
- With a store, `redeliver` parks it there, with when and how often; that is a commit of its own, and it happens only if
  no other attempt of the same task has dealt with the message meanwhile. When the store is gone, every way to end a
  delivery raises: the task fails, and Spark runs it again.
- Without a store it cannot wait: `redeliver` raises, and dead letters go to the log with the task's output.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.keys import keys_of
from faregate.ports.queue import Outcome


class Owner(Protocol):
    """Whoever works on messages of the log is told how their deliveries end."""

    clock: Clock

    async def ended(self, delivery: "LogDelivery", outcome: str) -> None: ...

    async def park(self, delivery: "LogDelivery", delay: float, counted: bool) -> None: ...

    def released(self, delivery: "LogDelivery") -> bool: ...

    def dead_letter(self, delivery: "LogDelivery", reason: str, error: str) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class LogDelivery:
    owner: Owner
    handler: int
    """The number of its subscription."""
    position: int
    buckets: tuple[int, ...]
    """Of its keys: who changes their positions locks these."""
    order_key: str | None
    """What its parked row has: its key, or "" for all messages of a serial subscription, and of one whose messages may
    have several keys; None: it is in order with nothing."""
    key: str | None
    envelope: Envelope
    until: float | None
    """When it expires."""
    redeliveries: int
    parked: bool
    """Whether it comes from the store, not from the log."""
    tries: int = field(init=False)
    letter: ClassVar[DeadLetter | None] = None
    lock_seconds: ClassVar[float] = float("inf")

    def __post_init__(self) -> None:
        self.tries = self.redeliveries

    @property
    def order_keys(self) -> tuple[str, ...]:
        """What it is in order with."""
        return keys_of(self.order_key if self.key is None else self.key)

    @property
    def redelivered(self) -> bool:
        return self.parked

    @property
    def expired(self) -> bool:
        return self.until is not None and self.until <= self.owner.clock.time()

    def start(self) -> None:
        self.tries += not self.expired

    def renew(self) -> None:
        """Nobody else can have it."""

    async def settle(self, outcome: Outcome) -> None:
        await self.owner.ended(self, outcome)

    async def release(self, *, begun: bool = True) -> None:
        """It waits behind what has to be tried again; or the task ends early, and it is in the log."""
        self.owner.released(self)

    async def redeliver(self, delay: float, *, counted: bool = True, behind: bool = False) -> None:
        """What is parked comes with a later batch, behind all that is in this one."""
        await self.owner.park(self, delay, counted)

    async def dead_letter(self, reason: str, error: str) -> None:
        self.owner.dead_letter(self, reason, error)
