"""A bench: nodes on a real broker in memory and a fake clock, with everything they send on record.

Redelivery, delay, expiry and dead letters are the broker's own, not imitations; only time is made.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar, Unpack, overload

from faregate.broker import Broker
from faregate.bus.bus import Bus
from faregate.bus.requests import REQUEST_SECONDS, check_reply, check_timeout
from faregate.codec import BodyReader
from faregate.errors import ConfigurationError, FaregateError, Unroutable
from faregate.message import Envelope, known
from faregate.node.node import Node
from faregate.node.outgoing import Options, Outgoing, as_event
from faregate.node.sources import open_events, publishers
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.queue import dead_letter_queue
from faregate.ports.store import DeadFilter
from faregate.testing.clock import FakeClock
from faregate.transports.memory import MemoryTransport

T = TypeVar("T")

_BODY_LIMIT = 1 << 30


class BenchStuck(FaregateError):
    """The bench waits for something that no passing of time brings about."""


class RecordingTransport(MemoryTransport):
    """Remembers what handlers send, and takes commands to nodes that are not on the bench."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.recorded: dict[str, Envelope] = {}

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        caused = [envelope for envelope in envelopes if envelope.causation_id is not None]
        known_here = [envelope for envelope in envelopes if self._routable(envelope)]
        await super().publish(known_here)
        for envelope in caused:
            self.recorded.setdefault(envelope.publication_id, envelope)

    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        for envelope in envelopes:
            self.recorded.setdefault(envelope.publication_id, envelope)
        return await super().reply(envelopes)

    def _routable(self, envelope: Envelope) -> bool:
        try:
            if envelope.kind == "command":
                self.broker.route(envelope)
        except Unroutable:
            if envelope.causation_id is None:
                raise
            return False
        return True


_MOST_SCHEDULED = 1_000_000


