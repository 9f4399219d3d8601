"""What a log engine keeps in the node's store beside the ledger: parked messages, the last position of each key, and
how far the log is read. In plain SQL of both stores, within the transaction that it is given.

Rules kept here:
- A position never goes back. Who changes one of a key, or a parked message, holds the lock of the key's bucket: one of
  64, so that a transaction of many keys needs few locks. SQLite has one writer, which is lock enough.
- The row (node, '', MARK) is a low-water mark, of one subscription or of all of a node's in one run of handovers: below
  it everything is handled, dead, or parked.
- The positions of a subscription's keys are those of one time on the log: "handler@epoch".
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from faregate.message import Envelope
from faregate.ports.store import Store, Transaction
from faregate.stores.sql.columns import id_bytes, id_text, pack, unpack

BUCKETS = 64
_LOCK_CLASS = 0x46617265
"""So that our advisory locks meet no one else's."""
_AT_ONCE = 500


class Parked(NamedTuple):
    """A message that is tried again later."""

    message_id: str
    due: float
    redeliveries: int
    key: str | None
    """What waits behind it; None for one that is only scheduled, which nobody waits for."""
    position: int
    envelope: Envelope


def bucket_of(handler: str, key: str) -> int:
    return crc32(f"{handler}\0{key}".encode()) % BUCKETS


