"""An outbox row as one statement for somebody else's connection to PostgreSQL: what `fg.outbox` runs."""

from typing import Any

from psycopg import errors

from faregate.ports.store import SCHEDULE_KEY, OutboxRow, is_later
from faregate.stores.postgres.rows import QUERIES
from faregate.stores.sql.columns import pack


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


def lacks_tables(exc: BaseException) -> bool:
    """Whether the statement failed because no bus has set the database up."""
    return isinstance(exc, errors.UndefinedTable)
