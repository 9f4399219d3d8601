"""Work that must not be left half done when its caller is cancelled."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


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
