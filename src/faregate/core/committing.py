"""The commit of a transaction: what goes with the handlers' own writes, and what is left when it is lost.

Rules kept here:
- Marks, outgoing messages and how far was handled are in the commit of the effects, for all of a batch at once.
- The outbox learns of what was recorded only once it is committed; where nobody knows, it has to look.
- Of a lost transaction nothing has happened: its messages run again, each alone if they shared it.
"""

import asyncio
from collections.abc import Sequence

from faregate.core.dedup import by_dedup
from faregate.core.dedup.business_key import BusinessKey
from faregate.core.feed import Feed
from faregate.core.node_store import NodeStore
from faregate.core.outlet import Outlet, Recorded
from faregate.core.states import UNDECIDED
from faregate.core.unit import UnitOfWork
from faregate.core.work import Work
from faregate.errors import CommitUnknown
from faregate.ports.clock import Clock
from faregate.ports.store import Transaction


class Committing:
    def __init__(
        self,
        node: str,
        feed: Feed,
        outlet: Outlet,
        store: NodeStore | None,
        business_key: BusinessKey | None,
        clock: Clock,
    ) -> None:
        self._node = node
        self._feed = feed
        self._outlet = outlet
        self._store = store
        self._business_key = business_key
        self._clock = clock

    async def publish(self, works: Sequence[Work]) -> None:
        """Without a store: send what those that are done sent."""
        await self._outlet.record(None, self._node, [work for work in works if work.state == "done"])

    async def commit(self, unit: UnitOfWork, works: Sequence[Work]) -> None:
        """Commit what succeeded, with everything that goes with it."""
        if not any(work.state in ("done", "folded") for work in works):
            await unit.abandon()
            return
        transaction = await unit.open()
        await unit.flush(wait=False)
        recorded = await self._record(transaction, works)
        try:
            await unit.commit()
        except BaseException:
            if recorded is not None:
                self._outlet.rolled_back(recorded)
            raise
        if recorded is not None:
            self._outlet.committed(recorded)

    async def _record(self, transaction: Transaction, works: Sequence[Work]) -> Recorded | None:
        """What is committed beside the handlers' own writes.

        A dead letter that is there by now is resolved: of a replay, or of another copy that became one meanwhile.
        """
        done = [work for work in works if work.state == "done"]
        if len(done) < len(works):
            for dedup, group in by_dedup([work for work in works if work.state in UNDECIDED]):
                await dedup.unmark(transaction, group)
            for work in works:
                if work.state == "folded":
                    await transaction.fold(self._node, work.message_id)
        for dedup, group in by_dedup(done):
            await dedup.commit(transaction, group)
        done = [work for work in done if work.state == "done"]  # the others turned out to be duplicates
        await self._feed.record(transaction, done)
        await transaction.resolve(self._node, [work.message_id for work in done], self._clock.time())
        if self._business_key is not None:
            await self._business_key.commit(transaction, done)
        return await self._send(transaction, done)

    async def _send(self, transaction: Transaction, done: list[Work]) -> Recorded | None:
        """Put what handlers sent into the outbox, and how much it was into the ledger."""
        for dedup, group in by_dedup(done):
            await dedup.sent(transaction, group)
        return await self._outlet.record(transaction, self._node, done)

    async def roll_back(self, unit: UnitOfWork, exc: BaseException) -> None:
        """Nothing of it stays; or nobody knows, after some errors."""
        await unit.abandon()
        if isinstance(exc, CommitUnknown | asyncio.CancelledError):
            self._outlet.doubt()

    async def save(self, works: list[Work]) -> None:
        """A handler ended the transaction of its batch. Save the others: what they wrote may or may not be committed.

        Those that are keep their outputs; those that are not run again.
        """
        assert self._store is not None
        store = self._store.store
        known = await store.known(self._node, [work.message_id for work in works])
        saved = [work for work in works if work.state == "done" and await work.dedup.was_committed(work, known)]
        strays = [work for work in works if work not in saved and work.state in ("new", "done", "failed")]
        recorded = None
        try:
            async with store.transaction() as transaction:
                for dedup, group in by_dedup(strays):
                    await dedup.unmark(transaction, group)
                recorded = await self._send(transaction, saved)
        except BaseException:
            if recorded is not None:
                self._outlet.rolled_back(recorded)
            raise
        if recorded is not None:
            self._outlet.committed(recorded)
        start_again([work for work in works if work not in saved and work.state == "done"])


def start_again(works: list[Work]) -> None:
    """What failed has failed; all else is undone, and runs again."""
    for work in works:
        if work.state in ("done", "folded"):
            work.move("undone")


def scatter(works: list[Work], exc: BaseException) -> None:
    """A transaction is lost, and with it what was done: among others everyone starts again alone; one alone has used
    up a try, if there was one."""
    for work in works:
        if work.state in ("done", "new", "folded"):
            work.fail(exc)
            work.scattered = work.counted = len(works) > 1
            if not work.scattered:
                work.handler_failed = True
                work.tries = max(work.tries + 1, work.ctx._attempt if work.ctx is not None else 0)
