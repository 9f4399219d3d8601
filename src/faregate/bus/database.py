"""`ctx.db`: the node's database as a handler sees it, inside the unit of work.

Rules kept here:
- The transaction opens at the first statement, so a handler that waits for something else first holds no lock.
- The handler cannot end it: its writes, the ledger and the outbox are one commit, and that is not its own.
- After the handler's end there is no database any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from faregate.errors import TransactionMisused

if TYPE_CHECKING:
    from faregate.bus.work import Work

T = TypeVar("T")
Row = tuple[Any, ...]


def _not_yours(what: str) -> NoReturn:
    raise TransactionMisused(
        f"a handler must not {what} the transaction: its writes, the ledger row and the outgoing messages are "
        "committed together, by Faregate, when the handler has succeeded. Raise an exception to have them rolled back"
    )


class Database:
    """For `async def` handlers. `?` stands for a parameter on every store, `??` for a question mark."""

    __slots__ = ("_work",)

    def __init__(self, work: Work) -> None:
        self._work = work

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it changed."""
        return await (await self._work.transaction()).execute(sql, parameters)

    async def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """Run a statement once for each row of parameters; how many rows it changed in all."""
        return await (await self._work.transaction()).executemany(sql, rows)

    async def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """The first row of the result, or None."""
        return await (await self._work.transaction()).fetchone(sql, parameters)

    async def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return await (await self._work.transaction()).fetchall(sql, parameters)

    @property
    def raw(self) -> Any:
        """The driver's connection: `sqlite3.Connection` or `psycopg.AsyncConnection`."""
        return self._work.opened_transaction().raw

    def commit(self) -> NoReturn:
        _not_yours("commit")

    def rollback(self) -> NoReturn:
        _not_yours("roll back")

    def close(self) -> NoReturn:
        _not_yours("close")


class BlockingDatabase:
    """For `def` handlers, which run in a thread: the same, called plainly."""

    __slots__ = ("_database", "_loop", "_work")

    def __init__(self, work: Work, loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._database = Database(work)
        self._loop = loop

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        return self._wait(self._database.execute(sql, parameters))

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        return self._wait(self._database.executemany(sql, rows))

    def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        return self._wait(self._database.fetchone(sql, parameters))

    def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        return self._wait(self._database.fetchall(sql, parameters))

    @property
    def raw(self) -> Any:
        return self._wait(self._work.transaction()).raw

    def commit(self) -> NoReturn:
        _not_yours("commit")

    def rollback(self) -> NoReturn:
        _not_yours("roll back")

    def close(self) -> NoReturn:
        _not_yours("close")
