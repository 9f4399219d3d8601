"""Outgoing middlewares: around what handlers send, what is published from outside, and what comes from the outbox."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.testing.clock import rest
from faregate.transports.memory import MemoryTransport


class OrderPlaced(fg.Event):
    order_id: str


class Noted(fg.Event):
    text: str


class ChargeCard(fg.Command):
    order_id: str


class Session:
    def __init__(self, number: int) -> None:
        self.number = number


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
        assert [record.reason for record in await bus.dead_letters()] == ["unroutable"]
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
