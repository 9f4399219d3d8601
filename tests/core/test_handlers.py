"""Handlers and their outputs: every shape of handler, effects, context, routing."""

import dataclasses
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import faregate as fg
from tests.core.rig import in_memory


class OrderPlaced(fg.Event):
    order_id: str
    total: int = 0


class ChargeCard(fg.Command):
    order_id: str
    amount: int = 0


class CardCharged(fg.Event):
    order_id: str


class Noted(fg.Event):
    text: str


@dataclasses.dataclass(frozen=True)
class WriteInvoice:
    order_id: str


async def as_coroutine(order: OrderPlaced) -> Any:
    return [Noted(text="a"), Noted(text="b")]


def as_function(order: OrderPlaced) -> Any:
    return [Noted(text="a"), Noted(text="b")]


def as_generator(order: OrderPlaced) -> Iterator[Noted]:
    yield Noted(text="a")
    yield Noted(text="b")


async def as_async_generator(order: OrderPlaced) -> AsyncIterator[Noted]:
    yield Noted(text="a")
    yield Noted(text="b")


async def through_the_context(order: OrderPlaced, ctx: fg.Context) -> None:
    ctx.publish(Noted(text="a"))
    ctx.publish(Noted(text="b"))


def through_the_context_in_a_thread(order: OrderPlaced, ctx: fg.Context) -> None:
    ctx.publish(Noted(text="a"))
    ctx.publish(Noted(text="b"))


async def half_and_half(order: OrderPlaced, ctx: fg.Context) -> Any:
    ctx.publish(Noted(text="a"))
    return Noted(text="b")


async def with_string_annotations(order: "OrderPlaced", ctx: "fg.Context") -> "list[Noted]":
    return [Noted(text="a"), Noted(text="b")]


async def wrapped_with_publish(order: OrderPlaced) -> Any:
    return [fg.publish(Noted(text="a")), fg.publish(Noted(text="b"), id_key="b")]


class Service:
    async def as_method(self, order: OrderPlaced) -> Any:
        return [Noted(text="a"), Noted(text="b")]


@pytest.mark.parametrize(
    "handler",
    [
        as_coroutine,
        as_function,
        as_generator,
        as_async_generator,
        through_the_context,
        through_the_context_in_a_thread,
        half_and_half,
        with_string_annotations,
        wrapped_with_publish,
        Service().as_method,
    ],
    ids=lambda handler: handler.__name__,
)
async def test_every_shape_of_handler_sends_its_outputs_in_order(handler: Any) -> None:
    billing = fg.Node("billing")
    billing.on(OrderPlaced, source="shop")(handler)
    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent(Noted) == [Noted(text="a"), Noted(text="b")]
        assert bench.outcomes()["handled"] == 1


async def test_on_gives_the_function_back_so_that_it_stays_testable() -> None:
    billing = fg.Node("billing")
    given_back = billing.on(OrderPlaced, source="shop")(as_coroutine)
    assert given_back is as_coroutine


async def test_a_handler_that_returns_nothing_sends_nothing() -> None:
    handled: list[str] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    def bill(order: OrderPlaced) -> None:
        handled.append(order.order_id)

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert handled == ["1"]
        assert bench.sent() == []
        assert bench.outcomes()["handled"] == 1


async def test_a_plain_function_runs_in_another_thread_than_the_loop() -> None:
    threads: list[int] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    def bill(order: OrderPlaced) -> None:
        threads.append(threading.get_ident())

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()

    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_a_blocking_function_does_not_stop_the_other_handlers() -> None:
    gate = threading.Event()
    opened_in_time: list[bool] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    def waits(order: OrderPlaced) -> None:
        opened_in_time.append(gate.wait(20))

    @billing.on(Noted, source="shop")
    async def opens(note: Noted) -> None:
        gate.set()

    async with fg.Bus("memory:", nodes=[fg.Node("shop"), billing]) as bus:
        await bus.publish(OrderPlaced(order_id="1"), node="shop")
        await bus.publish(Noted(text="open"), node="shop")
        await bus.idle(timeout=30)

    assert opened_in_time == [True]


