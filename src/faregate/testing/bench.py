"""A bench: nodes on a real broker in memory and a fake clock, with everything they send on record.

Redelivery, delay, expiry and dead letters are the broker's own, not imitations; only the clock is simulated.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, Unpack, cast, overload

from faregate.broker import Broker
from faregate.bus.bus import Bus
from faregate.bus.dead_letters import MOST
from faregate.bus.requests import REQUEST_SECONDS, check_reply, check_timeout
from faregate.codec import BodyReader
from faregate.errors import ConfigurationError, FaregateError, Unroutable
from faregate.message import Envelope, known
from faregate.node.node import Node
from faregate.node.outgoing import Options, Outgoing, as_event
from faregate.node.sources import open_events, publishers
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.schemes import open_store, open_token_store
from faregate.ports.store import Store
from faregate.ports.tokens import TokenStore
from faregate.testing.clock import FakeClock
from faregate.testing.counted import Calls, Counted, CountedStore
from faregate.testing.replaced import with_resources
from faregate.testing.store_subjects import postgres_schema
from faregate.transports.memory import MemoryTransport

T = TypeVar("T")

_BODY_LIMIT = 1 << 30
_STORE_SECONDS = 1.0
"""For so long a real store may take to do one thing, while nothing else happens."""
_QUERY_SECONDS = 30.0


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

    def __init__(
        self, nodes: Sequence[Node], store: str = "memory:", provide: Mapping[type, Any] | None = None
    ) -> None:
        self.clock = FakeClock()
        self._nodes = nodes = with_resources(nodes, provide)
        self._calls = Calls()
        """Of a real store; in memory nothing takes time."""
        self._seen: Seen | None = None if is_memory(store) else Seen([], [])
        """The dead letters of a real store, as they were when the bench last came to rest."""
        self._transport = RecordingTransport(self.clock)
        self.bus = Bus(
            self._transport,
            nodes=[*nodes, *_stand_ins(nodes)],
            store=store if is_memory(store) else self._counted(open_store(store, self.clock)),
            tokens=self._token_store(store),
            clock=self.clock,
            drain_seconds=0,
            stall_seconds=None,  # the clock is simulated, and the bench tells itself when nothing moves
        )
        self._threads = 0
        self._count_threads()
        self._classes: dict[str, type] = {}
        self._remember_classes()

    @property
    def broker(self) -> Broker:
        """The embedded broker that it runs on."""
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
                    await self._look()
                    return
                continue
            if self._working() > 0 or self._calls.count:
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
        await self._look()

    def _at_rest(self) -> bool:
        if any(worker.busy for worker in self.bus._workers) or self.bus._stores.busy:
            return False
        paused = {worker.binding.queue for worker in self.bus._workers if worker.is_paused_by_hand}
        waiting = sum(
            1 for queue in self.broker.queues() if queue.name in paused for entry in queue.browse() if entry.in_flight
        )
        return self.broker.in_flight.count == waiting

    def _working(self) -> int:
        return sum(worker.busy - worker.switch.waiting for worker in self.bus._workers) - self.clock.sleepers

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
        """Go round the event loop until nothing changes any more, no thread works for a handler, and no real store has
        something to do. For that it waits a while only: what waits there may wait for a transaction that is open."""
        unchanged, since = 0, time.monotonic()
        before: object = None
        while unchanged < 10:
            await asyncio.sleep(0.0005 if self._threads or self._calls.count else 0)
            state = (self._fingerprint(), self._threads, self._calls.count)
            if state != before:
                before, unchanged, since = state, 0, time.monotonic()
            elif self._threads or (self._calls.count and time.monotonic() - since < _STORE_SECONDS):
                unchanged = 0
            else:
                unchanged += 1

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

    def _counted(self, store: Store) -> Store:
        return cast(Store, CountedStore(store, self._calls))

    def _token_store(self, store: str) -> TokenStore | None:
        """Where tokens are, if a subscription wants them and the bus does not see to it."""
        every = [subscription for node in self._nodes for subscription in node.subscriptions.values()]
        if is_memory(store) or all(subscription.dedup != "tokens" for subscription in every):
            return None
        return cast(TokenStore, Counted(open_token_store(store, self.clock), self._calls))

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
        recorded = [*self._transport.recorded.values(), *self._in_store().later]
        return [envelope for envelope in recorded if wire is None or envelope.type == wire]

    def dead_letters(self, node: str | Node | None = None, *, status: DeadStatus | None = "open") -> list[DeadLetter]:
        """The dead letters, as `bus.dead_letters`; not awaited. Those of a real store are as they were when `settle`,
        `advance` or `request` returned."""
        name = node.name if isinstance(node, Node) else node
        letters = self._in_store().letters
        return [each for each in letters if name in (None, each.node) and status in (None, each.status)]

    def _in_store(self) -> "Seen":
        return self._seen or _at_once(self._read_store())

    async def _look(self) -> None:
        """A real store cannot be read at once: remember what is there now."""
        if self._seen is not None:
            self._seen = await self._read_store()

    async def _read_store(self) -> "Seen":
        (store,) = self.bus._stores.stores
        letters = await self.bus._dead_letters(None, None, MOST)
        later = await store.scheduled(_MOST_SCHEDULED)
        return Seen(letters, [row.envelope for row in later if row.message_id is not None])

    async def fetchall(self, node: str | Node, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of a query on the node's store, as `ctx.db.fetchall`: what is committed. Raises `BenchStuck` when a
        handler that does not go on holds the store."""
        return cast(list[tuple[Any, ...]], await self._run("fetchall", node, sql, parameters))

    async def fetchone(self, node: str | Node, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None:
        """The first of these rows, or None."""
        return cast(tuple[Any, ...] | None, await self._run("fetchone", node, sql, parameters))

    async def execute(self, node: str | Node, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run a statement on the node's store, and commit it: rows that handlers are to find. How many it changed."""
        return cast(int, await self._run("execute", node, sql, parameters))

    async def _run(self, method: str, node: str | Node, sql: str, parameters: Sequence[Any]) -> Any:
        name = node if isinstance(node, str) else node.name
        store = self.bus.store_of(name)
        if store is None:
            raise ConfigurationError(
                f"there is no node {name!r} on this bench; its nodes are: {', '.join(self.bus.nodes)}"
            )
        try:
            async with asyncio.timeout(_QUERY_SECONDS), store.transaction() as transaction:
                return await getattr(transaction, method)(sql, parameters)
        except TimeoutError:
            raise BenchStuck(
                f"the store of {name!r} does not answer within {_QUERY_SECONDS:g} s: a handler may wait in the middle "
                "of its transaction"
            ) from None

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


class Seen(NamedTuple):
    """What a bench shows of its store."""

    letters: list[DeadLetter]
    later: list[Envelope]
    """What handlers scheduled, and is not due yet."""


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of something that never really waits, as everything on the memory store."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise BenchStuck("the memory store waits for something")


def is_memory(store: str) -> bool:
    return store.partition(":")[0] == "memory"


@asynccontextmanager
async def bench(
    *nodes: Node, store: str = "memory:", provide: Mapping[type, Any] | None = None
) -> AsyncIterator[Bench]:
    """Run nodes on a fake clock; other nodes that they name exist as far as they must.

    `store` is the URL of the database that they all use: "memory:"; "sqlite:PATH", which is left there;
    "postgresql://…", where they get a schema of their own that is dropped at the end. `provide` replaces resources, by
    class: with an instance, or with a function or generator that makes one.
    """
    if not nodes:
        raise ConfigurationError("bench(…) takes the nodes to test")
    if not isinstance(store, str):
        raise ConfigurationError(f"store= of a bench is a URL, such as 'sqlite:PATH'; got {store!r}")
    if asyncio._get_running_loop() is None:
        raise ConfigurationError(
            "a bench runs on asyncio, and no event loop of it runs here: with the pytest plugin of anyio, let the "
            "fixture anyio_backend return 'asyncio'"
        )
    async with AsyncExitStack() as stack:
        if store.partition(":")[0] in ("postgres", "postgresql"):
            store = await stack.enter_async_context(postgres_schema(store))
        made = Bench(nodes, store, provide)
        await stack.enter_async_context(made.bus)
        yield made