class Bench:
    """Made by `bench(…)`. `bus` and `clock` are there to be used directly, too."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.clock = FakeClock()
        self._nodes = list(nodes)
        self._transport = RecordingTransport(self.clock)
        self.bus = Bus(
            self._transport,
            nodes=[*nodes, *_stand_ins(nodes)],
            store="memory:",
            clock=self.clock,
            drain_seconds=0,
            stall_seconds=None,  # time is made here, and the bench tells itself when nothing moves
        )
        self._threads = 0
        self._count_threads()
        self._classes: dict[str, type] = {}
        self._remember_classes()

    @property
    def broker(self) -> Broker:
        return self._transport.broker

    # --- putting messages in ------------------------------------------------------------------------------

    async def publish(self, event: Any, *, node: str | Node | None = None, **options: Unpack[Options]) -> str:
        """Publish as the node that is known to publish this type, or as the first one, unless told otherwise."""
        outgoing = as_event(event, options)
        if node is None and not self.bus._publishers.get(outgoing.message_type.wire):
            node = self._nodes[0]
        return await self.bus.publish(outgoing, node=node)

    async def send(
        self,
        command: Any,
        *,
        to: str | Node | None = None,
        node: str | Node | None = None,
        **options: Unpack[Options],
    ) -> str:
        """Send to the one node that handles this command, unless told otherwise."""
        if to is None and not isinstance(command, Outgoing):
            to = self._handler_of(command)
        return await self.bus.send(command, to=to, node=node or self._nodes[0], **options)

    async def request(
        self,
        command: Any,
        *,
        to: str | Node | None = None,
        reply: type | Sequence[type] | None = None,
        timeout: float | timedelta = REQUEST_SECONDS,
        node: str | Node | None = None,
    ) -> Any:
        """Ask the one node that handles this command, unless told otherwise, and settle until there is an answer.
        Raises as `bus.request`; a timeout costs no real time."""
        if to is None and not isinstance(command, Outgoing):
            to = self._handler_of(command)
        classes = check_reply(reply)
        asking = asyncio.ensure_future(
            self.bus.request(command, to=to, reply=classes or None, timeout=timeout, node=node or self._nodes[0])
        )
        try:
            await self.settle()
            if not asking.done():
                await self.advance(check_timeout(timeout))
            return await asking
        finally:
            asking.cancel()

    async def cancel(
        self, publication_id: str | None = None, *, key: str | None = None, node: str | Node | None = None
    ) -> bool:
        """Cancel what is scheduled, as `bus.cancel`."""
        return await self.bus.cancel(publication_id, key=key, node=node)

    async def deliver(self, envelope: Envelope) -> None:
        """Put an envelope on the bus as it is; if it has no way of its own, into the first subscription's queue."""
        route = self.broker.topics.route(envelope)
        queues = route.queues or [
            self.broker.queue(worker.binding.queue)
            for worker in self.bus._workers
            if worker.subscription.node == (envelope.destination or self._nodes[0].name)
        ]
        if not queues:
            raise ConfigurationError("no node on this bench has a subscription to deliver to")
        for queue in queues if route.queues else queues[:1]:
            queue.enqueue(envelope)

    def _handler_of(self, command: Any) -> str:
        declared = known(type(command))
        handlers = [node.name for node in self._nodes if declared and (declared.wire, None) in node.subscriptions]
        if len(handlers) != 1:
            raise ConfigurationError(f"{len(handlers)} nodes handle {type(command).__name__}: say which, with to=")
        return handlers[0]

    # --- letting time pass --------------------------------------------------------------------------------

    async def settle(self, timeout: float = 30.0) -> None:
        """Run until every message is handled, skipped or a dead letter, moving the clock over retries and redeliveries.

        Messages scheduled for later are not waited for, nor what waits at a paused subscription. `timeout` is
        real time. Raises `BenchStuck`.
        """
        until = time.monotonic() + timeout
        while True:
            await self._rest()
            if self._at_rest():
                before = self.bus._stores.activity
                await self.bus._stores.idle()
                if self.bus._stores.activity == before:
                    return
                continue
            if self._working() > 0:
                # A handler waits for something real: a thread, a socket, an event of the test.
                if time.monotonic() > until:
                    raise BenchStuck(f"a handler still runs after {timeout} s: {self._where()}")
                await asyncio.sleep(0.001)
                continue
            if self._switched_off and time.monotonic() > until:
                raise BenchStuck(f"no time brings it to rest, not even {timeout} s of ours: {self._where()}")
            delay = self.clock.next_timer() if self._time_helps() else None
            if delay is None:
                raise BenchStuck(f"nothing moves any more, and time would not help: {self._where()}")
            self.clock.jump(delay)

    async def advance(self, seconds: float) -> None:
        """Move the clock and let everything run that became due."""
        await self.clock.advance(seconds, self._rest)

    def _at_rest(self) -> bool:
        if any(worker.busy for worker in self.bus._workers) or self.bus._stores.busy:
            return False
        paused = {worker.binding.queue for worker in self.bus._workers if worker.is_paused_by_hand}
        waiting = sum(
            1 for queue in self.broker.queues() if queue.name in paused for entry in queue.browse() if entry.in_flight
        )
        return self.broker.in_flight.count == waiting

    def _working(self) -> int:
        return sum(worker.busy for worker in self.bus._workers) - self.clock.sleepers

    def _time_helps(self) -> bool:
        return (
            bool(self._switched_off)
            or self.clock.sleepers > 0
            or any(entry.redelivering for queue in self.broker.queues() for entry in queue.browse())
        )

    @property
    def _switched_off(self) -> list[str]:
        """The queues of subscriptions whose kill switch is open."""
        return [worker.binding.queue for worker in self.bus._workers if worker.switch.is_open]

    def _where(self) -> str:
        counts = [f"{len(queue)} in {queue.name}" for queue in self.broker.queues() if len(queue)]
        counts += [f"the kill switch of {name} is open" for name in self._switched_off]
        return ", ".join(counts) or "no queue holds anything"

    async def _rest(self) -> None:
        """Go round the event loop until nothing changes any more and no thread works for a handler."""
        unchanged = 0
        before: object = None
        while unchanged < 10:
            await asyncio.sleep(0.0005 if self._threads else 0)
            state = (self._fingerprint(), self._threads)
            unchanged = unchanged + 1 if state == before and not self._threads else 0
            before = state

    def _fingerprint(self) -> tuple[object, ...]:
        queues = [(queue.activity, len(queue)) for queue in self.broker.queues()]
        outcomes = [tuple(worker.outcomes.values()) for worker in self.bus._workers]
        return (tuple(queues), tuple(outcomes), self.clock.sleepers, self._working(), self.bus._stores.activity)

    def _count_threads(self) -> None:
        pool = self.bus._pool
        submit = pool.submit

        def counted(*args: Any, **kwargs: Any) -> Future[Any]:
            self._threads += 1
            future = submit(*args, **kwargs)
            future.add_done_callback(self._thread_done)
            return future

        pool.submit = counted  # type: ignore[method-assign]

    def _remember_classes(self) -> None:
        """Note which class each wire name stands for in what is sent here."""
        for sender in self.bus._senders.values():

            def sealed(out: Outgoing, *args: Any, seal: Any = sender._seal) -> Envelope:
                self._classes[out.message_type.wire] = out.message_type.cls
                envelope: Envelope = seal(out, *args)
                return envelope

            sender._seal = sealed  # type: ignore[method-assign, assignment]

    def _thread_done(self, _: Future[Any]) -> None:
        self._threads -= 1

    # --- looking at what happened -------------------------------------------------------------------------

    @overload
    def sent(self) -> list[Any]: ...
    @overload
    def sent(self, cls: type[T]) -> list[T]: ...
    def sent(self, cls: type | None = None) -> list[Any]:
        """The messages that handlers published or sent, in order; of one class, or all. What is due later comes last,
        and what was cancelled is not among them."""
        found = []
        for envelope in self.envelopes(cls):
            reader = BodyReader(cls or self._classes[envelope.type], limit=_BODY_LIMIT)
            found.append(reader.read(envelope))
        return found

    def envelopes(self, cls: type | None = None) -> list[Envelope]:
        """The envelopes of what handlers published or sent, in order; what is due later comes last."""
        declared = known(cls) if cls is not None else None
        wire = declared.wire if declared else getattr(cls, "__name__", None)
        (store,) = self.bus._stores.stores
        later = [row.envelope for row in _at_once(store.scheduled(_MOST_SCHEDULED)) if row.message_id is not None]
        recorded = [*self._transport.recorded.values(), *later]
        return [envelope for envelope in recorded if wire is None or envelope.type == wire]

    def poisoned(self, node: str | None = None) -> list[DeadLetter]:
        """The open dead letters of stores and broker, oldest first."""
        names = [node] if node else list(self.bus.nodes)
        queues = [queue for queue in self.broker.queues() if queue.name in map(dead_letter_queue, names)]
        found = [entry.letter for queue in queues for entry in queue.browse() if entry.letter]
        return sorted([*found, *self.dead(node, status="open")], key=lambda record: record.at)

    def dead(self, node: str | None = None, *, status: DeadStatus | None = None) -> list[DeadLetter]:
        """The dead letters in the nodes' store, oldest first."""
        (store,) = self.bus._stores.stores
        return _at_once(store.dead(DeadFilter(node=node, status=status)))

    def outcomes(self) -> dict[str, int]:
        """How many messages were handled, skipped, filtered, redelivered, dead."""
        return self.bus.outcomes()


def _stand_ins(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that the tested ones name as sources; and `publisher`, for events of which none is known."""
    named = publishers(nodes)
    absent = set().union(*named.values()) - {node.name for node in nodes}
    wanted = [each.message_type for node in nodes for each in open_events(node)]
    unnamed = [message_type.cls for message_type in wanted if message_type.wire not in named]
    return [*map(Node, sorted(absent)), *([Node("publisher", publishes=unnamed)] if unnamed else [])]


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of something that never really waits, as everything on the memory store."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise BenchStuck("the memory store waits for something")


@asynccontextmanager
async def bench(*nodes: Node) -> AsyncIterator[Bench]:
    """Run nodes on a fake clock; other nodes that they name exist as far as they must."""
    if not nodes:
        raise ConfigurationError("bench(…) takes the nodes to test")
    made = Bench(nodes)
    async with made.bus:
        yield made
