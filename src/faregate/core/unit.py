"""One transaction of a lane, and the messages in it.

Rules kept here:
- The transaction opens at the first use of `ctx.db`, or at the commit. It begins with the ledger rows of all its
  messages, so whoever comes second with a message learns it before writing anything.
- Each message writes behind a savepoint of its own; a failed try leaves no write, its token is whole again, and its
  ledger row is taken out.
- A message alone in its transaction needs no savepoint: a failed try rolls everything back, so that nothing stays
  open while it waits for the next.
- Where a savepoint costs a round trip, a batch does without until a try fails. Then all of it is rolled back, and the
  others run again.
- Opening is all or nothing: whoever is cancelled on the way leaves no transaction, and no handler writes into one
  without its ledger row.
- Statements of one message follow each other, whichever tasks they come from, and nothing ends under one of them. A
  try that failed cancels the statement that it left behind; one that succeeded waits for it.
- The driver's connection cannot be taken back from whoever has it: such a message is alone in its transaction, and the
  connection is closed if tasks of its handler may still have it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from faregate.core.forks import end_if_forked, generation
from faregate.errors import CommitUnknown, StoreConflict, StoreUnavailable, TransactionMisused
from faregate.ports import faults
from faregate.ports.cancellation import finish
from faregate.ports.store import LedgerRow, OutboxRow, Store, Transaction

if TYPE_CHECKING:
    from faregate.core.context import Context
    from faregate.message import Envelope
    from faregate.ports.queue import Delivery

log = logging.getLogger("faregate.bus")

State = Literal["new", "done", "resumed", "duplicate", "folded", "failed"]
"""`resumed`: an earlier run committed it and could not finish. `folded`: a dead letter has it already."""

TRANSACTION_LOST = (StoreConflict, StoreUnavailable, CommitUnknown)
"""Errors after which nothing of a transaction is left, or nobody knows."""


class Interrupt(BaseException):
    """Ends a run of a handler from within `ctx.db`. Not an `Exception`: handlers must not mistake it for a failure.
    `Work.interrupt` remembers it, for handlers that catch it all the same, or wrap it."""


class AlreadyHandled(Interrupt):
    """Another copy of the message was faster."""


class NeedsTransaction(Interrupt):
    """The handler wants the driver's connection before there is one: it runs again with the transaction open."""


class NeedsSolitude(Interrupt):
    """The handler wants the driver's connection, among others: it runs again, alone in its transaction."""


class Spoiled(Interrupt):
    """A try does not count, in a transaction without savepoints: nothing of it can stay."""


class _Mark:
    """In the context of every task that a handler starts once it has the driver's connection, while the task lives."""

    __slots__ = ("__weakref__",)


_mark: ContextVar[_Mark | None] = ContextVar("faregate_connection", default=None)


def drop_mark() -> None:
    """Whoever runs here is done with the driver's connection."""
    if _mark.get() is not None:
        _mark.set(None)


class TransactionEnded(TransactionMisused):
    """A handler ended the transaction behind our back."""

    def __init__(self, work: Work) -> None:
        super().__init__(
            f"the handler of {work.ctx} ended the transaction itself, through ctx.db.raw or otherwise: its writes, the "
            "ledger row and the outgoing messages must be committed together, by Faregate"
        )


