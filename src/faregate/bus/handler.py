"""Compiles a handler into one function `invoke(ctx)`: call it, and turn what it gives back into outputs.

decode -> handle -> interpret: what the handler returns or yields is either a message, recorded to be sent, or an
effect, executed by the node's interpreter for its class within the same unit of work.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from typing import Any

from faregate.bus.context import Context
from faregate.bus.outgoing import as_outgoing
from faregate.bus.signature import Signature
from faregate.errors import UninterpretedEffect

Invoke = Callable[[Context], Awaitable[None]]
Collect = Callable[[Context, Any], Awaitable[None]]


def compile_handler(handler: Signature, interpreters: dict[type, Signature], pool: Executor) -> Invoke:
    """The handler's call and the interpretation of its results."""
    call = _caller(handler, pool)
    collect = _collector(interpreters, pool)

    if handler.shape == "async generator":

        async def invoke(ctx: Context) -> None:
            async for item in call(ctx, ctx.message):
                await collect(ctx, item)

    else:

        async def invoke(ctx: Context) -> None:
            result = await call(ctx, ctx.message)
            if result is not None:
                await collect(ctx, result)

    return invoke


def _caller(signature: Signature, pool: Executor) -> Callable[[Context, Any], Any]:
    """A function of (ctx, first argument) that fills the other parameters.

    Its result is awaited, or iterated for an async generator. Plain functions run in a thread, so that blocking
    code does not hold the event loop; a generator is exhausted there too.
    """
    function, extra = signature.function, signature.extra
    bound: Callable[[Context, Any], Any]
    if not extra:
        bound = lambda ctx, first: function(first)  # noqa: E731
    elif extra == (Context,):
        bound = lambda ctx, first: function(first, ctx)  # noqa: E731
    else:

        def bound(ctx: Context, first: Any) -> Any:
            resources = ctx._resources or {}
            return function(first, *[ctx if slot is Context else resources[slot] for slot in extra])

    if signature.shape in ("coroutine", "async generator"):
        return bound
    exhaust = signature.shape == "generator"

    def run(ctx: Context, first: Any) -> Any:
        result = bound(ctx, first)
        return list(result) if exhaust else result

    def in_thread(ctx: Context, first: Any) -> Awaitable[Any]:
        context = contextvars.copy_context()
        return asyncio.get_running_loop().run_in_executor(pool, context.run, run, ctx, first)

    return in_thread


def _collector(interpreters: dict[type, Signature], pool: Executor) -> Collect:
    interpret = {cls: _caller(signature, pool) for cls, signature in interpreters.items()}
    generating = {cls for cls, signature in interpreters.items() if signature.shape == "async generator"}

    async def collect(ctx: Context, result: Any) -> None:
        if result is None:
            return
        outgoing = as_outgoing(result)
        if outgoing is not None:
            ctx._outputs.append(outgoing)
        elif isinstance(result, list | tuple | Iterator) and type(result) not in interpret:
            for item in result:
                await collect(ctx, item)
        else:
            await execute(ctx, result)

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
