"""Tells when making a resource for each message takes longer than what it is made for: such a one belongs to the bus.

Rules kept here:
- A sample is as many messages as `SAMPLE`, whichever subscriptions they are of. What takes no time worth speaking of
  is never told.
- It is told once, until a later sample shows that it takes less than half of what it is made for.
"""

from collections.abc import Callable

SAMPLE = 50
"""How many messages are looked at together."""
_WORTH_SPEAKING_OF = 0.001
"""Seconds for one message."""


class Cost:
    """Of making one resource."""

    def __init__(self, tell: Callable[[float, float], None]) -> None:
        """`tell` is given the mean seconds of making it, and of using it."""
        self._tell = tell
        self._told = False
        self._count = 0
        self._making = self._using = 0.0

    def note(self, making: float, using: float) -> None:
        """It was made for a message, and used."""
        self._making += making
        self._using += using
        self._count += 1
        if self._count == SAMPLE:
            self._judge(self._making / SAMPLE, self._using / SAMPLE)
            self._count, self._making, self._using = 0, 0.0, 0.0

    def _judge(self, making: float, using: float) -> None:
        if self._told:
            self._told = making >= using / 2 and making >= _WORTH_SPEAKING_OF
        elif making > using and making >= _WORTH_SPEAKING_OF:
            self._told = True
            self._tell(making, using)
