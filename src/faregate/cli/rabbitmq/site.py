"""What the commands for RabbitMQ work on: a bus that is not started, with its transport and its stores open."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from faregate.bus.bus import Bus
from faregate.cli.load import load_bus
from faregate.cli.targets import opened
from faregate.errors import ConfigurationError

if TYPE_CHECKING:
    from faregate.transports.rabbitmq import RabbitmqQueue


@asynccontextmanager
async def opened_site(target: str) -> "AsyncIterator[tuple[Bus, RabbitmqQueue]]":
    """Its queues are not declared. Raises `ConfigurationError` for a bus on another transport."""
    bus = load_bus(target)
    if type(bus.transport).__name__ != "RabbitmqQueue":
        raise ConfigurationError(f"{target} runs on {bus.url}: these commands are for amqp://…")
    from faregate.transports.rabbitmq import RabbitmqQueue

    assert isinstance(bus.transport, RabbitmqQueue)
    async with opened(bus.stores.values()):
        await bus.transport.open()
        try:
            yield bus, bus.transport
        finally:
            await bus.transport.close()
