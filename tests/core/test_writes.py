"""`ctx.db.write`: what a handler writes without waiting goes out together, and nobody can tell but by the time."""

import asyncio
import contextlib
import sqlite3
from collections import Counter
from typing import Any

import psycopg
import pytest

import faregate as fg
from faregate.core import unit
from faregate.stores.postgres import transaction as postgres
from faregate.stores.postgres.connection import ReadyConnection
from faregate.stores.postgres.pipeline import Statement
from faregate.stores.postgres.transaction import PostgresTransaction
from faregate.stores.sqlite.transaction import SqliteTransaction
from tests.core.rig import INSERT, LONG, TABLE, Answered, Asked, dead_numbers, notes, numbers, run

COUNT = "select count(*) from notes where n = ?"
REFUSED = (psycopg.Error, sqlite3.Error)
EVERYTHING = ([*range(6)], [*range(6)])


async def write(asked: Asked, ctx: fg.Context) -> Answered:
    ctx.db.write(INSERT, (asked.n,))
    return Answered(n=asked.n)


async def test_what_is_written_is_committed_once_with_the_answers(
    either_way: str, units: list[tuple[int, bool]]
) -> None:
    _, found = await run(either_way, write)
    assert found == EVERYTHING
    assert max(size for size, _ in units) > 1


