"""How many messages are in flight: published, not scheduled for later, and not yet handled, skipped or dead."""

import asyncio


class InFlight:
    __slots__ = ("_waiters", "count")

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[asyncio.Future[None]] = []

    def land(self, count: int = 1) -> None:
        """One of them, or that many, are done."""
        self.count -= count
        if not self.count and self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    async def landed(self) -> None:
        """Return once nothing is in flight."""
        while self.count:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
