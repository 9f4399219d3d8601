"""Message classes, codecs and evolution.

Structs, dataclasses, attrs classes and pydantic models travel alike; what a consumer declares is all it
needs to know; both codecs and compression give back what went in.
"""

import asyncio
import dataclasses
import datetime as dt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import faregate as fg


class OrderPlaced(fg.Event):
    order_id: str
    total: int


class ChargeCard(fg.Command, wire="charge-card"):
    order_id: str
    amount: int


class SlimOrder(fg.Event, wire="OrderPlaced"):
    order_id: str


class RicherOrder(fg.Event, wire="OrderPlaced"):
    order_id: str
    total: int
    currency: str = "EUR"


class Renamed(fg.Event, wire="order-renamed"):
    order_id: str


class Everything(fg.Event):
    text: str
    number: int
    real: float
    flag: bool
    raw: bytes
    when: dt.datetime
    maybe: int | None
    many: list[str]
    table: dict[str, int]


@dataclasses.dataclass
class PlainOrder:
    order_id: str
    total: int = 1


@fg.event(wire="declared-order")
@dataclasses.dataclass(frozen=True)
class DeclaredOrder:
    order_id: str


@fg.event
@dataclasses.dataclass(frozen=True)
class BareDeclaredOrder:
    order_id: str


@fg.command
@dataclasses.dataclass(frozen=True)
class DeclaredCommand:
    order_id: str


everything = st.builds(
    Everything,
    text=st.text(),
    number=st.integers(-(2**63), 2**63 - 1),
    real=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    raw=st.binary(max_size=200),
    when=st.datetimes(timezones=st.just(dt.UTC)),
    maybe=st.none() | st.integers(-5, 5),
    many=st.lists(st.text(max_size=5), max_size=5),
    table=st.dictionaries(st.text(max_size=5), st.integers(-9, 9), max_size=5),
)


async def received_by(consumer: type, sent: list[Any], **bus_options: Any) -> list[Any]:
    """What a serial handler of `consumer` gets when `sent` is published on a memory bus."""
    got: list[Any] = []
    reader = fg.Node("reader")

    async def read(message: Any) -> None:
        got.append(message)

    reader.on(consumer, source="writer", order=fg.Serial())(read)
    async with fg.Bus("memory:", nodes=[fg.Node("writer"), reader], **bus_options) as bus:
        await bus.publish_many(sent, node="writer")
        await bus.idle(timeout=30)
        assert [dead.error for dead in await bus.dead_letters()] == []
    return got


def test_messages_are_frozen() -> None:
    order = OrderPlaced(order_id="1", total=2)
    with pytest.raises(AttributeError):
        order.total = 3  # type: ignore[misc]
    assert order == OrderPlaced(order_id="1", total=2)


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.parametrize("compress_above", [None, 0, 300])
def test_what_is_published_is_what_the_handler_gets(codec: str, compress_above: int | None) -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(everything, max_size=6))
    def round_trip(messages: list[Everything]) -> None:
        got = asyncio.run(received_by(Everything, messages, codec=codec, compress_above=compress_above))
        assert got == messages

    round_trip()


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_compression_and_a_large_body_go_together(codec: str) -> None:
    big = OrderPlaced(order_id="x" * 50_000, total=1)
    assert await received_by(OrderPlaced, [big], codec=codec, compress_above=1_000) == [big]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_a_consumer_may_declare_fewer_fields(codec: str) -> None:
    got = await received_by(SlimOrder, [OrderPlaced(order_id="7", total=3)], codec=codec)
    assert got == [SlimOrder(order_id="7")]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_a_consumer_may_declare_more_fields_that_have_defaults(codec: str) -> None:
    got = await received_by(RicherOrder, [OrderPlaced(order_id="7", total=3)], codec=codec)
    assert got == [RicherOrder(order_id="7", total=3, currency="EUR")]


async def test_the_wire_name_is_the_class_name_unless_given() -> None:
    types: list[str] = []
    reader = fg.Node("reader")

    @reader.on(OrderPlaced, source="writer", order=fg.Serial())
    async def placed(message: OrderPlaced, ctx: fg.Context) -> None:
        types.append(ctx.type)

    @reader.on(Renamed, source="writer", order=fg.Serial())
    async def renamed(message: Renamed, ctx: fg.Context) -> None:
        types.append(ctx.type)

    async with fg.testing.bench(reader) as bench:
        await bench.publish(OrderPlaced(order_id="1", total=1))
        await bench.settle()
        await bench.publish(Renamed(order_id="1"))
        await bench.settle()

    assert types == ["OrderPlaced", "order-renamed"]


async def test_a_plain_dataclass_is_an_event_when_subscribed_with_a_source() -> None:
    sent = [PlainOrder(order_id="1", total=5)]
    got = await received_by(PlainOrder, sent)
    assert got == sent
    assert type(got[0]) is PlainOrder


