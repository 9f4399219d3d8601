"""One transaction on one connection to PostgreSQL.

Rules kept here:
- A round trip is what costs. What has no result that anybody waits for (BEGIN, savepoints, removing dispatched rows,
  resolving dead letters, noting what was sent) waits and goes out as one text, before the next statement with
  parameters or together with COMMIT. (The driver's pipeline would save one more round trip; with the server on the same
  machine it was slower for single messages.)
- So do the statements that `write` queued: those that follow each other go out as one pipeline, and the driver sends
  rows of the same statement without looking at it again. A pipeline that was cancelled takes its connection with it.
- Whoever asks for the driver's connection finds everything sent, in order.
- A connection that turns out to be gone at the first statement is replaced once: nothing can have been committed.
- A statement that was cancelled may or may not have been sent, and BEGIN with it: from then on the transaction takes
  nothing but being rolled back.
- A commit of a transaction in which a statement failed would be answered with ROLLBACK and no error: it is refused.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast
from zlib import crc32

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.sql import SQL, Literal

from faregate.errors import StoreConflict, TransactionMisused
from faregate.ports.cancellation import finish
from faregate.ports.store import BUCKETS, LedgerRow, OutboxRow, Parked, Sent, TransactionBlock
from faregate.ports.tokens import Token
from faregate.stores.postgres.faults import is_lost, raise_translated
from faregate.stores.postgres.rows import QUERIES, PostgresRecords, token_columns
from faregate.stores.postgres.server import Connection, Cursor, PostgresServer
from faregate.stores.sql.columns import attempts_text, pack
from faregate.stores.sql.records import SqlTransaction
from faregate.stores.sql.statements import to_percent

_IDLE, _FAILED = TransactionStatus.IDLE, TransactionStatus.INERROR
_BEGIN, _SAVEPOINT, _UNDO = "begin", "savepoint faregate", "rollback to faregate"
_RECORD, _SEND, _SEND_ATTEMPTS = QUERIES["record"], QUERIES["send"], QUERIES["send_attempts"]
_DISPATCHED = QUERIES["dispatched"]
_RESOLVE = QUERIES["resolve"].replace("%s", "{}")
_NOTE_SENT = QUERIES["note_sent"].replace("%s", "{}")

Waiting = str | tuple[str, list[Sequence[Any]]]
"""A statement of our own, with its parameters in it; or one that a handler wrote, with rows of parameters or none."""


class PostgresTransaction(PostgresRecords, SqlTransaction, TransactionBlock):
    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._connection: Connection | None = None
        self._waiting: list[Waiting] = []
        """What goes out before the next statement, or with it."""
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
        connection = self._live()
        if connection.pgconn.transaction_status == _FAILED and _UNDO not in self._waiting:
            await self.roll_back()
            raise TransactionMisused(_FAILED_BEFORE)
        self._connection = None
        await finish(self._commit(connection))

    async def _commit(self, connection: Connection) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            if waiting != [_BEGIN]:
                ended = await _send_waiting(connection, [*waiting, "commit"])
                if ended.statusmessage != "COMMIT":
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
        """Give the connection back without a transaction on it; one that cannot be freed of it is closed."""
        try:
            if not connection.closed and connection.pgconn.transaction_status != _IDLE:
                await connection.execute("rollback")
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
        return _BEGIN in self._waiting or _in_transaction(connection)

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
        if connection.pgconn.transaction_status == _IDLE and _BEGIN not in self._waiting:
            raise TransactionMisused(_ENDED)
        return connection

    async def _run(self, sql: str, parameters: Any = None) -> Cursor:
        pipeline = any(not isinstance(each, str) for each in self._waiting)
        try:
            return await self._run_replacing(sql, parameters)
        except asyncio.CancelledError:
            self._cancelled = True
            if pipeline and self._connection is not None:
                await self._connection.close()
            raise

    async def _run_replacing(self, sql: str, parameters: Any) -> Cursor:
        """Run it, on another connection if this one turns out to be gone before anything was done on it."""
        connection = self._live()
        waiting, self._waiting = self._waiting, []
        try:
            return await _send(connection, waiting, sql, parameters)
        except psycopg.Error as exc:
            if not (waiting[:1] == [_BEGIN] and is_lost(exc, connection)):
                raise_translated(exc, self._server.url, connection)
        self._connection = None
        await finish(self._server.give_back(connection))
        self._connection = connection = await self._server.take()
        try:
            return await _send(connection, waiting, sql, parameters)
        except psycopg.Error as exc:
            raise_translated(exc, self._server.url, connection)

    async def _rows(self, sql: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        return await (await self._run(sql, parameters)).fetchall()

    async def _read(self, name: str, parameters: Any = ()) -> list[Any]:
        return await self._rows(QUERIES[name], parameters)

    async def _change(self, name: str, parameters: Any) -> int:
        return (await self._run(QUERIES[name], parameters)).rowcount

    async def _change_many(self, name: str, rows: Sequence[Sequence[Any]]) -> int:
        return await self._run_many(QUERIES[name], rows) if rows else 0

    # --- savepoints ---

    async def savepoint(self) -> None:
        self._live()
        self._waiting.append(_SAVEPOINT)

    async def release_savepoint(self) -> None:
        self._live()
        self._waiting.append("release faregate")

    async def roll_back_to_savepoint(self) -> None:
        self._live()
        while self._waiting and self._waiting[-1] != _SAVEPOINT:
            self._waiting.pop()  # it would be undone, and might fail before that
        self._waiting.append(_UNDO)

    # --- the user's statements ---

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        cursor = await self._run(to_percent(sql, bool(parameters)), parameters or None)
        return max(0, cursor.rowcount)

    async def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        statement = to_percent(sql, True)
        return await self._run_many(statement, rows) if rows else 0

    async def _run_many(self, statement: str, rows: Sequence[Sequence[Any]]) -> int:
        connection = await self._flushed()
        try:
            async with connection.cursor() as cursor:
                await cursor.executemany(statement, rows)
                return max(0, cursor.rowcount)
        except psycopg.Error as exc:
            raise_translated(exc, self._server.url, connection)
        except asyncio.CancelledError:
            self._cancelled = True
            raise

    async def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        return await (await self._run(to_percent(sql, bool(parameters)), parameters or None)).fetchone()

    async def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return await self._rows(to_percent(sql, bool(parameters)), parameters or None)

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        self._live()
        statement = to_percent(sql, bool(parameters))
        last = self._waiting[-1] if self._waiting else ""
        if parameters and not isinstance(last, str) and last[0] == statement:
            last[1].append(parameters)
        else:
            self._waiting.append((statement, [parameters] if parameters else []))

    async def flush(self) -> None:
        if self._waiting:
            await self._run("")

    async def _flushed(self) -> Connection:
        await self.flush()
        return self._live()

    @property
    def raw(self) -> Connection:
        """The driver's connection. What still waits is sent first, and the loop stands still for it."""
        connection = self._live()
        waiting, self._waiting = self._waiting, []
        try:
            connection.run_in_place(_send_waiting(connection, waiting))
        except psycopg.Error as exc:
            raise_translated(exc, self._server.url, connection)
        return connection

    # --- ledger ---

    async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
        if not rows:
            return {}
        given = [list(column) for column in zip(*rows, strict=True)]
        fewer = await self._rows(_RECORD, (node, *given, len(rows)))
        if not fewer:
            return {}
        new = set(fewer[0][0])
        others = {row.message_id for row in rows} - new
        if len(new) + len(others) < len(rows):
            raise ValueError(f"an id is twice in one batch for node {node}: {len(rows)} rows")
        found: dict[str, bytes | None] = dict.fromkeys(others)
        found.update(cast(Any, await self._rows(QUERIES["recorded"], (node, list(others)))))
        return found

    async def unrecord(self, node: str, message_ids: Sequence[str]) -> None:
        await self._run(QUERIES["unrecord"], (node, list(message_ids)))

    async def note_sent(self, node: str, rows: Sequence[Sent]) -> None:
        if rows:
            message_ids, counts, sent = zip(*rows, strict=True)
            values = ([*message_ids], [*counts], [each.hex() for each in sent], node)
            self._waiting.append(SQL(_NOTE_SENT).format(*map(Literal, values)).as_string())

    # --- outbox ---

    async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
        if not rows:
            return []
        _, *given = (list(column) for column in zip(*rows, strict=True))
        given[5] = [pack(envelope) for envelope in given[5]]
        registered, chosen, not_after, versions, dispatched_at = given[6:]
        plain = not (any(registered) or any(chosen) or any(versions))
        if plain and not_after.count(None) == dispatched_at.count(None) == len(rows):
            return [seq for (seq,) in await self._rows(_SEND, given[:6])]
        given[6:8] = [[attempts_text(each) for each in column] for column in given[6:8]]
        return [seq for (seq,) in await self._rows(_SEND_ATTEMPTS, given)]

    async def revise(self, rows: Sequence[OutboxRow]) -> set[int]:
        rows = sorted(rows, key=lambda row: row.seq)
        envelopes, chosen = [pack(row.envelope) for row in rows], [attempts_text(row.chosen) for row in rows]
        given = ([row.seq for row in rows], [row.version for row in rows], envelopes, chosen)
        return {seq for (seq,) in await self._rows(QUERIES["revise"], given)}

    async def dispatched(self, seqs: Sequence[int]) -> None:
        self._live()
        if seqs:
            numbers = ",".join([str(int(seq)) for seq in sorted(seqs)])
            self._waiting.append(_DISPATCHED.replace("%s", f"'{{{numbers}}}'"))

    # --- dead letters ---

    async def resolve(self, node: str, message_ids: Sequence[str], at: float) -> None:
        if message_ids:
            values = (Literal(at), Literal(node), Literal(list(message_ids)))
            self._waiting.append(SQL(_RESOLVE).format(*values).as_string())

    # --- mode `tokens` ---

    async def create_tokens(self, tokens: Sequence[Token]) -> None:
        if tokens:
            await self._run(QUERIES["create_tokens"], token_columns(tokens))

    async def consume_tokens(self, attempt_ids: Sequence[str]) -> set[str]:
        return {attempt for (attempt,) in await self._rows(QUERIES["discard_tokens"], (list(attempt_ids),))}

    # --- parked messages and positions ---

    async def lock_buckets(self, node: str, buckets: Iterable[int]) -> None:
        owner = crc32(node.encode()) % 0x2000000 * BUCKETS - 0x40000000
        if numbers := [owner + bucket for bucket in sorted(set(buckets))]:
            await self._run(QUERIES["lock_buckets"], (numbers,))

    async def positions(self, node: str, handler: str, keys: Sequence[str]) -> dict[str, int]:
        return dict(await self._read("positions", (node, handler, list(keys))) if keys else ())

    async def advance(self, node: str, handler: str, positions: Mapping[str, int]) -> None:
        if positions:
            keys = sorted(positions)
            await self._run(QUERIES["advance"], (node, handler, keys, [positions[key] for key in keys]))

    async def unpark(self, node: str, positions: Mapping[str, int]) -> None:
        if positions:
            await self._run(QUERIES["unpark"], (list(positions), list(positions.values()), node))

    async def parked_with(self, node: str, message_ids: Sequence[str], keys: Sequence[str]) -> list[Parked]:
        if not await self._read("any_parked", (node,)):
            return []
        return [self._parked(row) for row in await self._read("parked_with", (node, list(message_ids), list(keys)))]


