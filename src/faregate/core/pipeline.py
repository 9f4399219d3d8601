"""The incoming pipeline of one subscription, compiled once:

    resources -> `use` middlewares -> core (in-memory retries around the handler)

What follows the tries (commit, settle, redeliver or dead-letter, then the `after` middlewares) stands in `handling.py`.
Each step is a plain function that returns the next awaitable, so a message costs one coroutine per middleware and one
for the tries, and nothing is looked up.

A step takes the context twice so that a middleware may write `await call_next()` or `await call_next(ctx)`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from time import perf_counter
from types import MethodType
from typing import Any

from faregate.core.context import Context
from faregate.core.handler import Call, Collect, Held, Places, compile_call, compile_collect, fill
from faregate.core.kill_switch import Switch
from faregate.core.observer import Observers, Step
from faregate.core.resource_cost import Cost
from faregate.core.resources import Resources
from faregate.core.verdict import asked_seconds, failure_of
from faregate.core.work import FailedAmongOthers, NeedsTransaction
from faregate.errors import ConfigurationError, Permanent, PipelineMisused, RetryAfter, Unavailable
from faregate.node.node import Node
from faregate.node.rules import FailurePolicies
from faregate.node.signature import Signature
from faregate.node.subscription import Subscription
from faregate.ports import faults
from faregate.ports.clock import Clock

_NOT_RETRIED = (Permanent, ConfigurationError, RetryAfter, Unavailable)


def is_retried(exc: BaseException) -> bool:
    """Whether the same again, moments later, may help."""
    return not isinstance(exc, _NOT_RETRIED) and asked_seconds(exc) is None


def compile_pipeline(
    subscription: Subscription,
    resources: Resources,
    clock: Clock,
    send: Callable[[Context], Awaitable[None]],
    switch: Switch | None = None,
    observers: Observers = (),
) -> Step:
    """The chain that a context goes through; it raises what the last try raised.

    `send` is called at its end, within the resources, if they are needed for that. `switch`: while that is open,
    nothing is tried again. Observers are around all of it, and around each try.
    """
    node, pool, places = resources.node, resources.pool, resources.of_message(subscription)
    made = [cls for cls, place in places.items() if not isinstance(place, Held)]
    collect = compile_collect(node.interpreters, places, pool)
    call = compile_call(subscription.handler, collect, places, pool)
    for observer in reversed(observers):
        call = observer.around_try(subscription, call)
    shared = bool(made or node.middlewares or node.outgoing_middlewares)
    step = _core(call, collect, subscription.failures, clock, switch, shared=shared)
    for middleware in reversed(node.middlewares):
        step = _around(middleware, step, places)
    if sends_in_scope(node):
        step = _then(step, send)
    for cls in reversed(made):
        step = provide(cls, resources, step, places, resources.cost(cls))
    for observer in reversed(observers):
        step = observer.around_handling(subscription, step)
    return step


def sends_in_scope(node: Node) -> bool:
    """Whether what a handler sends goes out while the resources of its message are open."""
    return any(middleware.resources for middleware in node.outgoing_middlewares)


def _then(step: Step, send: Callable[[Context], Awaitable[None]]) -> Step:
    async def run(ctx: Context, again: Context | None = None) -> None:
        await step(ctx)
        if ctx._completed:
            await send(ctx)

    return run


def compile_after(resources: Resources) -> Step | None:
    """The `after` middlewares, or None when there are none. Their message's resources are released by then."""
    step: Step | None = None
    for middleware in reversed(resources.node.after_middlewares):
        what = f"a middleware of node {resources.node.name!r} that runs after the core, when the message is done,"
        resources.check_outlives(middleware, what)
        step = _around(middleware, step or _end, resources.held)
    return step


async def _end(ctx: Context, again: Context | None = None) -> None:
    pass


