"""A PostgreSQL database as a node's store.

    PostgresStore("postgresql://shop:secret@db.example/shop", pool_size=30)

Reads take a connection for one statement and see what is committed; each change outside of a transaction is one
statement, and so a commit of its own. See `server.py` for connections, `transaction.py` for round trips.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psycopg

from faregate.errors import ConfigurationError
from faregate.ports.cancellation import finish
from faregate.ports.store import OutboxRow
from faregate.stores.postgres import insertion
from faregate.stores.postgres.faults import is_lost, raise_translated
from faregate.stores.postgres.reading import PostgresReader
from faregate.stores.postgres.rows import QUERIES
from faregate.stores.postgres.server import PostgresServer
from faregate.stores.postgres.transaction import PostgresTransaction
from faregate.stores.sql.columns import outbox_row
from faregate.stores.sql.records import SqlStore
from faregate.stores.sql.statements import check_statement

if TYPE_CHECKING:
    from faregate.stores.sql.sessions import UnitDialect


class PostgresStore(PostgresServer, SqlStore):
    dear_savepoints, one_writer = True, False
    may_block = True
    insertion = insertion

    def reader(self) -> PostgresReader:
        return PostgresReader(self.url, self._conninfo)

    def transaction(self) -> PostgresTransaction:
        return PostgresTransaction(self)

    @staticmethod
    def _unit_dialect() -> "UnitDialect":
        from faregate.stores.postgres.dialect import unit_dialect

        return unit_dialect()

    async def apply_schema(self, sql: str) -> None:
        check_statement(sql)
        connection = await self.take()
        try:
            await connection.execute(QUERIES["lock_schema"])
            try:
                async with connection.transaction():
                    await connection.execute(sql)
            finally:
                if not connection.closed:
                    await connection.execute(QUERIES["unlock_schema"])
        except psycopg.Error as exc:
            if is_lost(exc, connection):
                raise_translated(exc, self.url, connection)
            raise ConfigurationError(f"the schema for {self.url} was refused and nothing of it applied: {exc}") from exc
        finally:
            await finish(self.give_back(connection))

    async def _answer(self, name: str, parameters: Any) -> list[Any]:
        return await self._run(name, parameters, changes=True)

    async def undispatched(self, limit: int, nodes: Sequence[str] | None = None) -> list[OutboxRow]:
        values = {"nodes": None if nodes is None else list(nodes), "limit": limit}
        return [outbox_row(row, self.id_out) for row in await self._read("undispatched", values)]

    async def evict(self, node: str, before: float, limit: int) -> int:
        rows = await self._run("evict", {"node": node, "before": before, "limit": limit}, changes=True)
        return int(rows[0][0])

    async def keep_dispatched(self, seqs: Sequence[int], at: float) -> None:
        await self._change("keep_dispatched", (at, list(seqs)))