@pytest.mark.parametrize("shape", ["async generator", "generator", "context"])
async def test_outputs_of_a_failed_try_are_never_sent(shape: str) -> None:
    tries = 0
    billing = fg.Node("billing")

    def fail_once() -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise RuntimeError("half way")

    async def async_generator(order: OrderPlaced) -> AsyncIterator[Noted]:
        yield Noted(text=f"before {tries}")
        fail_once()
        yield Noted(text="after")

    def generator(order: OrderPlaced) -> Iterator[Noted]:
        yield Noted(text=f"before {tries}")
        fail_once()
        yield Noted(text="after")

    async def context(order: OrderPlaced, ctx: fg.Context) -> Any:
        ctx.publish(Noted(text=f"before {tries}"))
        fail_once()
        return Noted(text="after")

    handlers: dict[str, Any] = {
        "async generator": async_generator,
        "generator": generator,
        "context": context,
    }
    billing.on(OrderPlaced, source="shop")(handlers[shape])
    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="before 1"), Noted(text="after")]
    assert tries == 2


async def test_effects_are_interpreted_in_order_between_the_messages() -> None:
    log: list[str] = []
    billing = fg.Node("billing")

    @billing.interprets(WriteInvoice)
    async def write(effect: WriteInvoice, ctx: fg.Context) -> None:
        log.append(f"{effect.order_id} for {ctx.source}")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        return [
            WriteInvoice(order_id="1"),
            Noted(text="written"),
            WriteInvoice(order_id="2"),
            fg.send(ChargeCard(order_id="1"), to="payments"),
        ]

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Noted(text="written"), ChargeCard(order_id="1")]
    assert log == ["1 for shop", "2 for shop"]


async def test_an_interpreter_may_be_a_plain_function_of_the_effect_alone() -> None:
    log: list[WriteInvoice] = []
    billing = fg.Node("billing")

    @billing.interprets(WriteInvoice)
    def write(effect: WriteInvoice) -> None:
        log.append(effect)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> AsyncIterator[WriteInvoice]:
        yield WriteInvoice(order_id=order.order_id)

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="9"))
        await bench.settle()
    assert log == [WriteInvoice(order_id="9")]


async def test_a_failing_interpreter_fails_the_whole_unit_of_work() -> None:
    billing = fg.Node("billing")

    @billing.interprets(WriteInvoice)
    async def write(effect: WriteInvoice) -> None:
        raise OSError("disk is full")

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    async def bill(order: OrderPlaced) -> Any:
        return [Noted(text="first"), WriteInvoice(order_id="1")]

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == []
        [dead] = bench.dead_letters()
    assert "disk is full" in dead.error


async def test_the_context_tells_where_the_message_comes_from() -> None:
    seen: dict[str, Any] = {}
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", key="order_id")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        for name in ("type", "source", "key", "attempt", "redeliveries", "redelivered"):
            seen[name] = getattr(ctx, name)
        seen["header"] = ctx.headers["tenant"]
        seen["causation_id"] = ctx.causation_id

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="17"), headers={"tenant": "acme"})
        await bench.settle()

    assert not seen.pop("causation_id")
    assert seen == {
        "type": "OrderPlaced",
        "source": "shop",
        "key": "17",
        "attempt": 1,
        "redeliveries": 0,
        "redelivered": False,
        "header": "acme",
    }


@pytest.mark.parametrize("name", ["message_id", "attempt", "key", "headers"])
async def test_the_context_is_read_only(name: str) -> None:
    refused: list[str] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        try:
            setattr(ctx, name, "changed")
        except AttributeError:
            refused.append(name)

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
    assert refused == [name]


async def test_the_context_may_be_recognised_by_its_name_alone() -> None:
    seen: list[str] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order, ctx):  # type: ignore[no-untyped-def]
        seen.append(ctx.source)

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
    assert seen == ["shop"]


async def test_a_saga_flows_through_three_nodes_under_one_correlation() -> None:
    trail: list[tuple[str, str, int]] = []
    shop, billing, payments = fg.Node("shop"), fg.Node("billing"), fg.Node("payments")

    @billing.on(OrderPlaced, source="shop", key="order_id")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        trail.append(("billing", ctx.correlation_id, ctx.depth))
        return fg.send(ChargeCard(order_id=order.order_id, amount=order.total), to="payments")

    @payments.on(ChargeCard)
    async def charge(cmd: ChargeCard, ctx: fg.Context) -> AsyncIterator[CardCharged]:
        trail.append(("payments", ctx.correlation_id, ctx.depth))
        yield CardCharged(order_id=cmd.order_id)

    @shop.on(CardCharged, source="payments")
    def close(event: CardCharged, ctx: fg.Context) -> None:
        trail.append(("shop", ctx.correlation_id, ctx.depth))

    async with fg.Bus("memory:", nodes=[shop, billing, payments]) as bus:
        root = await bus.publish(OrderPlaced(order_id="17", total=40), node="shop")
        await bus.idle(timeout=30)
        assert bus.outcomes()["handled"] == 3

    first = trail[0][2]
    assert trail == [
        ("billing", root, first),
        ("payments", root, first + 1),
        ("shop", root, first + 2),
    ]


