"""Middlewares before, after and outgoing, and provided resources (recovery.md, Pipeline)."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ids import message_id
from faregate.testing.clock import FakeClock, rest
from faregate.transports.memory import MemoryTransport
from tests.core.rig import committed


class OrderPlaced(fg.Event):
    order_id: str


class Noted(fg.Event):
    text: str


class ChargeCard(fg.Command):
    order_id: str


class Session:
    def __init__(self, number: int) -> None:
        self.number = number


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
        assert bench.poisoned() == []
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
        assert bench.poisoned() == []
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
        [dead] = bench.poisoned()
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
        assert bench.outcomes() == {"handled": 1, "skipped": 1, "duplicate": 0, "redelivered": 1, "dead": 1}
    assert seen == ["handled", "skipped", "redelivered", "dead"]


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_whatever_is_given_up_sounds_an_alarm_and_reaches_the_after_middlewares(store: str | None) -> None:
    """A message that fails, one that cannot be read, and one that the broker gives up on before anybody sees it."""
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
        assert [record.reason for record in await bus.poisoned()] == ["failed", "undecodable", "expired"]
        assert bus.outcomes()["dead"] == bus.alarms["dead-letter"] == 3
    assert seen == [("1", "dead", "RuntimeError"), (None, "dead", "Undecodable"), ("2", "dead", "Permanent")]
    assert [(alarm.kind, alarm.node, alarm.message_id) for alarm in alarms] == [
        ("dead-letter", "billing", message_id(publication, "billing")) for publication in (failing, unreadable, late)
    ]
    assert "is given up after all its tries by bill at billing" in alarms[0].text


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
        assert bench.poisoned() == []


async def test_an_outgoing_middleware_sees_and_marks_what_goes_on() -> None:
    seen: list[tuple[Any, ...]] = []
    billing = fg.Node("billing")

    async def mark(out: Any, call_next: Any) -> None:
        seen.append((out.message, out.type, out.kind, out.destination))
        out.headers["tenant"] = "acme"
        await call_next()

    billing.use_outgoing(mark)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        return [Noted(text="a"), fg.send(ChargeCard(order_id="1"), to="payments")]

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert [envelope.headers["tenant"] for envelope in bench.envelopes()] == ["acme", "acme"]

    assert [entry[:3] for entry in seen] == [
        (Noted(text="a"), "Noted", "event"),
        (ChargeCard(order_id="1"), "ChargeCard", "command"),
    ]
    assert not seen[0][3]
    assert seen[1][3] == "payments"


async def test_an_outgoing_middleware_that_does_not_call_on_drops_that_message_only() -> None:
    billing = fg.Node("billing")

    async def censor(out: Any, call_next: Any) -> None:
        if out.message.text != "secret":
            await call_next()

    billing.use_outgoing(censor)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        return [Noted(text="a"), Noted(text="secret"), Noted(text="b")]

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="a"), Noted(text="b")]
        assert bench.outcomes()["handled"] == 1


async def test_an_outgoing_middleware_also_wraps_what_is_published_outside_handlers() -> None:
    seen: list[str] = []
    shop, billing = fg.Node("shop"), fg.Node("billing")

    async def mark(out: Any, call_next: Any) -> None:
        out.headers["tenant"] = "acme"
        await call_next()

    shop.use_outgoing(mark)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        seen.append(ctx.headers["tenant"])

    async with fg.Bus("memory:", nodes=[shop, billing]) as bus:
        await bus.publish(OrderPlaced(order_id="1"), node="shop")
        await bus.idle(timeout=30)
    assert seen == ["acme"]


def session_node(log: list[str]) -> fg.Node:
    """A node whose messages each get a numbered session; `log` tells its life."""
    billing = fg.Node("billing")
    opened = 0

    @billing.provides
    async def session(ctx: fg.Context) -> AsyncIterator[Session]:
        nonlocal opened
        opened += 1
        log.append(f"open {opened} for {ctx.source}")
        number = opened
        try:
            yield Session(number)
        except BaseException as error:
            log.append(f"failed {number}: {error}")
            raise
        else:
            log.append(f"close {number}")

    return billing


async def test_handler_and_middleware_of_one_message_share_one_resource() -> None:
    log: list[str] = []
    billing = session_node(log)

    async def with_session(ctx: fg.Context, call_next: Any, session: Session) -> None:
        log.append(f"middleware {session.number}")
        await call_next()

    billing.use(with_session)

    @billing.on(OrderPlaced, source="shop", order=fg.Serial())
    async def bill(order: OrderPlaced, ctx: fg.Context, session: Session) -> None:
        log.append(f"handler {session.number}")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.publish(OrderPlaced(order_id="2"))
        await bench.settle()

    assert log == [
        "open 1 for shop",
        "middleware 1",
        "handler 1",
        "close 1",
        "open 2 for shop",
        "middleware 2",
        "handler 2",
        "close 2",
    ]


async def test_a_plain_function_handler_gets_resources_too() -> None:
    log: list[str] = []
    billing = session_node(log)

    @billing.on(OrderPlaced, source="shop")
    def bill(order: OrderPlaced, session: Session) -> None:
        log.append(f"handler {session.number}")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
    assert log == ["open 1 for shop", "handler 1", "close 1"]


async def test_a_resource_is_told_of_the_failure_and_released() -> None:
    log: list[str] = []
    billing = session_node(log)

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    async def bill(order: OrderPlaced, session: Session) -> None:
        raise RuntimeError("no luck")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert len(bench.poisoned()) == 1
    assert log == ["open 1 for shop", "failed 1: no luck"]


async def test_a_resource_that_cannot_be_opened_follows_the_failure_policy() -> None:
    opened = 0
    billing = fg.Node("billing")

    @billing.provides
    async def session() -> AsyncIterator[Session]:
        nonlocal opened
        opened += 1
        if opened < 3:
            raise ConnectionError("no connection")
        yield Session(opened)

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=fg.Redeliver(10, 10, 10))
    async def bill(order: OrderPlaced, session: Session) -> Any:
        return Noted(text=f"session {session.number}")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="session 3")]
        assert bench.outcomes()["handled"] == 1


async def test_a_handler_that_does_not_ask_opens_no_resource() -> None:
    log: list[str] = []
    billing = session_node(log)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        return Noted(text="done")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="done")]
    assert log == []


# --- outgoing: the confirm, the error, resources, fg.outbox ----------------------------------------------------


class Watch:
    """An outgoing middleware that notes what call_next came to."""

    def __init__(self, node: fg.Node) -> None:
        self.log: list[tuple[str, str]] = []
        node.use_outgoing(self.watch)

    async def watch(self, out: Any, call_next: Any) -> None:
        out.headers["watched"] = "yes"
        try:
            await call_next()
        except Exception as exc:
            self.log.append((out.type, type(exc).__name__))
            raise
        self.log.append((out.type, "sent"))


class GatedTransport(MemoryTransport):
    """Confirms when the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.published: list[fg.Envelope] = []

    async def publish(self, envelopes: Sequence[fg.Envelope]) -> None:
        await self.gate.wait()
        await super().publish(envelopes)
        self.published += envelopes


