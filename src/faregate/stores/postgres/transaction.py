"""One transaction on one connection to PostgreSQL.

Rules kept here:
- A round trip is what costs. A statement whose result nobody needs (BEGIN, savepoints, outbox rows, `write`) waits, and
  goes out in one pipeline (`pipeline.py`) with the next one that has a result, or with COMMIT.
- Before a handler gets the driver's connection, everything that waits is sent, in order.
- A connection that turns out to be gone at the first statement is replaced once: nothing can have been committed.
- A statement that was cancelled may or may not have been sent, and BEGIN with it: from then on the transaction can
  only be rolled back.
- A commit of a transaction in which a statement failed would be answered with ROLLBACK and no error: it is refused.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import psycopg
from psycopg import abc
from psycopg.adapt import Transformer
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGresult

from faregate.errors import StoreConflict, TransactionMisused
from faregate.ports.cancellation import finish
from faregate.ports.store import BUCKETS, Answer, LedgerRow, OutboxRow, Parked, Sent, TransactionBlock
from faregate.ports.tokens import Token
from faregate.stores.postgres.faults import is_lost, raise_translated
from faregate.stores.postgres.pipeline import Statement, columns_of, driven, exchange, ours, rows_of, take_back, theirs
from faregate.stores.postgres.rows import QUERIES, PostgresRecords, token_columns
from faregate.stores.postgres.server import Connection, PostgresServer
from faregate.stores.sql.columns import are_plain, attempts_text, pack
from faregate.stores.sql.records import ENDED, SqlTransaction
from faregate.stores.sql.statements import check_statement, to_percent

_IDLE, _FAILED = TransactionStatus.IDLE, TransactionStatus.INERROR
_BEGIN, _COMMIT, _ROLLBACK = ours("begin"), ours("commit"), ours("rollback")
_SAVEPOINT, _RELEASE, _UNDO = ours("savepoint faregate"), ours("release faregate"), ours("rollback to faregate")


class PostgresTransaction(PostgresRecords, SqlTransaction, TransactionBlock):
    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._connection: Connection | None = None
        self._waiting: list[Statement] = []
        """What goes out before the next statement, or with it."""
        self._driver: abc.Transformer | None = None
        """Adapts the parameters of the user's statements."""
        self._used = False
        self._cancelled = False
        self._retired = False

    # --- begin and end ---

    async def begin(self) -> None:
        if self._used:
            raise TransactionMisused("this transaction was begun before; make a new one with store.transaction()")
        self._connection = await self._server.take()
        self._used = True
        self._waiting = [_BEGIN]

    async def commit(self) -> None:
        if self._connection is None and not self._cancelled:
            return
        if len(self._waiting) > 1 and self._begins:
            await self.flush()  # if the connection is gone this shows it, and certainly nothing was committed
        connection = self._live()
        if connection.pgconn.transaction_status == _FAILED and _UNDO not in self._waiting:
            await self.roll_back()
            raise TransactionMisused(_FAILED_BEFORE)
        self._connection = None
        await finish(self._commit(connection))

    async def _commit(self, connection: Connection) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            if waiting[:1] != [_BEGIN]:
                [ended] = await exchange(connection, [*waiting, _COMMIT])
                if ended.command_status != b"COMMIT":
                    raise TransactionMisused(_FAILED_BEFORE)
        except psycopg.Error as exc:
            raise_translated(exc, self._server.url, connection, committing=True)
        finally:
            await self._release(connection)

    def retire(self) -> None:
        self._retired = True

    async def roll_back(self) -> None:
        self._cancelled = False
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._waiting = []
            await finish(self._release(connection))

    async def _release(self, connection: Connection) -> None:
        """Give the connection back without a transaction on it, or close it if that fails."""
        try:
            if not connection.closed and connection.pgconn.transaction_status != _IDLE:
                await exchange(connection, [_ROLLBACK])
            if connection.lent and not connection.closed and not self._retired:
                await take_back(connection)
        except psycopg.Error:
            await connection.close()
        if self._retired:
            await connection.close()
        await self._server.give_back(connection)

    @property
    def is_open(self) -> bool:
        connection = self._connection
        if self._cancelled or connection is None:
            return self._cancelled
        return self._begins or (not connection.closed and connection.pgconn.transaction_status != _IDLE)

    @property
    def _begins(self) -> bool:
        """Whether nothing of it was sent yet."""
        return bool(self._waiting) and self._waiting[0] is _BEGIN

    @property
    def was_closed(self) -> bool:
        connection = self._connection
        return connection is not None and connection.closed and not connection.broken

    @property
    def is_broken(self) -> bool:
        connection = self._connection
        return connection is not None and connection.pgconn.transaction_status == TransactionStatus.INERROR

    def _live(self) -> Connection:
        connection = self._connection
        if self._cancelled:
            raise StoreConflict(_CANCELLED)
        if connection is None:
            raise TransactionMisused("this transaction is not open: it was not begun, or it has ended")
        if connection.pgconn.transaction_status == _IDLE and not self._begins:
            raise TransactionMisused(ENDED)
        return connection

    async def _exchange(self, *more: Statement) -> list[PGresult]:
        """Send what waits, and more behind it; the answers of the last. If the connection turns out to be gone before
        anything was done on it, another one takes its place."""
        connection = self._live()
        waiting, self._waiting = [*self._waiting, *more], []
        try:
            try:
                return await exchange(connection, waiting)
            except psycopg.Error as exc:
                if not (waiting[0] is _BEGIN and is_lost(exc, connection)):
                    raise
            self._connection = None
            await finish(self._server.give_back(connection))
            self._connection = connection = await self._server.take()
            return await exchange(connection, waiting)
        except psycopg.Error as exc:
            raise_translated(exc, self._server.url, connection)
        except asyncio.CancelledError:
            self._cancelled = True
            raise

    async def _run(self, statement: Statement) -> tuple[list[tuple[Any, ...]], int]:
        """Its rows, and how many it changed."""
        [answer] = await self._exchange(statement)
        return rows_of(self._live(), answer), answer.command_tuples or 0

    async def _read(self, name: str, parameters: Any = ()) -> list[Any]:
        return (await self._run(ours(QUERIES[name], parameters)))[0]

    async def _change(self, name: str, parameters: Any) -> int:
        return (await self._run(ours(QUERIES[name], parameters)))[1]

    async def _change_many(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        return await self._run_many(QUERIES[name], rows) if rows else 0

    async def _run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        return sum(answer.command_tuples or 0 for answer in await self._exchange(self._theirs(sql, rows)))

    def _later(self, name: str, *values: Any) -> None:
        """A statement of ours whose result nobody needs."""
        self._live()
        self._waiting.append(ours(QUERIES[name], values))

    def _theirs(self, sql: str, rows: Sequence[Sequence[Any]]) -> Statement:
        return theirs(self._adapter(), sql, rows)

    def _adapter(self) -> abc.Transformer:
        if self._driver is None:
            self._driver = Transformer(self._live())
        return self._driver

    def _given(self, sql: str, parameters: Sequence[Any]) -> Statement:
        """A statement of the user."""
        return self._theirs(to_percent(sql, bool(parameters)), [parameters])

    # --- savepoints ---

    async def savepoint(self) -> None:
        self._live()
        self._waiting.append(_SAVEPOINT)

    async def release_savepoint(self) -> None:
        self._live()
        self._waiting.append(_RELEASE)

    async def roll_back_to_savepoint(self) -> None:
        self._live()
        while self._waiting and self._waiting[-1] is not _SAVEPOINT:
            self._waiting.pop()  # it would be undone, and might fail before that
        self._waiting.append(_UNDO)

    # --- the user's statements ---

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        return (await self._run(self._given(sql, parameters)))[1]

    async def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        statement = to_percent(sql, True)
        return await self._run_many(statement, rows) if rows else 0

    async def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        rows = await self.fetchall(sql, parameters)
        return rows[0] if rows else None

    async def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return (await self._run(self._given(sql, parameters)))[0]

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self._live()
        statement = self._given(sql, parameters)
        last = self._waiting[-1] if self._waiting else _BEGIN
        if last.sql == statement.sql and not last.is_ours:
            last.rows.extend(statement.rows)
        else:
            self._waiting.append(statement)

    async def flush(self) -> None:
        if self._waiting:
            await self._exchange()

    @property
    def raw(self) -> Connection:
        """The driver's connection. What still waits is sent first, and the loop stands still for it."""
        connection = self._live()
        waiting, self._waiting = self._waiting, []
        try:
            connection.run_in_place(exchange(connection, waiting))
        except psycopg.Error as exc:
            raise_translated(exc, self._server.url, connection)
        connection.lent = True
        return connection

    # --- the statements of a session ---

    async def ask(self, sql: str, parameters: Any) -> Answer:
        [answer] = await self._exchange(self._driven(sql, [parameters]))
        connection = self._live()
        rows, rowcount = rows_of(connection, answer), answer.command_tuples
        return Answer(rows, columns_of(connection, answer), -1 if rowcount is None else rowcount)

    async def ask_many(self, sql: str, rows: Sequence[Any]) -> Answer:
        answers = await self._exchange(self._driven(sql, rows))
        return Answer([], None, sum(answer.command_tuples or 0 for answer in answers))

    def _driven(self, sql: str, rows: Sequence[Any]) -> Statement:
        check_statement(sql)
        return driven(self._adapter(), sql, rows)

    async def nest(self, sql: str, parameters: Any) -> None:
        await self._exchange(ours(sql))

    # --- ledger ---

    async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
        if not rows:
            return {}
        given = [list(column) for column in zip(*rows, strict=True)]
        [answer] = await self._exchange(ours(QUERIES["record"], (node, *given, len(rows))))
        if not answer.ntuples:
            return {}
        new = (answer.get_value(0, 0) or b"").decode().strip("{}")
        others = {row.message_id for row in rows}.difference(new.split(","))
        if len(others) + new.count("-") // 4 < len(rows):
            raise ValueError(f"an id is twice in one batch for node {node}: {len(rows)} rows")
        return dict.fromkeys(others) | dict(await self._read("recorded", {"node": node, "ids": list(others)}))

    async def unrecord(self, node: str, message_ids: Sequence[str]) -> None:
        self._live()
        self._waiting.append(ours(QUERIES["unrecord"], {"node": node, "ids": list(message_ids)}))

    async def note_sent(self, node: str, rows: Sequence[Sent]) -> None:
        for message_id, sent, sent_ids in rows:
            self._later("note_sent", sent, sent_ids, node, message_id)

    # --- outbox ---

    async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
        self._live()
        seqs: list[int] = []
        if rows:
            _, *given = (list(column) for column in zip(*rows, strict=True))
            given[5] = [pack(envelope) for envelope in given[5]]
            given[6:8] = [[attempts_text(each) for each in column] for column in given[6:8]]
            statement = ours(QUERIES["send"], given[:6]) if are_plain(rows) else ours(QUERIES["send_attempts"], given)
            self._waiting.append(statement._replace(numbers=seqs))
        return seqs

    async def revise(self, rows: Sequence[OutboxRow]) -> set[int]:
        rows = sorted(rows, key=lambda row: row.seq)
        envelopes, chosen = [pack(row.envelope) for row in rows], [attempts_text(row.chosen) for row in rows]
        given = ([row.seq for row in rows], [row.version for row in rows], envelopes, chosen)
        return {seq for (seq,) in await self._read("revise", given)}

    async def dispatched(self, seqs: Sequence[int]) -> None:
        if seqs:
            self._later("dispatched", sorted(seqs))

    # --- dead letters ---

    async def resolve(self, node: str, message_ids: Sequence[str], at: float) -> None:
        if message_ids:
            self._later("resolve", at, node, list(message_ids))

    # --- mode `tokens` ---

    async def create_tokens(self, tokens: Sequence[Token]) -> None:
        if tokens:
            self._later("create_tokens", *token_columns(tokens))

    async def consume_tokens(self, attempt_ids: Sequence[str]) -> set[str]:
        return {attempt for (attempt,) in await self._read("discard_tokens", (list(attempt_ids),))}

    # --- parked messages and positions ---

    async def lock_buckets(self, node: str, buckets: Iterable[int]) -> None:
        owner = crc32(node.encode()) % 0x2000000 * BUCKETS - 0x40000000
        if numbers := [owner + bucket for bucket in sorted(set(buckets))]:
            await self._change("lock_buckets", (numbers,))

    async def positions(self, node: str, handler: str, keys: Sequence[str]) -> dict[str, int]:
        given = {"node": node, "handler": handler, "keys": list(keys)}
        return dict(await self._read("positions", given) if keys else ())

    async def advance(self, node: str, handler: str, positions: Mapping[str, int]) -> None:
        if positions:
            keys = sorted(positions)
            self._later("advance", node, handler, keys, [positions[key] for key in keys])

    async def unpark(self, node: str, positions: Mapping[str, int]) -> None:
        if positions:
            self._later("unpark", list(positions), list(positions.values()), node)

    async def parked_with(self, node: str, message_ids: Sequence[str], keys: Sequence[str]) -> list[Parked]:
        if not await self._read("any_parked", (node,)):
            return []
        return [self._parked(row) for row in await self._read("parked_with", (node, list(message_ids), list(keys)))]


_CANCELLED = (
    "a statement of this transaction was cancelled, by a time limit or with its task, so nobody knows what it did: "
    "nothing of the transaction stays, and the message is tried again"
)
_FAILED_BEFORE = (
    "a statement of this transaction failed, and PostgreSQL commits nothing after that: let the error end the handler, "
    "or roll back to the savepoint"
)
