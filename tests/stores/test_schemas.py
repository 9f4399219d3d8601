"""Migrations: their sum is the schema, many processes may start at once, and a newer database is refused."""

import asyncio
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from faregate.errors import StoreTooNew
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.stores.sql.files import load_migrations, load_queries, load_schema
from faregate.testing.store_subjects import postgres_schema
from tests.presence import address

BACKENDS = ["faregate.stores.sqlite", "faregate.stores.postgres"]


async def open_and_close(url: str) -> None:
    store = open_store(url, SystemClock())
    await store.open()
    await store.close()


def sqlite_catalog(connection: sqlite3.Connection) -> list[Any]:
    """The objects with their SQL; blanks and comments do not count."""
    rows = connection.execute("select type, name, tbl_name, sql from sqlite_master order by type, name").fetchall()
    return [(kind, name, table, _squeezed(sql or "")) for kind, name, table, sql in rows]


async def test_the_schema_of_sqlite_is_the_sum_of_its_migrations(tmp_path: Path) -> None:
    await open_and_close(f"sqlite:{tmp_path}/migrated.db")
    migrated, described = sqlite3.connect(tmp_path / "migrated.db"), sqlite3.connect(":memory:")
    try:
        described.executescript(load_schema("faregate.stores.sqlite"))
        # `create table if not exists` is stored without its condition.
        assert sqlite_catalog(migrated) == sqlite_catalog(described)
    finally:
        migrated.close()
        described.close()


def _squeezed(sql: str) -> str:
    """Where an added column leaves blanks is the database's business."""
    return re.sub(r" ?([(),]) ?", r"\1", " ".join(sql.lower().split()))


POSTGRES_CATALOG = (
    """select table_name, column_name, data_type, is_nullable, column_default, is_identity
       from information_schema.columns where table_schema = current_schema() order by 1, ordinal_position""",
    "select tablename, indexname, indexdef from pg_indexes where schemaname = current_schema() order by 1, 2",
    """select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint
       where connamespace = current_schema()::regnamespace order by 1, 2""",
)


async def postgres_catalog(url: str) -> str:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        found = [await (await connection.execute(query)).fetchall() for query in POSTGRES_CATALOG]
    return re.sub(r"faregate_test_\w+\.", "", repr(found))


@pytest.mark.services
async def test_the_schema_of_postgresql_is_the_sum_of_its_migrations() -> None:
    server = address("FAREGATE_TEST_POSTGRES")
    async with postgres_schema(server) as migrated, postgres_schema(server) as described:
        await open_and_close(migrated)
        async with await psycopg.AsyncConnection.connect(described) as connection:
            await connection.execute(load_schema("faregate.stores.postgres"))
        assert await postgres_catalog(migrated) == await postgres_catalog(described)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_files_of_a_backend_are_complete(backend: str) -> None:
    versions = [migration.version for migration in load_migrations(backend)]
    assert versions == list(range(1, len(versions) + 1))
    assert len(load_queries(backend)) > 30


def test_both_backends_have_the_same_tables() -> None:
    tables = [re.findall(r"create table (\w+)", load_schema(backend)) for backend in BACKENDS]
    assert tables[0] == tables[1]
    assert all(table.startswith("faregate_") for table in tables[0])


# --- many at once -----------------------------------------------------------------------------------------

OPEN = """
import asyncio, sys
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store

async def main():
    store = open_store(sys.argv[1], SystemClock())
    await store.open()
    await store.apply_schema("create table if not exists goods (name text)")
    await store.close()

sys.stdin.readline()
asyncio.run(main())
"""


def start_ten_at_once(url: str) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", OPEN, url], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(10)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 10, "".join(errors)


def test_ten_processes_start_at_once_on_one_file(tmp_path: Path) -> None:
    start_ten_at_once(f"sqlite:{tmp_path}/store.db")


@pytest.mark.services
async def test_ten_processes_start_at_once_on_one_server(postgres_url: str) -> None:
    await asyncio.to_thread(start_ten_at_once, postgres_url)


# --- older ------------------------------------------------------------------------------------------------

NOTED = "insert into faregate_migrations (version, name, applied_at) values (1, 'first tables', 0)"
HANDLED = "insert into faregate_ledger (node, message_id, handled_at, outcome) values ('billing', {}, 1.0, 'handled')"
SENT = "select sent, sent_ids from faregate_ledger"


def first_tables(backend: str) -> str:
    made = "create table faregate_migrations (version integer primary key, name text, applied_at double precision);"
    return f"{made}{load_migrations(backend)[0].sql};{NOTED};"


async def test_what_handlers_of_an_older_version_sent_is_unknown_not_nothing(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        connection.executescript(first_tables(BACKENDS[0]) + HANDLED.format(f"x'{'01' * 16}'"))
        await open_and_close(f"sqlite:{tmp_path}/store.db")
        assert connection.execute(SENT).fetchall() == [(None, None)]


@pytest.mark.services
async def test_what_handlers_of_an_older_version_sent_is_unknown_on_a_server_too(postgres_url: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute(first_tables(BACKENDS[1]) + HANDLED.format("gen_random_uuid()"))
    await open_and_close(postgres_url)
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        assert await (await connection.execute(SENT)).fetchall() == [(None, None)]


# --- too new ----------------------------------------------------------------------------------------------

NEWER = "insert into faregate_migrations (version, name, applied_at) values (99, 'of the future', 0)"


async def test_a_file_of_a_newer_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/store.db"
    await open_and_close(url)
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute(NEWER)
    connection.commit()
    connection.close()
    with pytest.raises(
        StoreTooNew, match=r"version 99.*up to \d+.*pip install --upgrade faregate.*faregate store info"
    ):
        await open_and_close(url)


@pytest.mark.services
async def test_a_server_of_a_newer_version_is_refused_with_both_versions(postgres_url: str) -> None:
    await open_and_close(postgres_url)
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute(NEWER)
    with pytest.raises(StoreTooNew, match=r"version 99.*up to \d+.*pip install --upgrade faregate") as caught:
        await open_and_close(postgres_url)
    assert psycopg.conninfo.conninfo_to_dict(postgres_url)["password"] not in str(caught.value)