@pytest.mark.parametrize("many", [False, True])
async def test_an_outgoing_middleware_sees_the_confirm_and_the_error_of_a_publish(many: bool) -> None:
    shop = fg.Node("shop")
    watch, transport = Watch(shop), GatedTransport()
    async with fg.Bus(transport, nodes=[shop]) as bus:
        events = [Noted(text="a"), OrderPlaced(order_id="1")] if many else [Noted(text="a")]
        sending = asyncio.create_task(bus.publish_many(events) if many else bus.publish(events[0]))
        await rest()
        assert watch.log == [], "nothing is confirmed yet"
        transport.gate.set()
        await sending
        assert watch.log == [(type(event).__name__, "sent") for event in events]
        assert [envelope.headers for envelope in transport.published] == [{"watched": "yes"}] * len(events)
        watch.log.clear()
        outs = [Noted(text="b"), fg.send(ChargeCard(order_id="1"), to="nobody")]
        with pytest.raises(fg.Unroutable):
            await (bus.publish_many(outs) if many else bus.send(ChargeCard(order_id="1"), to="nobody"))
        told = [("Noted", "Unroutable"), ("ChargeCard", "Unroutable")] if many else [("ChargeCard", "Unroutable")]
        assert watch.log == told, "all or none"


async def test_of_many_those_that_a_middleware_lets_through_are_published_together() -> None:
    shop = fg.Node("shop")

    async def censor(out: Any, call_next: Any) -> None:
        if out.message.text == "bad":
            raise LookupError("bad")
        if out.message.text != "secret":
            await call_next()

    shop.use_outgoing(censor)
    transport = GatedTransport()
    transport.gate.set()
    async with fg.Bus(transport, nodes=[shop]) as bus:
        sent = await bus.publish_many([Noted(text="a"), Noted(text="secret"), Noted(text="b")])
        assert [envelope.publication_id for envelope in transport.published] == [sent[0], sent[2]]
        with pytest.raises(LookupError):
            await bus.publish_many([Noted(text="c"), Noted(text="bad"), Noted(text="d")])
        assert len(transport.published) == 2


