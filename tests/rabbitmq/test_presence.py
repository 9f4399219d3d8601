"""Heartbeats, and `faregate status`, on a real broker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pamqp.commands
import pytest
from rich.console import Console
from typer.testing import CliRunner

import faregate as fg
from faregate.bus import heart
from faregate.cli import app
from faregate.cli.status import Seen
from faregate.ports.presence import Consumed, Heartbeat
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.names import PRESENCE
from faregate.transports.rabbitmq.presence import announce, listen
from faregate.transports.rabbitmq.topology import declare_exchange
from tests.rabbitmq.rig import Counted, Shop, running
from tests.rabbitmq.site import Site

_LONG = 60.0


class Listener:
    def __init__(self) -> None:
        self.heard: list[Heartbeat] = []
        self._changed = asyncio.Event()

    def hear(self, beat: Heartbeat) -> None:
        self.heard.append(beat)
        self._changed.set()

    async def until(self, is_meant: Callable[[Heartbeat], bool]) -> Heartbeat:
        async with asyncio.timeout(_LONG):
            while True:
                for beat in self.heard:
                    if is_meant(beat):
                        return beat
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def listening(broker: str) -> AsyncIterator[Listener]:
    """Returns once it listens: it has heard itself."""
    transport, listener = RabbitmqQueue(broker), Listener()
    await transport.open()
    task = asyncio.create_task(transport.on_channel(lambda channel: listen(channel, listener.hear, 10 * _LONG)))
    try:
        me = Heartbeat("nobody", str(id(listener)), "", 0.0, 0.0, [], {})
        async with asyncio.timeout(_LONG):
            while me not in listener.heard:
                await transport.announce([me])
                await asyncio.sleep(0.05)
        yield listener
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await transport.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart, "HEARTBEAT_SECONDS", 0.2)


async def test_an_instance_tells_what_it_consumes_and_how_it_fares_and_that_it_leaves(broker: str, quick: None) -> None:
    shop = Shop()
    async with listening(broker) as listener:
        async with running(broker, shop) as bus:
            for number in range(5):
                await bus.publish(Counted(number=number), node=shop.author)
            await shop.until_seen(5)
            beat = await listener.until(
                lambda beat: beat.node == shop.reader.name and beat.consumes[0].handled == 5 and not beat.leaving
            )
            assert beat.instance == bus.instance
            assert beat.version == fg.__version__
            [consumed] = beat.consumes
            assert (consumed.type, consumed.source) == ("Counted", shop.author.name)
            assert consumed.queues == [f"{shop.reader.name}.Counted.{shop.author.name}"]
            assert (consumed.redelivered, consumed.dead, consumed.paused) == (0, 0, False)
            mine = [each for each in listener.heard if each.node == shop.reader.name]
            assert sum(each.consumes[0].per_second for each in mine) > 0
            author = await listener.until(lambda beat: beat.node == shop.author.name)
            assert author.consumes == []

            await bus.pause(shop.reader, Counted)
            paused = await listener.until(lambda beat: any(each.paused for each in beat.consumes))
            assert paused.consumes[0].queues == []
        last = await listener.until(lambda beat: beat.node == shop.reader.name and beat.leaving)
        assert last.consumes[0].handled == 5


async def test_instances_tell_which_partitions_they_hold(site: Site, quick: None) -> None:
    async with listening(site.broker) as listener, site.bus() as one, site.bus() as two:

        def halves(beat: Heartbeat) -> bool:
            last = {each.instance: each.consumes[0].queues for each in listener.heard if each.node == site.name}
            return sorted(map(len, last.values())) == [2, 2] and beat.node == site.name

        await listener.until(halves)
        held = {each.instance: set(each.consumes[0].queues) for each in listener.heard if each.node == site.name}
        assert held.keys() == {one.instance, two.instance}
        assert held[one.instance] | held[two.instance] == {f"{site.queue}.g1-{number}" for number in range(4)}


async def test_what_others_write_there_is_passed_over(broker: str) -> None:
    transport = RabbitmqQueue(broker)
    await transport.open()
    good = Heartbeat("good", "one", "0", 1.0, 2.0, [Consumed("T", None, [], 0.0, 1, 2, 3, 4, False)], {"stalled": 1})

    async def write(channel: BatchChannel) -> None:
        await declare_exchange(channel, PRESENCE)
        deep = b'{"other": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        for body in (
            b"",
            b"\xff\xfe",
            b"[]",
            b'{"node": 3}',
            b'{"node": "\xff"}',
            deep,
            b'"' + b"x" * (2 << 20) + b'"',
        ):
            await channel.basic_publish(
                body, exchange=PRESENCE, routing_key="stranger", properties=pamqp.commands.Basic.Properties()
            )
        await announce(channel, [good])

    try:
        async with listening(broker) as listener:
            await transport.on_channel(write)
            assert await listener.until(lambda beat: beat.node == "good") == good
            assert {beat.node for beat in listener.heard} <= {"good", "nobody"}
    finally:
        await transport.close()


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    seen = Seen("amqp://here", [])
    seen.hear(
        Heartbeat("[/x]", "[red]one[/y]", "0", 1.0, 2.0, [Consumed("[T]", None, ["[q]"], 0, 1, 2, 3, 4, False)], {})
    )
    console = Console(width=120)
    with console.capture() as shown:
        console.print(seen.shown())
    assert "[/x]" in shown.get() and "[red]one[/y]" in shown.get() and "[T]" in shown.get()


async def test_a_bus_runs_where_heartbeats_cannot_be_sent(
    broker: str, quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    async def fail(self: RabbitmqQueue, heartbeats: object) -> None:
        nonlocal tries
        tries += 1
        raise fg.errors.BrokerUnavailable("away")

    monkeypatch.setattr(RabbitmqQueue, "announce", fail)
    shop = Shop()
    async with running(broker, shop) as bus:
        await bus.publish(Counted(number=1), node=shop.author)
        await shop.until_seen(1)
        await shop.until(lambda: tries > 2)
    told = [record for record in caplog.records if "heartbeats" in record.message]
    assert len(told) == 1


async def _status(*arguments: str) -> tuple[int, str]:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["status", *arguments])
    error = result.exception if isinstance(result.exception, fg.errors.FaregateError) else ""
    return result.exit_code, f"{result.output}{error}"


async def test_status_shows_who_runs_and_what_nobody_runs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def named() -> Any:
        return site.bus()

    from tests.rabbitmq import site as module

    monkeypatch.setattr(module, "bus", named, raising=False)
    target = f"{module.__name__}:bus"
    code, told = await _status(target, "--wait", "0.5", "--json")
    assert (code, json.loads(told)["missing"]) == (1, [site.name])

    async with site.bus() as bus:
        await site.publish(3)
        code, told = await _status(target, "--json")
        found = json.loads(told)
        assert (code, found["missing"]) == (0, [])
        [mine] = [each for each in found["nodes"] if each["node"] == site.name]
        assert mine["instance"] == bus.instance
        assert [each["queues"] for each in mine["consumes"]] == [[f"{site.queue}.g1-{number}" for number in range(4)]]
        code, told = await _status(target)
        assert code == 0
        assert site.name in told and "Step" in told and "0 1 2 3" in told
    code, told = await _status(site.broker, "--wait", "0.5")
    assert code == 0
