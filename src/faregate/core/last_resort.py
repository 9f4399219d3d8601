"""What becomes of a message whose tries here are used up: again later, or a dead letter.

Rules kept here:
- A dead letter is in the store before its delivery is settled, and what the node sends about it with it. Without a
  store the transport keeps it.
- A message whose other copy was handled meanwhile is a duplicate, and no dead letter.
- Whoever asked by it is told so, in the commit of the dead letter.
- While the store is away the message is put off, and no try of it is used up.
- While the kill switch is open, what failed for that goes back to its place, and no try of it is used up.
"""

import logging
from collections.abc import Awaitable, Sequence
from typing import Literal, Protocol

from faregate.core.context import Ending
from faregate.core.dead_letter import dead_letter
from faregate.core.dedup.business_key import BusinessKey
from faregate.core.endings import Endings
from faregate.core.escalation import Escalation
from faregate.core.feed import Feed
from faregate.core.node_store import NodeStore
from faregate.core.sealing import outbox_row
from faregate.core.sender import Sender
from faregate.core.unit import TRANSACTION_LOST, TransactionEnded
from faregate.core.verdict import Verdict, describe_error, first_line
from faregate.core.work import Work
from faregate.errors import FaregateError, StaleLock, UnknownToken
from faregate.node.subscription import Subscription
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Delivery
from faregate.ports.store import Transaction

log = logging.getLogger("faregate.bus")

_STORE_DOWN_SECONDS = 10.0


class Later(Protocol):
    def __call__(self, delivery: Delivery, delay: float, *, counted: bool, behind: bool = False) -> Awaitable[None]: ...


class LastResort:
    def __init__(
        self,
        subscription: Subscription,
        endings: Endings,
        feed: Feed,
        sender: Sender,
        store: NodeStore | None,
        business_key: BusinessKey | None,
        redeliver: Later,
        clock: Clock,
        escalation: Escalation,
    ) -> None:
        self._node = subscription.node
        self._handler = subscription.name
        self._sender = sender
        self._failures = subscription.failures
        self._endings = endings
        self._feed = feed
        self._store = store
        self._business_key = business_key
        self._redeliver = redeliver
        self._clock = clock
        self._escalation = escalation

    async def end(self, work: Work) -> bool:
        """See a failed message to its end. False: another copy of it was handled, so it still is what it was."""
        error = work.error
        assert error is not None
        outcome: Ending = "redelivered"
        try:
            if self._business_key is not None:
                await self._business_key.fail(work)
            verdict = self._judge(work, error)
            if verdict.delay is not None:
                await self._redeliver(work.delivery, verdict.delay, counted=verdict.counted, behind=verdict.behind)
                work.move("put off")
            elif (end := await self._dead_letter(work, verdict.reason)) == "dead":
                work.move("dead-lettered")
                self._endings.dead_lettered(work.delivery, verdict.reason, first_line(error))
                outcome = "dead"
            elif end == "later":
                await self.put_off(work)
            else:
                return False
        except StaleLock as exc:
            work.move("lost")
            self._endings.lost(work.delivery, exc)
        except TRANSACTION_LOST as exc:
            log.warning("%s waits for its store: %s", work.envelope, exc)
            await self.put_off(work)
        if work.state != "lost":
            await self._endings.finish(work.delivery, work.ctx, outcome, error)
        return True

    def is_next(self, delivery: Delivery, error: BaseException) -> bool:
        """Whether it becomes a dead letter now."""
        return self._feed.judge(delivery, error, self._failures.of(error)).delay is None

    async def send_back(self, work: Work, delay: float | None) -> None:
        """The kill switch is open: it goes back to its place, or comes again later, without using up a try."""
        try:
            if self._business_key is not None:
                await self._business_key.fail(work)
            if delay is None:
                await work.delivery.release()
                work.move("released")
            else:
                await self._redeliver(work.delivery, delay, counted=False)
                work.move("put off")
        except StaleLock as exc:
            work.move("lost")
            self._endings.lost(work.delivery, exc)
        except TRANSACTION_LOST as exc:
            log.warning("%s waits for its store: %s", work.envelope, exc)
            await self.put_off(work)

    def _judge(self, work: Work, exc: BaseException) -> Verdict:
        if work.ctx is not None:
            work.ctx.error = exc
        verdict = self._feed.judge(work.delivery, exc, self._failures.of(exc))
        self._endings.failed(work, verdict, exc)
        return verdict

    async def put_off(self, work: Work) -> None:
        """The store is away: come again later, without using up a try."""
        try:
            await self._redeliver(work.delivery, _STORE_DOWN_SECONDS, counted=False)
        except StaleLock as exc:
            work.move("lost")
            self._endings.lost(work.delivery, exc)
        else:
            work.move("put off")

    async def _dead_letter(self, work: Work, reason: str) -> Literal["dead", "handled", "later"]:
        """Make it a dead letter. `handled`: another copy has come to an end meanwhile.
        `later`: the store does not take it now, so the decision has to wait."""
        assert work.error is not None
        error = describe_error(work.error)
        letter = dead_letter(self._node, work.message_id, work.delivery, reason, error, self._clock.time())
        if self._store is None:
            await self._escalation.publish(letter)
            await work.delivery.dead_letter(reason, error)
            await self.answer([work], reason, work.error)
            return "dead"
        rows = await self._escalation.rows(letter)
        told = self._sender.seal_failure(work, self._handler, reason, work.error)
        if told is not None:
            rows.append(outbox_row(self._node, told, work.message_id))
        try:
            if not await self._store.commit_sending(lambda each: self._add_dead(each, work, letter), rows):
                return "handled"
        except TRANSACTION_LOST as exc:
            log.warning("the dead letter of %s cannot be written now: %s", letter, exc)
            return "later"
        await work.dedup.dead_lettered(work)
        await work.delivery.settle("dead")
        return "dead"

    async def answer(self, works: Sequence[Work], reason: str, exc: BaseException) -> None:
        """Tell whoever asked by these messages that no handler answers. Nothing keeps that: what cannot be sent now is
        not."""
        sealed = [self._sender.seal_failure(work, self._handler, reason, exc) for work in works]
        told = [each for each in sealed if each is not None]
        if not told:
            return
        try:
            await self._sender.publish_sealed(told)
        except FaregateError as error:
            log.warning("whoever asked by %s, and %d more, is not told (%s): %s", told[0], len(told) - 1, reason, error)

    async def _add_dead(self, transaction: Transaction, work: Work, letter: DeadLetter) -> bool:
        """False: another copy has come to an end meanwhile."""
        await self._feed.dead_letter(transaction, work)
        # After these there is nothing to be learned from what is there.
        certain = isinstance(work.error, UnknownToken | TransactionEnded)
        if not certain and not await work.dedup.is_unhandled(transaction, work):
            return False
        await transaction.add_dead(letter)
        if faults.hook is not None:
            await faults.hook("unit.before-commit")
        return True
