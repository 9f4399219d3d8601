"""Heartbeats on RabbitMQ: an exchange, with the node as the routing key. What people ask of the instances of a node
goes the other way through the same exchange, with the key asked.NODE.

Rules kept here:
- They have a channel of their own, so that a user who may not write there can still publish.
- The broker drops what nobody listens to. Whoever listens has a queue that ends with its connection.
- What is read is bounded, and what cannot be read is passed over: anybody may write there.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from pamqp.commands import Basic

from faregate.ports.presence import Heartbeat, Instruction
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.link import how_lost
from faregate.transports.rabbitmq.names import PRESENCE
from faregate.transports.rabbitmq.topology import declare_exchange

T = TypeVar("T")

_ASKED = "asked"
_MOST_ASKED, _ASKED_SECONDS = 100, 30.0
"""What nobody could heed for so long is no longer wanted."""
_AT_ONCE = 100
_MOST_WAITING, _MOST_BYTES = 10_000, 1 << 20
_read = msgspec.json.Decoder(Heartbeat).decode
_read_instruction = msgspec.json.Decoder(Instruction).decode


async def announce(channel: BatchChannel, heartbeats: Sequence[Heartbeat]) -> None:
    await declare_exchange(channel, PRESENCE)
    for each in heartbeats:
        properties = Basic.Properties(
            content_type="application/json", message_type="faregate-heartbeat", message_id=f"{each.instance}-{each.at}"
        )
        body = msgspec.json.encode(each)
        await channel.basic_publish(body, exchange=PRESENCE, routing_key=each.node, properties=properties)
    await declare_exchange(channel, PRESENCE)  # by the answer to that it is known whether the broker took them


async def listen(
    channel: BatchChannel, heard: Callable[[Heartbeat], None], seconds: float, asking: Sequence[Instruction] = ()
) -> None:
    """Hand on what comes within that time, also what comes because of what is asked."""
    arrived = await _subscribe(channel, _MOST_WAITING, ["*"])
    for instruction in asking:
        await _ask(channel, instruction)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await _hand_on(channel, arrived, _read, heard)


async def overhear(channel: BatchChannel, heard: Callable[[Heartbeat], None]) -> None:
    """Hand on what comes, for as long as the channel is there."""
    await _hand_on(channel, await _subscribe(channel, _MOST_WAITING, ["*"]), _read, heard)


async def heed(channel: BatchChannel, nodes: Sequence[str], asked: Callable[[Instruction], None]) -> None:
    """Hand on what is asked of these nodes, for as long as the channel is there."""
    arrived = await _subscribe(channel, _MOST_ASKED, [f"{_ASKED}.{node}" for node in nodes], _ASKED_SECONDS)
    await _hand_on(channel, arrived, _read_instruction, asked)


async def _ask(channel: BatchChannel, instruction: Instruction) -> None:
    """Every instance that runs the node hears it, once; the broker drops it where nobody does."""
    properties = Basic.Properties(content_type="application/json", message_type="faregate-instruction")
    body = msgspec.json.encode(instruction)
    await channel.basic_publish(
        body, exchange=PRESENCE, routing_key=f"{_ASKED}.{instruction.node}", properties=properties
    )


async def _subscribe(
    channel: BatchChannel, most: int, keys: Sequence[str], seconds: float | None = None
) -> "asyncio.Queue[Arrived]":
    """`seconds`: for how long something may wait."""
    await declare_exchange(channel, PRESENCE)
    limits: dict[str, Any] = {"x-max-length": most, "x-max-length-bytes": most * 1024}
    if seconds is not None:
        limits["x-message-ttl"] = int(seconds * 1000)
    queue = (await channel.queue_declare(exclusive=True, auto_delete=True, arguments=limits)).queue
    assert queue is not None
    for key in keys:
        await channel.queue_bind(queue, PRESENCE, routing_key=key)
    arrived: asyncio.Queue[Arrived] = asyncio.Queue()
    channel.incoming.delivered = arrived.put_nowait
    await channel.basic_qos(prefetch_count=_AT_ONCE)
    await channel.basic_consume(queue, _unused)
    return arrived


async def _hand_on(
    channel: BatchChannel, arrived: "asyncio.Queue[Arrived]", read: Callable[[bytes], T], heard: Callable[[T], None]
) -> None:
    lost = channel.closing
    while True:
        message = await _next_of(arrived, lost)
        if len(message.body) <= _MOST_BYTES:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                heard(read(message.body))
        await channel.write(channel.acknowledgements([], message.delivery_tag, []))


async def _next_of(arrived: "asyncio.Queue[Arrived]", lost: "asyncio.Future[None]") -> Arrived:
    """Raises how the channel is lost."""
    coming = asyncio.ensure_future(arrived.get())
    try:
        await asyncio.wait((lost, coming), return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            raise how_lost(lost)
        return coming.result()
    finally:
        coming.cancel()


async def _unused(message: object) -> None:
    """The channel hands deliveries over by itself."""
    raise AssertionError(message)
