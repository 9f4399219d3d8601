"""A connection that looks at the socket itself loses nothing. One that waits in place does so for a moment only: then
others of its process get on."""

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest

from faregate.stores.postgres.connection import PollingConnection, ReadyConnection
from tests.presence import address

pytestmark = pytest.mark.services
LONG = 20  # seconds until a test that hangs is failed


@pytest.fixture(params=[ReadyConnection, PollingConnection])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[list[ReadyConnection]]:
    made = [await request.param.connect(address("FAREGATE_TEST_POSTGRES"), autocommit=True) for _ in range(2)]
    yield made
    for each in made:
        await each.close()


async def test_a_lock_of_the_same_process_is_waited_for_without_standing_in_its_way(
    connect: list[ReadyConnection],
) -> None:
    one, other = connect
    order: list[str] = []
    held, asked = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with one.transaction():
            await one.execute("select pg_advisory_xact_lock(4711)")
            order.append("held")
            held.set()
            await asked.wait()  # it is told when the other one has waited in place and gives way
            order.append("let go")

    async def want() -> None:
        await held.wait()
        asked.set()
        await other.execute("select pg_advisory_xact_lock(4711)")
        order.append("got")

    async with asyncio.timeout(LONG):
        await asyncio.gather(hold(), want())
    assert order == ["held", "let go", "got"]


async def test_results_errors_and_large_answers_arrive(connect: list[ReadyConnection]) -> None:
    one, _ = connect
    cursor = await one.execute("select %s::int, repeat('x', 3000000)", (7,))
    row = await cursor.fetchone()
    assert row is not None and (row[0], len(row[1])) == (7, 3_000_000)
    await one.execute("select length(%s)", ("y" * 3_000_000,))
    with pytest.raises(psycopg.errors.UndefinedTable):
        await one.execute("select * from nowhere_at_all")
    assert (await (await one.execute("select 1")).fetchone()) == (1,)


async def test_a_wait_that_is_cancelled_ends_the_query_too(connect: list[ReadyConnection]) -> None:
    one, other = connect
    task = asyncio.create_task(one.execute("select pg_sleep(60)"))
    running = "select query from pg_stat_activity where state = 'active' and pid = %s"
    async with asyncio.timeout(LONG):
        while await (await other.execute(running, (one.info.backend_pid,))).fetchone() is None:
            pass
    task.cancel()
    async with asyncio.timeout(LONG):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await (await one.execute("select 2")).fetchone()) == (2,)
    assert other.closed is False


async def test_a_connection_that_the_server_ends_is_noticed(connect: list[ReadyConnection]) -> None:
    one, other = connect
    await other.execute("select pg_terminate_backend(%s)", (one.info.backend_pid,))
    with pytest.raises(psycopg.OperationalError):
        await one.execute("select 1")
    assert one.closed


async def test_work_in_place_is_done_while_the_loop_stands_still(connect: list[ReadyConnection]) -> None:
    one, _ = connect
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)

    async def work() -> None:
        async with one.pipeline():
            await one.execute("select pg_sleep(%s)", (0.01,))
        with pytest.raises(psycopg.errors.UndefinedTable):
            await one.execute("select * from nowhere_at_all")

    one.run_in_place(work())
    assert not turned.is_set(), "the event loop went on meanwhile"
    assert (await (await one.execute("select 1")).fetchone()) == (1,)
