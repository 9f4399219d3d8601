"""An outbox row as one statement for somebody else's connection to SQLite: what `fg.outbox` runs."""

import sqlite3
from typing import Any

from faregate.ports.store import OutboxRow
from faregate.stores.sql.columns import attempts_text, id_bytes, pack
from faregate.stores.sqlite.rows import QUERIES


def insertion(row: OutboxRow) -> tuple[str, tuple[Any, ...]]:
    """The statement and its parameters."""
    _, node, message_id, ordinal, destination, key, envelope, registered, chosen, *others = row
    cause = None if message_id is None else id_bytes(message_id)
    attempts = (attempts_text(registered), attempts_text(chosen))
    return QUERIES["send_attempts"], (node, cause, ordinal, destination, key, pack(envelope), *attempts, *others)


def lacks_tables(exc: BaseException) -> bool:
    """Whether the statement failed because no bus has set the database up. SQLite has no code for that, only words."""
    return isinstance(exc, sqlite3.OperationalError) and str(exc) == "no such table: faregate_outbox"
