"""A try is a scope: whatever a handler starts, cancels or forgets, the effects of its message happen once.

Each test runs on SQLite and on PostgreSQL.
"""

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

import faregate as fg
from faregate.core.work import AlreadyHandled
from faregate.testing import FakeClock
from faregate.testing.clock import rest
from tests.core.rig import LONG, Asked, committed, count, numbers, the_store

TABLE = "create table if not exists notes(n integer, part text)"
INSERT = "insert into notes values (?, ?)"
NOTES = "select n, part from notes order by n, part"


class Answered(fg.Event):
    part: str


def nodes() -> tuple[fg.Node, fg.Node]:
    return fg.Node("asking"), fg.Node("answering", schema=TABLE)


async def test_a_task_of_a_failed_try_writes_and_publishes_nothing_in_the_next_one(store_url: str) -> None:
    asking, answering = nodes()
    second_try, left_behind = asyncio.Event(), list[BaseException]()
    tries = 0
    heard: list[str] = []

    @answering.on(Asked, source="asking", retry=fg.Retry(1, 0))
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            database = ctx.db

            async def late() -> None:
                await second_try.wait()
                for use in (
                    lambda: database.execute(INSERT, (asked.n, "late")),
                    lambda: ctx.db.execute(INSERT, (asked.n, "late")),
                    lambda: ctx.publish(Answered(part="late")),
                ):
                    try:
                        await use()  # type: ignore[misc]
                    except fg.TryEnded as exc:
                        left_behind.append(exc)

            await ctx.db.execute(INSERT, (asked.n, "first"))
            ctx.publish(Answered(part="first"))
            forgotten.append(asyncio.create_task(late()))
            raise RuntimeError("a part failed")
        await ctx.db.execute(INSERT, (asked.n, "second"))
        ctx.publish(Answered(part="second"))
        second_try.set()
        await forgotten[0]

    @asking.on(Answered, source="answering")
    async def hear(answered: Answered, ctx: fg.Context) -> None:
        heard.append(answered.part)

    forgotten: list[asyncio.Task[None]] = []
    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert await committed(bus, NOTES) == [(1, "second")]
        assert heard == ["second"]
        assert len(left_behind) == 3
        assert bus.alarms["left-behind"] == 1


async def test_without_a_store_a_task_of_a_failed_try_publishes_nothing_in_the_next_one() -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")
    tries = 0
    heard: list[str] = []
    first: list[fg.Context] = []

    @answering.on(Asked, source="asking", retry=fg.Retry(1, 0))
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal tries
        tries += 1
        first.append(ctx)
        if tries == 1:
            raise RuntimeError("a part failed")
        with pytest.raises(fg.TryEnded):
            first[0].publish(Answered(part="late"))
        ctx.publish(Answered(part="second"))

    @asking.on(Answered, source="answering")
    async def hear(answered: Answered, ctx: fg.Context) -> None:
        heard.append(answered.part)

    async with fg.Bus("memory:", nodes=[asking, answering]) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert heard == ["second"]


async def test_a_middleware_keeps_its_context_over_the_tries_of_the_handler(store_url: str) -> None:
    asking, answering = nodes()
    tries = 0

    @answering.use
    async def wrote(ctx: fg.Context, call_next: Any) -> None:
        await call_next()
        await ctx.db.execute(INSERT, (0, "middleware"))

    @answering.on(Asked, source="asking", retry=fg.Retry(1, 0))
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal tries
        tries += 1
        await ctx.db.execute(INSERT, (asked.n, f"try {tries}"))
        if tries == 1:
            raise RuntimeError("a part failed")

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert await committed(bus, NOTES) == [(0, "middleware"), (1, "try 2")]


