"""Loops that a person writes for `exactly-once`: the bare ones, the best one on PostgreSQL, and the floor on SQLite.

The bare loops insert rows that were made before and do nothing else. The floor does all that a unit of work must do,
in batches and on bytes, and nothing that it need not do: no lanes, locks, retries, policies or middlewares.
"""

import asyncio
import os
import struct
import time
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from _effects import INSERT, LEDGER, OUTBOX, POSTGRES, Rows, connect_sqlite, make_rows, make_tables, share
from _harness import folder, timed
from _orders import Billed, Order, make_order

from faregate import ids
from faregate.message import Envelope
from faregate.stores.sql.columns import id_bytes, pack, unpack
from faregate.testing.store_subjects import postgres_schema


async def run_bare_sqlite(messages: int, *, name: str) -> float:
    business, ledger, outbox = make_rows(messages, id_bytes)
    size = share("sqlite")
    with folder() as path:
        await make_tables(f"sqlite:{path}/store.db")
        db = connect_sqlite(path)
        with timed(name, messages) as took:
            for first in range(0, messages, size):
                part = slice(first, first + size)
                db.execute("begin immediate")
                db.executemany(LEDGER, ledger[part])
                for row in business[part]:
                    db.execute(INSERT, row)
                db.executemany(OUTBOX, outbox[part])
                db.execute("commit")
        db.close()
    return took[0]


async def run_awaited_postgres(messages: int, *, name: str, size: int | None) -> float:
    """Awaits each business row, as a handler with `execute` does."""
    import psycopg

    business, ledger, outbox = make_rows(messages, str)
    size = size or share("postgres")
    insert, insert_ledger, insert_outbox = (sql.replace("?", "%s") for sql in (INSERT, LEDGER, OUTBOX))
    assert POSTGRES is not None
    async with postgres_schema(POSTGRES) as url:
        await make_tables(url)
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as db:
            cursor = db.cursor()
            with timed(name, messages) as took:
                for first in range(0, messages, size):
                    part = slice(first, first + size)
                    await cursor.execute("begin")
                    await cursor.executemany(insert_ledger, ledger[part])
                    for row in business[part]:
                        await cursor.execute(insert, row)
                    await cursor.executemany(insert_outbox, outbox[part])
                    await cursor.execute("commit")
    return took[0]


async def run_best_postgres(messages: int, *, name: str, size: int | None) -> float:
    """asyncpg sends the rows of an `executemany` without waiting for each."""
    import asyncpg

    business, ledger, outbox = make_rows(messages, str)
    size = size or share("postgres")
    statements = [_numbered(sql) for sql in (LEDGER, INSERT, OUTBOX)]
    assert POSTGRES is not None
    async with postgres_schema(POSTGRES) as url:
        await make_tables(url)
        db = await asyncpg.connect(url)
        with timed(name, messages) as took:
            for first in range(0, messages, size):
                part = slice(first, first + size)
                async with db.transaction():
                    for sql, rows in zip(statements, (ledger, business, outbox), strict=True):
                        await db.executemany(sql, rows[part])
        await db.close()
    return took[0]


def _numbered(sql: str) -> str:
    """With `$1`, `$2` in place of question marks."""
    first, *rest = sql.split("?")
    return first + "".join(f"${number}{text}" for number, text in enumerate(rest, 1))


# --- the floor ---------------------------------------------------------------------------------------------------


async def run_floor(messages: int, *, name: str, size: int | None) -> float:
    incoming = list(make_incoming(messages))
    with folder() as path:
        await make_tables(f"sqlite:{path}/store.db")
        floor = Floor(path)
        with timed(name, messages) as took:
            await floor.run(incoming, size or share("sqlite"))
        floor.close(messages)
    return took[0]


def make_incoming(count: int) -> Iterator[bytes]:
    """Publications as they travel: an envelope in bytes each."""
    encode = msgspec.json.Encoder().encode
    for number in range(count):
        root, body = ids.root_id(), encode(make_order(number))
        digest = sha256(body).digest()[:16]
        yield pack(Envelope(root, "Order", "event", "shop", body, correlation_id=root, body_digest=digest))


class Context:
    """What a handler gets."""

    __slots__ = ("_db", "envelope", "message_id")

    def __init__(self, db: Any, envelope: Envelope, message_id: str) -> None:
        self._db = db
        self.envelope = envelope
        self.message_id = message_id

    async def execute(self, sql: str, parameters: tuple[Any, ...]) -> None:
        self._db.execute(sql, parameters)