async def _send(connection: Connection, waiting: Sequence[Waiting], sql: str, parameters: Any) -> Cursor:
    """The statement, behind what waits for it; none (an empty one) just sends that."""
    sent = await _send_waiting(connection, waiting) if waiting else None
    return sent if sent is not None and not sql else await connection.execute(sql, parameters)


async def _send_waiting(connection: Connection, waiting: Sequence[Waiting]) -> Cursor:
    """What is returned stands at the last one's result."""
    cursor = connection.cursor()
    for way, group in groupby(waiting, _way):
        if way == "text":
            cursor = await connection.execute("; ".join(cast(Any, group)), prepare=False)
            while cursor.nextset():
                pass
        elif way == "alone":
            for sql, _ in cast(Any, group):
                await connection.execute(sql)
        else:
            async with connection.pipeline():
                for sql, rows in cast(Any, group):
                    await (cursor.executemany(sql, rows) if rows else cursor.execute(sql))
    return cursor


def _way(waiting: Waiting) -> str:
    """How it goes out: ours as one text; what handlers wrote in a pipeline, where each has to be one statement."""
    if isinstance(waiting, str):
        return "text"
    return "alone" if ";" in waiting[0] and not waiting[1] else "pipeline"


def _in_transaction(connection: Connection) -> bool:
    return not connection.closed and connection.pgconn.transaction_status != _IDLE


_ENDED = (
    "the database has ended this transaction already: a statement committed it or rolled it back, so nothing of it may "
    "be relied on. Leave beginning and ending to the unit of work, also on ctx.db.raw"
)
_CANCELLED = (
    "a statement of this transaction was cancelled, by a time limit or with its task, so nobody knows what it did: "
    "nothing of the transaction stays, and the message is tried again"
)
_FAILED_BEFORE = (
    "a statement of this transaction failed, and PostgreSQL commits nothing after that: let the error end the handler, "
    "or roll back to the savepoint"
)
