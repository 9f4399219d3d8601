"""Mistakes are found at declaration, with a sentence that says what to change."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

import faregate as fg


class OrderPlaced(fg.Event):
    order_id: str


class SameWire(fg.Event, wire="OrderPlaced"):
    order_id: str


class ChargeCard(fg.Command):
    order_id: str


@pytest.mark.parametrize("name", ["", " ", "two words", "a/b", "line\nbreak", "bill*", None, 7])
def test_a_bad_node_name_is_refused(name: Any) -> None:
    with pytest.raises(fg.InvalidName) as caught:
        fg.Node(name)
    assert isinstance(caught.value, fg.ConfigurationError)


@pytest.mark.parametrize("name", ["billing", "billing-eu", "billing2"])
def test_a_plain_node_name_is_accepted(name: str) -> None:
    assert fg.Node(name).name == name


@pytest.mark.parametrize("wire", ["", "two words", "line\nbreak"])
def test_a_bad_wire_name_is_refused(wire: str) -> None:
    with pytest.raises(fg.InvalidName):

        class Bad(fg.Event, wire=wire):
            order_id: str

        fg.Node("billing").on(Bad, source="shop")(lambda message: None)


@pytest.mark.parametrize("source", ["", "two words"])
def test_a_bad_source_name_is_refused(source: str) -> None:
    with pytest.raises(fg.InvalidName):

        @fg.Node("billing").on(OrderPlaced, source=source)
        async def bill(order: OrderPlaced) -> None: ...


@pytest.mark.parametrize("target", [int, str, "OrderPlaced", 42, None, fg.Event, fg.Command])
def test_what_is_no_message_class_is_refused(target: Any) -> None:
    with pytest.raises(fg.UnknownMessage) as caught:

        @fg.Node("billing").on(target, source="shop")
        async def bill(order: Any) -> None: ...

    assert isinstance(caught.value, fg.ConfigurationError)


def test_an_event_that_no_node_of_the_bus_publishes_needs_a_source_and_the_sentence_says_so() -> None:
    with pytest.raises(fg.ConfigurationError, match="source"):
        billing = fg.Node("billing")

        @billing.on(OrderPlaced)
        async def bill(order: OrderPlaced) -> None: ...

        fg.Bus("memory:", nodes=[billing])


def test_a_command_has_no_source_and_the_sentence_says_so() -> None:
    with pytest.raises(fg.ConfigurationError, match="source"):

        @fg.Node("billing").on(ChargeCard, source="shop")
        async def charge(cmd: ChargeCard) -> None: ...


def test_a_handler_without_parameters_is_refused_by_name() -> None:
    with pytest.raises(fg.WrongSignature, match="forgetful"):

        @fg.Node("billing").on(OrderPlaced, source="shop")
        async def forgetful() -> None: ...


def test_a_handler_annotated_for_another_message_is_refused() -> None:
    with pytest.raises(fg.WrongSignature, match="ChargeCard"):

        @fg.Node("billing").on(OrderPlaced, source="shop")
        async def mixed_up(order: ChargeCard) -> None: ...


def test_an_unannotated_extra_parameter_is_refused_by_name() -> None:
    with pytest.raises(fg.WrongSignature, match="mystery"):

        @fg.Node("billing").on(OrderPlaced, source="shop")
        async def bill(order: OrderPlaced, ctx: fg.Context, mystery) -> None: ...  # type: ignore[no-untyped-def]


def test_what_cannot_be_called_is_no_handler() -> None:
    with pytest.raises(fg.ConfigurationError):
        fg.Node("billing").on(OrderPlaced, source="shop")("not a function")  # type: ignore[type-var]


async def test_a_resource_nobody_provides_is_found_before_the_first_message() -> None:
    class Session: ...

    billing = fg.Node("billing")
    with pytest.raises(fg.ConfigurationError, match="Session"):

        @billing.on(OrderPlaced, source="shop")
        async def bill(order: OrderPlaced, session: Session) -> None: ...

        async with fg.testing.bench(billing):
            pass


def test_a_provider_without_a_return_annotation_is_refused() -> None:
    with pytest.raises(fg.ConfigurationError, match="untold"):

        @fg.Node("billing").provides
        async def untold():  # type: ignore[no-untyped-def]
            yield 1


def test_two_providers_of_one_type_are_refused() -> None:
    class Session: ...

    billing = fg.Node("billing")

    @billing.provides
    async def first() -> AsyncIterator[Session]:
        yield Session()

    with pytest.raises(fg.ConfigurationError, match="Session"):

        @billing.provides
        async def second() -> AsyncIterator[Session]:
            yield Session()


def test_two_interpreters_of_one_effect_are_refused() -> None:
    class Effect: ...

    billing = fg.Node("billing")

    @billing.interprets(Effect)
    async def first(effect: Effect) -> None: ...

    with pytest.raises(fg.ConfigurationError, match="Effect"):

        @billing.interprets(Effect)
        async def second(effect: Effect) -> None: ...


@pytest.mark.parametrize("again", [OrderPlaced, SameWire])
def test_two_handlers_for_one_type_and_source_conflict(again: type) -> None:
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def first(order: OrderPlaced) -> None: ...

    with pytest.raises(fg.HandlerConflict) as caught:

        @billing.on(again, source="shop")
        async def second(order: Any) -> None: ...

    for word in ("billing", "OrderPlaced", "shop"):
        assert word in str(caught.value)


def test_two_handlers_for_one_command_conflict() -> None:
    billing = fg.Node("billing")

    @billing.on(ChargeCard)
    async def first(cmd: ChargeCard) -> None: ...

    with pytest.raises(fg.HandlerConflict, match="ChargeCard"):

        @billing.on(ChargeCard)
        async def second(cmd: ChargeCard) -> None: ...


async def test_one_type_from_two_sources_is_no_conflict() -> None:
    heard: list[str] = []
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def from_shop(order: OrderPlaced, ctx: fg.Context) -> None:
        heard.append(f"from_shop {ctx.source}")

    @billing.on(OrderPlaced, source="kiosk")
    async def from_kiosk(order: OrderPlaced, ctx: fg.Context) -> None:
        heard.append(f"from_kiosk {ctx.source}")

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"), node="kiosk")
        await bench.settle()
        await bench.publish(OrderPlaced(order_id="1"), node="shop")
        await bench.settle()

    assert heard == ["from_kiosk kiosk", "from_shop shop"]


def test_order_by_key_needs_a_key() -> None:
    with pytest.raises(fg.ConfigurationError, match="key"):

        @fg.Node("billing").on(OrderPlaced, source="shop", order=fg.ByKey(lanes=2))
        async def bill(order: OrderPlaced) -> None: ...


@pytest.mark.parametrize(
    "annotation",
    [ChargeCard, ChargeCard | None, list[ChargeCard], AsyncIterator[ChargeCard]],
    ids=["plain", "optional", "list", "iterator"],
)
def test_a_bare_command_in_the_return_annotation_is_refused(annotation: Any) -> None:
    async def bill(order: OrderPlaced) -> Any: ...

    bill.__annotations__["return"] = annotation
    with pytest.raises(fg.BareCommand, match="send"):
        fg.Node("billing").on(OrderPlaced, source="shop")(bill)


async def test_a_bare_command_returned_unannounced_is_a_dead_letter_with_that_error() -> None:
    billing = fg.Node("billing")

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=None)
    async def bill(order: OrderPlaced):  # type: ignore[no-untyped-def]
        return ChargeCard(order_id=order.order_id)

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == []
        [dead] = bench.dead_letters()

    assert "BareCommand" in dead.error
    assert "ChargeCard" in dead.error


@pytest.mark.parametrize("mode", ["sometimes", "on", "", "Ledger", None, True])
def test_an_unknown_dedup_mode_is_refused(mode: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match=f"dedup.*{mode}"):

        @fg.Node("billing").on(OrderPlaced, source="shop", dedup=mode)
        async def bill(order: OrderPlaced) -> None: ...


@pytest.mark.parametrize(
    "build",
    [
        lambda: fg.Parallel(0),
        lambda: fg.ByKey(lanes=0),
        lambda: fg.Retry(-1),
        lambda: fg.Retry(1, delay=-1),
        lambda: fg.Redeliver(-10),
    ],
    ids=["parallel", "lanes", "retry", "delay", "redeliver"],
)
def test_numbers_that_make_no_sense_are_refused(build: Any) -> None:
    with pytest.raises((fg.ConfigurationError, ValueError)):
        build()


async def test_two_nodes_of_one_name_do_not_share_a_bus() -> None:
    with pytest.raises(fg.ConfigurationError, match="shop"):
        async with fg.Bus("memory:", nodes=[fg.Node("shop"), fg.Node("shop")]):
            pass


async def test_an_unknown_transport_is_refused_and_named() -> None:
    with pytest.raises(fg.ConfigurationError, match="pigeon"):
        async with fg.Bus("pigeon:", nodes=[fg.Node("shop")]):
            pass


def test_the_error_tree_is_one_tree() -> None:
    configuration = [
        fg.InvalidName,
        fg.UnknownMessage,
        fg.WrongSignature,
        fg.HandlerConflict,
        fg.UnknownKey,
        fg.BareCommand,
    ]
    others = [
        fg.ConfigurationError,
        fg.Unroutable,
        fg.MessageTooLarge,
        fg.Permanent,
        fg.RetryAfter,
        fg.Unavailable,
        fg.DuplicateIdKey,
    ]
    assert [error for error in configuration if not issubclass(error, fg.ConfigurationError)] == []
    assert [error for error in others if not issubclass(error, fg.FaregateError)] == []
    assert [name for name in fg.__all__ if not hasattr(fg, name)] == []
