"""The handling core: one way through a handler, for the bus and for Spark, with a store and without.

    filter, look up, admit -> run, message after message in one transaction -> record -> commit -> settle
      `-- settle               `-- failed --> leaves the batch, runs alone -> redeliver later, or dead letter

What differs is handed in: where messages come from (`feed.py`), how copies are recognised (`dedup/`), where what is
sent goes (`outlet.py`), and the store. The states of a message, and who follows whom, are in `states.py`. This file is
the walk; its longer steps have files of their own: `recognition.py`, `handler_run.py`, `parting.py`, `committing.py`,
`settling.py`, `last_resort.py`.

Rules kept here:
- Nothing after the commit can change what became of a message; nothing before it has happened.
- A message that failed, was delivered before, or shared a transaction that failed, runs alone: it can hurt nobody else.
- A commit whose outcome is unknown is tried again; the look-up then finds out what it was.
- Dead-lettering is a commit too: the dead letter is in the store before the delivery is settled.
- Without a store there is no transaction: handlers run again after a crash, and what they send keeps its ids.
- While the kill switch is open nothing begins but its trial, nothing is tried again, and what fails goes back.
"""

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import Executor
from typing import Any, NamedTuple

from faregate.core import at_hand
from faregate.core.alarms import Alarms
from faregate.core.at_hand import noting
from faregate.core.committing import Committing, scatter, start_again
from faregate.core.context import Context
from faregate.core.dead_letter import dead_letter
from faregate.core.endings import Endings
from faregate.core.escalation import Escalation
from faregate.core.feed import Feed
from faregate.core.handler_run import HandlerRun
from faregate.core.kill_switch import Switch, Trial
from faregate.core.last_resort import LastResort
from faregate.core.node_store import NodeStore
from faregate.core.observer import Observers
from faregate.core.outlet import Outlet, PublishAtOnce
from faregate.core.pace import BATCH_LIMIT, Pace
from faregate.core.parting import Parting, PutBack
from faregate.core.pipeline import is_retried
from faregate.core.reading import Reader
from faregate.core.recognition import Recognition
from faregate.core.resources import Resources
from faregate.core.sender import Sender
from faregate.core.settling import Settling
from faregate.core.states import UNDECIDED
from faregate.core.unit import TRANSACTION_LOST, Home, TransactionEnded, UnitOfWork
from faregate.core.verdict import failure_of, first_line
from faregate.core.work import Spoiled, Work
from faregate.errors import Expired, LeaseLost, Permanent, StaleLock
from faregate.node.kill_switch import KillSwitch
from faregate.node.node import Node
from faregate.node.policy import Serial
from faregate.node.subscription import Subscription
from faregate.node.where import Filter
from faregate.ports.cancellation import finish
from faregate.ports.clock import Clock
from faregate.ports.queue import Delivery, is_together

log = logging.getLogger("faregate.bus")

_MOST_OUTPUTS, _MOST_OUTPUT_BYTES = 1_000, 4 << 20
"""A transaction with more outgoing messages than this takes no further message."""
_DOUBTFUL_FAILURES = 3
"""If so many of a batch failed, and no more succeeded, it may be an outage: their next tries come before the rest."""


class Failing(NamedTuple):
    """A message that comes again."""

    tries: int
    """How often its handler failed."""
    seconds: float
    """How long it waits for its next try."""


