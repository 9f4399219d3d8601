"""The dead letter that a message becomes when it is given up on."""

from faregate.ports.queue import Delivery
from faregate.ports.store import DeadLetter


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
