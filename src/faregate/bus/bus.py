"""The bus: binds nodes to a transport and to stores, and runs them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from functools import partial
from os import fsencode, fspath, getpid
from pathlib import Path
from secrets import token_hex
from socket import gethostname
from threading import get_ident
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, Unpack, overload

from faregate.bus.control import ControlSocket, InstructionListener
from faregate.bus.control_place import ControlPlace, bus_place, journal_place
from faregate.bus.dead_letter_retention import RetainDead
from faregate.bus.dead_letters import DeadLetters
from faregate.bus.heart import Heart
from faregate.bus.mistakes import Mistakes
from faregate.bus.node_stores import Given, GivenByNode, NodeStores
from faregate.bus.requests import REQUEST_SECONDS, RequestCounts, Requests, check_reply, check_timeout
from faregate.bus.stalls import StallDetector
from faregate.bus.status import Reporter
from faregate.bus.supplied import SuppliedFeed, check_capabilities, is_leased
from faregate.bus.ticker import Ticker, check_schedules
from faregate.bus.worker import Lessor, Worker
from faregate.codec import BodyWriter, Codec, find_codec
from faregate.core.alarms import Alarm, Alarms
from faregate.core.breaker import Breaker, BreakerStatus, Circuit
from faregate.core.context import Ending
from faregate.core.escalation import Escalation
from faregate.core.feed import QueueFeed
from faregate.core.handling import Handling
from faregate.core.life import Life
from faregate.core.node_store import NodeStore
from faregate.core.observer import Observer, Observers, check_observers, unwatch, watch
from faregate.core.recipients import topic_for
from faregate.core.replies import Replies
from faregate.core.resources import Resources
from faregate.core.sealing import Keys
from faregate.core.sender import Sender, message_classes
from faregate.core.threads import HandlerThreads
from faregate.core.verdict import first_line
from faregate.errors import ConfigurationError, IdleTimeout, WrongEventLoop, check_delay
from faregate.message import Envelope, MessageType, known
from faregate.node.key import Key
from faregate.node.node import Node
from faregate.node.outgoing import Alike, Options, as_command, as_event, as_events, check_scheduled
from faregate.node.policy import check_count
from faregate.node.sources import publishers, with_sources
from faregate.node.subscription import Subscription
from faregate.plain import plain
from faregate.ports.cancellation import finish
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.presence import Announcing, BusStatus, Heeding, OutboxStatus, State
from faregate.ports.progress import Occupied
from faregate.ports.queue import (
    Binding,
    Browsing,
    Connected,
    Counting,
    InProcess,
    Logged,
    Measured,
    QueueTransport,
    Recognising,
    SpoolTransport,
)
from faregate.ports.schemes import hide_password, open_transport, public_name
from faregate.ports.store import DeadFilter, Store
from faregate.ports.tokens import TokenStore
from faregate.units import counted

log = logging.getLogger("faregate.bus")

T = TypeVar("T")
MAX_MESSAGE_BYTES = 1024 * 1024
RETAIN_LEDGER = 30 * 86_400.0
DEFAULT_BREAKER = Breaker()
_PREFETCH = 2048
"""Enough for several full batches."""
_LONGEST_PAUSE = 366 * 86_400.0
_ANSWER_SECONDS = 2.0
"""For so long a store may take to say that it is there."""
_COUNTED: tuple[Ending, ...] = ("handled", "skipped", "filtered", "duplicate", "redelivered", "dead")


class SubscriptionCounts(NamedTuple):
    """How the messages of one subscription ended, and how many are being worked on."""

    node: str
    type: str
    source: str | None
    handled: int
    skipped: int
    filtered: int
    duplicate: int
    redelivered: int
    dead: int
    busy: int
    paused: bool


class QueueDepth(NamedTuple):
    """How many messages wait for one subscription."""

    node: str
    type: str
    source: str | None
    waiting: int | None


class Bus:
    """Runs nodes on a transport. Making one does no I/O; `async with` starts and stops it.

    `transport` is a URL or an object with the protocol `QueueTransport`. `store` is the nodes' database, a URL or a
    `Store`, or a mapping of nodes or their names; a handler's writes and outgoing messages are one commit there.
    `tokens` is the token store, a URL or a `TokenStore`, where subscriptions with dedup="tokens" do not share one store
    with all other nodes. The bus opens and closes the objects that it is given. `retain_ledger` is for how many seconds
    handled messages are remembered, `retain_dead` for how long dead letters are kept, and where they are exported to
    then; None: they stay. `max_message_bytes` bounds encoded bodies both ways. `codec` is what this bus writes with, by
    name or as an object with the codec's protocol; it reads all that are registered in this process. `compress_above`
    compresses larger bodies. `drain_seconds` is how long leaving waits for running handlers. After `stall_seconds`
    without progress an alarm names what stands still; None: nobody looks. `breaker` says when sending stops for a while
    because the broker takes nothing; None: never. `control` opens a socket by which this user's `faregate status`,
    `pause` and `resume` reach the bus: True, or its path. None: `faregate run` opens it; False: nobody does, and what
    is asked through RabbitMQ is not heeded either. `observe` is what looks at its work: one of `fg.observe`, or a list
    of them."""

    def __init__(
        self,
        transport: str | QueueTransport,
        *,
        nodes: Sequence[Node],
        store: Given | GivenByNode | None = None,
        codec: str | Codec = "json",
        compress_above: int | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        tokens: str | TokenStore | None = None,
        retain_ledger: float = RETAIN_LEDGER,
        retain_dead: RetainDead | None = None,
        drain_seconds: float = 30.0,
        stall_seconds: float | None = 60.0,
        breaker: Breaker | None = DEFAULT_BREAKER,
        control: bool | str | Path | None = None,
        observe: Observer | Observers | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.instance = f"{gethostname()}-{getpid()}-{token_hex(4)}"
        """What other instances of the same nodes know this one by."""
        self._publishers = publishers(_check_nodes(nodes))
        self.nodes = {node.name: node for node in with_sources(nodes, self._publishers)}
        self._alarms = Alarms()
        self.observers = check_observers(observe)
        self._circuit = self._make_circuit(breaker)
        self.url = hide_password(transport) if isinstance(transport, str) else type(transport).__name__
        self._transport = open_transport(transport, self.clock)
        self._drain_seconds = check_delay(drain_seconds, "drain_seconds")
        self._pool = HandlerThreads()
        limit = check_count(max_message_bytes, "max_message_bytes", 1, 1 << 30)
        if compress_above is not None:
            check_count(compress_above, "compress_above", 0, 1 << 30)
        digests = store is not None or not (isinstance(self._transport, InProcess) and self._transport.in_process)
        writer = BodyWriter(find_codec(codec), limit=limit, compress_above=compress_above, digests=digests)
        self.content_type = writer.content_type
        """What this bus writes."""
        self._resources = {node.name: Resources(node, self._pool, self._alarms) for node in self.nodes.values()}
        self._life = Life(list(self._resources.values()))
        keys, classes = shared_keys(self.nodes.values()), message_classes(self.nodes.values())
        replies = Replies(self._transport, self._circuit)
        self._requests = Requests(self._transport, self.url, self.clock, replies, classes, limit)
        self._senders = {
            node.name: Sender(
                node,
                self._transport,
                writer,
                self.clock,
                keys,
                self._alarms,
                classes,
                replies,
                self.observers,
                self._circuit,
                self._resources[node.name],
            )
            for node in self.nodes.values()
        }
        self._stores = NodeStores(
            self.nodes,
            store,
            transport=self._transport,
            clock=self.clock,
            alarms=self._alarms,
            retain_ledger=check_delay(retain_ledger, "retain_ledger"),
            retain_dead=_check_retain_dead(retain_dead, store),
            tokens=tokens,
            around={
                name: sender.publish_recorded
                for name, sender in self._senders.items()
                if self.nodes[name].outgoing_middlewares
            },
            instance=self.instance,
            replies=replies,
            observers=self.observers,
            circuit=self._circuit,
            escalations={
                name: Escalation(self.nodes[name], sender, self._alarms, self._pool)
                for name, sender in self._senders.items()
            },
        )
        for name, sender in self._senders.items():
            sender.use_store(self._stores.of(name), self._stores.recipient_lists)
        self._workers = [
            self._worker(node, subscription, limit)
            for node in self.nodes.values()
            for subscription in node.subscriptions.values()
        ]
        for worker in self._workers:
            worker.switching.on_store_down = partial(self._store_down, self._stores.of(worker.subscription.node))
        self._stalls = self._stall_detector(stall_seconds)
        self._tickers = {name: self._ticker(node) for name, node in self.nodes.items() if node.schedules}
        self._mistakes = Mistakes(
            list(self.nodes),
            [worker.subscription for worker in self._workers],
            self._transport,
            self._stores.stores,
            self.clock,
            self._alarms,
        )
        self._reporter = Reporter(
            instance=self.instance,
            url=self.url,
            nodes=list(self.nodes),
            workers=self._workers,
            outboxes=self._stores.outboxes,
            clock=self.clock,
            alarms=self._alarms,
            state=lambda: self._state,
            breaker=lambda: None if self.breaker is None else self.breaker.state,
            schedules={name: ticker.status for name, ticker in self._tickers.items()},
            notices=lambda: self._mistakes.notices,
        )
        announcing = self._transport if isinstance(self._transport, Announcing) else None
        self._heart = Heart(self._reporter, announcing, self.clock)
        self._given_control, self._allows_control = _check_control(control), False
        self._control: ControlSocket | None = None
        self._instructions: InstructionListener | None = None
        if isinstance(self._transport, Heeding) and control is not False:
            self._instructions = InstructionListener(self._transport, list(self.nodes), self, self._heart.beat)
        if isinstance(self._transport, Recognising):
            self._transport.on_disagreement = self._disagreement
        if isinstance(self._transport, SpoolTransport):
            self._transport.on_unreadable = self._unreadable
        self._state: State = "new"
        self._spooling = asyncio.Lock()
        self._landings: set[asyncio.Future[None]] = set()
        """Calls of `idle` that wait."""
        self.left_behind = 0
        """How many handlers had not finished when `stop` ended. A program that wants to end must not wait for their
        threads or tasks."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of `start`."""

    def _worker(self, node: Node, subscription: Subscription, limit: int) -> Worker:
        sender, shared = self._senders[node.name], self._stores.of(node.name)
        is_supplied = check_capabilities(self._transport, self.url, subscription, shared is not None)
        leased = is_leased(self._transport, subscription)
        handling = Handling(
            subscription,
            node,
            sender,
            SuppliedFeed() if is_supplied else QueueFeed(),
            store=shared,
            clock=self.clock,
            alarms=self._alarms,
            pool=self._pool,
            body_limit=limit,
            kill_switch=subscription.kill_switch,
            observers=self.observers,
            resources=self._resources[node.name],
        )
        prefetch = subscription.prefetch or max(_PREFETCH, 2 * subscription.order.lanes)
        waiting = self._stores.waiting(node.name) if is_supplied else None
        return Worker(
            handling,
            transport=self._transport,
            clock=self.clock,
            body_limit=limit,
            prefetch=prefetch,
            alarms=self._alarms,
            store=None if shared is None else shared.store,
            waiting=waiting,
            lessor=Lessor(shared.store, self.instance) if leased and shared is not None else None,
        )

    def _ticker(self, node: Node) -> Ticker:
        shared = self._stores.of(node.name)
        check_schedules(node, self._transport, self.url, shared is not None)
        return Ticker(node, self._senders[node.name], shared, self.clock)

    def _make_circuit(self, breaker: Breaker | None) -> Circuit | None:
        if breaker is not None and not isinstance(breaker, Breaker):
            raise ConfigurationError(
                f"breaker takes an fg.Breaker(failures=5, seconds=5.0), or None: then there is none; got {breaker!r}"
            )
        return None if breaker is None else Circuit(breaker, self.clock, self._alarms)

    def _stall_detector(self, seconds: float | None) -> StallDetector | None:
        if seconds is None:
            return None
        if not check_delay(seconds, "stall_seconds"):
            raise ConfigurationError("stall_seconds must be more than 0, or None: then nobody looks for stalls")
        parts: list[Occupied] = [*self._workers, self._stores]
        if isinstance(self._transport, Occupied):
            parts.append(self._transport)
        return StallDetector(parts, seconds, self.clock, self._alarms)

    def _store_down(self, shared: NodeStore | None, why: str) -> None:
        """All subscriptions of that store wait for it."""
        for worker in self._workers:
            other = self._stores.of(worker.subscription.node)
            if shared is not None and other is not None and other.store is shared.store:
                worker.switching.store_is_down(why)

    def _disagreement(self, envelope: Envelope) -> None:
        self._alarms.sound(
            "disagreement",
            envelope.source,
            envelope.publication_id,
            f"{envelope} was published again with another body; the first one counts. Two runs of a handler disagree, "
            "or one idempotency key stands for two things",
        )

    def _unreadable(self, name: str, text: str) -> None:
        self._alarms.sound("unreadable-batch", "spool", name, text)

    # --- life ---------------------------------------------------------------------------------------------

    def allow_control(self) -> None:
        """Before `start`: open the control socket where `fg.Bus(…, control=)` says nothing; do without it if that
        cannot be."""
        self._allows_control = True

    async def start(self) -> None:
        """Open the transport, declare every subscription, make what lives as long as the bus, then begin to consume.
        Raises, beside errors of transport and stores, `ResourceFailed`."""
        if self._state != "new":
            raise ConfigurationError(f"this bus is {self._state}; make a new one to start again")
        self._loop, self._thread = asyncio.get_running_loop(), get_ident()
        self._alarms.loop = self._loop
        await self._open()
        try:
            await self._life.start()
            await self._stores.start()
            if isinstance(self._transport, SpoolTransport):
                self._transport.begin()
            for worker in self._workers:
                await worker.start()
            self._stores.hand_in()
            for ticker in self._tickers.values():
                await ticker.start()
            self._reporter.start()
            self._open_control()
        except BaseException:
            for ticker in self._tickers.values():
                await ticker.stop()
            await self._close()
            raise
        self._state = "running"
        self._mistakes.start()
        if self._stalls is not None:
            self._stalls.start()
        if self._control is not None or isinstance(self._transport, Announcing):
            self._heart.start()
        if self._instructions is not None:
            self._instructions.start()
        watch(self.observers, self)
        nodes, subscriptions = counted(len(self.nodes), "node"), counted(len(self._workers), "subscription")
        log.info("running %s with %s on %s", nodes, subscriptions, self.url)

    def _open_control(self) -> None:
        if not (self._allows_control if self._given_control is None else self._given_control):
            return
        control = ControlSocket(self.control_place, self.instance, self)
        try:
            control.open()
        except ConfigurationError as exc:
            if self._given_control is not None:
                raise
            log.warning("`faregate status`, `pause` and `resume` do not reach this process: %s", exc)
        else:
            self._control = control

    async def prepare(self) -> None:
        """Make the queues and tables of these nodes, without running them."""
        self._check_new("prepare it before it is started")
        await self._open()
        await self._close()

    async def prepare_stores(self) -> None:
        """Make the tables of these nodes' stores, or bring them up to date, and nothing else."""
        self._check_new("prepare it before it is started")
        await self._stores.open()
        await self._stores.close()

    async def _open(self) -> None:
        """Open the stores and the transport, and declare every subscription; leave nothing open when that fails."""
        await self._stores.open()
        try:
            await self._transport.open()
            for worker in self._workers:
                await worker.bind()
            await self._stores.subscribe()
        except BaseException:
            await self._close()
            raise

    async def _close(self, deadline: float = 0) -> None:
        """To the end, also when whoever waits is cancelled: nobody could do the rest, and the journal stayed locked."""
        await finish(self._close_all(deadline))

    async def _close_all(self, deadline: float) -> None:
        async with AsyncExitStack() as steps:  # the last one first, each of them whatever the others raise
            steps.push_async_callback(self._stores.close)
            steps.push_async_callback(self._transport.close)
            # Behind the stores: what is sent until then may go through middlewares that use resources.
            steps.push_async_callback(self._life.stop)
            await self._stores.stop(deadline)

    async def failed(self) -> Exception:
        """Return, with the reason, once the transport cannot go on, or resources of the bus are lost; otherwise
        never."""
        self._check_running()
        waiting = [asyncio.ensure_future(each) for each in (self._transport.failed(), self._life.lost())]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for each in waiting:
                each.cancel()

    async def stop(self, deadline: float | None = None) -> None:
        """Stop fetching, let running handlers finish within the deadline, give the rest back, close. To be cancelled
        while handlers finish leaves the rest to another `stop`; after that it closes all the same, before it raises.

        `stop(0)` while another `stop` waits makes that one stop waiting, too.
        """
        self._check_loop()
        if self._state == "running":
            self._state = "stopping"
        if self._state != "stopping":
            return
        limit = self._drain_seconds if deadline is None else deadline
        for ticker in self._tickers.values():
            await ticker.stop()
        await self._mistakes.stop()
        await self._stores.hand_in_no_more()
        left = await asyncio.gather(*(worker.stop(limit) for worker in self._workers))
        self.left_behind = max(self.left_behind, sum(left))
        if self._state == "stopping":
            self._state = "stopped"
            for landing in self._landings:
                landing.cancel()
            if self._stalls is not None:
                self._stalls.stop()
            try:
                unwatch(self.observers, self)
                if self._instructions is not None:
                    await self._instructions.stop()
                await self._heart.stop()
                if self._control is not None:
                    await self._control.close()
            finally:
                try:
                    await self._close(limit)
                finally:
                    self._requests.stop()  # behind the outboxes: some of what waited is answered by now
                    self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def idle(self, timeout: float | None = None) -> None:
        """Return once nothing is in flight and every outbox is empty.

        A message that waits for redelivery is in flight; one scheduled for later is not. Raises `IdleTimeout`, and
        `ConfigurationError` when the bus is stopped meanwhile, or runs on a transport that does not know what waits.
        """
        self._check_running()
        if not isinstance(self._transport, Counting):
            raise ConfigurationError(
                f'the transport {self.url} does not know what waits (it lacks "count"): wait for what your handlers do'
            )
        landing = asyncio.ensure_future(self._landed())
        self._landings.add(landing)
        try:
            await asyncio.wait({landing}, timeout=timeout)
        finally:
            self._landings.discard(landing)
            landing.cancel()
        if landing.done() and not landing.cancelled():
            landing.result()
        elif self._state != "running":
            raise ConfigurationError(f"the bus is {self._state}: nothing more will land")
        else:
            busy = ", ".join(f"{worker.subscription}" for worker in self._workers if worker.busy) or "no handler"
            raise IdleTimeout(f"messages were still in flight after {timeout} s; running: {busy}")

    async def _landed(self) -> None:
        while True:
            before = self._stores.activity
            assert isinstance(self._transport, Counting)
            await self._transport.idle()
            await self._stores.idle()
            if self._stores.activity == before:
                return

    # --- sending ------------------------------------------------------------------------------------------

    async def publish(self, event: Any, *, node: str | Node | None = None, **options: Unpack[Options]) -> str:
        """Publish an event as `node`; returns its publication id once the transport has confirmed it.

        `node` is needed where the bus has several nodes, unless exactly one is known to publish this event: by its
        `publishes=`, or as the `source=` of a subscription. Where an `OutcomeUnknown` was raised, one of its
        `publications` is taken as it is, so that it is the same publication again.
        """
        if isinstance(event, Envelope):
            await self._sender(event.source, ()).publish_again(event)
            return event.publication_id
        outgoing = as_event(event, options)
        sender = self._sender(node, (outgoing.message_type,))
        publication_id, published = sender.publish(outgoing)
        try:
            await published
        except Exception as exc:
            sender.failed(exc)
            raise
        if self._circuit is not None and self._circuit.failures:
            sender.sent()
        return publication_id

    async def publish_many(self, events: Iterable[Any], *, node: str | Node | None = None) -> list[str]:
        """Publish events, or `fg.publish(…)` and `fg.send(…)` with their options, together: all or none."""
        outgoing = as_events(events)
        types = [outgoing.message_type] if isinstance(outgoing, Alike) else [out.message_type for out in outgoing]
        return await self._sender(node, types).publish_many(outgoing)

    async def send(
        self,
        command: Any,
        *,
        to: str | Node | None = None,
        node: str | Node | None = None,
        **options: Unpack[Options],
    ) -> str:
        """Send a command to the node `to`; raises `Unroutable` when that node does not handle it."""
        outgoing = as_command(command, to, options)
        sender = self._sender(node, (outgoing.message_type,))
        publication_id, published = sender.publish(outgoing)
        try:
            await published
        except Exception as exc:
            sender.failed(exc)
            raise
        if self._circuit is not None and self._circuit.failures:
            sender.sent()
        return publication_id

    async def cancel(
        self, publication_id: str | None = None, *, key: str | None = None, node: str | Node | None = None
    ) -> bool:
        """Cancel a message that was scheduled with `delay=` or `at=`, by its publication id or by its key (its
        `idempotency_key`, or the `id_key` that a handler gave it); whether it was still waiting. Then it is never
        delivered. `node` is who scheduled it; without it, the nodes of the bus are asked until one has it.

        Raises `ConfigurationError` for a node without a store on a transport that cannot take anything back; without
        `node`, if that is true of every node.
        """
        which = check_scheduled(publication_id, key)
        self._check_running()
        if node is not None:
            return await self._named_sender(node, ()).cancel(*which)
        unable: list[ConfigurationError] = []
        for sender in self._senders.values():
            try:
                if await sender.cancel(*which):
                    return True
            except ConfigurationError as exc:
                unable.append(exc)
        if unable and len(unable) == len(self._senders):
            raise unable[-1]
        return False

    @overload
    async def request(
        self,
        command: Any,
        *,
        to: str | Node | None = None,
        reply: type[T],
        timeout: float | timedelta = ...,
        node: str | Node | None = None,
        headers: Mapping[str, str] | None = None,
        expires: float | timedelta | None = None,
        idempotency_key: str | None = None,
    ) -> T: ...
    @overload
    async def request(
        self,
        command: Any,
        *,
        to: str | Node | None = None,
        reply: Sequence[type] | None = None,
        timeout: float | timedelta = ...,
        node: str | Node | None = None,
        headers: Mapping[str, str] | None = None,
        expires: float | timedelta | None = None,
        idempotency_key: str | None = None,
    ) -> Any: ...
    async def request(
        self,
        command: Any,
        *,
        to: str | Node | None = None,
        reply: type | Sequence[type] | None = None,
        timeout: float | timedelta = REQUEST_SECONDS,
        node: str | Node | None = None,
        headers: Mapping[str, str] | None = None,
        expires: float | timedelta | None = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """Send a command to the node `to`, and return what its handler answers with `fg.reply`.

        `reply` is the class of the answer, or several; without it the answer is the one message class of that name in
        this process. Raises `RequestTimeout` after `timeout` seconds, `RequestFailed` when the command becomes a dead
        letter, `Unroutable` when that node does not handle it, `OutcomeUnknown` when the bus is stopped meanwhile, and
        `UnknownType` for an answer of another class.
        """
        seconds, classes = check_timeout(timeout), check_reply(reply)
        options: Options = {"headers": headers, "expires": expires, "idempotency_key": idempotency_key}
        given = {name: value for name, value in options.items() if value is not None}
        outgoing = as_command(command, to, given)  # type: ignore[arg-type]
        if self._state != "running" and isinstance(self._transport, SpoolTransport):
            raise ConfigurationError(
                f"the bus is {self._state}: a request needs the process that runs the nodes of {self.url}, since the "
                "answer comes to that process alone, and the spool brings none. Start this bus, or spool the command"
            )
        return await self._requests.ask(self._sender(node, (outgoing.message_type,)), outgoing, seconds, classes)

    def request_counts(self) -> RequestCounts:
        """What became of requests, and of replies, so far."""
        return self._requests.counts()

    @property
    def spools(self) -> bool:
        """Whether other processes can publish to the transport of this bus, also while nobody runs the nodes."""
        return not (isinstance(self._transport, InProcess) and self._transport.in_process)

    async def spool(
        self,
        message: Any,
        *,
        to: str | Node | None = None,
        node: str | Node | None = None,
        **options: Unpack[Options],
    ) -> str:
        """Publish (or, with `to`, send) without starting this bus: into the spool of a journal, or to a broker, with a
        connection for this message alone. Whoever runs the nodes takes it from there. Returns the publication id once
        it is durable there."""
        if not self.spools:
            raise ConfigurationError(f"{self.url} has no spool: start the bus and publish")
        outgoing = as_event(message, options) if to is None else as_command(message, to, options)
        sender = self._named_sender(node, (outgoing.message_type,))
        if isinstance(self._transport, SpoolTransport):
            publication_id, published = sender.publish(outgoing, through=self._transport.spool)
            await published
            return publication_id
        async with self._spooling:  # one after the other: there is one transport to open and close
            self._check_new("spool before it is started, and publish afterwards")
            await self._open()  # its queues are there then, so an event waits for whoever runs the nodes later
            try:
                publication_id, published = sender.publish(outgoing)
                await published
            finally:
                await self._close()
        return publication_id

    def _sender(self, node: str | Node | None, types: Sequence[MessageType]) -> Sender:
        self._check_running()
        return self._named_sender(node, types)

    def _named_sender(self, node: str | Node | None, types: Sequence[MessageType]) -> Sender:
        if node is not None:
            name = node if isinstance(node, str) else node.name
            sender = self._senders.get(name)
            if sender is None:
                raise ConfigurationError(f"there is no node {name!r} on this bus; its nodes are: {self._names()}")
            return sender
        if len(self._senders) == 1:
            return next(iter(self._senders.values()))
        able = set(self._senders)
        for message_type in types:
            if message_type.kind == "event":
                able &= self._publishers.get(message_type.wire, set())
        if len(able) != 1:
            what = ", ".join(sorted({message_type.wire for message_type in types}))
            raise ConfigurationError(
                f"say which node publishes {what}, with node=, one of {', '.join(sorted(able)) or self._names()}"
            )
        return self._senders[able.pop()]

    def _names(self) -> str:
        return ", ".join(self._senders)

    async def unsubscribe(self, node: str | Node, message: type | str) -> None:
        """Take a node off the recipients of a type; what is on its way to it is still handled.

        It subscribes again when a bus starts with the subscription declared.
        """
        self._check_running()
        for worker in self._find(node, message):
            if self._stores.recipient_lists is not None:
                subscription = worker.subscription
                await self._stores.recipient_lists.unsubscribe(topic_for(subscription), subscription.node)
            await self._transport.unbind(worker.binding.queue)

    # --- control and view ---------------------------------------------------------------------------------

    async def pause(
        self, node: str | Node | None = None, message: type | str | None = None, seconds: float | None = None
    ) -> None:
        """Stop consuming a type at a node, for that many seconds or until `resume`; running handlers finish. Without a
        type: all of that node; without a node: at all of them.

        When it returns no message begins any more: what was fetched and not begun is back in its place.
        """
        if seconds is not None and check_delay(seconds, "seconds") > _LONGEST_PAUSE:
            raise ConfigurationError("seconds are at most a year's: leave them out to pause until resume")
        for worker in self._find(node, message):
            await worker.pause(seconds)

    async def resume(self, node: str | Node | None = None, message: type | str | None = None) -> None:
        """Consume again what `pause` stopped."""
        for worker in self._find(node, message):
            worker.resume()

    def status(self) -> BusStatus:
        """How the bus fares now, as `faregate status` shows it: subscriptions with counts, rates and pauses, outboxes,
        alarms."""
        self._check_loop()
        if not self._heart.is_beating:
            self._reporter.measure()
        return self._reporter.status()

    @property
    def control_place(self) -> ControlPlace:
        """Where the control sockets of the processes that run this bus are found."""
        place = self._transport.log_place if isinstance(self._transport, Logged) else None
        if isinstance(place, Path):  # that of a journal
            found = journal_place(place)
        else:
            stores = sorted(store.database_id for store in self._stores.stores if not store.url.startswith("memory:"))
            found = bus_place(self.url, stores, sorted(worker.binding.queue for worker in self._workers))
        given = self._given_control
        return found._replace(path=given) if isinstance(given, Path) else found

    def _find(self, node: str | Node | None, message: type | str | None) -> list[Worker]:
        self._check_loop()
        name = node.name if isinstance(node, Node) else node
        declared = known(message) if isinstance(message, type) else None
        wire = declared.wire if declared else None if message is None else str(message)
        found = [
            worker
            for worker in self._workers
            if name in (None, worker.subscription.node) and wire in (None, worker.subscription.message_type.wire)
        ]
        if not found:
            there = ", ".join(dict.fromkeys(f"{each.subscription.node} {each.binding.type}" for each in self._workers))
            raise ConfigurationError(
                f"{'no node' if name is None else f'node {plain(name)!r}'} has {'a' if name is None else 'no'} "
                f"subscription to {plain(wire or 'anything')} on this bus; there are: {there or 'none'}"
            )
        return found

    def counts(self) -> list[SubscriptionCounts]:
        """How messages ended so far, per subscription."""
        return [
            SubscriptionCounts(
                node=worker.subscription.node,
                type=worker.subscription.message_type.wire,
                source=worker.subscription.source,
                busy=worker.busy,
                paused=worker.paused,
                **{name: worker.outcomes[name] for name in _COUNTED},
            )
            for worker in self._workers
        ]

    async def waiting(self) -> list[QueueDepth]:
        """How much waits for each subscription, where the transport tells; None where it does not."""
        self._check_running()
        transport, found = self._transport, []
        for worker in self._workers:
            queue = worker.binding.queue
            depth = await transport.waiting(queue) if isinstance(transport, Measured) else None
            subscription = worker.subscription
            found.append(QueueDepth(subscription.node, subscription.message_type.wire, subscription.source, depth))
        return found

    def outboxes(self) -> list[OutboxStatus]:
        """What this process still has to send, for each store."""
        return [dispatcher.status() for dispatcher in self._stores.dispatchers.values()]

    async def unready(self) -> list[str]:
        """Why it cannot work now, in words; nothing when it is ready: it runs, its transport is connected, its stores
        answer, and nothing stands still."""
        if self._state != "running":
            return [f"the bus is {self._state}"]
        self._check_loop()
        found = []
        if isinstance(self._transport, Connected) and not self._transport.is_connected:
            found.append(f"there is no connection to {public_name(self.url)}")
        if self._stalls is not None and (still := self._stalls.standing_still):
            found.append(f"{still} pieces of work make no progress; the alarms name them")
        asked = await asyncio.gather(*map(self._ask_store, self._stores.stores))
        return [*found, *filter(None, asked)]

    async def _ask_store(self, store: Store) -> str | None:
        """Why it is of no use now."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                await store.floor(next(iter(self.nodes)))
        except Exception as exc:
            name = public_name(store.url)  # errors of stores begin with the whole
            return f"the store {name} does not answer: {first_line(exc).replace(store.url, name)}"
        return None

    def outcomes(self) -> dict[str, int]:
        """How messages ended so far, over all subscriptions."""
        return {name: sum(worker.outcomes[name] for worker in self._workers) for name in _COUNTED}

    async def dead_letters(
        self, node: str | Node | None = None, *, status: DeadStatus | None = "open", limit: int = 1000
    ) -> list[DeadLetter]:
        """The dead letters, of one node or of all, oldest last failure first; `status=None` is every one of them.

        Those in the stores, and the open ones that wait in the transport: of nodes without a store, or on their way to
        the store.
        """
        self._check_running()
        return await self._dead_letters(node, status, limit)

    async def _dead_letters(self, node: str | Node | None, status: DeadStatus | None, limit: int) -> list[DeadLetter]:
        name = node.name if isinstance(node, Node) else node
        waiting: list[DeadLetter] = []
        if status in (None, "open") and isinstance(self._transport, Browsing):
            for each in self.nodes if name is None else [name]:
                waiting += await self._transport.dead_letters(each, limit)
        # The stores come second, so that one that moves there meanwhile is not missed.
        kept = await DeadLetters(self._stores.stores, self.clock).letters(DeadFilter(node=name, status=status), limit)
        known = {(letter.node, letter.message_id) for letter in kept}
        found = [*kept, *(letter for letter in waiting if (letter.node, letter.message_id) not in known)]
        return sorted(found, key=lambda letter: letter.at)[:limit]

    async def replay(self, *message_ids: str, by: str = "bus") -> list[DeadLetter]:
        """Have dead letters handled again, with the identity they had; returns them as they are then.

        Raises `DeadLetterNotFound`, and `DeadLetterClosed` for one that was handled or discarded meanwhile.
        """
        return await self._dead().decide(message_ids, "replayed", by)

    async def discard(self, *message_ids: str, by: str = "bus") -> list[DeadLetter]:
        """Decide that dead letters are never handled, nor any copy of them that still comes. Raises as `replay`."""
        return await self._dead().decide(message_ids, "discarded", by)

    def _dead(self) -> DeadLetters:
        self._check_running()
        if not self._stores:
            raise ConfigurationError("dead letters are kept in a store, and this bus has none: fg.Bus(…, store='…')")
        return DeadLetters(self._stores.stores, self.clock)

    @property
    def stores(self) -> Mapping[str, Store]:
        """The nodes' stores, each by its URL without a password; they are open while the bus runs."""
        return {store.url: store for store in self._stores.stores}

    def store_of(self, node: str | Node) -> Store | None:
        """The store of a node; it is open while the bus runs."""
        shared = self._stores.of(node.name if isinstance(node, Node) else node)
        return None if shared is None else shared.store

    @property
    def bindings(self) -> list[Binding]:
        """What each subscription asks of the transport."""
        return [worker.binding for worker in self._workers]

    @property
    def transport(self) -> QueueTransport:
        """What carries its messages."""
        return self._transport

    @property
    def breaker(self) -> BreakerStatus | None:
        """What the breaker on sending does now; None: there is none."""
        return None if self._circuit is None else self._circuit.status

    @property
    def alarms(self) -> Counter[str]:
        """How often each kind of alarm sounded (see `Alarm`)."""
        return self._alarms.counts

    def on_alarm(self, callback: Callable[[Alarm], None]) -> None:
        """Call this for every alarm, from the event loop."""
        self._alarms.listen(callback)

    def _check_new(self, what: str) -> None:
        if self._state != "new":
            raise ConfigurationError(f"this bus is {self._state}; {what}")

    def _check_running(self) -> None:
        if self._state != "running":
            raise ConfigurationError(f"the bus is {self._state}: use it inside 'async with bus:'")
        self._check_loop()

    def _check_loop(self) -> None:
        """A call from another thread would wake nobody."""
        # To ask for the running loop is a system call on Python 3.11; a thread has one of them at a time.
        if self._loop is not None and not (self._thread == get_ident() and self._loop.is_running()):
            raise WrongEventLoop(
                "this bus runs on another event loop (another thread's, or an asyncio.run of its own). Hand the call "
                "over to it: asyncio.run_coroutine_threadsafe(bus.publish(…), loop).result(), where loop is "
                "asyncio.get_running_loop() as it was inside 'async with bus:'"
            )


def _check_nodes(nodes: Sequence[Node]) -> Sequence[Node]:
    found: dict[str, Node] = {}
    for node in nodes:
        if not isinstance(node, Node):
            raise ConfigurationError(f"nodes= takes fg.Node objects; got {node!r}")
        if found.setdefault(node.name, node) is not node:
            raise ConfigurationError(f"two nodes are named {node.name!r}; a name is one logical service")
    if not found:
        raise ConfigurationError("a bus needs at least one node: nodes=[fg.Node('shop')]")
    return nodes


def _check_control(given: object) -> bool | Path | None:
    if given is None or isinstance(given, bool):
        return given
    if isinstance(given, str | Path) and _is_path(fspath(given)):
        return Path(given).absolute()
    raise ConfigurationError(f"control takes True, False or the path of a socket; got {given!r}")


def _is_path(text: str) -> bool:
    """Whether the system can be asked for it."""
    try:
        return bool(text) and b"\0" not in fsencode(text)
    except UnicodeEncodeError:
        return False


def _check_retain_dead(given: object, store: object) -> RetainDead | None:
    if given is not None and not isinstance(given, RetainDead):
        raise ConfigurationError(f"retain_dead takes an fg.RetainDead(seconds, export='folder'); got {given!r}")
    if given is not None and store is None:
        raise ConfigurationError(
            "retain_dead is about dead letters in a store, and this bus has none: fg.Bus(…, store='…')"
        )
    return given


def shared_keys(nodes: Iterable[Node]) -> Keys:
    """For each topic, the key of its subscriptions, if they agree."""
    found: dict[Any, set[Key]] = {}
    for node in nodes:
        for (wire, source), subscription in node.subscriptions.items():
            if subscription.key is not None:
                kind = subscription.message_type.kind
                topic = (kind, source if kind == "event" else node.name, wire)
                found.setdefault(topic, set()).add(subscription.key)
    return {topic: next(iter(keys)).when_sent for topic, keys in found.items() if len(keys) == 1}
