"""Bringing our tables in PostgreSQL up to date: under an advisory lock, so that many processes may start at once."""

from typing import Any

import psycopg

from faregate.errors import StoreTooNew
from faregate.stores.postgres.rows import QUERIES
from faregate.stores.sql.files import load_migrations, too_new

MIGRATIONS = load_migrations(__package__)


async def migrate(connection: psycopg.AsyncConnection[Any], url: str, at: float) -> None:
    """Apply the migrations that are missing. Raises `StoreTooNew`."""
    if await _version(connection, url) == len(MIGRATIONS):
        return
    # The lock comes before the transaction: what others made while it waited is not seen by every catalog lookup of one
    # that began earlier. It ends with this connection, which is closed right after.
    await connection.execute(QUERIES["lock_migrations"])
    async with connection.transaction():
        current = await _version(connection, url)
        if current == 0:
            await connection.execute(QUERIES["create_migrations"])
        for migration in MIGRATIONS[current:]:
            await connection.execute(migration.sql)
            values = (migration.version, migration.name, at)
            await connection.execute(QUERIES["note_migration"], values)


async def _version(connection: psycopg.AsyncConnection[Any], url: str) -> int:
    """The version that the tables are at; 0 when there are none."""
    [there] = await _row(connection, "has_migrations")
    [current] = await _row(connection, "schema_version") if there else [0]
    if current > len(MIGRATIONS):
        raise StoreTooNew(too_new(url, current, len(MIGRATIONS)))
    return int(current)


async def _row(connection: psycopg.AsyncConnection[Any], name: str) -> Any:
    return await (await connection.execute(QUERIES[name])).fetchone()