async def test_without_a_store_an_outgoing_middleware_sees_what_became_of_a_handlers_messages() -> None:
    billing = fg.Node("billing")
    watch = Watch(billing)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        return [Noted(text="a"), fg.send(ChargeCard(order_id="1"), to="nobody")]

    async with fg.Bus("memory:", nodes=[billing, fg.Node("shop")]) as bus:
        await bus.publish(OrderPlaced(order_id="1"), node="shop")
        await bus.idle(timeout=30)
        assert bus.outcomes()["handled"] == 1, "an output that nobody takes is a dead letter of its own"
        assert [record.reason for record in await bus.poisoned()] == ["unroutable"]
        assert bus.alarms == {"unroutable": 1}
    assert watch.log == [("Noted", "sent"), ("ChargeCard", "Unroutable")]


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_an_outgoing_middleware_takes_the_resources_of_the_message_that_is_handled(store: str | None) -> None:
    """The handler's own, still open; outside of handlers one of its own."""
    log: list[str] = []
    numbers = iter(range(100))
    billing = fg.Node("billing")

    @billing.provides
    async def session() -> AsyncIterator[Session]:
        made = Session(next(numbers))
        log.append(f"open {made.number}")
        yield made
        log.append(f"close {made.number}")

    @billing.use_outgoing
    async def stamp(out: Any, call_next: Any, session: Session) -> None:
        out.headers["session"] = str(session.number)
        await call_next()
        log.append(f"sent {out.message.text} in {session.number}")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, session: Session) -> Any:
        log.append(f"handle in {session.number}")
        return Noted(text=order.order_id)

    transport = GatedTransport()
    transport.gate.set()
    async with fg.Bus(transport, nodes=[billing, fg.Node("shop")], store=store) as bus:
        await bus.publish(OrderPlaced(order_id="1"), node="shop")
        await bus.idle(timeout=30)
        await bus.publish(Noted(text="root"), node="billing")
    handled = ["open 0", "handle in 0", "sent 1 in 0", "close 0"]
    assert log == [*handled, "open 1", "sent root in 1", "close 1"]
    assert [envelope.headers for envelope in transport.published[1:]] == [{"session": "0"}, {"session": "1"}]


async def test_a_provider_that_needs_a_message_cannot_serve_what_no_handler_sends() -> None:
    billing = fg.Node("billing")

    @billing.provides
    async def session(ctx: fg.Context) -> AsyncIterator[Session]:
        yield Session(1)

    @billing.use_outgoing
    async def stamp(out: Any, call_next: Any, session: Session) -> None:
        await call_next()

    async with fg.Bus("memory:", nodes=[billing]) as bus:
        with pytest.raises(fg.ConfigurationError, match="outside of handlers"):
            await bus.publish(Noted(text="root"))


