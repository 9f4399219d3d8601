"""What a node knows a message by, and the dead letter that it becomes when it is given up on."""

from faregate import ids
from faregate.message import Envelope
from faregate.ports.queue import Delivery
from faregate.ports.store import DeadLetter


def message_id_of(envelope: Envelope, node: str) -> str:
    """What the node knows the message by; one without an identity is known by its content."""
    if envelope.publication_id:
        return ids.message_id(envelope.publication_id, node)
    return ids.idempotent_id(node, envelope.type, envelope.body.hex())


def dead_letter(node: str, message_id: str, delivery: Delivery, reason: str, error: str, now: float) -> DeadLetter:
    envelope = delivery.envelope
    return DeadLetter(
        node=node,
        message_id=message_id,
        publication_id=envelope.publication_id,
        type=envelope.type,
        source=envelope.source,
        correlation_id=envelope.correlation_id or envelope.publication_id,
        key=delivery.key,
        queue=".".join(filter(None, (node, envelope.type, envelope.source if envelope.kind == "event" else None))),
        reason=reason,
        error=error,
        tries=delivery.tries,
        redeliveries=delivery.redeliveries,
        first_failed_at=now,
        last_failed_at=now,
        envelope=envelope,
    )
