"""What a handler and its middlewares see of the message they work on. Read-only for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack

from faregate.core.database import BlockingDatabase, Database, wait_for
from faregate.core.handler_database import HandlerDatabase
from faregate.core.session import open_session
from faregate.core.work import NeedsSolitude
from faregate.errors import ConfigurationError, TryEnded, Unavailable, WrongEventLoop
from faregate.message import REPLY_TO, Envelope
from faregate.node.outgoing import (
    NOTHING_TO_AWAIT,
    NothingToAwait,
    Options,
    Outgoing,
    as_command,
    as_event,
    check_scheduled,
    reply,
)
from faregate.plain import plain
from faregate.ports.keys import keys_of
from faregate.ports.store import SCHEDULE_KEY, OpenSession

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

    from faregate.core.observer import TraceContext
    from faregate.core.unit import Home
    from faregate.core.work import Work
    from faregate.node.node import Node

Ending = Literal["handled", "skipped", "filtered", "duplicate", "redelivered", "dead", "lost"]
"""How a delivery ended; `filtered`: the subscription's `where=` does not take it; `duplicate`: it had been handled
before; `lost`: its lock had expired, so the message is someone else's now."""

OWN_HEADERS = frozenset({REPLY_TO, SCHEDULE_KEY})
"""Who waits for the answer, and what the message may be cancelled by: handlers and middlewares do not see these, so
that they can neither hand them on nor lose them."""


