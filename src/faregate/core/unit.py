"""One transaction of a lane, and the messages in it.

Rules kept here:
- The transaction opens at the first use of `ctx.db`, or at the commit. It begins with the marks of all its messages, so
  whoever comes second with a message learns it before writing anything.
- Each message writes behind a savepoint of its own; a failed try leaves no write, its token is whole again, and its
  mark is taken out.
- A message alone in its transaction needs no savepoint: a failed try rolls everything back, so that nothing stays
  open while it waits for the next.
- Where a savepoint costs a round trip, a batch does without until a try fails. Then all of it is rolled back, and its
  messages run again, with savepoints.
- What a handler writes without waiting is sent before its next statement. Behind that it is sent when the handler
  returns; in a batch without savepoints only with the batch, or when much has come together. Nobody knows then whose
  statement was refused: that spoils the batch, and with savepoints it is the handler's own failure.
- What a failed try wrote and is not sent is forgotten; it has spoiled nothing.
- Opening is all or nothing: whoever is cancelled on the way leaves no transaction, and no handler writes into one
  without its mark.
- Statements of one message follow each other, whichever tasks they come from, and nothing ends under one of them. A
  try that failed cancels the statement that it left behind; one that succeeded waits for it.
- The driver's connection cannot be taken back from whoever has it: such a message is alone in its transaction, and the
  connection is closed if tasks of its handler may still have it.

A node without a store has no transaction; then nothing here opens one, and there is nothing to undo.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

from faregate.core.dedup import by_dedup
from faregate.core.forks import end_if_forked, generation
from faregate.core.work import AlreadyHandled, Spoiled, Work, Write
from faregate.errors import CommitUnknown, StoreConflict, StoreUnavailable, TransactionMisused
from faregate.ports import faults
from faregate.ports.cancellation import finish
from faregate.ports.store import Store, Transaction

if TYPE_CHECKING:
    from faregate.core.context import Context

TRANSACTION_LOST = (StoreConflict, StoreUnavailable, CommitUnknown)
"""Errors after which nothing of a transaction is left, or nobody knows."""

_MOST_WRITES, _MOST_WRITE_BYTES = 1_000, 1 << 20
"""When so much waits to be sent, it is."""

Enter = Callable[[Transaction, Sequence[Work]], Awaitable[None]]
"""First in every transaction: leaves the marks of its messages, and finds those that are duplicates by now."""


Cancel = Callable[[str | None, str | None], Awaitable[bool]]


class TransactionEnded(TransactionMisused):
    """A handler ended the transaction behind our back."""

    def __init__(self, work: Work) -> None:
        super().__init__(
            f"the handler of {work.ctx} ended the transaction itself, through ctx.db.raw or otherwise: its writes, the "
            "ledger row and the outgoing messages must be committed together, by Faregate"
        )


class Home:
    """What all units of work of one handling have in common. Made on the event loop that they run on."""

    __slots__ = ("cancel", "enter", "generation", "left_behind", "loop", "store", "thread")

    def __init__(
        self, store: Store | None, enter: Enter | None, left_behind: Callable[[Context], None], cancel: Cancel | None
    ) -> None:
        """`left_behind` is told when the context of a try is used after its end. `cancel` takes back what is scheduled,
        outside of any transaction; None: this engine schedules nothing that could be taken back."""
        self.store = store
        self.cancel = cancel
        self.enter = enter
        self.left_behind = left_behind
        self.loop, self.thread = asyncio.get_running_loop(), get_ident()
        self.generation = generation()


class UnitOfWork:
    """The messages of one transaction. `current` is the one whose handler runs."""

    __slots__ = (
        "_savepoints", "_turn", "_user", "_waiting", "_waiting_bytes", "_writers", "alone", "cancelling", "current",
        "doubtful", "home", "parting", "shared", "transaction", "waited", "watch", "works",
    )  # fmt: skip
    watch: asyncio.TimerHandle
    """Looks whether the message at hand takes its time, in a batch."""

    def __init__(self, home: Home, works: Sequence[Work], savepoints: bool) -> None:
        alone = len(works) == 1
        self.home = home
        self.works = works
        self.transaction: Transaction | None = None
        self.current: Work | None = None
        self.waited = 0.0
        """Seconds spent on getting the transaction: the time of others."""
        self.doubtful = False
        """Whether so many of its handlers failed that the rest has to wait."""
        self.alone = alone
        self.shared = not (savepoints or alone)
        """Whether what one message breaks is broken for all of them."""
        self._savepoints = savepoints and not alone
        self._user: tuple[Context, asyncio.Task[Any] | None] | None = None
        """Whose statement is at hand."""
        self._turn: asyncio.Semaphore | None = None
        """Whose turn it is, once a statement had to wait for another."""
        self._writers: list[Work] = []
        """Messages that succeeded, and whose writes still wait."""
        self._waiting = self._waiting_bytes = 0
        """How many writes wait, and about how much that is."""
        self.parting: asyncio.Task[None] | None = None
        """Commits those that left. Until then nothing else opens: it could wait for what the other holds, for ever."""
        task = asyncio.current_task(home.loop)
        assert task is not None
        self.cancelling = task.cancelling
        """Whether somebody has cancelled the lane."""
        for work in works:
            work.unit = self

    @property
    def is_used(self) -> bool:
        """Whether the message at hand has something in the transaction, or is about to."""
        current = self.current
        if current is None or self._user is not None:
            return self._user is not None
        return current.entered or current.has_savepoint or (current.ctx is not None and current.ctx._ended)

    def part(self, staying: Sequence[Work], works: Sequence[Work]) -> UnitOfWork:
        """A unit of these, which takes the transaction along; those that stay will open another."""
        apart = UnitOfWork(self.home, works, savepoints=not self.shared)
        apart.transaction, self.transaction = self.transaction, None
        apart._writers, self._writers = self._writers, []
        self.works = staying
        self._waiting = self._waiting_bytes = 0
        return apart

    # --- statements of handlers ------------------------------------------------------------------------------

    async def run(self, work: Work, ctx: Context, statement: str | None, sql: str, parameters: Any) -> Any:
        """One statement of a message; None just opens the transaction for it."""
        end_if_forked(self.home.generation)
        if self._user is not None or self._turn is not None:
            await self._take_turn()
        task = asyncio.current_task(self.home.loop)
        self._user = ctx, task
        try:
            if work.wrote:
                if work.sending is not task:
                    work.stop_sending()
                if work.refused is not None:
                    raise work.refused
            if not work.entered and not ctx._ended:
                await self._enter(work)
            if ctx._ended:
                ctx._refuse()
            if work.writes:
                await self._send_writes(work, ctx._attempt)
            return None if statement is None else await getattr(self.transaction, statement)(sql, parameters)
        except asyncio.CancelledError:
            if not ctx._ended or task is None or task.uncancel():
                raise
            ctx._refuse()  # its try ended, and took the statement back
        finally:
            self._user = None
            if self._turn is not None:
                self._turn.release()

    async def _take_turn(self) -> None:
        if self._turn is None:
            self._turn = asyncio.Semaphore(1 if self._user is None else 0)  # whoever is at it releases it
        await self._turn.acquire()

    def write(self, work: Work, write: Write) -> bool:
        """Take a statement that nobody waits for; whether so many wait that they had better be sent."""
        end_if_forked(self.home.generation)
        if not work.writes:
            work.writes = []
        work.writes.append(write)
        work.wrote = True
        self._waiting += 1
        self._waiting_bytes += write.size
        return self._waiting >= _MOST_WRITES or self._waiting_bytes >= _MOST_WRITE_BYTES

    async def _send_writes(self, work: Work, attempt: int) -> None:
        """Those of the message at hand. When something is wrong already they go one by one, to find out which."""
        transaction, writes = self.transaction, work.writes
        assert transaction is not None
        work.writes, self._waiting, self._waiting_bytes = (), 0, 0
        together = not self._savepoints and attempt == 1
        steps = [writes] if together else [[write] for write in writes]
        for step in steps:
            try:
                for write in step:
                    transaction.write(write.sql, write.parameters)
                await transaction.flush()
            except Exception as exc:
                exc.add_note(_whence(step))
                work.refused = exc
                raise

    async def flush(self, *, wait: bool = True) -> None:
        """Send what the messages before the one at hand wrote, and only those that are no duplicates by now. What need
        not `wait` for that goes out with the commit, at the latest."""
        if not self._writers:
            return
        transaction = await self.open()
        for dedup, group in by_dedup(self._writers):
            await dedup.take(transaction, [work for work in group if work.state != "duplicate"])
        # From here on they are the transaction's, which takes nothing more if it cannot send them.
        writers, self._writers = self._writers, []
        self._waiting = self._waiting_bytes = 0
        try:
            for work in writers:
                writes, work.writes = work.writes, ()
                for write in writes if work.state != "duplicate" else ():
                    transaction.write(write.sql, write.parameters)
            if wait:
                await transaction.flush()
        except TRANSACTION_LOST:
            raise
        except Exception as exc:
            raise Spoiled from exc

    async def still(self, *, cancel: bool) -> None:
        """Wait until no statement is under way. `cancel`: one of an ended try is not waited for."""
        if self._user is not None:
            ctx, task = self._user
            if cancel and ctx._ended and task is not None:
                task.cancel()
            await finish(self._wait_for_statement())

    async def _wait_for_statement(self) -> None:
        await self._take_turn()
        assert self._turn is not None
        self._turn.release()

    # --- beginning -------------------------------------------------------------------------------------------

    async def _enter(self, work: Work) -> None:
        transaction = self.transaction or await self.open()
        try:
            if self._writers:
                await self.flush()
        except Spoiled:
            work.interrupt = Spoiled
            raise
        if self._savepoints and work.state != "duplicate" and not work.has_savepoint:
            await transaction.savepoint()
            work.has_savepoint = True
        if work.attempt_id is not None and work.state != "duplicate":
            await work.dedup.take(transaction, [work])
        if work.state == "duplicate":
            raise work.interrupted(AlreadyHandled)
        work.entered = True

    async def open(self) -> Transaction:
        """The transaction, with the marks of all its messages that are still in the running."""
        if self.transaction is None:
            assert self.home.store is not None and self.home.enter is not None
            started = perf_counter()
            if self.parting is not None:
                await asyncio.wait([self.parting])
            transaction = self.home.store.transaction()
            await transaction.begin()
            self.waited += perf_counter() - started
            try:
                await self.home.enter(transaction, self.works)
            except BaseException:
                await transaction.roll_back()
                raise
            self.transaction = transaction
        return self.transaction

    # --- the end of a try ------------------------------------------------------------------------------------

    async def undo(self, work: Work, exc: BaseException | None = None) -> None:
        """Roll a failed try back: alone everything, among others to its savepoint. `exc` is what it failed with."""
        end_if_forked(self.home.generation)
        await self.still(cancel=True)
        work.stop_sending()
        work.writes, work.wrote, work.refused, work.asked = (), False, None, ()
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
        if self._user is not None:
            await self.still(cancel=False)
        if work.wrote:
            await self._leave_writes(work)
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
                "`async with ctx.db.raw.transaction():`, with SQLAlchemy into `ctx.session.begin_nested()`, which "
                "rolls back that part alone"
            )
        if self._savepoints:
            await transaction.release_savepoint()
        if work.holds:
            self._take_back(work)
        work.entered = work.has_savepoint = False

    async def _leave_writes(self, work: Work) -> None:
        """What it wrote goes out, if it would be blamed on nobody later."""
        work.stop_sending()
        if work.refused is not None:
            raise work.refused
        if work.writes and not self.shared:  # of a middleware, behind its handler
            if not work.entered:
                await self._enter(work)
            await self._send_writes(work, 1)
        elif work.writes:
            self._writers.append(work)
            if self._waiting >= _MOST_WRITES or self._waiting_bytes >= _MOST_WRITE_BYTES:
                await self.flush()
                if work.state == "duplicate":
                    raise work.interrupted(AlreadyHandled)

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

    # --- ending ----------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Everything in the transaction happens, or nothing does."""
        transaction = self.transaction
        assert transaction is not None
        if faults.hook is not None:
            await faults.hook("unit.before-commit")
        await transaction.commit()
        self.transaction = None
        if faults.hook is not None:
            await faults.hook("unit.after-commit")

    async def abandon(self) -> None:
        """Roll everything back."""
        end_if_forked(self.home.generation)
        await self.still(cancel=True)
        self._writers = []
        for work in self.works:
            work.writes = ()
            self._take_back(work)
        if self.transaction is not None:
            transaction, self.transaction = self.transaction, None
            await transaction.roll_back()

    def _take_back(self, work: Work) -> None:
        if work.holds and work.take_back() and self.transaction is not None:
            self.transaction.retire()


def _whence(writes: Sequence[Write]) -> str:
    """Where the handler wrote what was refused."""
    if len(writes) > 1:
        return f"one of the {len(writes)} statements that the handler wrote with ctx.db.write"
    [write] = writes
    return f"written with ctx.db.write in {write.file}, line {write.line}: {write.sql.strip()[:200]}"
