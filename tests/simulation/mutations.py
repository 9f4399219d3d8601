"""The bus with one rule broken at a time (exactly-once.md, "Mutations that the tests must catch").

Each is a function that patches the real classes through pytest's `monkeypatch`.
"""

from typing import Any

from pytest import MonkeyPatch

from faregate import ids
from faregate.bus import attempts as attempts_module
from faregate.bus.attempts import FENCE_SECONDS, Attempts
from faregate.bus.housekeeping import Housekeeper
from faregate.bus.lanes import Lanes
from faregate.core.committing import Committing
from faregate.core.context import Context
from faregate.core.dedup.claims import Claims
from faregate.core.parting import Parting
from faregate.core.settling import Settling
from faregate.core.states import TABLE, Event, State
from faregate.core.unit import UnitOfWork
from faregate.core.work import Spoiled, Work
from faregate.errors import StoreUnavailable
from faregate.node.where import Filter
from faregate.ports import faults
from faregate.ports.store import LedgerRow
from faregate.spark.runs.engine import Engine, SubscriptionRun
from faregate.spark.runs.feed import LogFeed, OutboxOnly, buckets_of, is_behind
from faregate.spark.runs.outbox import OutboxSpooler
from faregate.stores.sqlite import MemoryStore
from faregate.stores.sqlite.transaction import SqliteTransaction
from tests.simulation.loop import PROCESS
from tests.simulation.ports import SimTransaction

# --- the unit of work ---------------------------------------------------------------------------------------


def settle_before_commit(patch: MonkeyPatch) -> None:
    commit = UnitOfWork.commit

    async def mutant(self: Any, *args: Any) -> None:
        for work in self.works:
            if work.state == "done":
                await work.delivery.settle("handled")
        await commit(self, *args)

    patch.setattr(UnitOfWork, "commit", mutant)


def dispatch_before_commit(patch: MonkeyPatch) -> None:
    record = Committing._record

    async def mutant(self: Any, *args: Any) -> Any:
        recorded = await record(self, *args)
        await self._outlet._transport.publish([row.envelope for row in recorded.rows])
        return recorded

    patch.setattr(Committing, "_record", mutant)


def ledger_insert_in_its_own_transaction(patch: MonkeyPatch) -> None:
    open_ = UnitOfWork.open

    async def mutant(self: Any) -> Any:
        if self.transaction is None:
            marked = await open_(self)
            await marked.commit()
            self.transaction = self.home.store.transaction()
            await self.transaction.begin()
        return self.transaction

    patch.setattr(UnitOfWork, "open", mutant)


async def _nothing(*args: Any) -> None: ...


def outputs_of_a_failed_try_kept(patch: MonkeyPatch) -> None:
    def keep(self: Any, value: Any) -> None:
        if value is not None:
            self.__dict__["kept"] = value

    patch.setattr(Context, "_outputs", property(lambda self: self.__dict__.get("kept"), keep), raising=False)


def context_outlives_its_try(patch: MonkeyPatch) -> None:
    patch.setattr(Context, "_for_try", lambda self: self)
    patch.setattr(Context, "_ended", property(lambda self: False, lambda self, value: None), raising=False)


def interrupt_left_to_the_handler(patch: MonkeyPatch) -> None:
    """The table would refuse what follows: that is broken with it."""
    patch.setattr(Work, "interrupted", lambda self, kind: kind())
    _transition(patch, "duplicate", "succeeded", "done")


# --- the table of states -------------------------------------------------------------------------------------


def _transition(patch: MonkeyPatch, state: State, event: Event, following: State) -> None:
    patch.setitem(TABLE, state, {**TABLE[state], event: following})


def a_known_message_runs(patch: MonkeyPatch) -> None:
    _transition(patch, "new", "known", "new")


def what_was_rolled_back_counts(patch: MonkeyPatch) -> None:
    _transition(patch, "done", "undone", "done")


def what_was_lost_counts(patch: MonkeyPatch) -> None:
    _transition(patch, "done", "failed", "done")


def what_an_earlier_run_committed_runs_again(patch: MonkeyPatch) -> None:
    _transition(patch, "new", "resumed", "new")


