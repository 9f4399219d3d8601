"""What waited in each queue at some moment, so that opening reads only what came later."""

import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from faregate.broker.journal.log import LogPoint

_LISTED = 1000
"""More runs than that are packed: they are read, and written, at once."""


class Returning(NamedTuple):
    """An entry that was tried before: its offset and counts, and when it is due if it waits for redelivery. `behind`:
    its place is at the end, and no longer where it was published."""

    offset: int
    tries: int
    redeliveries: int
    due: float | None
    behind: bool = False


class QueueSnapshot(msgspec.Struct):
    """What a queue held, in terms of the journal: enough to fill it again."""

    runs: list[tuple[int, int]] | bytes
    """Stretches of offsets (first, last) within which everything of this queue waited; many of them as numbers of
    64 bits, one behind the other, little-endian."""
    returning: list[Returning] = []

    def __post_init__(self) -> None:
        if isinstance(self.runs, bytes) and len(self.runs) % 16:
            raise ValueError("its runs are cut off")

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]], returning: list[Returning]) -> "QueueSnapshot":
        """With its runs packed where they are many."""
        if len(runs) <= _LISTED:
            return cls(list(runs), returning)
        return cls(_swapped(array("q", chain.from_iterable(runs))).tobytes(), returning)

    def bounds(self) -> "array[int]":
        """The first and the last offset of each run in turn."""
        if not isinstance(self.runs, bytes):
            return array("q", chain.from_iterable(self.runs))
        found = array("q")
        found.frombytes(self.runs)
        return _swapped(found)


class Snapshot(msgspec.Struct):
    offset: int = 0
    """What was appended from here on is not in the snapshot: it waits, unless the side logs say otherwise."""
    queues: dict[int, QueueSnapshot] = {}
    """By queue number. A queue that is not here had nothing."""
    settled: dict[int, int] = {}
    """By segment, how many bytes of its side log are in the snapshot already."""
    log: LogPoint | None = None
    """Where opening begins to read the hot segment; its offset is not below the snapshot's."""
    checksum: str = ""
    """CRC-32 of this file's content with an empty checksum, in hexadecimal."""


def _swapped(numbers: "array[int]") -> "array[int]":
    """Little-endian, or back from there."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
