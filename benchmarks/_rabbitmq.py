"""What the benchmarks on RabbitMQ share: where it is, the message, queues, and filling them.

Every queue is a durable quorum queue, made for one run and deleted after it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import aiormq
from _orders import Order, make_order
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from msgspec.structs import replace
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader
from pydantic import BaseModel

QUORUM = {"x-queue-type": "quorum"}
OURS = "billing.Order.shop", "billing-dead"
"""The queues of a node `billing` that subscribes to `Order` of `shop`."""
_WRITTEN_TOGETHER = 200
_PATIENCE_SECONDS = 30


class OrderModel(BaseModel):
    order_id: str
    customer: str
    total: int
    note: str


def order(number: int) -> Order:
    """About 250 bytes of JSON."""
    return replace(make_order(number), note="n" * 160)


def address() -> str:
    """Of the virtual host "/", or of the one that a process of the tests has for itself."""
    found = os.environ.get("FAREGATE_TEST_RABBITMQ")
    if found is None:
        raise SystemExit("FAREGATE_TEST_RABBITMQ names no RabbitMQ: './dev bench' starts one")
    return found + os.environ.get("PYTEST_XDIST_WORKER", "%2F")


@asynccontextmanager
async def channel_to_broker() -> AsyncIterator[Channel]:
    """Without confirms."""
    connection = await aiormq.connect(address())
    try:
        channel = await connection.channel(publisher_confirms=False)
        assert isinstance(channel, Channel)
        yield channel
    finally:
        await connection.close()


@asynccontextmanager
async def queues(*names: str, made: str | None = None) -> AsyncIterator[Channel]:
    """None of these is there before, nor afterwards. `made` is declared; the others are made by who uses them."""
    async with channel_to_broker() as channel:
        for name in names:
            await channel.queue_delete(name)
        if made is not None:
            await channel.queue_declare(made, durable=True, arguments=QUORUM)
        try:
            yield channel
        finally:
            for name in names:
                await channel.queue_delete(name)
                await channel.exchange_delete(name)  # Celery makes one for each queue


async def wait_until_it_holds(channel: Channel, queue: str, messages: int, *, or_up_to: int = 0) -> None:
    """The count lags a little behind what is confirmed or acknowledged."""
    expected = range(messages, max(messages, or_up_to) + 1)
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while (found := (await channel.queue_declare(queue, passive=True)).message_count) not in expected:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise RuntimeError(f"{queue} holds {found} messages, and not {messages}") from None


async def fill(channel: Channel, queue: str, messages: Iterable[tuple[Basic.Properties, bytes]]) -> int:
    """Put messages into a queue, without a framework. Returns how many."""
    count, payload = 0, bytearray()
    for count, (properties, body) in enumerate(messages, 1):
        payload += frames(channel, queue, properties, body)
        if not count % _WRITTEN_TOGETHER:
            await write(channel, bytes(payload))
            payload.clear()
    await write(channel, bytes(payload))
    await wait_until_it_holds(channel, queue, count)
    return count


async def multiply(channel: Channel, queue: str, messages: int) -> None:
    """A queue holds one message: let it hold that many of the same."""
    await wait_until_it_holds(channel, queue, 1)
    found = await channel.basic_get(queue, no_ack=True)
    payload = frames(channel, queue, found.header.properties, found.body)
    for first in range(0, messages, _WRITTEN_TOGETHER):
        await write(channel, payload * min(_WRITTEN_TOGETHER, messages - first))
    await wait_until_it_holds(channel, queue, messages)


def frames(channel: Channel, queue: str, properties: Basic.Properties, body: bytes) -> bytes:
    publish = Basic.Publish(routing_key=queue)
    header = ContentHeader(properties=properties, body_size=len(body))
    return ChannelFrame.marshall(channel.number, [publish, header, ContentBody(body)]).payload


async def write(channel: Channel, payload: bytes) -> None:
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await channel.write_queue.put(ChannelFrame(payload=payload, should_close=False, drain_future=written))
    await written


def make_dramatiq(**options: Any) -> Any:
    """Dramatiq's broker, with quorum queues, which it has no option for."""
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    class QuorumBroker(RabbitmqBroker):
        def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
            return QUORUM

    return QuorumBroker(url=address(), **options)


def make_celery(queue: str) -> Any:
    from celery import Celery

    app = Celery("bench", broker=address())
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_heartbeat=1,  # a worker looks this often whether it shall stop
        broker_transport_options={"confirm_publish": True},
        task_acks_late=True,
        task_default_queue=queue,
        task_default_queue_type="quorum",
        task_ignore_result=True,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
    )
    return app
