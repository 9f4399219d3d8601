"""The outgoing side of one node: `use_outgoing` middlewares, the ids of outputs, and the publish itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from faregate import ids
from faregate.bus.alarms import Alarms
from faregate.bus.context import Context
from faregate.bus.node import Node
from faregate.bus.outgoing import Outgoing, check_headers
from faregate.bus.sealing import Keys, Sealer
from faregate.codec import BodyWriter
from faregate.errors import ConfigurationError, DuplicateIdKey, Unroutable
from faregate.message import Envelope, Kind
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.queue import QueueTransport

if TYPE_CHECKING:
    from faregate.bus.directory import Directory
    from faregate.bus.node_store import NodeStore

Publish = Callable[[Sequence[Envelope]], Awaitable[None]]


class OutgoingContext:
    """What an outgoing middleware sees. Only `headers` may be changed."""

    __slots__ = ("_outgoing", "cause", "headers", "sent")

    def __init__(self, outgoing: Outgoing, cause: Context | None) -> None:
        self._outgoing = outgoing
        self.cause = cause
        """The context of the handler that sends this; None outside handlers."""
        self.headers: dict[str, str] = dict(outgoing.headers or {})
        self.sent = False

    @property
    def message(self) -> Any:
        return self._outgoing.message

    @property
    def type(self) -> str:
        return self._outgoing.message_type.wire

    @property
    def kind(self) -> Kind:
        return self._outgoing.kind

    @property
    def destination(self) -> str | None:
        return self._outgoing.destination


class Sender(Sealer):
    """Seals messages of one node into envelopes and hands them to the transport."""

    def __init__(
        self,
        node: Node,
        transport: QueueTransport,
        writer: BodyWriter,
        clock: Clock,
        keys: Keys,
        alarms: Alarms,
    ) -> None:
        super().__init__(node.name, writer, keys)
        self._transport = transport
        self._clock = clock
        self._alarms = alarms
        self._middlewares = [middleware.function for middleware in node.outgoing_middlewares]
        self._store: NodeStore | None = None
        self._directory: Directory | None = None

    def use_store(self, store: NodeStore | None, directory: Directory | None) -> None:
        """Where this node keeps what must not be lost, and who wants tokens."""
        self._store = store
        self._directory = directory

    async def publish(self, outgoing: Outgoing, idempotency_key: str | None, through: Publish | None = None) -> str:
        """Publish a root: a message that no handler caused. Returns its publication id.

        `through` is what takes the envelope instead of the transport's own publish.
        """
        envelope = self.seal_root(outgoing, idempotency_key, self._clock.time())
        if not self._middlewares or await self._pass_middlewares(outgoing, envelope, None):
            if faults.hook is not None:
                await faults.hook("bus.before-publish")
            if through is not None:
                await through((envelope,))
            elif self._directory is None:
                await self._transport.publish((envelope,))
            else:
                await self._publish_roots(self._directory, (envelope,))
            if faults.hook is not None:
                await faults.hook("bus.after-publish")
        return envelope.publication_id

    async def publish_many(self, outgoing: Sequence[Outgoing]) -> list[str]:
        """Publish roots together: all or none."""
        now = self._clock.time()
        sealed = [self.seal_root(out, None, now) for out in outgoing]
        passed = sealed
        if self._middlewares:
            pairs = zip(outgoing, sealed, strict=True)
            passed = [envelope for out, envelope in pairs if await self._pass_middlewares(out, envelope, None)]
        if self._directory is None:
            await self._hand_over(passed)
        else:
            await self._publish_roots(self._directory, passed)
        return [envelope.publication_id for envelope in sealed]

    async def seal_outputs(self, ctx: Context, handler: str) -> list[Envelope]:
        """The envelopes of what a handler sends: the same for every run of it on the same message."""
        envelopes = []
        used: set[tuple[str, str]] = set()
        now = self._clock.time()
        for ordinal, out in enumerate(ctx._outputs or ()):
            wire = out.message_type.wire
            if out.id_key is not None:
                if (wire, out.id_key) in used:
                    raise DuplicateIdKey(
                        f"{handler!r} sends two messages of type {wire} with the id_key {out.id_key!r}: "
                        "give each its own"
                    )
                used.add((wire, out.id_key))
            publication_id = ids.publication_id(
                correlation_id=ctx.correlation_id,
                node=self._node,
                causation_id=ctx.message_id,
                handler=handler,
                type=wire,
                slot=ordinal if out.id_key is None else out.id_key,
            )
            envelope = self._seal(out, publication_id, ctx.correlation_id, ctx.message_id, ctx.marker + 1, now)
            if not self._middlewares or await self._pass_middlewares(out, envelope, ctx):
                envelopes.append(envelope)
        return envelopes

    async def _publish_roots(self, directory: Directory, envelopes: Sequence[Envelope]) -> None:
        """Publish where some recipients may want tokens: then through the outbox, which makes them."""
        lists = await directory.resolve(envelopes)
        if not any("tokens" in recipients.modes.values() for recipients in lists.values()):
            await self._transport.publish(envelopes)
            return
        if self._store is None:
            raise ConfigurationError(
                f"node {self._node!r} publishes to a node that deduplicates by tokens, and has no store to send from: "
                "give it one, fg.Bus(…, store=…)"
            )
        await self._store.publish([self.outbox_row(envelope, None, place) for place, envelope in enumerate(envelopes)])

    async def publish_outputs(self, envelopes: list[Envelope]) -> None:
        """Publish what a handler sends. An output that no queue takes becomes a dead letter of its own."""
        try:
            await self._hand_over(envelopes)
        except Unroutable:
            for envelope in envelopes:
                try:
                    await self._transport.publish([envelope])
                except Unroutable as exc:
                    await self._transport.poison(self._node, envelope, exc.reason, f"Unroutable: {exc}")
                    self._alarms.sound("unroutable", self._node, envelope.publication_id, str(exc))

    async def _hand_over(self, envelopes: list[Envelope]) -> None:
        if not envelopes:
            return
        if faults.hook is not None:
            await faults.hook("bus.before-publish")
        await self._transport.publish(envelopes)
        if faults.hook is not None:
            await faults.hook("bus.after-publish")

    async def _pass_middlewares(self, out: Outgoing, envelope: Envelope, cause: Context | None) -> bool:
        """Run the outgoing middlewares; whether they let the message through, now with their headers."""
        context = OutgoingContext(out, cause)
        step: Callable[..., Awaitable[None]] = _let_through
        for middleware in reversed(self._middlewares):
            step = partial(_around, middleware, step)
        await step(context)
        envelope.headers = check_headers(context.headers)
        return context.sent


async def _let_through(out: OutgoingContext, again: OutgoingContext | None = None) -> None:
    out.sent = True


def _around(
    middleware: Callable[..., Awaitable[None]],
    following: Callable[..., Awaitable[None]],
    out: OutgoingContext,
    again: OutgoingContext | None = None,
) -> Awaitable[None]:
    return middleware(out, partial(following, out))
