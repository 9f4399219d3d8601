"""Faults that were found by attacking the bus on PostgreSQL, each of them mended; one test each."""

import asyncio
from typing import Any

import msgspec
import psycopg
import pytest

import faregate as fg
from faregate import ids
from faregate.errors import Unavailable
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.store import Store
from faregate.stores.postgres import PostgresStore
from faregate.testing import FakeClock

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_batch")]

LONG = 30  # seconds until a test that hangs is failed
TABLE = "create table if not exists notes(n integer)"


class Asked(fg.Event):
    n: int


class Answered(fg.Event):
    n: int


def numbers(count: int, start: int = 0) -> list[Asked]:
    return [Asked(n=n) for n in range(start, start + count)]


def the_store(bus: fg.Bus) -> Store:
    [store] = bus.stores.values()
    return store


async def rows(bus: fg.Bus, sql: str = "select n from notes order by n") -> list[Any]:
    """The first column of what is committed."""
    transaction = the_store(bus).transaction()
    await asyncio.wait_for(transaction.begin(), LONG)
    try:
        return [row[0] for row in await transaction.fetchall(sql)]
    finally:
        await transaction.roll_back()


async def dead_numbers(bus: fg.Bus) -> list[int]:
    return [msgspec.json.decode(letter.envelope.body)["n"] for letter in await bus.dead_letters()]


@pytest.mark.parametrize("together", [1, 6])
async def test_a_handler_that_catches_an_sql_error_and_goes_on_is_told_so_and_nobody_else_is_lost(
    together: int, postgres_url: str
) -> None:
    schema = f"{TABLE}; create table keys(id integer primary key); insert into keys values (1)"
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=schema)
    guilty = together // 2

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes values (?)", (asked.n,))
        if asked.n == guilty:
            try:
                await ctx.db.execute("insert into keys values (1)")
            except psycopg.errors.UniqueViolation:
                pass

    async with fg.Bus("memory:", nodes=[asking, answering], store=postgres_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(together), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert await dead_numbers(bus) == [guilty]
        assert letter.error.startswith("TransactionMisused") and "on conflict do nothing" in letter.error
        assert await rows(bus) == [n for n in range(together) if n != guilty]
        assert bus.outcomes()["handled"] == together - 1


async def test_a_statement_that_may_fail_inside_the_drivers_own_savepoint_does_no_harm(postgres_url: str) -> None:
    schema = f"{TABLE}; create table keys(id integer primary key); insert into keys values (1)"
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=schema)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes values (?)", (asked.n,))
        try:
            async with ctx.db.raw.transaction():
                await ctx.db.execute("insert into keys values (1)")
        except psycopg.errors.UniqueViolation:
            pass

    async with fg.Bus("memory:", nodes=[asking, answering], store=postgres_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
        assert await rows(bus) == [0, 1, 2, 3, 4, 5]


async def test_two_first_statements_at_once_share_one_transaction(postgres_url: str) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

    @answering.on(Asked, source="asking", order=fg.Parallel(8), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        insert = "insert into notes values (?)"
        await asyncio.gather(ctx.db.execute(insert, (asked.n,)), ctx.db.execute(insert, (asked.n + 100,)))

    async with fg.Bus("memory:", nodes=[asking, answering], store=postgres_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(40), node="asking")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
        assert await rows(bus) == [*range(40), *range(100, 140)]


async def test_an_error_that_comes_up_at_the_commit_is_judged_by_the_failure_policy(postgres_url: str) -> None:
    schema = (
        "create table parents(id integer primary key);"
        "create table notes(n integer references parents(id) deferrable initially deferred)"
    )
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=schema)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        if asked.n == 3:
            await ctx.db.execute("insert into notes values (7)")

    async with fg.Bus("memory:", nodes=[asking, answering], store=postgres_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert await dead_numbers(bus) == [3] and letter.error.startswith("ForeignKeyViolation")
        assert bus.outcomes()["handled"] == 5


@pytest.mark.parametrize(
    "dedup",
    ["ledger", "tokens"],
)
async def test_who_shares_a_batch_with_a_handler_that_commits_is_handled_once(dedup: str, postgres_url: str) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("hearing")
    heard: list[int] = []

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard.append(answered.n)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), dedup=dedup, retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        await ctx.db.execute("insert into notes values (?)", (asked.n,))
        if asked.n == 3:
            await ctx.db.raw.commit()
        return Answered(n=asked.n)

    async with fg.Bus("memory:", nodes=[asking, answering, hearing], store=postgres_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        assert await dead_numbers(bus) == [3]
        # What the handler committed itself, against the rules, nobody can take back.
        assert [n for n in await rows(bus) if n != 3] == [0, 1, 2, 4, 5]
        assert sorted(heard) == [0, 1, 2, 4, 5]


async def test_a_handler_that_closes_the_connection_ends_as_a_dead_letter_and_hurts_nobody_else(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Unavailable.__init__.__kwdefaults__, "retry_after", 0.02)
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    runs = 0

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal runs
        await ctx.db.execute("insert into notes values (?)", (asked.n,))
        if asked.n == 3:
            runs += 1
            if runs < 10:  # so that the test comes to an end
                await ctx.db.raw.close()

    async with fg.Bus("memory:", nodes=[asking, answering], store=postgres_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        assert [n for n in await rows(bus) if n != 3] == [0, 1, 2, 4, 5]
        assert runs < 10
        assert await dead_numbers(bus) == [3]


async def test_reads_after_all_connections_were_lost_do_not_starve_each_other(postgres_url: str) -> None:
    store = PostgresStore(postgres_url, clock=SystemClock(), connections=10, wait_seconds=LONG)
    await store.open()
    try:
        taken = [await store.take() for _ in range(10)]
        processes = [connection.info.backend_pid for connection in taken]
        for connection in taken:
            await store.give_back(connection)
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as other:
            for process in processes:  # none but these: others use the same server
                await other.execute("select pg_terminate_backend(%s, 5000)", (process,))
        async with asyncio.timeout(LONG / 2):  # half of what a read waits for a connection
            found = await asyncio.gather(*(store.known("answering", [ids.root_id(1)]) for _ in range(10)))
        assert found == [{}] * 10
    finally:
        await store.close()


async def test_one_database_written_in_two_ways_is_one_store(postgres_url: str) -> None:
    other = postgres_url.replace("postgresql://", "postgres://") + "&application_name=shop"
    bus = fg.Bus(
        "memory:", nodes=[fg.Node("asking"), fg.Node("answering")], store={"asking": postgres_url, "answering": other}
    )
    async with bus:
        assert bus.store_of("asking") is bus.store_of("answering") and len(bus.stores) == 1


async def test_a_copy_from_below_the_floor_is_refused_by_a_bus_that_did_not_do_the_eviction(postgres_url: str) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    handled: list[Envelope] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        handled.append(ctx.envelope)
        await ctx.db.execute("insert into notes values (?)", (asked.n,))

    clock = FakeClock()
    evicting = PostgresStore(postgres_url, clock=clock)
    async with fg.Bus("memory:", nodes=[asking, answering], store=postgres_url, clock=clock) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        await clock.advance(300)
        await evicting.open()
        try:
            assert await evicting.evict("answering", clock.time() - 120, 10) == 1
        finally:
            await evicting.close()
        # As a replay, since the broker's own window is not the subject.
        await bus.transport.publish([msgspec.structs.replace(handled[0], replay=1)])
        await bus.idle(timeout=LONG)
        assert await rows(bus) == [1]
        [letter] = await bus.dead_letters()
        assert letter.error.startswith("BelowFloor")