def test_an_outgoing_middleware_is_told_where_the_context_is() -> None:
    with pytest.raises(fg.WrongSignature, match=r"out\.cause"):

        @fg.Node("billing").use_outgoing
        async def stamp(out: Any, call_next: Any, ctx: fg.Context) -> None: ...


async def test_outgoing_middlewares_see_what_was_recorded_through_the_outbox(tmp_path: Path) -> None:
    """They mark it, hold it back, see its error; in the order in which it was recorded."""
    shop, billing = fg.Node("shop"), fg.Node("billing")
    seen: list[tuple[str, str]] = []
    messages: list[Any] = []

    async def hold_back(out: Any, call_next: Any) -> None:
        messages.append(out.message)
        if out.message is None or getattr(out.message, "order_id", "") != "secret":
            await call_next()

    shop.use_outgoing(hold_back)
    watch = Watch(shop)

    @billing.on(OrderPlaced, source="shop", order=fg.Serial())
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        seen.append((order.order_id, ctx.headers["watched"]))

    url = f"sqlite:{tmp_path}/shop.db"
    async with fg.Bus("memory:", nodes=[shop, billing], store=url) as bus:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            outbox = fg.outbox(connection, node="shop")
            for order_id in ("1", "secret", "2"):
                outbox.publish(OrderPlaced(order_id=order_id))
            outbox.send(ChargeCard(order_id="3"), to="nobody")
        await bus.idle(timeout=30)
        assert [letter.reason for letter in await bus.dead_letters("shop")] == ["unroutable"]
    assert seen == [("1", "yes"), ("2", "yes")]
    assert messages == [OrderPlaced(order_id="1"), OrderPlaced(order_id="secret"), OrderPlaced(order_id="2"), None]
    assert watch.log == [("OrderPlaced", "sent"), ("OrderPlaced", "sent"), ("ChargeCard", "Unroutable")]


async def test_what_was_recorded_through_the_outbox_is_sent_though_a_middleware_failed_at_first(
    tmp_path: Path,
) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")
    seen: list[str] = []
    failures = iter([LookupError("not now")])

    async def fail_once(out: Any, call_next: Any) -> None:
        if out.message.order_id == "never":
            raise fg.Permanent("not this one")
        for failure in failures:
            raise failure
        await call_next()

    shop.use_outgoing(fail_once)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        seen.append(order.order_id)

    async with fg.Bus("memory:", nodes=[shop, billing], store=f"sqlite:{tmp_path}/shop.db") as bus:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            for order_id in ("1", "never", "2"):
                fg.outbox(connection, node="shop").publish(OrderPlaced(order_id=order_id))
        await bus.idle(timeout=30)
        assert [letter.reason for letter in await bus.dead_letters("shop")] == ["permanent"]
        assert bus.alarms == {"dead-letter": 1}
    assert sorted(seen) == ["1", "2"]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("failure", [LookupError("no"), asyncio.CancelledError(), GeneratorExit()])
async def test_a_middleware_that_fails_stops_nothing_of_what_was_recorded_through_the_outbox(
    tmp_path: Path, failure: BaseException, when: str
) -> None:
    """Before the publish it is tried again; after it the message is sent, whatever the middleware says."""
    shop, billing = fg.Node("shop"), fg.Node("billing")
    calls: list[str] = []
    seen: list[str] = []

    async def fail(out: Any, call_next: Any) -> None:
        calls.append(out.message.order_id)
        if when == "before" and calls == ["1"]:
            raise failure
        await call_next()
        if when == "after":
            raise failure

    shop.use_outgoing(fail)

    @billing.on(OrderPlaced, source="shop", order=fg.Serial())
    async def bill(order: OrderPlaced) -> None:
        seen.append(order.order_id)

    async with fg.Bus("memory:", nodes=[shop, billing], store=f"sqlite:{tmp_path}/shop.db") as bus:
        with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            for order_id in ("1", "2"):
                fg.outbox(connection, node="shop").publish(OrderPlaced(order_id=order_id))
        await bus.idle(timeout=30)
    assert seen == ["1", "2"]
    assert calls == (["1", "1", "2"] if when == "before" else ["1", "2"])
