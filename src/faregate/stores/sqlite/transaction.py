"""One transaction on the writing connection of a SQLite database.

Rules kept here:
- Every statement first looks whether the transaction is still open: SQLite ends it by itself after some errors, and in
  autocommit the next statement would be committed alone, without its ledger row.
- The methods are coroutines for the port's sake; between `begin` and `commit` none of them waits.
"""

import sqlite3
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from faregate.errors import TransactionMisused
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.store import LedgerRow, OutboxRow, Sent, TransactionBlock
from faregate.ports.tokens import Token
from faregate.stores.sql import columns
from faregate.stores.sql.columns import attempts_text, id_bytes, id_text, pack
from faregate.stores.sql.statements import to_question
from faregate.stores.sqlite.database import SqliteDatabase
from faregate.stores.sqlite.faults import raise_translated
from faregate.stores.sqlite.rows import QUERIES, dead_letter, token_values

_BY_ID = itemgetter(0)
_RECORD = QUERIES["record"]
_SEND, _REVISE = QUERIES["send"], QUERIES["revise"]
_NOTE_SENT = QUERIES["note_sent"]
_DISPATCHED, _DISPATCHED_RANGE = QUERIES["dispatched"], QUERIES["dispatched_range"]
_LAST_ROWID = QUERIES["last_rowid"]


