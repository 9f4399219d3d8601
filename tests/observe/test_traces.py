"""Spans: one trace over nodes, outbox hops, retries and processes; its context in the envelope."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

import faregate as fg
from faregate.message import Envelope
from faregate.observe.trace_context import read
from tests.observe.rig import (
    LONG,
    OrderCharged,
    OrderPlaced,
    Telemetry,
    links,
    parent_id,
    span_id,
    three_nodes,
    trace_id,
)

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_one_trace_goes_over_three_nodes_and_their_outbox(tmp_path: Path) -> None:
    telemetry = Telemetry()
    async with three_nodes(tmp_path, telemetry.observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    publish = telemetry.one("publish shop.OrderPlaced")
    bill = telemetry.one("handle shop.OrderPlaced")
    send = telemetry.one("dispatch payments")
    charge = telemetry.one("handle payments")
    note = telemetry.one("handle payments.OrderCharged")
    assert parent_id(publish) is None
    assert parent_id(bill) == span_id(publish)
    assert parent_id(send) == span_id(bill) and links(send) == {span_id(bill)}
    assert parent_id(charge) == span_id(bill)  # the outbox hop does not change what caused it
    assert parent_id(note) == span_id(charge)
    assert {trace_id(span) for span in telemetry.spans} == {trace_id(publish)}
    assert [span.kind for span in (publish, bill, send)] == [SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.PRODUCER]


async def test_a_span_says_which_message_it_is_about(tmp_path: Path) -> None:
    telemetry = Telemetry()
    async with three_nodes(tmp_path, telemetry.observer) as bus:
        publication_id = await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    assert dict(telemetry.one("publish shop.OrderPlaced").attributes or {}) == {
        "messaging.system": "faregate",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "shop.OrderPlaced",
        "messaging.message.id": publication_id,
        "messaging.message.conversation_id": publication_id,
    }
    assert dict(telemetry.one("handle shop.OrderPlaced").attributes or {}) == {
        "messaging.system": "faregate",
        "messaging.operation.name": "handle",
        "messaging.operation.type": "process",
        "messaging.destination.name": "shop.OrderPlaced",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": fg.ids.message_id(publication_id, "billing"),
        "messaging.message.conversation_id": publication_id,
        "faregate.type": "OrderPlaced",
        "faregate.key": "17",
    }


async def test_publishing_is_part_of_what_the_program_does(tmp_path: Path) -> None:
    telemetry = Telemetry()
    tracer = telemetry.tracers.get_tracer("test")
    async with three_nodes(tmp_path, telemetry.observer) as bus:
        with tracer.start_as_current_span("request"):
            await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
        await bus.publish(OrderPlaced(order_id="18"))
        await bus.idle(LONG)
    first, second = telemetry.named("publish shop.OrderPlaced")
    assert parent_id(first) == span_id(telemetry.one("request"))
    assert parent_id(second) is None
    in_request = {trace_id(span) for span in telemetry.spans} - {trace_id(second)}
    assert in_request == {trace_id(first)}  # nothing of the second one fell into the request


@pytest.mark.parametrize("handler", ["async", "def"])
async def test_spans_of_a_handler_are_children_of_its_own(handler: str) -> None:
    telemetry = Telemetry()
    tracer = telemetry.tracers.get_tracer("test")
    shop, billing = fg.Node("shop"), fg.Node("billing")

    def work() -> None:
        with tracer.start_as_current_span("work"):
            pass

    if handler == "async":

        @billing.on(OrderPlaced, source="shop")
        async def bill(order: OrderPlaced) -> None:
            work()
            await asyncio.create_task(asyncio.to_thread(work))

    else:

        @billing.on(OrderPlaced, source="shop")
        def bill_in_thread(order: OrderPlaced) -> None:
            work()

    async with fg.Bus("memory:", nodes=[shop, billing], observe=telemetry.observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    handle = telemetry.one("handle shop.OrderPlaced")
    assert {parent_id(span) for span in telemetry.named("work")} == {span_id(handle)}


async def test_a_batch_that_is_sent_is_linked_to_all_that_recorded_it(tmp_path: Path) -> None:
    telemetry = Telemetry()
    async with three_nodes(tmp_path, telemetry.observer) as bus:
        await bus.publish_many([OrderPlaced(order_id=str(number)) for number in range(20)])
        await bus.idle(LONG)
    publish = telemetry.one("publish shop.OrderPlaced")
    handled = telemetry.named("handle shop.OrderPlaced")
    assert (publish.attributes or {})["messaging.batch.message_count"] == 20
    assert {parent_id(span) for span in handled} == {span_id(publish)} and len(handled) == 20
    sends = telemetry.named("dispatch payments")
    assert set().union(*map(links, sends)) == {span_id(span) for span in handled}
    for send in sends:
        assert parent_id(send) is None or links(send) == {parent_id(send)}


@pytest.mark.parametrize("store", ["memory:", None])
async def test_what_a_handler_sends_carries_the_context_of_its_span(store: str | None) -> None:
    telemetry, found = Telemetry(), []
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> OrderCharged:
        return OrderCharged(order_id=order.order_id)

    @shop.on(OrderCharged, source="billing")
    async def note(charged: OrderCharged, ctx: fg.Context) -> None:
        found.append(ctx._work.envelope)

    async with fg.Bus("memory:", nodes=[shop, billing], store=store, observe=telemetry.observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    bill_span = telemetry.one("handle shop.OrderPlaced")
    [envelope] = found
    cause = read(envelope)
    assert cause is not None and cause.sampled
    assert (cause.span.trace_id, cause.span.span_id) == (trace_id(bill_span), span_id(bill_span))


async def answer(observe: Any) -> Envelope:
    """What billing sends for one and the same order."""
    found: list[Envelope] = []
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> OrderCharged:
        return OrderCharged(order_id=order.order_id)

    @shop.on(OrderCharged, source="billing")
    async def note(charged: OrderCharged, ctx: fg.Context) -> None:
        found.append(ctx._work.envelope)

    async with fg.Bus("memory:", nodes=[shop, billing], store="memory:", observe=observe) as bus:
        await bus.publish(OrderPlaced(order_id="17"), idempotency_key="order-17")
        await bus.idle(LONG)
    [envelope] = found
    return envelope


async def test_ids_and_digests_of_what_is_sent_do_not_depend_on_the_trace() -> None:
    """Two runs of a handler on one message are two spans, and must send one and the same thing."""
    first, again, untraced = [await answer(each) for each in (Telemetry().observer, Telemetry().observer, None)]
    assert len({first.traceparent, again.traceparent, untraced.traceparent}) == 3
    assert first.publication_id == again.publication_id == untraced.publication_id
    assert first.body_digest == again.body_digest == untraced.body_digest is not None
    assert first.headers == again.headers == untraced.headers == {}


# --- failures -------------------------------------------------------------------------------------------------


async def test_each_failed_try_is_an_event_and_a_late_success_is_no_error() -> None:
    telemetry, tries = Telemetry(), []
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", retry=fg.Retry(2, delay=0))
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        tries.append(ctx.attempt)
        if ctx.attempt < 3:
            raise ValueError(f"no {ctx.attempt}")

    async with fg.Bus("memory:", nodes=[shop, billing], observe=telemetry.observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    span = telemetry.one("handle shop.OrderPlaced")
    noted = [(event.attributes or {})["faregate.attempt"] for event in span.events]
    assert tries == [1, 2, 3] and noted == [1, 2]
    assert [(event.attributes or {})["exception.message"] for event in span.events] == ["no 1", "no 2"]
    assert span.status.status_code is StatusCode.UNSET


async def test_a_message_that_is_dead_lettered_is_an_error_of_its_span() -> None:
    telemetry = Telemetry()
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        raise fg.Permanent("never")

    async with fg.Bus("memory:", nodes=[shop, billing], observe=telemetry.observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    span = telemetry.one("handle shop.OrderPlaced")
    assert span.status.status_code is StatusCode.ERROR and "never" in (span.status.description or "")
    assert (span.attributes or {})["error.type"] == "Permanent"
    assert len(span.events) == 1


async def test_what_fails_among_others_has_a_span_for_each_run_and_the_others_have_one(tmp_path: Path) -> None:
    telemetry, failing = Telemetry(), {"7"}
    shop, billing = fg.Node("shop"), fg.Node("billing", schema="create table if not exists notes(id text primary key)")

    @billing.on(OrderPlaced, source="shop", retry=fg.Retry(1, delay=0))
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes values (?)", (order.order_id,))
        if order.order_id in failing:
            failing.discard(order.order_id)
            raise ValueError("once")

    store = f"sqlite:{tmp_path / 'shop.db'}"
    async with fg.Bus("memory:", nodes=[shop, billing], store=store, observe=telemetry.observer) as bus:
        await bus.publish_many([OrderPlaced(order_id=str(number)) for number in range(50)])
        await bus.idle(LONG)
        assert bus.outcomes()["handled"] == 50
    failed = [span for span in telemetry.spans if span.status.status_code is StatusCode.ERROR]
    assert len(failed) <= 1
    events = [event for span in telemetry.spans for event in span.events]
    assert [(event.attributes or {})["exception.message"] for event in events] == ["once"]
    messages = {(span.attributes or {})["messaging.message.id"] for span in telemetry.named("handle shop.OrderPlaced")}
    assert len(messages) == 50


async def test_a_middleware_that_skips_and_one_that_fails_are_told_apart() -> None:
    telemetry = Telemetry()
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.use
    async def guard(ctx: fg.Context, call_next: Any) -> None:
        if ctx.message.order_id == "skip":
            return
        raise fg.Permanent("guarded")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        raise AssertionError

    async with fg.Bus("memory:", nodes=[shop, billing], observe=telemetry.observer) as bus:
        await bus.publish(OrderPlaced(order_id="skip"))
        await bus.idle(LONG)
        await bus.publish(OrderPlaced(order_id="fail"))
        await bus.idle(LONG)
    skipped, failed = telemetry.named("handle shop.OrderPlaced")
    assert (skipped.attributes or {})["faregate.outcome"] == "skipped" and not skipped.events
    assert failed.status.status_code is StatusCode.ERROR and len(failed.events) == 1


async def test_a_publish_that_fails_is_an_error_of_its_span() -> None:
    telemetry = Telemetry()
    shop = fg.Node("shop")
    async with fg.Bus("memory:", nodes=[shop], observe=telemetry.observer) as bus:
        with pytest.raises(fg.Unroutable):
            await bus.send(fg.command(_dataclass())("17"), to="nobody")
    [span] = telemetry.spans
    assert span.status.status_code is StatusCode.ERROR and (span.attributes or {})["error.type"] == "Unroutable"


def _dataclass() -> Any:
    from dataclasses import dataclass

    @dataclass
    class Ask:
        order_id: str

    return Ask


# --- the context that travels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("observed", [True, False], ids=["traced here", "nobody traces here"])
@pytest.mark.parametrize("flags", ["00", "01"], ids=["not sampled", "sampled"])
async def test_a_context_from_elsewhere_goes_on(observed: bool, flags: str) -> None:
    """W3C's context survives a node that traces nothing, with its tracestate; one that nobody samples gets no spans."""
    telemetry, found = Telemetry(), []
    given = TRACEPARENT[:-2] + flags
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> OrderCharged:
        return OrderCharged(order_id=order.order_id)

    @shop.on(OrderCharged, source="billing")
    async def note(charged: OrderCharged, ctx: fg.Context) -> None:
        found.append(ctx._work.envelope)

    observe = telemetry.observer if observed else None
    async with fg.Bus("memory:", nodes=[shop, billing], store="memory:", observe=observe) as bus:
        body = b'{"order_id":"17"}'
        root = fg.ids.root_id()
        envelope = Envelope(
            root, "OrderPlaced", "event", "shop", body, correlation_id=root, traceparent=given,
            headers={"tracestate": "vendor=1"},
        )  # fmt: skip
        await bus.transport.publish([envelope])
        await bus.idle(LONG)
    [sent] = found
    assert sent.traceparent is not None and sent.headers == {"tracestate": "vendor=1"}
    assert sent.traceparent[:36] == given[:36]
    if observed and flags == "01":
        assert parent_id(telemetry.one("handle shop.OrderPlaced")) == int(given[36:52], 16)
    else:
        assert sent.traceparent == given and telemetry.spans == []