def _core(
    call: Call, collect: Collect, failures: FailurePolicies, clock: Clock, switch: Switch | None, *, shared: bool
) -> Step:
    """The tries. `shared`: others than the handler have the context too, so that it cannot end with a try."""

    async def core(ctx: Context, again: Context | None = None) -> None:
        attempt = ctx._attempt + 1
        work = ctx._work
        # What a middleware wrote is undone with a failed try; then all of it has to run again, not the handler alone.
        wrote = work.entered or bool(work.writes)
        if ctx._completed:  # an earlier run of the handler, which no longer counts
            await work.undo()
            ctx._end_session()
            ctx._completed, ctx._try = False, None
        if ctx._trying is not None:
            raise PipelineMisused(
                f"a middleware called call_next again while the handler of {ctx} was still running: await each call "
                "before the next"
            )
        own = ctx if not shared and not ctx._ended else ctx._for_try()
        try:
            while True:
                if ctx._detached:
                    own._refuse()
                ctx._trying = own
                ctx._attempt = own._attempt = attempt
                error: BaseException | None = None
                try:
                    if faults.hook is not None:
                        await faults.hook("bus.before-handler")
                    if work.opens_first:
                        await work.enter(own)
                    result = await call(own, own.message)
                    if result is not None:
                        await collect(own, result)
                    if own._session is not None or ctx._session is not None:
                        await own._flush()
                        await ctx._flush()  # that of middlewares and resources: the handler may have used it
                    if work.asked:
                        work.check_awaited()
                    if work.wrote:
                        await work.send_writes(own)
                except BaseException as exc:
                    error = exc
                finally:
                    own._end()
                if ctx._detached:
                    own._refuse()
                if work.interrupt is NeedsTransaction and ctx._session is None:
                    work.interrupt, work.opens_first = None, True
                    await work.undo()
                elif work.interrupt is not None:
                    raise work.interrupt from error
                elif error is None:
                    ctx._completed, ctx._try = True, None if own is ctx else own
                    if switch is not None and switch.doubt.timer is not None:
                        switch.doubt.over()
                    return
                else:
                    failure = failure_of(error)
                    if failure is None:
                        raise error
                    raised = error if isinstance(error, ExceptionGroup) else failure  # middlewares see all of them
                    await work.failed(failure)
                    if switch is not None:
                        switch.tried(work, failure)
                    retry = failures.of(failure).retry
                    if attempt > retry.times or not is_retried(failure):
                        raise raised
                    # A session of theirs believes in what is undone now.
                    if wrote or ctx._session is not None or not work.may_wait:
                        work.error = failure
                        raise work.interrupted(FailedAmongOthers) from failure
                    if switch is None:
                        await clock.sleep(retry.wait(attempt))
                    else:
                        await switch.next_try(work, retry.wait(attempt))
                        if switch.sends_back(work, failure):  # others have tripped it
                            raise raised
                    attempt += 1
                ctx._outputs = None if own is ctx else ctx._outputs
                own = ctx._for_try()
        finally:
            ctx._trying = None

    return core


def left_running(ctx: Context) -> PipelineMisused:
    return PipelineMisused(
        f"a middleware returned while the handler of {ctx} was still running: await call_next(), and put a time limit "
        "around it with asyncio.timeout"
    )


def detach(ctx: Context) -> None:
    """The middlewares have ended. What they left running must not go on: half of it would count."""
    if ctx._trying is not None:
        ctx._trying._ended = ctx._detached = True


def _around(middleware: Signature, following: Step, places: Places) -> Step:
    """A bound method is the cheapest thing that remembers one argument."""
    function = middleware.function
    if not middleware.extra:
        return lambda ctx, again=None: function(ctx, MethodType(following, ctx))
    rest = fill(middleware, places)
    return lambda ctx, again=None: function(ctx, MethodType(following, ctx), *rest(ctx))


def provide(cls: type, resources: Resources, following: Step, places: Places, cost: Cost | None = None) -> Step:
    """Make a resource around what uses it. `cost` is told how long either took."""
    generate, rest = resources.generate(cls), resources.filled(cls, places)

    async def provide(ctx: Context, again: Context | None = None) -> None:
        began = perf_counter()
        generator = generate() if rest is None else generate(*rest(ctx))
        ctx._resources += (await anext(generator),)
        made = perf_counter()
        try:
            await following(ctx)
            if ctx._trying is not None:
                raise left_running(ctx)
        except BaseException as exc:
            detach(ctx)
            await _throw(generator, exc)
            raise
        if cost is not None:
            cost.note(made - began, perf_counter() - made)
        try:
            await anext(generator)
        except StopAsyncIteration:
            return
        await generator.aclose()
        raise ConfigurationError(f"the provider of {cls.__name__} yields more than once")

    return provide


async def _throw(generator: AsyncGenerator[Any, None], exc: BaseException) -> None:
    """Let the provider clean up after a failure. It cannot hide the failure; it may replace it with its own."""
    try:
        await generator.athrow(exc)
    except StopAsyncIteration:
        return
    except BaseException as raised:
        if raised is not exc:
            raise
    else:
        await generator.aclose()
