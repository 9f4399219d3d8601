"""The outgoing side of one node: the ids of what it sends, and the publish itself, within its outgoing middlewares."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from faregate import ids
from faregate.codec import BodyReader, BodyWriter
from faregate.core.alarms import Alarms
from faregate.core.breaker import Circuit, GuardedPublishing
from faregate.core.context import Context
from faregate.core.observer import Observers, Publish, confirmed, observed, passed_on
from faregate.core.outgoing_middlewares import Chain, Last, OutgoingContext, compile_own_scope, send_together
from faregate.core.replies import FAILED, Replies
from faregate.core.resources import Resources
from faregate.core.sealing import Keys, Sealer, no_answer
from faregate.errors import ConfigurationError, DuplicateIdKey, Undecodable, Unroutable, Unwritable
from faregate.message import Envelope, Kind
from faregate.node.kill_switch import SwitchTripped
from faregate.node.node import Node
from faregate.node.outgoing import Alike, Outgoing
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Cancelling, DeadLettering, Publishing
from faregate.ports.store import is_later

if TYPE_CHECKING:
    from faregate.core.node_store import NodeStore
    from faregate.core.recipients import RecipientLists
    from faregate.core.work import Work

ESCALATES = "faregate-escalates"
"""The header of a message about a dead letter: that one's message id."""


