"""The boundary: `fg.outbox(connection)` publishes within a transaction of the user's own, for example a web request's.

    with connection:                                    # sqlite3, psycopg, or SQLAlchemy on one of them
        connection.execute("insert into orders …")
        fg.outbox(connection, node="shop").publish(OrderPlaced(…), idempotency_key=key)

Rules kept here:
- One row in the outbox of the node's store, on the user's connection. Nothing is begun, committed or rolled back here:
  who commits the order commits its event. On a connection in autocommit the row is committed by itself.
- The id is the one that `bus.publish` gives. A repetition with the same key is a row of its own; the broker and the
  recipients' ledgers recognise it. (Leaving it out here would lose it when the first one is rolled back.)
- No driver is imported: a connection is known by the module and the name of its class.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Sequence
from time import time
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, Unpack, overload

from faregate.bus.bus import MAX_MESSAGE_BYTES
from faregate.codec import BodyWriter, Codec, find_codec
from faregate.core.observer import Observer, Observers, check_observers
from faregate.core.sealing import Sealer
from faregate.errors import ConfigurationError
from faregate.node.node import Node
from faregate.node.outgoing import Options, Outgoing, as_command, as_event, node_name
from faregate.node.sources import did_you_mean
from faregate.ports.schemes import open_insertion
from faregate.ports.store import FROM_OUTSIDE

R = TypeVar("R")

_KNOWN = "a connection of sqlite3, aiosqlite or psycopg 3, or SQLAlchemy's Connection or Session on one of these"


class ConnectionKind(NamedTuple):
    """What we know of a class of connections."""

    scheme: str | None
    """The store that it leads to; None where its dialect tells (SQLAlchemy)."""
    is_async: bool = False
    has_session: bool = False
    """Whether it is a session, which has its connection behind `connection()`."""


_KINDS = {
    ("sqlite3", "Connection"): ConnectionKind("sqlite"),
    ("aiosqlite", "Connection"): ConnectionKind("sqlite", is_async=True),
    ("psycopg", "Connection"): ConnectionKind("postgresql"),
    ("psycopg", "AsyncConnection"): ConnectionKind("postgresql", is_async=True),
    ("sqlalchemy", "Connection"): ConnectionKind(None),
    ("sqlalchemy", "Session"): ConnectionKind(None, has_session=True),
    ("sqlalchemy", "scoped_session"): ConnectionKind(None, has_session=True),
    ("sqlalchemy", "AsyncConnection"): ConnectionKind(None, is_async=True),
    ("sqlalchemy", "AsyncSession"): ConnectionKind(None, is_async=True, has_session=True),
    ("sqlalchemy", "async_scoped_session"): ConnectionKind(None, is_async=True, has_session=True),
}
_DIALECTS = {"pysqlite": "sqlite", "aiosqlite": "sqlite", "psycopg": "postgresql", "psycopg_async": "postgresql"}
"""SQLAlchemy's drivers, and the stores whose statements they can run."""


class AsyncConnection(Protocol):
    """What is awaited: aiosqlite, psycopg's and SQLAlchemy's asyncio connections."""

    def execute(self, *args: Any, **kwargs: Any) -> Awaitable[Any]: ...


@overload
def outbox(
    connection: AsyncConnection,
    node: str | Node | None = None,
    *,
    codec: str | Codec = "json",
    observe: Observer | Observers | None = None,
) -> "AsyncOutbox": ...
@overload
def outbox(
    connection: Any,
    node: str | Node | None = None,
    *,
    codec: str | Codec = "json",
    observe: Observer | Observers | None = None,
) -> "Outbox": ...
def outbox(
    connection: Any,
    node: str | Node | None = None,
    *,
    codec: str | Codec = "json",
    observe: Observer | Observers | None = None,
) -> "Outbox | AsyncOutbox":
    """Publish within the transaction that is open on a connection to the database of `node`'s store. `codec` is what
    messages are written with, `observe` who traces them, as for a bus.

    Raises `ConfigurationError` for what is no connection that it knows, and, when publishing, for a database without
    Faregate's tables.
    """
    kind, writer = _kind(connection), BodyWriter(find_codec(codec), limit=MAX_MESSAGE_BYTES)
    cls = AsyncOutbox if kind.is_async else Outbox
    return cls(connection, kind, node, writer, check_observers(observe))


