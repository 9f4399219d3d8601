"""The transaction of a handler: whoever misuses or loses it pays with its own message and with no other."""

import asyncio
import inspect
from typing import Any

import msgspec
import psycopg
import pytest

import faregate as fg
from faregate.errors import StoreConflict
from faregate.message import Envelope
from faregate.testing import FakeClock
from faregate.testing.clock import rest
from tests.core.rig import INSERT, LONG, TABLE, Answered, Asked, count, dead_numbers, notes, numbers, the_store


async def test_two_first_statements_at_once_share_one_transaction_while_the_writer_is_busy() -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    started = asyncio.Event()

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        started.set()
        await asyncio.gather(ctx.db.execute(INSERT, (asked.n,)), ctx.db.execute(INSERT, (asked.n + 100,)))

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        writer = the_store(bus).transaction()
        await writer.begin()
        await bus.publish(Asked(n=1), node="asking")
        await asyncio.wait_for(started.wait(), LONG)
        await rest()  # both statements wait for the writer's turn now
        await writer.roll_back()
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == 1
        assert await notes(bus) == [1, 101]


@pytest.mark.parametrize("asks", ["before", "after"])
@pytest.mark.parametrize("many", [1, 6])
async def test_what_a_middleware_did_before_it_asked_for_the_connection_happens_once(
    store_url: str, asks: str, many: int
) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("hearing")
    heard: list[int] = []

    @answering.use
    async def count(ctx: fg.Context, call_next: Any) -> None:
        if asks == "after":
            await call_next()
        ctx.publish(Answered(n=ctx.message.n))
        ctx.db.write(INSERT, (ctx.message.n,))
        assert ctx.db.raw is not None
        if asks == "before":
            await call_next()

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> Answered:
        return Answered(n=asked.n + 100)

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard.append(answered.n)

    async with fg.Bus("memory:", nodes=[asking, answering, hearing], store=store_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(many), node="asking")
        await bus.idle(timeout=LONG)
        assert await notes(bus) == [*range(many)]
    assert sorted(heard) == [*range(many), *range(100, 100 + many)]


async def test_the_connection_asked_for_in_a_task_group_is_given_at_the_second_run() -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    runs = 0

    @answering.on(Asked, source="asking", retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal runs
        runs += 1

        async def write() -> None:
            ctx.db.raw.execute(INSERT, (asked.n,))

        async with asyncio.TaskGroup() as group:
            group.create_task(write())

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert bus.outcomes() == {
            "handled": 1,
            "skipped": 0,
            "filtered": 0,
            "duplicate": 0,
            "redelivered": 0,
            "dead": 0,
        }
        assert runs == 2 and await notes(bus) == [1]


async def test_a_store_that_gives_way_again_and_again_uses_up_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")
    looked = 0

    @answering.on(Asked, source="asking", retry=fg.Retry(1, delay=0.001), redeliver=None)
    async def answer(asked: Asked) -> None: ...

    async def known(*_: Any) -> Any:
        nonlocal looked
        looked += 1
        raise StoreConflict("held")

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        monkeypatch.setattr(the_store(bus), "known", known)
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert looked == 2
        assert letter.error.startswith("StoreConflict: held")


@pytest.mark.services
@pytest.mark.parametrize("together", [1, 6])
@pytest.mark.usefixtures("one_batch")
async def test_a_handler_that_catches_an_sql_error_and_goes_on_is_told_so_and_nobody_else_is_lost(
    together: int, postgres_url: str
) -> None:
    schema = f"{TABLE}; create table keys(id integer primary key); insert into keys values (1)"
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=schema)
    guilty = together // 2

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute(INSERT, (asked.n,))
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
        assert await notes(bus) == [n for n in range(together) if n != guilty]
        assert bus.outcomes()["handled"] == together - 1


