"""What SQLAlchemy takes for a connection of the driver: each statement goes to the unit of work.

Rules kept here:
- It never begins or ends the transaction. A commit is refused. A rollback is only noted: SQLAlchemy rolls back by
  itself after a failed flush, and whoever goes on all the same must not succeed with half of it.
- On the event loop a statement is awaited from within SQLAlchemy's greenlet, in a thread it is waited for: one session
  serves both kinds of functions of a message.
- All rows of an answer are there at once: nothing stays open that could hold up the commit.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import await_only

from faregate.errors import TransactionMisused
from faregate.ports.store import Answer, Asked, Statements


def not_yours(what: str) -> NoReturn:
    raise TransactionMisused(
        f"a handler must not {what} ctx.session: its writes, the ledger row and the outgoing messages are committed "
        "together, by Faregate, when the handler has succeeded. Raise an exception to have all of it rolled back, or "
        "put what may fail into ctx.session.begin_nested(), which rolls back that part alone"
    )


class UnitConnection(PoolProxiedConnection):
    """Of one session. SQLAlchemy finds in it both the driver's connection and the pool's wrapper around that."""

    is_valid, is_detached = True, False
    closed = broken = False  # as psycopg's

    def __init__(self, statements: Statements) -> None:
        self.statements = statements
        self.undone = False
        """Whether the session believes everything rolled back."""
        self.ended = False

    def run(self, method: Asked, sql: str, parameters: Any) -> Any:
        if self.ended:
            self.statements.refuse()
        if self.statements.on_loop:
            return await_only(self.statements.start(method, sql, parameters))
        return self.statements.wait(method, sql, parameters)

    def nest(self, sql: str) -> None:
        if not self.ended:  # SQLAlchemy tidies up; the unit of work has done so
            self.run("nest", sql, ())

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        return UnitCursor(self)

    def commit(self) -> None:
        not_yours("commit")

    def rollback(self) -> None:
        self.undone = True

    # --- as the pool's ---

    @property
    def dbapi_connection(self) -> Any:  # type: ignore[override]
        return self

    @property
    def driver_connection(self) -> NoReturn:  # type: ignore[override]
        raise TransactionMisused(
            "the driver's connection is the unit of work's; ctx.db.raw gives it to a handler, which then has its "
            "transaction for itself"
        )

    def close(self) -> None:
        pass  # it is the unit of work's

    def _close_special(self, transaction_reset: bool = False) -> None:
        self.close()

    def invalidate(self, e: BaseException | None = None, soft: bool = False) -> None:
        """A statement was interrupted."""
        self.undone = True


class UnitCursor:
    """As PEP 249 has it, as far as SQLAlchemy uses that."""

    arraysize = 1

    def __init__(self, connection: UnitConnection) -> None:
        self._connection = connection
        self._take(Answer([], None, -1))

    def _take(self, answer: Answer) -> None:
        self._rows = deque(answer.rows)
        _, self.description, self.rowcount, self.lastrowid = answer

    def execute(self, sql: str, parameters: Any = None) -> None:
        self._take(self._connection.run("ask", sql, parameters))

    def executemany(self, sql: str, rows: Sequence[Any]) -> None:
        self._take(self._connection.run("ask_many", sql, rows))

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._rows.popleft() if self._rows else None

    def fetchmany(self, size: int | None = None) -> list[tuple[Any, ...]]:
        return [self._rows.popleft() for _ in range(min(size or self.arraysize, len(self._rows)))]

    def fetchall(self) -> list[tuple[Any, ...]]:
        rows, self._rows = list(self._rows), deque()
        return rows

    def close(self) -> None:
        self._rows.clear()

    async def _async_soft_close(self) -> None:
        """SQLAlchemy's for drivers that are awaited: let go of the database, and keep the rows."""
