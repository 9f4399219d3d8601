"""What tests with a real RabbitMQ share."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from aiormq.exceptions import ChannelNotFoundEntity

import faregate as fg
from faregate.testing import QueueSubject
from faregate.testing.queue_suite.cases import QUEUE, done, noted
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.delay import LAST, LEVELS

LEFT = [
    name for node in ("reader", "one", "two", "three") for name in (noted(node).queue, done(node).queue, f"{node}-dead")
]
LEFT += [f"{QUEUE}.g1-{number}" for number in range(4)]
_REST_SECONDS = 0.25
"""The broker has no signal for "nothing more comes"."""


_DECLARED_SECONDS = 0.5


async def remove_queues(transport: RabbitmqQueue, *names: str) -> None:
    """A broker whose queues vanish while it still makes them loses what moves their dead letters: from then on it
    declares no such queue before it is started anew. So wait a moment."""
    await asyncio.sleep(_DECLARED_SECONDS)

    async def remove(channel: BatchChannel) -> None:
        for queue in (*transport.queue_names, *names):
            await channel.queue_delete(queue)

    await transport.on_channel(remove)


async def empty_ladder(transport: RabbitmqQueue) -> None:
    """What a case has put off would come to the next one, whose queue has the same name."""

    async def empty(channel: BatchChannel) -> None:
        with suppress(ChannelNotFoundEntity):  # nobody has put off anything yet
            for level in range(LEVELS):
                await channel.queue_purge(f"{LAST}.{level}")

    await transport.on_channel(empty)


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
        await remove_queues(transport, *LEFT)
        await empty_ladder(transport)
        await transport.close()


class Counted(fg.Event):
    number: int
    filling: str = ""


class Shop:
    """Two nodes with names of their own, so that no test sees the messages of another."""

    def __init__(self) -> None:
        suffix = uuid.uuid4().hex[:8]
        self.author, self.reader = fg.Node(f"author-{suffix}"), fg.Node(f"reader-{suffix}")
        self.seen: Counter[int] = Counter()
        self.changed = asyncio.Event()

        @self.reader.on(Counted, source=self.author.name, redeliver=fg.Redeliver(0.2, 0.2))
        async def count(counted: Counted) -> None:
            self.seen[counted.number] += 1
            self.changed.set()

    async def until_seen(self, numbers: int) -> None:
        await self.until(lambda: len(self.seen) >= numbers)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Look whenever a handler ran, and now and then."""
        async with asyncio.timeout(90):
            while not is_so():
                self.changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), 0.2)


@asynccontextmanager
async def running(url: str, shop: Shop, **options: object) -> AsyncIterator[fg.Bus]:
    bus = fg.Bus(url, nodes=[shop.author, shop.reader], **options)  # type: ignore[arg-type]
    async with bus:
        yield bus
        assert isinstance(bus.transport, RabbitmqQueue)
        await remove_queues(bus.transport)
