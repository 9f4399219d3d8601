"""The life of what lives as long as the bus: resources, and the functions that a node starts and stops with.

    start    resources, in the order in which they need each other -> `on_start` functions
    stop     `on_stop` functions, last declared first -> resources, last made first

Rules kept here:
- All of it happens in one task, whoever starts and stops the bus: a resource may hold what a task must leave itself,
  such as an `asyncio.TaskGroup`.
- A start that fails, or is cancelled, releases what was made, and says whose fault it is.
- What fails, or hangs, while it is released is logged, and keeps nothing else from being released.
- `on_stop` functions run only where all `on_start` functions have.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from faregate.core.handler import Held
from faregate.core.resources import Resources, in_thread
from faregate.core.verdict import first_line
from faregate.errors import ConfigurationError, ResourceFailed
from faregate.node.signature import Signature
from faregate.ports.cancellation import finish

log = logging.getLogger("faregate.bus")

_SECONDS = 10.0
"""For so long each thing may take at the end."""
_NOTHING = object()


class _Made(NamedTuple):
    what: str
    held: Held
    generator: AsyncGenerator[Any, None]


class Life:
    """Made without I/O. `stop` does nothing where nothing was started."""

    def __init__(self, resources: Sequence[Resources]) -> None:
        self._resources = resources
        self._made: list[_Made] = []
        self._task: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        """Set when it is to end."""
        self._lost = asyncio.Event()
        """Set when it ended before that."""

    async def start(self) -> None:
        """Raises `ResourceFailed`, with the cause."""
        if not any(each.held or each.start_hooks or each.stop_hooks for each in self._resources):
            return
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep(ready), name="faregate-resources")
        try:
            await asyncio.shield(ready)
        except asyncio.CancelledError:
            ready.cancel()
            self._asked.set()
            self._task.cancel()
            await self.stop()
            raise

    async def stop(self) -> None:
        self._asked.set()
        if self._task is not None:
            await finish(asyncio.wait({self._task}))

    async def lost(self) -> Exception:
        """Return, with the reason, once the resources are gone though nobody asked for that; otherwise never."""
        await self._lost.wait()
        return ResourceFailed(
            "a resource of the bus cancelled the task that holds all of them, so they are released: a task of its own "
            "may have failed. The log says which; start the bus again"
        )

    async def _keep(self, ready: asyncio.Future[None]) -> None:
        try:
            await self._begin()
        except (Exception, asyncio.CancelledError) as exc:
            await self._release()
            if not ready.done():  # else the start was cancelled
                ready.set_exception(exc)
            return
        if not ready.done():
            ready.set_result(None)
        try:
            await self._asked.wait()
        except asyncio.CancelledError:
            if not self._asked.is_set():  # else the start was cancelled when it was nearly over
                log.error("the task that holds the resources of the bus was cancelled while the bus ran")
                self._lost.set()
        for each in reversed(self._resources):
            for hook in reversed(each.stop_hooks):
                await _end(_named(each, hook, "stops"), partial(_call, each, hook))
        await self._release()

    async def _begin(self) -> None:
        for each in self._resources:
            for cls, held in each.held.items():
                provider = each.node.providers[cls]
                what = f"{provider.what}, which makes a {cls.__name__} for as long as the bus runs,"
                with self._blaming(what):
                    generator = each.generate(cls)(*each.arguments(provider.signature))
                    value = await anext(generator, _NOTHING)
                    if value is _NOTHING:
                        raise ConfigurationError("it yielded nothing")
                    held.value = value
                    self._made.append(_Made(what, held, generator))
        for each in self._resources:
            for hook in each.start_hooks:
                with self._blaming(_named(each, hook, "starts")):
                    await _call(each, hook)

    @contextmanager
    def _blaming(self, what: str) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError as exc:
            if self._asked.is_set():
                raise
            raise ResourceFailed(f"the bus did not start: {what} cancelled the task that it ran in") from exc
        except Exception as exc:
            raise ResourceFailed(f"the bus did not start: {what} failed: {first_line(exc)}") from exc

    async def _release(self) -> None:
        while self._made:
            made = self._made.pop()
            del made.held.value
            await _end(made.what, partial(_finish, made.generator))


async def _end(what: str, work: Callable[[], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(_SECONDS):
            await work()
    except (Exception, asyncio.CancelledError) as exc:
        log.error("%s failed at the end: %s. The rest goes on", what, first_line(exc), exc_info=exc)


async def _finish(generator: AsyncGenerator[Any, None]) -> None:
    if await anext(generator, _NOTHING) is not _NOTHING:
        await generator.aclose()
        raise ConfigurationError("it yields more than once")


async def _call(resources: Resources, hook: Signature) -> None:
    arguments = resources.arguments(hook)
    if hook.in_thread:
        await in_thread(resources.pool, hook.function, *arguments)
    else:
        await hook.function(*arguments)


def _named(resources: Resources, hook: Signature, does: str) -> str:
    name = getattr(hook.function, "__name__", type(hook.function).__name__)
    return f"the function {name!r} that node {resources.node.name!r} {does} with"
