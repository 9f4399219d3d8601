"""A queue on a fake clock, and consumers that keep what they get. What the tests of this folder are written with."""

from collections.abc import Callable
from typing import Any

from faregate.broker.consumer import QueueConsumer
from faregate.broker.delivery import BrokerDelivery
from faregate.broker.entry import STATE_NAMES, Entry
from faregate.broker.in_flight import InFlight
from faregate.broker.queue import Queue
from faregate.broker.schedule import Schedule
from faregate.broker.selector import Selector
from faregate.errors import StaleLock
from faregate.message import Envelope
from faregate.ports.keys import Keys
from faregate.testing import FakeClock
from faregate.testing.clock import rest

MakeQueue = Callable[..., Queue]


def key_header(envelope: Envelope) -> str | None:
    """Several keys are written "a+b"."""
    key = envelope.headers.get("key")
    return Keys.of(key.split("+")) if key is not None and "+" in key else key


class Inbox:
    """A consumer that keeps what it gets."""

    def __init__(self, queue: Queue, **how: Any) -> None:
        self.got: list[BrokerDelivery] = []
        self.consumer: QueueConsumer = queue.attach(self.got.append, **how)

    async def texts(self) -> list[str]:
        """The texts of all that it got and that was not taken."""
        await rest()
        return [delivery.envelope.body.decode() for delivery in self.got]

    async def take(self) -> BrokerDelivery:
        """The first delivery, removed from the inbox."""
        await rest()
        assert self.got, "nothing was delivered"
        return self.got.pop(0)


class Rig:
    def __init__(self, make: MakeQueue = Queue, **properties: Any) -> None:
        self.clock = FakeClock()
        self.schedule = Schedule(self.clock)
        self.in_flight = InFlight()
        self.dead: list[tuple[str, str]] = []
        """The text and the reason of everything the queue dead-lettered."""
        properties.setdefault("key_of", key_header)
        self.queue = make(
            "tested",
            clock=self.clock,
            schedule=self.schedule,
            make_dead_letter=self._add_dead,
            in_flight=self.in_flight,
            **properties,
        )

    def _add_dead(self, queue: Queue, entry: Entry, reason: str, error: str) -> None:
        assert error, "a dead letter without saying why"
        self.dead.append((entry.envelope.body.decode(), reason))

    def put(
        self,
        *texts: str,
        key: str | None = None,
        ttl: float | None = None,
        after: float | None = None,
        **headers: str,
    ) -> None:
        """Enqueue messages; `ttl` and `after` are seconds from now."""
        now = self.clock.time()
        if key is not None:
            headers["key"] = key
        for text in texts:
            self.queue.enqueue(
                Envelope(
                    publication_id=text,
                    type="Noted",
                    body=text.encode(),
                    headers=dict(headers),
                    expires_at=None if ttl is None else now + ttl,
                    deliver_at=None if after is None else now + after,
                )
            )

    def inbox(self, credit: int = 10, *, window: bool = True, selector: str | None = None, **how: Any) -> Inbox:
        parsed = None if selector is None else Selector(selector)
        return Inbox(self.queue, credit=credit, window=window, selector=parsed, **how)

    def states(self) -> dict[str, str]:
        """The state of every living entry, in order of position."""
        return {entry.envelope.body.decode(): STATE_NAMES[entry.state] for entry in self.queue.browse()}


async def refused(ending: Any) -> bool:
    """Whether ending (or renewing) a delivery is refused because its lock is stale."""
    try:
        result = ending()
        if result is not None:
            await result
    except StaleLock:
        return True
    return False
