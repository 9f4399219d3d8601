"""Middlewares before and after the handler; those around what goes out are in `test_outgoing_middleware`."""

from collections import Counter
from typing import Any

import pytest

import faregate as fg
from faregate.ids import message_id
from faregate.testing.clock import FakeClock
from faregate.transports.memory import MemoryTransport
from tests.core.rig import LONG, Asked, committed, numbers


class OrderPlaced(fg.Event):
    order_id: str


class Noted(fg.Event):
    text: str


class ChargeCard(fg.Command):
    order_id: str


async def test_middlewares_wrap_the_handler_in_the_order_they_were_added() -> None:
    log: list[str] = []
    billing = fg.Node("billing")

    async def outer(ctx: fg.Context, call_next: Any) -> None:
        log.append("outer in")
        await call_next()
        log.append("outer out")

    async def inner(ctx: fg.Context, call_next: Any) -> None:
        log.append("inner in")
        await call_next(ctx)
        log.append("inner out")

    billing.use(outer)
    billing.use(inner)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        log.append("handler")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.outcomes()["handled"] == 1
    assert log == ["outer in", "inner in", "handler", "inner out", "outer out"]


async def test_a_middleware_that_does_not_call_on_settles_the_message_as_skipped() -> None:
    handled: list[str] = []
    settled: list[str] = []
    billing = fg.Node("billing")

    async def only_even(ctx: fg.Context, call_next: Any) -> None:
        if int(ctx.headers["number"]) % 2 == 0:
            await call_next()

    async def note_outcome(ctx: fg.Context, call_next: Any) -> None:
        settled.append(ctx.outcome)
        await call_next()

    billing.use(only_even)
    billing.use(note_outcome, after=True)

    @billing.on(OrderPlaced, source="shop", order=fg.Serial())
    async def bill(order: OrderPlaced) -> Any:
        handled.append(order.order_id)
        return Noted(text=order.order_id)

    async with fg.testing.bench(billing) as bench:
        for number in range(4):
            await bench.publish(OrderPlaced(order_id=str(number)), headers={"number": str(number)})
        await bench.settle()
        outcomes = bench.outcomes()
        assert (outcomes["handled"], outcomes["skipped"], outcomes["dead"]) == (2, 2, 0)
        assert bench.sent() == [Noted(text="0"), Noted(text="2")]
        assert bench.dead_letters() == []
    assert handled == ["0", "2"]
    assert settled == ["handled", "skipped", "handled", "skipped"]


async def test_calling_on_again_runs_the_handler_again_and_keeps_the_last_outputs() -> None:
    runs = 0
    billing = fg.Node("billing")

    async def twice(ctx: fg.Context, call_next: Any) -> None:
        await call_next()
        await call_next()

    billing.use(twice)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        nonlocal runs
        runs += 1
        return Noted(text=f"run {runs}")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="run 2")]
        assert bench.outcomes()["handled"] == 1
    assert runs == 2


async def test_a_middleware_may_catch_the_handlers_error_and_try_again() -> None:
    runs = 0
    caught: list[str] = []
    billing = fg.Node("billing")

    async def again(ctx: fg.Context, call_next: Any) -> None:
        try:
            await call_next()
        except RuntimeError as error:
            caught.append(str(error))
            await call_next()

    billing.use(again)

    @billing.on(OrderPlaced, source="shop", retry=fg.Retry(2, delay=1), redeliver=None)
    async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        nonlocal runs
        runs += 1
        ctx.publish(Noted(text=f"run {runs}"))
        if runs <= 3:
            raise RuntimeError(f"run {runs} failed")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="run 4")]
        assert bench.outcomes()["handled"] == 1
        assert bench.dead_letters() == []
    assert caught == ["run 3 failed"], "errors reach the middleware after the in-memory retries"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_middlewares_exception_aborts_the_unit_of_work(when: str) -> None:
    billing = fg.Node("billing", schema="create table if not exists bills(order_id text)")

    async def broken(ctx: fg.Context, call_next: Any) -> None:
        if when == "after":
            await call_next()
        raise LookupError("middleware is broken")

    billing.use(broken)

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        await ctx.db.execute("insert into bills values (?)", (order.order_id,))
        return Noted(text="never sent")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == []
        [dead] = bench.dead_letters()
        assert bench.outcomes()["handled"] == 0
        assert await committed(bench.bus, "select * from bills") == []
    assert "LookupError" in dead.error
    assert "middleware is broken" in dead.error


async def test_a_middlewares_exception_follows_the_failure_policy() -> None:
    passes: list[int] = []
    billing = fg.Node("billing")

    async def shaky(ctx: fg.Context, call_next: Any) -> None:
        passes.append(ctx.redeliveries)
        if ctx.redeliveries == 0:
            raise LookupError("not yet")
        await call_next()

    billing.use(shaky)

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=fg.Redeliver(30))
    async def bill(order: OrderPlaced) -> Any:
        return Noted(text="sent")

    async with fg.testing.bench(billing) as bench:
        start = bench.clock.time()
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="sent")]
        assert bench.clock.time() - start >= 30
    assert passes == [0, 1]


