"""Looking after what is on the broker: generations of partitions, `faregate rabbitmq doctor` and `migrate`."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import faregate as fg
from faregate.ports.queue import Partitioned
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel
from tests.rabbitmq.instance import make_node
from tests.rabbitmq.rig import remove_queues

pytestmark = pytest.mark.services


class Site:
    """A node with a name of its own on a broker, and its store."""

    def __init__(self, broker: str, folder: Path) -> None:
        suffix = uuid.uuid4().hex[:8]
        self.broker, self.store = broker, f"sqlite:{folder}/site.db"
        self.author, self.name = f"author-{suffix}", f"ledger-{suffix}"
        self.queue = f"{self.name}.Step.{self.author}"

    def bus(self, partitions: int = 4) -> fg.Bus:
        author = fg.Node(self.author)
        return fg.Bus(self.broker, nodes=[author, make_node(self.name, self.author, partitions)], store=self.store)


@pytest.fixture
async def site(broker: str, tmp_path: Path) -> AsyncIterator[Site]:
    site = Site(broker, tmp_path)
    yield site
    transport = RabbitmqQueue(broker)
    await transport.open()
    generations = [f"{site.queue}.g{generation}-{number}" for generation in (1, 2) for number in range(6)]
    await remove_queues(transport, site.queue, f"{site.name}-dead", *generations)
    await transport.close()


async def exist(bus: fg.Bus, *queues: str) -> None:
    async def look(channel: BatchChannel) -> None:
        for queue in queues:
            await channel.queue_declare(queue, passive=True)

    assert isinstance(bus.transport, RabbitmqQueue)
    await bus.transport.on_channel(look)


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
        await exist(later, *queues)


async def test_one_part_does_not_keep_the_order_of_several(site: Site) -> None:
    await site.bus(4).prepare()
    with pytest.raises(fg.ConfigurationError, match="would not stay in order"):
        await site.bus(1).prepare()
