"""One SQLite database as a process uses it: one connection that writes, one that reads, one lock.

Rules kept here:
- There is one writer per file, process and event loop, behind an asyncio lock: all stores of the same file share it. A
  second inline `BEGIN IMMEDIATE` would freeze the loop for the busy timeout. While another process writes, we ask again
  and again, with the loop free in between, and raise `StoreConflict` in the end.
- Statements run inline (10 µs); a commit with its fsync runs in a thread of its own, and whoever is cancelled there
  still waits for the outcome. No path leaves the lock held or a transaction open.
- The reader sees what is committed, also while a transaction is open: write-ahead log on a file. A database in memory
  has none, so there the reader holds its view open for as long as the writer writes, and the commit, inline, comes
  after the reader has let go. Nothing in memory runs in a thread: it is deterministic.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from faregate.errors import ConfigurationError, StoreConflict, StoreUnavailable
from faregate.ports.cancellation import finish
from faregate.stores.sqlite.faults import code_of, is_conflict, raise_commit_error, raise_translated

T = TypeVar("T")
_PAUSES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
_open: dict[tuple[str, asyncio.AbstractEventLoop], "SqliteDatabase"] = {}


class SqliteDatabase:
    """Use `connect` to get one, and `disconnect` when done: it is shared."""

    writer: sqlite3.Connection
    reader: sqlite3.Connection
    opening: asyncio.Future[None]
    users = 0
    retired = False
    """Whether the writing connection is replaced when the transaction at hand ends."""

    def __init__(self, url: str, target: str, *, in_memory: bool, busy_seconds: float) -> None:
        self.url = url
        self.busy_seconds = busy_seconds
        self._target = target
        self._in_memory = in_memory
        self._lock = asyncio.Lock()
        self._thread = None if in_memory else ThreadPoolExecutor(1, "faregate-sqlite")

    # --- opening and closing ---

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._target, timeout=0, isolation_level=None, check_same_thread=False, cached_statements=512, uri=True
        )
        connection.execute("pragma foreign_keys = on")
        if self._in_memory:
            # A cache that spills would ask for the lock that the reader's open view refuses.
            connection.execute("pragma cache_spill = off")
        else:
            connection.execute("pragma synchronous = full")
        return connection

    def _open(self) -> None:
        self.writer = self._connect()
        # While another process writes, setting it is refused even when nothing would change.
        if not self._in_memory and self.writer.execute("pragma journal_mode").fetchone()[0] != "wal":
            self.writer.execute("pragma journal_mode = wal")
        self.reader = self._connect()
        self.reader.execute("pragma query_only = on")

    async def open(self) -> None:
        try:
            await self.retry(self._open)
        except sqlite3.DatabaseError as exc:
            if code_of(exc) == sqlite3.SQLITE_NOTADB:
                raise ConfigurationError(f"{self.url} is a file, but not a SQLite database: name another path") from exc
            if code_of(exc) == sqlite3.SQLITE_READONLY:
                raise ConfigurationError(f"{self.url} may only be read: give this user the right to write") from exc
            raise_translated(exc, self.url)

    def close(self) -> None:
        for name in ("reader", "writer"):
            connection = self.__dict__.pop(name, None)
            if connection is not None:
                connection.close()
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    @property
    def is_closed(self) -> bool:
        """Whether somebody closed the writing connection, through `ctx.db.raw`."""
        try:
            return self.writer.total_changes < 0
        except sqlite3.ProgrammingError:
            return True

    # --- reading ---

    async def read(self, sql: str, parameters: Any = ()) -> list[Any]:
        """The rows of a query on what is committed."""
        try:
            return self.reader.execute(sql, parameters).fetchall()
        except sqlite3.Error as exc:
            if not is_conflict(exc):
                raise_translated(exc, self.url)
        return await self.retry(lambda: self.reader.execute(sql, parameters).fetchall())

    async def retry(self, work: Callable[[], T]) -> T:
        """Try it until no other process is in the way; the loop is free between two tries."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.busy_seconds
        tries = 0
        while True:
            try:
                return work()
            except sqlite3.Error as exc:
                if not is_conflict(exc):
                    raise
                if loop.time() >= deadline:
                    raise StoreConflict(
                        f"{self.url} was locked by another process for {self.busy_seconds:g} s; a retry may work"
                    ) from exc
            await asyncio.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1

    # --- writing: `begin`, then statements on `writer`, then `commit` or `roll_back` by the same task ---

    async def begin(self) -> None:
        await self._lock.acquire()
        try:
            try:
                self._begin()
            except sqlite3.Error as exc:
                if not is_conflict(exc):
                    raise_translated(exc, self.url)
                await self.retry(self._begin)
        except BaseException:
            self._let_reader_go()
            self._lock.release()
            raise

    def _begin(self) -> None:
        if self._in_memory and not self.reader.in_transaction:
            self.reader.execute("begin")
            self.reader.execute("pragma schema_version").fetchone()
        self.writer.execute("begin immediate")

    async def commit(self) -> None:
        """Commit and give the lock back, whatever happens; after an error nothing is left open."""
        try:
            if self._thread is None:
                self._let_reader_go()
                self.writer.execute("commit")
            else:
                # We may be cancelled: the commit goes on, and the lock is given back when it is over.
                loop = asyncio.get_running_loop()
                await finish(loop.run_in_executor(self._thread, self.writer.execute, "commit"))
        except sqlite3.Error as exc:
            raise_commit_error(exc, self.url)
        finally:
            self.roll_back()

    def roll_back(self) -> None:
        """Undo what is open, if anything is, and give the lock back."""
        try:
            if self.retired and not self.is_closed:
                self.writer.close()
            if self.is_closed:
                self.writer = self._connect()
            elif self.writer.in_transaction:
                self.writer.execute("rollback")
        except sqlite3.Error:
            self.writer.close()
            self.writer = self._connect()
        finally:
            self.retired = False
            self._let_reader_go()
            self._lock.release()

    def _let_reader_go(self) -> None:
        if self._in_memory and self.reader.in_transaction:
            self.reader.execute("commit")

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do some work in a transaction of its own."""
        await self.begin()
        try:
            result = work(self.writer)
        except BaseException as exc:
            self.roll_back()
            if isinstance(exc, sqlite3.Error):
                raise_translated(exc, self.url)
            raise
        await self.commit()
        return result


def execute_all(connection: sqlite3.Connection, script: str) -> None:
    """Run the statements of a script one by one, in the transaction that is open."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""
    if statement:
        connection.execute(statement)  # a string or a comment is left open: the database says so