class Context:
    """The message at hand, and what its handler may do within the unit of work. Annotate `ctx` with it, or with
    `AsyncContext` or `BlockingContext`, which tell a type checker which kind of function it is for."""

    # One is made for every message, and mostly one for its try. What each of them needs is set, which makes it cheap to
    # read; the rest are defaults of the class.
    error: BaseException | None = None
    """What went wrong, for middlewares that run after the core."""
    _outcome: Ending | None = None
    _sealed: list[Envelope] | None = None
    """The envelopes of all that goes out, once they are recorded."""
    _withdrawn: tuple[Outgoing, ...] = ()
    """What was recorded and then cancelled through this context. A try that fails takes that back."""
    _trace: Callable[[], TraceContext | None] | None = None
    """Gives the trace context that goes into what the handler sends; None: that of the message itself."""

    def __init__(self, work: Work, message: Any) -> None:
        self._work = work
        self.message = message
        """The decoded message."""
        self._attempt = 0
        """The try at hand; before the handler runs, how many tries there were."""
        self._outputs: list[Outgoing] | None = None
        """What was recorded through this context; `_sent` is all that goes out."""
        self._completed = False
        """Whether the handler ran and succeeded; else a middleware did not call it."""
        self._try: Context | None = None
        """The try of the handler that counts, where it has a context of its own. It is never this one: what refers to
        itself stays, with its message, until the garbage collector comes."""
        self._trying: Context | None = None
        """The try at hand, while there is one."""
        self._detached = False
        """Whether the middlewares returned while the handler was running."""
        self._ended = False
        """Whether the try that it was made for is over."""
        self._database: Database | None = None
        """Made when it is asked for, and gone when this ends: each refers to the other."""
        self._session: OpenSession | None = None
        """Likewise."""
        self._resources: tuple[Any, ...] = ()
        """What the node provides to this message, in the order in which the pipeline was compiled."""

    def _for_try(self) -> Context:
        """The same message for one try of its handler, which ends with that try: what the try leaves behind holds on to
        this one, and cannot reach the next."""
        new = Context(self._work, self.message)
        new._resources = self._resources
        return new

    def _refuse(self) -> NoReturn:
        """It is used after its end."""
        unit = self._work.unit
        if unit is not None:
            unit.home.left_behind(self)
        raise TryEnded(
            f"ctx was used after the try of {self} had ended: nothing of that happens. Await everything that the "
            "handler starts before it returns or raises (asyncio.TaskGroup does so, asyncio.gather does not)"
        )

    def _sent(self, tried: Context | None = None) -> Sequence[Outgoing]:
        """What the handler's last try sends, or the one at hand, behind what middlewares do."""
        own, tried = self._outputs, tried or self._try
        if tried is None or not tried._outputs:
            outputs = own or ()
        else:
            outputs = [*own, *tried._outputs] if own else tried._outputs
        withdrawn = self._withdrawn if tried is None else self._withdrawn + tried._withdrawn
        return [out for out in outputs if out not in withdrawn] if withdrawn else outputs

    # --- identity -----------------------------------------------------------------------------------------

    @property
    def node(self) -> str:
        """The name of the node that handles it."""
        return self._work.node

    @property
    def message_id(self) -> str:
        """What this node deduplicates the message by."""
        return self._work.message_id

    @property
    def publication_id(self) -> str:
        """What identifies the publication, at all its recipients."""
        return self._work.envelope.publication_id

    @property
    def correlation_id(self) -> str:
        """The root of the conversation this message belongs to."""
        envelope = self._work.envelope
        return envelope.correlation_id or envelope.publication_id

    @property
    def causation_id(self) -> str | None:
        """The message whose handling published this one; None for a root."""
        return self._work.envelope.causation_id

    @property
    def depth(self) -> int:
        """How many messages precede this one in its conversation, 0 for a root."""
        return self._work.envelope.depth

    @property
    def type(self) -> str:
        """The wire name of its class."""
        return self._work.envelope.type

    @property
    def source(self) -> str:
        """The name of the node that published or sent it."""
        return self._work.envelope.source

    @property
    def key(self) -> str | None:
        """What it is ordered by, as text. Of several keys (`fg.Each`) the text of them all; `keys` has each."""
        key = self._work.delivery.key
        return None if key is None else str(key)

    @property
    def keys(self) -> tuple[str, ...]:
        """Each of its keys, in one order; none where it has no order to keep."""
        return keys_of(self._work.delivery.key)

    @property
    def headers(self) -> Mapping[str, str]:
        """What it was published with, and what middlewares added."""
        headers = self._work.envelope.headers
        if headers and not OWN_HEADERS.isdisjoint(headers):  # who copies them must not ask in another's name
            headers = {name: value for name, value in headers.items() if name not in OWN_HEADERS}
        return MappingProxyType(headers)

    @property
    def sent_at(self) -> float:
        """Seconds since the epoch."""
        return self._work.envelope.sent_at

    @property
    def envelope(self) -> Envelope:
        """The message as it travels, with everything that is known about it."""
        return self._work.envelope

    # --- how often ----------------------------------------------------------------------------------------

    @property
    def attempt(self) -> int:
        """The try within this delivery, from 1 on."""
        return self._attempt

    @property
    def redeliveries(self) -> int:
        """Delayed redeliveries so far."""
        return self._work.delivery.redeliveries

    @property
    def redelivered(self) -> bool:
        """Whether this message was delivered before, for whatever reason."""
        return self._work.delivery.redelivered

    @property
    def outcome(self) -> Ending | None:
        """How the message ended; known to `after` middlewares only."""
        return self._outcome

    # --- doing --------------------------------------------------------------------------------------------

    @property
    def db(self) -> HandlerDatabase:
        """The node's database, inside the unit of work: awaited in `async def` (a `Database`), called plainly in `def`
        (a `BlockingDatabase`).

        What is written commits together with the ledger and the outgoing messages, or not at all.
        """
        home = self._home("db")
        if self._is_blocking("db", home):
            return BlockingDatabase(self, self._work)
        if self._database is None:
            self._database = Database(self, self._work)
        return self._database

    @property
    def session(self) -> Any:
        """SQLAlchemy inside the unit of work: an `AsyncSession` in `async def`, a `Session` in `def`. Needs the extra
        `faregate[sqlalchemy]`.

        What is pending when the handler returns is flushed, and commits together with the ledger and the outgoing
        messages, or not at all. It ends with the try.
        """
        home = self._home("session")
        blocking = self._is_blocking("session", home)
        if self._session is None:
            assert home.store is not None
            self._session = open_session(self, self._work, home.store, home.thread)
        return self._session.blocking if blocking else self._session.awaited

    def _home(self, what: str) -> Home:
        """Of the unit of work, which has a store."""
        if self._ended:
            self._refuse()
        unit = self._work.unit
        if unit is None or unit.home.store is None:
            raise ConfigurationError(
                f"node {self._work.node!r} has no store, so there is no ctx.{what}: give the bus one, "
                "fg.Bus(…, store='sqlite:./shop.db')"
            )
        return unit.home

    def _is_blocking(self, what: str, home: Home) -> bool:
        """That depends on who asks: another thread, and that has no running event loop."""
        if get_ident() == home.thread:
            return False
        if asyncio._get_running_loop() is None:
            return True
        raise WrongEventLoop(
            f"ctx.{what} of {self} was used on another event loop than the bus runs on: in a thread call it plainly, "
            "without a loop of its own, or hand it over with asyncio.run_coroutine_threadsafe"
        )

    def _end(self) -> None:
        """The try that it was made for is over."""
        self._ended, self._database = True, None
        self._end_session()

    async def _flush(self) -> None:
        if self._session is not None:
            await self._session.flush()

    def _end_session(self) -> None:
        """What it holds was undone, or commits without it."""
        session, self._session = self._session, None
        if session is not None:
            session.end()

    def publish(self, event: Any, **options: Unpack[Options]) -> NothingToAwait:
        """Record an event to be published when the handler has succeeded."""
        self._send(as_event(event, options))
        return NOTHING_TO_AWAIT

    def send(self, command: Any, *, to: str | Node | None = None, **options: Unpack[Options]) -> NothingToAwait:
        """Record a command to be sent when the handler has succeeded."""
        self._send(as_command(command, to, options))
        return NOTHING_TO_AWAIT

    def reply(self, message: Any, *, headers: Mapping[str, str] | None = None) -> NothingToAwait:
        """Record the answer to whoever asked, as `fg.reply` does."""
        self._send(reply(message, headers=headers))
        return NOTHING_TO_AWAIT

    def cancel(self, publication_id: str | None = None, *, key: str | None = None) -> Any:
        """Cancel a message that this node has scheduled with `delay=` or `at=`, by its publication id or by its key
        (its `idempotency_key` or `id_key`); whether it was still waiting. Awaited in `async def`, called plainly in
        `def`, as `ctx.db`.

        It is part of the unit of work: what a failed try cancelled goes on waiting.
        """
        which = check_scheduled(publication_id, key)
        if self._ended:
            self._refuse()
        unit = self._work.unit_for(self)
        if self._is_blocking("cancel", unit.home):
            return wait_for(self, self._work, self._cancel, which)
        return self._cancel(which)

    async def _cancel(self, which: tuple[str | None, str | None]) -> bool:
        work, unit = self._work, self._work.unit_for(self)
        if unit.home.cancel is None:
            raise ConfigurationError(
                f"the handler of {self} runs on Spark, which sends what is due later at once, so that nothing can be "
                "cancelled: run this subscription on a bus, or let the handler of that message look whether it counts"
            )
        if unit.home.store is None:
            found = await unit.home.cancel(*which)
        elif not unit.alone and any(each.deliver_at is not None for other in unit.works for each in other.sent):
            raise work.interrupted(NeedsSolitude)  # what others of the batch schedule is not in the table yet
        else:
            found = bool(await unit.run(work, self, "cancel_scheduled", work.node, which))
        _, key = which  # an id it has only when the handler has returned
        return (key is not None and self._withdraw(key)) or found

    def _withdraw(self, key: str) -> bool:
        """Do not send what the try at hand, or a middleware, was to schedule with this key; whether there was any."""
        outer = self._work.ctx or self
        found = [out for out in outer._sent(None if self is outer else self) if out.is_scheduled(key)]
        self._withdrawn = (*self._withdrawn, *found)
        return bool(found)

    def trip(self, why: str, *, seconds: float = 10.0) -> NoReturn:
        """Trip the kill switch of this subscription: what the handler depends on is down. The message goes back and has
        used up no try; nothing more is consumed until a probe succeeds, first after that many seconds."""
        raise Unavailable(why, retry_after=seconds)

    def _send(self, outgoing: Outgoing) -> None:
        if self._ended:
            self._refuse()
        if self._outputs is None:
            self._outputs = []
        self._outputs.append(outgoing)

    def __str__(self) -> str:
        """How logs and errors name the work at hand."""
        key = f" key {self.key}" if self.key is not None else ""
        work = self._work
        return plain(
            f"{work.envelope.type} {work.message_id} at {work.node} "
            f"(from {work.envelope.source}, correlation {self.correlation_id}{key})"
        )


class AsyncContext(Context):
    """`ctx` of an `async def` function, in its annotation: a type checker then knows what `ctx.db` and `ctx.session`
    give. The object is a `Context`."""

    if TYPE_CHECKING:

        @property
        def db(self) -> Database: ...
        @property
        def session(self) -> AsyncSession: ...


class BlockingContext(Context):
    """The same for a `def` function."""

    if TYPE_CHECKING:

        @property
        def db(self) -> BlockingDatabase: ...
        @property
        def session(self) -> Session: ...
