"""Mode `tokens` in a SQLite store: claims on incoming messages and attempts at outgoing ones.

Every change is one transaction of its own and says whether it found what it was meant for.
"""

import sqlite3
from collections.abc import Sequence

from faregate.ports.store import ClaimRecord, OutboxRow
from faregate.stores.sql.columns import attempts as stored_attempts
from faregate.stores.sql.columns import attempts_text, id_bytes
from faregate.stores.sqlite.file import SqliteFile
from faregate.stores.sqlite.rows import QUERIES, claim_record, outbox_row


class SqliteClaims(SqliteFile):
    async def claim_record(self, node: str, message_id: str) -> ClaimRecord | None:
        rows = await self._read("claim_record", (node, id_bytes(message_id)))
        return claim_record(rows[0]) if rows else None

    async def claim_records(self, before: float, limit: int) -> list[ClaimRecord]:
        return [claim_record(row) for row in await self._read("claim_records", (before, limit))]

    async def insert_claim(self, node: str, message_id: str, claim_id: str, attempt_id: str, at: float) -> bool:
        return await self._change("insert_claim", (node, id_bytes(message_id), claim_id, attempt_id, at)) == 1

    async def delete_claim(self, node: str, message_id: str, claim_id: str, *, only_new: bool) -> bool:
        return await self._change("delete_claim", (node, id_bytes(message_id), claim_id, only_new)) == 1

    async def register_attempts(self, seq: int, version: int, attempts: Sequence[str], not_after: float) -> bool:
        def work(connection: sqlite3.Connection) -> bool:
            rows = connection.execute(QUERIES["attempts_of"], (seq, version)).fetchall()
            if not rows:
                return False
            text = attempts_text((*stored_attempts(rows[0][0]), *attempts))
            connection.execute(QUERIES["register_attempts"], (text, not_after, seq, version))
            return True

        return await self._write(work)

    async def choose_attempts(self, seq: int, version: int, chosen: Sequence[str]) -> bool:
        return await self._change("choose_attempts", (attempts_text(chosen), seq, version)) == 1

    async def outbox_row(self, seq: int) -> OutboxRow | None:
        rows = await self._read("outbox_row", (seq,))
        return outbox_row(rows[0]) if rows else None

    async def outbox_rows_of(self, node: str, message_id: str) -> list[OutboxRow]:
        return [outbox_row(row) for row in await self._read("outbox_rows_of", (node, id_bytes(message_id)))]

    async def mark_dispatched(self, seqs: Sequence[int], at: float) -> None:
        values = [(at, seq) for seq in seqs]
        await self._write(lambda connection: connection.executemany(QUERIES["mark_dispatched"], values))

    async def dispatched_rows(self, limit: int) -> list[OutboxRow]:
        return [outbox_row(row) for row in await self._read("dispatched_rows", (limit,))]