async def test_an_event_reaches_every_subscriber_once_and_each_fails_alone() -> None:
    handled: list[tuple[str, str]] = []
    billing, mailing = fg.Node("billing"), fg.Node("mailing")

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        raise RuntimeError("billing is broken")

    @mailing.on(OrderPlaced, source="shop")
    async def mail(order: OrderPlaced, ctx: fg.Context) -> None:
        handled.append((ctx.publication_id, ctx.message_id))

    async with fg.Bus("memory:", nodes=[fg.Node("shop"), billing, mailing]) as bus:
        root = await bus.publish(OrderPlaced(order_id="1"), node="shop")
        await bus.idle(timeout=30)
        assert [dead.node for dead in await bus.dead_letters()] == ["billing"]
        assert [dead.node for dead in await bus.dead_letters("billing")] == ["billing"]
        assert await bus.dead_letters("mailing") == []

    assert handled == [(root, fg.ids.message_id(root, "mailing"))]


async def test_an_event_from_another_source_is_not_delivered() -> None:
    handled: list[str] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", order=fg.Serial())
    async def bill(order: OrderPlaced) -> None:
        handled.append(order.order_id)

    async with fg.Bus("memory:", nodes=[fg.Node("shop"), fg.Node("kiosk"), billing]) as bus:
        await bus.publish(OrderPlaced(order_id="kiosk"), node="kiosk")
        await bus.publish(OrderPlaced(order_id="shop"), node="shop")
        await bus.idle(timeout=30)

    assert handled == ["shop"]


async def test_a_node_may_hear_its_own_events() -> None:
    heard: list[str] = []
    shop = fg.Node("shop")

    @shop.on(OrderPlaced, source="shop")
    async def count_down(order: OrderPlaced) -> Any:
        heard.append(order.order_id)
        return OrderPlaced(order_id=f"{order.order_id}'") if len(heard) < 3 else None

    async with fg.Bus("memory:", nodes=[shop]) as bus:
        await bus.publish(OrderPlaced(order_id="1"))
        await bus.idle(timeout=30)
    assert heard == ["1", "1'", "1''"]


async def test_publish_many_keeps_the_order_and_gives_every_id() -> None:
    seen: list[tuple[str, str]] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", order=fg.Serial())
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        seen.append((order.order_id, ctx.publication_id))

    async with fg.Bus("memory:", nodes=[fg.Node("shop"), billing]) as bus:
        events = [OrderPlaced(order_id=str(number)) for number in range(200)]
        ids = await bus.publish_many(events, node="shop")
        await bus.idle(timeout=30)

    assert seen == [(str(number), ids[number]) for number in range(200)]
    assert len(set(ids)) == 200


async def test_headers_given_with_an_output_travel_with_it() -> None:
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        return fg.publish(Noted(text="a"), headers={"tenant": "acme"})

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        [envelope] = bench.envelopes(Noted)
    assert envelope.headers["tenant"] == "acme"


async def test_plain_functions_get_as_many_threads_as_there_are_lanes() -> None:
    lanes = 100
    together = threading.Barrier(lanes)
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", order=fg.Parallel(lanes), prefetch=lanes, retry=None, redeliver=None)
    def bill(order: OrderPlaced) -> None:
        together.wait(30)

    async with fg.Bus("memory:", nodes=[billing, fg.Node("shop")]) as bus:
        await bus.publish_many([OrderPlaced(order_id=str(number)) for number in range(lanes)], node="shop")
        await bus.idle(timeout=60)
        assert bus.outcomes()["handled"] == lanes


@pytest.mark.parametrize("between", [False, True], ids=["bare", "in a middleware"])
@pytest.mark.parametrize("store", [None, "memory:"], ids=["no store", "store"])
async def test_a_message_that_is_done_is_gone_without_the_garbage_collector(store: str | None, between: bool) -> None:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        if store is not None:
            await ctx.db.fetchone("select 1")
        return Noted(text=order.order_id)

    async def middleware(ctx: fg.Context, call_next: Any) -> None:
        if store is not None:
            await ctx.db.fetchone("select 1")
        await call_next()

    if between:
        billing.use(middleware)
    async with fg.Bus("memory:", nodes=[shop, billing], store=store) as bus:
        gc.collect()
        before = in_memory()
        gc.disable()
        try:
            await bus.publish_many([OrderPlaced(order_id=str(n)) for n in range(20)], node="shop")
            await bus.idle()
            left = in_memory() - before
        finally:
            gc.enable()
        assert bus.outcomes()["handled"] == 20
    assert not left
