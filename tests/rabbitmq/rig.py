"""What tests with a real RabbitMQ share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from faregate.testing import QueueSubject
from faregate.testing.queue_suite.cases import done, noted
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel

LEFT = [
    name for node in ("reader", "one", "two", "three") for name in (noted(node).queue, done(node).queue, f"{node}-dead")
]
_REST_SECONDS = 0.25
"""The broker has no signal for "nothing more comes"."""


async def remove_queues(transport: RabbitmqQueue, *names: str) -> None:
    async def remove(channel: BatchChannel) -> None:
        for queue in (*transport.queue_names, *names):
            await channel.queue_delete(queue)

    await transport.on_channel(remove)


@asynccontextmanager
async def rabbitmq_subject(url: str, *, real_time: bool = False) -> AsyncIterator[QueueSubject]:
    """The `amqp:` transport. Nothing in it waits for a clock of ours, so time passes only where a case is about it."""
    transport = RabbitmqQueue(url)
    await transport.open()
    await remove_queues(transport, *LEFT)  # a run that was stopped leaves them

    async def rest() -> None:
        await asyncio.sleep(_REST_SECONDS)

    async def advance(seconds: float) -> None:
        await asyncio.sleep(seconds if real_time else _REST_SECONDS)
        await rest()

    try:
        yield QueueSubject(transport, advance, rest, transport.clock.time)
    finally:
        await remove_queues(transport)
        await transport.close()
