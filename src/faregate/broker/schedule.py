"""Things that happen later: scheduled delivery at a wall time; delays, redeliveries and expiry after a duration.

Rules kept here:
- A duration is measured by the monotonic clock: it comes after that many seconds, whatever the wall clock does.
- A wall time comes when the wall clock shows it, and never before. The timer never sleeps longer than a minute, so
  that a wall clock that was set forward is noticed.

One heap and at most one clock timer for all of them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

from faregate.ports.clock import Clock, Timer

log = logging.getLogger("faregate.broker")

_LONGEST_SLEEP = 60.0
_DRIFT = 0.05
"""Seconds that the wall clock may run off before the heap is sorted anew."""
_ROUNDING = 1e-6
"""Times that differ by less are the same: a difference of wall times is no more exact."""


@dataclass(slots=True, eq=False)
class ScheduledCall:
    """A callback at a time; `cancel` on the schedule makes it silent."""

    when: float
    """On the monotonic clock; of a wall time as far as one can tell now."""
    wall: float | None
    """The wall time it waits for; None when it waits for a duration."""
    order: int
    callback: Callable[[Any], None] | None
    argument: Any

    def __lt__(self, other: "ScheduledCall") -> bool:
        return (self.when, self.order) < (other.when, other.order)


class Schedule:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._calls: list[ScheduledCall] = []
        self._order = 0
        self._cancelled = 0
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._offset = clock.time() - clock.monotonic()

    def __len__(self) -> int:
        return len(self._calls) - self._cancelled

    def at(self, wall: float, callback: Callable[[Any], None], argument: Any) -> ScheduledCall:
        """Call `callback(argument)` once the wall clock shows that; in order of time, then of asking."""
        return self._add(self._expected(wall), wall, callback, argument)

    def after(self, seconds: float, callback: Callable[[Any], None], argument: Any) -> ScheduledCall:
        """Call `callback(argument)` after that many seconds; in the same order."""
        return self._add(round(self._clock.monotonic() + seconds, 6), None, callback, argument)

    def wall_time(self, call: ScheduledCall) -> float:
        """When it rings, as far as one can tell now."""
        if call.wall is not None:
            return call.wall
        return self._clock.time() + call.when - self._clock.monotonic()

    def _expected(self, wall: float) -> float:
        return round(self._clock.monotonic() + (wall - self._clock.time()), 6)

    def _add(self, when: float, wall: float | None, callback: Callable[[Any], None], argument: Any) -> ScheduledCall:
        self._order += 1
        call = ScheduledCall(when, wall, self._order, callback, argument)
        heappush(self._calls, call)
        if self._timer is None or when < self._timer_at:
            self._arm()
        return call

    def cancel(self, call: ScheduledCall | None) -> None:
        if call is None or call.callback is None:
            return
        call.callback = call.argument = None
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self._calls):
            self._calls = [call for call in self._calls if call.callback is not None]
            heapify(self._calls)
            self._cancelled = 0

    def close(self) -> None:
        for call in self._calls:
            call.callback = call.argument = None
        self._calls.clear()
        self._cancelled = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._calls and self._calls[0].callback is None:
            heappop(self._calls)
            self._cancelled -= 1
        if self._calls:
            now = self._clock.monotonic()
            delay = min(max(0.0, self._calls[0].when - now), _LONGEST_SLEEP)
            self._timer_at = now + delay
            self._timer = self._clock.call_later(delay, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._look_at_wall_clock()
        now = self._clock.monotonic() + _ROUNDING
        while self._calls and self._calls[0].when <= now:
            call = heappop(self._calls)
            callback, argument = call.callback, call.argument
            if callback is None:
                self._cancelled -= 1
            elif call.wall is not None and call.wall > self._clock.time() + 2 * _ROUNDING:
                call.when = self._expected(call.wall)  # the wall clock was set back, or runs slow
                heappush(self._calls, call)
            else:
                call.callback = call.argument = None
                try:
                    callback(argument)
                except Exception:
                    log.exception("a scheduled call failed; the others go on")
        self._arm()

    def _look_at_wall_clock(self) -> None:
        offset = self._clock.time() - self._clock.monotonic()
        if abs(offset - self._offset) > _DRIFT:
            self._offset = offset
            for call in self._calls:
                if call.wall is not None:
                    call.when = self._expected(call.wall)
            heapify(self._calls)
