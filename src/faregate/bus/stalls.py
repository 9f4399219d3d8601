"""The stall detector: an alarm names a part that has work and makes no progress.

Rules kept here:
- It costs nothing per message: a few times within the limit it asks every part what it works on, and compares the
  answers with the last ones.
- An alarm sounds after the limit without progress, and again each time that time has doubled. It ends with the first
  progress.
- While the event loop is held it cannot ask. If it comes too late by the limit, it says so.
"""

from collections.abc import Sequence

from faregate.core.alarms import Alarms
from faregate.ports.clock import Clock, Timer
from faregate.ports.progress import Occupied

_LOOKS_WITHIN_LIMIT = 4


class _Standstill:
    __slots__ = ("limit", "since")

    def __init__(self, since: float, limit: float) -> None:
        self.since = since
        self.limit = limit
        """After so many seconds the next alarm sounds."""


class StallDetector:
    def __init__(self, parts: Sequence[Occupied], seconds: float, clock: Clock, alarms: Alarms) -> None:
        self._parts = parts
        self._seconds = seconds
        self._period = seconds / _LOOKS_WITHIN_LIMIT
        self._clock = clock
        self._alarms = alarms
        self._seen: dict[object, _Standstill] = {}
        self._timer: Timer | None = None
        self._due = 0.0

    def start(self) -> None:
        self._due = self._clock.monotonic() + self._period
        self._timer = self._clock.call_later(self._period, self._look)

    @property
    def standing_still(self) -> int:
        """How many pieces of work had made no progress for too long, when it looked last."""
        now = self._clock.monotonic()
        return sum(now - each.since >= self._seconds for each in self._seen.values())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._clock.monotonic()
        late = now - self._due
        if late >= self._seconds:
            text = (
                f"something held the event loop for {late:.0f} s, and nothing else could run: code that blocks belongs "
                "into a plain def handler, which runs in a thread"
            )
            self._alarms.sound("stalled", "", "", text)
        seen: dict[object, _Standstill] = {}
        for part in self._parts:
            for occupation in part.occupations():
                found = self._seen.get(occupation.work) or _Standstill(now, self._seconds)
                seen[occupation.work] = found
                if now - found.since >= found.limit:
                    found.limit *= 2
                    text = f"{occupation.text}, without progress for {now - found.since:.0f} s"
                    self._alarms.sound("stalled", occupation.node, occupation.message_id, text)
        self._seen = seen
        self.start()
