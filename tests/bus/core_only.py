"""A transport that keeps the core of the port and nothing more, as RabbitMQ or a file would."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.queue import Binding, Capability, Consumer, Delivery, Held, Outcome
from faregate.transports.memory import MemoryTransport

NEVER = 10**9


class CoreHeld:
    """What the core asks of a delivery; a fault of the test may be put in its place."""

    def __init__(self, behind: Delivery, envelope: Envelope) -> None:
        self._behind = behind
        self.envelope = envelope
        self.position = None
        self.lock_seconds = behind.lock_seconds

    @property
    def redelivered(self) -> bool:
        return self._behind.redelivered

    @property
    def tries(self) -> int:
        return self._behind.tries

    def start(self) -> None:
        self._behind.start()

    def renew(self) -> None:
        self._behind.renew()

    async def settle(self, outcome: Outcome) -> None:
        await self._behind.settle(outcome)

    async def release(self, *, begun: bool = True) -> None:
        await self._behind.release()


class CoreOnly:
    """The broker behind it sees no times, so it cannot wait, nor expire anything."""

    def __init__(self, clock: Clock) -> None:
        self.capabilities: frozenset[Capability] = frozenset()
        self._behind = MemoryTransport(clock=clock)
        self._times: dict[str, tuple[float | None, float | None, float | None]] = {}

    async def open(self) -> None:
        await self._behind.open()

    async def close(self) -> None:
        await self._behind.close()

    async def bind(self, binding: Binding) -> None:
        plain = replace(binding, key_of=None, serial=False, expires=None, max_deliveries=NEVER, on_dead_letter=None)
        await self._behind.bind(plain)

    async def unbind(self, queue: str) -> None:
        await self._behind.unbind(queue)

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        for each in envelopes:
            self._times[each.publication_id] = (each.deliver_at, each.delay, each.expires_at)
        timeless = [msgspec.structs.replace(each, deliver_at=None, delay=None, expires_at=None) for each in envelopes]
        await self._behind.publish(timeless)

    async def consume(self, queue: str, on_delivery: Callable[[Held], None], *, prefetch: int) -> Consumer:
        def deliver(delivery: Delivery) -> None:
            deliver_at, delay, expires_at = self._times[delivery.envelope.publication_id]
            envelope = msgspec.structs.replace(
                delivery.envelope, deliver_at=deliver_at, delay=delay, expires_at=expires_at
            )
            on_delivery(CoreHeld(delivery, envelope))

        return await self._behind.consume(queue, deliver, prefetch=prefetch)

    async def failed(self) -> Exception:
        return await self._behind.failed()
