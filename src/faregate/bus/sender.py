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

    async def publish(self, outgoing: Sequence[Outgoing], idempotency_key: str | None = None) -> list[str]:
        """Publish roots: messages that no handler caused. Returns their publication ids."""
        envelopes = []
        published = []
        for out in outgoing:
            if idempotency_key is None:
                root = ids.root_id(int(self._clock.time() * 1000))
            else:
                root = ids.idempotent_id(self._node, out.message_type.wire, idempotency_key)
            published.append(root)
            envelope = self._seal(out, root, root, None, 0)
            if not self._middlewares or await self._pass_middlewares(out, envelope, None):
                envelopes.append(envelope)
        await self._hand_over(envelopes)
        return published

    async def seal_outputs(self, ctx: Context, handler: str) -> list[Envelope]:
        """The envelopes of what a handler sends: the same for every run of it on the same message."""
        envelopes = []
        used: set[tuple[str, str]] = set()
        for ordinal, out in enumerate(ctx._outputs):
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
            envelope = self._seal(out, publication_id, ctx.correlation_id, ctx.message_id, ctx.marker + 1)
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
        self, out: Outgoing, publication_id: str, correlation_id: str, causation_id: str | None, marker: int
    ) -> Envelope:
        message_type = out.message_type
        kind, wire = message_type.kind, message_type.wire
        body, encoding, digest = self._writer.write(out.message)
        key = None
        if self._key_fields:
            address = self._node if kind == "event" else out.destination
            field = self._key_fields.get((kind, address, wire))
            key = None if field is None else getattr(out.message, field, None)
        now = self._clock.time()
        return Envelope(
            publication_id=publication_id,
            type=wire,
            kind=kind,
            source=self._node,
            body=body,
            destination=out.destination,
            correlation_id=correlation_id,
            causation_id=causation_id,
            marker=marker,
            key=None if key is None else str(key),
            sent_at=now,
            deliver_at=out.at if out.delay is None else now + out.delay,
            content_type=self._writer.content_type,
            content_encoding=encoding,
            body_digest=digest,
            headers=out.headers or {},
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
