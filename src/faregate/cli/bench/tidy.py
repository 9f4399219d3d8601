"""Private queues go when what used them is done."""

from collections.abc import Iterable
from typing import Any

from faregate.bus.bus import Bus


async def remove_queues(bus: Bus, names: Iterable[str]) -> None:
    """From a broker; in memory there are none any more, and a journal's were its own."""
    if not bus.url.startswith(("amqp:", "amqps:")):
        return
    from faregate.transports.rabbitmq import RabbitmqQueue

    transport = bus.transport
    assert isinstance(transport, RabbitmqQueue)
    await transport.open()
    try:
        for name in names:
            await transport.on_channel(lambda channel, name=name: _delete(channel, name))  # type: ignore[misc]
    finally:
        await transport.close()


async def _delete(channel: Any, name: str) -> None:
    await channel.queue_delete(name)
