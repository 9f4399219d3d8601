"""Dead letters in a store, and what people decide about them."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from faregate.ports.dead_letter import DeadLetter, DeadStatus


class DeadFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters are meant; what is None does not matter."""

    node: str | None = None
    type: str | None = None
    reason: str | None = None
    status: DeadStatus | None = None
    message_id: str | None = None
    since: float | None = None
    """Last failed at this time or later."""
    before: float | None = None
    """Neither failed nor was decided about at this time or later."""


class DeadLetterTransaction(Protocol):
    async def add_dead(self, letter: DeadLetter) -> DeadLetter:
        """Insert the dead letter, or fold it into the one of the same (node, message id); returns what is there now.

        Folding: `copies` grows by one; error, reason, tries, redeliveries, last failure, envelope are the new ones, and
        the status becomes open, unless the one there was discarded: then only `copies` grows.
        """

    async def fold(self, node: str, message_id: str) -> None:
        """Another copy of a dead letter came: `copies` grows by one."""

    async def resolve(self, node: str, message_ids: Sequence[str], at: float) -> None:
        """These were handled after all: their dead letters, if there are any, become resolved."""

    async def set_dead_status(
        self, node: str, message_id: str, status: DeadStatus, *, by: str, at: float
    ) -> DeadLetter | None:
        """Set the status of a dead letter, for an operator; `replayed` counts `replays` up by one.

        Returns the letter as it is then; None when there is none that is open or replayed.
        """

    async def remove_dead(self, letters: Sequence[DeadLetter]) -> int:
        """Remove dead letters for good, except those that have changed since they were read; returns how many."""


class DeadLetterStore(Protocol):
    async def dead(self, which: DeadFilter, limit: int = 1000) -> list[DeadLetter]:
        """Dead letters, oldest last failure first."""
