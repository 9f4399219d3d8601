"""Handling with a store: the ledger row, the handler's writes and its outgoing messages are one commit.

    look up (handled before? dead? below the floor?)
        -> pipeline, message after message in one transaction -> outbox -> commit -> settle -> dispatch
              `-- failed --> leaves the batch, runs alone with its tries -> redeliver later, or dead letter

Rules kept here:
- Nothing after the commit can change what became of a message; nothing before it has happened.
- A message that failed, was delivered before, or shared a transaction that failed, runs alone: it can hurt nobody else.
- A commit whose outcome is unknown is tried again; the look-up then finds out what it was.
- Giving up is a commit too: the dead letter is in the store before the delivery is settled.

It is over 600 lines because a message's states change all over it; one table of them would let it be taken apart.
"""

import asyncio
import logging
from concurrent.futures import Executor
from time import perf_counter, thread_time
from typing import Literal

from faregate.bus.dispatcher import Recorded
from faregate.codec import digest_of
from faregate.core.business_key import BusinessIdentity
from faregate.core.context import Context, Settled
from faregate.core.dead_letter import dead_letter
from faregate.core.node_store import NodeStore
from faregate.core.pipeline import is_retried
from faregate.core.receiver import Receiver
from faregate.core.sender import Sender
from faregate.core.unit import (
    TRANSACTION_LOST,
    AlreadyHandled,
    Fence,
    NeedsSolitude,
    NeedsTransaction,
    Spoiled,
    TransactionEnded,
    UnitOfWork,
    Work,
)
from faregate.core.verdict import describe_error, failure_of, first_line
from faregate.errors import BelowFloor, CommitUnknown, RetryAfter, StaleLock, UnknownToken
from faregate.ids import message_id_of
from faregate.message import set_out_at
from faregate.node.node import Node
from faregate.node.subscription import Subscription
from faregate.ports import faults
from faregate.ports.clock import Clock
from faregate.ports.queue import Delivery, Outcome
from faregate.ports.store import Known, LedgerRow, OutboxRow, Sent, Transaction

log = logging.getLogger("faregate.bus")

BATCH_SECONDS = 0.05
"""How long the messages of one transaction may take together, roughly: it is what the first of them waits."""
BATCH_LIMIT = 256
_MOST_OUTPUTS, _MOST_OUTPUT_BYTES = 1_000, 4 << 20
"""A transaction with more outgoing messages than this takes no further message."""
_CAREFUL_BATCHES = 100
_STORE_DOWN_SECONDS = 10.0
_TAKEN_SECONDS = 5.0