class Sender(Sealer):
    """Seals messages of one node into envelopes and hands them to the transport."""

    def __init__(
        self,
        node: Node,
        transport: Publishing,
        writer: BodyWriter,
        clock: Clock,
        keys: Keys,
        alarms: Alarms,
        classes: Mapping[tuple[Kind, str], type] | None = None,
        replies: Replies | None = None,
        observers: Observers = (),
        circuit: Circuit | None = None,
        resources: Resources | None = None,
    ) -> None:
        super().__init__(node.name, writer, keys)
        self._transport = transport
        self._circuit = circuit
        """The breaker around the transport's publish; None: there is none."""
        self._guarded: Publishing = transport if circuit is None else GuardedPublishing(transport, circuit)
        self._clock = clock
        self._alarms = alarms
        self._chain = compile_own_scope(resources or Resources(node))
        """The outgoing middlewares, for what is sent outside of handlers."""
        self._classes = classes or {}
        self._replies = replies or Replies(transport)
        self._store: NodeStore | None = None
        self._recipient_lists: RecipientLists | None = None
        self._is_bare = self._chain is None
        """Whether nothing is between `publish` and the transport: whoever awaits it tells the breaker how it ended."""
        self._observers = observers
        self._to_transport = confirmed(observers, self._publish_to_transport)
        self._to_guarded = confirmed(observers, self._publish_to_guarded)
        self._hand_over_roots = observed(observers, self._publish_roots)
        self._hand_over_guarded = observed(observers, self._publish_guarded)
        self._hand_over_outputs = observed(observers, self._to_guarded)
        self._hand_over_later = observed(observers, self._schedule)

    def use_store(self, store: NodeStore | None, recipient_lists: RecipientLists | None) -> None:
        """Where this node keeps what must not be lost, and who wants tokens."""
        self._store = store
        self._recipient_lists = recipient_lists
        self._is_bare = self._chain is None and recipient_lists is None

    def publish(self, outgoing: Outgoing, through: Publish | None = None) -> tuple[str, Awaitable[None]]:
        """Publish a root: a message that no handler caused. Gives its publication id, and what to await: a coroutine
        of its own would cost every message some. Who awaits it tells `failed`, and `sent` if the breaker counts.

        `through` is what takes the envelope instead of the transport's own publish.
        """
        envelope = self.seal_root(outgoing, self._clock.time())
        if through is not None:
            through = observed(self._observers, confirmed(self._observers, through))
        elif envelope.deliver_at is None or not self._schedules([envelope]):
            through = self._hand_over_roots
        else:
            through = self._hand_over_later
        if self._chain is None:
            return envelope.publication_id, _hand_over((envelope,), through)
        out = OutgoingContext(envelope, outgoing.message, None)
        return envelope.publication_id, self._chain(out, partial(_hand_over, (envelope,), through))

    def failed(self, exc: Exception) -> None:
        """What `publish` gave to await raised this."""
        if self._is_bare and self._circuit is not None:
            self._circuit.failed(exc)

    def sent(self) -> None:
        """What `publish` gave to await is done."""
        if self._is_bare and self._circuit is not None:
            self._circuit.succeeded()

    def publish_again(self, envelope: Envelope) -> Awaitable[None]:
        """Publish a root again, as it was: nobody knows whether it arrived. Raises `Unwritable` for what could not be
        read again; a transport takes it for what we sealed."""
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(envelope), type=Envelope)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as exc:
            raise Unwritable(f"{envelope} has a field of a wrong type: {exc}") from exc
        return _hand_over((envelope,), self._hand_over_guarded)

    async def publish_many(self, outgoing: Sequence[Outgoing] | Alike) -> list[str]:
        """Publish roots together: all or none."""
        sealed = self.seal_roots(outgoing, self._clock.time())
        if self._chain is None or not sealed:
            await self._publish_all(sealed)
        else:
            messages = outgoing.messages if isinstance(outgoing, Alike) else [out.message for out in outgoing]
            pairs = zip(messages, sealed, strict=True)
            outs = [OutgoingContext(envelope, message, None) for message, envelope in pairs]
            await send_together(self._chain, outs, self._publish_all)
        return [envelope.publication_id for envelope in sealed]

    async def _publish_all(self, envelopes: list[Envelope]) -> Mapping[str, Exception]:
        if envelopes:
            later = self._schedules(envelopes)
            await _hand_over(envelopes, self._hand_over_later if later else self._hand_over_guarded)
        return {}

    def _schedules(self, envelopes: Sequence[Envelope]) -> bool:
        """Whether some of these wait in the store until they are due: then all go that way, to be taken together."""
        now = self._clock.time()
        return self._store is not None and any(is_later(envelope, now) for envelope in envelopes)

    async def _schedule(self, envelopes: Sequence[Envelope]) -> None:
        assert self._store is not None
        await self._store.publish([self.outbox_row(envelope, None, place) for place, envelope in enumerate(envelopes)])

    async def cancel(self, publication_id: str | None, key: str | None) -> bool:
        """Cancel what this node has scheduled, in its store or at the transport; whether it was still waiting. Raises
        `ConfigurationError` where neither can."""
        if self._store is not None:
            which = (publication_id, key)
            if await self._store.commit(lambda transaction: transaction.cancel_scheduled(self._node, which)):
                return True
        if isinstance(self._transport, Cancelling):
            return await self._transport.cancel(self._node, publication_id, key)
        if self._store is None:
            raise ConfigurationError(
                f"node {self._node!r} cannot cancel: this transport cannot take back what is scheduled on it (it lacks "
                '"cancel"). Give the node a store, where scheduled messages wait then: fg.Bus(…, store="postgresql://…")'
            )
        return False

    def seal_outputs(self, ctx: Context, handler: str, contexts: list[OutgoingContext] | None = None) -> list[Envelope]:
        """What a handler sends, in its envelopes: the same for every run of it on the same message. What it answers is
        in `Work.replies`; where middlewares decide about both, `contexts` gets them instead."""
        outputs = ctx._sent()
        if not outputs:
            return []
        now = self._clock.time()
        cause, message_id = ctx._work.envelope, ctx._work.message_id
        correlation_id, depth = cause.correlation_id or cause.publication_id, cause.depth + 1
        trace = passed_on(cause) if ctx._trace is None else ctx._trace()
        derive = ids.publication_ids(self._node, handler)
        sealed: list[Envelope] = []
        replies: list[Envelope] = []
        used: set[tuple[str, str]] = set()
        for ordinal, out in enumerate(outputs):
            slot: int | str = ordinal
            if out.id_key is not None or out.idempotency_key is not None:
                slot = _named_slot(out, handler, used)
            publication_id = derive(correlation_id, message_id, out.message_type.wire, slot)
            envelope = self._seal(out, publication_id, correlation_id, message_id, depth, now, trace)
            if out.is_reply:
                reply = self._replies.addressed(envelope, cause)
                if reply is None:
                    continue
                envelope = reply
                replies.append(reply)
            else:
                sealed.append(envelope)
            if contexts is not None:
                contexts.append(OutgoingContext(envelope, out.message, ctx))
        if replies and contexts is None:
            ctx._work.replies = replies
        return sealed

    def seal_failure(self, work: Work, handler: str, reason: str, exc: BaseException) -> Envelope | None:
        """What tells whoever asked that its request is dead-lettered; None where nobody asked."""
        if not work.envelope.headers:  # as nearly always
            return None
        root = work.envelope.correlation_id or work.envelope.publication_id
        publication_id = ids.publication_ids(self._node, handler)(root, work.message_id, FAILED, 0)
        return self._replies.failure(work.envelope, work.message_id, publication_id, self._node, reason, exc)

    def seal_escalation(self, outgoing: Sequence[Outgoing], subject: DeadLetter | SwitchTripped) -> list[Envelope]:
        """What the node sends about a dead letter, or a kill switch: the same each time, until the letter is replayed.
        No handler caused it, so it has no causation id; an audit counts what handlers sent."""
        if isinstance(subject, DeadLetter):
            correlation_id, about = subject.correlation_id, subject.message_id
            replay, depth = subject.envelope.replay, subject.envelope.depth
        else:
            correlation_id, about = "", f"{subject.handler}@{subject.since}"
            replay = depth = 0
        derive, now = ids.publication_ids(self._node, ESCALATES + ":"), self._clock.time()  # no handler is called so
        sealed: list[Envelope] = []
        for ordinal, out in enumerate(outgoing):
            if out.is_reply:
                raise no_answer(out)
            if out.id_key is not None or out.idempotency_key is not None:
                raise ConfigurationError(f"{out!r} is sent about {subject}, whose id names it: give it no other key")
            publication_id = derive(correlation_id, about, out.message_type.wire, f"{replay}.{ordinal}")
            envelope = self._seal(out, publication_id, correlation_id or publication_id, None, depth + 1, now)
            headers = {**envelope.headers, ESCALATES: about}
            sealed.append(msgspec.structs.replace(envelope, headers=headers))
        return sealed

    async def publish_escalation(self, envelopes: Sequence[Envelope]) -> None:
        """Publish what was sealed so, within the outgoing middlewares."""
        for envelope in envelopes:
            await self.publish_recorded(envelope, partial(self._publish_one, envelope))

    async def _publish_one(self, envelope: Envelope) -> None:
        await self.publish_sealed([envelope])

    async def record_outputs(self, ctx: Context, handler: str, chain: Chain) -> list[Envelope]:
        """The envelopes of what a handler sends, as far as the middlewares let them through."""
        passed: dict[str, Envelope] = {}

        async def pass_on(envelope: Envelope) -> None:
            passed[envelope.publication_id] = envelope

        for out in self._outgoing_contexts(ctx, handler):
            await chain(out, partial(pass_on, out._envelope))
        ctx._work.replies = [each for each in passed.values() if each.kind == "reply"]
        return [each for each in passed.values() if each.kind != "reply"]

    async def publish_outputs(self, ctx: Context, handler: str, chain: Chain) -> None:
        """Publish what a handler sends, together."""
        outs = self._outgoing_contexts(ctx, handler)
        if outs:
            await send_together(chain, outs, self.publish_sealed)

    def _outgoing_contexts(self, ctx: Context, handler: str) -> list[OutgoingContext]:
        contexts: list[OutgoingContext] = []
        self.seal_outputs(ctx, handler, contexts)
        return contexts

    async def publish_recorded(self, envelope: Envelope, publish: Last) -> None:
        """Send what somebody recorded through `fg.outbox` without this node at hand, within its middlewares."""
        if self._chain is None:
            await publish()
        else:
            await self._chain(OutgoingContext(envelope, self._message_of(envelope), None), publish)

    def _message_of(self, envelope: Envelope) -> Any:
        """The message, if this bus knows its class; None for one that another node means by that name."""
        cls = self._classes.get((envelope.kind, envelope.type))
        try:
            return None if cls is None else BodyReader(cls, limit=self._writer.limit).read(envelope)
        except Undecodable:
            return None

    def _publish_roots(self, envelopes: Sequence[Envelope]) -> Awaitable[None]:
        if self._is_bare and (self._circuit is None or self._circuit.closed):
            try:
                return self._to_transport(envelopes)
            except Exception as exc:
                self.failed(exc)
                raise
        return self._publish_guarded(envelopes)

    def _publish_guarded(self, envelopes: Sequence[Envelope]) -> Awaitable[None]:
        lists = self._recipient_lists
        return self._to_guarded(envelopes) if lists is None else self._publish_listed(lists, envelopes)

    async def _publish_listed(self, recipient_lists: RecipientLists, envelopes: Sequence[Envelope]) -> None:
        """Publish where some recipients may want tokens: then through the outbox, which makes them."""
        lists = await recipient_lists.resolve(envelopes)
        if not any("tokens" in recipients.modes.values() for recipients in lists.values()):
            await self._to_guarded(envelopes)
            return
        if self._store is None:
            raise ConfigurationError(
                f"node {self._node!r} publishes to a node that deduplicates by tokens, and has no store to send from: "
                "give it one, fg.Bus(…, store=…)"
            )
        await self._schedule(envelopes)

    def _publish_to_guarded(self, envelopes: Sequence[Envelope]) -> Awaitable[None]:
        return self._guarded.publish(envelopes)

    def _publish_to_transport(self, envelopes: Sequence[Envelope]) -> Awaitable[None]:
        return self._transport.publish(envelopes)

    async def publish_sealed(self, envelopes: list[Envelope]) -> Mapping[str, Exception]:
        """Publish what a handler sends; what it answers goes last. An output that no queue takes becomes a dead letter
        of its own."""
        replies = [envelope for envelope in envelopes if envelope.kind == "reply"]
        if replies:
            envelopes = [envelope for envelope in envelopes if envelope.kind != "reply"]
        errors: dict[str, Exception] = {}
        try:
            if envelopes:
                await _hand_over(envelopes, self._hand_over_outputs)
        except Unroutable:
            for envelope in envelopes:
                try:
                    await self._hand_over_outputs([envelope])
                except Unroutable as exc:
                    errors[envelope.publication_id] = exc
                    assert isinstance(self._transport, DeadLettering)  # no node without a store runs on another
                    await self._transport.dead_letter(self._node, envelope, exc.reason, f"Unroutable: {exc}")
                    self._alarms.sound("unroutable", self._node, envelope.publication_id, str(exc), envelope=envelope)
        if replies:
            await self._replies.hand_over(replies)
        return errors


