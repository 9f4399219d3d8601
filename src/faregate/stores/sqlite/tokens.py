"""A SQLite database as a token store: for nodes of one machine, or of one process with `memory:`.

Every method is one transaction of its own. The store's clock is the one of this process.
"""

import sqlite3
from collections.abc import Sequence

from faregate.ports.tokens import NOBODY, Recipients, Token
from faregate.stores.sql import columns
from faregate.stores.sql.records import SqlTokenStore
from faregate.stores.sqlite.file import InMemory, SqliteFile
from faregate.stores.sqlite.rows import QUERIES, token_values


class SqliteTokenStore(SqliteFile, SqlTokenStore):
    async def now(self) -> float:
        return self._clock.time()

    async def create(self, tokens: Sequence[Token]) -> None:
        def work(connection: sqlite3.Connection) -> None:
            # Ask the clock when it is our turn to write: a token that became too late meanwhile must not be created.
            connection.executemany(QUERIES["create_token"], token_values(tokens, self._clock.time()))

        await self._write(work)

    async def discard(self, attempt_ids: Sequence[str]) -> None:
        values = [(attempt_id,) for attempt_id in sorted(attempt_ids)]
        await self._write(lambda connection: connection.executemany(QUERIES["discard_token"], values))

    async def recipients(self, topics: Sequence[str]) -> dict[str, Recipients]:
        found = {}
        for topic in topics:
            rows = await self._read("recipients", (topic,))
            found[topic] = columns.recipients(*rows[0]) if rows else NOBODY
        return found


class MemoryTokenStore(InMemory, SqliteTokenStore):
    """`memory:`, or `memory:NAME` to share it with a store of that name."""