async def test_a_plain_dataclass_is_a_command_when_subscribed_without_a_source() -> None:
    got: list[tuple[Any, str]] = []
    reader = fg.Node("reader")

    @reader.on(PlainOrder)
    async def read(order: PlainOrder, ctx: fg.Context) -> None:
        got.append((order, ctx.source))

    async with fg.Bus("memory:", nodes=[fg.Node("writer"), reader]) as bus:
        await bus.send(PlainOrder(order_id="1"), to="reader", node="writer")
        await bus.idle()

    assert got == [(PlainOrder(order_id="1"), "writer")]


async def test_a_declared_dataclass_uses_its_wire_name_and_may_be_returned() -> None:
    reader = fg.Node("reader")

    @reader.on(OrderPlaced, source="writer")
    async def read(order: OrderPlaced) -> Any:
        return [
            DeclaredOrder(order_id=order.order_id),
            BareDeclaredOrder(order_id=order.order_id),
            fg.send(DeclaredCommand(order_id=order.order_id), to="elsewhere"),
        ]

    async with fg.testing.bench(reader) as bench:
        await bench.publish(OrderPlaced(order_id="1", total=1))
        await bench.settle()
        assert bench.sent() == [
            DeclaredOrder(order_id="1"),
            BareDeclaredOrder(order_id="1"),
            DeclaredCommand(order_id="1"),
        ]
        envelopes = bench.envelopes()

    assert [envelope.type for envelope in envelopes] == [
        "declared-order",
        "BareDeclaredOrder",
        "DeclaredCommand",
    ]
    assert [envelope.kind for envelope in envelopes] == ["event", "event", "command"]


async def test_a_declared_dataclass_is_still_the_same_class() -> None:
    order = DeclaredOrder(order_id="1")
    assert dataclasses.asdict(order) == {"order_id": "1"}
    assert await received_by(DeclaredOrder, [order]) == [order]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_attrs_classes_travel_like_structs(codec: str) -> None:
    attrs = pytest.importorskip("attrs")

    @attrs.frozen
    class AttrsOrder:
        order_id: str
        total: int = 4

    sent = [AttrsOrder(order_id="1"), AttrsOrder(order_id="2", total=9)]
    assert await received_by(AttrsOrder, sent, codec=codec) == sent


@pytest.mark.parametrize("codec", ["json", "msgpack"])
async def test_pydantic_models_travel_like_structs(codec: str) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Line(pydantic.BaseModel):
        sku: str
        count: int = 1

    class PydanticOrder(pydantic.BaseModel):
        order_id: str
        placed: dt.datetime
        lines: list[Line]

    when = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)
    sent = [PydanticOrder(order_id="1", placed=when, lines=[Line(sku="a"), Line(sku="b", count=2)])]
    got = await received_by(PydanticOrder, sent, codec=codec)
    assert got == sent
    assert type(got[0]) is PydanticOrder


async def test_a_pydantic_model_validates_what_arrives() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Narrow(pydantic.BaseModel):
        order_id: str = pydantic.Field(max_length=3)

    narrow_cls = fg.event(wire="OrderPlaced")(Narrow)
    called: list[Any] = []
    reader = fg.Node("reader")

    async def read(message: Any) -> None:
        called.append(message)

    reader.on(narrow_cls, source="writer")(read)
    async with fg.Bus("memory:", nodes=[fg.Node("writer"), reader]) as bus:
        await bus.publish(OrderPlaced(order_id="far too long", total=1), node="writer")
        await bus.idle(timeout=30)
        [dead] = await bus.dead_letters()

    assert dead.reason == "undecodable"
    assert called == []


async def test_an_undeclared_returned_object_is_a_dead_letter_with_a_sentence_that_names_it() -> None:
    @dataclasses.dataclass
    class Stranger:
        order_id: str

    reader = fg.Node("reader")

    @reader.on(OrderPlaced, source="writer", retry=None, redeliver=None)
    async def read(order: OrderPlaced) -> Any:
        return Stranger(order_id=order.order_id)

    async with fg.testing.bench(reader) as bench:
        await bench.publish(OrderPlaced(order_id="1", total=1))
        await bench.settle()
        assert bench.sent() == []
        [dead] = bench.dead_letters()

    assert "Stranger" in dead.error


async def test_an_output_envelope_names_its_content_type_and_digest() -> None:
    reader = fg.Node("reader")

    @reader.on(OrderPlaced, source="writer")
    async def read(order: OrderPlaced) -> Any:
        return [Renamed(order_id="a"), Renamed(order_id="a"), Renamed(order_id="b")]

    async with fg.testing.bench(reader) as bench:
        await bench.publish(OrderPlaced(order_id="1", total=1))
        await bench.settle()
        first, same, other = bench.envelopes(Renamed)

    assert "json" in first.content_type
    assert first.body_digest
    assert first.body_digest == same.body_digest != other.body_digest
