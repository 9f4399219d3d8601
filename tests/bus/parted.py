"""A transport that parts ordered queues by key and keeps the order within each part, and nothing more: as RabbitMQ.

It may be opened by several buses, which then are instances of their nodes. Like a broker that does not know what became
of what it handed out, it counts no starts, and says of everything that was out before that it is redelivered.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from faregate.ids import SLOTS, slot_of
from faregate.message import Envelope
from faregate.ports.clock import Clock
from faregate.ports.queue import Binding, Capability, Consumer, Delivery, Held
from faregate.transports.memory import MemoryTransport
from tests.bus.core_only import NEVER, CoreHeld, CoreOnly


class PartedHeld(CoreHeld):
    def __init__(self, behind: Delivery, envelope: Envelope) -> None:
        super().__init__(behind, envelope)
        self._started = 0

    @property
    def tries(self) -> int:
        return self._started

    def start(self) -> None:
        self._started = 1


class Server:
    """What the instances share."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.queues = MemoryTransport(clock=clock)
        self.parts: dict[tuple[str, str | None], set[int]] = {}
        """By type and destination: into how many parts the bindings to it are cut; 0: into none. No two generations
        have the same number."""


class Parted(CoreOnly):
    """One instance's connection."""

    held: type[PartedHeld] = PartedHeld

    def __init__(self, clock: Clock, server: Server | None = None) -> None:
        self.server = server or Server(clock)
        self._clock = clock
        self._shared = server is not None
        self.capabilities: frozenset[Capability] = frozenset({"partitions"})
        self._bindings: dict[str, Binding] = {}
        self._consumers: list[Consumer] = []

    async def open(self) -> None:
        await self.server.queues.open()

    async def close(self) -> None:
        for consumer in self._consumers:
            await consumer.close()
        if not self._shared:
            await self.server.queues.close()

    async def bind(self, binding: Binding) -> None:
        self._bindings[binding.queue] = binding
        plain = replace(binding, key_of=None, serial=False, expires=None, max_deliveries=NEVER, on_dead_letter=None)
        address = (binding.type, binding.node if binding.kind == "command" else None)
        self.server.parts.setdefault(address, set()).add(binding.partitions or 0)
        for part in range(binding.partitions or 1):
            await self.server.queues.bind(replace(plain, type=_parted(binding.type, binding.partitions or 0, part)))

    async def abandon(self, binding: Binding) -> None:
        address = (binding.type, binding.node if binding.kind == "command" else None)
        self.server.parts[address].discard(binding.partitions or 0)

    async def unbind(self, queue: str) -> None:
        for each in await self._queues(queue):
            await self.server.queues.unbind(each)

    async def partitions(self, queue: str) -> list[str]:
        return await self._queues(queue)

    async def _queues(self, queue: str) -> list[str]:
        binding = self._bindings.get(queue) or Binding(node="nobody", type=queue, kind="command")
        count = binding.partitions or 0
        return [replace(binding, type=_parted(binding.type, count, part)).queue for part in range(count or 1)]

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        timeless: dict[str, Any] = {"deliver_at": None, "delay": None, "expires_at": None}
        parted = []
        for each in envelopes:
            slot, headers = slot_of(each.key), {"wire": msgspec.json.encode(each).decode()}
            for count in self.server.parts.get((each.type, each.destination), {0}):
                part = 0 if slot == "-" else int(slot) * count // SLOTS
                changed = {"type": _parted(each.type, count, part), "publication_id": f"{each.publication_id}/{count}"}
                parted.append(msgspec.structs.replace(each, headers=headers, **changed, **timeless))  # type: ignore[arg-type]
        await self.server.queues.publish(parted)

    async def consume(self, queue: str, on_delivery: Callable[[Held], None], *, prefetch: int) -> Consumer:
        def deliver(delivery: Delivery) -> None:
            sent = msgspec.json.decode(delivery.envelope.headers["wire"], type=Envelope)
            recipients = delivery.envelope.recipients
            on_delivery(self.held(delivery, msgspec.structs.replace(sent, recipients=recipients)))

        name = queue if queue not in self._bindings else (await self._queues(queue))[0]
        consumer = await self.server.queues.consume(name, deliver, prefetch=prefetch)
        self._consumers.append(consumer)
        return consumer

    async def failed(self) -> Exception:
        return await self.server.queues.failed()


def _parted(wire: str, count: int, part: int) -> str:
    return f"{wire}-{count}-{part}" if count else wire