async def bill(order: Order, ctx: Context) -> Billed:
    await ctx.execute(INSERT, (order.order_id, ctx.message_id, order.total))
    return Billed(order_id=order.order_id, customer=order.customer, total=order.total, note=order.note)


class Floor:
    """A unit of work for one handler: look up, handle, record, commit; settle, dispatch, and remove with the next."""

    def __init__(self, path: Path) -> None:
        self._db = connect_sqlite(path)
        self._journal = (path / "journal").open("ab", buffering=0)
        self._settled = (path / "settled").open("ab", buffering=0)
        self._decode = msgspec.json.Decoder(Order).decode
        self._encode = msgspec.json.Encoder().encode
        self._message_id = ids.message_ids("billing")
        self._last = 0
        """The last row of the outbox that is dispatched."""

    async def run(self, incoming: list[bytes], size: int) -> None:
        for first in range(0, len(incoming), size):
            await self._unit(first, incoming[first : first + size])
        self._db.execute("delete from faregate_outbox where seq <= ?", (self._last,))

    async def _unit(self, first: int, part: list[bytes]) -> None:
        loop = asyncio.get_running_loop()
        works = [self._receive(raw) for raw in part]
        if self._handled_before(works):
            raise RuntimeError("every message is new here")
        self._db.execute("begin immediate")
        self._db.execute("delete from faregate_outbox where seq <= ?", (self._last,))
        ledger: Rows = []
        outbox: Rows = []
        for position, (order, ctx) in enumerate(works, first):
            billed = await bill(order, ctx)
            key = id_bytes(ctx.message_id)
            ledger.append(("billing", key, ctx.envelope.body_digest, order.customer, position, time.time(), "handled"))
            outbox.append(("billing", key, 0, "billing.Billed", None, self._seal(billed, ctx)))
        self._db.executemany(LEDGER, ledger)
        self._db.executemany(OUTBOX, outbox)
        await loop.run_in_executor(None, self._db.execute, "commit")
        self._settled.write(
            b"".join([struct.pack("<IQBB", 1, position, 1, 0) for position in range(first, first + len(part))])
        )
        await loop.run_in_executor(None, self._dispatch, [row[-1] for row in outbox])
        self._last += len(part)

    def _receive(self, raw: bytes) -> tuple[Order, Context]:
        envelope = unpack(raw)
        return self._decode(envelope.body), Context(self._db, envelope, self._message_id(envelope.publication_id))

    def _handled_before(self, works: list[tuple[Order, Context]]) -> Rows:
        marks = ", ".join("?" * len(works))
        return self._db.execute(
            f"select message_id, digest from faregate_ledger where node = 'billing' and message_id in ({marks})",
            [id_bytes(ctx.message_id) for _, ctx in works],
        ).fetchall()

    def _seal(self, billed: Billed, ctx: Context) -> bytes:
        body, root = self._encode(billed), ctx.envelope.correlation_id
        publication_id = ids.publication_id(
            correlation_id=root, node="billing", causation_id=ctx.message_id, handler="bill", type="Billed", slot=0
        )
        envelope = Envelope(
            publication_id,
            "Billed",
            "event",
            "billing",
            body,
            correlation_id=root,
            causation_id=ctx.message_id,
            depth=ctx.envelope.depth + 1,
            sent_at=time.time(),
            body_digest=sha256(body).digest()[:16],
        )
        return pack(envelope)

    def _dispatch(self, envelopes: list[bytes]) -> None:
        """One frame of the journal, synced."""
        frame = b"".join(envelopes)
        self._journal.write(struct.pack("<4sIII", b"FGFL", len(frame), len(envelopes), zlib.crc32(frame)) + frame)
        os.fdatasync(self._journal.fileno())

    def close(self, messages: int) -> None:
        """Every message had its effect, and nothing waits to be sent."""
        [invoices] = self._db.execute("select count(*) from invoices").fetchone()
        [waiting] = self._db.execute("select count(*) from faregate_outbox").fetchone()
        self._db.close()
        self._journal.close()
        self._settled.close()
        if (invoices, waiting) != (messages, 0):
            raise RuntimeError(f"{invoices} of {messages} messages had their effect, and {waiting} wait in the outbox")
