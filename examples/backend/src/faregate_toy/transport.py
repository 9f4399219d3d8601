"""`toy-queue:`: a queue transport that keeps the core of the port, and can say when nothing is left to do.

Behind it is Faregate's broker in memory. What it could do beyond that stays hidden: the bus supplies it from the node's
store, as on any transport that lacks it.
"""

from collections.abc import Callable, Sequence

from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.queue import Capability, Consumer, Delivery, Held, QueueTransport
from faregate.transports.memory import MemoryTransport

from .through import Through


class ToyQueue(Through):
    capabilities: frozenset[Capability] = frozenset({"count"})

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        """Made from its URL; nothing is opened before `open`."""
        super().__init__(QueueTransport, MemoryTransport(clock=clock))

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await self._behind.publish(envelopes)

    async def consume(self, queue: str, on_delivery: Callable[[Held], None], *, prefetch: int) -> Consumer:
        def deliver(delivery: Delivery) -> None:
            on_delivery(Through(Held, delivery))

        consumer: Consumer = await self._behind.consume(queue, deliver, prefetch=prefetch)
        return consumer

    async def idle(self) -> None:
        """What "count" asks for."""
        await self._behind.idle()