async def test_a_statement_that_waits_for_the_store_when_its_try_fails_opens_nothing() -> None:
    """On SQLite one transaction at a time runs: whoever waits would open the next one, and nobody would end it."""
    asking, answering = nodes()
    failed = asyncio.Event()

    @answering.on(Asked, source="asking", retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        async def fail() -> None:
            await rest()
            failed.set()
            raise RuntimeError("the bank does not answer")

        await asyncio.gather(ctx.db.execute(INSERT, (asked.n, "late")), fail())

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        writer = the_store(bus).transaction()
        await writer.begin()
        await bus.publish(Asked(n=1), node="asking")
        await asyncio.wait_for(failed.wait(), LONG)
        await rest()
        await writer.roll_back()
        await bus.idle(timeout=LONG)
        assert await committed(bus, NOTES) == []
        assert bus.outcomes()["dead"] == 1


async def test_a_forgotten_statement_counts_with_its_try_or_not_at_all(store_url: str) -> None:
    asking, answering = nodes()
    forgotten: list[asyncio.Task[int]] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        forgotten.append(asyncio.create_task(ctx.db.execute(INSERT, (asked.n, "forgotten"))))
        if asked.n % 2:
            await asyncio.sleep(0)

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish_many(numbers(20), node="asking")
        await bus.idle(timeout=LONG)
        ends = await asyncio.gather(*forgotten, return_exceptions=True)
        written = {n for n, _ in await committed(bus, NOTES)}
        assert len(written) == sum(end == 1 for end in ends)
        assert all(end == 1 or isinstance(end, fg.TryEnded) for end in ends)
        assert await count(bus, "ledger") == 20


async def test_a_cancelled_first_statement_leaves_no_effect_without_its_ledger_row(store_url: str) -> None:
    asking, answering = nodes()
    late = 0

    @answering.on(Asked, source="asking", order=fg.Parallel(20), retry=fg.Retry(20, 0))
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal late
        look_up = asyncio.create_task(ctx.db.fetchone("select 1"))
        for _ in range(asked.n % 25):  # so that it is cancelled at all the places where it may wait
            await asyncio.sleep(0)
        late += look_up.cancel()
        await asyncio.wait([look_up])
        await ctx.db.execute(INSERT, (asked.n, "once"))

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish_many(numbers(100), node="asking")
        await bus.idle(timeout=LONG)
        assert late
        assert await count(bus, "ledger") == 100
        assert await committed(bus, NOTES) == [(n, "once") for n in range(100)]


@pytest.mark.usefixtures("one_batch")
async def test_a_handler_that_takes_the_drivers_connection_is_alone_in_its_transaction(store_url: str) -> None:
    asking, answering = nodes()
    together: list[int] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute(INSERT, (asked.n, "plain"))
        if asked.n == 3:
            assert ctx.db.raw is not None
            assert ctx._work is not None and ctx._work.unit is not None
            together.append(len(ctx._work.unit.works))

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        assert together == [1]
        assert await committed(bus, NOTES) == [(n, "plain") for n in range(6)]


async def test_a_connection_that_a_task_still_has_is_not_used_again(store_url: str) -> None:
    asking, answering = nodes()
    go_on = asyncio.Event()
    kept: list[Any] = []
    forgotten: list[asyncio.Task[None]] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        connection = ctx.db.raw
        kept.append(connection)

        async def late() -> None:
            await go_on.wait()
            result = connection.execute(f"insert into notes values ({asked.n}, 'late')")
            if not store_url.startswith("sqlite"):
                await result

        if asked.n == 1:
            forgotten.append(asyncio.create_task(late()))

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        go_on.set()
        [end] = await asyncio.gather(*forgotten, return_exceptions=True)
        assert isinstance(end, Exception)
        await bus.publish(Asked(n=2), node="asking")
        await bus.idle(timeout=LONG)
        assert kept[0] is not kept[-1]
        assert await committed(bus, NOTES) == []
        assert await count(bus, "ledger") == 2


async def test_a_handler_that_catches_everything_is_still_recognised_as_a_copy(store_url: str) -> None:
    asking, answering = nodes()
    heard: list[str] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        try:
            await ctx.db.execute(INSERT, (asked.n, "once"))
        except BaseException:
            pass
        return Answered(part="once")

    @asking.on(Answered, source="answering")
    async def hear(answered: Answered, ctx: fg.Context) -> None:
        heard.append(answered.part)

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish(Asked(n=1), node="asking", idempotency_key="one")
        await bus.idle(timeout=LONG)
        async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as other:
            store = the_store(other)
            real, blind = store.known, True

            async def known(node: str, message_ids: Any) -> Any:
                return {} if blind else await real(node, message_ids)

            store.known = known  # type: ignore[method-assign]
            await other.publish(Asked(n=1), node="asking", idempotency_key="one")
            await other.idle(timeout=LONG)
            assert {name: n for name, n in other.outcomes().items() if n} == {"duplicate": 1}
        assert await committed(bus, NOTES) == [(1, "once")]
        assert heard == ["once"]


async def test_a_forgotten_statement_that_finds_the_duplicate_ends_its_message_as_one(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering = nodes()
    statements: list[asyncio.Task[int]] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        statement = asyncio.create_task(ctx.db.execute(INSERT, (asked.n, "once")))
        await (asyncio.sleep(0) if statements else statement)  # the second has begun: it opens the transaction
        statements.append(statement)

    for _ in range(2):
        async with fg.Bus("memory:", nodes=[asking, answering], store={"answering": store_url}) as bus:

            async def known(node: str, message_ids: Any) -> Any:
                return {}  # the other copy is not committed yet

            monkeypatch.setattr(the_store(bus), "known", known)
            await bus.publish(Asked(n=1), node="asking", idempotency_key="one")
            await bus.idle(timeout=LONG)
            outcomes = {name: n for name, n in bus.outcomes().items() if n}
            assert await committed(bus, NOTES) == [(1, "once")]
    assert outcomes == {"duplicate": 1}
    assert statements[0].result() == 1 and isinstance(statements[1].exception(), AlreadyHandled)


async def test_a_thread_that_a_plain_handler_left_behind_writes_nothing(store_url: str) -> None:
    asking, answering = nodes()
    go_on, ends = threading.Event(), list[BaseException]()
    threads: list[threading.Thread] = []
    tries = 0

    @answering.on(Asked, source="asking", retry=fg.Retry(1, 0))
    def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal tries
        tries += 1

        def late() -> None:
            go_on.wait(LONG)
            try:
                ctx.db.execute(INSERT, (asked.n, "late"))
            except fg.TryEnded as exc:
                ends.append(exc)

        ctx.db.execute(INSERT, (asked.n, f"try {tries}"))
        if tries == 1:
            threads.append(threading.Thread(target=late))
            threads[0].start()
            raise RuntimeError("a part failed")
        go_on.set()
        threads[0].join(LONG)

    told: list[str] = []
    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        bus.on_alarm(lambda alarm: told.append(threading.current_thread().name))
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert await committed(bus, NOTES) == [(1, "try 2")]
        assert len(ends) == 1
        assert told == ["MainThread"]


@pytest.mark.parametrize(
    "odd",
    [
        StopIteration(),
        SystemExit(3),
        GeneratorExit(),
        RuntimeError("\ud800"),
        BaseExceptionGroup("parts", [KeyboardInterrupt()]),
        BaseExceptionGroup("parts", [ValueError(), KeyboardInterrupt()]),
    ],
    ids=lambda odd: type(odd).__name__,
)
@pytest.mark.parametrize("plain", [True, False])
async def test_whatever_a_handler_raises_ends_its_message_and_not_the_lane(
    store_url: str, odd: BaseException, plain: bool
) -> None:
    asking, answering = nodes()
    options: dict[str, Any] = {"source": "asking", "retry": None, "redeliver": None, "order": fg.Serial()}
    if plain:

        @answering.on(Asked, **options)
        def answer(asked: Asked, ctx: fg.Context) -> None:
            ctx.db.execute(INSERT, (asked.n, "written"))
            if asked.n == 1:
                raise odd
    else:

        @answering.on(Asked, **options)
        async def answer_soon(asked: Asked, ctx: fg.Context) -> None:
            await ctx.db.execute(INSERT, (asked.n, "written"))
            if asked.n == 1:
                raise odd

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish_many(numbers(3), node="asking")
        await bus.idle(timeout=LONG)
        assert await committed(bus, NOTES) == [(0, "written"), (2, "written")]
        [letter] = await bus.dead_letters()
        assert type(odd).__name__ in letter.error


async def test_plain_handlers_on_more_lanes_than_a_pool_has_threads_do_not_starve_each_other(store_url: str) -> None:
    asking = fg.Node("asking")
    answering = [fg.Node(f"answering{number}", schema=TABLE) for number in range(3)]
    for node in answering:

        @node.on(Asked, source="asking", order=fg.Parallel(40))
        def answer(asked: Asked, ctx: fg.Context) -> None:
            ctx.db.execute(INSERT, (asked.n, ctx.node))

    async with fg.Bus("memory:", nodes=[asking, *answering], store=store_url) as bus:
        await bus.publish_many(numbers(150), node="asking")
        await bus.idle(timeout=4 * LONG)
        assert len(await committed(bus, NOTES)) == 450


async def test_an_error_that_nobody_foresaw_costs_no_lane_and_no_message() -> None:
    asking, answering = nodes()
    clock = FakeClock()

    @answering.on(Asked, source="asking", order=fg.Serial())
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute(INSERT, (asked.n, "once"))

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", clock=clock) as bus:
        store = the_store(bus)
        real, errors = store.known, [LookupError("nobody thought of this")]

        async def known(node: str, message_ids: Any) -> Any:
            if errors:
                raise errors.pop()
            return await real(node, message_ids)

        store.known = known  # type: ignore[method-assign]
        await bus.publish_many(numbers(3), node="asking")
        await clock.advance(60)
        await bus.idle(timeout=LONG)
        assert await committed(bus, NOTES) == [(n, "once") for n in range(3)]
        assert {name: n for name, n in bus.outcomes().items() if n} == {"handled": 3}


FORKING = """
import asyncio, os, sys
import faregate as fg

class Asked(fg.Event):
    n: int

class Answered(fg.Event):
    n: int

store_url, how = sys.argv[1] or None, sys.argv[2]
schema = "create table if not exists notes(n integer, part text)" if store_url else None
asking, answering = fg.Node("asking"), fg.Node("answering", schema=schema)
heard = []

@answering.on(Asked, source="asking", retry=None, redeliver=None)
async def answer(asked: Asked, ctx: fg.Context):
    if store_url:
        await ctx.db.execute("insert into notes values (?, ?)", (asked.n, "before"))
    child = os.fork() if asked.n == 1 else None
    if child == 0:
        if how == "exits":
            os._exit(0)
        if how == "raises":
            raise RuntimeError("in the child")
        if how == "writes" and store_url:
            await ctx.db.execute("insert into notes values (?, ?)", (asked.n, "child"))
    elif child is not None:
        print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return Answered(n=asked.n)

@asking.on(Answered, source="answering")
async def hear(answered: Answered):
    heard.append(answered.n)

async def main():
    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url) as bus:
        await bus.publish_many([Asked(n=n) for n in range(3)], node="asking")
        await bus.idle(timeout=30)
        print("heard", sorted(heard), bus.outcomes()["handled"], flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "status"), [("exits", 0), ("returns", 70), ("raises", 70), ("writes", 70)])
@pytest.mark.parametrize("with_store", [True, False])
@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_a_process_forked_in_a_handler_never_comes_back_into_the_bus(
    store_url: str, how: str, status: int, with_store: bool, kind: str
) -> None:
    program = FORKING
    if kind == "def":
        program = program.replace("async def answer", "def answer").replace("await ctx.db", "ctx.db")
    run = [sys.executable, "-c", program, store_url if with_store else "", how]
    child = await asyncio.create_subprocess_exec(*run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = await asyncio.wait_for(child.communicate(), 2 * LONG)
    assert out.decode().splitlines() == [f"status {status}", "heard [0, 1, 2] 6"], err.decode()
    assert ("was forked in a handler" in err.decode()) == (status == 70)


@pytest.mark.parametrize("how", ["returns early", "calls at once"])
@pytest.mark.parametrize("with_store", [True, False])
async def test_a_middleware_that_does_not_await_the_handler_keeps_nothing_of_it(
    store_url: str, how: str, with_store: bool
) -> None:
    asking = fg.Node("asking")
    answering = fg.Node("answering", schema=TABLE if with_store else None)
    go_on, running = asyncio.Event(), asyncio.Event()
    left: list[asyncio.Task[None]] = []
    heard: list[str] = []

    @answering.use
    async def impatient(ctx: fg.Context, call_next: Any) -> None:
        if how == "calls at once":
            await asyncio.gather(call_next(), call_next())
        else:
            left.append(asyncio.create_task(call_next()))
            await running.wait()

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        if with_store:
            await ctx.db.execute(INSERT, (asked.n, "written"))
        running.set()
        await go_on.wait()
        return Answered(part="late")

    @asking.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard.append(answered.part)

    async with fg.Bus("memory:", nodes=[asking, answering], store=store_url if with_store else None) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        go_on.set()
        ends = await asyncio.gather(*left, return_exceptions=True)
        assert all(isinstance(end, fg.TryEnded) for end in ends)
        assert bus.outcomes()["dead"] == 1 and heard == []
        if with_store:
            [letter] = await bus.dead_letters()
            assert letter.error.startswith("PipelineMisused")
            assert await committed(bus, NOTES) == []


async def test_who_waits_for_a_bus_to_be_idle_is_told_when_it_is_stopped() -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> None:
        raise RuntimeError("comes again in 10 s")

    async with fg.Bus("memory:", nodes=[asking, answering]) as bus:
        await bus.publish(Asked(n=1), node="asking")
        waiting = asyncio.create_task(bus.idle())
        await rest()
        await bus.stop()
        with pytest.raises(fg.ConfigurationError, match="stopped"):
            await asyncio.wait_for(waiting, LONG)
