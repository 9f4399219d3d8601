"""A batch whose messages have no savepoints: what one of them spoils, the others do again, and nobody can tell."""

import asyncio
from collections import Counter
from functools import reduce
from operator import xor
from typing import Any
from uuid import UUID

import pytest

import faregate as fg
from tests.core.rig import INSERT, LONG, TABLE, Answered, Asked, committed, numbers, run


async def write(asked: Asked, ctx: fg.Context) -> Answered:
    await ctx.db.execute(INSERT, (asked.n,))
    return Answered(n=asked.n)


async def test_nobody_needs_a_savepoint_while_nothing_fails(url: str, units: list[tuple[int, bool]]) -> None:
    _, found = await run(url, write)
    assert found == ([*range(6)], [*range(6)])
    assert not any(savepoints for _, savepoints in units) and max(size for size, _ in units) > 1


@pytest.mark.parametrize("failing", ["before", "after", "statement"])
async def test_neighbours_of_a_failure_run_again_and_everything_is_there_once(
    url: str, units: list[tuple[int, bool]], failing: str
) -> None:
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        if asked.n == 3 and runs[3] == 1 and failing == "before":
            raise OSError("once")
        if asked.n == 3 and runs[3] == 1 and failing == "statement":
            await ctx.db.execute("insert into nowhere values (?)", (1,))
        answered = await write(asked, ctx)
        if asked.n == 3 and runs[3] == 1 and failing == "after":
            raise OSError("once")
        return answered

    bus, found = await run(url, handle)
    assert found == ([*range(6)], [*range(6)])
    assert bus.outcomes()["handled"] == 12 and bus.outcomes()["dead"] == 0
    assert runs[3] == 2
    if failing == "before":
        assert runs.total() == 7, "what wrote nothing spoils nothing"
    else:
        assert any(savepoints for _, savepoints in units), "the next batches are careful"


async def test_the_tries_are_those_of_the_policy(url: str) -> None:
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        answered = await write(asked, ctx)
        if asked.n == 3:
            raise OSError("always")
        return answered

    bus, found = await run(url, handle)
    assert found == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert runs[3] == 3 and bus.outcomes()["dead"] == 1
    assert all(runs[n] <= 2 for n in (0, 1, 2, 4, 5))


async def test_of_a_handler_that_a_middleware_calls_twice_the_last_run_counts(either_way: str) -> None:
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        await write(asked, ctx)
        return Answered(n=asked.n + 100 * (runs[asked.n] - 1))

    def twice(answering: fg.Node) -> None:
        @answering.use
        async def again(ctx: fg.Context, call_next: Any) -> None:
            await call_next()
            if ctx.message.n == 2:
                await call_next()

    _, (written, answers) = await run(either_way, handle, prepare=twice)
    assert written == [*range(6)]
    assert sorted(n % 100 for n in answers) == [*range(6)], "who shared a batch with it may have run again"
    assert 2 not in answers, "the first run's answer was sent"


async def test_a_middleware_that_swallows_errors_does_not_swallow_the_spoiling(either_way: str) -> None:
    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        answered = await write(asked, ctx)
        if asked.n == 3:
            raise OSError("always")
        return answered

    def hush(answering: fg.Node) -> None:
        @answering.use
        async def quiet(ctx: fg.Context, call_next: Any) -> None:
            try:
                await call_next()
            except BaseException:
                pass

    bus, found = await run(either_way, handle, prepare=hush, retry=None)
    assert found == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert bus.outcomes()["skipped"] == 1


async def test_cancelled_work_inside_a_batch_is_tried_again(url: str) -> None:
    runs: Counter[int] = Counter()

    async def handle(asked: Asked, ctx: fg.Context) -> Answered:
        runs[asked.n] += 1
        answered = await write(asked, ctx)
        if asked.n == 3 and runs[3] == 1:
            raise asyncio.CancelledError
        return answered

    _, found = await run(url, handle)
    assert found == ([*range(6)], [*range(6)])


async def test_a_ledger_row_keeps_how_many_messages_its_handler_sent_and_a_digest_of_their_ids(url: str) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("hearing")
    failed: set[int] = set()
    heard: dict[str, list[str]] = {}

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=fg.Retry(2, delay=0.001))
    async def answer(asked: Asked, ctx: fg.Context) -> list[Answered]:
        if asked.n != 5:  # which sends, and has nothing to write
            await ctx.db.execute(INSERT, (asked.n,))
        if asked.n == 4 and not failed:
            failed.add(4)
            ctx.publish(Answered(n=1000))
            raise OSError("once")
        return [Answered(n=asked.n) for _ in range(asked.n % 4)]

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered, ctx: fg.Context) -> None:
        heard.setdefault(str(ctx.causation_id), []).append(ctx.publication_id)

    async with fg.Bus("memory:", nodes=[asking, answering, hearing], store={"answering": url}) as bus:
        await bus.publish_many(numbers(8), node="asking")
        await bus.idle(timeout=LONG)
        rows = await committed(bus, "select message_id, sent, sent_ids from faregate_ledger")
    assert sorted(sent for _, sent, _ in rows) == [0, 0, 1, 1, 2, 2, 3, 3]
    for message_id, sent, combined in rows:
        known = heard.get(str(UUID(bytes=message_id)) if isinstance(message_id, bytes) else str(message_id), [])
        together = reduce(xor, (UUID(each).int for each in known), 0)
        assert (sent, int.from_bytes(combined or b"")) == (len(known), together)
