"""A batch whose messages have no savepoints: what one of them spoils, the others do again, and nobody can tell."""

import asyncio
import logging
from collections import Counter
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import faregate as fg
from faregate.core.feed import QueueFeed
from faregate.transports.memory import MemoryTransport
from tests.core.rig import INSERT, LONG, TABLE, Answered, Asked, committed, numbers, run

UNREADABLE: set[int] = set()
"""What the release of today cannot read."""


class Fragile(fg.Event):
    n: int

    def __post_init__(self) -> None:
        if self.n in UNREADABLE:
            raise ValueError("nobody can read this")


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


@pytest.mark.parametrize("how", ["execute", "write"])  # the row is recorded before the handler runs, or after it
async def test_a_ledger_row_keeps_how_many_messages_its_handler_sent_and_a_digest_of_their_ids(
    url: str, how: str
) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("hearing")
    failed: set[int] = set()
    heard: dict[str, list[str]] = {}

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=fg.Retry(2, delay=0.001))
    async def answer(asked: Asked, ctx: fg.Context) -> list[Answered]:
        if asked.n != 5 and how == "execute":  # which sends, and has nothing to write
            await ctx.db.execute(INSERT, (asked.n,))
        elif asked.n != 5:
            ctx.db.write(INSERT, (asked.n,))
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


async def test_an_unreadable_copy_leaves_the_ledger_row_of_the_handled_one_alone(
    either_way: str, units: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")
    runs: Counter[int] = Counter()

    @answering.on(Fragile, source="asking", order=fg.Parallel(1), redeliver=None)
    async def answer(fragile: Fragile) -> None:
        runs[fragile.n] += 1

    copy = fg.publish(Fragile(n=2), idempotency_key="two")
    async with fg.Bus("memory:", nodes=[asking, answering], store={"answering": either_way}) as bus:
        await bus.publish_many([copy], node="asking")
        await bus.idle(timeout=LONG)
    async with fg.Bus("memory:", nodes=[asking, answering], store={"answering": either_way}) as bus:
        with monkeypatch.context() as patch:
            patch.setattr("tests.core.test_batches.UNREADABLE", {2})
            await bus.publish_many([Fragile(n=0), Fragile(n=1), copy, Fragile(n=3), Fragile(n=4)], node="asking")
            await bus.idle(timeout=LONG)
        assert max(size for size, _ in units) > 2
        [letter] = await bus.dead_letters()
        await bus.replay(letter.message_id)
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["duplicate"] == 1, "its replay is recognised"
        assert await bus.dead_letters(status="open") == []
    assert runs == Counter(range(5))


@pytest.mark.parametrize("retry", [fg.Retry(2, delay=0.001), None], ids=["with tries", "without"])
async def test_a_message_that_fails_before_the_transaction_opened_leaves_the_row_of_a_faster_copy(
    either_way: str, units: list[tuple[int, bool]], retry: fg.Retry | None
) -> None:
    handled: list[tuple[str, int]] = []
    copy = fg.publish(Asked(n=2), idempotency_key="two")

    def nodes(place: str) -> list[fg.Node]:
        asking, answering = fg.Node("asking"), fg.Node("answering")

        @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=retry, redeliver=None)
        async def answer(asked: Asked) -> None:
            if asked.n == 2 and place == "here" and ("there", 2) not in handled:
                await there.publish_many([copy], node="asking")
                await there.idle(timeout=LONG)
                raise OSError("once")
            handled.append((place, asked.n))

        return [asking, answering]

    async with (
        fg.Bus("memory:", nodes=nodes("there"), store={"answering": either_way}) as there,
        fg.Bus("memory:", nodes=nodes("here"), store={"answering": either_way}) as here,
    ):
        await here.publish_many([*numbers(2), copy, *numbers(5)[3:]], node="asking")
        await here.idle(timeout=LONG)
        assert max(size for size, _ in units) > 2
        assert sorted(handled) == [*(("here", n) for n in (0, 1, 3, 4)), ("there", 2)]
        outcomes = {name: n for name, n in here.outcomes().items() if n}
        assert outcomes == {"handled": 4, "duplicate": 1} and await here.dead_letters() == []


