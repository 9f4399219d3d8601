"""Deterministic ids (exactly-once.md, Ids) and how they travel through a bench.

Roots are UUIDv7, everything derived is UUIDv8 and keeps the root's 48 time bits; nothing that changes from
try to try is part of an id.
"""

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import faregate as fg

ROOT = "0190a000-0000-7000-8000-000000000001"
CAUSE = "0190a000-0000-8000-8000-000000000002"
names = st.text(min_size=1, max_size=12)


class OrderPlaced(fg.Event):
    order_id: str
    total: int = 0


class Noted(fg.Event):
    text: str


class ChargeCard(fg.Command, wire="charge-card"):
    order_id: str


def derived(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "correlation_id": ROOT,
        "node": "billing",
        "causation_id": CAUSE,
        "handler": "bill",
        "type": "Noted",
        "slot": 0,
    }
    return fg.ids.publication_id(**{**fields, **changes})


def time_bits(text: str) -> int:
    return uuid.UUID(text).int >> 80


@given(st.integers(min_value=0, max_value=2**48 - 1))
def test_a_root_id_is_a_canonical_version_7_uuid_of_its_millisecond(time_ms: int) -> None:
    text = fg.ids.root_id(time_ms=time_ms)
    parsed = uuid.UUID(text)
    assert (parsed.version, parsed.variant, str(parsed)) == (7, uuid.RFC_4122, text)
    assert time_bits(text) == time_ms


def test_root_ids_do_not_repeat_even_within_one_millisecond() -> None:
    drawn = [fg.ids.root_id(time_ms=1_700_000_000_000) for _ in range(5_000)]
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("count", [0, 1, 511, 1300])
def test_many_roots_of_one_moment_are_as_good_as_those_made_one_by_one(count: int) -> None:
    made = [*fg.ids.root_ids(count, 1_700_000_000_000), fg.ids.root_id(1_700_000_000_000)]
    assert len(set(made)) == count + 1
    assert {uuid.UUID(each).version for each in made} == {7}
    assert {str(uuid.UUID(each)) for each in made} == set(made)
    assert {uuid.UUID(each).int >> 80 for each in made} == {1_700_000_000_000}


def test_a_derived_id_is_a_canonical_version_8_uuid_that_keeps_the_roots_time() -> None:
    text = derived()
    parsed = uuid.UUID(text)
    assert (parsed.version, parsed.variant, str(parsed)) == (8, uuid.RFC_4122, text)
    assert time_bits(text) == time_bits(ROOT)


def test_the_same_fields_always_give_the_same_derived_id() -> None:
    assert derived() == derived()


@pytest.mark.parametrize(
    "change",
    [
        {"correlation_id": "0190a000-0000-7000-8000-0000000000ff"},
        {"node": "payments"},
        {"causation_id": "0190a000-0000-8000-8000-0000000000ff"},
        {"handler": "bill_again"},
        {"type": "Other"},
        {"slot": 1},
        {"slot": "line-1"},
    ],
)
def test_every_named_field_is_part_of_a_derived_id(change: dict[str, Any]) -> None:
    assert derived(**change) != derived()


def test_an_ordinal_and_an_id_key_that_look_alike_give_different_ids() -> None:
    assert derived(slot=1) != derived(slot="1")


@given(names, names, names)
def test_text_may_not_slide_from_one_field_into_the_next(one: str, two: str, three: str) -> None:
    assert derived(handler=one + two, type=three) != derived(handler=one, type=two + three)


@given(st.lists(st.tuples(names, names, st.integers(0, 1_000) | names), unique=True, max_size=30))
def test_different_outputs_of_one_handler_never_share_an_id(outputs: list[tuple[Any, ...]]) -> None:
    ids = {derived(handler=handler, type=kind, slot=slot) for handler, kind, slot in outputs}
    assert len(ids) == len(outputs)


def test_each_recipient_has_its_own_message_id_of_one_publication() -> None:
    publication = derived()
    first = fg.ids.message_id(publication, "billing")
    second = fg.ids.message_id(publication, "payments")
    assert len({publication, first, second}) == 3
    assert first == fg.ids.message_id(publication, "billing")
    assert uuid.UUID(first).version == 8
    assert time_bits(first) == time_bits(ROOT)


@given(names, names, names)
def test_an_idempotency_key_is_a_pure_hash_of_node_type_and_key(node: str, kind: str, key: str) -> None:
    text = fg.ids.idempotent_id(node, kind, key)
    assert text == fg.ids.idempotent_id(node, kind, key)
    assert uuid.UUID(text).version == 8
    assert text != fg.ids.idempotent_id(node, kind, key + "x")
    assert text != fg.ids.idempotent_id(node + "x", kind, key)
    assert text != fg.ids.idempotent_id(node, kind + "x", key)


async def test_a_root_publication_is_its_own_correlation() -> None:
    seen: list[Any] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        seen.append((ctx.publication_id, ctx.correlation_id, ctx.message_id))

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()

    publication_id, correlation_id, message_id = seen[0]
    assert correlation_id == publication_id
    assert uuid.UUID(publication_id).version == 7
    assert message_id == fg.ids.message_id(publication_id, "billing")


