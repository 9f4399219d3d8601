"""What is in a PostgreSQL store, for people: read without changing it, whatever version of Faregate has set it up."""

from typing import Any

import psycopg
from psycopg import sql

from faregate.errors import StoreUnavailable
from faregate.ports.store import StoreInfo
from faregate.stores.postgres.faults import raise_translated
from faregate.stores.postgres.migrate import MIGRATIONS
from faregate.stores.postgres.rows import QUERIES
from faregate.stores.sql.columns import outbox_row


async def describe(url: str, told: str) -> StoreInfo:
    """`told`: the URL without its password. Raises `StoreUnavailable` for a server that cannot be reached."""
    try:
        connection = await psycopg.AsyncConnection.connect(url, connect_timeout=5)
    except psycopg.Error as exc:
        raise StoreUnavailable(f"cannot reach {told}: {' '.join(str(exc).split())}") from exc
    try:
        async with connection:
            await connection.set_read_only(True)
            return await _describe(told, connection)
    except psycopg.Error as exc:
        raise_translated(exc, told, connection)


async def _describe(url: str, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> StoreInfo:
    async def read(query: str | sql.Composed, values: Any = None) -> list[tuple[Any, ...]]:
        return await (await connection.execute(query, values)).fetchall()

    names = [name for (name,) in await read(QUERIES["our_tables"])]
    info = StoreInfo(url=url, known=len(MIGRATIONS))
    if "faregate_migrations" not in names:
        return info
    info.version = (await read(QUERIES["schema_version"]))[0][0]
    for name in names:
        info.tables[name] = (await read(sql.SQL("select count(*) from {}").format(sql.Identifier(name))))[0][0]
    if 0 < info.version <= info.known:
        info.floors = dict(map(_pair, await read(QUERIES["floors"])))
        info.oldest = next(map(outbox_row, await read(QUERIES["undispatched"], {"nodes": None, "limit": 1})), None)
    return info


def _pair(row: tuple[Any, ...]) -> tuple[str, float]:
    node, floor = row
    return node, floor
