"""An outbox row as one statement for somebody else's connection to PostgreSQL: what `fg.outbox` runs."""

from typing import Any

from psycopg import errors

from faregate.ports.store import OutboxRow
from faregate.stores.postgres.rows import QUERIES
from faregate.stores.sql.columns import attempts_text, pack


def insertion(row: OutboxRow) -> tuple[str, tuple[Any, ...]]:
    """The statement and its parameters: columns of one row."""
    _, node, message_id, ordinal, destination, key, envelope, registered, chosen, *others = row
    attempts = (attempts_text(registered), attempts_text(chosen))
    values = (node, message_id, ordinal, destination, key, pack(envelope), *attempts, *others)
    return QUERIES["send_attempts"], tuple([value] for value in values)


def lacks_tables(exc: BaseException) -> bool:
    """Whether the statement failed because no bus has set the database up."""
    return isinstance(exc, errors.UndefinedTable)
