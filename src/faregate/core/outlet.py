"""Where what handlers send goes. A role of the core.

Dispatcher (bus), OutboxOnly (Spark)   into the outbox, in the commit; it is sent from there afterwards, whatever
                                       crashes, so the delivery may be settled before that
PublishAtOnce (no store, both)         published before the delivery is settled: a crash in between runs the handler
                                       again, and its outputs keep their ids; the other way round they would be lost
"""

from collections.abc import Callable, Sequence

from faregate.core.sealing import outbox_row
from faregate.core.sender import Sender
from faregate.core.work import Work
from faregate.ports.store import OutboxRow, Transaction


class Recorded:
    """What one transaction did to the outbox; it counts after the commit."""

    __slots__ = ("later", "removed", "rows", "seqs")

    def __init__(
        self,
        rows: Sequence[OutboxRow] = (),
        seqs: Sequence[int] = (),
        removed: Sequence[int] = (),
        later: Sequence[OutboxRow] = (),
    ) -> None:
        self.rows = rows
        self.seqs = seqs
        """Of the rows; filled by the commit at the latest."""
        self.removed = removed
        self.later = later
        """What is scheduled, beside the rows."""


class Outlet:
    schedules = True
    """Whether what is due later can be taken back until then."""

    async def record(self, transaction: Transaction | None, node: str, works: Sequence[Work]) -> Recorded | None:
        """Take what the handlers of these sent: with the transaction, or at once where there is none."""
        raise NotImplementedError

    def committed(self, recorded: Recorded) -> None:
        """What was recorded is in the store."""

    def rolled_back(self, recorded: Recorded) -> None:
        """What was recorded is not."""

    def doubt(self) -> None:
        """A commit may or may not have happened: its rows may be in the table."""

    async def was_handled(self, node: str, message_id: str) -> None:
        """A duplicate is about to be settled. What a doubted commit left of it goes out before what follows it."""

    async def room(self, unless: Callable[[], bool] = lambda: False) -> None:
        """Return once there is room for more, or `unless` says that nobody needs it (see `look_again`)."""

    def look_again(self) -> None:
        """Ask `unless` again: room may not be needed any more."""


class OutboxOutlet(Outlet):
    """The outbox of a store."""

    async def record(self, transaction: Transaction | None, node: str, works: Sequence[Work]) -> Recorded | None:
        assert transaction is not None
        rows = [
            outbox_row(node, envelope, work.message_id, place)
            for work in works
            for place, envelope in enumerate(work.sent)
        ]
        rows += [
            outbox_row(node, envelope, work.message_id, len(work.sent) + place)
            for work in works
            if work.replies
            for place, envelope in enumerate(work.replies)
        ]
        return await self.record_rows(transaction, rows)

    async def record_rows(self, transaction: Transaction, rows: Sequence[OutboxRow]) -> Recorded:
        """Put rows into the outbox, within a transaction."""
        raise NotImplementedError

    async def sent(self, recorded: Recorded) -> None:
        """Return once these rows are sent, as far as they are due; or when nobody sends here any more."""


class PublishAtOnce(Outlet):
    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    async def record(self, transaction: Transaction | None, node: str, works: Sequence[Work]) -> Recorded | None:
        envelopes = [envelope for work in works for envelope in (*work.sent, *work.replies)]
        try:
            if envelopes:
                await self._sender.publish_sealed(envelopes)
        except Exception as exc:
            await self._publish_singly(works, exc)
        return None

    async def _publish_singly(self, works: Sequence[Work], exc: Exception) -> None:
        """Who cannot be helped fails, and nobody else: the others' handlers must not run again for that."""
        for work in works:
            try:
                if len(works) == 1:
                    raise exc
                await self._sender.publish_sealed([*work.sent, *work.replies])
            except Exception as own:
                work.fail(own)
