"""The dead letter: the record of a message that no handler will see again unless a person decides so."""

from typing import Literal, Self

import msgspec

from faregate import ids
from faregate.message import Envelope
from faregate.plain import plain

DeadStatus = Literal["open", "replayed", "resolved", "discarded"]


class DeadLetter(msgspec.Struct, kw_only=True):
    """A dead message, with everything a person needs to decide about it. One per (node, message id).

    A store keeps one as a row, in the order of these fields. A transport keeps those of nodes without a store, without
    key, copies, replays and status.
    """

    node: str
    message_id: str
    publication_id: str
    type: str
    source: str
    correlation_id: str
    key: str | None = None
    queue: str
    reason: str
    error: str
    """The error's class and text, then the traceback."""
    tries: int = 0
    redeliveries: int = 0
    first_failed_at: float
    last_failed_at: float
    copies: int = 1
    """How many copies of the message ended here."""
    replays: int = 0
    """How often it was replayed; a replay carries this number."""
    status: DeadStatus = "open"
    changed_by: str | None = None
    changed_at: float | None = None
    envelope: Envelope

    @classmethod
    def of(
        cls,
        node: str,
        envelope: Envelope,
        reason: str,
        error: str,
        at: float,
        *,
        queue: str,
        message_id: str | None = None,
        key: str | None = None,
        tries: int = 0,
        redeliveries: int = 0,
    ) -> Self:
        """The open letter of a message that fails for good at this node now."""
        return cls(
            node=node,
            message_id=message_id or ids.message_id_of(envelope, node),
            publication_id=envelope.publication_id,
            type=envelope.type,
            source=envelope.source,
            correlation_id=envelope.correlation_id or envelope.publication_id,
            key=key,
            queue=queue,
            reason=reason,
            error=error,
            tries=tries,
            redeliveries=redeliveries,
            first_failed_at=at,
            last_failed_at=at,
            envelope=envelope,
        )

    @property
    def at(self) -> float:
        """When it last failed."""
        return self.last_failed_at

    def __str__(self) -> str:
        return plain(f"{self.type} {self.message_id} at {self.node} ({self.reason})")