class Work:
    """One message in a unit of work."""

    __slots__ = (
        "at",
        "attempt_id",
        "claim_id",
        "claimed_attempt",
        "consumed",
        "ctx",
        "delivery",
        "eager",
        "entered",
        "error",
        "handler",
        "handler_failed",
        "has_savepoint",
        "identity",
        "in_ledger",
        "interrupt",
        "marks",
        "message_id",
        "outputs",
        "replayed",
        "row",
        "scattered",
        "state",
        "tries",
        "unit",
    )

    def __init__(self, delivery: Delivery, message_id: str, handler: str, at: float) -> None:
        self.delivery = delivery
        self.message_id = message_id
        self.handler = handler
        self.at = at
        """The later of now and when it was sent."""
        self.ctx: Context | None = None
        self.row: LedgerRow | None = None
        """Its row in the ledger; None where it is not deduplicated by the ledger."""
        self.attempt_id: str | None = None
        """Its token, where it is deduplicated by tokens in the node's own database."""
        self.claim_id: str | None = None
        """Its claim on a token in another database; `claimed_attempt` is that token."""
        self.claimed_attempt: str | None = None
        self.consumed = False
        """Whether that token is used up, in the transaction at hand."""
        self.state: State = "new"
        self.in_ledger = False
        """Whether the ledger knows it, as a duplicate."""
        self.replayed = False
        """Whether it is the replay of a dead letter that is still open."""
        self.error: BaseException | None = None
        self.outputs: list[OutboxRow] = []
        self.tries = 0
        """How often its handler ran and failed."""
        self.scattered = False
        """Whether it shared a transaction that was lost, through no fault that one knows of."""
        self.handler_failed = False
        """Whether the error is the handler's, not one of what is around it."""
        self.identity: str | None = None
        """The business key to claim in its transaction."""
        self.eager = False
        """Whether its handler wants the transaction before it starts."""
        self.unit: UnitOfWork | None = None
        self.entered = False
        """Whether it has used the transaction in this try."""
        self.has_savepoint = False
        self.interrupt: type[Interrupt] | None = None
        """What its handler was interrupted with, whatever the handler made of that."""
        self.marks: list[weakref.ref[_Mark]] = []
        """For each time that its handler was given the driver's connection."""

    @property
    def envelope(self) -> Envelope:
        return self.delivery.envelope

    # --- for `ctx.db` of one of its tries ---

    async def run(self, ctx: Context, statement: str, sql: str, parameters: Any) -> Any:
        """Run a statement in the transaction. Raises `TryEnded`, also when the try ends before its turn has come."""
        return await self._unit_for(ctx).run(self, ctx, statement, sql, parameters)

    async def enter(self, ctx: Context) -> None:
        """Have the transaction open, ready for this message's statements."""
        await self._unit_for(ctx).run(self, ctx, None, "", ())

    def raw(self, ctx: Context) -> Any:
        unit = self._unit_for(ctx)
        if not unit.alone:
            raise self.interrupted(NeedsSolitude)
        if not self.entered or unit.transaction is None:
            raise self.interrupted(NeedsTransaction)
        mark = _Mark()
        _mark.set(mark)
        self.marks.append(weakref.ref(mark))
        return unit.transaction.raw

    def _unit_for(self, ctx: Context) -> UnitOfWork:
        unit = self.unit
        if ctx._ended or unit is None or unit.current is not self:
            ctx._refuse()
        return unit

    def interrupted(self, kind: type[Interrupt]) -> Interrupt:
        self.interrupt = kind
        return kind()

    # --- for the core ---

    @property
    def may_wait(self) -> bool:
        """Whether it may wait for its next try here; among others it must not hold them up."""
        return self.unit is None or self.unit.alone

    async def failed(self, exc: BaseException | None = None) -> None:
        """A try of the handler failed: nothing that it wrote stays. Called by the core between tries."""
        self.handler_failed = True
        await self.undo(exc)

    async def undo(self, exc: BaseException | None = None) -> None:
        """A run of the handler does not count: nothing that it wrote stays."""
        if self.unit is not None:
            await self.unit.undo(self, exc)


Disagreement = Callable[[Work, "bytes | None"], None]
"""Told of a message that another copy of was handled, with the digest of that one's body."""
Fence = Callable[[Transaction, list[Work]], Awaitable[None]]
"""First in every transaction: may make those of its messages duplicates that an earlier run has dealt with."""


