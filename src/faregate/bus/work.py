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
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from faregate.bus.database import BlockingDatabase, Database
from faregate.errors import CommitUnknown, StoreConflict, StoreUnavailable, TransactionMisused, WrongEventLoop
from faregate.ports import faults
from faregate.ports.store import LedgerRow, OutboxRow, Store, Transaction

if TYPE_CHECKING:
    from faregate.bus.context import Context
    from faregate.message import Envelope
    from faregate.ports.queue import Delivery

log = logging.getLogger("faregate.bus")

State = Literal["new", "done", "resumed", "duplicate", "folded", "failed"]
"""`resumed`: an earlier run committed it and could not finish. `folded`: a dead letter has it already."""

TRANSACTION_LOST = (StoreConflict, StoreUnavailable, CommitUnknown)
"""Errors after which nothing of a transaction is left, or nobody knows."""


class Interrupt(BaseException):
    """Ends a run of a handler from within `ctx.db`. Not an `Exception`: handlers must not mistake it for a failure."""


class AlreadyHandled(Interrupt):
    """Another copy of the message was faster."""


class NeedsTransaction(Interrupt):
    """The handler wants the driver's connection before there is one: it runs again with the transaction open."""


class Spoiled(Interrupt):
    """A try does not count, in a transaction without savepoints: nothing of it can stay."""


def interrupt_of(exc: BaseException) -> type[Interrupt] | None:
    """What ended a handler's run from within `ctx.db`, be it inside a group; None when something else did."""
    if isinstance(exc, Interrupt):
        return type(exc)
    if isinstance(exc, BaseExceptionGroup):
        return next((kind for each in exc.exceptions if (kind := interrupt_of(each)) is not None), None)
    return None


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
        "database_",
        "delivery",
        "eager",
        "entered",
        "error",
        "handler",
        "handler_failed",
        "has_savepoint",
        "identity",
        "in_ledger",
        "message_id",
        "outputs",
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
        self.database_: Database | None = None

    @property
    def envelope(self) -> Envelope:
        return self.delivery.envelope

    @property
    def database(self) -> Database | BlockingDatabase:
        """Which of the two depends on who asks: a thread has no running event loop."""
        if self.unit is None:
            raise TransactionMisused(f"ctx.db of {self.ctx} was used outside of its unit of work")
        running = asyncio._get_running_loop()
        if running is None:
            return BlockingDatabase(self, self.unit.loop)
        if running is not self.unit.loop:
            raise WrongEventLoop(
                f"ctx.db of {self.ctx} was used on another event loop than the bus runs on: in a thread call it "
                "plainly, without a loop of its own, or hand it over with asyncio.run_coroutine_threadsafe"
            )
        if self.database_ is None:
            self.database_ = Database(self)
        return self.database_

    async def transaction(self) -> Transaction:
        """The open transaction, ready for this message's statements."""
        unit = self.unit
        if unit is None or unit.current is not self:
            raise TransactionMisused(
                f"ctx.db was used after the handler of {self.ctx} had ended: await everything within the handler"
            )
        if not self.entered:
            await unit.enter(self)
        assert unit.transaction is not None
        return unit.transaction

    def opened_transaction(self) -> Transaction:
        """The same, for who cannot wait."""
        unit = self.unit
        if unit is None or unit.current is not self:
            raise TransactionMisused(f"ctx.db was used after the handler of {self.ctx} had ended")
        if not self.entered or unit.transaction is None:
            raise NeedsTransaction
        return unit.transaction

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
        self._entering = asyncio.Lock()
        self.waited = 0.0
        """Seconds spent on getting the transaction: the time of others."""
        self._store = store
        self._node = node
        self._known = known
        self._fence = fence
        for work in works:
            work.unit = self

    async def enter(self, work: Work) -> None:
        """A message is about to use the transaction. Its handler may do so from several tasks at once."""
        async with self._entering:
            if not work.entered:
                await self._enter(work)

    async def _enter(self, work: Work) -> None:
        if self.transaction is None:
            await self.begin()
        transaction = self.transaction
        assert transaction is not None
        if self._savepoints and work.state != "duplicate":
            await transaction.savepoint()
            work.has_savepoint = True
        if work.attempt_id is not None and work.claim_id is None and not work.consumed:
            work.consumed = bool(await transaction.consume_tokens([work.attempt_id]))
            if not work.consumed:
                work.state = "duplicate"
        if work.state == "duplicate":
            raise AlreadyHandled
        work.entered = True

    async def begin(self) -> None:
        """Open the transaction and record all its messages that are still in the running."""
        started = perf_counter()
        transaction = self._store.transaction()
        await transaction.begin()
        self.waited += perf_counter() - started
        self.transaction = transaction
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
        if self.transaction is None or not (work.entered or work.has_savepoint or self.alone):
            return
        if work.entered and not self.transaction.is_open:
            raise await self._why_ended(self.transaction, work, exc)
        if self.alone:
            await self.abandon()
        elif not self._savepoints:
            raise Spoiled
        else:
            await self.transaction.roll_back_to_savepoint()
            await self.transaction.release_savepoint()
        work.entered = work.has_savepoint = work.consumed = False

    async def leave(self, work: Work) -> None:
        """A message succeeded: what it wrote stays, if the rest goes well."""
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
            await self.begin()
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
        if self.transaction is not None:
            transaction, self.transaction = self.transaction, None
            await transaction.roll_back()
