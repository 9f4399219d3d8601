"""A PostgreSQL database as the token store of a bus. Every method is one statement, and so a commit of its own; the
store's clock is the server's."""

from collections.abc import Mapping, Sequence

from faregate.ports.tokens import NOBODY, Claim, Mode, Recipients, Token
from faregate.stores.postgres.rows import token_columns
from faregate.stores.postgres.server import PostgresServer
from faregate.stores.sql import columns


class PostgresTokenStore(PostgresServer):
    async def now(self) -> float:
        return float((await self._run("now"))[0][0])

    async def create(self, tokens: Sequence[Token]) -> None:
        if tokens:
            await self._changed("create_tokens", token_columns(tokens))

    async def read(self, attempt_id: str) -> Token | None:
        rows = await self._run("read_token", (attempt_id,))
        return Token(*rows[0]) if rows else None

    async def claim(self, attempt_id: str, claim_id: str) -> Claim:
        if await self._changed("claim_token", {"attempt": attempt_id, "claim": claim_id}):
            return "claimed"
        return "missing" if await self.read(attempt_id) is None else "taken"

    async def delete(self, attempt_id: str, claim_id: str) -> None:
        await self._changed("delete_token", (attempt_id, claim_id))

    async def discard(self, attempt_ids: Sequence[str]) -> None:
        await self._changed("discard_tokens", (list(attempt_ids),))

    async def count(self) -> int:
        return int((await self._run("count_tokens"))[0][0])

    # --- recipient lists ---

    async def recipients(self, topics: Sequence[str]) -> dict[str, Recipients]:
        found = dict.fromkeys(topics, NOBODY)
        for topic, version, modes in await self._run("recipients", (list(topics),)):
            found[topic] = columns.recipients(version, modes)
        return found

    async def swap(self, topic: str, version: int, modes: Mapping[str, Mode]) -> bool:
        text = columns.modes_text(modes)
        if version == 0:
            return await self._changed("insert_topic", (topic, text)) == 1
        return await self._changed("swap_topic", (text, topic, version)) == 1
