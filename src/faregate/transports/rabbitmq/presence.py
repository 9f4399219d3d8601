"""Heartbeats on RabbitMQ: an exchange, with the node as the routing key.

Rules kept here:
- They have a channel of their own, so that a user who may not write there can still publish.
- The broker drops what nobody listens to. Whoever listens has a queue that ends with its connection.
- What is read is bounded, and what cannot be read is passed over: anybody may write there.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from pamqp.commands import Basic

from faregate.ports.presence import Heartbeat
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.names import PRESENCE
from faregate.transports.rabbitmq.topology import declare_exchange

_AT_ONCE = 100
_MOST_WAITING, _MOST_BYTES = 10_000, 1 << 20
_read = msgspec.json.Decoder(Heartbeat).decode


async def announce(channel: BatchChannel, heartbeats: Sequence[Heartbeat]) -> None:
    await declare_exchange(channel, PRESENCE)
    for each in heartbeats:
        properties = Basic.Properties(
            content_type="application/json", message_type="faregate-heartbeat", message_id=f"{each.instance}-{each.at}"
        )
        body = msgspec.json.encode(each)
        await channel.basic_publish(body, exchange=PRESENCE, routing_key=each.node, properties=properties)
    await declare_exchange(channel, PRESENCE)  # by the answer to that it is known whether the broker took them


async def listen(channel: BatchChannel, heard: Callable[[Heartbeat], None], seconds: float) -> None:
    """Hand on what comes within that time."""
    await declare_exchange(channel, PRESENCE)
    limits: dict[str, Any] = {"x-max-length": _MOST_WAITING, "x-max-length-bytes": _MOST_WAITING * 1024}
    queue = (await channel.queue_declare(exclusive=True, auto_delete=True, arguments=limits)).queue
    assert queue is not None
    await channel.queue_bind(queue, PRESENCE, routing_key="#")
    arrived: asyncio.Queue[Arrived] = asyncio.Queue()
    channel.incoming.delivered = arrived.put_nowait
    lost = channel.closing
    await channel.basic_qos(prefetch_count=_AT_ONCE)
    await channel.basic_consume(queue, _unused)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                message = await _next_of(arrived, lost)
                if len(message.body) <= _MOST_BYTES:
                    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        heard(_read(message.body))
                await channel.write(channel.acknowledgements([], message.delivery_tag, []))


async def _next_of(arrived: "asyncio.Queue[Arrived]", lost: "asyncio.Future[None]") -> Arrived:
    """Raises how the channel is lost."""
    coming = asyncio.ensure_future(arrived.get())
    try:
        await asyncio.wait((lost, coming), return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise lost.exception() or ConnectionError("the channel is closed")
        return coming.result()
    finally:
        coming.cancel()


async def _unused(message: object) -> None:
    """The channel hands deliveries over by itself."""
    raise AssertionError(message)