@pytest.mark.usefixtures("one_batch")
async def test_without_a_store_a_publish_that_fails_repeats_only_its_own_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering"), fg.Node("hearing")
    runs: Counter[int] = Counter()
    heard: Counter[int] = Counter()
    plain, refused = MemoryTransport.publish, [0, 0]

    async def publish(transport: MemoryTransport, envelopes: Any) -> None:
        if refused and any(each.type == "Answered" and each.body == b'{"n":3}' for each in envelopes):
            refused.pop()  # with the others, and then by itself
            raise OSError("one of these is not taken")
        await plain(transport, envelopes)

    monkeypatch.setattr(MemoryTransport, "publish", publish)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), redeliver=fg.Redeliver(0.01))
    async def answer(asked: Asked) -> Answered:
        runs[asked.n] += 1
        return Answered(n=asked.n)

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard[answered.n] += 1

    async with fg.Bus("memory:", nodes=[asking, answering, hearing]) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["redelivered"] == 1
    assert not refused and runs == Counter([*range(6), 3]) and heard == Counter(range(6))


@pytest.mark.usefixtures("one_batch")
async def test_without_a_store_what_has_ended_goes_out_while_a_slow_handler_holds_up_its_batch() -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering"), fg.Node("hearing")
    runs: Counter[int] = Counter()
    heard: Counter[int] = Counter()
    fast, gate = asyncio.Event(), asyncio.Event()

    @answering.on(Asked, source="asking", order=fg.Parallel(1))
    async def answer(asked: Asked) -> Answered:
        runs[asked.n] += 1
        if asked.n == 2:
            await gate.wait()
        return Answered(n=asked.n)

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard[answered.n] += 1
        if len(heard) == 2:
            fast.set()

    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=[asking, answering, hearing]) as bus:
        await bus.publish_many(numbers(4), node="asking")
        await fast.wait()
        assert heard == Counter([0, 1]) and not gate.is_set()
        gate.set()
        await bus.idle(timeout=LONG)
    assert runs == heard == Counter(range(4))


@pytest.mark.usefixtures("one_batch")
async def test_without_a_store_nothing_that_has_ended_runs_again_when_its_batch_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueFeed, "batch_seconds", LONG)  # nothing goes out before
    ended: Counter[int] = Counter()
    heard: Counter[int] = Counter()
    hanging = asyncio.Event()

    def nodes() -> list[fg.Node]:
        asking, answering, hearing = fg.Node("asking"), fg.Node("answering"), fg.Node("hearing")

        @answering.on(Asked, source="asking", order=fg.Parallel(1))
        async def answer(asked: Asked) -> Answered:
            if asked.n == 3 and not hanging.is_set():
                hanging.set()
                await asyncio.Event().wait()
            ended[asked.n] += 1
            return Answered(n=asked.n)

        @hearing.on(Answered, source="answering")
        async def hear(answered: Answered) -> None:
            heard[answered.n] += 1

        return [asking, answering, hearing]

    async with asyncio.timeout(LONG):
        async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes(), drain_seconds=0) as bus:
            await bus.publish_many(numbers(6), node="asking")
            await hanging.wait()
        assert ended.total() < 6
        async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes()) as bus:
            await bus.idle(timeout=LONG)
    assert ended == heard == Counter(range(6))


@pytest.mark.usefixtures("one_batch")
async def test_without_a_store_what_goes_out_when_its_batch_is_cancelled_goes_out_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(QueueFeed, "batch_seconds", 0.5)  # long enough for a batch on any machine
    asking, answering = fg.Node("asking"), fg.Node("answering")
    going, cancelled = asyncio.Event(), asyncio.Event()
    plain, sent = MemoryTransport.publish, list[list[bytes]]()

    async def publish(transport: MemoryTransport, envelopes: Any) -> None:
        answers = [each.body for each in envelopes if each.type == "Answered"]
        if not answers or answers == [b'{"n":0}']:  # which is alone: the others were not there yet
            return await plain(transport, envelopes)
        sent.append(answers)
        going.set()
        await cancelled.wait()
        for _ in range(10):  # every chance to begin a second time
            await asyncio.sleep(0)
        raise OSError("the transport is away")

    monkeypatch.setattr(MemoryTransport, "publish", publish)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None)
    async def answer(asked: Asked) -> Answered:
        if asked.n == 3:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return Answered(n=asked.n)

    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=[asking, answering], drain_seconds=0) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await going.wait()
    first, second = b'{"n":1}', b'{"n":2}'
    assert sent == [[first, second], [first], [second]], "together, and then each by itself"
    assert not [each for each in caplog.records if each.levelno > logging.WARNING]
