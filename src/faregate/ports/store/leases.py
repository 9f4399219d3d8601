"""Leases: which instance of a node consumes which partition of an ordered subscription; and which partitions it has.

A lease belongs to its owner for so many seconds by the store's clock; no other clock is asked. Each new owner has a
higher epoch. What a deposed owner has not committed it never will: every commit holds the lease that it was made under
(`LeaseTransaction.hold_lease`), and a takeover waits for those under way.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

MIGRATION = "faregate rabbitmq migrate"
"""Who owns the lease of a partition whose messages are being moved."""
REPARTITION = "faregate rabbitmq repartition"
"""Who owns those of earlier generations for ever, and those of a new one until it may be consumed."""


class Lease(NamedTuple):
    node: str
    queue: str
    """The partition."""
    owner: str | None
    """The instance that has it; None: it was released."""
    epoch: int
    left: float
    """For how many seconds it still holds, by the store's clock when it was read. For a released one: for how long it
    is kept for who wanted it."""
    wanted_by: str | None
    """Who asked its owner to let go."""

    @property
    def is_held(self) -> bool:
        return self.owner is not None and self.left > 0


class Generation(NamedTuple):
    """The partitions that an ordered subscription has now: each change of their number makes a new generation."""

    number: int
    partitions: int


class LeaseTransaction(Protocol):
    async def hold_lease(self, node: str, queue: str, epoch: int) -> None:
        """Nobody else gets this lease before the transaction ends. Raises `LeaseLost` when it is somebody else's by
        now, or nobody's."""


class LeaseStore(Protocol):
    """Each change is a commit of its own."""

    async def claim_lease(self, node: str, queue: str, owner: str, seconds: float) -> int | None:
        """Take a lease that nobody ever had, that has run out, or that was let go for this one; its epoch, which is
        higher than all before. None: it is somebody's."""

    async def renew_leases(self, node: str, owner: str, epochs: Mapping[str, int], seconds: float) -> set[str]:
        """Hold leases, by their queues, for so many seconds from now on; those that are still this owner's under these
        epochs. It does not wait for commits under way."""

    async def release_lease(self, node: str, queue: str, owner: str, epoch: int, keep_seconds: float) -> None:
        """Let it go; if somebody asked for it, it is kept for that one for so many seconds. Nothing, if it is another's
        by now."""

    async def ask_for_lease(self, node: str, queue: str, epoch: int, instance: str) -> bool:
        """Ask the owner under this epoch to let go; False when somebody else has asked already, or it is gone."""

    async def leases(self, node: str, queues: Sequence[str]) -> list[Lease]:
        """Those of these partitions that were ever claimed, by the queue's name."""

    async def generation(self, node: str, queue: str) -> Generation | None:
        """The current one of a subscription, by its queue; None: none is noted."""

    async def note_generation(self, node: str, queue: str, partitions: int) -> Generation:
        """The current one; if none is noted, the first with so many partitions, which is noted from now on."""

    async def next_generation(self, node: str, queue: str, after: int, partitions: int) -> bool:
        """The one after this has so many partitions, and is the current one from now on. False: another is by now."""
