"""A subscription: node X handles type T, from node S (events) or addressed to it (commands), in this way."""

from dataclasses import dataclass
from typing import Literal

from faregate.message import MessageType
from faregate.node.key import Key
from faregate.node.kill_switch import DEFAULT_KILL_SWITCH, KillSwitch
from faregate.node.policy import ByKey, Order, Serial
from faregate.node.rules import FailurePolicies
from faregate.node.signature import Signature
from faregate.node.where import Filter
from faregate.ports.queue import Binding

SPARE_DELIVERIES = 20
"""After so many started deliveries beyond its redeliveries, a message counts as one that kills its process."""

DedupMode = Literal["ledger", "tokens", "off"]
ClaimMode = Literal["transaction", "eager", "lazy"]
"""When the business key of a message is taken (see `core/dedup/business_key.py`)."""


@dataclass(frozen=True, slots=True)
class Subscription:
    node: str
    name: str
    message_type: MessageType
    source: str | None
    """Who publishes the event; None for a command, and for an event until a bus has found it out (`sources.py`)."""
    handler: Signature
    key: Key | None
    order: Order
    prefetch: int | None
    failures: FailurePolicies
    dedup: DedupMode
    business_key: Key | None
    claim: ClaimMode
    expires: float | None
    partitions: int | None = None
    """In how many queues a broker may keep its messages by their key; None: its messages have no order."""
    where: Filter | None = None
    """Which messages its handler is for; None: all."""
    kill_switch: KillSwitch = DEFAULT_KILL_SWITCH

    def __str__(self) -> str:
        origin = f" from {self.source}" if self.source else ""
        return f"{self.name} at {self.node} ({self.message_type.wire}{origin})"

    @property
    def by_key(self) -> bool:
        """Whether its messages are handled in the order of their keys."""
        return isinstance(self.order, ByKey) and self.key is not None

    @property
    def several(self) -> bool:
        """Whether a message of it may have several keys."""
        return self.by_key and self.key is not None and bool(self.key.each)

    @property
    def ordered(self) -> bool:
        """Whether its messages have an order: all of them, or those of one key."""
        return self.by_key or isinstance(self.order, Serial)

    def binding(self, limit: int) -> Binding:
        """What this subscription asks of a transport; `limit` bounds the bodies that are read for their key."""
        return Binding(
            node=self.node,
            type=self.message_type.wire,
            kind=self.message_type.kind,
            source=self.source,
            key_of=self.key.reader(self.message_type.cls, limit) if self.key is not None and self.by_key else None,
            strict=not isinstance(self.order, ByKey) or self.order.strict,
            serial=isinstance(self.order, Serial),
            max_deliveries=max(policy.most_redeliveries for policy in self.failures) + SPARE_DELIVERIES,
            expires=self.expires,
            remembers=self.dedup,
            partitions=self.partitions,
            several=self.several,
        )
