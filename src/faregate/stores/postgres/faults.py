"""PostgreSQL's errors as Faregate's, by their SQLSTATE and by the state of the connection, never by their text.

Deadlocks, serialization failures and refused locks are conflicts: a retry may work. A lost connection, a server
that stops or has no room makes the store unavailable; while committing nobody knows what became of it. Everything else
(a constraint, a typo) is the user's business and stays the driver's own error.
"""

from typing import Any, NoReturn

import psycopg
from psycopg_pool import PoolClosed, PoolTimeout

from faregate.errors import CommitUnknown, StoreConflict, StoreUnavailable

_CONFLICTS = {"40001", "40P01", "55P03"}
_STOPPING = {"57P01", "57P02", "57P03"}


def is_lost(exc: psycopg.Error, connection: "psycopg.AsyncConnection[Any] | None") -> bool:
    """Whether the connection is gone, or the server cannot go on."""
    state = exc.sqlstate
    if state is not None:
        return state in _STOPPING or state[:2] in ("08", "53")
    if isinstance(exc, PoolTimeout | PoolClosed):
        return True
    return connection is not None and connection.closed and isinstance(exc, psycopg.OperationalError)


def raise_translated(
    exc: psycopg.Error, where: str, connection: "psycopg.AsyncConnection[Any] | None", *, committing: bool = False
) -> NoReturn:
    """Raise what this error means to the caller; `where` is the store's URL without its password."""
    if exc.sqlstate in _CONFLICTS:
        raise StoreConflict(
            f"{where} is in conflict with another transaction ({_brief(exc)}); a retry may work"
        ) from exc
    if is_lost(exc, connection):
        if committing:
            raise CommitUnknown(f"{where}: the connection broke in the middle of a commit ({_brief(exc)})") from exc
        raise StoreUnavailable(f"{where} is not reachable: {_brief(exc)}") from exc
    raise exc


def _brief(exc: psycopg.Error) -> str:
    return " ".join(str(exc).split())
