"""Entries that wait in the journal and not in memory: their places, eight bytes each.

A queue that is far behind holds only this; it loads envelopes a few at a time, in order, as they come up.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator


class Backlog:
    """Offsets of waiting messages, in order, with the queue positions they were given."""

    __slots__ = ("_chunks", "_count", "_head")

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, array[int]]] = deque()
        self._head = 0
        """How many of the first chunk are gone."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def first_position(self) -> int | None:
        """The position of the first one; None when it is empty."""
        return self._chunks[0][0] + self._head if self._chunks else None

    def append(self, position: int, offset: int) -> None:
        """Add one behind the others."""
        if self._chunks:
            first, offsets = self._chunks[-1]
            if first + len(offsets) == position:
                offsets.append(offset)
                self._count += 1
                return
        self.extend(position, (offset,))

    def extend(self, position: int, offsets: Iterable[int]) -> None:
        """Add several whose positions follow each other from `position` on."""
        chunk = array("q", offsets)
        if chunk:
            self._chunks.append((position, chunk))
            self._count += len(chunk)

    def take(self, most: int) -> tuple[int, list[int]]:
        """Remove up to that many from the front: the first one's position, and the offsets."""
        first, offsets = self._chunks[0]
        position = first + self._head
        taken = offsets[self._head : self._head + most].tolist()
        self._head += len(taken)
        self._count -= len(taken)
        if self._head == len(offsets):
            self._chunks.popleft()
            self._head = 0
        return position, taken

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """(first position, first offset, last offset, count) of stretches without a gap in position."""
        head = self._head
        for position, offsets in self._chunks:
            yield position + head, offsets[head], offsets[-1], len(offsets) - head
            head = 0
