"""Placing an order, once per `Idempotency-Key`: in a transaction of our own, with plain sqlite3.

In one commit: the order, its event in the outbox, and the answer, kept under the key. A crash before the commit leaves
nothing; a crash after it leaves everything, and the repeated request gets the answer that the first one did not see.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import faregate as fg

SCHEMA = """
create table if not exists orders(id text primary key, customer text not null, total integer not null);
create table if not exists answers(key text primary key, request text not null, answer text not null);
"""


class OrderPlaced(fg.Event):
    order_id: str
    customer: str
    total: int


class KeyReused(Exception):
    """The same Idempotency-Key came with another request."""


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
        publication = fg.outbox(connection, node="shop").publish(event, idempotency_key=key)
        answer = {"order_id": order_id, "publication_id": publication}
        connection.execute("insert into answers values (?, ?, ?)", (key, request, json.dumps(answer)))
    return answer