def _named_slot(out: Outgoing, handler: str, used: set[tuple[str, str]]) -> str:
    """The `id_key` of an output, which no other one of its type may have."""
    if out.idempotency_key is not None or out.id_key is None:
        raise ConfigurationError(
            f"{handler!r} sends {out!r} with idempotency_key={out.idempotency_key!r}, which is for what no "
            "handler causes: in a handler the same run gives the same ids; id_key= names one output of it"
        )
    name = (out.message_type.wire, out.id_key)
    if name in used:
        raise DuplicateIdKey(
            f"{handler!r} sends two messages of type {name[0]} with the id_key {out.id_key!r}: give each its own"
        )
    used.add(name)
    return out.id_key


def _hand_over(envelopes: Sequence[Envelope], publish: Publish) -> Awaitable[None]:
    return publish(envelopes) if faults.hook is None else _hand_over_between_faults(envelopes, publish)


async def _hand_over_between_faults(envelopes: Sequence[Envelope], publish: Publish) -> None:
    assert faults.hook is not None
    await faults.hook("bus.before-publish")
    await publish(envelopes)
    if faults.hook is not None:
        await faults.hook("bus.after-publish")


def message_classes(nodes: Iterable[Node]) -> dict[tuple[Kind, str], type]:
    """What the messages that these nodes handle are decoded into."""
    types = [subscription.message_type for node in nodes for subscription in node.subscriptions.values()]
    return {(message_type.kind, message_type.wire): message_type.cls for message_type in types}
