"""A subscription: node X handles type T, from node S (events) or addressed to it (commands), in this way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from faregate.bus.policy import ByKey, Order, Redeliver, Retry
from faregate.bus.signature import Signature
from faregate.codec import BodyReader
from faregate.errors import Undecodable
from faregate.message import Envelope, MessageType
from faregate.ports.queue import Binding

SPARE_DELIVERIES = 20
"""Started deliveries beyond the redelivery policy after which a message counts as what kills its process."""

Dedup = Literal["ledger", "tokens", "off"]
Claim = Literal["transaction", "eager", "lazy"]
"""When the business key of a message is claimed (see `identity.py`)."""


@dataclass(frozen=True, slots=True)
class Subscription:
    node: str
    name: str
    message_type: MessageType
    source: str | None
    handler: Signature
    key: str | None
    order: Order
    prefetch: int | None
    retry: Retry
    redeliver: Redeliver
    dedup: Dedup
    identity: str | None
    claim: Claim
    expires: float | None

    def __str__(self) -> str:
        origin = f" from {self.source}" if self.source else ""
        return f"{self.name} at {self.node} ({self.message_type.wire}{origin})"

    def binding(self, limit: int) -> Binding:
        """What this subscription asks of a transport; `limit` bounds the bodies that are read for their key."""
        ordered = isinstance(self.order, ByKey) and self.key is not None
        return Binding(
            node=self.node,
            type=self.message_type.wire,
            kind=self.message_type.kind,
            source=self.source,
            key_of=_key_reader(self.message_type.cls, self.key or "", limit) if ordered else None,
            strict=not isinstance(self.order, ByKey) or self.order.strict,
            max_deliveries=len(self.redeliver.delays) + SPARE_DELIVERIES,
            expires=self.expires,
        )


def _key_reader(cls: type, field: str, limit: int) -> Callable[[Envelope], str | None]:
    """Reads the ordering key out of an encoded body.

    Of a struct only that one field is decoded. A body that cannot be read has no key: it will be poisoned when it
    is delivered, and must not hold anyone up before that.
    """
    partial = cls
    if issubclass(cls, msgspec.Struct):
        encoded = {info.name: info.encode_name for info in msgspec.structs.fields(cls)}[field]
        partial = msgspec.defstruct("Key", [(field, Any, None)], rename={field: encoded})
    read = BodyReader(partial, limit=limit).read

    def key_of(envelope: Envelope) -> str | None:
        try:
            value = getattr(read(envelope), field)
        except Undecodable:
            return None
        # PostgreSQL keeps no zero characters in texts.
        return None if value is None or "\0" in (text := str(value)) else text

    return key_of
