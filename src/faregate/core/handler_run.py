"""Runs the handler of one message within the transaction of its batch, through the pipeline, to done or failed.

Rules kept here:
- An interrupt (`work.py`) counts, whatever a handler or a middleware made of it.
- A message that failed has left nothing; one that succeeded has its outgoing messages sealed.
- The context ends with the run.
"""

import asyncio
from collections.abc import Awaitable, Callable

from faregate.core.context import Context
from faregate.core.forks import end_if_forked
from faregate.core.kill_switch import Switch
from faregate.core.lane_task import meet_cancellation
from faregate.core.observer import Observers
from faregate.core.outgoing_middlewares import compile_outgoing
from faregate.core.pipeline import compile_pipeline, detach, left_running, sends_in_scope
from faregate.core.resources import Resources
from faregate.core.sender import Sender
from faregate.core.unit import TRANSACTION_LOST, TransactionEnded, UnitOfWork
from faregate.core.verdict import failure_of
from faregate.core.work import AlreadyHandled, FailedAmongOthers, NeedsSolitude, NeedsTransaction, Spoiled, Work
from faregate.node.subscription import Subscription
from faregate.ports import faults
from faregate.ports.clock import Clock


class HandlerRun:
    def __init__(
        self,
        subscription: Subscription,
        resources: Resources,
        sender: Sender,
        *,
        has_store: bool,
        clock: Clock,
        switch: Switch | None = None,
        observers: Observers = (),
    ) -> None:
        self._handler = subscription.name
        self._switch = switch
        self._sender = sender
        self._has_store = has_store
        self._outgoing = compile_outgoing(resources.node, resources.of_message(subscription))
        self._sends_in_scope = sends_in_scope(resources.node)
        """Whether the pipeline has sent what the handler sends."""
        self._pipeline: Callable[[Context], Awaitable[None]] = compile_pipeline(
            subscription, resources, clock, self._send_outputs, switch, observers
        )
        self.opens_first = False
        """Whether the handlers of this subscription want the transaction before they start."""

    async def run(self, unit: UnitOfWork, work: Work) -> bool:
        """Run one message within the transaction; False when it failed."""
        ctx = work.ctx
        assert ctx is not None
        unit.current = work
        tried = ctx._attempt
        try:
            while True:
                try:
                    await self._pipeline(ctx)
                    if ctx._trying is not None:
                        raise left_running(ctx)
                except BaseException as exc:
                    detach(ctx)
                    if work.interrupt is None or isinstance(exc, asyncio.CancelledError):
                        raise
                end_if_forked(unit.home.generation)
                if work.interrupt is None:
                    break
                if work.interrupt is not NeedsTransaction:
                    raise work.interrupt
                work.interrupt = None  # a middleware's; the tries see to the handler's own
                await work.undo()
                ctx._attempt, ctx._resources, ctx._outputs = tried, (), None
                ctx._completed, ctx._try = False, None
                ctx._end_session()
                await work.enter(ctx)
            if ctx._session is not None:  # for what came behind the handler
                await ctx._flush()
            if unit.cancelling():
                work.handler_failed = True
                await meet_cancellation()
                work.handler_failed = False
            if faults.hook is not None:
                await faults.hook("bus.after-handler")
            if ctx._completed and (ctx._outputs or ctx._try is not None):
                if self._outgoing is None:
                    work.sent = self._sender.seal_outputs(ctx, self._handler)
                elif ctx._sent():
                    if not self._sends_in_scope:
                        await self._send_outputs(ctx)
                        end_if_forked(unit.home.generation)
                    work.sent = ctx._sealed or ()
                ctx._outputs = ctx._try = None  # what is sealed goes at once, and is no matter of the garbage collector
            ctx._ended = True
            if self._has_store:
                await unit.leave(work)
                if work.opens_first:
                    self.opens_first = True
                if work.interrupt is not None:  # by a task that it left behind
                    raise work.interrupt
            work.move("succeeded")
        except AlreadyHandled:
            await unit.undo(work)
            if work.state != "duplicate":
                work.move("known")
        except NeedsSolitude as exc:
            self.opens_first = work.scattered = True
            ctx._attempt = tried
            await self._undo(unit, work, exc)
        except FailedAmongOthers:
            assert work.error is not None
            await self._undo(unit, work, work.error)
        except Spoiled:  # its middlewares have not seen the error: they will, at the next try
            work.tries = ctx._attempt if work.handler_failed else tried
            raise
        except TransactionEnded as exc:
            work.fail(exc)
            raise
        except BaseException as exc:
            failure = failure_of(exc)
            if failure is None:
                raise
            if self._has_store and isinstance(failure, TRANSACTION_LOST):
                raise failure from failure.__cause__  # without a store it was no transaction of ours
            self._note(work, failure)
            await self._undo(unit, work, failure)
        finally:
            ctx._end()
            unit.current = None
        return work.state != "failed"

    def _note(self, work: Work, exc: BaseException) -> None:
        """Its tries are used up. Tell the switch at once: it may let no other of this batch begin."""
        if self._switch is not None:
            self._switch.note(work, exc)

    async def _undo(self, unit: UnitOfWork, work: Work, exc: BaseException) -> None:
        work.tries = work.ctx._attempt if work.ctx is not None else 0
        try:
            await unit.undo(work, exc)
        finally:  # the transaction may be spoiled
            work.fail(exc)

    async def _send_outputs(self, ctx: Context) -> None:
        """Take what the handler sends, within the outgoing middlewares."""
        assert self._outgoing is not None
        if self._has_store:
            ctx._sealed = await self._sender.record_outputs(ctx, self._handler, self._outgoing)
        else:  # a middleware wants to know whether it was published
            await self._sender.publish_outputs(ctx, self._handler, self._outgoing)
