"""What is special about SQLite: the file, its lock, and the thread that commits."""

import asyncio
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from faregate.errors import ConfigurationError, StoreConflict, TransactionMisused
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store, open_token_store
from faregate.stores.sql.columns import id_bytes
from faregate.stores.sqlite import MemoryStore, SqliteStore, database
from faregate.stores.sqlite.rows import id_blobs
from faregate.testing.store_suite.rows import aborted, ids, ledger

LONG = 30  # seconds until a test that hangs is failed


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(str(tmp_path / "store.db"), clock=SystemClock(), busy_seconds=0.05)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set whenever a writer has found the file held by another process and pauses before it tries again."""
    found = asyncio.Event()

    class Pauses(tuple[float, ...]):
        def __getitem__(self, index: Any) -> Any:
            found.set()
            return super().__getitem__(index)

    monkeypatch.setattr(database, "_PAUSES", Pauses(database._PAUSES))
    return found


async def test_only_the_owner_may_read_the_files(store: SqliteStore, tmp_path: Path) -> None:
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(ids(1)[0])])
    found = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert found == {"store.db": 0o600, "store.db-shm": 0o600, "store.db-wal": 0o600}


async def test_the_file_is_durable_at_commit(store: SqliteStore) -> None:
    async with aborted(store) as tx:
        [(mode,)] = await tx.fetchall("pragma journal_mode")
        [(synchronous,)] = await tx.fetchall("pragma synchronous")
        [(keys,)] = await tx.fetchall("pragma foreign_keys")
    assert (mode, synchronous, keys) == ("wal", 2, 1)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite:{}/nowhere/a.db", "there is no folder"),
        ("sqlite:{}", "is a folder"),
        ("sqlite:{}/text", "not a SQLite database"),
    ],
)
async def test_a_path_that_cannot_be_is_named(url: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database, however long one looks at it" * 20)
    with pytest.raises(ConfigurationError, match=message):
        await open_store(url.format(tmp_path), SystemClock()).open()


@pytest.mark.parametrize("url", ["sqlite:", "sqlite:///a.db", "sqlite::memory:", "mysql://a:b@c/d", "nothing"])
def test_a_url_that_names_no_store_says_what_is_known(url: str) -> None:
    for opening in (open_store, open_token_store):
        with pytest.raises(ConfigurationError, match=r"sqlite:PATH"):
            opening(url, SystemClock())


async def test_a_writer_in_another_process_is_waited_for_with_the_loop_free(
    held: asyncio.Event, tmp_path: Path
) -> None:
    store = SqliteStore(str(tmp_path / "store.db"), clock=SystemClock(), busy_seconds=LONG)
    await store.open()
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("begin immediate")
    tx = store.transaction()
    beginning = asyncio.ensure_future(tx.begin())
    for _ in range(3):
        held.clear()
        await asyncio.wait_for(held.wait(), LONG)
    assert not beginning.done()
    other.execute("rollback")
    await beginning
    await tx.roll_back()
    other.close()
    await store.close()


async def test_a_writer_that_stays_is_a_conflict_and_holds_nothing_up_afterwards(
    store: SqliteStore, held: asyncio.Event, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(StoreConflict, match="locked by another process"):
        await store.transaction().begin()
    assert await store.known("billing", ids(1)) == {}, "reading does not wait for writers"
    held.clear()
    waiting = asyncio.ensure_future(store.transaction().begin())
    await asyncio.wait_for(held.wait(), LONG)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    other.execute("rollback")
    other.close()
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(ids(1)[0])])


async def test_two_stores_of_one_file_take_turns(store: SqliteStore) -> None:
    second = SqliteStore(store.url.removeprefix("sqlite:"), clock=SystemClock())
    await second.open()
    assert second.database_id == store.database_id
    [first] = ids(1)
    async with store.transaction() as tx:
        waiting = second.transaction()
        beginning = asyncio.ensure_future(waiting.begin())
        await tx.record("billing", [ledger(first)])
    await beginning
    assert set(await waiting.record("billing", [ledger(first)])) == {first}
    await waiting.roll_back()
    await second.close()
    assert set(await store.known("billing", [first])) == {first}, "closing one closed the other"


async def test_a_transaction_that_the_database_ended_is_not_gone_on_with(store: SqliteStore) -> None:
    await store.apply_schema("create table goods (name text primary key)")
    tx = store.transaction()
    await tx.begin()
    await tx.execute("insert into goods values ('a')")
    with pytest.raises(sqlite3.IntegrityError):
        await tx.execute("insert or rollback into goods values ('a')")
    assert not tx.is_open
    with pytest.raises(TransactionMisused, match="has ended this transaction already"):
        await tx.execute("insert into goods values ('alone')")
    with pytest.raises(TransactionMisused):
        await tx.commit()
    async with aborted(store) as after:
        assert await after.fetchall("select * from goods") == []


async def test_a_constraint_that_fails_at_commit_leaves_the_store_usable(store: SqliteStore) -> None:
    await store.apply_schema(
        "create table a (id integer primary key);create table b (a integer references a deferrable initially deferred)"
    )
    tx = store.transaction()
    await tx.begin()
    await tx.execute("insert into b values (1)")
    with pytest.raises(sqlite3.IntegrityError):
        await tx.commit()
    async with aborted(store) as after:
        assert await after.fetchall("select * from b") == []


async def test_a_database_in_memory_uses_no_thread() -> None:
    before = threading.active_count()
    store = MemoryStore(clock=SystemClock())
    await store.open()
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(ids(1)[0])])
    assert threading.active_count() == before
    await store.close()


async def test_a_large_transaction_in_memory_can_be_read_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(clock=SystemClock())
    await store.open()
    await store.apply_schema("create table goods (name text)")
    async with store.transaction() as tx:
        await tx.executemany("insert into goods values (?)", [("x" * 1000,)] * 10_000)
        assert await store.undispatched(1) == []
    await store.close()


async def test_databases_in_memory_are_apart_unless_they_share_a_name() -> None:
    stores = [open_store(url, SystemClock()) for url in ("memory:", "memory:", "memory:shared", "memory:shared")]
    for each in stores:
        await each.open()
    tokens = open_token_store("memory:shared", SystemClock())
    assert tokens.database_id == stores[2].database_id == stores[3].database_id
    assert len({each.database_id for each in stores}) == 3
    given = ids(1)
    for each in (stores[0], stores[2]):
        async with each.transaction() as tx:
            await tx.record("billing", [ledger(given[0])])
    assert [len(await each.known("billing", given)) for each in stores] == [1, 0, 1, 1]
    for each in stores:
        await each.close()


def test_ids_that_are_read_together_are_those_that_one_by_one_would_be() -> None:
    given = ids(3)
    assert id_blobs(given) == [id_bytes(each) for each in given]
    assert id_blobs([]) == []


def test_what_is_no_id_is_refused_also_among_others() -> None:
    first, second, third = ids(3)
    with pytest.raises(ValueError, match="ids"):
        id_blobs([first, second[:-2], third])
