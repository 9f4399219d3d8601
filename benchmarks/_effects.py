"""What all contestants of `exactly-once` share: the messages, the tables and their rows, and places.

For each message one business row is inserted and one event goes out.
"""

import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from _orders import Order, make_order

from faregate import ids
from faregate.codec import CODECS
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.stores.sql.columns import pack
from faregate.testing.store_subjects import postgres_schema

POSTGRES = os.environ.get("FAREGATE_TEST_POSTGRES")
INVOICES = "create table if not exists invoices(order_id text primary key, message_id text not null, total integer)"
INSERT = "insert into invoices(order_id, message_id, total) values (?, ?, ?)"
LEDGER = (
    "insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome) "
    "values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing"
)
OUTBOX = "insert into faregate_outbox (node, message_id, ordinal, destination, key, envelope) values (?, ?, ?, ?, ?, ?)"

Rows = list[tuple[Any, ...]]

rows_per_commit: dict[str, list[float]] = {"sqlite": [], "postgres": []}
"""What `ledger` had, run by run."""


def make_rows(count: int, as_id: Callable[[str], Any]) -> tuple[Rows, Rows, Rows]:
    """What the transactions of the handlers insert: business, ledger and outbox rows."""
    business: Rows = []
    ledger: Rows = []
    outbox: Rows = []
    encode = CODECS["json"].encoder(Order)
    for number in range(count):
        order, root = make_order(number), ids.root_id()
        message_id = ids.message_id(root, "billing")
        billed = Envelope(
            publication_id=ids.message_id(root, "another"),
            type="Billed",
            source="billing",
            body=encode(order),
            correlation_id=root,
            causation_id=message_id,
            depth=1,
            sent_at=1e9,
            body_digest=b"d" * 16,
        )
        business.append((order.order_id, message_id, order.total))
        ledger.append(("billing", as_id(message_id), b"d" * 16, order.customer, number, 1e9 + number, "handled"))
        outbox.append(("billing", as_id(message_id), 0, "billing.Billed", None, pack(billed)))
    return business, ledger, outbox


def share(kind: str) -> int:
    """How many messages `ledger` put into a commit when it ran last."""
    return round(rows_per_commit[kind][-1])


@asynccontextmanager
async def place(kind: str, path: Path) -> AsyncIterator[str]:
    """The URL of an empty store."""
    if kind == "sqlite":
        yield f"sqlite:{path}/store.db"
    else:
        assert POSTGRES is not None
        async with postgres_schema(POSTGRES) as url:
            yield url


async def make_tables(url: str) -> None:
    store = open_store(url, SystemClock())
    await store.open()
    await store.apply_schema(INVOICES)
    await store.close()


def connect_sqlite(path: Path) -> sqlite3.Connection:
    """As durable as our own store: a write-ahead log that is synced with every commit."""
    db = sqlite3.connect(path / "store.db", isolation_level=None, check_same_thread=False)
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    return db
