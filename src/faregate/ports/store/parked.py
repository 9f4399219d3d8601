"""Messages that are tried again later, and the last position of each key: what a log engine (Spark, a stream) keeps
beside the ledger, and the bus for a transport that cannot keep it.

A position is kept per (node, handler, key); what a handler is called is the engine's business. A position never goes
back.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from faregate.message import Envelope

BUCKETS = 64
"""Keys share this many locks, so that a transaction of many keys needs few."""
NEXT = -1
"""The position of a message that the store shall number: behind all that are parked with its queue and key."""
BEHIND = 253_402_300_799.0
"""When what waits behind others of its key is due: not before it is told to (`next_of_key`). The year 9999."""


class Parked(NamedTuple):
    """A message that is tried again later."""

    message_id: str
    due: float
    redeliveries: int
    key: str | None
    """What waits behind it; None for one that is only scheduled, which nobody waits for."""
    position: int
    envelope: Envelope
    queue: str | None = None
    """The partition whose owner tries it again; None: any instance of the node."""
    starts: int = 0
    """How often a handler was about to begin on it."""


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
        unless it is another one by now. None when it comes from the log: a row that is there already stays. A row that
        is changed keeps its position and its starts."""

    async def unpark(self, node: str, positions: Mapping[str, int]) -> None:
        """Remove parked messages, by their ids, each with the position of the row that was read: one that was parked
        anew since then, as its dead letter was replayed, stays. Unknown ones are fine."""

    async def parked(self, node: str, due: float = math.inf, limit: int = (1 << 63) - 1) -> list[Parked]:
        """Parked messages that are due by this time, in the order of their positions."""

    async def claim_parked(
        self, node: str, queues: Sequence[str], due: float, limit: int, owner: str, seconds: float
    ) -> list[Parked]:
        """Parked messages that are due, in the order of their positions: of these partitions, and those of none that
        nobody else has claimed, by the store's clock. The latter are the owner's for so many seconds."""

    async def keep_claimed(self, node: str, owner: str, seconds: float) -> None:
        """What this owner has claimed stays its own for so many seconds from now on; with 0 anybody may claim it."""

    async def count_starts(self, node: str, message_ids: Sequence[str], step: int = 1) -> dict[str, int]:
        """Count a start of each, or with -1 take one back; how many each has now. Those that are gone are left out."""

    async def next_of_key(self, node: str, queue: str, key: str, due: float) -> Parked | None:
        """The first parked message of a key; it is due by then, if it has waited behind others."""

    async def parked_keys(self, node: str, queue: str) -> dict[str, int]:
        """The keys with parked messages of a partition, and how many each has."""

    async def parked_with(self, node: str, message_ids: Sequence[str], keys: Sequence[str]) -> list[Parked]:
        """Parked messages with one of these ids or keys, each once."""

    async def count_parked(self, node: str) -> tuple[int, int | None]:
        """How many are parked, and the lowest of their positions."""
