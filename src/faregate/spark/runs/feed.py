"""A log as a feed: what the unit of work does besides, where a log keeps everything and a store says how far one is.

    lock the buckets -> last position of each key -> [dedup, handlers, outbox: as on the bus] -> positions, parked

Rules kept here:
- A message at or below the last position of its key was dealt with, unless it was parked, or is a replay: then the
  ledger decides. This holds because of one key nothing runs before everything earlier is handled, dead or parked, and
  what is parked comes back from the store and not from the log.
- A zombie task and its retry meet in the lock of the bucket; whoever comes second finds the position and the ledger
  of the first.
"""

from collections.abc import Iterable, Sequence

from faregate.core.outlet import OutboxOutlet, Recorded
from faregate.core.verdict import Verdict, judge
from faregate.core.work import Work
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.node.rules import FailurePolicy
from faregate.ports.queue import Delivery
from faregate.ports.store import OutboxRow, Transaction
from faregate.spark.runs.delivery import LogDelivery


class OutboxOnly(OutboxOutlet):
    """Records outgoing messages; the driver sends them after the batch, and finds them in the table. That goes for what
    is due later, too: nobody would be there to send it then, so its recipients keep it."""

    schedules = False

    async def record_rows(self, transaction: Transaction, rows: Sequence[OutboxRow]) -> Recorded:
        if rows:
            await transaction.send(rows)
        return Recorded()


class NoTransport:
    """In an executor there is none: what goes out waits in the outbox, or in a staged file, for the driver."""

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        raise ConfigurationError("a Spark task has no transport: outgoing messages are sent by the driver, afterwards")


class LogFeed:
    batch_seconds = 1.0
    """Nobody waits for a single message here; what waits for a transaction is a zombie."""
    keeps_outcomes = False

    def __init__(self, node: str, positions: str) -> None:
        self._node = node
        self.positions = positions
        """What the positions of its keys are kept under."""

    async def join(self, transaction: Transaction, works: Sequence[Work]) -> None:
        found = {_delivery(work): work for work in works}
        await transaction.lock_buckets(self._node, buckets_of(found))
        for delivery in await self.behind(transaction, list(found)):
            found[delivery].move("known")

    async def behind(self, transaction: Transaction, deliveries: list[LogDelivery]) -> list[LogDelivery]:
        """Those that the positions of their keys say were dealt with."""
        keys = [key for each in deliveries for key in each.order_keys]
        last = await transaction.positions(self._node, self.positions, keys) if keys else {}
        return [each for each in deliveries if is_behind(each, last)]

    async def record(self, transaction: Transaction, works: Sequence[Work]) -> None:
        positions: dict[str, int] = {}
        parked: dict[str, int] = {}
        for work in works:
            delivery = _delivery(work)
            for key in delivery.order_keys:
                positions[key] = max(delivery.position, positions.get(key, -1))
            if delivery.parked:
                parked[work.message_id] = delivery.position
        await transaction.advance(self._node, self.positions, positions)
        if parked:
            await transaction.unpark(self._node, parked)

    async def dead_letter(self, transaction: Transaction, work: Work) -> None:
        """Were it parked any longer, a replay of its dead letter would be left to what is parked. Another attempt at
        the same task may have parked it, whatever this delivery says."""
        delivery = _delivery(work)
        if delivery.order_key is not None:
            await transaction.lock_buckets(self._node, delivery.buckets)
        await transaction.unpark(self._node, {work.message_id: delivery.position})

    def judge(self, delivery: Delivery, exc: BaseException, policy: FailurePolicy) -> Verdict:
        return judge(exc, delivery.redeliveries, policy)


def is_behind(delivery: LogDelivery, last: dict[str, int]) -> bool:
    """Whether the position of its key says that it was dealt with; of several keys, all do."""
    if delivery.order_key is None or delivery.parked or delivery.envelope.replay:
        return False
    return all(delivery.position <= last.get(key, -1) for key in delivery.order_keys)


def buckets_of(deliveries: Iterable[LogDelivery]) -> list[int]:
    """The buckets of the keys of those that have one."""
    return [bucket for each in deliveries if each.order_key is not None for bucket in each.buckets]


def _delivery(work: Work) -> LogDelivery:
    delivery = work.delivery
    assert isinstance(delivery, LogDelivery)
    return delivery
