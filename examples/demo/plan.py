"""What the demo publishes, and what must come of it: both follow from the seed alone.

Rules kept here:
- Nothing is asked of the system that is judged: who knows the orders and the seed knows every number of the verdict.
- An order has an idempotency key. Copies of it are exact: the same key, the same body; some come at once, some late.
- A customer's orders have rising numbers, and are published in that order.
"""

import random
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import msgspec

from faregate.bus.bus import MAX_MESSAGE_BYTES
from faregate.codec import BodyWriter, JsonCodec
from faregate.core.sealing import Sealer
from faregate.message import Envelope
from faregate.node.outgoing import publish

from ..shop.messages import OrderPlaced

COPIED_PERCENT, LATE_PERCENT, IMPOSSIBLE_PERCENT, GARBLED_PERCENT = 8, 4, 0.8, 0.4
_BATCHES_LATE = 3
_FEWEST_IN_BATCH, _MOST_IN_BATCH = 25, 500
_BATCHES = 40


class Placement(NamedTuple):
    """One order, and how it is published."""

    number: int
    customer: str
    total: int
    is_garbled: bool
    copies: int
    """How many exact copies follow it at once."""
    has_late_copy: bool

    @property
    def order_id(self) -> str:
        return f"order-{self.number}"

    @property
    def is_good(self) -> bool:
        return self.total > 0 and not self.is_garbled


class Plan:
    """The orders of a run."""

    def __init__(self, orders: int, seed: int) -> None:
        chance = random.Random(seed)
        customers = max(10, min(500, orders // 20))
        self.orders = orders
        self.seed = seed
        self.placements = [_placement(number, customers, chance) for number in range(orders)]
        self.good = [placement for placement in self.placements if placement.is_good]
        self.impossible = sum(placement.total <= 0 and not placement.is_garbled for placement in self.placements)
        self.garbled = sum(placement.is_garbled for placement in self.placements)
        self.copies = sum(placement.copies + placement.has_late_copy for placement in self.placements)
        self.batch_size = max(_FEWEST_IN_BATCH, min(_MOST_IN_BATCH, orders // _BATCHES))

    @property
    def money(self) -> int:
        return sum(placement.total for placement in self.good)

    @property
    def dead(self) -> int:
        return self.impossible + self.garbled

    def billed_in_order(self) -> dict[str, list[str]]:
        """The orders of each customer that must be billed, in the order in which they must be."""
        found: dict[str, list[str]] = {}
        for placement in self.good:
            found.setdefault(placement.customer, []).append(placement.order_id)
        return found

    def batches(self) -> Iterator[list[Placement]]:
        """What is published together: orders with their copies, and the late copies of earlier orders."""
        late: list[list[Placement]] = []
        for start in range(0, self.orders, self.batch_size):
            fresh = self.placements[start : start + self.batch_size]
            late.append([placement for placement in fresh if placement.has_late_copy])
            repeated = [placement for placement in fresh for _ in range(1 + placement.copies)]
            yield repeated + (late.pop(0) if len(late) > _BATCHES_LATE else [])
        rest = [placement for batch in late for placement in batch]
        if rest:
            yield rest


def _placement(number: int, customers: int, chance: random.Random) -> Placement:
    is_impossible, is_garbled = chance.random() * 100 < IMPOSSIBLE_PERCENT, chance.random() * 100 < GARBLED_PERCENT
    total = chance.choice((0, -1)) if is_impossible else chance.randint(1, 500)
    copies = chance.choice((1, 1, 2)) if chance.random() * 100 < COPIED_PERCENT else 0
    customer = f"customer-{chance.randrange(customers)}"
    return Placement(number, customer, total, is_garbled, copies, chance.random() * 100 < LATE_PERCENT)


class Envelopes:
    """Makes the envelopes of placements, as `bus.publish(…, idempotency_key=…)` of the node `shop` does."""

    def __init__(self) -> None:
        writer = BodyWriter(JsonCodec(), limit=MAX_MESSAGE_BYTES)
        self._sealer = Sealer("shop", writer, {})

    def seal(self, placement: Placement, now: float) -> Envelope:
        order = OrderPlaced(order_id=placement.order_id, customer=placement.customer, total=placement.total)
        envelope = self._sealer.seal_root(publish(order, idempotency_key=placement.order_id), now)
        if placement.is_garbled:
            half = envelope.body[: len(envelope.body) // 2]
            return msgspec.structs.replace(envelope, body=half, body_digest=sha256(half).digest()[:16])
        return envelope
