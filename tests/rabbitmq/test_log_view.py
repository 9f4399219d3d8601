"""With `stream=`, a RabbitMQ has both views: services see queues, and everything is in a stream to be read again."""

import os
import uuid
from pathlib import Path

import pytest

import faregate as fg
from faregate.ports.schemes import open_log
from faregate.transports.rabbitmq import RabbitmqQueue
from tests.presence import address
from tests.rabbitmq.rig import Counted, Shop, running


class Do(fg.Command):
    number: int


@pytest.fixture
def stream() -> str:
    return f"log-{uuid.uuid4().hex[:8]}"


def log_url(stream: str) -> str:
    vhost = os.environ.get("PYTEST_XDIST_WORKER", "main")
    return f"{address('FAREGATE_TEST_RABBITMQ_STREAM')}{vhost}?stream={stream}"


async def test_the_stream_has_what_the_queues_get_with_the_recipients(broker: str, stream: str, tmp_path: Path) -> None:
    shop = Shop()

    @shop.reader.on(Do)
    async def do(command: Do) -> None:
        shop.seen[command.number] += 1

    async with running(f"{broker}?stream={stream}", shop, store=f"sqlite:{tmp_path}/shop.db") as bus:
        event = await bus.publish(Counted(number=1), node=shop.author, headers={"tenant": "north"})
        command = await bus.send(Do(number=2), to=shop.reader, node=shop.author)
        await bus.idle()
        assert isinstance(bus.transport, RabbitmqQueue)
        log = open_log(log_url(stream))
        found = {envelope.publication_id: envelope for _, envelope in log.envelopes(log.earliest())}
        assert set(found) == {event, command}
        assert found[event].headers == {"tenant": "north"}
        assert (found[command].kind, found[command].destination) == ("command", shop.reader.name)
        topology = log.topology()
        assert topology.nodes("event", shop.author.name, "Counted") == {shop.reader.name}
        with pytest.raises(fg.Unroutable, match="nobody"):
            await bus.send(Do(number=3), to="nobody", node=shop.author)
        await bus.transport.on_channel(lambda channel: channel.queue_delete(stream))
    assert shop.seen == {1: 1, 2: 1}


async def test_an_unbound_command_is_not_swallowed_by_the_stream(broker: str, stream: str) -> None:
    shop = Shop()

    @shop.reader.on(Do)
    async def do(command: Do) -> None:
        shop.seen[command.number] += 1

    async with running(f"{broker}?stream={stream}", shop) as bus:
        await bus.unsubscribe(shop.reader, Do)
        with pytest.raises(fg.Unroutable):
            await bus.send(Do(number=1), to=shop.reader, node=shop.author)
        assert isinstance(bus.transport, RabbitmqQueue)
        await bus.transport.on_channel(lambda channel: channel.queue_delete(stream))
