"""Bringing our tables in a SQLite file up to date: under the write lock, so that many processes may start at once."""

import sqlite3

from faregate.errors import StoreTooNew
from faregate.stores.sql.files import load_migrations, too_new
from faregate.stores.sqlite.database import SqliteDatabase, execute_all
from faregate.stores.sqlite.rows import QUERIES

MIGRATIONS = load_migrations(__package__)


async def migrate(database: SqliteDatabase, at: float) -> None:
    """Apply the migrations that are missing. Raises `StoreTooNew`."""
    if await database.read(QUERIES["has_migrations"]):
        [(current,)] = await database.read(QUERIES["schema_version"])
        if current > len(MIGRATIONS):
            raise StoreTooNew(too_new(database.url, current, len(MIGRATIONS)))
        if current == len(MIGRATIONS):
            return  # the usual case, and no reason to wait for who writes

    def work(connection: sqlite3.Connection) -> None:
        connection.execute(QUERIES["create_migrations"])
        [(current,)] = connection.execute(QUERIES["schema_version"]).fetchall()
        for migration in MIGRATIONS[current:]:
            execute_all(connection, migration.sql)
            connection.execute(QUERIES["note_migration"], (migration.version, migration.name, at))

    await database.write(work)
