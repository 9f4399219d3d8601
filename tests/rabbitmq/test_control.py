"""`faregate pause` and `faregate resume` through RabbitMQ, to every instance of a node, on a real broker."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import urlsplit

import pamqp.commands
import pytest
from typer.testing import CliRunner

import faregate as fg
from faregate.bus import control, heart
from faregate.cli import app
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.names import PRESENCE
from tests.rabbitmq.rig import Counted, Shop, running
from tests.rabbitmq.site import Site, in_order

_LONG = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(control, "_FIRST_PAUSE", 0.05)


async def faregate(*arguments: str) -> tuple[int, str]:
    result = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--wait", "1.5"])
    error = result.exception if isinstance(result.exception, fg.errors.FaregateError) else ""
    return result.exit_code, f"{result.output}{error}"


async def until(is_so: Callable[[], bool], again: Callable[[], Awaitable[None]] | None = None) -> None:
    """`again`: what is done before each look."""
    async with asyncio.timeout(_LONG):
        while True:
            if again is not None:
                await again()
            if is_so():
                return
            await asyncio.sleep(0.05)


async def until_heeding(node: str, *buses: fg.Bus) -> None:
    """Their queues for instructions are bound: each has paused and resumed."""
    pause, resume = (b'{"command": "%s", "node": "%s"}' % (each, node.encode()) for each in (b"pause", b"resume"))
    await until(lambda: all(map(paused, buses)), partial(write, buses[0], node, pause))
    await until(lambda: not any(map(paused, buses)), partial(write, buses[0], node, resume))


async def write(bus: fg.Bus, node: str, body: bytes) -> None:
    assert isinstance(bus.transport, RabbitmqQueue)

    async def publish(channel: BatchChannel) -> None:
        await channel.basic_publish(
            body, exchange=PRESENCE, routing_key=f"asked.{node}", properties=pamqp.commands.Basic.Properties()
        )

    await bus.transport.on_channel(publish)


def paused(bus: fg.Bus) -> bool:
    return all(each.paused for each in bus.counts())


@pytest.mark.timeout(600)  # two starts took a minute on a busy machine
async def test_every_instance_of_a_node_follows_and_the_order_of_keys_holds(site: Site) -> None:
    async with site.bus() as one, site.bus() as two:
        await until_heeding(site.name, one, two)
        await site.publish(70)
        code, told = await faregate("pause", site.name, "Step", site.broker, "--json")
        assert code == 0, told
        found = json.loads(told)["subscriptions"]
        assert {each["instance"] for each in found} == {one.instance, two.instance}
        assert all(each["follows"] and each["paused"] and each["type"] == "Step" for each in found)
        assert paused(one) and paused(two)
        await until(lambda: not one.counts()[0].busy and not two.counts()[0].busy)
        seen = sum(map(len, site.seen().values()))
        await site.publish_more(70, 140)
        assert sum(map(len, site.seen().values())) == seen
        code, told = await faregate("resume", site.name, "Step", site.broker)
        assert code == 0, told
        assert told.count("running") == 2
        assert urlsplit(site.broker).password not in told.replace(one.instance, "").replace(two.instance, "")
        await site.until_seen(140)
        assert site.seen() == in_order(140)


async def test_a_pause_that_is_over_before_the_command_has_been_obeyed_all_the_same(broker: str) -> None:
    shop = Shop()
    async with running(broker, shop) as bus:
        await until_heeding(shop.reader.name, bus)
        _, told = await faregate("pause", "all", "Counted", broker, "--seconds", "0.3", "--json")
        mine = [each for each in json.loads(told)["subscriptions"] if each["instance"] == bus.instance]
        assert [each["follows"] for each in mine] == [True], told
        await until(lambda: not paused(bus))


async def test_who_does_not_follow_is_named_and_makes_the_status_one(broker: str) -> None:
    shop = Shop()
    async with running(broker, shop, control=False) as bus:
        code, told = await faregate("pause", shop.reader.name, "Counted", broker)
        assert (code, f"{bus.instance}: running; it does not follow" in told) == (1, True), told
        assert not paused(bus)


async def test_what_nobody_takes_is_an_error_that_lists_what_there_is(broker: str) -> None:
    shop = Shop()
    async with running(broker, shop):
        code, told = await faregate("pause", shop.reader.name, "Nope", broker)
        assert code == 1
        assert f"takes Nope at node '{shop.reader.name}'; there are: " in told
        assert f"{shop.reader.name} Counted" in told
        code, told = await faregate("resume", "nobody", "all", broker)
        assert code == 1 and "takes anything at node 'nobody'" in told


async def test_what_others_write_there_changes_nothing(broker: str, caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    async with running(broker, shop) as bus:
        await until_heeding(shop.reader.name, bus)
        node = shop.reader.name
        name = node.encode()
        for body in (
            b"",
            b"\xff",
            b"[]",
            b"[" * 100_000,
            b'{"command": "pause"}',  # every node of every bus: nobody may ask for that in one word
            b'{"command": "pause", "node": "other"}',
            b'{"command": "pause", "node": "%s", "type": "Nope"}' % name,
            b'{"command": "pause", "node": "%s", "seconds": -1}' % name,
            b'{"command": "stop", "node": "%s"}' % name,
            b'"' + b"x" * (2 << 20) + b'"',
        ):
            await write(bus, node, body)
        await bus.publish(Counted(number=1), node=shop.author)
        await shop.until_seen(1)
        assert not paused(bus)
        await write(bus, node, b'{"command": "pause", "node": "%s", "unknown": 1}' % name)
        await until(lambda: paused(bus))
    assert "Traceback" not in caplog.text


async def test_instructions_are_heard_again_after_the_connection_was_lost(broker: str) -> None:
    shop = Shop()
    async with running(broker, shop) as bus:
        await until_heeding(shop.reader.name, bus)
        assert isinstance(bus.transport, RabbitmqQueue)
        connection = bus.transport._publishing._connection
        assert connection is not None
        await connection.close()
        await until_heeding(shop.reader.name, bus)


async def test_a_bus_whose_instructions_cannot_be_heard_runs(
    broker: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(self: RabbitmqQueue, nodes: object, asked: object) -> None:
        raise fg.errors.ConfigurationError("no rights")

    monkeypatch.setattr(RabbitmqQueue, "heed", refuse)
    shop = Shop()
    async with running(broker, shop) as bus:
        await bus.publish(Counted(number=1), node=shop.author)
        await shop.until_seen(1)
    assert "do not reach this instance: no rights" in caplog.text
