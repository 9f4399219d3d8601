"""`ctx.db`: the node's database as a handler sees it, inside the unit of work.

Rules kept here:
- The transaction opens at the first statement, so a handler that waits for something else first holds no lock.
- The handler cannot end it: its writes, the ledger and the outbox are one commit, and that is not its own.
- What is asked for is awaited: a statement that the handler forgot fails its message (`Work.check_awaited`).
- What is only written needs no answer (`write`): it waits until something could tell the difference. Its parameters
  are the handler's own again at once.
- With the try that it was made for it ends: what a handler left behind finds `TryEnded`, and writes nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from copy import deepcopy
from datetime import date, datetime
from decimal import Decimal
from types import NoneType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from uuid import UUID

from faregate.core.forks import end_if_forked
from faregate.core.work import Write
from faregate.errors import TransactionMisused

if TYPE_CHECKING:
    from faregate.core.context import Context
    from faregate.core.work import Work

T = TypeVar("T")
Row = tuple[Any, ...]
_UNCHANGING = frozenset({str, int, float, bool, bytes, NoneType, UUID, Decimal, date, datetime})


def _not_yours(what: str) -> NoReturn:
    raise TransactionMisused(
        f"a handler must not {what} the transaction: its writes, the ledger row and the outgoing messages are "
        "committed together, by Faregate, when the handler has succeeded. Raise an exception to have them rolled back"
    )


def _taken_over(sql: str, parameters: Sequence[Any]) -> Write:
    """The statement as it is now, whatever becomes of its parameters; said two calls from here."""
    caller = sys._getframe(2)
    own = [each if type(each) in _UNCHANGING else _copy(each) for each in parameters]
    return Write(sql, tuple(own), caller.f_code.co_filename, caller.f_lineno)


def _copy(parameter: Any) -> Any:
    return bytes(parameter) if isinstance(parameter, memoryview) else deepcopy(parameter)


def wait_for(ctx: Context, work: Work, start: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """In a thread: have the event loop run it, and wait."""
    unit = work.unit
    if ctx._ended or unit is None:
        ctx._refuse()
    end_if_forked(unit.home.generation)  # a forked child has no running loop, and looks like a thread
    return asyncio.run_coroutine_threadsafe(start(*args), unit.home.loop).result()


class Database:
    """For `async def` handlers. `?` stands for a parameter on every store, `??` for a question mark."""

    __slots__ = ("_ctx", "_work")

    def __init__(self, ctx: Context, work: Work) -> None:
        self._ctx = ctx
        self._work = work

    # Not `async def`: they hand on the coroutine of the unit of work, and have none of their own.

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Coroutine[Any, Any, int]:
        """Run a statement; how many rows it changed."""
        return self._work.ask(self._ctx, "execute", sql, parameters)

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> Coroutine[Any, Any, int]:
        """Run a statement once for each row of parameters; how many rows it changed in all."""
        return self._work.ask(self._ctx, "executemany", sql, rows)

    def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> Coroutine[Any, Any, Row | None]:
        """The first row of the result, or None."""
        return self._work.ask(self._ctx, "fetchone", sql, parameters)

    def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> Coroutine[Any, Any, list[Row]]:
        """All rows, as a list of tuples."""
        return self._work.ask(self._ctx, "fetchall", sql, parameters)

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement whose result nobody needs; not awaited. Many of them go out together."""
        if self._work.write(self._ctx, _taken_over(sql, parameters)):
            self._work.send_soon(self._ctx)

    @property
    def raw(self) -> Any:
        """The driver's connection: `sqlite3.Connection` or `psycopg.AsyncConnection`. A message whose handler asks for
        it has its transaction for itself."""
        return self._work.raw(self._ctx)

    def commit(self) -> NoReturn:
        _not_yours("commit")

    def rollback(self) -> NoReturn:
        _not_yours("roll back")

    def close(self) -> NoReturn:
        _not_yours("close")


class BlockingDatabase:
    """For `def` handlers, which run in a thread: the same, called plainly."""

    __slots__ = ("_ctx", "_database", "_work")

    def __init__(self, ctx: Context, work: Work) -> None:
        self._ctx = ctx
        self._work = work
        self._database = Database(ctx, work)

    def _wait(self, start: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        return wait_for(self._ctx, self._work, start, *args)

    def _run(self, statement: str, sql: str, parameters: Any) -> Coroutine[Any, Any, Any]:
        return self._work.unit_for(self._ctx).run(self._work, self._ctx, statement, sql, parameters)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement; how many rows it changed."""
        found: int = self._wait(self._run, "execute", sql, parameters)
        return found

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """Run a statement once for each row of parameters; how many rows it changed in all."""
        found: int = self._wait(self._run, "executemany", sql, rows)
        return found

    def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """The first row of the result, or None."""
        found: Row | None = self._wait(self._run, "fetchone", sql, parameters)
        return found

    def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """All rows, as a list of tuples."""
        found: list[Row] = self._wait(self._run, "fetchall", sql, parameters)
        return found

    def write(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        if self._work.write(self._ctx, _taken_over(sql, parameters)):
            self._wait(self._work.enter, self._ctx)

    @property
    def raw(self) -> Any:
        self._wait(self._work.enter, self._ctx)
        return self._database.raw

    def commit(self) -> NoReturn:
        _not_yours("commit")

    def rollback(self) -> NoReturn:
        _not_yours("roll back")

    def close(self) -> NoReturn:
        _not_yours("close")