def what_is_filtered_is_new(patch: MonkeyPatch) -> None:
    _transition(patch, "new", "filtered", "new")


def a_filter_takes_everything(patch: MonkeyPatch) -> None:
    patch.setattr(Filter, "takes", lambda self, message, headers: True)


def a_filter_takes_nothing(patch: MonkeyPatch) -> None:
    patch.setattr(Filter, "takes", lambda self, message, headers: False)


def the_token_of_what_is_filtered_stays(patch: MonkeyPatch) -> None:
    release = Claims.release

    async def mutant(self: Any, work: Any) -> None:
        if work.state != "filtered":
            await release(self, work)

    patch.setattr(Claims, "release", mutant)


def what_is_filtered_stays_parked(patch: MonkeyPatch) -> None:
    ended = Engine.ended

    async def mutant(self: Any, delivery: Any, outcome: str) -> None:
        await ended(self, delivery, "skipped" if outcome == "filtered" else outcome)

    patch.setattr(Engine, "ended", mutant)


def writes_of_a_failed_try_kept_in_its_batch(patch: MonkeyPatch) -> None:
    undo = UnitOfWork.undo

    async def mutant(self: Any, work: Any, exc: BaseException | None = None) -> None:
        try:
            await undo(self, work, exc)
        except Spoiled:
            work.entered, work.interrupt = False, None

    patch.setattr(UnitOfWork, "undo", mutant)


def writes_of_a_duplicate_sent(patch: MonkeyPatch) -> None:
    """What it wrote goes out before anybody looks whether another copy was faster."""

    async def mutant(self: Any, *, wait: bool = True) -> None:
        writers, self._writers = self._writers, []
        for write in [write for work in writers for write in work.writes]:
            self.transaction.write(write.sql, write.parameters)

    patch.setattr(UnitOfWork, "flush", mutant)


def writes_of_a_failed_try_sent(patch: MonkeyPatch) -> None:
    undo = UnitOfWork.undo

    async def mutant(self: Any, work: Any, exc: BaseException | None = None) -> None:
        if work.writes:
            self._writers.append(work)
            kept = work.writes
            await undo(self, work, exc)
            work.writes = kept
        else:
            await undo(self, work, exc)

    patch.setattr(UnitOfWork, "undo", mutant)


def eviction_without_floor(patch: MonkeyPatch) -> None:
    async def mutant(self: Any, node: str) -> None:
        return None

    patch.setattr(MemoryStore, "floor", mutant)
    patch.setattr(SqliteTransaction, "floor", mutant)


def dead_letter_writes_a_ledger_row(patch: MonkeyPatch) -> None:
    add_dead = SqliteTransaction.add_dead

    async def mutant(self: Any, letter: Any) -> Any:
        await self.record(letter.node, [LedgerRow(letter.message_id, None, None, None, letter.last_failed_at)])
        return await add_dead(self, letter)

    patch.setattr(SqliteTransaction, "add_dead", mutant)


# --- parting from a slow handler, and settling together ------------------------------------------------------


def _parting(patch: MonkeyPatch, **replaced: Any) -> None:
    """Hand other things in. Each is given what there was."""
    init = Parting.__init__

    def mutant(self: Any, put_back: Any, committing: Any, settling: Any, **options: Any) -> None:
        handed = {"put_back": put_back, "committing": committing, "settling": settling, **options}
        init(self, **{name: replaced.get(name, lambda same: same)(thing) for name, thing in handed.items()})

    patch.setattr(Parting, "__init__", mutant)


def what_is_decided_is_not_committed_when_a_batch_parts(patch: MonkeyPatch) -> None:
    async def mutant(self: Any, apart: Any, decided: Any, others: Any) -> None:
        await apart.abandon()

    patch.setattr(Parting, "_commit_apart", mutant)


def what_is_decided_is_not_settled_when_a_batch_parts(patch: MonkeyPatch) -> None:
    _parting(patch, settling=lambda settling: _Without(settling, "settle_all"))


def what_has_not_begun_is_not_put_back(patch: MonkeyPatch) -> None:
    _parting(patch, put_back=lambda put_back: lambda unbegun, ended: put_back((), [*unbegun, *ended]))


