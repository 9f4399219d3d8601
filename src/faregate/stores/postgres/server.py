"""Connecting to PostgreSQL: what a store and a token store of the same database have in common.

Rules kept here:
- Connections come from a pool and are in autocommit: a statement outside of a transaction is a commit of its own, and
  transactions send their BEGIN together with their first statement.
- A connection that broke never goes back to the pool. When one breaks, the idle ones are checked: after a restart of
  the server all of them are gone.
- A password is in no message: everything said about the server goes by `url`, which has none. A URL that the driver
  would misread is refused: its errors would quote part of a password as a host or a port.
"""

import re
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool

from faregate.errors import ConfigurationError, StoreUnavailable
from faregate.ports.cancellation import finish
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.schemes import hide_password
from faregate.stores.postgres.connection import PollingConnection, ReadyConnection
from faregate.stores.postgres.faults import is_lost, raise_translated
from faregate.stores.postgres.migrate import migrate
from faregate.stores.postgres.pipeline import exchange, ours, rows_of
from faregate.stores.postgres.rows import QUERIES, PostgresRecords
from faregate.stores.sql.opening import patiently

Connection = ReadyConnection
_HINT = "; check that the server runs and takes connections there, and the user, password and database in the URL"


class PostgresServer(PostgresRecords):
    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        pool_size: int = 10,
        wait_seconds: float = 30.0,
        tries: int = 5,
        delay: float = 1.0,
        blocking: bool = False,
    ) -> None:
        """`pool_size` connections at most; `wait_seconds` for a free one; `tries` at opening, first `delay` seconds
        apart. `blocking`: a statement may hold the event loop up for a moment (see `connection.py`)."""
        if pool_size < 1:
            raise ConfigurationError(f"pool_size must be 1 or more; got {pool_size}")
        self.url = hide_password(url)
        known = _parse(url)
        database = known.get("dbname") or known.get("user") or ""
        place = f"{known.get('host') or ''}:{known.get('port') or 5432}/{database}"
        self.database_id = f"postgresql://{place} {known.get('options') or ''}".rstrip()
        self._conninfo = url
        self._clock = clock or SystemClock()
        self._pool_size, self._wait_seconds = pool_size, wait_seconds
        self._tries, self._delay = tries, delay
        self._blocking = blocking
        self._pool: AsyncConnectionPool[Connection] | None = None

    # --- opening and closing ---

    async def open(self) -> None:
        if self._pool is None:
            await patiently(self._prepare, self.url, tries=self._tries, delay=self._delay, hint=_HINT)
            pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
                self._conninfo,
                connection_class=PollingConnection if self._blocking else ReadyConnection,
                min_size=1,
                max_size=self._pool_size,
                timeout=self._wait_seconds,
                kwargs={"autocommit": True, "prepare_threshold": None},
                open=False,
                name="faregate",
            )
            await pool.open()
            self._pool = pool

    async def _prepare(self) -> None:
        """Reach the server once, by a connection of its own, and bring our tables up to date."""
        try:
            connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True, connect_timeout=5)
        except psycopg.OperationalError as exc:
            raise StoreUnavailable(" ".join(str(exc).split())) from exc
        try:
            await migrate(connection, self.url, self._clock.time())
        except psycopg.Error as exc:
            raise_translated(exc, self.url, connection)
        finally:
            await connection.close()

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close()

    # --- connections ---

    @property
    def pool(self) -> "AsyncConnectionPool[Connection]":
        if self._pool is None:
            raise StoreUnavailable(f"{self.url} is not open: `await store.open()` comes first")
        return self._pool

    async def take(self) -> Connection:
        """A connection, to be given back with `give_back`; waits for a free one."""
        try:
            return await self.pool.getconn()
        except psycopg.Error as exc:
            raise_translated(exc, self.url, None)

    async def give_back(self, connection: Connection) -> None:
        if self._pool is None:
            await connection.close()
            return
        broken = connection.closed
        await self._pool.putconn(connection)
        if broken:
            await self._pool.check()

    async def _run(self, name: str, parameters: Any = (), *, changes: bool = False) -> list[tuple[Any, ...]]:
        """The rows of one statement, a transaction of its own; with `changes` a list as long as the rows it changed. A
        read is repeated once, on another connection, when its own was gone."""
        statement, again = ours(QUERIES[name], parameters), not changes
        while True:
            connection = await self.take()
            try:
                [answer] = await exchange(connection, [statement])
                return rows_of(connection, answer) if answer.nfields else [()] * (answer.command_tuples or 0)
            except psycopg.Error as exc:
                if not (again and is_lost(exc, connection)):
                    raise_translated(exc, self.url, connection, committing=changes)
            finally:
                await finish(self.give_back(connection))
            again = False

    async def _read(self, name: str, parameters: Any = ()) -> list[Any]:
        return await self._run(name, parameters)

    async def _change(self, name: str, parameters: Any) -> int:
        return len(await self._run(name, parameters, changes=True))


def _parse(url: str) -> dict[str, Any]:
    """What the driver makes of a URL. Raises `ConfigurationError`, without the driver's own words about it."""
    known: dict[str, Any] | None = None
    try:
        known = conninfo_to_dict(url)
    except psycopg.Error:
        pass  # its text may quote the password, so it is no cause of the error below
    authority, _, path = url.partition("//")[2].partition("/")
    is_misread = authority.count("@") > 1 or "@" in path.partition("?")[0]
    if known is None or is_misread or not re.fullmatch(r"[\d,]*", str(known.get("port") or "")):
        raise ConfigurationError(
            f"{hide_password(url)!r} is no PostgreSQL URL: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with "
            "%40 for @, %3A for :, %2F for / and %25 for % within a part"
        )
    return known
