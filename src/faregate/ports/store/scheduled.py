"""Scheduled messages: outgoing ones that wait in their sender's store until they are due, and can be cancelled there.

Rules every adapter keeps:
- A scheduled message is in one place: it waits here, or it has left for the outbox, in one commit.
- A publication is scheduled once for each node. What was cancelled is remembered as such until `LedgerStore.evict`
  takes it away, so that scheduling it again does nothing.
"""

from collections.abc import Sequence
from typing import Protocol

from faregate.message import Envelope
from faregate.ports.store.outbox import OutboxRow

SCHEDULE_KEY = "faregate-schedule-key"
"""The header of a scheduled message that its sender gave a key: what it may be cancelled by."""


def is_later(envelope: Envelope, now: float) -> bool:
    return envelope.deliver_at is not None and envelope.deliver_at > now


class ScheduledTransaction(Protocol):
    async def schedule(self, rows: Sequence[OutboxRow]) -> None:
        """Keep these until the `deliver_at` of their envelopes; those that are scheduled or cancelled stay as they
        are."""

    async def take_due(
        self,
        now: float,
        limit: int,
        nodes: Sequence[str] | None = None,
        *,
        also: Sequence[str] = (),
        but: Sequence[str] = (),
    ) -> list[OutboxRow]:
        """Remove what is due, of these nodes or of all, in the order of its time; what another transaction takes at
        the same time is left to it. Some publications count as due (`also`), some do not (`but`)."""

    async def cancel_scheduled(self, node: str, which: tuple[str | None, str | None]) -> int:
        """Cancel what this node has scheduled and is not due yet: by publication id, or by key; how many there were.
        It waits for whoever takes them at the same time."""


class ScheduledStore(Protocol):
    """Reads see what is committed."""

    async def next_due(self, nodes: Sequence[str] | None = None) -> float | None:
        """When the first of what waits is due, of these nodes or of all; None: nothing waits."""

    async def scheduled(self, limit: int, nodes: Sequence[str] | None = None) -> list[OutboxRow]:
        """What waits, in the order of its time; of these nodes, or of all."""

    async def count_scheduled(self, nodes: Sequence[str] | None = None) -> int:
        """How many wait."""