async def test_an_after_middleware_sees_every_outcome() -> None:
    seen: list[str] = []
    billing = fg.Node("billing")

    async def gate(ctx: fg.Context, call_next: Any) -> None:
        if "skip" not in ctx.headers:
            await call_next()

    async def note(ctx: fg.Context, call_next: Any) -> None:
        seen.append(ctx.outcome)
        await call_next()

    billing.use(gate)
    billing.use(note, after=True)

    @billing.on(OrderPlaced, source="shop", order=fg.Serial(), retry=None, redeliver=fg.Redeliver(10))
    async def bill(order: OrderPlaced) -> None:
        if order.order_id == "bad":
            raise RuntimeError("bad")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="good"))
        await bench.settle()
        await bench.publish(OrderPlaced(order_id="skipped"), headers={"skip": "yes"})
        await bench.settle()
        await bench.publish(OrderPlaced(order_id="bad"))
        await bench.settle()
        assert bench.outcomes() == {
            "handled": 1,
            "skipped": 1,
            "filtered": 0,
            "duplicate": 0,
            "redelivered": 1,
            "dead": 1,
        }
    assert seen == ["handled", "skipped", "redelivered", "dead"]


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_every_dead_letter_sounds_an_alarm_and_reaches_the_after_middlewares(store: str | None) -> None:
    """A message that fails, one that cannot be read, and one that the broker takes out before anybody sees it."""
    seen: list[tuple[Any, str | None, str]] = []
    alarms: list[fg.Alarm] = []
    billing = fg.Node("billing")

    async def note(ctx: fg.Context, call_next: Any) -> None:
        order = None if ctx.message is None else ctx.message.order_id
        seen.append((order, ctx.outcome, type(ctx.error).__name__))
        await call_next()

    billing.use(note, after=True)

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None, expires=5)
    async def bill(order: OrderPlaced) -> None:
        raise RuntimeError("bad")

    clock = FakeClock()
    transport = MemoryTransport(clock=clock)
    async with fg.Bus(transport, nodes=[billing, fg.Node("shop")], store=store, clock=clock) as bus:
        bus.on_alarm(alarms.append)
        failing = await bus.publish(OrderPlaced(order_id="1"), node="shop")
        await clock.advance(1)
        unreadable = "00000000-0000-7000-8000-000000000000"
        await transport.publish([fg.Envelope(unreadable, "OrderPlaced", "event", "shop", b"garbage")])
        await clock.advance(1)
        await bus.pause(billing, OrderPlaced)
        late = await bus.publish(OrderPlaced(order_id="2"), node="shop")
        await clock.advance(6)
        assert [record.reason for record in await bus.dead_letters()] == ["failed", "undecodable", "expired"]
        assert bus.outcomes()["dead"] == bus.alarms["dead-letter"] == 3
    assert seen == [("1", "dead", "RuntimeError"), (None, "dead", "Undecodable"), ("2", "dead", "Expired")]
    assert [(alarm.kind, alarm.node, alarm.message_id) for alarm in alarms] == [
        ("dead-letter", "billing", message_id(publication, "billing")) for publication in (failing, unreadable, late)
    ]
    assert "is a dead letter (after all its tries) of bill at billing" in alarms[0].text


async def test_a_failing_after_middleware_cannot_undo_a_settled_message() -> None:
    billing = fg.Node("billing")

    async def broken(ctx: fg.Context, call_next: Any) -> None:
        raise LookupError("too late to matter")

    billing.use(broken, after=True)

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    async def bill(order: OrderPlaced) -> Any:
        return Noted(text=order.order_id)

    async with fg.testing.bench(billing) as bench:
        for number in range(3):
            await bench.publish(OrderPlaced(order_id=str(number)))
        await bench.settle()
        assert sorted(note.text for note in bench.sent(Noted)) == ["0", "1", "2"]
        assert bench.outcomes()["handled"] == 3
        assert bench.dead_letters() == []


@pytest.mark.parametrize("store", [True, False], ids=["with a store", "without"])
@pytest.mark.parametrize("failures", [1, 3], ids=["a try that passes", "all tries"])
async def test_a_middleware_that_catches_errors_sees_only_the_last_try_also_among_others(
    url: str, store: bool, failures: int
) -> None:
    runs: Counter[int] = Counter()
    seen: list[tuple[int, int]] = []
    asking, answering = fg.Node("asking"), fg.Node("answering")

    @answering.use
    async def note(ctx: fg.Context, call_next: Any) -> None:
        try:
            await call_next()
        except OSError:
            seen.append((ctx.message.n, runs[ctx.message.n]))

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=fg.Retry(2, delay=0.001), redeliver=None)
    async def answer(asked: Asked) -> None:
        runs[asked.n] += 1
        if asked.n == 3 and runs[3] <= failures:
            raise OSError("it may pass")

    async with fg.Bus("memory:", nodes=[asking, answering], store={"answering": url} if store else None) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        outcomes = {name: n for name, n in bus.outcomes().items() if n}
    assert seen == ([(3, 3)] if failures == 3 else [])
    assert outcomes == ({"handled": 5, "skipped": 1} if failures == 3 else {"handled": 6})
    assert runs == Counter([*range(6), *[3] * min(failures, 2)])
