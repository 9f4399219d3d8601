"""The handling core: one way through a handler, for the bus and for Spark, with a store and without.

    look up, admit -> run, message after message in one transaction -> record -> commit -> settle
                       `-- failed --> leaves the batch, runs alone with its tries -> redeliver later, or dead letter

What differs is handed in: where messages come from (`feed.py`), how copies are recognised (`dedup/`), where what is
sent goes (`outlet.py`), and the store. The states of a message, and who follows whom, are in `states.py`.

Rules kept here:
- Nothing after the commit can change what became of a message; nothing before it has happened.
- A message that failed, was delivered before, or shared a transaction that failed, runs alone: it can hurt nobody else.
- A commit whose outcome is unknown is tried again; the look-up then finds out what it was.
- Giving up is a commit too: the dead letter is in the store before the delivery is settled.
- Without a store there is no transaction: handlers run again after a crash, and what they send keeps its ids.

Longer than most files: these are the steps of one walk, and each relies on the state that the others leave behind.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any

from faregate.core.alarms import Alarms
from faregate.core.dedup import Dedup, by_dedup
from faregate.core.dedup.business_key import BusinessKey
from faregate.core.dedup.ledger import Ledger, LookUp
from faregate.core.dedup.tokens import Tokens
from faregate.core.endings import Endings
from faregate.core.feed import Feed
from faregate.core.handler_run import HandlerRun
from faregate.core.last_resort import LastResort
from faregate.core.node_store import NodeStore
from faregate.core.outlet import Outlet, PublishAtOnce, Recorded
from faregate.core.pace import Pace
from faregate.core.pipeline import is_retried
from faregate.core.reading import Reader
from faregate.core.sender import Sender
from faregate.core.states import DECIDED, RUNNING, UNDECIDED
from faregate.core.unit import TRANSACTION_LOST, Home, TransactionEnded, UnitOfWork
from faregate.core.verdict import failure_of, first_line
from faregate.core.work import Spoiled, Work
from faregate.errors import CommitUnknown, Expired, Permanent, StaleLock
from faregate.ids import message_ids
from faregate.message import set_out_at
from faregate.node.node import Node
from faregate.node.policy import Serial
from faregate.node.subscription import Subscription
from faregate.ports import faults
from faregate.ports.cancellation import finish
from faregate.ports.clock import Clock
from faregate.ports.queue import Delivery, Outcome, Together, is_together
from faregate.ports.store import Transaction

log = logging.getLogger("faregate.bus")

PutBack = Callable[[Sequence[Delivery], Sequence[Delivery]], None]
"""Takes what has not begun, and is seen through another time; and what has ended, before the others of its batch."""

_MOST_OUTPUTS, _MOST_OUTPUT_BYTES = 1_000, 4 << 20
"""A transaction with more outgoing messages than this takes no further message."""


class Handling:
    """The messages of one subscription, from the delivery to how they ended."""

    def __init__(
        self,
        subscription: Subscription,
        node: Node,
        sender: Sender,
        feed: Feed,
        *,
        store: NodeStore | None,
        clock: Clock,
        alarms: Alarms,
        pool: Executor,
        body_limit: int,
    ) -> None:
        self.subscription = subscription
        self.paused = False
        self.put_off = False
        """A message of a serial subscription waits for a later try; what was fetched behind it has to go back."""
        self.put_back: PutBack | None = None
        """Told what of a batch goes on without the rest of it. None: nothing does."""
        self._serial = isinstance(subscription.order, Serial)
        self._node = node.name
        self._message_id = message_ids(node.name)
        self._clock = clock
        self._feed = feed
        self._reader = Reader(subscription, alarms, body_limit)
        self._endings = Endings(subscription, node, alarms)
        self.outcomes = self._endings.outcomes
        self._finishes = self._endings.has_after
        self._expires = subscription.expires is not None
        self._outlet: Outlet = PublishAtOnce(sender) if store is None else store.outbox
        self._runner = HandlerRun(subscription, node, sender, has_store=store is not None, clock=clock, pool=pool)
        # --- how copies are recognised ---
        self._store = store
        self._dedup = self._tokens = Dedup()
        self._look_up: LookUp | None = None
        self._business_key: BusinessKey | None = None
        if store is not None:
            young, recognises = store.young_seconds, subscription.dedup != "off"
            self._look_up = LookUp(store.store, node.name, clock, alarms, young, recognises=recognises)
            self._dedup = Ledger(node.name, alarms, clock, young) if recognises else self._dedup
            # Whatever the mode is by now: if the sender made a token, it has to go, even if the message is unreadable.
            self._tokens = store.claims or Tokens(store)
            if subscription.business_key is not None:
                self._business_key = BusinessKey(
                    store, node.name, subscription.name, subscription.business_key, subscription.claim
                )
        self._last_resort = LastResort(
            subscription, self._endings, feed, store, self._business_key, self.redeliver, clock
        )
        self._one_by_one = self._tokens.one_by_one or self._business_key is not None
        """Whether each message is claimed in a commit of its own, and so comes by itself."""
        # --- batches ---
        self._pace = Pace(feed.batch_seconds)
        self._failing: dict[Delivery, int] = {}
        """Those that come again: alone, as they failed among others, or because their batch was slow. How often they
        failed."""
        self._sends = False
        """Whether the handlers of the last transaction sent anything. Only then they wait while others are not sent."""
        self._units: set[UnitOfWork] = set()
        """The transactions at work."""
        self._home: Home | None = None
        """What they share. Made once: on Python 3.11 it is a system call to ask for the event loop."""
        self._savepoints = store is None or not store.store.dear_savepoints
        """Whether each message of a batch has one in any case."""

    @property
    def has_store(self) -> bool:
        return self._store is not None

    @property
    def one_writer(self) -> bool:
        return self._store is not None and self._store.store.one_writer

    # --- for the engine --------------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether nothing more may begin."""
        return self.paused or self.put_off

    def pause(self) -> None:
        """Let nothing more begin."""
        self.paused = True
        self._outlet.look_again()

    @property
    def batch(self) -> int:
        """How many are best handled together."""
        return 1 if self._one_by_one or self._runner.opens_first else self._pace.batch

    def current(self, deliveries: list[Delivery]) -> Delivery:
        """Which of those that are being handled together is being handled."""
        running = (unit.current.delivery for unit in self._units if unit.current is not None)
        return next((delivery for delivery in running if delivery in deliveries), deliveries[0])

    async def handle(self, deliveries: list[Delivery]) -> list[Delivery]:
        """See the deliveries to their end, but for those that it returns: they shall come again, each alone."""
        try:
            if len(deliveries) > 1:
                return await self._handle_many(deliveries)
            [delivery] = deliveries
            tries = self._failing.pop(delivery, None)
            if tries:
                await self._clock.sleep(self.subscription.retry.wait(tries))
            elif tries is None and not self._start(delivery):
                return []
            return await self._see_through(self._works(deliveries, tries or 0))
        except BaseException:
            for delivery in deliveries:
                self._failing.pop(delivery, None)
            raise

    async def handle_again(self, delivery: Delivery, tries: int) -> None:
        """See a message to its end whose handler has failed so often already, elsewhere."""
        delivery.start()
        self._failing[delivery] = tries
        await self.handle([delivery])

    async def fail(self, delivery: Delivery, exc: BaseException) -> None:
        """The tries of a message are used up, elsewhere."""
        delivery.start()
        [work] = self._works([delivery])
        if work.state == "new":
            work.fail(exc)
        await self._out_of_tries(work)

    async def give_back(self, delivery: Delivery, *, begun: bool = False) -> None:
        """It goes back to its place."""
        begun = bool(self._failing.pop(delivery, 0)) or begun
        try:
            await delivery.release(begun=begun)
        except StaleLock as exc:
            log.warning("%s: %s; it is delivered again", self.subscription, exc)

    async def redeliver(self, delivery: Delivery, delay: float, *, counted: bool) -> None:
        """It comes again later; in a serial subscription what is behind it waits for that."""
        await delivery.redeliver(delay, counted=counted)
        self.put_off = self._serial

    def tell_dead(self, delivery: Delivery, reason: str, error: str) -> Coroutine[Any, Any, None]:
        """The transport made a dead letter of it, and no handler sees it: it expired, or its deliveries are used up.

        It is counted and told of at once; what is returned runs the `after` middlewares.
        """
        self.outcomes["dead"] += 1
        self._endings.dead_lettered(delivery, reason, error)
        ctx = None
        if self._endings.has_after:
            try:
                ctx = self._reader.open(Work(delivery, self._node))
            except Exception as exc:
                log.debug("%s cannot be read: %s", delivery.envelope, first_line(exc))
        why = Expired(error) if reason == Expired.reason else Permanent(f"{reason}: {error}")
        return self._endings.run_after(delivery, ctx, "dead", why)

    # --- batches ---------------------------------------------------------------------------------------------

    async def _handle_many(self, deliveries: list[Delivery]) -> list[Delivery]:
        # One that was delivered before may be what kills us, so it comes alone.
        again = [] if self._serial else [delivery for delivery in deliveries if delivery.redelivered]
        failing = self._failing
        begun = [each for each in deliveries if failing.pop(each, None) is not None] if failing else []
        if known := {*again, *begun}:
            deliveries = [delivery for delivery in deliveries if delivery not in known]
        works = self._works(begun + self._start_all(deliveries))
        if self._serial:
            for group in _groups(works, copies=self._store is not None):
                again += await self._see_through(group)
            return again
        if self._store is not None:  # copies of one message must not meet in one transaction
            first = {work.message_id: work for work in reversed(works)}
            if len(first) < len(works):
                again += [self._leave(work) for work in works if first[work.message_id] is not work]
                works = list(reversed(first.values()))
        return again + await self._see_through(works)

    def _leave(self, work: Work) -> Delivery:
        """It has begun, and is seen through another time."""
        work.move("again")
        self._failing[work.delivery] = work.tries if work.handler_failed else 0
        return work.delivery

    def _start_all(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Tries begin; without those that are someone else's by now."""
        if not deliveries or not is_together(first := deliveries[0]):
            return [delivery for delivery in deliveries if self._start(delivery)]
        found = first.start_all(deliveries)
        for stale in filter(None, found):
            self._endings.lost(stale)
        return [delivery for delivery, stale in zip(deliveries, found, strict=True) if stale is None]

    def _start(self, delivery: Delivery) -> bool:
        """A try begins; False when the delivery is someone else's by now."""
        try:
            delivery.start()
        except StaleLock as exc:
            self._endings.lost(exc)
            return False
        return True

    def _works(self, deliveries: list[Delivery], tries: int = 0) -> list[Work]:
        """Read them, and say how copies of them are recognised."""
        works = []
        now = 0.0 if self._store is None else self._clock.time()
        for delivery in deliveries:
            work = Work(delivery, self._node)
            try:
                work.ctx = self._reader.open(work)
            except Exception as exc:
                work.fail(exc)
            else:
                if tries:
                    work.ctx._attempt = work.tries = tries
            if self._store is not None:
                self._enlist(work, now)
            works.append(work)
        return works

    def _enlist(self, work: Work, now: float) -> None:
        """How copies of it are recognised."""
        envelope = work.envelope
        work.set_out_at = began = set_out_at(envelope)
        work.at = now if now > began else began
        dedup = self._dedup
        if envelope.attempt_id is not None:
            work.attempt_id, dedup = envelope.attempt_id, self._tokens
        if work.ctx is None:
            work.dedup = dedup
            return
        work.message_id = self._message_id(envelope.publication_id)
        dedup.enlist(work)
        if self._runner.opens_first:
            work.opens_first = True

    def _next_round(self, work: Work) -> Work:
        """It has not run in this one, or nothing of that is left."""
        if work.ctx is None or work.ctx._ended:
            return self._once_more(work)
        work.marked = False
        return work

    def _once_more(self, work: Work) -> Work:
        work.move("again")
        return self._works([work.delivery], work.tries)[0]

    async def _see_through(self, works: list[Work]) -> list[Delivery]:
        """See these messages to their end, as many of them as possible in one transaction.

        Returns those that failed among others and have tries left. A serial subscription returns nothing: it waits for
        them here, since nothing may go on meanwhile.
        """
        again: list[Delivery] = []
        spoiled = False
        while works:
            if self._sends:
                await self._outlet.room(lambda: self.stopped)
            if self.stopped:
                for work in works:
                    work.move("released")
                    await self.give_back(work.delivery, begun=work.tries > 0)
                return again
            unit = UnitOfWork(self._home or self._settle_in(), works, self._savepoints or spoiled)
            self._units.add(unit)
            try:
                if self._store is not None:
                    spoiled = await self._run_with_store(unit, works)
                else:
                    await (self._run_handlers if unit.alone else self._run_without_store)(unit, works)
                    if self._sends:
                        await self._outlet.record(None, self._node, [work for work in works if work.state == "done"])
            finally:
                self._units.discard(unit)
                unit.works = ()  # no cycles: what is done goes at once, without the garbage collector
            await self._settle_all(works)
            works = [work for work in works if work.state in UNDECIDED]
            if works:
                works = await self._what_is_left(works, again, alone=unit.alone, spoiled=spoiled)
        return again

    def _settle_in(self) -> Home:
        store = None if self._store is None else self._store.store
        self._home = Home(store, self._mark, self._reader.left_behind)
        return self._home

    async def _what_is_left(
        self, works: list[Work], again: list[Delivery], *, alone: bool, spoiled: bool
    ) -> list[Work]:
        """Of one transaction: those that have not run yet, or not yet with success."""
        for work in works:
            if work.state != "failed":
                continue
            if not self._has_tries_left(work):
                await self._out_of_tries(work)
            elif self._serial or alone:
                if work.handler_failed:
                    await self._clock.sleep(self.subscription.retry.wait(work.tries))
                await self._see_through([self._once_more(work)])
            else:
                again.append(self._leave(work))
        works = [work for work in works if work.state == "new"]
        stay = self._serial or spoiled or self.stopped or len(works) <= self._pace.batch
        if self.put_back is None or stay:
            return [self._next_round(work) for work in works]
        self.put_back([self._leave(work) for work in works], ())  # they take longer than was thought
        return []

    async def _run_with_store(self, unit: UnitOfWork, works: list[Work]) -> bool:
        assert self._look_up is not None
        try:
            await self._look_up.look_up(works)
            await self._admit(works)
            await (self._run_handlers if unit.alone else self._run_watched)(unit, works)
            await self._commit(unit, works)
        except BaseException as exc:
            await unit.abandon()
            if isinstance(exc, CommitUnknown | asyncio.CancelledError):
                self._outlet.doubt()
            if isinstance(exc, TransactionEnded):
                await self._after_misuse(works)
            elif isinstance(exc, Spoiled) or (
                unit.shared and isinstance(exc, Exception) and not isinstance(exc, TRANSACTION_LOST)
            ):  # what somebody wrote may have been refused with the commit
                _start_again(works)
                return True
            elif (failure := failure_of(exc)) is not None:  # lost, or refused at the commit: nothing has happened
                self._scatter(works, failure)
            else:
                raise
        return False

    async def _run_without_store(self, unit: UnitOfWork, works: list[Work]) -> None:
        """What handlers did cannot be undone: those that have ended go out whatever becomes of the others of a batch,
        and before long."""
        try:
            await self._run_watched(unit, works)
        except asyncio.CancelledError:  # and only then, or what is on its way would go out twice
            await finish(self._hand_on([work for work in works if work.state == "done"]))
            raise

    async def _hand_on(self, done: list[Work]) -> None:
        """Publish what those sent, and settle them."""
        await self._outlet.record(None, self._node, done)
        await self._settle_all(done)

    async def _run_watched(self, unit: UnitOfWork, works: list[Work]) -> None:
        """Run the handlers. The others do not wait for one that takes its time, where there are lanes to go on in."""
        if self.put_back is None:
            return await self._run_handlers(unit, works)
        self._watch(unit, works, None)
        try:
            await self._run_handlers(unit, works)
        finally:
            unit.watch.cancel()
            if unit.parting is not None:
                await finish(unit.parting)

    def _watch(self, unit: UnitOfWork, works: list[Work], before: Work | None) -> None:
        """Look again and again whether the same message is at hand as when we looked `before`."""
        loop = unit.home.loop
        if before is not None and before is unit.current and not unit.is_used and not self.stopped:
            unit.parting = loop.create_task(self._part(unit, works, before))
        else:
            unit.watch = loop.call_later(self._feed.batch_seconds, self._watch, unit, works, unit.current)

    async def _part(self, unit: UnitOfWork, works: list[Work], at_hand: Work) -> None:
        """The handler at hand takes its time. It goes on by itself, with what failed; what is decided is committed and
        settled without it, and what has not begun goes back to the lanes.

        Once it has used the transaction, this cannot be: what it wrote there is not to be told from the rest.
        """
        if at_hand is not unit.current or unit.is_used:
            return  # it has gone on meanwhile
        decided = [work for work in works if work.state in DECIDED]
        unbegun = [] if self._serial else [work for work in works if work.state == "new" and work is not at_hand]
        leaving = {*decided, *unbegun}
        works[:] = [work for work in works if work not in leaving]
        deliveries = [self._leave(work) for work in unbegun]
        apart = unit.part(works, decided)
        if self._store is None:
            await self._outlet.record(None, self._node, [work for work in decided if work.state == "done"])
        else:
            await self._commit_apart(apart, decided, [*works, *unbegun])
        await self._settle_all(decided)
        works += [work for work in decided if work.state == "failed"]
        ended = [work.delivery for work in decided if work.state != "failed"]
        if self.stopped:  # the lanes may be closed by now
            for delivery in deliveries:
                await self.give_back(delivery)
            ended, deliveries = ended + deliveries, []
        if self.put_back is not None:
            self.put_back(deliveries, ended)

    async def _commit_apart(self, apart: UnitOfWork, decided: list[Work], others: list[Work]) -> None:
        """The marks of the others leave the transaction first: they will have one of their own."""
        marked = [work.message_id for work in others if work.marked]
        for work in others:
            work.marked = False
        try:
            if marked and apart.transaction is not None:
                await apart.transaction.unrecord(self._node, marked)
            await self._commit(apart, decided)
        except BaseException as exc:
            await apart.abandon()
            if isinstance(exc, CommitUnknown | asyncio.CancelledError):
                self._outlet.doubt()
            if not isinstance(exc, Exception | Spoiled):
                raise
            self._scatter(decided, exc)
            for work in decided:  # if its mark is there after all, it is not for the next transaction to remove
                work.marked = False
        finally:
            apart.works = ()

    async def _admit(self, works: list[Work]) -> None:
        """Ask the tokens and the business key."""
        for dedup, group in by_dedup([work for work in works if work.state == "new"]):
            await dedup.admit(group)
        if self._business_key is not None:
            for work in works:
                if work.state == "new":
                    await self._business_key.admit(work)

    async def _mark(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """First in every transaction: whoever comes second with a message learns it here."""
        running = [work for work in works if work.state in RUNNING]
        await self._feed.join(transaction, running)
        for dedup, group in by_dedup([work for work in running if work.state in RUNNING]):
            await dedup.mark(transaction, group)
        if self._business_key is not None:
            await self._business_key.mark(transaction, [work for work in running if work.state in RUNNING])

    # --- handlers --------------------------------------------------------------------------------------------

    async def _run_handlers(self, unit: UnitOfWork, works: list[Work]) -> None:
        """Run the messages one after another. The rest stays new: behind a failure in a serial subscription, because
        enough is sent in this transaction or it took long enough, or because nothing more may begin."""
        started = self._pace.start()
        last = works[-1]
        until = 0.0 if unit.alone else self._clock.monotonic() + self._pace.batch_seconds
        ran = rows = size = 0
        for work in tuple(works):  # some may leave meanwhile
            if work.state != "new":
                continue
            if self.stopped and not self._one_by_one:  # what has claimed goes on
                break
            if (self._expires or work.envelope.expires_at is not None) and not work.tries and work.delivery.expired:
                work.fail(Expired("its time was over before its handler could begin"))
                continue
            ran += 1
            if not await self._runner.run(unit, work) and self._serial:
                break
            if work.sent:
                rows += len(work.sent)
                for envelope in work.sent:
                    size += len(envelope.body)
                if rows >= _MOST_OUTPUTS or size >= _MOST_OUTPUT_BYTES:
                    break
            if work is not last and self._clock.monotonic() - unit.waited > until:  # slower than was thought
                break
        self._sends = rows > 0
        if ran:
            self._pace.note(started, ran, unit.waited, len(self._units))

    # --- the commit ------------------------------------------------------------------------------------------

    async def _commit(self, unit: UnitOfWork, works: list[Work]) -> None:
        """Commit what succeeded, with everything that goes with it."""
        done = [work for work in works if work.state == "done"]
        folded = [work for work in works if work.state == "folded"]
        if not done and not folded:
            await unit.abandon()
            return
        transaction = await unit.open()
        await unit.flush(wait=False)
        recorded = await self._record(transaction, works, folded)
        try:
            await unit.commit()
        except BaseException:
            if recorded is not None:
                self._outlet.rolled_back(recorded)
            raise
        if recorded is not None:
            self._outlet.committed(recorded)

    async def _record(self, transaction: Transaction, works: list[Work], folded: list[Work]) -> Recorded | None:
        """What is committed beside the handlers' own writes.

        A dead letter that is there by now is resolved: of a replay, or of another copy that was given up meanwhile.
        """
        for dedup, group in by_dedup([work for work in works if work.state in UNDECIDED]):
            await dedup.unmark(transaction, group)
        for work in folded:
            await transaction.fold(self._node, work.message_id)
        for dedup, group in by_dedup([work for work in works if work.state == "done"]):
            await dedup.commit(transaction, group)
        done = [work for work in works if work.state == "done"]
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

    # --- settling --------------------------------------------------------------------------------------------

    async def _settle_all(self, works: list[Work]) -> None:
        """It is decided: tell the transport. What they send is on its way already."""
        if len(works) > 1 and is_together(works[0].delivery) and not self._finishes and faults.hook is None:
            works = self._settle_together(works[0].delivery, works)
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
                    self.outcomes[outcome] += 1
                work.ctx = None
            except StaleLock as exc:
                work.move("lost")
                self._endings.lost(exc)
            except TRANSACTION_LOST as exc:
                # What happened is committed; a later copy finds that, and goes on from there.
                log.warning("%s is not settled yet: %s", work.envelope, exc)
                await self._last_resort.put_off(work)
            if self._business_key is not None:
                self._business_key.forget(work)

    def _settle_together(self, first: Together, works: list[Work]) -> list[Work]:
        """The same, all at once, for those whose settling is all that is left. Returns the others."""
        plain = [each for each in works if each.state == "done" and each.attempt_id is each.business_key is None]
        outcomes = [_outcome(work) for work in plain]
        found = first.settle_all([work.delivery for work in plain], outcomes)
        for work, outcome, stale in zip(plain, outcomes, found, strict=True):
            if stale is None:
                work.move("settled")
                self.outcomes[outcome] += 1
                work.ctx = None
            else:
                work.move("lost")
                self._endings.lost(stale)
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

    # --- failures --------------------------------------------------------------------------------------------

    def _has_tries_left(self, work: Work) -> bool:
        """Whether a failed message runs again here, alone."""
        if work.ctx is None or work.error is None or work.tries > self.subscription.retry.times:
            return False
        if work.scattered:  # the transaction of others
            return True
        return work.handler_failed and is_retried(work.error)

    def _scatter(self, works: list[Work], exc: BaseException) -> None:
        """A transaction is lost, and with it what was done: among others everyone starts again alone; one alone has
        used up a try, if there was one."""
        for work in works:
            if work.state in ("done", "new", "folded"):
                work.fail(exc)
                work.scattered = len(works) > 1
                if not work.scattered:
                    work.handler_failed = True
                    work.tries = max(work.tries + 1, work.ctx._attempt if work.ctx is not None else 0)

    async def _out_of_tries(self, work: Work) -> None:
        """Its tries here are used up."""
        if await self._last_resort.end(work):
            return
        if work.ctx is not None:  # another copy was handled: that will be found
            await self._see_through([self._once_more(work)])
        else:
            work.move("known")
            await self._settle_all([work])

    async def _after_misuse(self, works: list[Work]) -> None:
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
        _start_again([work for work in works if work not in saved and work.state == "done"])


def _outcome(work: Work) -> Outcome:
    if work.state == "done":
        return "handled" if work.ctx is not None and work.ctx._completed else "skipped"
    return "dead" if work.state == "folded" else "duplicate"


def _start_again(works: list[Work]) -> None:
    """What failed has failed; all else is undone, and runs again."""
    for work in works:
        if work.state in ("done", "folded"):
            work.move("undone")


def _groups(works: list[Work], *, copies: bool) -> list[list[Work]]:
    """Split into transactions: one that was delivered before may be what kills us, so it runs alone; `copies` of one
    message must not meet in one transaction."""
    groups: list[list[Work]] = []
    seen: set[str] = set()
    shared = False
    for work in works:
        alone = work.delivery.redelivered
        if alone or not shared or (copies and work.message_id in seen):
            groups.append([])
            seen = set()
        groups[-1].append(work)
        if copies:
            seen.add(work.message_id)
        shared = not alone
    return groups