@pytest.mark.services
@pytest.mark.usefixtures("one_batch")
async def test_a_statement_that_may_fail_inside_the_drivers_own_savepoint_does_no_harm(postgres_url: str) -> None:
    schema = f"{TABLE}; create table keys(id integer primary key); insert into keys values (1)"
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=schema)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute(INSERT, (asked.n,))
        try:
            async with ctx.db.raw.transaction():
                await ctx.db.execute("insert into keys values (1)")
        except psycopg.errors.UniqueViolation:
            pass

    async with fg.Bus("memory:", nodes=[asking, answering], store=postgres_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
        assert await notes(bus) == [0, 1, 2, 3, 4, 5]


async def test_two_first_statements_at_once_share_one_transaction(store_url: str) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

    @answering.on(Asked, source="asking", order=fg.Parallel(8), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await asyncio.gather(ctx.db.execute(INSERT, (asked.n,)), ctx.db.execute(INSERT, (asked.n + 100,)))

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(40), node="asking")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
        assert await notes(bus) == [*range(40), *range(100, 140)]


@pytest.mark.usefixtures("one_batch")
async def test_an_error_that_comes_up_at_the_commit_is_judged_by_the_failure_policy(store_url: str) -> None:
    schema = (
        "create table if not exists parents(id integer primary key);"
        "create table if not exists notes(n integer references parents(id) deferrable initially deferred)"
    )
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=schema)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        if asked.n == 3:
            await ctx.db.execute("insert into notes values (7)")

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert bus.outcomes()["handled"] == 5 and bus.outcomes()["dead"] == 1
        assert letter.error.startswith(("IntegrityError: FOREIGN KEY", "ForeignKeyViolation"))
        assert await dead_numbers(bus) == [3]
        assert await notes(bus) == []


async def call(connection: Any, method: str) -> None:
    """On the driver's own connection, which answers at once or is awaited."""
    result = getattr(connection, method)()
    if inspect.isawaitable(result):
        await result


async def test_a_handler_that_closes_the_connection_ends_as_a_dead_letter_and_hurts_nobody_else(
    store_url: str,
) -> None:
    asking, answering, other = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("other")
    heard: list[int] = []

    @answering.on(Asked, source="asking", retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        await ctx.db.execute(INSERT, (asked.n,))
        if asked.n == 3:
            await call(ctx.db.raw, "close")
        return Answered(n=asked.n)

    @other.on(Asked, source="asking", retry=None, redeliver=None)
    async def note(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute(INSERT, (asked.n + 100,))

    @other.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard.append(answered.n)

    async with fg.Bus("memory:", nodes=[asking, answering, other], store=store_url, drain_seconds=1) as bus:
        await bus.publish(Asked(n=3), node="asking")
        await bus.idle(timeout=LONG)
        await bus.publish(Asked(n=4), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert letter.node == "answering" and letter.error.startswith("TransactionEnded")
        assert await notes(bus) == [4, 103, 104]
        assert heard == [4]
        assert dict(bus.alarms) == {"dead-letter": 1}


MISUSES = [
    ("close", "ledger"),
    ("close", "tokens"),
    ("close", "off"),
    ("commit", "ledger"),
    ("commit", "tokens"),
    ("rollback", "ledger"),
]
"""Without deduplication, who was committed behind our back is doubled, as documented."""


@pytest.mark.usefixtures("one_batch")
@pytest.mark.parametrize(("how", "dedup"), MISUSES)
async def test_who_shares_a_batch_with_a_handler_that_ends_the_transaction_is_handled_once(
    how: str, dedup: str, store_url: str
) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("hearing")
    heard: list[int] = []

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard.append(answered.n)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), dedup=dedup)
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        await ctx.db.execute(INSERT, (asked.n,))
        if asked.n == 3:
            await call(ctx.db.raw, how)
        return Answered(n=asked.n)

    async with fg.Bus("memory:", nodes=[asking, answering, hearing], store=store_url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert letter.error.startswith("TransactionEnded")
        assert letter.tries == 1, "a misuse is not tried again"
        assert await dead_numbers(bus) == [3]
        # What the handler committed itself, against the rules, nobody can take back.
        assert [n for n in await notes(bus) if n != 3 or how != "commit"] == [0, 1, 2, 4, 5]
        assert sorted(heard) == [0, 1, 2, 4, 5]


async def test_a_copy_from_below_the_floor_is_refused_by_a_bus_that_did_not_do_the_eviction(store_url: str) -> None:
    def nodes() -> list[fg.Node]:
        asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

        @answering.on(Asked, source="asking")
        async def answer(asked: Asked, ctx: fg.Context) -> None:
            handled.append(ctx.envelope)
            await ctx.db.execute(INSERT, (asked.n,))

        return [asking, answering]

    handled: list[Envelope] = []
    clock = FakeClock()
    async with (
        fg.Bus("memory:", nodes=nodes(), store=store_url, clock=clock) as bus,
        fg.Bus("memory:", nodes=nodes(), store=store_url, clock=clock, retain_ledger=120) as evicting,
    ):
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        await clock.advance(300)
        await evicting.idle(timeout=LONG)
        assert await count(bus, "ledger") == 0
        # As a replay, since the broker's own window is not the subject.
        await bus.transport.publish([msgspec.structs.replace(handled[0], replay=1)])
        await bus.idle(timeout=LONG)
        assert await notes(bus) == [1]
        [letter] = await bus.dead_letters()
        assert letter.error.startswith("BelowFloor")