class Transactional(Receiver):
    has_store = True
    batch_seconds = BATCH_SECONDS
    _fence: Fence | None = None
    """What an engine without a broker checks in every transaction before anything else."""

    def __init__(
        self,
        subscription: Subscription,
        node: Node,
        sender: Sender,
        shared: NodeStore,
        *,
        clock: Clock,
        pool: Executor,
        body_limit: int,
    ) -> None:
        super().__init__(
            subscription, node, sender, clock=clock, alarms=shared.alarms, pool=pool, body_limit=body_limit
        )
        self._shared = shared
        self._store = shared.store
        self._eager = False
        """Whether the handlers of this subscription want the transaction before they start."""
        self._identity = (
            BusinessIdentity(shared.store, node.name, subscription.name, subscription.identity, subscription.claim)
            if subscription.identity is not None
            else None
        )
        self._failing: dict[Delivery, int] = {}
        """Those that come again alone, as they failed among others or were delivered before; how often they failed."""
        self._seconds = BATCH_SECONDS
        """How long one message takes by itself, as a moving average."""
        self._sends = False
        """Whether the handlers of the last transaction sent anything. Only then they wait while others are not sent."""
        self._units: set[UnitOfWork] = set()
        """The transactions at work; they share the event loop."""
        self._careful = 0 if shared.store.dear_savepoints else -1
        """For so many batches each message gets a savepoint, because one failed lately; -1: for ever."""

    @property
    def batch(self) -> int:
        """Slow handlers run one at a time, so that lanes share them; fast ones share a commit."""
        if self._identity is not None or self._shared.gate is not None or self._eager:
            return 1
        return max(1, min(BATCH_LIMIT, int(self.batch_seconds / self._seconds)))

    def current(self, deliveries: list[Delivery]) -> Delivery:
        running = (unit.current.delivery for unit in self._units if unit.current is not None)
        return next((delivery for delivery in running if delivery in deliveries), deliveries[0])

    def pause(self) -> None:
        super().pause()
        self._shared.dispatcher.look_again()

    async def handle(self, deliveries: list[Delivery]) -> list[Delivery]:
        try:
            return await self._handle(deliveries)
        except BaseException:
            for delivery in deliveries:
                self._failing.pop(delivery, None)
            raise

    async def give_back(self, delivery: Delivery, *, begun: bool = False) -> None:
        await super().give_back(delivery, begun=begun or bool(self._failing.pop(delivery, 0)))

    async def _handle(self, deliveries: list[Delivery]) -> list[Delivery]:
        if len(deliveries) == 1 and deliveries[0] in self._failing:
            tries = self._failing.pop(deliveries[0])
            if tries:
                await self._clock.sleep(self.subscription.retry.wait(tries))
            await self._run([self._work(deliveries[0], tries)])
            return []
        for delivery in deliveries:
            delivery.start()
        again: list[Delivery] = []
        for group in _groups([self._work(delivery) for delivery in deliveries]):
            if group[0].delivery.redelivered and len(deliveries) > 1 and not self._serial:
                self._failing[group[0].delivery] = 0
                again.append(group[0].delivery)
            else:
                again += await self._run(group)
        return again

    def _work(self, delivery: Delivery, tries: int = 0) -> Work:
        envelope = delivery.envelope
        at = max(self._clock.time(), set_out_at(envelope))
        work = Work(delivery, message_id_of(envelope, self._node), self.subscription.name, at)
        # Whatever the mode is by now: the sender made a token for it, which has to go even if it cannot be read.
        work.attempt_id = envelope.attempt_id
        try:
            ctx = work.ctx = self._open(delivery)
        except Exception as exc:
            work.state, work.error = "failed", exc
            return work
        ctx._message_id = work.message_id
        ctx._work = work
        ctx._attempt = work.tries = tries
        work.eager = self._eager
        if work.attempt_id is None and self.subscription.dedup != "off":
            digest = envelope.body_digest or digest_of(envelope)
            work.row = LedgerRow(work.message_id, digest, delivery.key, delivery.position, at)
        return work

    # --- a batch -------------------------------------------------------------------------------------------

    async def _run(self, works: list[Work]) -> list[Delivery]:
        """See these messages to their end, as many of them as possible in one transaction.

        Returns those that failed among others and have tries left. A serial subscription returns nothing: it waits for
        them here, since nothing may go on meanwhile.
        """
        again: list[Delivery] = []
        while works:
            if self._sends:
                await self._shared.dispatcher.room(lambda: self.stopped)
            if self.stopped:
                for work in works:
                    await self.give_back(work.delivery, begun=work.tries > 0)
                return again
            await self._once(works)
            for work in works:
                if work.state != "failed":
                    continue
                if not self._has_tries_left(work):
                    await self._fail(work)
                elif self._serial or len(works) == 1:
                    if work.handler_failed:
                        await self._clock.sleep(self.subscription.retry.wait(work.tries))
                    await self._run([self._work(work.delivery, work.tries)])
                else:
                    self._failing[work.delivery] = work.tries if work.handler_failed else 0
                    again.append(work.delivery)
            works = [self._work(work.delivery, work.tries) for work in works if work.state == "new"]
        return again

    async def _once(self, works: list[Work]) -> None:
        """One transaction. Afterwards a message is settled, or "failed" with its error, or "new" as before."""
        savepoints = self._careful != 0
        unit = UnitOfWork(self._store, self._node, works, self._check_digest, self._fence, savepoints=savepoints)
        if self._careful > 0:
            self._careful -= 1
        recorded: list[Recorded] = []

        async def record(transaction: Transaction, done: list[Work]) -> None:
            recorded.append(await self._record(transaction, done))

        self._units.add(unit)
        started, used = perf_counter(), thread_time()
        try:
            await self._look_up(works)
            await self._admit(works)
            ran = await self._run_pipelines(unit, works)
            self._learn(ran, perf_counter() - started - unit.waited, thread_time() - used)
            await unit.commit(record, [work for work in works if work.state == "folded"])
        except BaseException as exc:
            await unit.abandon()
            for outbox in recorded:
                self._shared.dispatcher.rolled_back(outbox)
            if isinstance(exc, CommitUnknown):
                self._shared.dispatcher.doubt()
            if isinstance(exc, TransactionEnded):
                await self._after_misuse(works, exc)
            elif isinstance(exc, Spoiled):
                self._careful = _CAREFUL_BATCHES
                _start_again(works)
            elif isinstance(exc, Exception):  # lost, or refused at the commit: nothing has happened
                self._scatter(works, exc)
            else:
                raise
        else:
            for outbox in recorded:
                self._shared.dispatcher.committed(outbox)
        finally:
            self._units.discard(unit)
        if self._shared.tokens is None:
            _doubt_missing_tokens(works)
        await self._settle_all(works)

    def _learn(self, messages: int, seconds: float, busy: float) -> None:
        """Note how long messages took. While the loop was busy, it was so for all transactions at work."""
        busy = min(busy, seconds)
        own = seconds - busy + busy / len(self._units)
        self._seconds += (own / messages - self._seconds) / 4

    async def _settle_all(self, works: list[Work]) -> None:
        for work in works:
            if work.state in ("new", "failed"):
                continue
            try:
                if work.state == "duplicate" and self._shared.dispatcher.in_doubt:
                    await self._take_up(work)
                await self._release_token(work)
                if work.in_ledger and work.envelope.replay:
                    await self._resolve_letter(work)
                await self._settle(work)
            except TRANSACTION_LOST as exc:
                # What happened is committed; a later copy finds that, and goes on from there.
                log.warning("%s is not settled yet: %s", work.envelope, exc)
                await self._put_off(work)
            if self._identity is not None:
                self._identity.forget(work)

    async def _take_up(self, work: Work) -> None:
        """A commit whose confirmation was lost left rows in the outbox that our dispatcher does not know: they go
        before what follows with the same key."""
        self._shared.dispatcher.take_up(await self._store.outbox_rows_of(self._node, work.message_id))

    async def _release_token(self, work: Work) -> None:
        """D and G of the token protocol: outgoing messages first, then the token goes, then its claim."""
        gate = self._shared.gate
        if work.attempt_id is None:
            return
        if work.state == "folded" or (work.state == "duplicate" and work.in_ledger):
            if gate is not None:
                await gate.drop(work.message_id, work.attempt_id)
            else:
                await self._shared.commit(lambda transaction: transaction.consume_tokens([work.attempt_id or ""]))
        elif gate is not None and work.state in ("done", "resumed"):
            await gate.finish(work)

    async def _resolve_letter(self, work: Work) -> None:
        """The replay of a message that another copy of was handled after all: its dead letter is settled with that."""
        now = self._clock.time()
        await self._shared.commit(lambda transaction: transaction.resolve(self._node, [work.message_id], now))

    def _scatter(self, works: list[Work], exc: BaseException) -> None:
        """A transaction is lost, and with it what was done: among others everyone starts again alone; one alone has
        used up a try."""
        for work in works:
            if work.state in ("done", "new", "folded"):
                work.state, work.error = "failed", exc
                work.scattered = len(works) > 1
                if not work.scattered:
                    work.handler_failed = True
                    work.tries = max(work.tries + 1, work.ctx._attempt if work.ctx is not None else 0)

    async def _look_up(self, works: list[Work]) -> None:
        """Tell what was handled before, what is dead, and what is too old to be told."""
        asked = [work for work in works if work.state == "new"]
        if not asked:
            return
        known = await self._store.known(self._node, [work.message_id for work in asked])
        # Behind the look at the rows: who finds one gone finds the floor raised.
        old = self._clock.time() - self._shared.young_seconds
        floor = None
        if any(set_out_at(work.envelope) < old and work.message_id not in known for work in asked):
            floor = await self._store.floor(self._node)
        for work in asked:
            found = known.get(work.message_id)
            if found is None:
                if work.row is not None and floor is not None and set_out_at(work.envelope) < floor:
                    work.state, work.error = "failed", _below_floor(work, floor)
            elif found.state == "handled":
                if self.subscription.dedup != "off":
                    work.state, work.in_ledger = "duplicate", True
                    self._check_digest(work, found.digest)
            elif found.state == "dead" and work.envelope.replay:
                work.replayed = True
            else:
                work.state = "folded"

    async def _admit(self, works: list[Work]) -> None:
        """Ask the gate and the business key; both see one message at a time."""
        gate, tokens = self._shared.gate, self._shared.tokens
        for work in works:
            if work.state != "new":
                continue
            if work.attempt_id is not None and gate is not None:
                admission = await gate.admit(work, work.attempt_id)
                if admission == "taken":
                    error = RetryAfter(_TAKEN_SECONDS, f"the token of {work.envelope} is claimed by someone else")
                    work.state, work.error = "failed", error
                elif admission != "run":
                    work.state = "duplicate" if admission == "duplicate" else "resumed"
            elif work.attempt_id is not None and tokens is not None and await tokens.read(work.attempt_id) is None:
                work.state = "duplicate"
            if work.state == "new" and self._identity is not None and not await self._identity.admit(work):
                work.state = "duplicate"

    async def _run_pipelines(self, unit: UnitOfWork, works: list[Work]) -> int:
        """Run the messages one after another; how many. The rest stays new: behind a failure in a serial subscription,
        because enough is sent in this transaction, or because nothing more may begin."""
        rows = size = 0
        for ran, work in enumerate(works, 1):
            if work.state != "new":
                continue
            if self.stopped and self._identity is None and self._shared.gate is None:  # what has claimed goes on
                return max(1, ran - 1)
            if not await self._run_pipeline(unit, work) and self._serial:
                return ran
            if work.outputs:
                rows += len(work.outputs)
                size += sum(len(row.envelope.body) for row in work.outputs)
                if rows >= _MOST_OUTPUTS or size >= _MOST_OUTPUT_BYTES:
                    break
        self._sends = rows > 0
        return ran

    async def _run_pipeline(self, unit: UnitOfWork, work: Work) -> bool:
        """Run one message within the transaction; False when it failed."""
        ctx = work.ctx
        assert ctx is not None
        unit.current = work
        tried = ctx._attempt
        try:
            await self._run_through(ctx, work)
            if faults.hook is not None:
                await faults.hook("bus.after-handler")
            work.outputs = await self._seal(work)
            ctx._ended = True
            await unit.leave(work)
            work.state = "done"
            self._eager = self._eager or work.eager
        except AlreadyHandled:
            await unit.undo(work)
            work.state = "duplicate"
        except NeedsSolitude as exc:
            self._eager = work.scattered = True
            ctx._attempt = tried
            await self._failed(unit, work, exc)
        except Spoiled:  # its middlewares have not seen the error: they will, at the next try
            work.tries = ctx._attempt if work.handler_failed else tried
            raise
        except TransactionEnded as exc:
            work.state, work.error = "failed", exc
            raise
        except TRANSACTION_LOST:
            raise
        except BaseException as exc:
            failure = failure_of(exc)
            if failure is None:
                raise
            await self._failed(unit, work, failure)
        finally:
            ctx._ended = True
            unit.current = None
        return work.state != "failed"

    async def _run_through(self, ctx: Context, work: Work) -> None:
        """The pipeline. An interrupt counts whatever a handler or a middleware made of it."""
        tried = ctx._attempt
        while True:
            try:
                await self._pipeline(ctx)
            except BaseException as exc:
                if work.interrupt is None or isinstance(exc, asyncio.CancelledError):
                    raise
            if work.interrupt is not NeedsTransaction:
                break
            # A middleware's; the core sees to the handler's own.
            work.interrupt = None
            await work.enter(ctx)
            ctx._attempt, ctx._resources = tried, ()
        if work.interrupt is not None:
            raise work.interrupt

    async def _failed(self, unit: UnitOfWork, work: Work, exc: BaseException) -> None:
        work.tries = work.ctx._attempt if work.ctx is not None else 0
        try:
            await unit.undo(work, exc)
        finally:  # the transaction may be spoiled
            work.state, work.error = "failed", exc

    async def _seal(self, work: Work) -> list[OutboxRow]:
        ctx = work.ctx
        assert ctx is not None
        if not ctx._completed or not ctx._sent():
            return []
        if self._outgoing is None:  # a coroutine less for every message
            ctx._sealed = [envelope for _, envelope in self._sender.seal_outputs(ctx, self.subscription.name)]
        elif not self._sends_in_scope:
            await self._send_outputs(ctx)
        envelopes = ctx._sealed or ()
        return [self._sender.outbox_row(envelope, work.message_id, place) for place, envelope in enumerate(envelopes)]

    async def _send_outputs(self, ctx: Context) -> None:
        ctx._sealed = await self._sender.record_outputs(ctx, self.subscription.name, self._outgoing)

    async def _record(self, transaction: Transaction, done: list[Work]) -> Recorded:
        """What is committed beside the ledger rows and the handlers' own writes.

        A dead letter that is there by now is resolved: of a replay, or of another copy that was given up meanwhile.
        """
        await self._check_floor(transaction, done)
        await transaction.resolve(self._node, [work.message_id for work in done], self._clock.time())
        skipped = [work for work in done if work.row is not None and work.ctx is not None and not work.ctx._completed]
        if skipped:
            await transaction.unrecord(self._node, [work.message_id for work in skipped])
            rows = [work.row._replace(outcome="skipped") for work in skipped if work.row is not None]
            await transaction.record(self._node, rows)
        for work in done:
            if self._shared.gate is not None and work.claim_id is not None:
                await self._shared.gate.commit(transaction, work)
            if self._identity is not None:
                await self._identity.succeed(transaction, work)
        return await self._send(transaction, done)

    async def _send(self, transaction: Transaction, done: list[Work]) -> Recorded:
        """Put what handlers sent into the outbox, and how much it was into the ledger."""
        sent = [_sent_by(work) for work in done if work.outputs and work.row is not None]
        if sent:
            await transaction.note_sent(self._node, sent)
        return await self._shared.dispatcher.record(transaction, [row for work in done for row in work.outputs])

    async def _check_floor(self, transaction: Transaction, done: list[Work]) -> None:
        """A handler may run so long that another copy was handled and forgotten since the look-up. Nobody raises the
        floor from here on without finding our ledger row. A replay may pass: by its letter it was not handled."""
        old = self._clock.time() - self._shared.young_seconds
        unknown = [work for work in done if work.row is not None and not work.replayed]
        asked = [work for work in unknown if set_out_at(work.envelope) < old]
        floor = await transaction.floor(self._node) if asked else None
        for work in asked:
            if floor is not None and set_out_at(work.envelope) < floor:
                raise _below_floor(work, floor)

    async def _settle(self, work: Work) -> None:
        """It is decided: tell the transport. Its outgoing messages are on their way already."""
        outcome: Outcome = "handled"
        if work.state in ("duplicate", "resumed"):
            outcome = "duplicate"
        elif work.state == "folded":
            outcome = "dead"
        elif work.ctx is not None and not work.ctx._completed:
            outcome = "skipped"
        if faults.hook is not None:
            await faults.hook("bus.before-settle")
        try:
            await work.delivery.settle(outcome)
        except StaleLock as exc:
            self.outcomes["lost"] += 1
            log.warning("%s: %s; it is delivered again, and recognised", self.subscription, exc)
            return
        await self._finish(work.delivery, work.ctx, outcome)

    # --- failures ------------------------------------------------------------------------------------------

    def _has_tries_left(self, work: Work) -> bool:
        """Whether a failed message runs again here, alone."""
        if work.ctx is None or work.error is None or work.tries > self.subscription.retry.times:
            return False
        if work.scattered:  # the transaction of others
            return True
        return work.handler_failed and is_retried(work.error)

    async def _fail(self, work: Work) -> None:
        assert work.error is not None
        outcome: Settled = "redelivered"
        try:
            if self._identity is not None:
                await self._identity.fail(work)
            verdict = self._judge(work.delivery, work.ctx, work.error)
            if verdict.delay is not None:
                await self.redeliver(work.delivery, verdict.delay, counted=verdict.counted)
            elif (end := await self._add_dead(work, verdict.reason)) == "dead":
                if self._shared.gate is not None and work.attempt_id is not None:
                    await self._shared.gate.drop(work.message_id, work.attempt_id)
                await work.delivery.settle("dead")
                self._gave_up(work.delivery, verdict.reason, first_line(work.error))
                outcome = "dead"
            elif end == "handled" and work.ctx is not None:
                await self._run([self._work(work.delivery, work.tries)])
                return
            elif end == "handled":
                await work.delivery.settle("duplicate")
                outcome = "duplicate"
            else:
                await self._put_off(work)
        except StaleLock as exc:
            self.outcomes["lost"] += 1
            log.warning("%s: %s; it is delivered again", self.subscription, exc)
            return
        except TRANSACTION_LOST as exc:
            log.warning("%s waits for its store: %s", work.envelope, exc)
            await self._put_off(work)
        await self._finish(work.delivery, work.ctx, outcome, work.error)

    async def _put_off(self, work: Work) -> None:
        """The store is away: come again later, without using up a try."""
        try:
            await self.redeliver(work.delivery, _STORE_DOWN_SECONDS, counted=False)
        except StaleLock as exc:
            log.warning("%s: %s; it is delivered again", self.subscription, exc)

    async def _add_dead(self, work: Work, reason: str) -> Literal["dead", "handled", "later"]:
        """Write the dead letter. `handled`: another copy has come to an end meanwhile, so there is nothing to give up.
        `later`: the store does not take it now, so the decision has to wait."""
        assert work.error is not None
        letter = dead_letter(
            self._node, work.message_id, work.delivery, reason, describe_error(work.error), self._clock.time()
        )
        transaction = self._store.transaction()
        try:
            await transaction.begin()
            if not await self._is_unhandled(transaction, work):
                return "handled"
            await transaction.add_dead(letter)
            if faults.hook is not None:
                await faults.hook("unit.before-commit")
            await transaction.commit()
        except TRANSACTION_LOST as exc:
            log.warning("the dead letter of %s cannot be written now: %s", letter, exc)
            return "later"
        finally:
            await transaction.roll_back()
        return "dead"

    async def _is_unhandled(self, transaction: Transaction, work: Work) -> bool:
        """Whether no other copy was handled; with tokens, none can be from this transaction's commit on."""
        if isinstance(work.error, UnknownToken | TransactionEnded):
            return True  # nothing to be learned from what is there
        if work.claim_id is not None:
            return await transaction.finish_claim(self._node, work.message_id, work.claim_id)
        if work.attempt_id is not None and self._shared.gate is None:
            return bool(await transaction.consume_tokens([work.attempt_id]))
        if work.row is not None:
            if await transaction.record(self._node, [work.row]):
                return False
            await transaction.unrecord(self._node, [work.message_id])
        return True

    async def _after_misuse(self, works: list[Work], exc: TransactionEnded) -> None:
        """A handler ended the transaction of its batch. Save the others: what they wrote may or may not be committed.

        Those that are keep their outputs; those that are not run again.
        """
        known = await self._store.known(self._node, [work.message_id for work in works])
        saved = [work for work in works if work.state == "done" and await self._was_committed(work, known)]
        strays = [work.message_id for work in works if work not in saved and work.state in ("new", "done", "failed")]
        transaction = self._store.transaction()
        try:
            await transaction.begin()
            await transaction.unrecord(self._node, strays)
            recorded = await self._send(transaction, saved)
            await transaction.commit()
        finally:
            await transaction.roll_back()
        self._shared.dispatcher.committed(recorded)
        for work in works:
            if work.state == "done" and work not in saved:
                work.state = "new"

    async def _was_committed(self, work: Work, known: dict[str, Known]) -> bool:
        """Whether what a message did is in the store: its ledger row is there, or its token is gone."""
        if work.row is not None:
            return work.message_id in known
        tokens = self._shared.tokens
        return (
            work.consumed
            and work.attempt_id is not None
            and tokens is not None
            and not await tokens.read(work.attempt_id)
        )

    def _check_digest(self, work: Work, digest: bytes | None) -> None:
        mine = work.envelope.body_digest or digest_of(work.envelope)
        if digest is not None and mine is not None and digest != mine:
            self._shared.alarms.sound(
                "disagreement",
                self._node,
                work.message_id,
                f"{work.envelope} came again with another body than the one that was handled; the handled one "
                "counts. Two runs of a handler disagree, or one idempotency key stands for two things",
            )


