"""The shop on a RabbitMQ with a log view: services on asyncio through queues, Spark through the stream beside them."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import faregate as fg
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import dead_letter_queue
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.names import dead_queue
from faregate.transports.rabbitmq.queue import _Queue
from tests.presence import address
from tests.spark import run_shop
from tests.spark.run_rig import Shop

NODES = [each for each in vars(run_shop).values() if isinstance(each, fg.Node)]
BESIDE = ("", ".bindings", ".commits", ".identity", ".readers", ".staged")


def rabbitmq_url(**options: str) -> str:
    """A RabbitMQ with a stream of its own."""
    vhost = os.environ.get("PYTEST_XDIST_WORKER", "main")
    port = urlsplit(address("FAREGATE_TEST_RABBITMQ_STREAM")).port
    more = "".join(f"&{name}={value}" for name, value in options.items())
    return f"{address('FAREGATE_TEST_RABBITMQ')}{vhost}?stream=log-{uuid4().hex[:8]}&stream_port={port}{more}"


@contextmanager
def rabbitmq_shop(folder: Path, spark: Any, made: type[Shop] = Shop) -> Iterator[Shop]:
    """Names of nodes are those of all tests, so whatever they leave on the broker is removed."""
    url = rabbitmq_url()
    asyncio.run(_clean(url))
    try:
        yield made(folder, spark, url)
    finally:
        asyncio.run(_clean(url))


async def _clean(url: str) -> None:
    transport = RabbitmqQueue(url)
    await transport.open()
    stream = transport._stream
    bindings = [each.binding(1) for node in NODES for each in node.subscriptions.values()]
    queues = [name for each in bindings for name in (each.queue, f"{each.queue}.g1-0", f"{each.queue}@log")]

    async def remove(channel: BatchChannel) -> None:
        for queue in (*queues, *(f"{node.name}-dead" for node in NODES), *(f"{stream}{each}" for each in BESIDE)):
            await channel.queue_delete(queue)

    await transport.on_channel(remove)
    await transport.close()


def dead_letters(shop: Shop, node: fg.Node) -> list[DeadLetter]:
    """Those of a node without a store."""

    async def look() -> list[DeadLetter]:
        transport = RabbitmqQueue(shop.url)
        await transport.open()
        try:
            binding = next(iter(node.subscriptions.values())).binding(1000)
            transport._queues[dead_letter_queue(node.name)] = _Queue(dead_queue(node.name), binding, is_dead=True)
            return await transport.dead_letters(node.name)
        finally:
            await transport.close()

    return asyncio.run(look())
