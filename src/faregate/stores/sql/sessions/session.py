"""One session for each try of a message, over one engine for each store.

Rules kept here:
- The engine, its dialect and its cache of compiled statements are made once. A session costs a few objects, and a
  handler that does not ask for one pays nothing.
- What depends on the database's version is asked at the first statement, within the unit of work.
- There is one session behind `Session` and `AsyncSession`, so a `def` handler and an `async def` interpreter of the
  same message see the same objects.
- A session ends with its try, without a word to the database.
"""

from typing import Any, NoReturn, cast

import greenlet  # type: ignore[import-untyped]  # noqa: F401  (SQLAlchemy looks for it only when it awaits)
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.exc import IllegalStateChangeError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from faregate.errors import TransactionMisused
from faregate.ports.store import Statements
from faregate.stores.sql.sessions.connection import UnitConnection, not_yours
from faregate.stores.sql.sessions.dialect import UnitDialect

_WENT_ON = (
    "a statement or a flush of ctx.session failed, SQLAlchemy has rolled back all that the session did, and the "
    "handler went on: half of it would be committed. Let the error be the handler's, or put what may fail into "
    "ctx.session.begin_nested(), which rolls back that part alone"
)


class Sessions:
    """Of one store."""

    def __init__(self, dialect: UnitDialect) -> None:
        url = URL.create(f"{dialect.name}+{dialect.driver}")
        self._engine = Engine(NullPool(_no_connection, dialect=dialect), dialect, url)
        self._is_initialized = False

    def open(self, statements: Statements) -> "OneSession":
        return OneSession(_UnitEngine(self, self._engine, UnitConnection(statements)))

    def initialize(self, statements: Statements) -> None:
        """Learn what the database can do. Two at once learn the same."""
        if not self._is_initialized:
            with Connection(self._engine, UnitConnection(statements)) as connection:
                self._engine.dialect.initialize(connection)
            self._is_initialized = True


def _no_connection() -> NoReturn:
    raise TransactionMisused("this engine has no connections of its own: use ctx.session while the handler runs")


class _UnitEngine(OptionEngine):
    """The store's engine with the connection of one try."""

    def __init__(self, sessions: Sessions, proxied: Engine, unit: UnitConnection) -> None:
        super().__init__(proxied, {})
        self._sessions = sessions
        self.unit = unit

    def raw_connection(self) -> UnitConnection:
        self._sessions.initialize(self.unit.statements)
        return self.unit


class OneSession:
    """See `faregate.ports.store.OpenSession`."""

    def __init__(self, engine: _UnitEngine) -> None:
        self._unit = engine.unit
        self.blocking = HandlerSession(engine)
        self._awaited: HandlerAsyncSession | None = None

    @property
    def awaited(self) -> "HandlerAsyncSession":
        if self._awaited is None:
            self._awaited = HandlerAsyncSession(self.blocking)
        return self._awaited

    async def flush(self) -> None:
        if not self._unit.undone:
            await self.awaited.flush()
        if self._unit.undone:
            raise TransactionMisused(_WENT_ON)

    def end(self) -> None:
        self._unit.ended = True
        try:
            Session.close(self.blocking)
        except IllegalStateChangeError:
            pass  # a task that the handler left behind is at a statement: that one finds that the try has ended


class HandlerSession(Session):
    """`ctx.session` in a `def` handler."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, expire_on_commit=False)

    def commit(self) -> NoReturn:
        not_yours("commit")

    def rollback(self) -> NoReturn:
        not_yours("roll back")

    def close(self) -> NoReturn:
        not_yours("close")

    reset = invalidate = close

    def __enter__(self) -> NoReturn:
        not_yours("close")


class HandlerAsyncSession(AsyncSession):
    """`ctx.session` in an `async def` handler: the same session, awaited."""

    def __init__(self, session: HandlerSession) -> None:
        super().__init__(sync_session_class=cast(Any, lambda **_: session))

    async def __aenter__(self) -> NoReturn:
        not_yours("close")
