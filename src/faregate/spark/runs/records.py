"""What a log engine means by the positions and parked messages that the node's store keeps for it.

Rules kept here:
- Who changes a position of a key, or a parked message, holds the lock of the key's bucket.
- A position of `LOW_WATER` is a low-water mark, of one subscription or of all of a node's in one run of handovers:
  below it everything is handled, dead, or parked.
- The positions of a subscription's keys are those of one time on the log: "handler@epoch".
"""

from collections.abc import Mapping
from zlib import crc32

from faregate.ports.store import BUCKETS, Transaction

LOW_WATER = ""
"""In the place of a handler."""


def bucket_of(handler: str, key: str) -> int:
    return crc32(f"{handler}\0{key}".encode()) % BUCKETS


async def decided(transaction: Transaction, node: str, replays: Mapping[str, bool]) -> set[str]:
    """Those that the ledger or the dead letters have; a replay is there to reopen a dead letter."""
    known = await transaction.known(node, list(replays))
    return {each for each, found in known.items() if found.state != "dead" or not replays[each]}