async def test_a_batch_that_only_writes_goes_out_in_one_pipeline(
    postgres_url: str, one_batch: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines, exchange = [], postgres.exchange

    async def noted(connection: ReadyConnection, statements: list[Statement]) -> Any:
        pipelines.append({statement.sql: len(statement.rows) for statement in statements})
        return await exchange(connection, statements)

    monkeypatch.setattr(postgres, "exchange", noted)
    _, (written, _) = await run(postgres_url, write, count=50)
    assert written == [*range(50)]
    [batch, *_] = [sent for sent in pipelines if sent.get(b"insert into notes values ($1)", 0) > 1]
    assert b"commit" in batch, "what a batch wrote did not go out with its commit"
    assert not any(b"update faregate_ledger" in sql for sql in batch), "what was sent was known before, and noted again"


async def test_a_handler_reads_what_it_wrote_before_and_what_others_of_its_batch_did(either_way: str) -> None:
    seen: list[tuple[int, int]] = []

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        ctx.db.write(INSERT, (asked.n,))
        ctx.db.write("update notes set n = n + 100 where n = ?", (asked.n,))
        [(own,)] = await ctx.db.fetchall(COUNT, (asked.n + 100,))
        [others] = await ctx.db.fetchone("select count(*) from notes")
        seen.append((own, others))
        assert await ctx.db.execute("update notes set n = n - 100 where n = ?", (asked.n + 100,)) == 1
        ctx.db.write("update notes set n = n where n = ?", (asked.n,))
        return Answered(n=asked.n)

    _, found = await run(either_way, handle)
    assert found == EVERYTHING
    assert seen == [(1, n + 1) for n in range(6)]


async def test_the_parameters_are_the_handlers_own_again_at_once(either_way: str) -> None:
    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        parameters = [asked.n]
        ctx.db.write(INSERT, parameters)
        parameters[0] = 1000
        return Answered(n=asked.n)

    _, found = await run(either_way, handle)
    assert found == EVERYTHING


async def test_a_list_among_the_parameters_may_change_afterwards(postgres_url: str, one_batch: None) -> None:
    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        many = [asked.n]
        ctx.db.write("insert into notes select unnest(?::int[])", (many,))
        many[0] = 1000
        return Answered(n=asked.n)

    _, found = await run(postgres_url, handle)
    assert found == EVERYTHING


@pytest.mark.parametrize("failing", ["handler", "statement"])
async def test_of_a_try_that_failed_nothing_is_sent_and_the_others_are_there_once(
    either_way: str, failing: str
) -> None:
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        ctx.db.write(INSERT, (asked.n,))
        if asked.n == 3 and runs[3] == 1:
            if failing == "handler":
                raise OSError("once")
            await ctx.db.execute("insert into nowhere values (1)")
        return Answered(n=asked.n)

    _, found = await run(either_way, handle)
    assert found == EVERYTHING
    assert runs[3] == 2


async def test_a_failure_that_sent_nothing_costs_the_others_nothing(url: str, units: list[tuple[int, bool]]) -> None:
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        ctx.db.write(INSERT, (asked.n,))
        if asked.n == 3 and runs[3] == 1:
            raise OSError("once")
        return Answered(n=asked.n)

    _, found = await run(url, handle)
    assert found == EVERYTHING
    assert runs.total() == 7 and not any(savepoints for _, savepoints in units)


@pytest.mark.parametrize("retry", [fg.Retry(2, delay=0.001), None])
async def test_a_refused_write_is_its_messages_failure_and_names_its_line(either_way: str, retry: Any) -> None:
    seen: list[BaseException] = []
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        ctx.db.write(INSERT, (asked.n,))
        if asked.n == 3:
            ctx.db.write("insert into nowhere values (?)", (1,))
        ctx.db.write("update notes set n = n where n = ?", (asked.n,))
        return Answered(n=asked.n)

    def watch(answering: fg.Node) -> None:
        async def note(ctx: fg.Context, call_next: Any) -> None:
            if ctx.error is not None:
                seen.append(ctx.error)
            await call_next()

        answering.use(note, after=True)

    bus, found = await run(either_way, handle, prepare=watch, retry=retry)
    assert found == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert bus.outcomes()["dead"] == 1 and bus.outcomes()["handled"] == 10
    [error] = seen
    assert isinstance(error, REFUSED)
    assert any("test_writes.py" in note and "nowhere" in note for note in error.__notes__)
    assert all(runs[n] <= 2 for n in (0, 1, 2, 4, 5))


async def test_a_refused_write_fails_its_message_though_the_handler_caught_the_error_at_another_statement(
    either_way: str,
) -> None:
    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        ctx.db.write(INSERT, (asked.n,))
        if asked.n == 3:
            ctx.db.write("insert into nowhere values (?)", (1,))
            ctx.db.write(INSERT, (300,))
            with contextlib.suppress(Exception):
                await ctx.db.fetchone("select 1")
        return Answered(n=asked.n)

    bus, found = await run(either_way, handle)
    assert found == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert bus.outcomes()["dead"] == 1


async def test_a_refused_write_is_retried_with_its_handler(either_way: str) -> None:
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        ctx.db.write(INSERT if asked.n != 3 or ctx.attempt > 1 else "insert into nowhere values (?)", (asked.n,))
        return Answered(n=asked.n)

    bus, found = await run(either_way, handle)
    assert found == EVERYTHING and bus.outcomes()["dead"] == 0


async def test_after_a_failure_the_next_batches_are_fast_again(url: str, units: list[tuple[int, bool]]) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def handle(asked: Asked, ctx: fg.Context) -> None:
        ctx.db.write(INSERT if asked.n != 3 else "insert into nowhere values (?)", (asked.n,))

    async with fg.Bus("memory:", nodes=[asking, answering], store=url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        assert any(savepoints for _, savepoints in units)
        assert await dead_numbers(bus) == [3]
        units.clear()
        await bus.publish_many([Asked(n=n) for n in range(6, 12)], node="asking")
        await bus.idle(timeout=LONG)
        assert await notes(bus) == [0, 1, 2, 4, 5, *range(6, 12)]
    assert units and not any(savepoints for _, savepoints in units)


@pytest.mark.parametrize("bound", ["_MOST_WRITES", "_MOST_WRITE_BYTES"])
async def test_when_much_waits_it_is_sent_before_the_handler_ends(
    store_url: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, bound, 5 if bound == "_MOST_WRITES" else 300)
    sent = asyncio.Event()
    for transaction in (SqliteTransaction, PostgresTransaction):
        taken = transaction.write

        def noted(self: Any, *args: Any, taken: Any = taken) -> None:
            taken(self, *args)
            sent.set()

        monkeypatch.setattr(transaction, "write", noted)

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        for n in range(20):
            ctx.db.write(INSERT, (asked.n * 20 + n,))
        await asyncio.wait_for(sent.wait(), LONG)
        return Answered(n=asked.n)

    _, (written, answers) = await run(store_url, handle, count=3)
    assert written == [*range(60)] and answers == [0, 1, 2]


async def test_a_write_that_was_refused_early_is_the_handlers_failure(
    either_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit, "_MOST_WRITES", 2)

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        ctx.db.write(INSERT, (asked.n,))
        if asked.n == 3:
            ctx.db.write("insert into nowhere values (?)", (1,))
            for _ in range(100):  # so that it is sent meanwhile
                await asyncio.sleep(0)
        return Answered(n=asked.n)

    bus, found = await run(either_way, handle)
    assert found == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert bus.outcomes()["dead"] == 1


async def test_a_handler_in_a_thread_writes_the_same_way(either_way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit, "_MOST_WRITES", 4)
    failed: set[int] = set()

    def handle(asked: Asked, ctx: fg.Context) -> Answered:
        ctx.db.write(INSERT, (asked.n,))
        assert ctx.db.fetchone(COUNT, (asked.n,)) == (1,)
        for _ in range(5):
            ctx.db.write("update notes set n = n where n = ?", (asked.n,))
        if asked.n == 3 and not failed:
            failed.add(3)
            raise OSError("once")
        return Answered(n=asked.n)

    _, found = await run(either_way, handle)  # type: ignore[arg-type]
    assert found == EVERYTHING


async def test_the_drivers_connection_comes_behind_what_was_written(store_url: str) -> None:
    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        ctx.db.write(INSERT, (asked.n,))
        raw = ctx.db.raw
        ctx.db.write(INSERT, (asked.n + 100,))
        raw = ctx.db.raw
        found = raw.execute(f"select count(*) from notes where n in ({asked.n}, {asked.n + 100})")
        cursor = found if isinstance(raw, sqlite3.Connection) else await found
        [seen] = cursor.fetchone() if isinstance(raw, sqlite3.Connection) else await cursor.fetchone()
        assert seen == 2
        return Answered(n=asked.n)

    _, (written, answers) = await run(store_url, handle, count=3)
    assert written == [0, 1, 2, 100, 101, 102] and answers == [0, 1, 2]


async def test_a_write_of_a_try_that_has_ended_is_refused(store_url: str) -> None:
    kept: list[Any] = []

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        kept.append(ctx.db)
        return await write(asked, ctx)

    _, found = await run(store_url, handle)
    assert found == EVERYTHING
    with pytest.raises(fg.TryEnded):
        kept[0].write(INSERT, (1000,))


async def test_what_a_middleware_writes_is_committed_and_undone_with_its_message(either_way: str) -> None:
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        if asked.n == 3 and runs[3] == 1:
            raise OSError("once")
        return Answered(n=asked.n)

    def prepare(answering: fg.Node) -> None:
        @answering.use
        async def around(ctx: fg.Context, call_next: Any) -> None:
            ctx.db.write(INSERT, (ctx.message.n,))
            await call_next()
            ctx.db.write(INSERT, (ctx.message.n + 100,))

    _, (written, answers) = await run(either_way, handle, prepare=prepare)
    assert written == [*range(6), *range(100, 106)] and answers == [*range(6)]


async def test_a_write_that_ends_the_transaction_is_refused(either_way: str) -> None:
    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        ctx.db.write(INSERT, (asked.n,))
        if asked.n == 3:
            ctx.db.write("commit")
        return Answered(n=asked.n)

    bus, found = await run(either_way, handle)
    assert found == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert bus.outcomes()["dead"] == 1


async def test_a_statement_without_await_is_a_failure_and_nothing_of_it_stays(
    either_way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        await ctx.db.execute(INSERT, (asked.n,))
        if asked.n % 2:
            ctx.db.execute("insert into notes values (?)", (100 + asked.n,))
        return Answered(n=asked.n)

    bus, found = await run(either_way, handle)
    assert found == ([0, 2, 4], [0, 2, 4])
    assert bus.alarms["dead-letter"] == 3
    assert caplog.text.count("ctx.db.execute('insert into notes values (?)', …) without await") == 3


async def test_statements_that_never_began_because_they_were_cancelled_are_none_that_was_forgotten(
    either_way: str,
) -> None:
    async def fail() -> None:
        raise OSError("the other one")

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        with contextlib.suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(ctx.db.execute(INSERT, (1000,)))
        for _ in range(100):
            await ctx.db.fetchone(COUNT, (asked.n,))
        await ctx.db.execute(INSERT, (asked.n,))
        return Answered(n=asked.n)

    _, (written, answered) = await run(either_way, handle, count=3)
    assert [n for n in written if n < 1000] == answered == [0, 1, 2]
