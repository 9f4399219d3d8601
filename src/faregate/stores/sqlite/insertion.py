"""An outbox row as one statement for somebody else's connection to SQLite: what `fg.outbox` runs."""

import sqlite3
from typing import Any

from faregate.ports.store import SCHEDULE_KEY, OutboxRow, is_later
from faregate.stores.sql.columns import pack
from faregate.stores.sqlite.rows import QUERIES


def insertion(row: OutboxRow) -> tuple[str, tuple[Any, ...]]:
    """The statement and its parameters."""
    envelope = row.envelope
    sent = (row.ordinal, row.destination, row.key, pack(envelope), row.node)
    if not is_later(envelope, envelope.sent_at):
        return QUERIES["send_from_outside"], (row.node, *sent)
    named = (row.node, envelope.publication_id, envelope.headers.get(SCHEDULE_KEY), envelope.deliver_at)
    return QUERIES["schedule_from_outside"], (*named, *sent)


def known_nodes() -> str:
    return QUERIES["known_nodes"]


_MISSING = {f"no such table: faregate_{name}" for name in ("outbox", "scheduled", "nodes")}


def lacks_tables(exc: BaseException) -> bool:
    """Whether the statement failed because no bus has set the database up. SQLite has no code for that, only words."""
    return isinstance(exc, sqlite3.OperationalError) and str(exc) in _MISSING
