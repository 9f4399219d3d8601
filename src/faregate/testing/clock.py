"""A clock that moves only when it is told to."""

import asyncio
from collections.abc import Awaitable, Callable
from heapq import heappop, heappush

START = 1_700_000_000.0
"""Where every fake clock starts, so that runs are alike."""


class FakeTimer:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    """A clock that a test moves; timers are called on the way."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._wall = START
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._order = 0
        self.sleepers = 0
        """How many are in `sleep`."""

    def time(self) -> float:
        """Seconds since the epoch, as the test has it."""
        return self._wall + self._elapsed

    def monotonic(self) -> float:
        """Seconds that have passed."""
        return self._elapsed

    def call_later(self, seconds: float, callback: Callable[[], None]) -> FakeTimer:
        """Have it called once so many seconds have passed."""
        timer = FakeTimer(self._elapsed + max(0.0, seconds), callback)
        self._order += 1
        heappush(self._timers, (timer.when, self._order, timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        """Return once so many seconds have passed."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        done = asyncio.get_running_loop().create_future()
        timer = self.call_later(seconds, lambda: None if done.done() else done.set_result(None))
        self.sleepers += 1
        try:
            await done
        finally:
            self.sleepers -= 1
            timer.cancel()

    def next_timer(self) -> float | None:
        """Seconds until the next timer, or None when there is none."""
        while self._timers and self._timers[0][2].callback is None:
            heappop(self._timers)
        return self._timers[0][0] - self._elapsed if self._timers else None

    def set_wall(self, seconds: float) -> None:
        """Set the wall clock forward by that much, or back if it is negative. No time passes."""
        self._wall += seconds

    def jump(self, seconds: float) -> None:
        """Move on and call what became due, in order of time; nothing else runs meanwhile."""
        target = self._elapsed + seconds
        while (delay := self.next_timer()) is not None and self._elapsed + delay <= target:
            when, _, timer = heappop(self._timers)
            self._elapsed = when
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()
        self._elapsed = target

    async def advance(self, seconds: float, quiet: Callable[[], Awaitable[None]] | None = None) -> None:
        """Move on from timer to timer, letting the event loop come to rest after each."""
        quiet = quiet or rest
        target = self._elapsed + seconds
        await quiet()
        while (delay := self.next_timer()) is not None and self._elapsed + delay <= target:
            self.jump(delay)
            await quiet()
        self._elapsed = target
        await quiet()


async def rest(turns: int = 20) -> None:
    """Let the event loop go round a few times, so that what is ready runs."""
    for _ in range(turns):
        await asyncio.sleep(0)
