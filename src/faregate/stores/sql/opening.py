"""Opening a store that may not be reachable yet: try several times, then say what to check."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from faregate.errors import StoreUnavailable

T = TypeVar("T")
logger = logging.getLogger("faregate.stores")


async def patiently(connect: Callable[[], Awaitable[T]], where: str, *, tries: int, delay: float, hint: str = "") -> T:
    """What `connect` gives. After each `StoreUnavailable` but the last it waits, `delay` seconds and then more."""
    for number in range(1, tries + 1):
        try:
            return await connect()
        except StoreUnavailable as exc:
            if number == tries:
                raise StoreUnavailable(f"gave up on {where} after {tries} tries: {exc}{hint}") from exc
            pause = delay * number
            logger.warning("cannot open %s: %s; try %d of %d in %g s", where, exc, number + 1, tries, pause)
        await asyncio.sleep(pause)
    raise ValueError(f"tries must be 1 or more; got {tries}")
