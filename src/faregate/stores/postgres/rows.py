"""What rows of PostgreSQL are: its queries give ids as text. The named queries, loaded once."""

from collections.abc import Sequence
from typing import Any

from faregate.ports.store import Known
from faregate.ports.tokens import Token
from faregate.stores.sql.files import load_queries
from faregate.stores.sql.records import SqlRecords

QUERIES = load_queries(__package__, "%s")


class PostgresRecords(SqlRecords):
    async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
        rows = await self._read("known", {"node": node, "ids": list(message_ids)})
        # `handled` comes last in this order, and wins.
        ordered = sorted(rows, key=lambda row: row[1] == "handled")
        return {message_id: Known(state, digest, replays) for message_id, state, digest, replays in ordered}


def token_columns(tokens: Sequence[Token]) -> list[list[Any]]:
    return [list(column) for column in zip(*tokens, strict=True)]