@pytest.mark.parametrize(
    "text",
    ["", "00", "x" * 10_000, TRACEPARENT.upper(), TRACEPARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
     TRACEPARENT.replace("00f067aa0ba902b7", "0" * 16), "ff" + TRACEPARENT[2:], TRACEPARENT + "\n"],
)  # fmt: skip
def test_a_traceparent_that_is_none_counts_as_none(text: str) -> None:
    assert read(Envelope(traceparent=text)) is None


@pytest.mark.parametrize("text", [TRACEPARENT, "01" + TRACEPARENT[2:] + "-later"])
def test_a_traceparent_of_a_later_version_is_read_as_far_as_it_is_known(text: str) -> None:
    found = read(Envelope(traceparent=text))
    assert found is not None and found.sampled and found.span.is_remote


async def test_what_is_not_sampled_has_no_spans_anywhere_and_tells_the_others(tmp_path: Path) -> None:
    telemetry = Telemetry(ParentBased(ALWAYS_OFF))
    async with three_nodes(tmp_path, telemetry.observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
        assert bus.outcomes()["handled"] == 3
    assert telemetry.spans == []


async def test_without_an_sdk_nothing_is_recorded_and_everything_is_handled(tmp_path: Path) -> None:
    from opentelemetry.metrics import NoOpMeterProvider

    observer = fg.observe.OpenTelemetry(trace.NoOpTracerProvider(), NoOpMeterProvider())
    async with three_nodes(tmp_path, observer) as bus:
        await bus.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
        assert bus.outcomes()["handled"] == 3


async def test_a_web_request_is_the_parent_of_what_it_left_in_the_outbox(tmp_path: Path) -> None:
    telemetry = Telemetry()
    async with three_nodes(tmp_path, telemetry.observer) as bus:
        with (
            closing(sqlite3.connect(tmp_path / "shop.db")) as connection,
            connection,
            telemetry.tracers.get_tracer("web").start_as_current_span("POST /orders"),
        ):
            outbox = fg.outbox(connection, "shop", observe=telemetry.observer)
            outbox.publish(OrderPlaced(order_id="17"))
        await bus.idle(LONG)
    request = telemetry.one("POST /orders")
    assert parent_id(telemetry.one("handle shop.OrderPlaced")) == span_id(request)
    assert links(telemetry.one("dispatch shop.OrderPlaced")) == {span_id(request)}
    assert {trace_id(span) for span in telemetry.spans} == {trace_id(request)}


async def test_the_context_survives_the_journal(tmp_path: Path) -> None:
    telemetry = Telemetry()
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        pass

    url = f"journal:{tmp_path / 'journal'}"
    async with fg.Bus(url, nodes=[shop, billing], observe=telemetry.observer) as bus:
        await bus.pause("billing", OrderPlaced)
        await bus.publish(OrderPlaced(order_id="17"))
    async with fg.Bus(url, nodes=[shop, billing], observe=telemetry.observer) as bus:
        await bus.idle(LONG)
    publish, handle = telemetry.one("publish shop.OrderPlaced"), telemetry.one("handle shop.OrderPlaced")
    assert parent_id(handle) == span_id(publish)
