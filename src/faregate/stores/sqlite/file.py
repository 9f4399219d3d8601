"""Opening and closing: what a store and a token store of the same SQLite file, or name in memory, have in common."""

import itertools
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from faregate.errors import ConfigurationError, StoreUnavailable
from faregate.ports.clock import Clock, SystemClock
from faregate.stores.sql.opening import patiently
from faregate.stores.sqlite.database import SqliteDatabase, connect, disconnect
from faregate.stores.sqlite.migrate import migrate
from faregate.stores.sqlite.rows import QUERIES, SqliteRecords

T = TypeVar("T")
_numbers = itertools.count(1)


class Place(NamedTuple):
    url: str
    database_id: str
    path: Path | None
    """None for a database in memory."""


class SqliteFile(SqliteRecords):
    def __init__(
        self, path: str, *, clock: Clock | None = None, busy_seconds: float = 5.0, tries: int = 5, delay: float = 1.0
    ) -> None:
        """`path` is a path or the URL. `busy_seconds`: how long another process may hold the file; `tries` at opening
        it, `delay` seconds apart."""
        self._clock = clock or SystemClock()
        self._busy_seconds = busy_seconds
        self._tries, self._delay = tries, delay
        self._place = self._locate(path.removeprefix("sqlite:"))
        self._opened: SqliteDatabase | None = None

    def _locate(self, path: str) -> Place:
        if not path or path.startswith(("//", ":memory:")):
            raise ConfigurationError(
                f"'sqlite:{path}' names no file: write sqlite:PATH, for example sqlite:./shop.db or sqlite:/data/a.db; "
                "a database in memory is memory:. (SQLAlchemy writes three slashes, Faregate none)"
            )
        return Place(f"sqlite:{path}", f"sqlite:{os.path.realpath(path)}", Path(path).absolute())

    @property
    def url(self) -> str:
        return self._place.url

    @property
    def database_id(self) -> str:
        return self._place.database_id

    async def open(self) -> None:
        if self._opened is not None:
            return
        database = await patiently(self._connect, self.url, tries=self._tries, delay=self._delay)
        try:
            await migrate(database, self._clock.time())
        except BaseException:
            disconnect(database)
            raise
        self._opened = database

    async def _connect(self) -> SqliteDatabase:
        return await connect(*self._place, busy_seconds=self._busy_seconds)

    async def close(self) -> None:
        if self._opened is not None:
            database, self._opened = self._opened, None
            disconnect(database)

    @property
    def _database(self) -> SqliteDatabase:
        if self._opened is None:
            raise StoreUnavailable(f"{self.url} is not open: `await store.open()` comes first")
        return self._opened

    async def _rows(self, sql: str, parameters: Any = ()) -> list[Any]:
        return await self._database.read(sql, parameters)

    async def _change(self, name: str, parameters: Any) -> int:
        return await self._database.write(lambda connection: connection.execute(QUERIES[name], parameters).rowcount)

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._database.write(work)


class InMemory(SqliteFile):
    """`memory:` is a database of its own, `memory:NAME` one that all who say that name in this process share."""

    def __init__(self, name: str = "", *, clock: Clock | None = None) -> None:
        super().__init__(name.removeprefix("memory:"), clock=clock)

    def _locate(self, path: str) -> Place:
        # A blank cannot be in a name that came from a URL, so a numbered one is nobody else's.
        return Place(f"memory:{path}", f"memory:{path or f' {next(_numbers)}'}", None)
