"""What a log engine keeps in the node's store beside the ledger, and what it means by it. All of it is part of the
transaction that it is given.

Rules kept here:
- Who changes a position of a key, or a parked message, holds the lock of the key's bucket.
- The position ('', MARK) is a low-water mark, of one subscription or of all of a node's in one run of handovers: below
  it everything is handled, dead, or parked.
- The positions of a subscription's keys are those of one time on the log: "handler@epoch".
"""

from collections.abc import Iterable, Mapping, Sequence
from zlib import crc32

from faregate.ports.store import BUCKETS, Parked, Store, Transaction

__all__ = ["BUCKETS", "LogRecords", "Parked", "bucket_of"]


def bucket_of(handler: str, key: str) -> int:
    return crc32(f"{handler}\0{key}".encode()) % BUCKETS


class LogRecords:
    """The records of one node."""

    def __init__(self, store: Store, node: str) -> None:
        self._node = node

    # --- buckets and positions -------------------------------------------------------------------------------

    async def lock(self, transaction: Transaction, buckets: Iterable[int]) -> None:
        await transaction.lock_buckets(self._node, buckets)

    async def positions(self, transaction: Transaction, handler: str, keys: Sequence[str]) -> dict[str, int]:
        return await transaction.positions(self._node, handler, keys)

    async def advance(self, transaction: Transaction, handler: str, positions: Mapping[str, int]) -> None:
        await transaction.advance(self._node, handler, positions)

    async def low_water(self, transaction: Transaction, marks: Sequence[str]) -> dict[str, int]:
        """The low-water marks that there are, of these."""
        return await transaction.positions(self._node, "", marks)

    async def raise_low_water(self, transaction: Transaction, marks: Sequence[str], position: int) -> None:
        await transaction.advance(self._node, "", dict.fromkeys(marks, position))

    # --- parked ----------------------------------------------------------------------------------------------

    async def park(self, transaction: Transaction, found: Sequence[tuple[Parked, int | None]]) -> None:
        await transaction.park(self._node, found)

    async def decided(self, transaction: Transaction, replays: Mapping[str, bool]) -> set[str]:
        """Those that the ledger or the dead letters have; a replay is there to reopen a dead letter."""
        known = await transaction.known(self._node, list(replays))
        return {each for each, found in known.items() if found.state != "dead" or not replays[each]}

    async def unpark(self, transaction: Transaction, message_ids: Sequence[str]) -> None:
        await transaction.unpark(self._node, message_ids)

    async def parked_with(
        self, transaction: Transaction, message_ids: Sequence[str], keys: Sequence[str]
    ) -> list[Parked]:
        """Parked messages with one of these ids or keys."""
        return await transaction.parked_with(self._node, message_ids, keys)
