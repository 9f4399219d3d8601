"""The unit of work on a log: the receiver of the bus, with what a log engine adds to its transaction.

    lock the buckets -> last position of each key -> [ledger, handlers, outbox: as on the bus] -> positions, parked

Rules kept here:
- A message at or below the last position of its key was dealt with, unless it was parked, or is a replay: then the
  ledger decides. This holds because of one key nothing runs before everything earlier is handled, dead or parked, and
  what is parked comes back from the store and not from the log.
- A zombie task and its retry meet in the lock of the bucket; whoever comes second finds the position and the ledger
  of the first.
"""

from collections.abc import Sequence

from faregate.bus.dispatcher import Dispatcher, Recorded
from faregate.core.transactional import Transactional
from faregate.core.unit import Work
from faregate.ports.store import OutboxRow, Transaction
from faregate.spark.runs.delivery import LogDelivery
from faregate.spark.runs.records import LogRecords


class OutboxOnly(Dispatcher):
    """Records outgoing messages; the driver sends them after the batch."""

    async def record(self, transaction: Transaction, rows: Sequence[OutboxRow]) -> Recorded:
        if rows:
            await transaction.send(rows)
        return Recorded([], [])

    def committed(self, recorded: Recorded) -> None:
        self.activity += 1

    def rolled_back(self, recorded: Recorded) -> None:
        """Nothing is in memory."""

    def doubt(self) -> None:
        """Whatever was committed is in the table, where the driver finds it. Rows that were taken up here would wait
        for a task that this process does not have, and in the end handlers for room among them."""


class LogTransactional(Transactional):
    records: LogRecords
    positions: str
    """What the positions of its keys are kept under."""
    batch_seconds = 1.0
    """Nobody waits for a single message here; what waits for a transaction is a zombie."""

    async def _fence(self, transaction: Transaction, works: list[Work]) -> None:
        keyed = {work: delivery for work in works if (delivery := _delivery(work)).line is not None}
        await self.records.lock(transaction, [delivery.bucket for delivery in keyed.values()])
        keys = [delivery.line for delivery in keyed.values() if delivery.line is not None]
        last = await self.records.positions(transaction, self.positions, keys) if keys else {}
        for work, delivery in keyed.items():
            if is_behind(delivery, last):
                work.state = "duplicate"

    async def _record(self, transaction: Transaction, done: list[Work]) -> Recorded:
        deliveries = [_delivery(work) for work in done]
        positions: dict[str, int] = {}
        for delivery in deliveries:
            if delivery.line is not None:
                positions[delivery.line] = max(delivery.position, positions.get(delivery.line, -1))
        await self.records.advance(transaction, self.positions, positions)
        parked = [work.message_id for work, delivery in zip(done, deliveries, strict=True) if delivery.parked]
        if parked:
            await self.records.unpark(transaction, parked)
        return await super()._record(transaction, done)


def is_behind(delivery: LogDelivery, last: dict[str, int]) -> bool:
    """Whether the position of its key says that it was dealt with."""
    if delivery.line is None or delivery.parked or delivery.envelope.replay:
        return False
    return delivery.position <= last.get(delivery.line, -1)


def _delivery(work: Work) -> LogDelivery:
    delivery = work.delivery
    assert isinstance(delivery, LogDelivery)
    return delivery
