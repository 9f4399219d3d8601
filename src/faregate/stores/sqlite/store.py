"""A SQLite file, or a database in memory, as a node's store.

    SqliteStore("sqlite:./shop.db", busy_seconds=30)

Reads come from the reading connection and so see what is committed; each change outside of a transaction is a commit of
its own. See `database.py` for connections, locks and threads.
"""

import json
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from faregate.errors import ConfigurationError
from faregate.ports.store import OutboxRow
from faregate.stores.sql.columns import outbox_row
from faregate.stores.sql.records import SqlStore
from faregate.stores.sql.statements import check_statement
from faregate.stores.sqlite import insertion
from faregate.stores.sqlite.database import execute_all
from faregate.stores.sqlite.file import InMemory, SqliteFile
from faregate.stores.sqlite.reading import SqliteReader
from faregate.stores.sqlite.rows import QUERIES
from faregate.stores.sqlite.transaction import SqliteTransaction

if TYPE_CHECKING:
    from faregate.stores.sql.sessions import UnitDialect


class SqliteStore(SqliteFile, SqlStore):
    """`sqlite:PATH`. One transaction at a time runs on it: handlers with effects in this store follow each other."""

    dear_savepoints, one_writer = False, True
    insertion = insertion

    def reader(self) -> SqliteReader:
        if self._place.path is None:
            raise ConfigurationError("a memory: store ends with the process of its bus: there is nothing to read here")
        return SqliteReader(self.url, self._place.path)

    def transaction(self) -> SqliteTransaction:
        return SqliteTransaction(self._database, self._clock)

    @staticmethod
    def _unit_dialect() -> "UnitDialect":
        from faregate.stores.sqlite.dialect import unit_dialect

        return unit_dialect()

    async def apply_schema(self, sql: str) -> None:
        check_statement(sql)
        try:
            await self._write(lambda connection: execute_all(connection, sql))
        except (sqlite3.Error, sqlite3.Warning) as exc:
            raise ConfigurationError(f"the schema for {self.url} was refused and nothing of it applied: {exc}") from exc

    def _now(self) -> dict[str, float]:
        return {"now": self._clock.time()}

    async def _answer(self, name: str, parameters: Any) -> list[Any]:
        return await self._write(lambda connection: connection.execute(QUERIES[name], parameters).fetchall())

    async def undispatched(self, limit: int, nodes: Sequence[str] | None = None) -> list[OutboxRow]:
        given = None if nodes is None else json.dumps(list(nodes))
        values = {"nodes": given, "limit": limit}
        return [outbox_row(row, self.id_out) for row in await self._read("undispatched", values)]

    async def evict(self, node: str, before: float, limit: int) -> int:
        values = {"node": node, "before": before, "limit": limit}

        def work(connection: sqlite3.Connection) -> int:
            gone = connection.execute(QUERIES["evict"], values).rowcount
            keys_gone = connection.execute(QUERIES["evict_business_keys"], values).rowcount
            connection.execute(QUERIES["evict_cancelled"], (node, before))
            if gone or keys_gone:
                connection.execute(QUERIES["raise_floor"], (node, before))
            return gone

        return await self._write(work)

    async def keep_dispatched(self, seqs: Sequence[int], at: float) -> None:
        values = [(at, seq) for seq in seqs]
        await self._write(lambda connection: connection.executemany(QUERIES["keep_dispatched"], values))


class MemoryStore(InMemory, SqliteStore):
    """`memory:`: gone with the process, and deterministic."""
