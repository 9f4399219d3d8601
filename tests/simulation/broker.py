"""A transport that delivers at least once and promises nothing more: it recognises no repetition.

Rules kept here:
- A copy stays until it is settled. What a dead process held, and what its lease ran out on, is available again.
- Of one key an earlier copy is settled before a later one is delivered.
- Every signal ever published stays on record.
"""

from collections.abc import Callable, Sequence
from typing import Any

from faregate.errors import QueueNotFound, StaleLock, Unroutable
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import EVERY_CAPABILITY, Consumer, Delivery, Outcome
from faregate.testing.clock import FakeClock
from tests.simulation.scheduler import Scheduler


class Copy:
    """One copy of a message in the queue of a node."""

    def __init__(self, envelope: Envelope, node: str, position: int, key: str | None) -> None:
        self.envelope, self.node, self.position, self.key = envelope, node, position, key
        self.held: SimDelivery | None = None
        self.redelivered = False
        self.redeliveries = 0
        self.tries = 0
        self.waits = False
        """Whether it waits for its redelivery."""
        self.settled: Outcome | None = None

    def __str__(self) -> str:
        return f"{self.node}#{self.position}"


class SimBroker:
    def __init__(self, clock: FakeClock, routes: dict[str, list[str]]) -> None:
        self.clock = clock
        self.routes = routes
        """Message type -> the nodes that take it."""
        self.copies: list[Copy] = []
        self.signals: list[tuple[Envelope, str]] = []
        """What was published, and to whom."""
        self.on_signal: Callable[[Envelope, str], None] = lambda envelope, node: None

    def put(self, envelope: Envelope, node: str, *, key: str | None = None) -> Copy:
        copy = Copy(envelope, node, len(self.copies), key)
        self.copies.append(copy)
        return copy

    def append(self, envelopes: Sequence[Envelope]) -> None:
        for envelope in envelopes:
            if not self._takers(envelope) and envelope.kind == "command":
                raise Unroutable(f"nobody takes {envelope}")
        for envelope in envelopes:
            for node in self._takers(envelope):
                self.signals.append((envelope, node))
                self.on_signal(envelope, node)
                self.put(envelope, node, key=envelope.key)

    def _takers(self, envelope: Envelope) -> list[str]:
        takers = self.routes.get(envelope.type, [])
        if envelope.kind == "command":
            takers = [node for node in takers if node == envelope.destination]
        return [node for node in takers if not envelope.recipients or node in envelope.recipients]

    def available(self, nodes: Sequence[str], *, withheld: bool = True) -> list[Copy]:
        """What may be delivered; `withheld`: without what follows another of its key."""
        free = []
        busy_keys: set[tuple[str, str]] = set()
        for copy in self.copies:
            if copy.settled is not None or copy.node not in nodes:
                continue
            if withheld and copy.key is not None and (copy.node, copy.key) in busy_keys:
                continue
            if copy.key is not None:
                busy_keys.add((copy.node, copy.key))
            if copy.held is None and not copy.waits:
                free.append(copy)
        return free

    def unsettled(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.settled is None]

    def give_back(self, copy: Copy) -> None:
        """The lease ran out, or its holder died."""
        copy.held, copy.redelivered = None, True

    def again_after(self, copy: Copy, delay: float, *, counted: bool) -> None:
        self.give_back(copy)
        copy.redeliveries += counted
        copy.waits = True
        self.clock.call_later(delay, lambda: setattr(copy, "waits", False))


class SimDelivery:
    """One acquisition of a copy. Ending it may get lost on the way: then it is as if it had never ended."""

    lock_seconds = 60.0
    letter: DeadLetter | None = None
    expired = False

    def __init__(self, broker: SimBroker, scheduler: Scheduler, copy: Copy, modes: tuple[str, ...]) -> None:
        self._broker, self._scheduler, self.copy, self._modes = broker, scheduler, copy, modes
        self.envelope = copy.envelope
        self.key = copy.key
        self.redelivered = copy.redelivered
        self.redeliveries = copy.redeliveries
        self.position: int | None = copy.position
        copy.held = self

    @property
    def tries(self) -> int:
        return self.copy.tries

    def start(self) -> None:
        self.copy.tries += 1

    def renew(self) -> None: ...

    async def _ends(self, point: str) -> None:
        outcome = await self._scheduler.point(point, self._modes)
        self._scheduler.acted()
        if outcome == "lose" and self.copy.held is self:
            self._broker.give_back(self.copy)
        if self.copy.held is not self:
            raise StaleLock(f"{self.copy} belongs to somebody else by now")

    async def settle(self, outcome: Outcome) -> None:
        await self._ends("delivery.settle")
        self.copy.held, self.copy.settled = None, outcome

    async def release(self, *, begun: bool = True) -> None:
        await self._ends("delivery.release")
        self._broker.give_back(self.copy)

    async def redeliver(self, delay: float, *, counted: bool = True) -> None:
        await self._ends("delivery.redeliver")
        self._broker.again_after(self.copy, delay, counted=counted)

    async def dead_letter(self, reason: str, error: str) -> None:
        raise NotImplementedError("nodes with a store keep their dead letters themselves")


class SimTogether(SimDelivery):
    """Many of them start and settle at once."""

    def start_all(self, deliveries: "Sequence[SimTogether]") -> list[StaleLock | None]:
        for delivery in deliveries:
            delivery.start()
        return [None for _ in deliveries]

    def settle_all(self, deliveries: "Sequence[SimTogether]", outcomes: Sequence[Outcome]) -> list[StaleLock | None]:
        self._scheduler.acted()
        found: list[StaleLock | None] = []
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            copy = delivery.copy
            if copy.held is delivery:
                copy.held, copy.settled = None, outcome
                found.append(None)
            else:
                found.append(StaleLock(f"{copy} belongs to somebody else by now"))
        return found


class SimTransport:
    """The broker as one process sees it."""

    capabilities = EVERY_CAPABILITY - {"cancel", "partitions", "reply"}
    on_disagreement: Callable[[Envelope], None] | None = None

    def __init__(self, broker: SimBroker, scheduler: Scheduler, modes: tuple[str, ...]) -> None:
        self._broker, self._scheduler, self._modes = broker, scheduler, modes

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        if not envelopes:
            return
        outcome = await self._scheduler.point("transport.publish", self._modes)
        if outcome == "fail":
            raise OSError("the broker is not reachable")
        self._broker.append(envelopes)
        self._scheduler.acted()
        if outcome == "lose":
            raise OSError("the broker did not answer")

    async def consume(
        self, queue: str, on_delivery: Callable[[Delivery], None], *, prefetch: int, **_: Any
    ) -> Consumer:
        raise QueueNotFound(f"the world delivers by itself; nobody consumes {queue}")
