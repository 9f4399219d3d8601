"""`ctx.session`: SQLAlchemy as a handler sees it, inside the unit of work. The store makes the session; here is how its
statements reach the transaction: in the same turn, under the same rules as those of `ctx.db`."""

from __future__ import annotations

from collections.abc import Coroutine
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from faregate.core.database import wait_for
from faregate.errors import ConfigurationError
from faregate.ports.store import Asked, OpenSession, SessionStore, Store

if TYPE_CHECKING:
    from faregate.core.context import Context
    from faregate.core.work import Work


class TryStatements:
    """Those of one try."""

    __slots__ = ("_ctx", "_thread", "_work")

    def __init__(self, ctx: Context, work: Work, thread: int) -> None:
        self._ctx = ctx
        self._work = work
        self._thread = thread

    @property
    def on_loop(self) -> bool:
        return get_ident() == self._thread

    def start(self, method: Asked, sql: str, parameters: Any) -> Coroutine[Any, Any, Any]:
        return self._work.unit_for(self._ctx).run(self._work, self._ctx, method, sql, parameters)

    def refuse(self) -> NoReturn:
        self._ctx._refuse()

    def wait(self, method: Asked, sql: str, parameters: Any) -> Any:
        return wait_for(self._ctx, self._work, self.start, method, sql, parameters)


def open_session(ctx: Context, work: Work, store: Store, thread: int) -> OpenSession:
    """`thread` is that of the event loop."""
    if not isinstance(store, SessionStore):
        raise ConfigurationError(
            f"the store {store.url} of node {work.node!r} has no ctx.session: use ctx.db, or a store on SQLite or "
            "PostgreSQL"
        )
    return store.session(TryStatements(ctx, work, thread))
