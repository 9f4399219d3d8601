"""What a log engine (Spark, a stream) keeps beside the ledger: messages that it tries again later, and the last
position of each key. A queue keeps both by itself.

A position is kept per (node, handler, key); what a handler is called is the engine's business. A position never goes
back.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from faregate.message import Envelope

BUCKETS = 64
"""Keys share this many locks, so that a transaction of many keys needs few."""


class Parked(NamedTuple):
    """A message that is tried again later."""

    message_id: str
    due: float
    redeliveries: int
    key: str | None
    """What waits behind it; None for one that is only scheduled, which nobody waits for."""
    position: int
    envelope: Envelope


class ParkedTransaction(Protocol):
    async def lock_buckets(self, node: str, buckets: Iterable[int]) -> None:
        """Hold these of the node's `BUCKETS` until the transaction ends: another that wants one of them waits here.

        They are taken in one order, so that nobody waits in a circle. A store with one writer has locked enough.
        """

    async def positions(self, node: str, handler: str, keys: Sequence[str]) -> dict[str, int]:
        """The last position of each key that has one."""

    async def advance(self, node: str, handler: str, positions: Mapping[str, int]) -> None:
        """Raise the positions of these keys; one that is higher already stays."""

    async def park(self, node: str, rows: Sequence[tuple[Parked, int | None]]) -> None:
        """Park messages, each with the redeliveries of the parked row that it comes from: that row is then changed,
        unless it is another one by now. None when it comes from the log: a row that is there already stays."""

    async def unpark(self, node: str, positions: Mapping[str, int]) -> None:
        """Remove parked messages, by their ids, each with the position of the row that was read: one that was parked
        anew since then, as its dead letter was replayed, stays. Unknown ones are fine."""

    async def parked(self, node: str, due: float = math.inf, limit: int = (1 << 63) - 1) -> list[Parked]:
        """Parked messages that are due by this time, in the order of their positions."""

    async def parked_with(self, node: str, message_ids: Sequence[str], keys: Sequence[str]) -> list[Parked]:
        """Parked messages with one of these ids or keys, each once."""

    async def count_parked(self, node: str) -> tuple[int, int | None]:
        """How many are parked, and the lowest of their positions."""
