"""Compiles a handler into a function to call, and one that turns what it gives back into outputs.

decode -> handle -> interpret: what the handler returns or yields is either a message, recorded to be sent, or an
effect, executed by the node's interpreter for its class within the same unit of work.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

from faregate.core.context import Context
from faregate.core.work import let_go
from faregate.errors import ConfigurationError, UninterpretedEffect
from faregate.node.outgoing import NOTHING_TO_AWAIT, as_outgoing
from faregate.node.signature import Signature

Call = Callable[[Context, Any], Any]
"""(context, first argument) -> an awaitable of the result"""
Collect = Callable[[Context, Any], Awaitable[None]]


class Held:
    """Where a resource of the bus is while the bus runs; pipelines are compiled before that."""

    __slots__ = ("_what", "value")
    value: Any

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        """Asked only where it has no value."""
        raise ConfigurationError(f"{self._what} makes it when the bus starts, and the bus does not run: start it")


Places = Mapping[type, int | Held]
"""Where in `ctx._resources` each type that a message is provided with stands, and where those of the bus are."""


def compile_call(handler: Signature, collect: Collect, places: Places, pool: Executor) -> Call:
    """The handler's call. An async generator is exhausted, and what it yields collected on the way."""
    call = _caller(handler, places, pool)
    if handler.shape != "async generator":
        return call

    async def exhaust(ctx: Context, first: Any) -> None:
        async for item in call(ctx, first):
            await collect(ctx, item)

    return exhaust


def fill(signature: Signature, places: Places) -> Callable[[Context], list[Any]]:
    """What to pass for the parameters behind the fixed ones."""
    getters = [_getter(slot, places) for slot in signature.extra]
    return lambda ctx: [get(ctx) for get in getters]


def _getter(cls: type, places: Places) -> Callable[[Context], Any]:
    if cls is Context:
        return lambda ctx: ctx
    place = places[cls]
    if isinstance(place, Held):
        return lambda ctx: place.value
    return lambda ctx: ctx._resources[place]


def _caller(signature: Signature, places: Places, pool: Executor) -> Call:
    """A function of (ctx, first argument) that fills the other parameters.

    Its result is awaited, or iterated for an async generator. Plain functions run in a thread, so that blocking
    code does not hold the event loop; a generator is exhausted there too. The usual signatures have a way of their own.
    """
    function, extra = signature.function, signature.extra
    bound: Call
    if not extra:
        bound = lambda ctx, first: function(first)  # noqa: E731
    elif extra == (Context,):
        bound = lambda ctx, first: function(first, ctx)  # noqa: E731
    elif len(extra) == 1:
        place = places[extra[0]]
        if isinstance(place, Held):
            bound = lambda ctx, first: function(first, place.value)  # noqa: E731
        else:
            bound = lambda ctx, first: function(first, ctx._resources[place])  # noqa: E731
    else:
        rest = fill(signature, places)
        bound = lambda ctx, first: function(first, *rest(ctx))  # noqa: E731
    if not signature.in_thread:
        return bound
    exhaust = signature.shape == "generator"

    def run(ctx: Context, first: Any) -> Any:
        try:
            result = bound(ctx, first)
            return list(result) if exhaust else result
        except (StopIteration, GeneratorExit) as exc:  # these cannot be handed to who awaits them
            raise RuntimeError(f"the handler of {ctx} raised {type(exc).__name__}") from exc
        finally:
            let_go()

    def in_thread(ctx: Context, first: Any) -> Awaitable[Any]:
        context = contextvars.copy_context()
        return asyncio.get_running_loop().run_in_executor(pool, context.run, run, ctx, first)

    return in_thread


def compile_collect(interpreters: Mapping[type, Signature], places: Places, pool: Executor) -> Collect:
    """What becomes of a handler's result."""
    interpret = {cls: _caller(signature, places, pool) for cls, signature in interpreters.items()}
    generating = {cls for cls, signature in interpreters.items() if signature.shape == "async generator"}

    def collect(ctx: Context, result: Any) -> Awaitable[None]:
        if result is None:
            return NOTHING_TO_AWAIT
        outgoing = as_outgoing(result)
        if outgoing is not None:  # nearly always: no coroutine for that
            ctx._send(outgoing)
            return NOTHING_TO_AWAIT
        if isinstance(result, list | tuple | Iterator) and type(result) not in interpret:
            return collect_all(ctx, result)
        return execute(ctx, result)

    async def collect_all(ctx: Context, items: Iterable[Any]) -> None:
        for item in items:
            await collect(ctx, item)

    async def execute(ctx: Context, effect: Any) -> None:
        cls = type(effect)
        call = interpret.get(cls)
        if call is None:
            raise UninterpretedEffect(
                f"the handler of {ctx.type} at {ctx.node} returned a {cls.__name__}, which is neither a message nor "
                f"an effect: declare it with @fg.event, wrap it in fg.publish(…), or register a function with "
                f"@node.interprets({cls.__name__})"
            )
        if cls in generating:
            async for item in call(ctx, effect):
                await collect(ctx, item)
        else:
            await collect(ctx, await call(ctx, effect))

    return collect
