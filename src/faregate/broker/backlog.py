"""Entries that wait in the journal and not in memory: their places, sixteen bytes each.

A queue that is far behind holds only this; it loads envelopes a few at a time, in order, as they come up.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence


class Backlog:
    """Offsets of waiting messages, in order, with the queue positions they have."""

    __slots__ = ("_chunks", "_count", "_head")

    def __init__(self) -> None:
        self._chunks: deque[tuple[array[int], array[int]]] = deque()
        self._head = 0
        """How many of the first chunk are gone."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def first_position(self) -> int | None:
        """The position of the first one; None when it is empty."""
        return self._chunks[0][0][self._head] if self._chunks else None

    def append(self, position: int, offset: int) -> None:
        """Add one behind the others."""
        if not self._chunks:
            self._chunks.append((array("q"), array("q")))
        positions, offsets = self._chunks[-1]
        positions.append(position)
        offsets.append(offset)
        self._count += 1

    def extend(self, positions: Sequence[int], offsets: Sequence[int]) -> None:
        """Add several behind the others."""
        if positions:
            self._chunks.append((array("q", positions), array("q", offsets)))
            self._count += len(positions)

    def first(self, most: int) -> tuple[list[int], list[int]]:
        """Positions and offsets of up to that many at the front."""
        positions, offsets = self._chunks[0]
        stop = self._head + most
        return positions[self._head : stop].tolist(), offsets[self._head : stop].tolist()

    def drop(self, count: int) -> None:
        """Remove as many from the front as `first` gave."""
        self._head += count
        self._count -= count
        if self._head == len(self._chunks[0][0]):
            self._chunks.popleft()
            self._head = 0

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """(first position, first offset, last offset, length) of stretches without a gap in position."""
        head = self._head
        for positions, offsets in self._chunks:
            if positions[-1] - positions[head] == len(positions) - 1 - head:
                yield positions[head], offsets[head], offsets[-1], len(positions) - head
            else:
                start = head
                for index in range(head + 1, len(positions) + 1):
                    if index == len(positions) or positions[index] != positions[index - 1] + 1:
                        yield positions[start], offsets[start], offsets[index - 1], index - start
                        start = index
            head = 0
