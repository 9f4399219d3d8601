"""Looking after what is on the broker: generations of partitions, `faregate rabbitmq doctor` and `migrate`."""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import faregate as fg
from faregate.cli import app
from faregate.ports.queue import Partitioned
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.names import moving_queue
from faregate.transports.rabbitmq.survey import look_at
from tests.rabbitmq.instance import Step, make_node
from tests.rabbitmq.rig import remove_queues

pytestmark = pytest.mark.services


class Site:
    """A node with a name of its own on a broker, and its store."""

    def __init__(self, broker: str, folder: Path) -> None:
        suffix = uuid.uuid4().hex[:8]
        self.broker, self.store = broker, f"sqlite:{folder}/site.db"
        self.author, self.name = f"author-{suffix}", f"ledger-{suffix}"
        self.queue = f"{self.name}.Step.{self.author}"
        parted = [f"{self.queue}.g{generation}-{number}" for generation in (1, 2) for number in range(6)]
        self.names = [self.queue, f"{self.name}-dead", *parted]

    def bus(self, partitions: int = 4) -> fg.Bus:
        author = fg.Node(self.author)
        return fg.Bus(self.broker, nodes=[author, make_node(self.name, self.author, partitions)], store=self.store)

    async def publish(self, count: int) -> None:
        async with fg.Bus(self.broker, nodes=[fg.Node(self.author)]) as bus:
            for number in range(count):
                await bus.publish(Step(account=f"account-{number % 7}", number=number))

    async def run(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, Any]:
        """`faregate rabbitmq …` on this bus: its exit status, and what it says in JSON."""
        module = ModuleType("site_under_test")
        module.bus = self.bus  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "site_under_test", module)
        command = ["rabbitmq", arguments[0], "site_under_test:bus", *arguments[1:], "--json"]
        result = await asyncio.to_thread(CliRunner().invoke, app, command, catch_exceptions=False)
        return result.exit_code, json.loads(result.stdout)


@pytest.fixture
async def site(broker: str, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(broker, tmp_path)
    yield site
    transport = RabbitmqQueue(broker)
    await transport.open()
    await remove_queues(transport, *site.names, *map(moving_queue, site.names))
    await transport.close()


async def left(site: Site) -> list[str]:
    """Which of the queues that the node may have are there."""
    transport = RabbitmqQueue(site.broker)
    await transport.open()
    seen = [await look_at(transport, name, "current") for name in site.names]
    await transport.close()
    return [each.name for each in seen if each.exists]


async def declare(broker: str, *queues: str, **options: Any) -> None:
    """Make queues as somebody else would."""

    async def make(channel: BatchChannel) -> None:
        for queue in queues:
            await channel.queue_declare(queue, durable=True, **options)

    transport = RabbitmqQueue(broker)
    await transport.open()
    await transport.on_channel(make)
    await transport.close()


async def purge(broker: str, queue: str) -> None:
    async def empty(channel: BatchChannel) -> None:
        await channel.queue_purge(queue)

    transport = RabbitmqQueue(broker)
    await transport.open()
    await transport.on_channel(empty)
    await transport.close()


def found(told: Any) -> dict[str, tuple[str, str]]:
    """What is to be done, by queue."""
    findings = [each for part in told["subscriptions"] for each in part["findings"]]
    return {each["queue"]: (each["what"], each["mend"]) for each in findings}


async def test_a_bus_finds_the_current_generation_in_the_store(site: Site) -> None:
    await site.bus(4).prepare()
    bus = site.bus(6)
    async with bus:
        assert isinstance(bus.transport, Partitioned)
        queues = await bus.transport.partitions(site.queue)
        assert queues == [f"{site.queue}.g1-{number}" for number in range(4)], "another number without a generation"
        store = bus.store_of(site.name)
        assert store is not None and await store.next_generation(site.name, site.queue, 1, 6)
    later = site.bus(6)
    async with later:
        assert isinstance(later.transport, Partitioned)
        queues = await later.transport.partitions(site.queue)
        assert queues == [f"{site.queue}.g2-{number}" for number in range(6)]
        assert set(queues) < set(await left(site))


async def test_one_part_does_not_keep_the_order_of_several(site: Site) -> None:
    await site.bus(4).prepare()
    with pytest.raises(fg.ConfigurationError, match="would not stay in order"):
        await site.bus(1).prepare()


async def test_the_doctor_finds_what_is_missing_declared_otherwise_and_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, told = await site.run(monkeypatch, "doctor")
    assert status == 1
    names = [f"{site.queue}.g1-{number}" for number in range(4)]
    assert found(told).keys() == {*names, f"{site.name}-dead"}, "it does not say what is missing, or more"
    assert await left(site) == [], "looking made a queue"
    await declare(site.broker, names[1], arguments={"x-queue-type": "quorum"})
    with pytest.raises(fg.QueueDiffers):
        await site.bus().prepare()
    status, told = await site.run(monkeypatch, "doctor")
    what, mend = found(told)[names[1]]
    assert status == 1 and "declared otherwise" in what and "x-dead-letter" in what
    assert mend == "faregate rabbitmq migrate site_under_test:bus"


async def test_the_doctor_says_who_holds_what_and_what_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await site.bus().prepare()
    await site.publish(14)
    status, told = await site.run(monkeypatch, "doctor")
    queues = told["subscriptions"][0]["queues"]
    assert status == 1 and sum(each["waiting"] for each in queues) == 14
    assert all("nobody consumes" in what for what, _ in found(told).values())
    bus = site.bus()
    async with bus:
        await bus.idle()
        status, told = await site.run(monkeypatch, "doctor")
        assert (status, told["sound"]) == (0, True)
        assert {each["held_by"] for each in told["subscriptions"][0]["queues"]} == {bus.instance}
        assert [each["consumers"] for each in told["subscriptions"][0]["queues"]] == [1] * 4


async def test_pruning_removes_what_is_left_over_and_empty(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = site.bus()
    await bus.prepare()
    await site.publish(1)
    store = bus.store_of(site.name)
    assert store is not None
    await store.open()
    assert await store.next_generation(site.name, site.queue, 1, 4)
    await store.close()
    old = {f"{site.queue}.g1-{number}" for number in range(4)}
    status, told = await site.run(monkeypatch, "doctor")
    assert status == 1 and old < found(told).keys()
    [full] = [queue for queue in old if "1 message waits" in found(told)[queue][0]]
    status, told = await site.run(monkeypatch, "doctor", "--prune", "--yes")
    assert (status, told["removed"]) == (1, []), "a generation with a message went"
    assert full in found(told)
    await purge(site.broker, full)
    status, told = await site.run(monkeypatch, "doctor", "--prune", "--yes")
    assert (status, set(told["removed"])) == (0, old)
    assert set(await left(site)) == {queue.replace(".g1-", ".g2-") for queue in old} | {f"{site.name}-dead"}


async def test_pruning_asks_or_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(fg.ConfigurationError, match="--yes"):
        await site.run(monkeypatch, "doctor", "--prune")