class _OutboxWriter(ABC, Generic[R]):
    """`R` is what publishing returns: the publication's id, or an awaitable of it."""

    def __init__(
        self,
        connection: Any,
        kind: ConnectionKind,
        node: str | Node | None,
        writer: BodyWriter,
        observers: Observers = (),
    ) -> None:
        self._observers = observers
        self._connection = connection
        self._kind = kind
        self._node = None if node is None else node_name(node)
        self._writer = writer

    def publish(self, event: Any, *, node: str | Node | None = None, **options: Unpack[Options]) -> R:
        """Record an event in the open transaction; returns its publication id. It is sent after the commit."""
        return self._put(as_event(event, options), node)

    def send(
        self,
        command: Any,
        *,
        to: str | Node | None = None,
        node: str | Node | None = None,
        **options: Unpack[Options],
    ) -> R:
        """Record a command in the same way. One that nobody handles becomes a dead letter when it is sent."""
        return self._put(as_command(command, to, options), node)

    @abstractmethod
    def _put(self, out: Outgoing, node: str | Node | None) -> R: ...

    def _name(self, node: str | Node | None) -> str:
        name = self._node if node is None else node_name(node)
        if name is None:
            raise ConfigurationError("say which node publishes: fg.outbox(connection, node='shop')")
        return name

    def _insertion(self, out: Outgoing, node: str | Node | None, scheme: str) -> tuple[str, str, tuple[Any, ...]]:
        """The publication's id, the statement, its parameters."""
        name = self._name(node)
        sealer = Sealer(name, self._writer, {})
        envelope = sealer.seal_root(out, time())
        for observer in self._observers:
            observer.stamp(envelope)
        row = sealer.outbox_row(envelope, None, FROM_OUTSIDE)
        return envelope.publication_id, *open_insertion(scheme).insertion(row)


class Outbox(_OutboxWriter[str]):
    """Made by `fg.outbox` for a blocking connection."""

    def _put(self, out: Outgoing, node: str | Node | None) -> str:
        connection = self._connection.connection() if self._kind.has_session else self._connection
        scheme = self._kind.scheme or _scheme(connection)
        publication_id, sql, values = self._insertion(out, node, scheme)
        execute = _execute(connection, self._kind)
        try:
            if not execute(sql, values).rowcount:
                _check_known(self._name(node), execute(open_insertion(scheme).known_nodes()).fetchall())
        except Exception as exc:
            _raise_if_no_store(exc, scheme)
            raise
        return publication_id


class AsyncOutbox(_OutboxWriter[Coroutine[Any, Any, str]]):
    """Made by `fg.outbox` for a connection that is awaited."""

    async def _put(self, out: Outgoing, node: str | Node | None) -> str:
        connection = await self._connection.connection() if self._kind.has_session else self._connection
        scheme = self._kind.scheme or _scheme(connection)
        publication_id, sql, values = self._insertion(out, node, scheme)
        execute = _execute(connection, self._kind)
        try:
            if not (await execute(sql, values)).rowcount:
                found = (await execute(open_insertion(scheme).known_nodes())).fetchall()
                _check_known(self._name(node), found if isinstance(found, list) else await found)
        except Exception as exc:
            _raise_if_no_store(exc, scheme)
            raise
        return publication_id


def _execute(connection: Any, kind: ConnectionKind) -> Any:
    """SQLAlchemy begins its transaction with the first statement that goes through it, so ours has to."""
    return connection.exec_driver_sql if kind.scheme is None else connection.execute


def _kind(connection: Any) -> ConnectionKind:
    for cls in type(connection).__mro__:
        kind = _KINDS.get((cls.__module__.partition(".")[0], cls.__name__))
        if kind is not None:
            return kind
    found = f"{type(connection).__module__}.{type(connection).__qualname__}"
    raise ConfigurationError(f"fg.outbox takes an open connection: {_KNOWN}; got {connection!r} ({found})")


def _scheme(connection: Any) -> str:
    dialect = connection.dialect
    scheme = _DIALECTS.get(dialect.driver)
    if scheme is None:
        raise ConfigurationError(
            f"fg.outbox cannot use SQLAlchemy's {dialect.name}+{dialect.driver}: it takes {_KNOWN}, "
            "for example create_engine('postgresql+psycopg://…')"
        )
    return scheme


def _check_known(name: str, rows: Sequence[Sequence[Any]]) -> None:
    """Nothing was inserted. That is right for what is scheduled already."""
    known = [row[0] for row in rows]
    if name not in known:
        raise ConfigurationError(
            f"no bus has run node {name!r} on this store, so nobody would send what it publishes; its nodes are: "
            f"{', '.join(known)}{did_you_mean(name, known)}. Start a bus that runs the node there, or name it to the "
            "store with `faregate store init module:bus`"
        )


def _raise_if_no_store(exc: Exception, scheme: str) -> None:
    """Raise `ConfigurationError` for a database without our tables."""
    if open_insertion(scheme).lacks_tables(getattr(exc, "orig", None) or exc):
        url = "sqlite:PATH" if scheme == "sqlite" else "postgresql://…"
        raise ConfigurationError(
            "this database is not a store of Faregate yet, or one of an older version: run "
            f"`faregate store init module:bus`, or `faregate store init {url}`, or start a bus that has it as a store="
        ) from exc