def marks_of_the_others_are_committed_when_a_batch_parts(patch: MonkeyPatch) -> None:
    commit_apart = Parting._commit_apart

    async def mutant(self: Any, apart: Any, decided: Any, others: Any) -> None:
        await commit_apart(self, apart, decided, [])

    patch.setattr(Parting, "_commit_apart", mutant)


def a_batch_parts_from_one_that_has_used_the_transaction(patch: MonkeyPatch) -> None:
    patch.setattr(UnitOfWork, "is_used", False)


def what_was_lost_counts_when_a_batch_parts(patch: MonkeyPatch) -> None:
    patch.setattr("faregate.core.parting.scatter", lambda works, exc: None)


def one_that_has_ended_stays_in_its_lane(patch: MonkeyPatch) -> None:
    put_back = Lanes.put_back

    def mutant(self: Any, unbegun: Any, ended: Any = ()) -> None:
        at_work, self.at_work = self.at_work, {}
        put_back(self, unbegun, ended)
        self.at_work = at_work

    patch.setattr(Lanes, "put_back", mutant)


def what_is_behind_overtakes_what_is_put_back(patch: MonkeyPatch) -> None:
    put_back = Lanes.put_back

    def mutant(self: Any, unbegun: Any, ended: Any = ()) -> None:
        put_back(self, (), [*unbegun, *ended])
        self._ready.extend(unbegun)
        self._wake()

    patch.setattr(Lanes, "put_back", mutant)


def undecided_ones_are_settled_together(patch: MonkeyPatch) -> None:
    def mutant(self: Any, first: Any, works: Any) -> Any:
        first.settle_all([work.delivery for work in works], ["handled" for _ in works])
        for work in works:
            if work.state == "done":
                work.move("settled")
        return [work for work in works if work.state != "settled"]

    patch.setattr(Settling, "_settle_together", mutant)


def some_are_forgotten_when_they_are_settled_together(patch: MonkeyPatch) -> None:
    settle_together = Settling._settle_together
    patch.setattr(Settling, "_settle_together", lambda self, first, works: settle_together(self, first, works[1:]))


# --- tokens: receiving ---------------------------------------------------------------------------------------


def no_claim(patch: MonkeyPatch) -> None:
    async def claim(self: Any, work: Any, attempt_id: str) -> str:
        work.claim_id, work.claimed_attempt = "none", attempt_id
        return "duplicate" if await self._tokens.read(attempt_id) is None else "run"

    async def forget(self: Any, work: Any) -> None:
        if work.claimed_attempt is not None:
            await self._tokens.discard([work.claimed_attempt])

    patch.setattr(Claims, "claim", claim)
    patch.setattr(Claims, "commit", _nothing)
    patch.setattr(Claims, "forget", forget)


def commit_not_conditional_on_the_claim(patch: MonkeyPatch) -> None:
    async def commit(self: Any, transaction: Any, works: Any) -> None:
        for work in works:
            await transaction.finish_claim(self._node, work.message_id, work.claim_id)

    patch.setattr(Claims, "commit", commit)


def claim_regenerated_on_retry(patch: MonkeyPatch) -> None:
    claim = Claims.claim

    async def mutant(self: Any, work: Any, attempt_id: str) -> str:
        record = await self._store.claim_record(self._node, work.message_id)
        if record is not None and record.state == "NEW":
            await self._store.delete_claim(self._node, work.message_id, record.claim_id, only_new=True)
        return await claim(self, work, attempt_id)

    patch.setattr(Claims, "claim", mutant)


def token_deleted_before_the_sends(patch: MonkeyPatch) -> None:
    async def finish(self: Any, work: Any) -> None:
        await self.forget(work)
        await self._dispatch(await self._store.outbox_rows_of(self._node, work.message_id))

    patch.setattr(Claims, "finish", finish)


def claim_deleted_before_the_token(patch: MonkeyPatch) -> None:
    async def forget(self: Any, work: Any) -> None:
        if work.claim_id is not None and work.claimed_attempt is not None:
            await self._store.delete_claim(self._node, work.message_id, work.claim_id, only_new=False)
            await self._tokens.delete(work.claimed_attempt, work.claim_id)

    patch.setattr(Claims, "forget", forget)


