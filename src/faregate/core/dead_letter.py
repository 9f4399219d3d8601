"""The dead letters that a node makes: of a delivery that it stopped trying, and of a message that nobody takes."""

from faregate.core.verdict import describe_error
from faregate.errors import Permanent
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Delivery
from faregate.ports.store import OutboxRow


def dead_letter(node: str, message_id: str, delivery: Delivery, reason: str, error: str, now: float) -> DeadLetter:
    envelope = delivery.envelope
    return DeadLetter.of(
        node,
        envelope,
        reason,
        error,
        now,
        queue=".".join(filter(None, (node, envelope.type, envelope.source if envelope.kind == "event" else None))),
        message_id=message_id,
        key=None if delivery.key is None else str(delivery.key),
        tries=delivery.tries,
        redeliveries=delivery.redeliveries,
    )


def unsent(row: OutboxRow, envelope: Envelope, exc: Permanent, now: float) -> DeadLetter:
    """Of a message in the outbox that nobody takes: the sending node's, under its publication id."""
    return DeadLetter.of(
        row.node,
        envelope,
        exc.reason,
        describe_error(exc),
        now,
        queue=row.destination,
        message_id=envelope.publication_id,
        key=envelope.key,
    )
