"""A durable broker on a journal, with a fake clock and consumers that keep what they get. The disk may be simulated.

`restart` closes in order and opens again; `kill` opens what a process that was killed has left.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from faregate.broker.delivery import BrokerDelivery
from faregate.broker.durable import DurableBroker
from faregate.broker.journal.disk import Disk
from faregate.broker.journal.journal import Journal
from faregate.message import Envelope
from faregate.ports.queue import Binding
from faregate.testing import FakeClock
from faregate.testing.clock import rest
from tests.journal.disk import SimulatedDisk

ROOT = Path("/disk/journal")
TIMEOUT = 30.0


def by_header(envelope: Envelope) -> str | None:
    return envelope.headers.get("key")


NOTED = Binding("reader", "Noted", "event", "author", key_of=by_header)


def noted(name: str, *, type: str = "Noted", key: str | None = None, size: int = 0, **more: Any) -> Envelope:
    body = name.encode().ljust(size, b".")
    headers = {} if key is None else {"key": key}
    return Envelope(publication_id=name, type=type, source="author", body=body, headers=headers, **more)


class Station:
    def __init__(self, disk: Disk, clock: FakeClock, bindings: Sequence[Binding], **how: Any) -> None:
        self.disk = disk
        self.clock = clock
        self.bindings = bindings
        self.how = how
        self.journal: Journal
        self.broker: DurableBroker
        self.got: list[BrokerDelivery] = []

    async def open(self) -> "Station":
        resident = {key: self.how[key] for key in self.how if key == "resident_bytes"}
        how = {key: self.how[key] for key in self.how if key not in ("resident_bytes", "seals")}
        self.got = []
        self.journal = Journal(ROOT, disk=self.disk, **how)
        if not self.how.get("seals"):  # its thread would do so when it likes
            self.journal.seal = lambda: None  # type: ignore[method-assign]
        self.journal.start()
        self.broker = DurableBroker(self.clock, self.journal, **resident)
        for binding in self.bindings:
            self.broker.bind(binding)
        self.broker.begin()
        return self

    async def close(self) -> None:
        self.broker.close()
        await asyncio.wait_for(self.broker.close_journal(), TIMEOUT)

    async def restart(self) -> None:
        """Close in order, open again."""
        await self.close()
        await self.open()

    async def kill(self) -> None:
        """The process ends without a word; another opens what it has left."""
        await self.settled()
        left = self.disk
        assert isinstance(left, SimulatedDisk)
        self.disk = left.copy()
        await self.abandon()
        await self.open()

    async def abandon(self) -> None:
        """End the old one's thread; what it still writes goes to a disk that nobody looks at."""
        self.broker.close()
        self.journal._items.put(None)
        assert self.journal._thread is not None
        await asyncio.to_thread(self.journal._thread.join)

    async def publish(self, *envelopes: Envelope) -> None:
        await asyncio.wait_for(self.broker.publish(envelopes), TIMEOUT)

    def consume(self, prefetch: int = 1000, queue: str | None = None) -> None:
        self.broker.consume(queue or self.bindings[0].queue, self.got.append, prefetch=prefetch)

    async def settled(self) -> None:
        """Everything handed in is written, what was settled is in the side logs, what is due is delivered."""
        for _ in range(3):
            await asyncio.wait_for(self.journal.barrier(), TIMEOUT)
            await rest()

    async def names(self) -> list[str]:
        """Take everything that is delivered, without ending it."""
        await self.settled()
        return [delivery.envelope.publication_id for delivery in self.got]

    async def take(self, name: str) -> BrokerDelivery:
        """A delivery by name, removed from what was got."""
        await self.settled()
        [found] = [delivery for delivery in self.got if delivery.envelope.publication_id == name]
        self.got.remove(found)
        return found

    async def handle(self, *names: str) -> None:
        for name in names:
            delivery = await self.take(name)
            delivery.start()
            await delivery.settle("handled")

    async def waiting(self, queue: str | None = None) -> list[str]:
        """What a new process finds waiting, in order, if this one is closed now."""
        await self.restart()
        return await self.drain(queue)

    async def drain(self, queue: str | None = None) -> list[str]:
        """Everything that is in a queue, taken one after the other, and handled."""
        taken: list[str] = []
        self.got.clear()
        consumer = self.broker.consume(queue or self.bindings[0].queue, self.got.append, prefetch=1)
        while True:
            await self.settled()
            if not self.got:
                break
            delivery = self.got.pop(0)
            taken.append(delivery.envelope.publication_id)
            await delivery.settle("handled")
        await consumer.close()
        return taken


@asynccontextmanager
async def station(*bindings: Binding, disk: Disk | None = None, **how: Any) -> AsyncIterator[Station]:
    opened = await Station(disk or SimulatedDisk(), FakeClock(), bindings or (NOTED,), **how).open()
    try:
        yield opened
    finally:
        if opened.journal._thread is not None and opened.journal._thread.is_alive():
            await opened.close()