def no_sweeper(patch: MonkeyPatch) -> None:
    async def mutant(self: Any) -> None: ...

    patch.setattr(Housekeeper, "_sweep", mutant)


# --- tokens: sending -----------------------------------------------------------------------------------------


def attempts_not_persisted_before_sending(patch: MonkeyPatch) -> None:
    async def choose(self: Any, row: Any) -> Any:
        attempt, now = attempts_module.uuid4(), await self._tokens.now()
        await self._tokens.create(self._tokens_of(row, [attempt], now, now + FENCE_SECONDS))
        return row._replace(chosen=(attempt,))

    patch.setattr(Attempts, "choose", choose)


def token_keyed_by_message_id(patch: MonkeyPatch) -> None:
    async def mutant(self: Any, row: Any) -> None:
        attempt, now = ids.message_id(row.envelope.publication_id, row.envelope.recipients[0]), await self._tokens.now()
        if await self._store.register_attempts(row.seq, row.version, [attempt], now + FENCE_SECONDS):
            await self._tokens.create(self._tokens_of(row, [attempt], now, now + FENCE_SECONDS))
            await self._store.choose_attempts(row.seq, row.version + 1, [attempt])

    patch.setattr(Attempts, "_try", mutant)


def create_retried_with_the_same_attempt(patch: MonkeyPatch) -> None:
    attempt_of = Attempts._try

    async def mutant(self: Any, row: Any) -> None:
        tokens, self._tokens = self._tokens, _Insistent(self._tokens)
        try:
            await attempt_of(self, row)
        finally:
            self._tokens = tokens

    patch.setattr(Attempts, "_try", mutant)


def no_fence(patch: MonkeyPatch) -> None:
    tokens_of = Attempts._tokens_of

    def mutant(self: Any, row: Any, attempts: Any, now: float, not_after: float) -> Any:
        return tokens_of(self, row, attempts, now, 1e15)

    patch.setattr(Attempts, "_tokens_of", mutant)


def resolved_rows_go_to_the_end(patch: MonkeyPatch) -> None:
    resolve = Attempts.resolve

    async def mutant(self: Any, rows: Any) -> Any:
        resolved = await resolve(self, rows)
        there = {seq: row for seq, row in resolved.items() if row is not None}
        transaction = self._store.transaction()
        await transaction.begin()
        await transaction.dispatched(list(there))
        seqs = await transaction.send(list(there.values()))
        await transaction.commit()
        moved = zip(there.items(), seqs, strict=True)
        return {**resolved, **{old: row._replace(seq=seq) for (old, row), seq in moved}}

    patch.setattr(Attempts, "resolve", mutant)


class _Insistent:
    """Repeats a create whose answer did not come."""

    def __init__(self, tokens: Any) -> None:
        self._tokens = tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokens, name)

    async def create(self, tokens: Any) -> None:
        try:
            await self._tokens.create(tokens)
        except StoreUnavailable:
            await self._tokens.create(tokens)


# --- Spark ---------------------------------------------------------------------------------------------------


def positions_advanced_before_the_handlers(patch: MonkeyPatch) -> None:
    """In a commit of their own. Whoever made it knows that these are new."""
    work, own = Engine._work, set[Any]()

    async def mutant(self: Any, run: Any, taken: Any) -> Any:
        async with self.store.transaction() as transaction:
            await transaction.lock_buckets("a", buckets_of(taken))
            own.update(set(taken) - await self._behind(transaction, taken))
            reached = {each.order_key: each.position for each in taken if each.order_key is not None}
            await transaction.advance("a", run.feed.positions, reached)
        return await work(self, run, taken)

    _is_behind(patch, lambda delivery, last: delivery not in own and is_behind(delivery, last))
    patch.setattr(Engine, "_work", mutant)


