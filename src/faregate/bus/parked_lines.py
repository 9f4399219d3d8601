"""Which parked messages of a partition wait behind which, where messages have several keys (`fg.Each`).

A parked row has one key, and these rows share it (`Binding.order_key`), so that the store numbers them in one order.
Who waits for whom is known here, to the one instance that owns the partition; it is made anew of the rows when another
one takes the partition over.

Rules kept here:
- A message enters the lines of all its keys at once, and may be tried when it is first in all of them.
- One whose row is not committed yet is nobody's turn.
"""

from collections.abc import Callable, Iterable

from faregate.message import Envelope
from faregate.ports.keys import keys_of
from faregate.ports.store import BEHIND, Parked, Transaction


class ParkedLines:
    def __init__(self) -> None:
        self._lines: dict[str, dict[str, None]] = {}
        """By key: the ids of those that wait, in order."""
        self._keys: dict[str, tuple[str, ...]] = {}
        self._uncommitted: set[str] = set()

    def is_behind(self, key: str | None) -> bool:
        """Whether a message with this key, or these, has to wait."""
        return any(each in self._lines for each in keys_of(key))

    def enter(self, message_id: str, key: str | None) -> None:
        """It is about to be parked, behind the others; one that is in keeps its place."""
        if message_id not in self._keys:
            self._keys[message_id] = keys = keys_of(key)
            self._uncommitted.add(message_id)
            for each in keys:
                self._lines.setdefault(each, {})[message_id] = None

    def line_up(self, rows: Iterable[Parked], key_of: Callable[[Envelope], str | None]) -> list[str]:
        """What waits already; those that may be tried."""
        waiting = sorted((row for row in rows if row.key is not None), key=lambda row: row.position)
        for row in waiting:
            self.enter(row.message_id, key_of(row.envelope))
        return self.committed([row.message_id for row in waiting])

    def committed(self, message_ids: Iterable[str]) -> list[str]:
        """Their rows are there; those of them that may be tried."""
        self._uncommitted.difference_update(message_ids)
        return self._first(message_ids)

    def leave(self, message_id: str) -> list[str]:
        """It is done; those that may be tried now."""
        following: dict[str, None] = {}
        for key in self._keys.pop(message_id, ()):
            line = self._lines[key]
            del line[message_id]
            if line:
                following[next(iter(line))] = None
            else:
                del self._lines[key]
        return self._first(following)

    async def make_due(self, transaction: Transaction, node: str, first: list[str], now: float) -> list[Parked]:
        """The rows of those that may be tried: due, unless they wait for a time of their own."""
        due: list[Parked] = []
        while first:
            found = await transaction.parked_with(node, first, [])
            rows = [row._replace(due=now) if row.due == BEHIND else row for row in found]
            await transaction.park(node, [(row, row.redeliveries) for row in rows if row.due == now])
            due += rows
            gone = set(first).difference(row.message_id for row in rows)
            first = [following for each in gone for following in self.leave(each)]
        return due

    def _first(self, message_ids: Iterable[str]) -> list[str]:
        return [each for each in message_ids if each not in self._uncommitted and self._is_first(each)]

    def _is_first(self, message_id: str) -> bool:
        keys = self._keys.get(message_id)
        return keys is not None and all(next(iter(self._lines[key])) == message_id for key in keys)
