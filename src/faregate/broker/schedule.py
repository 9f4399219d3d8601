"""Things that happen later: scheduled delivery at a wall time; delays, redeliveries and expiry after a duration.

Rules kept here:
- A duration is measured by the monotonic clock: it comes after that many seconds, whatever the wall clock does.
- A wall time comes when the wall clock shows it, and never before. The timer never sleeps longer than a minute, so
  that a wall clock that was set forward is noticed.

One heap and at most one clock timer for all of them.
"""

import logging
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from faregate.ports.clock import Clock, Timer

log = logging.getLogger("faregate.broker")

_LONGEST_SLEEP = 60.0
_DRIFT = 0.05
"""Seconds that the wall clock may run off before the heap is sorted anew."""
_ROUNDING = 1e-6
"""Times that differ by less are the same: a difference of wall times is no more exact."""


class Alarm:
    """A callback at a time; `cancel` on the schedule makes it silent."""

    __slots__ = ("argument", "callback", "order", "wall", "when")

    def __init__(
        self, when: float, wall: float | None, order: int, callback: Callable[[Any], None], argument: Any
    ) -> None:
        self.when = when
        """On the monotonic clock; of a wall time as far as one can tell now."""
        self.wall = wall
        """The wall time it waits for; None when it waits for a duration."""
        self.order = order
        self.callback: Callable[[Any], None] | None = callback
        self.argument = argument

    def __lt__(self, other: "Alarm") -> bool:
        return (self.when, self.order) < (other.when, other.order)


class Schedule:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._alarms: list[Alarm] = []
        self._order = 0
        self._cancelled = 0
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._offset = clock.time() - clock.monotonic()

    def __len__(self) -> int:
        return len(self._alarms) - self._cancelled

    def at(self, wall: float, callback: Callable[[Any], None], argument: Any) -> Alarm:
        """Call `callback(argument)` once the wall clock shows that; in order of time, then of asking."""
        return self._add(self._expected(wall), wall, callback, argument)

    def after(self, seconds: float, callback: Callable[[Any], None], argument: Any) -> Alarm:
        """Call `callback(argument)` after that many seconds; in the same order."""
        return self._add(round(self._clock.monotonic() + seconds, 6), None, callback, argument)

    def wall_time(self, alarm: Alarm) -> float:
        """When it rings, as far as one can tell now."""
        if alarm.wall is not None:
            return alarm.wall
        return self._clock.time() + alarm.when - self._clock.monotonic()

    def _expected(self, wall: float) -> float:
        return round(self._clock.monotonic() + (wall - self._clock.time()), 6)

    def _add(self, when: float, wall: float | None, callback: Callable[[Any], None], argument: Any) -> Alarm:
        self._order += 1
        alarm = Alarm(when, wall, self._order, callback, argument)
        heappush(self._alarms, alarm)
        if self._timer is None or when < self._timer_at:
            self._arm()
        return alarm

    def cancel(self, alarm: Alarm | None) -> None:
        if alarm is None or alarm.callback is None:
            return
        alarm.callback = alarm.argument = None
        self._cancelled += 1
        if self._cancelled > 64 and self._cancelled * 2 > len(self._alarms):
            self._alarms = [alarm for alarm in self._alarms if alarm.callback is not None]
            heapify(self._alarms)
            self._cancelled = 0

    def close(self) -> None:
        for alarm in self._alarms:
            alarm.callback = alarm.argument = None
        self._alarms.clear()
        self._cancelled = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._alarms and self._alarms[0].callback is None:
            heappop(self._alarms)
            self._cancelled -= 1
        if self._alarms:
            now = self._clock.monotonic()
            delay = min(max(0.0, self._alarms[0].when - now), _LONGEST_SLEEP)
            self._timer_at = now + delay
            self._timer = self._clock.call_later(delay, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._look_at_wall_clock()
        now = self._clock.monotonic() + _ROUNDING
        while self._alarms and self._alarms[0].when <= now:
            alarm = heappop(self._alarms)
            callback, argument = alarm.callback, alarm.argument
            if callback is None:
                self._cancelled -= 1
            elif alarm.wall is not None and alarm.wall > self._clock.time() + 2 * _ROUNDING:
                alarm.when = self._expected(alarm.wall)  # the wall clock was set back, or runs slow
                heappush(self._alarms, alarm)
            else:
                alarm.callback = alarm.argument = None
                try:
                    callback(argument)
                except Exception:
                    log.exception("an alarm failed; the others go on")
        self._arm()

    def _look_at_wall_clock(self) -> None:
        offset = self._clock.time() - self._clock.monotonic()
        if abs(offset - self._offset) > _DRIFT:
            self._offset = offset
            for alarm in self._alarms:
                if alarm.wall is not None:
                    alarm.when = self._expected(alarm.wall)
            heapify(self._alarms)
