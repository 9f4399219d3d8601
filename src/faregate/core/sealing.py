"""Seals a message into its envelope: identity, encoding, digest. The same for the bus and for `fg.outbox`, so that a
publication has the same id whichever way it takes."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from faregate import ids
from faregate.codec import BodyWriter
from faregate.core.observer import TRACESTATE, TraceContext
from faregate.errors import ConfigurationError
from faregate.message import Envelope, Kind, MessageType
from faregate.node.key import Key, type_key
from faregate.node.outgoing import Alike, Outgoing
from faregate.ports.store import SCHEDULE_KEY, OutboxRow

Keys = dict[tuple[Kind, str | None, str], Key]
"""(kind, source or destination, type) -> the key that all its subscriptions on this bus order by. It counts for types
that have no key of their own."""


class Sealer:
    def __init__(self, node: str, writer: BodyWriter, keys: Keys) -> None:
        self._node = node
        self._writer = writer
        self._keys = keys

    def seal_roots(self, outs: Sequence[Outgoing] | Alike, now: float) -> list[Envelope]:
        """The envelopes of what no handler caused, of one moment."""
        if isinstance(outs, Alike):
            return self._seal_alike(outs.message_type, outs.messages, now)
        roots = ids.root_ids(len(outs), int(now * 1000))
        return [self.seal_root(out, now, root) for out, root in zip(outs, roots, strict=True)]

    def _seal_alike(self, message_type: MessageType, messages: list[Any], now: float) -> list[Envelope]:
        """As `seal_root` does it for each: what they have in common is looked up once."""
        wire, kind, node, content_type = message_type.wire, message_type.kind, self._node, self._writer.content_type
        roots = ids.root_ids(len(messages), int(now * 1000))
        by = self._key_by(message_type, None)
        keys = repeat(None, len(messages)) if by is None else map(by.hint, messages)
        bodies = self._writer.write_all(messages)
        # In the order of the fields, as in `_seal`; what is left out at the end has its default.
        return [
            Envelope(root, wire, kind, node, body, (), None, root, None, 0, key, None, now, None, None, 0, 0,
                     content_type, encoding, None, None, None, digest)
            for root, key, (body, encoding, digest) in zip(roots, keys, bodies, strict=True)
        ]  # fmt: skip

    def seal_root(self, out: Outgoing, now: float, root: str | None = None) -> Envelope:
        """The envelope of what no handler caused. `root`: a fresh id, where there is one at hand."""
        if out.is_reply:
            raise no_answer(out)
        if out.id_key is not None:
            raise ConfigurationError(
                f"{out!r} has id_key={out.id_key!r}, which names one of a handler's outputs: outside of handlers "
                "give idempotency_key="
            )
        if out.idempotency_key is not None:
            root = ids.idempotent_id(self._node, out.message_type.wire, out.idempotency_key)
        elif root is None:
            root = ids.root_id(int(now * 1000))
        return self._seal(out, root, root, None, 0, now)

    def _key_by(self, message_type: MessageType, destination: str | None) -> Key | None:
        """What the key of such a message is made of."""
        if message_type.key:
            return type_key(message_type.cls)
        kind, address = message_type.kind, self._node if message_type.kind == "event" else destination
        return self._keys.get((kind, address, message_type.wire))

    def outbox_row(self, envelope: Envelope, cause: str | None, ordinal: int) -> OutboxRow:
        """How a sealed envelope stands in the outbox of this node's store."""
        return outbox_row(self._node, envelope, cause, ordinal)

    def _seal(
        self,
        out: Outgoing,
        publication_id: str,
        correlation_id: str,
        causation_id: str | None,
        depth: int,
        now: float,
        trace: TraceContext | None = None,
    ) -> Envelope:
        message_type = out.message_type
        kind, wire = message_type.kind, message_type.wire
        body, encoding, digest = self._writer.write(out.message)
        key = None
        if message_type.key or self._keys:
            by = self._key_by(message_type, out.destination)
            key = None if by is None else by.hint(out.message)
        headers = {} if out.headers is None else out.headers
        if trace is not None and trace.tracestate:
            headers = {**headers, TRACESTATE: trace.tracestate}
        deliver_at = out.at if out.delay is None else now + out.delay
        if deliver_at is not None and (named := out.id_key or out.idempotency_key) is not None:
            headers = {**headers, SCHEDULE_KEY: named}
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
            depth,
            key,
            None,  # attempt_id
            now,
            deliver_at,
            None if out.expires is None else max(now, deliver_at or now) + out.expires,
            0,  # redeliveries
            0,  # replay
            self._writer.content_type,
            encoding,
            None,  # key_id
            None,  # algorithm
            None,  # payload_ref
            digest,
            None if trace is None else trace.traceparent,
            headers,
            out.delay,
        )


def no_answer(out: Outgoing) -> ConfigurationError:
    return ConfigurationError(
        f"{out!r} answers the message that a handler handles: return it from a handler, or yield it there"
    )


def outbox_row(node: str, envelope: Envelope, cause: str | None = None, ordinal: int = 0) -> OutboxRow:
    """How a sealed envelope stands in the outbox of a node's store."""
    address = envelope.destination if envelope.kind != "event" else f"{envelope.source}.{envelope.type}"
    return OutboxRow(0, node, cause, ordinal, address or "", envelope.key, envelope)
