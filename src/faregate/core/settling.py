"""Settling: telling the transport what became of messages, once that is decided.

Rules kept here:
- Nothing is settled before what became of it is committed; without a store, before what it sends is published.
- What was kept to decide it (a token, a dead letter that is replayed) goes first: the next copy finds the rest.
- A delivery that is someone else's by now is lost. One whose store is away comes again; it is decided all the same.
- What the filter does not take needs no commit, since a copy is filtered in the same way. Where nobody would know of it
  the ledger has a row, and the dead letter that it is a replay of is resolved: both before it is settled. Whoever asked
  by it is told.
"""

import logging

from faregate.core.dedup.business_key import BusinessKey
from faregate.core.dedup.ledger import filtered_row
from faregate.core.endings import Endings
from faregate.core.last_resort import LastResort
from faregate.core.node_store import NodeStore
from faregate.core.outlet import Outlet
from faregate.core.replies import FILTERED
from faregate.core.states import DECIDED, State
from faregate.core.unit import TRANSACTION_LOST
from faregate.core.work import Work
from faregate.errors import Permanent, StaleLock
from faregate.message import REPLY_TO
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.queue import Outcome, Together, is_together
from faregate.ports.store import Transaction

log = logging.getLogger("faregate.bus")


class Settling:
    def __init__(
        self,
        node: str,
        endings: Endings,
        last_resort: LastResort,
        outlet: Outlet,
        store: NodeStore | None,
        business_key: BusinessKey | None,
        clock: Clock,
        *,
        notes_filtered: bool,
    ) -> None:
        """`notes_filtered`: what the filter does not take has a row in the ledger."""
        self._node = node
        self._notes_filtered = notes_filtered
        self._endings = endings
        self._outcomes = endings.outcomes
        self._finishes = endings.has_after
        self._last_resort = last_resort
        self._outlet = outlet
        self._store = store
        self._business_key = business_key
        self._clock = clock

    async def settle_all(self, works: list[Work]) -> None:
        """Settle those that are decided. What they send is on its way already."""
        alone = len(works) < 2 or self._finishes or self._business_key is not None or faults.hook is not None
        if not alone and is_together(first := works[0].delivery):
            works = self._settle_together(first, works)
        for work in works:
            if work.state == "duplicate":
                work.dedup.doubt(work)
            if work.state not in DECIDED:
                continue
            try:
                if work.state == "duplicate" or work.attempt_id is not None:
                    await self._conclude(work)
                if faults.hook is not None:
                    await faults.hook("bus.before-settle")
                outcome = _outcome(work)
                await work.delivery.settle(outcome)
                work.move("settled")
                if self._finishes or faults.hook is not None:
                    await self._endings.finish(work.delivery, work.ctx, outcome)
                else:  # a coroutine less for every message
                    self._outcomes[outcome] += 1
                work.ctx = None
            except StaleLock as exc:
                work.move("lost")
                self._endings.lost(work.delivery, exc)
            except TRANSACTION_LOST as exc:
                # What happened is committed; a later copy finds that, and goes on from there.
                log.warning("%s is not settled yet: %s", work.envelope, exc)
                await self._last_resort.put_off(work)
            if self._business_key is not None:
                self._business_key.forget(work)

    async def settle_filtered(self, works: list[Work]) -> None:
        """The same for those that the filter does not take."""
        noted = [work for work in works if self._notes_filtered or work.envelope.replay]
        if self._store is not None and noted:
            try:
                await self._store.commit(lambda transaction: self._note_filtered(transaction, noted))
            except TRANSACTION_LOST as exc:
                log.warning("%s and %d more are not settled yet: %s", noted[0].envelope, len(noted) - 1, exc)
                for work in noted:
                    await self._last_resort.put_off(work)
        filtered = [work for work in works if work.state == "filtered"]
        await self.settle_all(filtered)
        if asked := [work for work in filtered if REPLY_TO in work.envelope.headers]:
            await self._last_resort.answer(
                asked, FILTERED, Permanent("the filter (where=) of its handler leaves it out")
            )

    async def _note_filtered(self, transaction: Transaction, works: list[Work]) -> None:
        by_id = {work.message_id: work for work in works}
        replays = [each for each, work in by_id.items() if work.envelope.replay]
        if replays:
            await transaction.resolve(self._node, replays, self._clock.time())
        if self._notes_filtered:
            known = await transaction.known(self._node, list(by_id))  # handled before, or a dead letter that is open
            rows = [filtered_row(work) for each, work in by_id.items() if each not in known]
            await transaction.record(self._node, rows)

    def _settle_together(self, first: Together, works: list[Work]) -> list[Work]:
        """The same, all at once, for those whose settling is all that is left. Returns the others."""
        plain = [each for each in works if each.state in _PLAIN and each.attempt_id is None]
        outcomes: list[Outcome] = ["handled" if each.ctx and each.ctx._completed else _outcome(each) for each in plain]
        found = first.settle_all([work.delivery for work in plain], outcomes)
        for work, outcome, stale in zip(plain, outcomes, found, strict=True):
            if stale is None:
                work.move("settled")
                self._outcomes[outcome] += 1
                work.ctx = None
            else:
                work.move("lost")
                self._endings.lost(work.delivery, stale)
        return [] if len(plain) == len(works) else [work for work in works if work.state in DECIDED]

    async def _conclude(self, work: Work) -> None:
        """Before a duplicate, or one that has a token, is settled."""
        if work.state == "duplicate":
            await self._outlet.was_handled(self._node, work.message_id)
        if work.attempt_id is not None:
            await work.dedup.release(work)
        if work.in_ledger and work.envelope.replay and self._store is not None:
            # Another copy of it was handled after all: its dead letter is settled with that.
            ids, now = [work.message_id], self._clock.time()
            await self._store.commit(lambda transaction: transaction.resolve(self._node, ids, now))


_PLAIN: frozenset[State] = frozenset({"done", "filtered"})
"""Nothing else is to be done for them but to settle, unless they have a token."""


def _outcome(work: Work) -> Outcome:
    if work.state == "done":
        return "handled" if work.ctx is not None and work.ctx._completed else "skipped"
    if work.state == "filtered":
        return "filtered"
    return "dead" if work.state == "folded" else "duplicate"
