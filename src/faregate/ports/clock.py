"""Time as a port, so that tests move it instead of sleeping."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None:
        """Do not call the callback any more. Cancelling twice, or after it ran, does nothing."""


class Clock(Protocol):
    """All times are seconds. Used from the event loop's thread only."""

    def time(self) -> float:
        """Wall time since the epoch; may jump. What travels in envelopes."""

    def monotonic(self) -> float:
        """Never goes backwards; meaningful within one process. What locks are measured with."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` from the event loop after that time."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clock. It is read several times for every message: these are the functions themselves."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
