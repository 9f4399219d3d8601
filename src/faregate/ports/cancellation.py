"""Work that must not be left half done when whoever waits for it is cancelled."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def finish(work: Awaitable[T]) -> T:
    """Do it to the end, also when whoever waits is cancelled meanwhile; the cancellation comes after it."""
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
        running.exception()  # it was looked at: the cancellation is what the waiter is told
        raise cancelled
    return running.result()