_UNTRIED = Failing(0, 0.0)


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
        kill_switch: KillSwitch | None = None,
        observers: Observers = (),
        resources: Resources | None = None,
    ) -> None:
        """`kill_switch`: where consuming can be stopped, and what is not handled has a place to go back to."""
        self.subscription = subscription
        self.paused = False
        self.switch = None if kill_switch is None else Switch(kill_switch, clock, self._successes)
        self.trial: Trial | None = None
        """What may begin all the same, while the switch is open."""
        self.put_off = False
        """A message of a serial subscription waits for a later try; what was fetched behind it has to go back."""
        self._serial = isinstance(subscription.order, Serial)
        self._node = node.name
        self._sender = sender
        self._clock = clock
        self._reader = Reader(subscription, alarms, body_limit)
        resources = resources or Resources(node, pool, alarms)
        self._endings = Endings(subscription, resources, alarms)
        self.outcomes = self._endings.outcomes
        self._expires = subscription.expires is not None
        self._outlet: Outlet = PublishAtOnce(sender) if store is None else store.outbox
        self._runner = HandlerRun(
            subscription,
            resources,
            sender,
            has_store=store is not None,
            clock=clock,
            switch=self.switch,
            observers=observers,
        )
        self._store = store
        self._recognition = None if store is None else Recognition(subscription, feed, store, clock, alarms)
        business_key = None if self._recognition is None else self._recognition.business_key
        self._one_by_one = self._recognition is not None and self._recognition.one_by_one
        self.escalation = Escalation(node, sender, alarms, pool)
        self._last_resort = LastResort(
            subscription, self._endings, feed, sender, store, business_key, self.redeliver, clock, self.escalation
        )
        self._committing = Committing(node.name, feed, self._outlet, store, business_key, clock)
        notes = store is not None and not feed.keeps_outcomes and subscription.dedup == "ledger"
        self._settling = Settling(
            node.name, self._endings, self._last_resort, self._outlet, store, business_key, clock, notes_filtered=notes
        )
        self._filter = subscription.where
        self._taken = 1.0
        """The share of messages that the filter takes, as a moving average."""
        # --- batches ---
        self._pace = Pace(feed.batch_seconds)
        self._parting: Parting | None = None
        """None: there are no lanes that what leaves a batch could go on in."""
        self._failing: dict[Delivery, Failing] = {}
        """Those that come again: alone, as they failed among others, or because their batch was slow."""
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

    def let_part(self, put_back: PutBack) -> None:
        """There are lanes: what of a batch goes on without the rest of it is put back there."""
        self._parting = Parting(
            put_back,
            self._committing,
            self._settling,
            seconds=self._pace.batch_seconds / 2,  # it is found slow after one to two of these
            serial=self._serial,
            stopped=lambda: self.stopped,
            leave=self._leave,
            give_back=self.give_back,
        )

    @property
    def stopped(self) -> bool:
        """Whether nothing more may begin."""
        return self.paused or self.put_off

    def pause(self) -> None:
        """Let nothing more begin."""
        self.paused = True
        if self.switch is not None:
            self.switch.hurry()
        self._outlet.look_again()

    @property
    def batch(self) -> int:
        """How many are best handled together."""
        if self._one_by_one or self._runner.opens_first:
            return 1
        if self._filter is None:
            return self._pace.batch
        return min(BATCH_LIMIT, int(self._pace.batch / max(self._taken, 1 / BATCH_LIMIT)))  # of which so many run

    def current(self, deliveries: list[Delivery]) -> Delivery:
        """Which of those that are being handled together is being handled."""
        running = (unit.current.delivery for unit in self._units if unit.current is not None)
        return next((delivery for delivery in running if delivery in deliveries), deliveries[0])

    async def handle(self, deliveries: list[Delivery]) -> list[Delivery]:
        """See the deliveries to their end, but for those that it returns: they shall come again, each alone."""
        first = deliveries[0]  # some may leave the list meanwhile
        try:
            if self.switch is not None and self.switch.doubt.witness is not None:
                await self._wait_to_begin(deliveries, self.switch)
            if len(deliveries) > 1:
                return await self._handle_many(deliveries)
            [delivery] = deliveries
            failing = self._failing.pop(delivery, None)
            if failing is None and not self._start(delivery):
                return []
            tries = 0 if failing is None else failing.tries
            works = self._works(deliveries, tries)
            if failing is not None and tries:
                await self._wait_for_next_try(works[0], failing.seconds)
            if self._filter is not None:
                works = await self._without_filtered(works, self._filter)
            return await self._see_through(works)
        except BaseException:
            for delivery in deliveries:
                self._failing.pop(delivery, None)
            raise
        finally:
            witness = None if self.switch is None else self.switch.doubt.witness
            if witness is not None and self.switch is not None and (witness is first or witness in deliveries):
                self.switch.doubt.leave(witness)

    def is_retried(self, exc: BaseException) -> bool:
        """Whether a handler that has failed once, with this, is tried again here."""
        return self.subscription.failures.of(exc).retry.times > 0 and is_retried(exc)

    async def handle_again(self, delivery: Delivery, exc: BaseException) -> None:
        """See a message to its end whose handler has failed once already, elsewhere."""
        delivery.start()
        self._failing[delivery] = self._failed(1, exc)
        await self.handle([delivery])

    def _failed(self, tries: int, exc: BaseException | None) -> Failing:
        return Failing(tries, self.subscription.failures.of(exc).retry.wait(tries))

    async def fail(self, delivery: Delivery, exc: BaseException) -> None:
        """The tries of a message are used up, elsewhere."""
        delivery.start()
        [work] = self._works([delivery])
        if work.state == "new":
            work.fail(exc)
        await self._out_of_tries(work)

    async def give_back(self, delivery: Delivery, *, begun: bool = False) -> None:
        """It goes back to its place."""
        begun = self._failing.pop(delivery, _UNTRIED).tries > 0 or begun
        try:
            await delivery.release(begun=begun)
        except StaleLock as exc:
            log.warning("%s: %s; it is delivered again", self.subscription, exc)

    async def redeliver(self, delivery: Delivery, delay: float, *, counted: bool, behind: bool = False) -> None:
        """It comes again later; in a serial subscription what is behind it waits for that. `behind`: at the end."""
        if behind:
            await delivery.redeliver(delay, counted=counted, behind=True)
            return
        await delivery.redeliver(delay, counted=counted)
        self.put_off = self._serial

    def tell_dead(self, delivery: Delivery, reason: str, error: str) -> Coroutine[Any, Any, None]:
        """The transport made a dead letter of it, and no handler sees it: it expired, or its deliveries are used up.

        It is counted and told of at once; what is returned tells whoever asked by it, escalates it, and runs the
        `after` middlewares.
        """
        self.outcomes["dead"] += 1
        self._endings.dead_lettered(delivery, reason, error)
        ctx, work = None, Work(delivery, self._node)
        if self._endings.has_after:
            try:
                ctx = self._reader.open(work)
            except Exception as exc:
                log.debug("%s cannot be read: %s", delivery.envelope, first_line(exc))
        why = Expired(error) if reason == Expired.reason else Permanent(f"{reason}: {error}")
        return self._after_death(work, ctx, reason, error, why)

    async def _after_death(self, work: Work, ctx: Context | None, reason: str, error: str, why: Permanent) -> None:
        await self._last_resort.answer([work], reason, why)
        if self._store is None:  # or else when the letter comes into the store (`bus/housekeeping.py`)
            letter = dead_letter(self._node, work.message_id, work.delivery, reason, error, self._clock.time())
            await self.escalation.publish(letter)
        await self._endings.run_after(work.delivery, ctx, "dead", why)

    # --- batches ---------------------------------------------------------------------------------------------

    async def _handle_many(self, deliveries: list[Delivery]) -> list[Delivery]:
        # One that was delivered before may be what kills us, so it comes alone.
        again = [] if self._serial else [delivery for delivery in deliveries if delivery.redelivered]
        failing = self._failing
        begun = [each for each in deliveries if failing.pop(each, None) is not None] if failing else []
        if known := {*again, *begun}:
            deliveries = [delivery for delivery in deliveries if delivery not in known]
        works = self._works(begun + self._start_all(deliveries))
        if self._filter is not None:
            works = await self._without_filtered(works, self._filter)
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
        self._failing[work.delivery] = (
            self._failed(work.tries, work.error) if work.handler_failed and work.tries else _UNTRIED
        )
        work.ctx = None  # no cycles, here too
        return work.delivery

    def _start_all(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Tries begin; without those that are someone else's by now."""
        if not deliveries or not is_together(first := deliveries[0]):
            return [delivery for delivery in deliveries if self._start(delivery)]
        found = first.start_all(deliveries)
        if not any(found):
            return deliveries
        for delivery, stale in zip(deliveries, found, strict=True):
            if stale is not None:
                self._endings.lost(delivery, stale)
        return [delivery for delivery, stale in zip(deliveries, found, strict=True) if stale is None]

    def _start(self, delivery: Delivery) -> bool:
        """A try begins; False when the delivery is someone else's by now."""
        try:
            delivery.start()
        except StaleLock as exc:
            self._endings.lost(delivery, exc)
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
            if self._recognition is not None:
                self._recognition.enlist(work, now)
                if self._runner.opens_first:
                    work.opens_first = True
            works.append(work)
        return works

    async def _without_filtered(self, works: list[Work], where: Filter) -> list[Work]:
        """Settle what the filter does not take; returns the others."""
        kept, filtered = [], []
        for work in works:
            if work.state == "new" and work.ctx is not None:
                try:
                    if not where.takes(work.ctx.message, work.envelope.headers):
                        work.move("filtered")
                        filtered.append(work)
                        continue
                except Exception as exc:  # a codec of others may have decoded what its class does not say
                    work.fail(exc)
            kept.append(work)
        if works:
            count = len(works)
            self._taken += (len(kept) / count - self._taken) * count / (count + 16)
        if filtered:
            await self._settling.settle_filtered(filtered)
        return kept

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
            if self.stopped and not self._is_trial(works[0]):
                for work in works:
                    work.move("released")
                    await self.give_back(work.delivery, begun=work.tries > 0)
                return again
            unit = UnitOfWork(self._home or self._settle_in(), works, self._savepoints or spoiled)
            self._units.add(unit)
            try:
                if self._recognition is not None:
                    spoiled = await self._run_with_store(unit, works, self._recognition)
                else:
                    if await (self._run_handlers if unit.alone else self._run_without_store)(unit, works):
                        await self._committing.publish(works)
            finally:
                self._units.discard(unit)
                unit.works = ()  # no cycles: what is done goes at once, without the garbage collector
            await self._settling.settle_all(works)
            left = [work for work in works if work.state in UNDECIDED]
            if left:
                left = await self._what_is_left(unit, left, again, spoiled=spoiled)
                if left and self._parting is not None:  # the keys of those that have ended do not wait for the rest
                    stay = {*again, *(work.delivery for work in left)}
                    self._parting.put_back((), [work.delivery for work in works if work.delivery not in stay])
            works = left
        return again

    def _settle_in(self) -> Home:
        store = None if self._store is None else self._store.store
        enter = None if self._recognition is None else self._recognition.mark
        cancel = self._sender.cancel if self._outlet.schedules else None
        self._home = Home(store, enter, self._reader.left_behind, cancel)
        return self._home

    async def _what_is_left(
        self, unit: UnitOfWork, works: list[Work], again: list[Delivery], *, spoiled: bool
    ) -> list[Work]:
        """Of one transaction: those that have not run yet, or not yet with success."""
        for work in works:
            if work.state != "failed":
                continue
            has_tries_left = self._has_tries_left(work)
            if self.switch is not None and await self._goes_back(work, self.switch, has_tries_left):
                await self._last_resort.send_back(work, self._trial_failed(work))
            elif not has_tries_left:
                await self._out_of_tries(work)
            elif self._serial or unit.alone or work.on_trial:
                if work.handler_failed:
                    await self._wait_for_next_try(work, self._failed(work.tries, work.error).seconds)
                await self._see_through([self._once_more(work)])
            else:
                again.append(self._leave(work))
        works = [work for work in works if work.state == "new"]
        leave = unit.doubtful or len(works) > self._pace.batch  # or they take longer than was thought
        if self._parting is None or self._serial or spoiled or self.stopped or not leave:
            return [self._next_round(work) for work in works]
        self._parting.put_back([self._leave(work) for work in works], ())
        return []

    async def _run_with_store(self, unit: UnitOfWork, works: list[Work], recognition: Recognition) -> bool:
        """Run and commit them. True: somebody spoiled the transaction, and they have to run again with savepoints."""
        try:
            await recognition.admit(works)
            await self._run(unit, works)
            await self._committing.commit(unit, works)
        except BaseException as exc:
            await self._committing.roll_back(unit, exc)
            if isinstance(exc, TransactionEnded):
                await self._committing.save(works)
            elif isinstance(exc, Spoiled) or (
                unit.shared and isinstance(exc, Exception) and not isinstance(exc, (*TRANSACTION_LOST, LeaseLost))
            ):  # what somebody wrote may have been refused with the commit
                start_again(works)
                return True
            elif isinstance(exc, LeaseLost):
                for work in works:
                    if work.delivery in exc.deliveries:
                        work.move("lost")
                        self._endings.lost(work.delivery, exc)
                start_again(works)
            elif (failure := failure_of(exc)) is not None:  # lost, or refused at the commit: nothing has happened
                scatter(works, failure)
                if self.switch is not None and len(works) > 1 and self.switch.failed(failure):
                    for work in works:  # it is one failure, however many it was of
                        work.goes_back = work.error is failure
            else:
                raise
        return False

    async def _run_without_store(self, unit: UnitOfWork, works: list[Work]) -> bool:
        """What handlers did cannot be undone: those that have ended go out whatever becomes of the others of a batch,
        and before long."""
        try:
            return await self._run(unit, works)
        except asyncio.CancelledError:  # and only then, or what is on its way would go out twice
            await finish(self._hand_on([work for work in works if work.state == "done"]))
            raise

    async def _hand_on(self, done: list[Work]) -> None:
        await self._committing.publish(done)
        await self._settling.settle_all(done)

    # --- handlers --------------------------------------------------------------------------------------------

    def _run(self, unit: UnitOfWork, works: list[Work]) -> Coroutine[Any, Any, bool]:
        """Run the handlers; whether they sent anything. The others of a batch do not wait for one that takes its
        time."""
        if self._parting is None or unit.alone:
            return self._run_handlers(unit, works)
        return self._parting.run(self._run_handlers, unit, works)

    async def _run_handlers(self, unit: UnitOfWork, works: list[Work]) -> bool:
        """Run the messages one after another; whether they sent anything. The rest stays new: behind a failure in a
        serial subscription, behind failures that may be an outage, because enough is sent in this transaction or it
        took long enough, or because nothing more may begin."""
        started = self._pace.start()
        last = works[-1]
        monotonic = self._clock.monotonic
        until = 0.0 if unit.alone else monotonic() + self._pace.batch_seconds
        run = noting(self._runner.run) if at_hand.wanted else self._runner.run
        ran = failed = rows = size = 0
        for work in tuple(works):  # some may leave meanwhile
            if work.state != "new":
                continue
            stopped = self.paused or self.put_off
            if stopped and not self._may_begin(work):
                break
            if (self._expires or work.envelope.expires_at is not None) and not work.tries and work.delivery.expired:
                work.fail(Expired("its time was over before its handler could begin"))
                continue
            if stopped and self.trial is not None and self._is_trial(work):
                self.trial.ran = work.on_trial = True
            ran += 1
            if not await run(unit, work):
                failed += 1
                unit.doubtful = self.switch is not None and (
                    self.switch.doubt.is_there or (failed >= _DOUBTFUL_FAILURES and 2 * failed >= ran)
                )
                if self._serial or unit.doubtful:
                    break
            if work.replies:
                rows += len(work.replies)
            if work.sent:
                rows += len(work.sent)
                for envelope in work.sent:
                    size += len(envelope.body)
                if rows >= _MOST_OUTPUTS or size >= _MOST_OUTPUT_BYTES:
                    break
            if work is not last and monotonic() - unit.waited > until:  # slower than was thought
                break
        self._sends = rows > 0
        if ran:
            self._pace.note(started, ran, unit.waited, len(self._units))
        return rows > 0

    def _may_begin(self, work: Work) -> bool:
        """Though nothing more may: it is on trial, or it has claimed and goes on."""
        return self._one_by_one or self._is_trial(work)

    def _is_trial(self, work: Work) -> bool:
        return self.trial is not None and work.delivery is self.trial.delivery

    # --- failures --------------------------------------------------------------------------------------------

    def _successes(self) -> int:
        """How many were handled, those of the transactions at work included. Asked when something has failed."""
        done = sum(work.state == "done" for unit in self._units for work in unit.works)
        return self.outcomes["handled"] + self.outcomes["skipped"] + done

    async def _wait_to_begin(self, deliveries: list[Delivery], switch: Switch) -> None:
        """There is doubt whether handlers can succeed at all: what has not failed yet begins when it is its turn."""
        if not any(self._failing.get(each, _UNTRIED).tries for each in deliveries):
            await switch.doubt.turn(deliveries[0], fresh=True)

    async def _wait_for_next_try(self, work: Work, seconds: float) -> None:
        if self.switch is None:
            await self._clock.sleep(seconds)
        else:
            await self.switch.next_try(work, seconds)

    async def _goes_back(self, work: Work, switch: Switch, has_tries_left: bool) -> bool:
        """Whether it failed with what the kill switch is open for."""
        assert work.error is not None
        if not has_tries_left:
            switch.note(work, work.error)
            await switch.sure(work, last=self._last_resort.is_next(work.delivery, work.error))
        return work.goes_back or switch.sends_back(work, work.error)

    def _trial_failed(self, work: Work) -> float | None:
        """How long a message that was on trial is put off, if it was; so that another one is next."""
        if self.trial is None or not self._is_trial(work):
            return None
        self.trial.error = work.error
        # With several tries, a trial takes longer: the next one shall be over before this message comes again.
        return None if self.trial.put_off is None else self.trial.put_off * max(1, work.tries)

    def _has_tries_left(self, work: Work) -> bool:
        """Whether a failed message runs again here, alone."""
        if work.ctx is None or work.error is None:
            return False
        if work.tries > self.subscription.failures.of(work.error).retry.times:
            return False
        if work.scattered:  # the transaction of others
            return True
        return work.handler_failed and is_retried(work.error)

    async def _out_of_tries(self, work: Work) -> None:
        """Its tries here are used up."""
        if await self._last_resort.end(work):
            return
        if work.ctx is not None:  # another copy was handled: that will be found
            await self._see_through([self._once_more(work)])
        else:
            work.move("known")
            await self._settling.settle_all([work])


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
