"""`toy-queue:`: a queue transport; behind it is Faregate's broker in memory."""

from collections.abc import Callable, Sequence

from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.queue import QueueTransport
from faregate.transports.memory import MemoryTransport

from .through import Through


class ToyQueue(Through):
    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        """Made from its URL; nothing is opened before `open`."""
        super().__init__(QueueTransport, MemoryTransport(clock=clock))
        self.on_disagreement: Callable[[Envelope], None] | None = None

    async def open(self) -> None:
        self._behind.on_disagreement = self._disagreed
        await self._behind.open()

    def _disagreed(self, envelope: Envelope) -> None:
        if self.on_disagreement is not None:
            self.on_disagreement(envelope)

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await self._behind.publish(envelopes)
