"""Cancelling and recurring functions on a real RabbitMQ, with several instances; and sources that nobody runs."""

import asyncio
import uuid
from collections import Counter
from pathlib import Path

import pytest

import faregate as fg
from faregate.bus import mistakes
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.rabbitmq.rig import remove_queues
from tests.rabbitmq.test_kill_switch import until

pytestmark = pytest.mark.services
LONG = 120


class Due(fg.Command):
    order: str


class Placed(fg.Event):
    order: str


async def clear(bus: fg.Bus) -> None:
    assert isinstance(bus.transport, RabbitmqQueue)
    await remove_queues(bus.transport)


def orders(name: str, seen: list[str]) -> fg.Node:
    node = fg.Node(name)

    @node.on(Placed, source=name)
    async def start(placed: Placed) -> fg.Outgoing:
        return fg.send(Due(order=placed.order), to=name, delay=1, id_key=f"due-{placed.order}")

    @node.on(Due)
    async def late(due: Due) -> None:
        seen.append(due.order)

    return node


async def test_what_is_cancelled_at_one_instance_is_delivered_at_none(broker: str, tmp_path: Path) -> None:
    name, seen = f"orders-{uuid.uuid4().hex[:8]}", list[str]()
    store = f"sqlite:{tmp_path}/s.db"
    one = fg.Bus(broker, nodes=[orders(name, seen)], store=store)
    two = fg.Bus(broker, nodes=[orders(name, seen)], store=store)
    async with asyncio.timeout(LONG), one, two:
        kept = await one.send(Due(order="kept"), to=name, delay=2)
        gone = await one.send(Due(order="gone"), to=name, delay=2)
        await one.publish(Placed(order="17"))
        await until(lambda: one.outcomes()["handled"] + two.outcomes()["handled"] == 1)
        assert await two.cancel(gone) and not await one.cancel(gone)
        assert await two.cancel(key="due-17")
        await until(lambda: seen == ["kept"])
        assert not await one.cancel(kept)
        await clear(two)
    assert seen == ["kept"]


async def test_without_a_store_cancelling_is_refused(broker: str) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    node = fg.Node(name)
    async with asyncio.timeout(LONG), fg.Bus(broker, nodes=[node]) as bus:
        with pytest.raises(fg.ConfigurationError, match=r'it lacks "cancel".*Give the node a store'):
            await bus.cancel("some-id")
    assert "cancel" not in RabbitmqQueue.capabilities


async def test_several_instances_make_each_tick_once(broker: str, tmp_path: Path) -> None:
    name, ticks = f"shop-{uuid.uuid4().hex[:8]}", Counter[float]()

    def shop() -> fg.Node:
        node = fg.Node(name, schema="create table if not exists runs (due real)")

        @node.every(1)
        async def clean(tick: fg.Tick, ctx: fg.Context) -> None:
            await ctx.db.execute("insert into runs values (?)", (tick.due.timestamp(),))
            ticks[tick.due.timestamp()] += 1

        return node

    buses = [fg.Bus(broker, nodes=[shop()], store=f"sqlite:{tmp_path}/s.db") for _ in range(3)]
    async with asyncio.timeout(LONG), buses[0], buses[1], buses[2]:
        await until(lambda: len(ticks) >= 4)
        store = buses[0].store_of(name)
        assert store is not None
        async with store.transaction() as transaction:
            runs = [due for (due,) in await transaction.fetchall("select due from runs")]
        await clear(buses[0])
    assert len(runs) == len(set(runs)) >= 3, f"a tick ran twice: {runs}"
    assert sorted(runs) == [min(runs) + number for number in range(len(runs))], f"a tick is missing: {runs}"


async def test_a_source_is_missed_until_its_process_is_heard(broker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "_HEARD_SECONDS", 0.2)
    suffix = uuid.uuid4().hex[:8]
    source, reader = f"shop-{suffix}", fg.Node(f"reader-{suffix}")

    @reader.on(Placed, source=source)
    async def read(placed: Placed) -> None: ...

    def notices(bus: fg.Bus) -> list[str]:
        return [notice for node in bus.status().nodes for notice in node.notices]

    async with asyncio.timeout(LONG), fg.Bus(broker, nodes=[reader]) as bus:
        await until(lambda: bool(notices(bus)))
        assert source in notices(bus)[0] and bus.alarms["unknown-source"] == 1
        async with fg.Bus(broker, nodes=[fg.Node(source)]):
            await until(lambda: not notices(bus))
        await clear(bus)
