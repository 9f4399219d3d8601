"""Heartbeats on RabbitMQ: an exchange, with the node as the routing key.

Rules kept here:
- They have a channel of their own, so that a user who may not write there can still publish.
- The broker drops what nobody listens to. Whoever listens has a queue that ends with its connection.
- What is read is bounded, and what cannot be read is passed over: anybody may write there.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pamqp.commands import Basic

from faregate.ports.presence import Heartbeat
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.names import PRESENCE
from faregate.transports.rabbitmq.topology import declare_exchange

_LOOK_SECONDS = 0.2
_MOST_WAITING, _MOST_BYTES = 10_000, 1 << 20
_PLAIN = Basic.Properties(content_type="application/json", message_type="faregate-heartbeat", delivery_mode=1)
_read = msgspec.json.Decoder(Heartbeat).decode


async def announce(channel: BatchChannel, heartbeats: Sequence[Heartbeat]) -> None:
    await declare_exchange(channel, PRESENCE)
    for each in heartbeats:
        body = msgspec.json.encode(each)
        await channel.basic_publish(body, exchange=PRESENCE, routing_key=each.node, properties=_PLAIN)


async def listen(channel: BatchChannel, heard: Callable[[Heartbeat], None], seconds: float) -> None:
    """Hand on what comes within that time."""
    await declare_exchange(channel, PRESENCE)
    limits: dict[str, Any] = {"x-max-length": _MOST_WAITING, "x-max-length-bytes": _MOST_WAITING * 1024}
    queue = (await channel.queue_declare(exclusive=True, auto_delete=True, arguments=limits)).queue
    assert queue is not None
    await channel.queue_bind(queue, PRESENCE, routing_key="#")
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        message = await channel.basic_get(queue, no_ack=True)
        if message.delivery_tag is None:
            await asyncio.sleep(_LOOK_SECONDS)
        elif len(message.body) <= _MOST_BYTES:
            try:
                heard(_read(message.body))
            except msgspec.DecodeError:
                continue
