"""Placing an order, once per `Idempotency-Key`: in a transaction of our own, with plain sqlite3.

In one commit: the order, its event in the outbox, and the answer, kept under the key. A crash before the commit leaves
nothing; a crash after it leaves everything, and the repeated request gets the answer that the first one did not see.
"""

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import faregate as fg

SCHEMA = """
create table if not exists orders(
    id text primary key, customer text not null, total integer not null, billed integer not null default 0);
create table if not exists answers(key text primary key, request text not null, answer text not null);
"""


shop = fg.Node("shop", schema=SCHEMA)
"""The node that requests publish as. Its handlers are in worker.py, which runs it."""


class OrderPlaced(fg.Event):
    order_id: str
    customer: str
    total: int


class KeyReused(Exception):
    """The same Idempotency-Key came with another request."""


def data_folder() -> Path:
    return Path(os.environ.get("WEB_DATA", "web-data"))


async def make_tables(folder: Path) -> None:
    """The tables of `shop` and those of Faregate beside them, so that orders are taken before a bus ever ran.

    Every process of the web service does so when it starts; on a server of your own `faregate store init` is a step of
    the deployment. Nothing is consumed here: the bus is only prepared, and has no journal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    await fg.Bus("memory:", nodes=[fg.Node(shop.name, schema=SCHEMA)], store=f"sqlite:{folder}/shop.db").prepare()


@contextmanager
def transaction(path: Path) -> Iterator[sqlite3.Connection]:
    """A transaction that begins as a writer, so that two requests with one key take turns."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=10)
    try:
        connection.execute("begin immediate")
        yield connection
        connection.execute("commit")
    finally:
        connection.close()  # what is not committed by now is rolled back


def place_order(path: Path, key: str, customer: str, total: int) -> dict[str, Any]:
    """The answer to the request; the same one for every repetition. Raises `KeyReused`."""
    request = sha256(json.dumps([customer, total]).encode()).hexdigest()
    with transaction(path) as connection:
        before = connection.execute("select request, answer from answers where key = ?", (key,)).fetchone()
        if before is not None:
            if before[0] != request:
                raise KeyReused
            kept: dict[str, Any] = json.loads(before[1])
            return kept
        order_id = str(uuid4())
        connection.execute("insert into orders(id, customer, total) values (?, ?, ?)", (order_id, customer, total))
        event = OrderPlaced(order_id=order_id, customer=customer, total=total)
        publication = fg.outbox(connection, node=shop).publish(event, idempotency_key=key)
        answer = {"order_id": order_id, "publication_id": publication}
        connection.execute("insert into answers values (?, ?, ?)", (key, request, json.dumps(answer)))
    return answer


def find_order(path: Path, order_id: str) -> dict[str, Any] | None:
    with transaction(path) as connection:
        row = connection.execute("select id, total, billed from orders where id = ?", (order_id,)).fetchone()
    return None if row is None else {"order_id": row[0], "total": row[1], "billed": bool(row[2])}
