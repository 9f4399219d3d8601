"""A PostgreSQL database as a node's store.

    PostgresStore("postgresql://shop:secret@db.example/shop", pool_size=30)

Reads take a connection for one statement and see what is committed; each change outside of a transaction is one
statement, and so a commit of its own. See `server.py` for connections, `transaction.py` for round trips.
"""

from collections.abc import Sequence

import psycopg

from faregate.errors import ConfigurationError
from faregate.ports.cancellation import finish
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.store import ClaimRecord, DeadFilter, Known, OutboxRow, StoreInfo
from faregate.stores.postgres import insertion, inspection
from faregate.stores.postgres.faults import is_lost, raise_translated
from faregate.stores.postgres.server import PostgresServer, query
from faregate.stores.postgres.transaction import PostgresTransaction
from faregate.stores.sql import columns
from faregate.stores.sql.columns import attempts_text, outbox_row
from faregate.stores.sql.statements import check_statement


class PostgresStore(PostgresServer):
    dear_savepoints = True
    may_block = True
    insertion = insertion

    def transaction(self) -> PostgresTransaction:
        return PostgresTransaction(self)

    async def describe(self) -> StoreInfo:
        return await inspection.describe(self._conninfo, self.url)

    async def apply_schema(self, sql: str) -> None:
        check_statement(sql)
        connection = await self.take()
        try:
            await connection.execute(query("lock_schema"))
            try:
                async with connection.transaction():
                    await connection.execute(sql)
            finally:
                if not connection.closed:
                    await connection.execute(query("unlock_schema"))
        except psycopg.Error as exc:
            if is_lost(exc, connection):
                raise_translated(exc, self.url, connection)
            raise ConfigurationError(f"the schema for {self.url} was refused and nothing of it applied: {exc}") from exc
        finally:
            await finish(self.give_back(connection))

    # --- reads of what is committed ---

    async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
        rows = await self._run("known", {"node": node, "ids": list(message_ids)})
        # `handled` comes last in this order, and wins.
        ordered = sorted(rows, key=lambda row: row[1] == "handled")
        return {message_id: Known(state, digest, replays) for message_id, state, digest, replays in ordered}

    async def has_identity(self, node: str, handler: str, identity: str) -> bool:
        return bool(await self._run("has_identity", (node, handler, identity)))

    async def undispatched(self, limit: int, nodes: Sequence[str] | None = None) -> list[OutboxRow]:
        values = {"nodes": None if nodes is None else list(nodes), "limit": limit}
        return [outbox_row(row) for row in await self._run("undispatched", values)]

    async def dead(self, which: DeadFilter, limit: int = 1000) -> list[DeadLetter]:
        values = {name: getattr(which, name) for name in DeadFilter.__struct_fields__}
        return [columns.dead_letter(row) for row in await self._run("dead", {**values, "limit": limit})]

    async def floor(self, node: str) -> float | None:
        rows = await self._run("floor", (node,))
        return rows[0][0] if rows else None

    async def evict(self, node: str, before: float, limit: int) -> int:
        rows = await self._run("evict", {"node": node, "before": before, "limit": limit}, changes=True)
        return int(rows[0][0])

    # --- mode `tokens` ---

    async def claim_record(self, node: str, message_id: str) -> ClaimRecord | None:
        rows = await self._run("claim_record", (node, message_id))
        return ClaimRecord(*rows[0]) if rows else None

    async def claim_records(self, before: float, limit: int) -> list[ClaimRecord]:
        return [ClaimRecord(*row) for row in await self._run("claim_records", (before, limit))]

    async def insert_claim(self, node: str, message_id: str, claim_id: str, attempt_id: str, at: float) -> bool:
        return await self._changed("insert_claim", (node, message_id, claim_id, attempt_id, at)) == 1

    async def delete_claim(self, node: str, message_id: str, claim_id: str, *, only_new: bool) -> bool:
        return await self._changed("delete_claim", (node, message_id, claim_id, only_new)) == 1

    async def register_attempts(self, seq: int, version: int, attempts: Sequence[str], not_after: float) -> bool:
        added = attempts_text(attempts) or "[]"
        return await self._changed("register_attempts", (added, not_after, seq, version)) == 1

    async def choose_attempts(self, seq: int, version: int, chosen: Sequence[str]) -> bool:
        return await self._changed("choose_attempts", (attempts_text(chosen), seq, version)) == 1

    async def outbox_row(self, seq: int) -> OutboxRow | None:
        rows = await self._run("outbox_row", (seq,))
        return outbox_row(rows[0]) if rows else None

    async def outbox_rows_of(self, node: str, message_id: str) -> list[OutboxRow]:
        return [outbox_row(row) for row in await self._run("outbox_rows_of", (node, message_id))]

    async def mark_dispatched(self, seqs: Sequence[int], at: float) -> None:
        await self._changed("mark_dispatched", (at, list(seqs)))

    async def dispatched_rows(self, limit: int) -> list[OutboxRow]:
        return [outbox_row(row) for row in await self._run("dispatched_rows", (limit,))]
