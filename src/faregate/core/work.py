"""One message in a unit of work: its state, how copies of it are recognised, and what `ctx.db` of its tries can do."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Sequence
from contextvars import ContextVar
from inspect import CORO_CREATED, getcoroutinelocals, getcoroutinestate
from typing import TYPE_CHECKING, Any, NamedTuple

from faregate.core.states import TABLE, Event, State, after
from faregate.errors import TransactionMisused
from faregate.ids import message_id_of

if TYPE_CHECKING:
    from faregate.core.context import Context
    from faregate.core.dedup import Dedup
    from faregate.core.unit import UnitOfWork
    from faregate.message import Envelope
    from faregate.ports.queue import Delivery

_MANY_ASKED = 64
"""When a handler has asked for so many statements, those that it has awaited are forgotten."""


class Interrupt(BaseException):
    """Ends a run of a handler from within `ctx.db`. Not an `Exception`: handlers must not mistake it for a failure.
    `Work.interrupt` remembers it, for handlers that catch it all the same, or wrap it."""


class AlreadyHandled(Interrupt):
    """Another copy of the message was faster."""


class NeedsTransaction(Interrupt):
    """The handler wants the driver's connection before there is one: it runs again with the transaction open."""


class NeedsSolitude(Interrupt):
    """The handler wants the driver's connection, among others: it runs again, alone in its transaction."""


class FailedAmongOthers(Interrupt):
    """A try failed and others are left: they follow when the message is alone. Middlewares see the last one only."""


class Spoiled(Interrupt):
    """A try does not count, or what a handler wrote was refused, in a transaction without savepoints: nothing of it can
    stay."""


class Write(NamedTuple):
    """A statement that waits, and where the handler said so."""

    sql: str
    parameters: tuple[Any, ...]
    file: str
    line: int

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return len(self.sql) + sum(len(each) if isinstance(each, str | bytes) else 8 for each in self.parameters)


class _Hold:
    """In the context of every task that a handler starts once it has the driver's connection, while the task lives."""

    __slots__ = ("__weakref__",)


_held: ContextVar[_Hold | None] = ContextVar("faregate_connection", default=None)


def let_go() -> None:
    """Whoever runs here is done with the driver's connection."""
    if _held.get() is not None:
        _held.set(None)


class _MessageId:
    """Found when it is asked for. `functools.cached_property` would take a lock for it, on Python 3.11."""

    def __get__(self, work: Work, owner: type[Work]) -> str:
        work.message_id = found = message_id_of(work.envelope, work.node)
        return found