async def test_an_idempotency_key_becomes_publication_and_correlation_id() -> None:
    seen: list[tuple[str, str]] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        seen.append((ctx.publication_id, ctx.correlation_id))

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"), idempotency_key="order-17")
        await bench.settle()

    expected = fg.ids.idempotent_id("shop", "OrderPlaced", "order-17")
    assert seen == [(expected, expected)]


async def test_outputs_carry_correlation_causation_depth_and_the_designed_id() -> None:
    seen: list[Any] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        seen.append((ctx.correlation_id, ctx.message_id, ctx.depth))
        return fg.send(ChargeCard(order_id=order.order_id), to="payments")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        [envelope] = bench.envelopes(ChargeCard)

    correlation_id, message_id, depth = seen[0]
    assert envelope.correlation_id == correlation_id
    assert envelope.causation_id == message_id
    assert envelope.depth == depth + 1
    assert (envelope.type, envelope.kind) == ("charge-card", "command")
    assert (envelope.source, envelope.destination) == ("billing", "payments")
    candidates = {
        fg.ids.publication_id(
            correlation_id=correlation_id,
            node="billing",
            causation_id=message_id,
            handler="bill",
            type="charge-card",
            slot=ordinal,
        )
        for ordinal in (0, 1)  # the design does not say where the ordinals start
    }
    assert envelope.publication_id in candidates


async def test_the_name_of_the_subscription_stands_for_the_handler_in_output_ids() -> None:
    seen: list[tuple[str, str]] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", name="invoicing")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        seen.append((ctx.correlation_id, ctx.message_id))
        return fg.publish(Noted(text="x"), id_key="only")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        [envelope] = bench.envelopes(Noted)

    assert envelope.publication_id == fg.ids.publication_id(
        correlation_id=seen[0][0],
        node="billing",
        causation_id=seen[0][1],
        handler="invoicing",
        type="Noted",
        slot="only",
    )


async def test_siblings_of_one_handler_have_different_ids() -> None:
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> Any:
        return [Noted(text="same") for _ in range(60)]

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        ids = [envelope.publication_id for envelope in bench.envelopes(Noted)]

    assert len(ids) == 60
    assert len(set(ids)) == 60


async def test_output_ids_do_not_depend_on_retries_redeliveries_or_time() -> None:
    async def ids_after(failures: int, start_after: float) -> list[str]:
        billing = fg.Node("billing")
        calls = 0

        @billing.on(OrderPlaced, source="shop", retry=fg.Retry(1, delay=1), redeliver=fg.Redeliver(5, 50))
        async def bill(order: OrderPlaced) -> Any:
            nonlocal calls
            calls += 1
            if calls <= failures:
                raise RuntimeError("not yet")
            return [Noted(text="a"), fg.publish(Noted(text="b"), id_key="b")]

        async with fg.testing.bench(billing) as bench:
            await bench.advance(start_after)
            await bench.publish(OrderPlaced(order_id="1"), idempotency_key="k")
            await bench.settle()
            return [envelope.publication_id for envelope in bench.envelopes(Noted)]

    at_once = await ids_after(failures=0, start_after=0)
    assert len(set(at_once)) == 2
    assert await ids_after(failures=1, start_after=7) == at_once
    assert await ids_after(failures=4, start_after=100_000) == at_once


async def test_the_ordering_key_is_not_part_of_an_id() -> None:
    async def ids_with(key: str | None) -> list[str]:
        billing = fg.Node("billing")
        options: dict[str, Any] = {} if key is None else {"key": key}

        @billing.on(OrderPlaced, source="shop", **options)
        async def bill(order: OrderPlaced) -> Any:
            return Noted(text="a")

        async with fg.testing.bench(billing) as bench:
            await bench.publish(OrderPlaced(order_id="1"), idempotency_key="k")
            await bench.settle()
            return [envelope.publication_id for envelope in bench.envelopes(Noted)]

    plain = await ids_with(None)
    assert len(plain) == 1
    assert await ids_with("order_id") == plain


async def test_the_same_id_key_twice_in_one_unit_of_work_is_refused() -> None:
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    async def bill(order: OrderPlaced) -> Any:
        return [
            fg.publish(Noted(text="1"), id_key="line"),
            fg.publish(Noted(text="2"), id_key="line"),
        ]

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == []
        [dead] = bench.dead_letters()
        assert "DuplicateIdKey" in dead.error
        assert "line" in dead.error


async def test_the_same_idempotency_key_twice_is_handled_once() -> None:
    handled: list[str] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None:
        handled.append(order.order_id)

    async with fg.Bus("memory:", nodes=[fg.Node("shop"), billing]) as bus:
        first = await bus.publish(OrderPlaced(order_id="1"), node="shop", idempotency_key="a")
        await bus.idle()
        second = await bus.publish(OrderPlaced(order_id="1"), node="shop", idempotency_key="a")
        other = await bus.publish(OrderPlaced(order_id="2"), node="shop", idempotency_key="b")
        await bus.idle()

    assert first == second != other
    assert handled == ["1", "2"]
