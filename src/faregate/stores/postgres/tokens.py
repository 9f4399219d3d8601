"""A PostgreSQL database as the token store of a bus. Every method is one statement, and so a commit of its own; the
store's clock is the server's."""

from collections.abc import Sequence

from faregate.ports.tokens import NOBODY, Recipients, Token
from faregate.stores.postgres.rows import token_columns
from faregate.stores.postgres.server import PostgresServer
from faregate.stores.sql import columns
from faregate.stores.sql.records import SqlTokenStore


class PostgresTokenStore(PostgresServer, SqlTokenStore):
    async def now(self) -> float:
        return float((await self._read("now"))[0][0])

    async def create(self, tokens: Sequence[Token]) -> None:
        if tokens:
            await self._change("create_tokens", token_columns(tokens))

    async def discard(self, attempt_ids: Sequence[str]) -> None:
        await self._change("discard_tokens", (list(attempt_ids),))

    async def recipients(self, topics: Sequence[str]) -> dict[str, Recipients]:
        found = dict.fromkeys(topics, NOBODY)
        for topic, version, modes in await self._read("recipients", (list(topics),)):
            found[topic] = columns.recipients(version, modes)
        return found
