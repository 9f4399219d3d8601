"""Work that must not be left half done when its caller is cancelled, and work that has to end."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")

_AGAIN_SECONDS = 0.5


async def finish(work: Awaitable[T]) -> T:
    """Wait until it is done, even when we are cancelled meanwhile; the cancellation is raised after that."""
    running = asyncio.ensure_future(work)
    cancelled = None
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError as exc:
            if running.cancelled():
                raise
            cancelled = exc
        except Exception:
            break
    if cancelled is not None:
        running.exception()  # or asyncio would log that nobody looked at it
        raise cancelled
    return running.result()


async def end(task: "asyncio.Task[Any] | None") -> None:
    """Cancel a task until it has ended, however that is. Once may not be enough: on Python 3.11 `asyncio.wait_for`,
    which drivers use, passes over a cancellation that comes together with an answer."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN_SECONDS)
    if task is not None and not task.cancelled():
        task.exception()  # or asyncio would log that nobody looked at it