class LogRecords:
    """The records of one node."""

    def __init__(self, store: Store, node: str) -> None:
        self._node = node
        self._postgres = not store.url.startswith(("sqlite:", "memory:"))

    # --- buckets and positions -------------------------------------------------------------------------------

    async def lock(self, transaction: Transaction, buckets: Iterable[int]) -> None:
        """Until the end of the transaction; in one order, so that nobody waits in a circle."""
        wanted = sorted(set(buckets))
        if self._postgres and wanted:
            owner = crc32(self._node.encode()) % 0x2000000 * BUCKETS
            numbers = [owner + bucket - 0x40000000 for bucket in wanted]
            await transaction.execute(
                f"select pg_advisory_xact_lock({_LOCK_CLASS}, number) from unnest(?::int[]) as number", (numbers,)
            )

    async def positions(self, transaction: Transaction, handler: str, keys: Sequence[str]) -> dict[str, int]:
        """The last position of each key that has one."""
        found: dict[str, int] = {}
        for some in _pieces(sorted(set(keys))):
            rows = await transaction.fetchall(
                "select key, position from faregate_positions where node = ? and handler = ? and " + self._among("key"),
                (self._node, handler, *self._values(some)),
            )
            found.update((key, position) for key, position in rows)
        return found

    async def advance(self, transaction: Transaction, handler: str, positions: Mapping[str, int]) -> None:
        rows = sorted(positions.items())
        if not rows:
            return
        later = "on conflict (node, handler, key) do update set position = "
        if self._postgres:
            keys, numbers = [key for key, _ in rows], [number for _, number in rows]
            await transaction.execute(
                "insert into faregate_positions (node, handler, key, position) "
                "select ?::text, ?::text, given.key, given.position "
                "from unnest(?::text[], ?::bigint[]) as given(key, position) "
                f"{later} greatest(faregate_positions.position, excluded.position)",
                (self._node, handler, keys, numbers),
            )
        else:
            await transaction.executemany(
                "insert into faregate_positions (node, handler, key, position) values (?, ?, ?, ?) "
                f"{later} max(position, excluded.position)",
                [(self._node, handler, key, number) for key, number in rows],
            )

    async def low_water(self, transaction: Transaction, marks: Sequence[str]) -> dict[str, int]:
        """The low-water marks that there are, of these."""
        return await self.positions(transaction, "", marks)

    async def raise_low_water(self, transaction: Transaction, marks: Sequence[str], position: int) -> None:
        await self.advance(transaction, "", dict.fromkeys(marks, position))

    # --- parked ----------------------------------------------------------------------------------------------

    async def park(self, transaction: Transaction, found: Sequence[tuple[Parked, int | None]]) -> None:
        """Each with the redeliveries of the parked row that it comes from; None when it comes from the log, and then
        a row that is there already stays as it is."""
        fresh = [
            (
                self._node,
                self._id(each.message_id),
                each.due,
                each.redeliveries,
                each.key,
                each.position,
                pack(each.envelope),
            )
            for each, before in found
            if before is None
        ]
        again = [
            (each.due, each.redeliveries, each.key, self._node, self._id(each.message_id), before)
            for each, before in found
            if before is not None
        ]
        await transaction.executemany(
            "insert into faregate_parked (node, message_id, due_at, tries, key, position, envelope) "
            "values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing",
            sorted(fresh, key=lambda row: row[1]),
        )
        await transaction.executemany(
            "update faregate_parked set due_at = ?, tries = ?, key = ? where node = ? and message_id = ? and tries = ?",
            sorted(again, key=lambda row: row[4]),
        )

    async def decided(self, transaction: Transaction, replays: Mapping[str, bool]) -> set[str]:
        """Those that the ledger or the dead letters have; a replay is there to reopen a dead letter."""
        found: set[str] = set()
        for some in _pieces(sorted(replays)):
            values = (self._node, *self._values([self._id(each) for each in some]))
            among = self._among("message_id", "uuid")
            rows = await transaction.fetchall(
                f"select message_id from faregate_ledger where node = ? and {among}", values
            )
            found.update(self._text(message_id) for (message_id,) in rows)
            rows = await transaction.fetchall(
                f"select message_id, status from faregate_dead where node = ? and {among}", values
            )
            for message_id, status in rows:
                text = self._text(message_id)
                if status == "discarded" or (status in ("open", "replayed") and not replays[text]):
                    found.add(text)
        return found

    async def unpark(self, transaction: Transaction, message_ids: Sequence[str]) -> None:
        for some in _pieces(message_ids):
            await transaction.execute(
                "delete from faregate_parked where node = ? and " + self._among("message_id", "uuid"),
                (self._node, *self._values([self._id(each) for each in some])),
            )

    async def due(self, transaction: Transaction, now: float, limit: int) -> list[Parked]:
        """Parked messages whose time has come, in the order of the log."""
        return await self._read(transaction, "due_at <= ? order by position limit ?", (now, limit))

    async def all(self, transaction: Transaction) -> list[Parked]:
        return await self._read(transaction, "1 = 1 order by position", ())

    async def counts(self, transaction: Transaction) -> tuple[int, int | None, float | None]:
        """How many are parked, the lowest of their positions, and when the next is due."""
        row = await transaction.fetchone(
            "select count(*), min(position), min(due_at) from faregate_parked where node = ?", (self._node,)
        )
        assert row is not None
        return row[0], row[1], row[2]

    async def parked_with(
        self, transaction: Transaction, message_ids: Sequence[str], keys: Sequence[str]
    ) -> list[Parked]:
        """Parked messages with one of these ids or keys."""
        if await transaction.fetchone("select 1 from faregate_parked where node = ? limit 1", (self._node,)) is None:
            return []
        found: list[Parked] = []
        for some in _pieces(sorted(set(message_ids))):
            values = self._values([self._id(each) for each in some])
            found += await self._read(transaction, self._among("message_id", "uuid"), values)
        for some in _pieces(sorted(set(keys))):
            found += await self._read(transaction, self._among("key"), self._values(some))
        return list({each.message_id: each for each in found}.values())

    async def _read(self, transaction: Transaction, where: str, values: Sequence[Any]) -> list[Parked]:
        rows = await transaction.fetchall(
            "select message_id, due_at, tries, key, position, envelope from faregate_parked "
            f"where node = ? and {where}",
            (self._node, *values),
        )
        return [
            Parked(self._text(message_id), due, tries, key, position, unpack(envelope))
            for message_id, due, tries, key, position, envelope in rows
        ]

    # --- the two dialects ------------------------------------------------------------------------------------

    def _id(self, text: str) -> Any:
        return text if self._postgres else id_bytes(text)

    def _text(self, value: Any) -> str:
        return id_text(value) if isinstance(value, bytes) else str(value)

    def _among(self, column: str, type: str = "text") -> str:
        return f"{column} = any(?::{type}[])" if self._postgres else f"{column} in ({', '.join('?' * _AT_ONCE)})"

    def _values(self, values: Sequence[Any]) -> Sequence[Any]:
        """One array, or as many values as there are marks, the last again and again."""
        if self._postgres:
            return [list(values)]
        return [*values, *([values[-1]] * (_AT_ONCE - len(values)))]


def _pieces(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (values[start : start + _AT_ONCE] for start in range(0, len(values), _AT_ONCE))