async def connect(url: str, database_id: str, path: Path | None, *, busy_seconds: float) -> SqliteDatabase:
    """The database of this process and loop; its file is made if it is missing. `path` is None for one in memory."""
    key = (database_id, asyncio.get_running_loop())
    database = _open.get(key)
    if database is None:
        if path is None:
            target = f"file:/{quote(database_id, safe='')}?vfs=memdb"
        else:
            create_file(url, path)
            target = f"file:{quote(str(path))}"
        database = _open[key] = SqliteDatabase(url, target, in_memory=path is None, busy_seconds=busy_seconds)
        database.opening = asyncio.ensure_future(database.open())
    database.users += 1
    try:
        await asyncio.shield(database.opening)
    except BaseException:
        disconnect(database)
        raise
    return database


def disconnect(database: SqliteDatabase) -> None:
    """Done with it; the last user closes it."""
    database.users -= 1
    if database.users == 0:
        for key, known in list(_open.items()):
            if known is database:
                del _open[key]
        database.opening.cancel()
        database.close()


def create_file(url: str, path: Path) -> None:
    """An empty file that only its owner may read, before SQLite would make one that others may read too."""
    if not path.parent.is_dir():
        raise ConfigurationError(f"{url}: there is no folder {str(path.parent)!r}; make it first, or name another path")
    if path.is_dir():
        raise ConfigurationError(f"{url} is a folder; name a file in it, for example sqlite:{path}/faregate.db")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        pass
    except OSError as exc:
        raise StoreUnavailable(f"{url} cannot be created: {exc.strerror}; look at the rights on its folder") from exc