def _sent_by(work: Work) -> Sent:
    """What the handler of a message sent, for its ledger row."""
    combined = 0
    for row in work.outputs:
        combined ^= int(row.envelope.publication_id.replace("-", ""), 16)
    return Sent(work.message_id, len(work.outputs), combined.to_bytes(16, "big"))


def _start_again(works: list[Work]) -> None:
    """What failed has failed; all else is undone, and runs again."""
    for work in works:
        if work.state in ("done", "folded"):
            work.state = "new"


def _groups(works: list[Work]) -> list[list[Work]]:
    """Split into transactions: one that was delivered before may be what kills us, so it runs alone; copies of one
    message must not meet in one transaction."""
    groups: list[list[Work]] = []
    seen: set[str] = set()
    shared = False
    for work in works:
        alone = work.delivery.redelivered
        if alone or not shared or work.message_id in seen:
            groups.append([])
            seen = set()
        groups[-1].append(work)
        seen.add(work.message_id)
        shared = not alone
    return groups


def _doubt_missing_tokens(works: list[Work]) -> None:
    """Without a token store a missing token may be one that is kept elsewhere: no reason to call it a duplicate."""
    for work in works:
        if work.state == "duplicate" and work.attempt_id is not None and not work.in_ledger:
            work.state, work.error = (
                "failed",
                UnknownToken(
                    f"{work.envelope} was sent with a token that is not in this node's store, and this bus has no "
                    "token store: give it tokens=… as before and replay this; if it was handled already, discard it"
                ),
            )


def _below_floor(work: Work, floor: float) -> BelowFloor:
    return BelowFloor(
        f"{work.envelope} was sent at {set_out_at(work.envelope):.0f}, before {floor:.0f}: the ledger of this node "
        "remembers nothing from before, so a repetition could not be recognised. If it never was handled, replay its "
        "dead letter"
    )
