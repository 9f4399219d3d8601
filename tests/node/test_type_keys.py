"""The key of a message type: whoever publishes fills it in, and a subscription may be parted by it."""

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ids import slot_of
from faregate.message import Envelope, known
from faregate.node.key import type_key
from faregate.node.subscription import Subscription
from faregate.stores.sqlite import SqliteStore


class Placed(fg.Event, key="order_id"):
    order_id: str
    total: int = 0


class Moved(fg.Command, wire="move", key=("shelf", "place")):
    shelf: str
    place: int


@fg.event(key="sku")
@dataclass(frozen=True)
class StockLow:
    sku: str


class Plain(fg.Event):
    number: int


def test_a_class_names_its_key_in_every_way_that_it_can_be_declared() -> None:
    keys = {cls: found.key for cls in (Placed, Moved, StockLow, Plain) if (found := known(cls))}
    assert keys == {Placed: ("order_id",), Moved: ("shelf", "place"), StockLow: ("sku",), Plain: ()}

    class Special(Placed):
        """A subclass is a class of its own, with a wire name and a key of its own."""

    assert type_key(Special) is None


@pytest.mark.parametrize(
    ("key", "says"), [("order", "'order' is not a field of Wrong; its fields are: number"), ((), "a tuple of fields")]
)
def test_a_key_that_is_no_field_is_refused_where_the_class_is_declared(key: Any, says: str) -> None:
    with pytest.raises(fg.UnknownKey, match=says):

        class Wrong(fg.Event, key=key):
            number: int

    with pytest.raises(fg.ConfigurationError, match="is not a field of Kept"):

        @fg.command(key="nothing")
        @dataclass
        class Kept:
            number: int


def test_the_slot_of_a_key_is_the_same_in_every_version() -> None:
    assert [slot_of(key) for key in ("17", "", "ä", '["a","1"]', None)] == ["66", "0", "131", "60", "-"]


async def test_whoever_publishes_fills_in_the_key_of_the_type_whatever_subscriptions_order_by(tmp_path: Path) -> None:
    """A bus without any subscription does; subscriptions that order by another field change nothing about it."""
    shop, other = fg.Node("shop"), fg.Node("other")
    seen: list[tuple[str, str | None, str | None]] = []

    @other.on(Placed, source="shop", key="total")
    async def take(placed: Placed, ctx: fg.Context) -> Any:
        seen.append((placed.order_id, ctx.envelope.key, ctx.key))
        yield StockLow(sku="s")
        yield fg.send(Moved(shelf="a", place=1), to="other")

    @other.on(Moved)
    async def move(moved: Moved, ctx: fg.Context) -> None:
        seen.append(("moved", ctx.envelope.key, ctx.key))

    async with fg.testing.bench(shop, other) as bench:
        await bench.publish(Placed(order_id="17", total=3), node="shop")
        await bench.settle()
        assert [each.key for each in bench.envelopes(StockLow)] == ["s"]
    assert seen == [("17", "17", "3"), ("moved", '["a","1"]', None)]

    store = SqliteStore(f"sqlite:{tmp_path}/shop.db")
    await store.open()
    try:
        connection = sqlite3.connect(tmp_path / "shop.db")
        with connection:
            fg.outbox(connection, node="shop").publish(Placed(order_id="18"))
        connection.close()
        [row] = await store.undispatched(10)
        assert (row.key, row.envelope.key) == ("18", "18")
    finally:
        await store.close()


def subscription(cls: type, **options: Any) -> Subscription:
    node = fg.Node("node")

    @node.on(cls, source="shop", **options)
    async def take(message: Any) -> None:
        """Nothing is done with it."""

    [found] = node.subscriptions.values()
    return found


def test_a_subscription_is_ordered_by_the_key_of_its_type_only_if_it_says_so() -> None:
    assert not subscription(Placed).ordered
    assert subscription(Placed).binding(0).partitions is None
    by_type = subscription(Placed, order=fg.ByKey(lanes=3))
    assert by_type.by_key and by_type.key == type_key(Placed)
    key_of = by_type.binding(100).key_of
    assert key_of is not None and key_of(Envelope(body=b'{"order_id": "17"}')) == "17"
    with pytest.raises(fg.UnknownKey, match="needs key="):
        subscription(Plain, order=fg.ByKey())


@pytest.mark.parametrize(
    ("options", "partitions"),
    [
        ({"key": "order_id"}, 8),
        ({"key": "order_id", "partitions": 256}, 256),
        ({"order": fg.ByKey(), "partitions": 1}, 1),
        ({"key": "total"}, 1),
        ({"key": ("order_id", "total")}, 1),
        ({"key": "order_id", "order": fg.Serial()}, 1),
        ({"order": fg.Serial()}, 1),
        ({"key": "order_id", "order": fg.Parallel(3)}, None),
    ],
)
def test_what_is_ordered_by_the_key_of_its_type_can_be_parted(options: Any, partitions: int | None) -> None:
    assert subscription(Placed, **options).binding(0).partitions == partitions


@pytest.mark.parametrize(
    "options", [{}, {"key": "total"}, {"key": "order_id", "order": fg.Serial()}, {"order": fg.Parallel()}]
)
def test_parting_by_anything_else_is_refused_with_the_reason(options: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match="parts messages by the key of their type"):
        subscription(Placed, partitions=2, **options)


@pytest.mark.parametrize("partitions", [0, 257, True, "8"])
def test_the_number_of_partitions_has_bounds(partitions: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match="partitions must be a whole number from 1 to 256"):
        subscription(Placed, key="order_id", partitions=partitions)
