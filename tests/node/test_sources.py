"""Who publishes an event may be left out where one node is known to: `source=` of a handler, `node=` of a publish."""

from dataclasses import dataclass
from typing import Any

import pytest

import faregate as fg


class Placed(fg.Event):
    order_id: str


class PlacedForMailing(fg.Event, wire="Placed"):
    """The same event, as another service declares it."""


class Charge(fg.Command):
    order_id: str


PLACED = Placed(order_id="17")


def listener(name: str, got: list[str], cls: type = Placed, **options: Any) -> fg.Node:
    node = fg.Node(name)

    @node.on(cls, **options)
    async def listen(event: Any, ctx: fg.Context) -> None:
        got.append(f"{ctx.node} from {ctx.source}")

    return node


async def published(*nodes: fg.Node, **options: Any) -> None:
    async with fg.Bus("memory:", nodes=nodes) as bus:
        await bus.publish(PLACED, **options)
        await bus.idle(60)


async def test_a_node_that_says_what_it_publishes_need_not_be_named() -> None:
    got: list[str] = []
    shop = fg.Node("shop", publishes=[Placed])
    await published(shop, listener("billing", got), listener("mailing", got, PlacedForMailing))
    assert sorted(got) == ["billing from shop", "mailing from shop"]


async def test_one_subscription_that_names_the_source_speaks_for_all() -> None:
    got: list[str] = []
    await published(fg.Node("shop"), listener("billing", got, source="shop"), listener("mailing", got))
    assert sorted(got) == ["billing from shop", "mailing from shop"]


async def test_the_node_of_a_bus_that_has_one_publishes() -> None:
    got: list[str] = []
    await published(listener("diary", got, source="diary"))
    assert got == ["diary from diary"]


async def test_events_that_one_node_publishes_go_out_together_without_naming_it() -> None:
    got: list[str] = []
    nodes = [fg.Node("shop", publishes=[Placed]), listener("billing", got)]
    async with fg.Bus("memory:", nodes=nodes) as bus:
        assert len(await bus.publish_many([PLACED, fg.publish(PLACED, headers={"a": "b"})])) == 2
        await bus.idle(60)
    assert got == ["billing from shop"] * 2


def test_two_publishers_are_named_where_a_subscription_says_neither() -> None:
    nodes = [fg.Node("shop", publishes=[Placed]), fg.Node("market", publishes=[Placed]), listener("billing", [])]
    with pytest.raises(fg.ConfigurationError, match=r"billing.*: market, shop publish Placed; say.*source="):
        fg.Bus("memory:", nodes=nodes)


def test_an_event_that_nobody_is_known_to_publish_needs_a_source() -> None:
    with pytest.raises(fg.ConfigurationError, match=r"no node here is known to publish Placed\..*publishes=\[Placed\]"):
        fg.Bus("memory:", nodes=[fg.Node("shop"), listener("billing", [])])


async def test_a_publish_names_the_nodes_that_it_could_be() -> None:
    two = [fg.Node("shop", publishes=[Placed]), fg.Node("market", publishes=[Placed]), fg.Node("till")]
    async with fg.Bus("memory:", nodes=two) as bus:
        with pytest.raises(
            fg.ConfigurationError, match=r"which node publishes Placed, with node=, one of market, shop$"
        ):
            await bus.publish(PLACED)
    async with fg.Bus("memory:", nodes=[fg.Node("shop"), fg.Node("till")]) as bus:
        for call in (bus.publish(PLACED), bus.publish_many([PLACED]), bus.send(Charge(order_id="1"), to="till")):
            with pytest.raises(fg.ConfigurationError, match=r"with node=, one of shop, till$"):
                await call
        with pytest.raises(fg.ConfigurationError, match="no node 'shopp' on this bus; its nodes are: shop, till"):
            await bus.publish(PLACED, node="shopp")


def test_a_source_that_is_said_and_one_that_is_left_out_may_not_be_the_same() -> None:
    billing = listener("billing", [], source="shop")

    @billing.on(PlacedForMailing, name="again")
    async def again(event: PlacedForMailing) -> None: ...

    with pytest.raises(fg.HandlerConflict, match=r"handles Placed from shop twice: again leaves out source="):
        fg.Bus("memory:", nodes=[billing])


async def test_a_node_may_leave_its_source_to_several_buses() -> None:
    got: list[str] = []
    billing = listener("billing", got)
    await published(fg.Node("shop", publishes=[Placed]), billing)
    await published(fg.Node("market", publishes=[Placed]), billing)
    assert got == ["billing from shop", "billing from market"]


async def test_a_bench_stands_in_for_a_publisher_that_nobody_names() -> None:
    got: list[str] = []
    async with fg.testing.bench(listener("billing", got)) as bench:
        await bench.publish(PLACED)
        await bench.settle()
    assert got == ["billing from publisher"]


def test_on_spark_a_node_says_its_sources_itself() -> None:
    pytest.importorskip("pyspark", reason="needs the extra faregate[spark]")
    from faregate.spark.runs.run import _check

    _check(listener("billing", [], source="shop"), "memory:", None, "json", 1)
    with pytest.raises(
        fg.ConfigurationError, match=r"listen at billing \(Placed\): on Spark a node runs alone.*source="
    ):
        _check(listener("billing", []), "memory:", None, "json", 1)


def test_a_node_publishes_declared_events_only() -> None:
    @dataclass
    class Plain:
        number: int

    with pytest.raises(fg.UnknownMessage, match=r"@fg\.event"):
        fg.Node("shop", publishes=[Plain])
    with pytest.raises(fg.UnknownMessage, match="is a command"):
        fg.Node("shop", publishes=[Charge])
