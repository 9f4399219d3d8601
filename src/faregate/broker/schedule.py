"""Things that happen at a wall time: scheduled delivery, delayed redelivery, expiry.

One heap and at most one clock timer for all of them. The timer never sleeps longer than a minute, so that a
wall clock that jumps is noticed.
"""

import logging
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from faregate.ports.clock import Clock, Timer

log = logging.getLogger("faregate.broker")

_LONGEST_SLEEP = 60.0


class Alarm:
    """A callback at a time; `cancel` on the schedule makes it silent."""

    __slots__ = ("argument", "callback", "order", "when")

    def __init__(self, when: float, order: int, callback: Callable[[Any], None], argument: Any) -> None:
        self.when = when
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

    def __len__(self) -> int:
        return len(self._alarms) - self._cancelled

    def at(self, when: float, callback: Callable[[Any], None], argument: Any) -> Alarm:
        """Call `callback(argument)` once the wall clock shows `when`; in order of time, then of asking."""
        self._order += 1
        alarm = Alarm(when, self._order, callback, argument)
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
            delay = min(max(0.0, self._alarms[0].when - self._clock.time()), _LONGEST_SLEEP)
            self._timer_at = self._clock.time() + delay
            self._timer = self._clock.call_later(delay, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = self._clock.time()
        while self._alarms and self._alarms[0].when <= now:
            alarm = heappop(self._alarms)
            callback, argument = alarm.callback, alarm.argument
            if callback is None:
                self._cancelled -= 1
            else:
                alarm.callback = alarm.argument = None
                try:
                    callback(argument)
                except Exception:
                    log.exception("an alarm failed; the others go on")
        self._arm()
