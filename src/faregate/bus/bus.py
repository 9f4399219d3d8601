"""The bus: binds nodes to a transport and runs them."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self

from faregate.bus.node import Node
from faregate.bus.outgoing import Outgoing, publish, send
from faregate.bus.policy import check_count
from faregate.bus.sender import KeyFields, Sender
from faregate.bus.worker import Worker
from faregate.codec import BodyWriter
from faregate.codec import codec as find_codec
from faregate.errors import ConfigurationError, IdleTimeout, check_delay
from faregate.message import known
from faregate.ports.clock import Clock, SystemClock
from faregate.ports.queue import Poisoned, QueueTransport, SpoolTransport
from faregate.ports.schemes import hide_password, open_transport

log = logging.getLogger("faregate.bus")

MAX_MESSAGE_BYTES = 1024 * 1024
_THREADS = 64


class SubscriptionCounts(NamedTuple):
    """How the messages of one subscription ended, and how many are being worked on."""

    node: str
    type: str
    source: str | None
    handled: int
    skipped: int
    redelivered: int
    dead: int
    busy: int
    paused: bool


class Bus:
    """Runs nodes on a transport. Making one does no I/O; `async with` starts and stops it.

    `max_message_bytes` bounds encoded bodies both ways. `codec` is what this bus writes with; it reads all.
    `compress_above` compresses larger bodies. `drain_seconds` is how long leaving waits for running handlers.
    """

    def __init__(
        self,
        transport: str | QueueTransport,
        *,
        nodes: Sequence[Node],
        store: str | Mapping[str, str] | None = None,
        codec: str = "json",
        compress_above: int | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        drain_seconds: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.nodes = {node.name: node for node in _check_nodes(nodes, store)}
        self.url = hide_password(transport) if isinstance(transport, str) else type(transport).__name__
        self._transport = open_transport(transport, self.clock) if isinstance(transport, str) else transport
        self._drain_seconds = check_delay(drain_seconds, "drain_seconds")
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="faregate-handler")
        limit = check_count(max_message_bytes, "max_message_bytes", 1, 1 << 30)
        if compress_above is not None:
            check_count(compress_above, "compress_above", 0, 1 << 30)
        writer = BodyWriter(find_codec(codec), limit=limit, compress_above=compress_above)
        keys = _key_fields(self.nodes.values())
        self._senders = {
            node.name: Sender(node, self._transport, writer, self.clock, keys) for node in self.nodes.values()
        }
        self._workers = [
            Worker(
                subscription,
                node,
                self._senders[node.name],
                transport=self._transport,
                clock=self.clock,
                pool=self._pool,
                body_limit=limit,
            )
            for node in self.nodes.values()
            for subscription in node.subscriptions.values()
        ]
        self._state = "new"

    # --- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the transport, declare every subscription, then begin to consume."""
        if self._state != "new":
            raise ConfigurationError(f"this bus is {self._state}; make a new one to start again")
        await self._open()
        try:
            for worker in self._workers:
                await worker.start()
        except BaseException:
            await self._transport.close()
            raise
        self._state = "running"
        log.info("%d nodes with %d subscriptions run on %s", len(self.nodes), len(self._workers), self.url)

    async def prepare(self) -> None:
        """Make what the transport keeps for these nodes (their queues), without running them."""
        if self._state != "new":
            raise ConfigurationError(f"this bus is {self._state}; prepare it before it is started")
        await self._open()
        await self._transport.close()

    async def _open(self) -> None:
        """Open the transport and declare every subscription; leave nothing open when that fails."""
        await self._transport.open()
        try:
            for worker in self._workers:
                await self._transport.bind(worker.binding)
        except BaseException:
            await self._transport.close()
            raise

    async def failed(self) -> Exception:
        """Return, with the reason, once the transport cannot go on; otherwise never."""
        self._check_running()
        return await self._transport.failed()

    async def stop(self, deadline: float | None = None) -> None:
        """Stop fetching, let running handlers finish within the deadline, give the rest back, close.

        `stop(0)` while another `stop` waits makes that one stop waiting, too.
        """
        if self._state == "running":
            self._state = "stopping"
        if self._state != "stopping":
            return
        limit = self._drain_seconds if deadline is None else deadline
        await asyncio.gather(*(worker.stop(limit) for worker in self._workers))
        if self._state == "stopping":
            self._state = "stopped"
            await self._transport.close()
            self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def idle(self, timeout: float | None = None) -> None:
        """Return once nothing is in flight.

        A message that waits for redelivery is in flight; one scheduled for later is not. Raises `IdleTimeout`.
        """
        self._check_running()
        try:
            await asyncio.wait_for(self._transport.idle(), timeout)
        except TimeoutError:
            busy = ", ".join(f"{worker.subscription}" for worker in self._workers if worker.busy) or "no handler"
            raise IdleTimeout(f"messages were still in flight after {timeout} s; running: {busy}") from None

    # --- sending ------------------------------------------------------------------------------------------

    async def publish(
        self,
        event: Any,
        *,
        node: str | Node | None = None,
        idempotency_key: str | None = None,
        delay: float | timedelta | None = None,
        at: float | datetime | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Publish an event as `node`; returns its publication id once the transport has it safe.

        The same idempotency key (for one node and type) is the same publication.
        """
        sender = self._sender(node, idempotency_key)
        return await sender.publish(publish(event, delay=delay, at=at, headers=headers), idempotency_key)

    async def publish_many(self, events: Iterable[Any], *, node: str | Node | None = None) -> list[str]:
        """Publish events, or `fg.publish(…)` and `fg.send(…)` with their options, together: all or none."""
        outgoing = [event if isinstance(event, Outgoing) else publish(event) for event in events]
        return await self._sender(node, None).publish_many(outgoing)

    async def send(
        self,
        command: Any,
        *,
        to: str | Node,
        node: str | Node | None = None,
        idempotency_key: str | None = None,
        delay: float | timedelta | None = None,
        at: float | datetime | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Send a command to the node `to`; raises `Unroutable` when that node does not handle it."""
        destination = to.name if isinstance(to, Node) else to
        sender = self._sender(node, idempotency_key)
        outgoing = send(command, to=destination, delay=delay, at=at, headers=headers)
        return await sender.publish(outgoing, idempotency_key)

    @property
    def spools(self) -> bool:
        """Whether other processes can publish to this bus' transport while it, or nobody, runs the nodes."""
        return isinstance(self._transport, SpoolTransport)

    async def spool(
        self,
        message: Any,
        *,
        to: str | Node | None = None,
        node: str | Node | None = None,
        idempotency_key: str | None = None,
        delay: float | timedelta | None = None,
        at: float | datetime | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Publish (or, with `to`, send) without starting this bus: the process that runs its nodes takes it from the
        transport's spool. Returns the publication id once it is durable there."""
        if not isinstance(self._transport, SpoolTransport):
            raise ConfigurationError(f"{self.url} has no spool: start the bus and publish")
        if to is None:
            outgoing = publish(message, delay=delay, at=at, headers=headers)
        else:
            outgoing = send(message, to=to.name if isinstance(to, Node) else to, delay=delay, at=at, headers=headers)
        sender = self._named_sender(node, idempotency_key)
        return await sender.publish(outgoing, idempotency_key, through=self._transport.spool)

    def _sender(self, node: str | Node | None, idempotency_key: str | None) -> Sender:
        self._check_running()
        return self._named_sender(node, idempotency_key)

    def _named_sender(self, node: str | Node | None, idempotency_key: str | None) -> Sender:
        if idempotency_key is not None and (not isinstance(idempotency_key, str) or not idempotency_key):
            raise ConfigurationError(f"idempotency_key must be a non-empty text; got {idempotency_key!r}")
        name = node.name if isinstance(node, Node) else node
        if name is None and len(self._senders) == 1:
            return next(iter(self._senders.values()))
        sender = self._senders.get(name or "")
        if sender is None:
            names = ", ".join(self._senders)
            told = f"there is no node {name!r} on this bus" if name else "say which node publishes, with node="
            raise ConfigurationError(f"{told}; its nodes are: {names}")
        return sender

    # --- control and view ---------------------------------------------------------------------------------

    async def pause(self, node: str | Node, message: type | str, seconds: float | None = None) -> None:
        """Stop consuming a type at a node, for that many seconds or until `resume`; running handlers finish."""
        if seconds is not None:
            check_delay(seconds, "seconds")
        for worker in self._find(node, message):
            worker.pause(seconds)

    async def resume(self, node: str | Node, message: type | str) -> None:
        for worker in self._find(node, message):
            worker.resume()

    def _find(self, node: str | Node, message: type | str) -> list[Worker]:
        name = node.name if isinstance(node, Node) else node
        declared = known(message) if isinstance(message, type) else None
        wire = declared.wire if declared else str(message)
        found = [
            worker
            for worker in self._workers
            if worker.subscription.node == name and worker.subscription.message_type.wire == wire
        ]
        if not found:
            raise ConfigurationError(f"node {name!r} has no subscription to {wire} on this bus")
        return found

    def counts(self) -> list[SubscriptionCounts]:
        """How messages ended so far, per subscription."""
        return [
            SubscriptionCounts(
                node=worker.subscription.node,
                type=worker.subscription.message_type.wire,
                source=worker.subscription.source,
                handled=worker.outcomes["handled"],
                skipped=worker.outcomes["skipped"],
                redelivered=worker.outcomes["redelivered"],
                dead=worker.outcomes["dead"],
                busy=worker.busy,
                paused=worker.paused,
            )
            for worker in self._workers
        ]

    def outcomes(self) -> dict[str, int]:
        """How messages ended so far, over all subscriptions."""
        names = ("handled", "skipped", "redelivered", "dead")
        return {name: sum(getattr(count, name) for count in self.counts()) for name in names}

    async def poisoned(self, node: str | Node | None = None) -> list[Poisoned]:
        """The messages that were given up on, of one node or of all, oldest first."""
        self._check_running()
        wanted = list(self.nodes) if node is None else [node.name if isinstance(node, Node) else node]
        found = [record for name in wanted for record in await self._transport.poisoned(name)]
        return sorted(found, key=lambda record: record.at)

    def _check_running(self) -> None:
        if self._state != "running":
            raise ConfigurationError(f"the bus is {self._state}: use it inside 'async with bus:'")


def _check_nodes(nodes: Sequence[Node], store: str | Mapping[str, str] | None) -> list[Node]:
    found: dict[str, Node] = {}
    for node in nodes:
        if not isinstance(node, Node):
            raise ConfigurationError(f"nodes= takes fg.Node objects; got {node!r}")
        if found.setdefault(node.name, node) is not node:
            raise ConfigurationError(f"two nodes are named {node.name!r}; a name is one logical service")
    if not found:
        raise ConfigurationError("a bus needs at least one node: nodes=[fg.Node('shop')]")
    needs_store = [node.name for node in found.values() if node.schema is not None] or [
        str(subscription)
        for node in found.values()
        for subscription in node.subscriptions.values()
        if subscription.dedup == "tokens" or subscription.identity is not None
    ]
    if store is not None or needs_store:
        who = f" ({', '.join(needs_store)})" if needs_store else ""
        raise ConfigurationError(
            f"stores are not part of this version: leave out store=, schema=, identity= and dedup='tokens'{who}"
        )
    return list(found.values())


def _key_fields(nodes: Iterable[Node]) -> KeyFields:
    """For each topic, the key field of its subscriptions, where all that order by key agree."""
    fields: dict[Any, set[str]] = {}
    for node in nodes:
        for (wire, source), subscription in node.subscriptions.items():
            if subscription.key is not None:
                kind = subscription.message_type.kind
                topic = (kind, source if kind == "event" else node.name, wire)
                fields.setdefault(topic, set()).add(subscription.key)
    return {topic: next(iter(names)) for topic, names in fields.items() if len(names) == 1}
