"""The outgoing side of one node: `use_outgoing` middlewares, identity, encoding, and the publish itself."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from faregate import ids
from faregate.bus.context import Context
from faregate.bus.node import Node
from faregate.bus.outgoing import Outgoing, check_headers
from faregate.codec import BodyWriter
from faregate.errors import DuplicateIdKey, Unroutable
from faregate.message import Envelope, Kind
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.queue import QueueTransport

Publish = Callable[[Sequence[Envelope]], Awaitable[None]]

KeyFields = dict[tuple[Kind, str | None, str], str]
"""(kind, source or destination, type) -> the field that all its subscriptions on this bus order by."""


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


class Sender:
    """Seals messages of one node into envelopes and hands them to the transport."""

    def __init__(
        self, node: Node, transport: QueueTransport, writer: BodyWriter, clock: Clock, key_fields: KeyFields
    ) -> None:
        self._node = node.name
        self._transport = transport
        self._writer = writer
        self._clock = clock
        self._key_fields = key_fields
        self._middlewares = [middleware.function for middleware in node.outgoing_middlewares]

    async def publish(self, outgoing: Outgoing, idempotency_key: str | None, through: Publish | None = None) -> str:
        """Publish a root: a message that no handler caused. Returns its publication id.

        `through` is what takes the envelope instead of the transport's own publish.
        """
        envelope = self._seal_root(outgoing, idempotency_key, self._clock.time())
        if not self._middlewares or await self._pass_middlewares(outgoing, envelope, None):
            if faults.hook is not None:
                await faults.hook("bus.before-publish")
            await (through or self._transport.publish)((envelope,))
            if faults.hook is not None:
                await faults.hook("bus.after-publish")
        return envelope.publication_id

    async def publish_many(self, outgoing: Sequence[Outgoing]) -> list[str]:
        """Publish roots together: all or none."""
        now = self._clock.time()
        sealed = [self._seal_root(out, None, now) for out in outgoing]
        passed = sealed
        if self._middlewares:
            pairs = zip(outgoing, sealed, strict=True)
            passed = [envelope for out, envelope in pairs if await self._pass_middlewares(out, envelope, None)]
        await self._hand_over(passed)
        return [envelope.publication_id for envelope in sealed]

    def _seal_root(self, out: Outgoing, idempotency_key: str | None, now: float) -> Envelope:
        if idempotency_key is None:
            root = ids.root_id(int(now * 1000))
        else:
            root = ids.idempotent_id(self._node, out.message_type.wire, idempotency_key)
        return self._seal(out, root, root, None, 0, now)

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

    async def _hand_over(self, envelopes: list[Envelope]) -> None:
        if not envelopes:
            return
        if faults.hook is not None:
            await faults.hook("bus.before-publish")
        await self._transport.publish(envelopes)
        if faults.hook is not None:
            await faults.hook("bus.after-publish")

    def _seal(
        self,
        out: Outgoing,
        publication_id: str,
        correlation_id: str,
        causation_id: str | None,
        marker: int,
        now: float,
    ) -> Envelope:
        message_type = out.message_type
        kind, wire = message_type.kind, message_type.wire
        body, encoding, digest = self._writer.write(out.message)
        key = None
        if self._key_fields:
            address = self._node if kind == "event" else out.destination
            field = self._key_fields.get((kind, address, wire))
            key = None if field is None else getattr(out.message, field, None)
        # In the order of the fields: names would make this four times as slow, and it runs for every message.
        return Envelope(
            publication_id,
            wire,
            kind,
            self._node,
            body,
            (),  # recipients: the transport fills them in
            out.destination,
            correlation_id,
            causation_id,
            marker,
            None if key is None else str(key),
            None,  # attempt_id
            now,
            out.at if out.delay is None else now + out.delay,
            None,  # expires_at
            0,  # redeliveries
            0,  # replay
            self._writer.content_type,
            encoding,
            None,  # key_id
            None,  # algorithm
            None,  # payload_ref
            digest,
            None,  # traceparent
            {} if out.headers is None else out.headers,
        )

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