class UnitOfWork:
    """The messages of one transaction. `current` is the one whose handler runs."""

    def __init__(
        self,
        store: Store,
        node: str,
        works: Sequence[Work],
        known: Disagreement,
        fence: Fence | None = None,
        *,
        savepoints: bool = True,
    ) -> None:
        self.works = works
        self.alone = len(works) == 1
        self._savepoints = savepoints and not self.alone
        self.loop = asyncio.get_running_loop()
        self.transaction: Transaction | None = None
        self.current: Work | None = None
        self._statements = asyncio.Lock()
        """Held by the statement at hand."""
        self._user: tuple[Context, asyncio.Task[Any] | None] | None = None
        """Whose statement that is."""
        self.generation = generation()
        self.waited = 0.0
        """Seconds spent on getting the transaction: the time of others."""
        self._store = store
        self._node = node
        self._known = known
        self._fence = fence
        for work in works:
            work.unit = self

    async def run(self, work: Work, ctx: Context, statement: str | None, sql: str, parameters: Any) -> Any:
        """One statement of a message; None just opens the transaction for it."""
        end_if_forked(self.generation)
        await self._statements.acquire()
        task = asyncio.current_task()
        self._user = ctx, task
        try:
            if not work.entered and not ctx._ended:
                await self._enter(work)
            if ctx._ended:
                ctx._refuse()
            return None if statement is None else await getattr(self.transaction, statement)(sql, parameters)
        except asyncio.CancelledError:
            if not ctx._ended or task is None or task.uncancel():
                raise
            ctx._refuse()  # its try ended, and took the statement back
        finally:
            self._user = None
            self._statements.release()

    async def still(self, *, cancel: bool) -> None:
        """Wait until no statement is under way. `cancel`: one of an ended try is not waited for."""
        if self._statements.locked():
            if cancel and self._user is not None:
                ctx, task = self._user
                if ctx._ended and task is not None:
                    task.cancel()
            await finish(self._wait_for_statement())

    async def _wait_for_statement(self) -> None:
        async with self._statements:
            pass

    async def _enter(self, work: Work) -> None:
        if self.transaction is None:
            await self._open()
        transaction = self.transaction
        assert transaction is not None
        if self._savepoints and work.state != "duplicate" and not work.has_savepoint:
            await transaction.savepoint()
            work.has_savepoint = True
        if work.attempt_id is not None and work.claim_id is None and not work.consumed:
            work.consumed = bool(await transaction.consume_tokens([work.attempt_id]))
            if not work.consumed:
                work.state = "duplicate"
        if work.state == "duplicate":
            raise work.interrupted(AlreadyHandled)
        work.entered = True

    async def _open(self) -> None:
        """Open the transaction and record all its messages that are still in the running."""
        started = perf_counter()
        transaction = self._store.transaction()
        await transaction.begin()
        self.waited += perf_counter() - started
        try:
            await self._record_running(transaction)
        except BaseException:
            await transaction.roll_back()
            raise
        self.transaction = transaction

    async def _record_running(self, transaction: Transaction) -> None:
        running = [work for work in self.works if work.state in ("new", "done")]
        if self._fence is not None:
            await self._fence(transaction, running)
            running = [work for work in running if work.state in ("new", "done")]
        rows = [work.row for work in running if work.row is not None]
        there = await transaction.record(self._node, rows) if rows else {}
        for work in running:
            if work.row is not None and work.message_id in there:
                work.state = "duplicate"
                self._known(work, there[work.message_id])
            elif work.identity is not None and not await transaction.identify(
                self._node, work.handler, work.identity, work.at
            ):
                work.state = "duplicate"

    async def undo(self, work: Work, exc: BaseException | None = None) -> None:
        """Roll a failed try back: alone everything, among others to its savepoint. `exc` is what it failed with."""
        end_if_forked(self.generation)
        await self.still(cancel=True)
        if self.transaction is None or not (work.entered or work.has_savepoint or self.alone):
            return
        if work.entered and not self.transaction.is_open:
            raise await self._why_ended(self.transaction, work, exc)
        if self.alone:
            await self.abandon()
        elif not self._savepoints:
            raise work.interrupted(Spoiled)
        else:
            await self.transaction.roll_back_to_savepoint()
            await self.transaction.release_savepoint()
        work.entered = work.has_savepoint = work.consumed = False

    async def leave(self, work: Work) -> None:
        """A message succeeded: what it wrote stays, if the rest goes well."""
        end_if_forked(self.generation)
        await self.still(cancel=False)
        if not work.entered:
            return
        transaction = self.transaction
        assert transaction is not None
        if not transaction.is_open:
            raise await self._why_ended(transaction, work)
        if transaction.is_broken:
            raise TransactionMisused(
                f"a statement of {work.ctx} failed and the handler went on: PostgreSQL then refuses all further work "
                "of the transaction. Use `on conflict do nothing`, or put the statement that may fail into "
                "`async with ctx.db.raw.transaction():`, which rolls back that part alone"
            )
        if self._savepoints:
            await transaction.release_savepoint()
        self._take_back(work)
        work.entered = work.has_savepoint = False

    @staticmethod
    async def _why_ended(transaction: Transaction, work: Work, exc: BaseException | None = None) -> BaseException:
        """The transaction is not open any more: the database was lost, or else the handler ended it."""
        if transaction.was_closed:
            return TransactionEnded(work)
        if isinstance(exc, TRANSACTION_LOST):
            return exc
        try:
            await transaction.execute("select 1")
        except TRANSACTION_LOST as lost:
            return lost
        except Exception:
            pass  # it is refused because there is no transaction
        return TransactionEnded(work)

    async def commit(
        self, done: Callable[[Transaction, list[Work]], Awaitable[None]], folded: Sequence[Work] = ()
    ) -> None:
        """Commit what succeeded; `done` adds what goes with it (outbox, resolved dead letters)."""
        finished = [work for work in self.works if work.state == "done"]
        if not finished and not folded:
            await self.abandon()
            return
        if self.transaction is None:
            await self._open()
        transaction = self.transaction
        assert transaction is not None
        await self._consume(
            [work for work in finished if work.attempt_id and work.claim_id is None and not work.consumed]
        )
        finished = [work for work in finished if work.state == "done"]
        failed = [work.message_id for work in self.works if work.state in ("failed", "new") and work.row is not None]
        if failed:
            await transaction.unrecord(self._node, failed)
        for work in folded:
            await transaction.fold(self._node, work.message_id)
        await done(transaction, finished)
        if faults.hook is not None:
            await faults.hook("unit.before-commit")
        await transaction.commit()
        self.transaction = None
        if faults.hook is not None:
            await faults.hook("unit.after-commit")

    async def _consume(self, works: list[Work]) -> None:
        """Use up the tokens of messages that did without the transaction so far."""
        if not works:
            return
        assert self.transaction is not None
        consumed = await self.transaction.consume_tokens([work.attempt_id for work in works if work.attempt_id])
        for work in works:
            if work.attempt_id not in consumed:
                work.state = "duplicate"

    async def abandon(self) -> None:
        """Roll everything back."""
        end_if_forked(self.generation)
        await self.still(cancel=True)
        for work in self.works:
            self._take_back(work)
        if self.transaction is not None:
            transaction, self.transaction = self.transaction, None
            await transaction.roll_back()

    def _take_back(self, work: Work) -> None:
        """The handler is done with the driver's connection, but for tasks that it left behind."""
        if work.marks:
            drop_mark()
            if self.transaction is not None and any(mark() is not None for mark in work.marks):
                self.transaction.retire()
            work.marks.clear()