def positions_advanced_after_the_commit(patch: MonkeyPatch) -> None:
    ended = Engine.ended

    async def mutant(self: Any, delivery: Any, outcome: str) -> None:
        if delivery.order_key is not None:
            async with self.store.transaction() as transaction:
                await transaction.lock_buckets("a", delivery.buckets)
                await transaction.advance("a", self.runs[0].feed.positions, {delivery.order_key: delivery.position})
        await ended(self, delivery, outcome)

    patch.setattr(LogFeed, "record", _nothing)
    patch.setattr(Engine, "ended", mutant)


def no_lock_of_the_bucket(patch: MonkeyPatch) -> None:
    patch.setattr(SimTransaction, "lock_buckets", _nothing)


def a_parked_message_stays_parked_when_it_is_handled(patch: MonkeyPatch) -> None:
    record = LogFeed.record

    async def mutant(self: Any, transaction: Any, works: Any) -> None:
        await record(self, _Without(transaction, "unpark"), works)

    patch.setattr(LogFeed, "record", mutant)


def a_parked_message_is_behind_like_any_other(patch: MonkeyPatch) -> None:
    def mutant(delivery: Any, last: Any) -> bool:
        return bool(delivery.order_key is not None and delivery.position <= last.get(delivery.order_key, -1))

    _is_behind(patch, mutant)


def nothing_is_behind(patch: MonkeyPatch) -> None:
    _is_behind(patch, lambda delivery, last: False)


def _is_behind(patch: MonkeyPatch, mutant: Any) -> None:
    patch.setattr("faregate.spark.runs.feed.is_behind", mutant)


def a_dead_letter_stays_parked_until_it_is_settled(patch: MonkeyPatch) -> None:
    patch.setattr(LogFeed, "dead_letter", _nothing)


def nobody_waits_for_what_is_parked(patch: MonkeyPatch) -> None:
    patch.setattr(SubscriptionRun, "behind", lambda self, delivery: None)


def outbox_of_spark_sent_before_the_commit(patch: MonkeyPatch) -> None:
    record = OutboxOnly.record_rows

    async def mutant(self: Any, transaction: Any, rows: Any) -> Any:
        PROCESS.get().world.broker.append([row.envelope for row in rows])
        PROCESS.get().world.scheduler.acted()
        return await record(self, transaction, rows)

    patch.setattr(OutboxOnly, "record_rows", mutant)


def outbox_rows_forgotten_before_they_are_spooled(patch: MonkeyPatch) -> None:
    send = OutboxSpooler._send_rows

    async def mutant(self: Any, rows: Any) -> None:
        async with self._store.transaction() as transaction:
            await transaction.dispatched([row.seq for row in rows])
        assert faults.hook is not None
        await faults.hook("mutation.before-spool")
        await send(self, rows)

    patch.setattr(OutboxSpooler, "_send_rows", mutant)


def tokens_of_spark_gone_before_the_sends(patch: MonkeyPatch) -> None:
    finish_all = Claims.finish_all

    async def mutant(self: Any, send: Any) -> Any:
        await finish_all(self, _nothing)
        return await send()

    patch.setattr(Claims, "finish_all", mutant)


def done_claims_of_spark_read_behind_the_sends(patch: MonkeyPatch) -> None:
    finish_all = Claims.finish_all

    async def mutant(self: Any, send: Any) -> Any:
        sent = await send()
        await finish_all(self, _nothing)
        return sent

    patch.setattr(Claims, "finish_all", mutant)


def tokens_of_spark_stay(patch: MonkeyPatch) -> None:
    async def mutant(self: Any, send: Any) -> Any:
        return await send()

    patch.setattr(Claims, "finish_all", mutant)


def claims_of_spark_deleted_before_the_tokens(patch: MonkeyPatch) -> None:
    async def mutant(self: Any, send: Any) -> Any:
        done = await self._store.done_claims(self._node)
        sent = await send()
        async with self._store.transaction() as transaction:
            await transaction.delete_claims(done)
        await self._tokens.discard([each.attempt_id for each in done])
        return sent

    patch.setattr(Claims, "finish_all", mutant)


class _Without:
    """A transaction that does all but one thing."""

    def __init__(self, transaction: Any, left_out: str) -> None:
        self._transaction = transaction
        setattr(self, left_out, _nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)
