"""What is special about PostgreSQL: connections that break, a server that is not there, and what waits to be sent."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator

import psycopg
import pytest

import faregate as fg
from faregate.errors import CommitUnknown, ConfigurationError, StoreConflict, StoreUnavailable, TransactionMisused
from faregate.ids import root_id
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.stores.postgres import PostgresStore
from faregate.testing.store_suite.parked import parked
from faregate.testing.store_suite.rows import aborted, ids, ledger, outgoing

UNREACHABLE = "postgresql://shop:secret@127.0.0.1:1/shop"


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=SystemClock(), pool_size=3, wait_seconds=5, tries=1)
    await store.open()
    await store.apply_schema("create table goods (name text primary key)")
    yield store
    await store.close()


async def end_sessions(postgres_url: str, *processes: int) -> None:
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
        for process in processes:
            await connection.execute("select pg_terminate_backend(%s, 5000)", (process,))


# --- not there --------------------------------------------------------------------------------------------


async def test_a_server_that_is_not_there_is_tried_again_and_then_named(caplog: pytest.LogCaptureFixture) -> None:
    store = PostgresStore(UNREACHABLE, clock=SystemClock(), tries=3, delay=0.01)
    with caplog.at_level(logging.WARNING), pytest.raises(StoreUnavailable, match="after 3 tries") as caught:
        await store.open()
    warnings = [record.getMessage() for record in caplog.records if record.name == "faregate.stores"]
    assert len(warnings) == 2, warnings
    assert "127.0.0.1:1/shop" in warnings[0] and "try 2 of 3 in 0.01 s" in warnings[0]
    assert "check that the server runs" in str(caught.value)
    assert not any("secret" in text for text in [*warnings, str(caught.value), store.url, store.database_id])


def test_a_password_is_shown_nowhere() -> None:
    for postgres_url in (
        UNREACHABLE,
        "postgresql://db/shop?user=shop&password=secret",
        "postgres://shop:secret@db/shop",
    ):
        store = PostgresStore(postgres_url, clock=SystemClock())
        assert "secret" not in store.url + store.database_id
    with pytest.raises(ConfigurationError) as caught:
        PostgresStore("postgresql://shop:secret@db/shop?nonsense=1", clock=SystemClock())
    assert "secret" not in str(caught.value)


def test_a_missing_driver_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from faregate.ports.schemes import open_store\n"
        "open_store('postgresql://shop:secret@db/shop', None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingExtra" in result.stderr and "faregate[postgres]" in result.stderr, result.stderr
    assert "secret" not in result.stderr.splitlines()[-1]


# --- broken connections -----------------------------------------------------------------------------------


@pytest.mark.services
async def test_a_connection_lost_in_a_transaction_is_unavailable_and_the_store_recovers(
    store: PostgresStore, postgres_url: str
) -> None:
    [message_id] = ids(1)
    tx = store.transaction()
    await tx.begin()
    await tx.record("billing", [ledger(message_id)])
    await end_sessions(postgres_url, tx.raw.info.backend_pid)
    with pytest.raises(StoreUnavailable):
        await tx.execute("insert into goods values ('x')")
    assert not tx.is_open
    await tx.roll_back()
    async with store.transaction() as again:
        assert await again.record("billing", [ledger(message_id)]) == {}


@pytest.mark.services
async def test_a_connection_lost_before_the_commit_is_unknown(store: PostgresStore, postgres_url: str) -> None:
    [message_id] = ids(1)
    tx = store.transaction()
    await tx.begin()
    await tx.record("billing", [ledger(message_id)])
    await end_sessions(postgres_url, tx.raw.info.backend_pid)
    with pytest.raises(CommitUnknown):
        await tx.commit()
    await tx.roll_back()
    assert await store.known("billing", [message_id]) == {}


@pytest.mark.services
async def test_a_connection_lost_in_the_middle_of_a_commit_is_unknown(store: PostgresStore, postgres_url: str) -> None:
    await store.apply_schema(
        "create function linger() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(30); return null; end $$;"
        "create constraint trigger lingers after insert on goods deferrable initially deferred"
        " for each row execute function linger()"
    )
    tx = store.transaction()
    await tx.begin()
    await tx.execute("insert into goods values ('x')")
    process = tx.raw.info.backend_pid
    committing = asyncio.ensure_future(tx.commit())
    async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as watching:
        query = "select 1 from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
        while not await (await watching.execute(query, (process,))).fetchone():
            pass  # each look is a round trip, so the commit goes on meanwhile
    await end_sessions(postgres_url, process)
    with pytest.raises(CommitUnknown):
        await committing
    async with aborted(store) as after:
        assert await after.fetchall("select * from goods") == []


@pytest.mark.services
async def test_when_all_idle_connections_are_gone_nobody_notices(store: PostgresStore, postgres_url: str) -> None:
    open_ones = [store.transaction() for _ in range(3)]
    for tx in open_ones:
        await tx.begin()
    processes = [tx.raw.info.backend_pid for tx in open_ones]
    for tx in open_ones:
        await tx.roll_back()
    await end_sessions(postgres_url, *processes)
    [message_id] = ids(1)
    async with store.transaction() as tx:
        assert await tx.record("billing", [ledger(message_id)]) == {}
    assert set(await store.known("billing", [message_id])) == {message_id}


@pytest.mark.services
async def test_a_read_on_a_lost_connection_is_done_again(store: PostgresStore, postgres_url: str) -> None:
    async with aborted(store) as tx:
        process = tx.raw.info.backend_pid
    await end_sessions(postgres_url, process)
    assert await store.undispatched(10) == []


# --- conflicts and failed statements ----------------------------------------------------------------------


@pytest.mark.services
async def test_a_deadlock_is_a_conflict(store: PostgresStore) -> None:
    await store.apply_schema("insert into goods values ('a'), ('b')")
    lock = "select * from goods where name = ? for update"

    async def both(first: str, second: str, met: asyncio.Barrier) -> None:
        async with aborted(store) as tx:
            await tx.execute("set local deadlock_timeout = '20ms'")
            await tx.fetchall(lock, (first,))
            await met.wait()
            await tx.fetchall(lock, (second,))

    met = asyncio.Barrier(2)
    results = await asyncio.gather(both("a", "b", met), both("b", "a", met), return_exceptions=True)
    assert sorted(type(result) for result in results if result is not None) == [StoreConflict], results


@pytest.mark.services
async def test_a_commit_after_a_failed_statement_is_refused(store: PostgresStore) -> None:
    tx = store.transaction()
    await tx.begin()
    await tx.execute("insert into goods values ('a')")
    with pytest.raises(psycopg.errors.UniqueViolation):
        await tx.execute("insert into goods values ('a')")
    with pytest.raises(TransactionMisused, match="a statement of this transaction failed"):
        await tx.commit()
    async with aborted(store) as after:
        assert await after.fetchall("select * from goods") == []


@pytest.mark.services
async def test_a_transaction_ended_by_the_back_door_is_noticed(store: PostgresStore) -> None:
    tx = store.transaction()
    await tx.begin()
    await tx.raw.execute("commit")
    assert not tx.is_open
    with pytest.raises(TransactionMisused, match="has ended this transaction already"):
        await tx.execute("insert into goods values ('alone')")
    await tx.roll_back()


# --- what waits to be sent --------------------------------------------------------------------------------


@pytest.mark.services
async def test_the_drivers_connection_is_inside_the_transaction_and_the_savepoint(
    store: PostgresStore,
) -> None:
    async with store.transaction() as tx:
        seqs = await tx.send([outgoing("billing"), outgoing("billing")])
    async with store.transaction() as tx:
        await tx.dispatched(seqs[:1])
        await tx.savepoint()
        await tx.raw.execute("insert into goods values ('undone')")
        await tx.roll_back_to_savepoint()
        await tx.release_savepoint()
        await tx.raw.execute("insert into goods values ('kept')")
    async with aborted(store) as tx:
        await tx.raw.execute("insert into goods values ('rolled back')")
    async with aborted(store) as after:
        assert await after.fetchall("select name from goods") == [("kept",)]
    assert [row.seq for row in await store.undispatched(10)] == seqs[1:]


@pytest.mark.services
async def test_a_doubled_question_mark_is_an_operator(store: PostgresStore) -> None:
    async with aborted(store) as tx:
        assert await tx.fetchone("select '{\"a\": 1}'::jsonb ?? ?, 'x%'", ("a",)) == (True, "x%")
        assert await tx.fetchone("select '{\"a\": 1}'::jsonb ?? 'b', 'x%'") == (False, "x%")


@pytest.mark.services
async def test_postgres_is_another_name_for_it(postgres_url: str) -> None:
    store = open_store(postgres_url.replace("postgresql://", "postgres://"), SystemClock())
    await store.open()
    assert await store.floor("billing") is None
    await store.close()


@pytest.mark.services
async def test_reads_after_all_connections_were_lost_do_not_starve_each_other(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, clock=SystemClock(), pool_size=10, wait_seconds=30)
    await store.open()
    try:
        taken = [await store.take() for _ in range(10)]
        processes = [connection.info.backend_pid for connection in taken]
        for connection in taken:
            await store.give_back(connection)
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as other:
            for process in processes:  # none but these: others use the same server
                await other.execute("select pg_terminate_backend(%s, 5000)", (process,))
        async with asyncio.timeout(15):  # half of what a read waits for a connection
            found = await asyncio.gather(*(store.known("answering", [root_id(1)]) for _ in range(10)))
        assert found == [{}] * 10
    finally:
        await store.close()


@pytest.mark.services
async def test_one_database_written_in_two_ways_is_one_store(postgres_url: str) -> None:
    other = postgres_url.replace("postgresql://", "postgres://") + "&application_name=shop"
    async with fg.Bus("memory:", nodes=[fg.Node("a"), fg.Node("b")], store={"a": postgres_url, "b": other}) as bus:
        assert bus.store_of("a") is bus.store_of("b") and len(bus.stores) == 1


async def test_the_size_of_the_pool_is_said_by_giving_the_bus_an_object(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, pool_size=2)
    async with fg.Bus("memory:", nodes=[fg.Node("shop")], store=store) as bus:
        assert bus.store_of("shop") is store and store.pool.max_size == 2
    with pytest.raises(StoreUnavailable, match="is not open"):
        _ = store.pool


def test_a_pool_of_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="pool_size must be 1 or more; got 0"):
        PostgresStore(UNREACHABLE, pool_size=0)


@pytest.mark.services
async def test_keeping_what_is_claimed_does_not_wait_for_what_is_being_ended(store: PostgresStore) -> None:
    given = ids(2)
    async with store.transaction() as tx:
        await tx.park("billing", [(parked(each, place), None) for place, each in enumerate(given)])
        assert len(await tx.claim_parked("billing", [], 99.0, 10, "a", 600.0)) == 2
    async with store.transaction() as ending:
        await ending.count_starts("billing", given[:1])
        async with asyncio.timeout(20), store.transaction() as tx:
            await tx.keep_claimed("billing", "a", 0.0)
    async with store.transaction() as tx:
        free = await tx.claim_parked("billing", [], 99.0, 10, "b", 600.0)
    assert [each.message_id for each in free] == given[1:], "what was locked is claimed as before"