class Work:
    # One is made for every message: what is read again and again is set, the rest are defaults of the class.
    message_id: str = _MessageId()  # type: ignore[assignment]
    """What the node knows it by."""
    dedup: Dedup
    """How copies of it are recognised."""
    by_ledger = False
    """Whether it is deduplicated by a row of its own in the ledger."""
    noted = False
    """Whether that row was made with what its handler sent."""
    attempt_id: str | None = None
    """Its token, if its sender made one."""
    claim_id: str | None = None
    """Its claim on a token in another database; `claimed_attempt` is that token."""
    claimed_attempt: str | None = None
    consumed = False
    """Whether its token in the node's own database is used up, in the transaction at hand."""
    marked = False
    """Whether its mark is in the transaction at hand, left by us."""
    in_ledger = False
    """Whether the ledger knows it, as a duplicate."""
    replayed = False
    """Whether it is the replay of a dead letter that is still open."""
    error: BaseException | None = None
    tries = 0
    """How often its handler ran and failed."""
    scattered = False
    """Whether it shared a transaction that was lost, through no fault that one knows of."""
    handler_failed = False
    """Whether the error is the handler's, not one of what is around it."""
    counted = False
    """Whether the kill switch knows that its tries are used up."""
    goes_back = False
    """Whether it failed with what the kill switch was open for; that may be closed again by now."""
    on_trial = False
    """Whether it runs though the kill switch is open."""
    business_key: str | None = None
    """The business key to claim in its transaction."""
    key_taken = False
    """Whether it is a duplicate because of that."""
    opens_first = False
    """Whether its handler wants the transaction before it starts."""
    has_savepoint = False
    refused: Exception | None = None
    """Why what it wrote in this try cannot stay, even if the handler caught that at another statement."""
    sending: asyncio.Task[None] | None = None
    """Sends them before the handler asks for anything: there are many."""
    holds: list[weakref.ref[_Hold]] | tuple[()] = ()
    """For each time that its handler was given the driver's connection."""
    replies: Sequence[Envelope] = ()
    """What its handler answers to whoever asked, sealed. It is no part of `sent`, since no log ever has it."""
    set_out_at = 0.0
    """When it set out, the same for all its copies; `at` is the later of that and now."""
    at = 0.0

    def __init__(self, delivery: Delivery, node: str) -> None:
        self.delivery = delivery
        self.envelope = delivery.envelope
        self.node = node
        self.state: State = "new"
        self.ctx: Context | None = None
        """None for a message that cannot be read."""
        self.unit: UnitOfWork | None = None
        self.interrupt: type[Interrupt] | None = None
        """What its handler was interrupted with, whatever the handler made of that."""
        self.entered = False
        """Whether it has used the transaction in this try."""
        self.wrote = False
        """Whether it wrote anything in this try, sent or not."""
        self.writes: list[Write] | tuple[()] = ()
        """What its handler wrote in this try and is not sent yet."""
        self.asked: list[Coroutine[Any, Any, Any]] | tuple[()] = ()
        """The statements that its handler asked for in this try, to be awaited."""
        self.sent: Sequence[Envelope] = ()
        """What its handler sends, sealed."""

    def move(self, event: Event) -> None:
        """What has become of it: see `states.py`."""
        try:
            self.state = TABLE[self.state][event]
        except KeyError:
            self.state = after(self.state, event)  # which says what is wrong

    def fail(self, error: BaseException) -> None:
        self.state = after(self.state, "failed")
        self.error = error

    # --- for `ctx.db` of one of its tries ---

    def unit_for(self, ctx: Context) -> UnitOfWork:
        """What runs its statements. Raises `TryEnded`, as do statements when the try ends before their turn has
        come."""
        unit = self.unit
        if ctx._ended or unit is None or unit.current is not self:
            ctx._refuse()
        return unit

    def ask(self, ctx: Context, statement: str, sql: str, parameters: Any) -> Coroutine[Any, Any, Any]:
        """A statement, for the handler to await."""
        asked = self.unit_for(ctx).run(self, ctx, statement, sql, parameters)
        if not self.asked:
            self.asked = []
        elif len(self.asked) >= _MANY_ASKED:
            self.asked = [each for each in self.asked if getcoroutinestate(each) == CORO_CREATED]
        self.asked.append(asked)
        return asked

    def check_awaited(self) -> None:
        """The handler has returned. Raises `TransactionMisused` for a statement that it asked for and never awaited:
        it would be missing, and nobody told."""
        asked, self.asked = self.asked, ()
        forgotten = [each for each in asked if getcoroutinestate(each) == CORO_CREATED]
        if forgotten:  # a task that was left behind is told when it runs: `TryEnded`
            begun = {task.get_coro() for task in asyncio.all_tasks()}
            forgotten = [each for each in forgotten if each not in begun]
        if not forgotten:
            return
        told = getcoroutinelocals(forgotten[0])
        for each in forgotten:
            each.close()  # or Python warns of it, too
        raise TransactionMisused(
            f"the handler of {self.ctx} called ctx.db.{told['statement']}({told['sql']!r}, …) without await, so it did "
            "not run. Await it; what needs no answer can be written with ctx.db.write(…), which is not awaited"
        )

    async def enter(self, ctx: Context) -> None:
        """Have the transaction open, ready for this message's statements."""
        await self.unit_for(ctx).run(self, ctx, None, "", ())

    def write(self, ctx: Context, write: Write) -> bool:
        """Have a statement run before anything that could tell the difference; whether so many wait that they had
        better be sent now."""
        return self.unit_for(ctx).write(self, write)

    async def send_writes(self, ctx: Context) -> None:
        """The handler has returned: what it wrote goes out now, if it would be blamed on nobody later. Raises what was
        wrong with it."""
        if self.unit is not None and not (self.unit.shared and self.sending is None and self.refused is None):
            await self.unit.run(self, ctx, None, "", ())

    def send_soon(self, ctx: Context) -> None:
        if self.sending is None or self.sending.done():
            self.sending = asyncio.ensure_future(self.enter(ctx))
            self.sending.add_done_callback(lambda task: task.cancelled() or task.exception())

    def stop_sending(self) -> None:
        """Nothing is sent behind the handler's back from here on."""
        sending, self.sending = self.sending, None
        if sending is not None:
            sending.cancel()

    def raw(self, ctx: Context) -> Any:
        unit = self.unit_for(ctx)
        if not unit.alone:
            raise self.interrupted(NeedsSolitude)
        if not self.entered or unit.transaction is None:
            raise self.interrupted(NeedsTransaction)
        hold = _Hold()
        _held.set(hold)
        self.holds = [*self.holds, weakref.ref(hold)]
        writes, self.writes = self.writes, ()
        try:
            for write in writes:
                unit.transaction.write(write.sql, write.parameters)
            return unit.transaction.raw
        except Exception as exc:
            self.refused = exc if writes else None
            raise

    def take_back(self) -> bool:
        """The handler is done with the driver's connection; whether tasks that it left behind may still have it."""
        holds, self.holds = self.holds, ()
        if holds:
            let_go()
        return any(hold() is not None for hold in holds)

    def interrupted(self, kind: type[Interrupt]) -> Interrupt:
        self.interrupt = kind
        return kind()

    # --- for the tries ---

    @property
    def may_wait(self) -> bool:
        """Whether it may wait for its next try here; among others it must not hold them up."""
        return self.unit is None or self.unit.alone

    async def failed(self, exc: BaseException | None = None) -> None:
        """A try of the handler failed: nothing that it wrote stays. Called between tries."""
        self.handler_failed = True
        await self.undo(exc)

    async def undo(self, exc: BaseException | None = None) -> None:
        """A run of the handler does not count: nothing that it wrote stays."""
        if self.unit is not None:
            await self.unit.undo(self, exc)