class SqliteTransaction(TransactionBlock):
    def __init__(self, database: SqliteDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._used = False

    # --- begin and end ---

    async def begin(self) -> None:
        if self._used:
            raise TransactionMisused("this transaction was begun before; make a new one with store.transaction()")
        await self._database.begin()
        self._used = True
        self._connection = self._database.writer

    async def commit(self) -> None:
        if self._connection is None:
            return
        if not self._connection.in_transaction:
            await self.roll_back()
            raise TransactionMisused(_ENDED)
        self._connection = None
        await self._database.commit()

    async def roll_back(self) -> None:
        if self._connection is not None:
            self._connection = None
            self._database.roll_back()

    @property
    def is_open(self) -> bool:
        return self._connection is not None and not self._database.is_closed and self._connection.in_transaction

    @property
    def was_closed(self) -> bool:
        return self._database.is_closed

    @property
    def is_broken(self) -> bool:
        return False  # SQLite undoes the statement that failed, and goes on

    def retire(self) -> None:
        self._database.retired = self._connection is not None

    def _live(self) -> sqlite3.Connection:
        connection = self._connection
        if connection is None:
            raise TransactionMisused("this transaction is not open: it was not begun, or it has ended")
        if self._database.is_closed or not connection.in_transaction:
            raise TransactionMisused(_ENDED)
        return connection

    def _run(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        try:
            return self._live().execute(sql, parameters)
        except sqlite3.Error as exc:
            raise_translated(exc, self._database.url)

    def _run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """How many rows changed. One row takes the shorter way."""
        try:
            if len(rows) == 1:
                return self._live().execute(sql, rows[0]).rowcount
            return self._live().executemany(sql, rows).rowcount if rows else 0
        except sqlite3.Error as exc:
            raise_translated(exc, self._database.url)

    def _fetch(self, sql: str, parameters: Any = ()) -> list[Any]:
        try:
            return self._live().execute(sql, parameters).fetchall()
        except sqlite3.Error as exc:
            raise_translated(exc, self._database.url)

    # --- savepoints ---

    async def savepoint(self) -> None:
        self._run("savepoint faregate")

    async def release_savepoint(self) -> None:
        self._run("release faregate")

    async def roll_back_to_savepoint(self) -> None:
        self._run("rollback to faregate")

    # --- the user's statements ---

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        return max(0, self._run(to_question(sql), parameters).rowcount)

    async def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        return max(0, self._run_many(to_question(sql), rows))

    async def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        # All rows are fetched: a statement that still runs would hold up the commit.
        rows = self._fetch(to_question(sql), parameters)
        return rows[0] if rows else None

    async def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._fetch(to_question(sql), parameters)

    @property
    def raw(self) -> sqlite3.Connection:
        return self._live()

    # --- ledger and identities ---

    async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
        values = [
            (node, bytes.fromhex(message_id.replace("-", "")), digest, key, position, at, outcome)
            for message_id, digest, key, position, at, outcome in sorted(rows, key=_BY_ID)
        ]
        inserted = self._run_many(_RECORD, values)
        return {} if inserted == len(values) else self._there_before(values, inserted)

    def _there_before(self, values: Sequence[tuple[Any, ...]], inserted: int) -> dict[str, bytes | None]:
        """Which rows made no difference. Those just inserted have the highest numbers, one after the other."""
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
        self._run_many(QUERIES["unrecord"], [(node, id_bytes(message_id)) for message_id in message_ids])

    async def note_sent(self, node: str, rows: Sequence[Sent]) -> None:
        self._run_many(_NOTE_SENT, [(count, sent, node, id_bytes(message_id)) for message_id, count, sent in rows])

    async def floor(self, node: str) -> float | None:
        rows = self._fetch(QUERIES["floor"], (node,))
        return rows[0][0] if rows else None

    async def identify(self, node: str, handler: str, identity: str, at: float) -> bool:
        return self._run(QUERIES["identify"], (node, handler, identity, at)).rowcount == 1

    async def unidentify(self, node: str, handler: str, identity: str) -> None:
        self._run(QUERIES["unidentify"], (node, handler, identity))

    # --- outbox ---

    async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
        values = [
            (
                node,
                None if message_id is None else bytes.fromhex(message_id.replace("-", "")),
                ordinal,
                destination,
                key,
                pack(envelope),
                attempts_text(registered) if registered else None,
                attempts_text(chosen) if chosen else None,
                not_after,
                version,
                done,
            )
            for (
                _,
                node,
                message_id,
                ordinal,
                destination,
                key,
                envelope,
                registered,
                chosen,
                not_after,
                version,
                done,
            ) in rows
        ]
        if len(values) == 1:
            return [self._run(_SEND, values[0]).lastrowid or 0]
        if not values:
            return []
        self._run_many(_SEND, values)
        # Nobody else writes meanwhile, so the numbers lie together.
        last: int = self._fetch(_LAST_ROWID)[0][0]
        return list(range(last - len(values) + 1, last + 1))

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

    async def add_dead(self, letter: DeadLetter) -> DeadLetter:
        values = columns.dead_values(letter, id_bytes(letter.message_id))
        return dead_letter(self._fetch(QUERIES["add_dead"], values)[0])

    async def fold(self, node: str, message_id: str) -> None:
        self._run(QUERIES["fold"], (node, id_bytes(message_id)))

    async def resolve(self, node: str, message_ids: Sequence[str], at: float) -> None:
        self._run_many(QUERIES["resolve"], [(at, node, id_bytes(message_id)) for message_id in message_ids])

    async def mark_dead(
        self, node: str, message_id: str, status: DeadStatus, *, by: str, at: float
    ) -> DeadLetter | None:
        values = {"node": node, "message_id": id_bytes(message_id), "status": status, "by": by, "at": at}
        rows = self._fetch(QUERIES["mark_dead"], values)
        return dead_letter(rows[0]) if rows else None

    async def remove_dead(self, letters: Sequence[DeadLetter]) -> int:
        values = [columns.dead_state(letter, id_bytes(letter.message_id)) for letter in letters]
        return sum(self._run(QUERIES["remove_dead"], each).rowcount for each in values)

    # --- mode `tokens` ---

    async def create_tokens(self, tokens: Sequence[Token]) -> None:
        self._run_many(QUERIES["create_token"], token_values(tokens, self._clock.time()))

    async def consume_tokens(self, attempt_ids: Sequence[str]) -> set[str]:
        discard = QUERIES["discard_token"]
        return {attempt for attempt in sorted(set(attempt_ids)) if self._run(discard, (attempt,)).rowcount}

    async def finish_claim(self, node: str, message_id: str, claim_id: str) -> bool:
        return self._run(QUERIES["finish_claim"], (node, id_bytes(message_id), claim_id)).rowcount == 1


_ENDED = (
    "the database has ended this transaction already: a statement committed it or rolled it back, so nothing of it may "
    "be relied on. Leave beginning and ending to the unit of work, also on ctx.db.raw"
)
