"""One transaction on the writing connection of a SQLite database.

Rules kept here:
- Before every statement we check that the transaction is still open: SQLite ends it after some errors, and then the
  next statement would be committed alone, without its ledger row.
- The methods are coroutines for the port's sake; between `begin` and `commit` none of them waits.
- What is bound by the thousand is a `bytearray`: for `bytes` the driver looks for an adapter, each time in vain.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from faregate.errors import TransactionMisused
from faregate.ports.clock import Clock
from faregate.ports.store import LedgerRow, OutboxRow, Parked, Sent, TransactionBlock
from faregate.ports.tokens import Token
from faregate.stores.sql.columns import are_plain, attempts_text, id_bytes, id_text, pack
from faregate.stores.sql.records import ENDED, SqlTransaction
from faregate.stores.sql.statements import to_question
from faregate.stores.sqlite.database import SqliteDatabase
from faregate.stores.sqlite.faults import raise_translated
from faregate.stores.sqlite.rows import (
    ANY_DEAD,
    QUERIES,
    ROWS_TOGETHER,
    SqliteRecords,
    id_blobs,
    insert_together,
    token_values,
)

_BY_ID, _SENT = itemgetter(0), itemgetter(6)
_REVISE = QUERIES["revise"]
_DISPATCHED, _DISPATCHED_RANGE = QUERIES["dispatched"], QUERIES["dispatched_range"]
_LAST_ROWID = QUERIES["last_rowid"]
_ID_BYTES = 16


class SqliteTransaction(SqliteRecords, SqlTransaction, TransactionBlock):
    is_broken = False  # SQLite undoes the statement that failed, and goes on
    _connection: sqlite3.Connection | None = None
    _steps: sqlite3.Cursor
    """For savepoints: each message has two of them, and a cursor for each would cost more than they do."""

    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._used = False
        self._seqs: tuple[str, dict[str, int]] = ("", {})
        """A node, and where the ledger has the rows that were recorded for it, as long as all of them are there."""

    # --- begin and end ---

    async def begin(self) -> None:
        if self._used:
            raise TransactionMisused("this transaction was begun before; make a new one with store.transaction()")
        await self._database.begin()
        self._used = True
        self._connection = self._database.writer
        self._steps = self._connection.cursor()

    async def commit(self) -> None:
        if self._connection is None:
            return
        if not self._connection.in_transaction:
            await self.roll_back()
            raise TransactionMisused(ENDED)
        self._connection = None
        await self._database.commit()

    async def roll_back(self) -> None:
        if self._connection is not None:
            self._connection = None
            self._database.roll_back()

    @property
    def is_open(self) -> bool:
        try:
            return self._connection is not None and self._connection.in_transaction
        except sqlite3.ProgrammingError:  # somebody closed it
            return False

    @property
    def was_closed(self) -> bool:
        return self._database.is_closed

    def retire(self) -> None:
        self._database.retired = self._connection is not None

    def _live(self) -> sqlite3.Connection:
        connection = self._connection
        if connection is None:
            raise TransactionMisused("this transaction is not open: it was not begun, or it has ended")
        try:
            if connection.in_transaction:
                return connection
        except sqlite3.ProgrammingError:  # somebody closed it
            pass
        raise TransactionMisused(ENDED)

    def _run(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        try:
            return self._live().execute(sql, parameters)
        except sqlite3.Error as exc:
            raise_translated(exc, self._database.url)

    def _run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """How many rows changed. `execute` is faster for one row."""
        try:
            if len(rows) == 1:
                return self._live().execute(sql, rows[0]).rowcount
            return self._live().executemany(sql, rows).rowcount if rows else 0
        except sqlite3.Error as exc:
            raise_translated(exc, self._database.url)

    def _insert(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        """How many rows were inserted, in order. Many rows in one statement are faster than `executemany`."""
        inserted, together = 0, len(rows) // ROWS_TOGETHER * ROWS_TOGETHER
        for first in range(0, together, ROWS_TOGETHER):
            values = list(chain.from_iterable(rows[first : first + ROWS_TOGETHER]))
            inserted += self._run(insert_together(name), values).rowcount
        return inserted + self._run_many(QUERIES[name], rows[together:])

    def _fetch(self, sql: str, parameters: Any = ()) -> list[Any]:
        try:
            return self._live().execute(sql, parameters).fetchall()
        except sqlite3.Error as exc:
            raise_translated(exc, self._database.url)

    async def _rows(self, sql: str, parameters: Any = ()) -> list[Any]:
        return self._fetch(sql, parameters)

    async def _change(self, name: str, parameters: Any) -> int:
        return self._run(QUERIES[name], parameters).rowcount

    async def _change_many(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        return self._run_many(QUERIES[name], rows)

    # --- savepoints ---

    async def savepoint(self) -> None:
        self._live()
        self._step("savepoint faregate")

    async def release_savepoint(self) -> None:
        self._step("release faregate")

    async def roll_back_to_savepoint(self) -> None:
        self._seqs = ("", {})
        self._live()
        self._step("rollback to faregate")

    def _step(self, sql: str) -> None:
        try:
            self._steps.execute(sql)
        except sqlite3.Error as exc:
            raise_translated(exc, self._database.url)

    # --- the user's statements ---

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        return max(0, self._run(to_question(sql), parameters).rowcount)

    async def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        return max(0, self._run_many(to_question(sql), rows))

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self._run(to_question(sql), parameters)

    async def flush(self) -> None:
        pass  # it ran at once

    async def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        # All rows are fetched: a statement that still runs would hold up the commit.
        rows = self._fetch(to_question(sql), parameters)
        return rows[0] if rows else None

    async def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._fetch(to_question(sql), parameters)

    @property
    def raw(self) -> sqlite3.Connection:
        return self._live()

    # --- ledger ---

    async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
        rows = sorted(rows, key=_BY_ID)
        message_ids = iter(id_blobs([*map(_BY_ID, rows)]))
        values: list[tuple[Any, ...]] = [
            (node, next(message_ids), digest and bytearray(digest), key, position, at, outcome)
            for _, digest, key, position, at, outcome, _, _ in rows
        ]
        if any(map(_SENT, rows)):
            values = [(*value, row.sent, row.sent_ids) for value, row in zip(values, rows, strict=True)]
            inserted = self._insert("record", values)
        else:
            inserted = self._insert("record_unsent", values)
        if inserted < len(values):
            return self._there_before(values, inserted)
        if inserted > 1:
            last: int = self._fetch(_LAST_ROWID)[0][0]
            self._seqs = (node, dict(zip(map(_BY_ID, rows), range(last - inserted + 1, last + 1), strict=True)))
        return {}

    def _there_before(self, values: Sequence[tuple[Any, ...]], inserted: int) -> dict[str, bytes | None]:
        """Which rows were there before. Those just inserted have the highest numbers, one after the other."""
        first_new = self._fetch(_LAST_ROWID)[0][0] - inserted + 1 if inserted else None
        found = {}
        for node, message_id, *_ in values:
            [(seq, digest)] = self._fetch(QUERIES["recorded"], (node, message_id))
            if first_new is None or seq < first_new:
                found[id_text(message_id)] = digest
        if len(found) + inserted < len(values):
            raise ValueError(f"an id is twice in one batch for node {values[0][0]}: {len(values)} rows")
        return found

    async def unrecord(self, node: str, message_ids: Sequence[str]) -> None:
        self._seqs = ("", {})
        self._run_many(QUERIES["unrecord"], [(node, id_bytes(message_id)) for message_id in message_ids])

    async def note_sent(self, node: str, rows: Sequence[Sent]) -> None:
        recorded, seqs = self._seqs
        if recorded != node or not all(row.message_id in seqs for row in rows):
            values = [(count, sent, node, id_bytes(message_id)) for message_id, count, sent in rows]
            self._run_many(QUERIES["note_sent"], values)
            return
        notes = sorted([(seqs[message_id], count, sent) for message_id, count, sent in rows])
        places, counts, sent_ids = zip(*notes, strict=True) if notes else ((), (), ())
        joined = b"".join(sent_ids)
        alike = len(set(counts)) == 1 and len(joined) == _ID_BYTES * len(notes)
        if alike and places[-1] - places[0] == len(notes) - 1:  # as nearly always: one statement for all
            self._run(QUERIES["note_sent_range"], (counts[0], joined, places[0], places[-1]))
        else:
            self._run_many(QUERIES["note_sent_at"], [(count, sent, seq) for seq, count, sent in notes])

    # --- outbox ---

    async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
        if not rows:
            return []
        if are_plain(rows):
            causes = iter(id_blobs([row.message_id for row in rows if row.message_id is not None]))
            self._insert(
                "send",
                [
                    (node, cause and next(causes), ordinal, destination, key, bytearray(pack(envelope)))
                    for _, node, cause, ordinal, destination, key, envelope, _, _, _, _, _ in rows
                ],
            )
        else:
            self._run_many(QUERIES["send_attempts"], [_attempt_values(row) for row in rows])
        # Nobody else writes meanwhile, so the numbers lie together.
        last: int = self._fetch(_LAST_ROWID)[0][0]
        return list(range(last - len(rows) + 1, last + 1))

    async def revise(self, rows: Sequence[OutboxRow]) -> set[int]:
        return {
            row.seq
            for row in rows
            if self._run(_REVISE, (pack(row.envelope), attempts_text(row.chosen), row.seq, row.version)).rowcount
        }

    async def dispatched(self, seqs: Sequence[int]) -> None:
        if len(seqs) == 1:
            self._run(_DISPATCHED, seqs)
            return
        wanted = sorted(set(seqs))
        if wanted and wanted[-1] - wanted[0] + 1 == len(wanted):
            self._run(_DISPATCHED_RANGE, (wanted[0], wanted[-1]))
        else:
            self._run_many(_DISPATCHED, [(seq,) for seq in wanted])

    # --- dead letters ---

    async def resolve(self, node: str, message_ids: Sequence[str], at: float) -> None:
        if self._fetch(ANY_DEAD, (node,)):
            await self._read_among("resolve", (at, node), message_ids, ids=True)

    # --- mode `tokens` ---

    async def create_tokens(self, tokens: Sequence[Token]) -> None:
        self._run_many(QUERIES["create_token"], token_values(tokens, self._clock.time()))

    async def consume_tokens(self, attempt_ids: Sequence[str]) -> set[str]:
        discard = QUERIES["discard_token"]
        return {attempt for attempt in sorted(set(attempt_ids)) if self._run(discard, (attempt,)).rowcount}

    # --- parked messages and positions ---

    async def lock_buckets(self, node: str, buckets: Iterable[int]) -> None:
        self._live()  # the writer's lock is enough

    def _now(self) -> dict[str, float]:
        return {"now": self._clock.time()}

    async def positions(self, node: str, handler: str, keys: Sequence[str]) -> dict[str, int]:
        return dict(await self._read_among("positions", (node, handler), keys, ids=False))

    async def advance(self, node: str, handler: str, positions: Mapping[str, int]) -> None:
        self._run_many(QUERIES["advance"], [(node, handler, *each) for each in sorted(positions.items())])

    async def unpark(self, node: str, positions: Mapping[str, int]) -> None:
        self._run_many(QUERIES["unpark"], [(node, id_bytes(each), position) for each, position in positions.items()])

    async def parked_with(self, node: str, message_ids: Sequence[str], keys: Sequence[str]) -> list[Parked]:
        if not self._fetch(QUERIES["any_parked"], (node,)):
            return []
        rows = await self._read_among("parked_ids", (node,), message_ids, ids=True)
        rows += await self._read_among("parked_keys", (node,), keys, ids=False)
        return list({row[0]: self._parked(row) for row in rows}.values())


def _attempt_values(row: OutboxRow) -> tuple[Any, ...]:
    _, node, message_id, ordinal, destination, key, envelope, registered, chosen, *others = row
    cause = None if message_id is None else id_bytes(message_id)
    attempts = (attempts_text(registered), attempts_text(chosen))
    return (node, cause, ordinal, destination, key, pack(envelope), *attempts, *others)
