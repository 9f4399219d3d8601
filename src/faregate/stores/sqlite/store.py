"""A SQLite file, or a database in memory, as a node's store.

    SqliteStore("sqlite:./shop.db", busy_seconds=30)

Reads come from the reading connection and so see what is committed; each change outside of a transaction is a commit of
its own. See `database.py` for connections, locks and threads.
"""

import json
import sqlite3
from collections.abc import Sequence
from functools import lru_cache

from faregate.errors import ConfigurationError
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.store import DeadFilter, Known, OutboxRow, StoreInfo
from faregate.stores.sql.columns import id_bytes, id_text
from faregate.stores.sql.statements import check_statement
from faregate.stores.sqlite import insertion, inspection
from faregate.stores.sqlite.claims import SqliteClaims
from faregate.stores.sqlite.database import execute_all
from faregate.stores.sqlite.file import InMemory
from faregate.stores.sqlite.rows import QUERIES, dead_letter, outbox_row
from faregate.stores.sqlite.transaction import SqliteTransaction

_IDS_AT_ONCE = 256
_YOUNG_ROWS = 10_000
"""How many rows that are young may lie before one that is old, when old ones are removed."""
_ALL_ROWS = (1 << 63) - 1


class SqliteStore(SqliteClaims):
    """`sqlite:PATH`. One transaction at a time runs on it: handlers with effects in this store follow each other."""

    dear_savepoints = False
    insertion = insertion
    _looked_through: frozenset[str] = frozenset()
    """The nodes all of whose ledger rows were looked at for old ones since this object was made."""

    def transaction(self) -> SqliteTransaction:
        return SqliteTransaction(self._database, self._clock)

    async def describe(self) -> StoreInfo:
        return inspection.describe(self.url.partition(":")[2])

    async def apply_schema(self, sql: str) -> None:
        check_statement(sql)
        try:
            await self._write(lambda connection: execute_all(connection, sql))
        except (sqlite3.Error, sqlite3.Warning) as exc:
            raise ConfigurationError(f"the schema for {self.url} was refused and nothing of it applied: {exc}") from exc

    # --- reads of what is committed ---

    async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
        found: dict[str, Known] = {}
        for start in range(0, len(message_ids), _IDS_AT_ONCE):
            ids = [id_bytes(message_id) for message_id in message_ids[start : start + _IDS_AT_ONCE]]
            # The last id again and again up to a power of two, so that few statements need preparing.
            ids += ids[-1:] * ((1 << (len(ids) - 1).bit_length()) - len(ids))
            values = [node, *ids]
            for message_id, state, replays in await self._database.read(_with_ids("known_dead", len(ids)), values):
                found[id_text(message_id)] = Known(state, None, replays)
            for message_id, digest in await self._database.read(_with_ids("known_handled", len(ids)), values):
                found[id_text(message_id)] = Known("handled", digest)
        return found

    async def has_identity(self, node: str, handler: str, identity: str) -> bool:
        return bool(await self._read("has_identity", (node, handler, identity)))

    async def undispatched(self, limit: int, nodes: Sequence[str] | None = None) -> list[OutboxRow]:
        given = None if nodes is None else json.dumps(list(nodes))
        values = {"nodes": given, "limit": limit}
        return [outbox_row(row) for row in await self._read("undispatched", values)]

    async def dead(self, which: DeadFilter, limit: int = 1000) -> list[DeadLetter]:
        values = {name: getattr(which, name) for name in DeadFilter.__struct_fields__}
        values["message_id"] = None if which.message_id is None else id_bytes(which.message_id)
        return [dead_letter(row) for row in await self._read("dead", {**values, "limit": limit})]

    async def floor(self, node: str) -> float | None:
        rows = await self._read("floor", (node,))
        return rows[0][0] if rows else None

    async def evict(self, node: str, before: float, limit: int) -> int:
        """There is no index on the time: rows lie in its order, so the old ones come first, but for a few.

        So looking ends behind some young rows. A clock that was wrong can leave more of them before the old ones;
        therefore everything is looked at once for each node, when its bus starts.
        """
        thorough = node not in self._looked_through

        def work(connection: sqlite3.Connection) -> int:
            def remove(young: str, evict: str) -> int:
                found = None if thorough else connection.execute(QUERIES[young], (before, _YOUNG_ROWS)).fetchone()
                last = _ALL_ROWS if found is None else found[0]
                values = {"node": node, "before": before, "limit": limit, "last": last}
                return connection.execute(QUERIES[evict], values).rowcount

            gone, keys_gone = remove("young_row", "evict"), remove("young_identity", "evict_identities")
            if gone or keys_gone:
                connection.execute(QUERIES["raise_floor"], (node, before))
            return gone

        evicted = await self._write(work)
        if evicted < limit:
            self._looked_through |= {node}
        return evicted


class MemoryStore(InMemory, SqliteStore):
    """`memory:`: gone with the process, and deterministic."""


@lru_cache
def _with_ids(name: str, count: int) -> str:
    return QUERIES[name].replace("/*ids*/", ", ".join("?" * count))
