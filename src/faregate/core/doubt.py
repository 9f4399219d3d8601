"""Doubt: handlers of several messages have failed, one after another, and none has succeeded since. That may be an
outage, and there are not enough of them yet to say so.

Rules kept here:
- While there is doubt one message at a time, the witness, has a try. Nothing else begins or is tried again, and what
  has used up its tries waits before anything becomes of it. So an outage costs few calls, and nobody's redeliveries.
- A message that has not failed yet comes first: it tells more than one that fails by itself. Once enough calls have
  failed, one that failed comes first and stays the witness: the switch trips when its tries are used up.
- Any success, or a failure of the witness for a reason of its own: there is no outage, and everybody goes on.
- Nobody is left who could be the witness: everybody goes on, and what failed has failed. Those between two tries are
  left: they will be.
- A witness that takes its time is not waited for, nor is a next try that is far off; they go on as they would have.
"""

import asyncio
from collections import deque
from functools import partial

from faregate.ports.clock import Clock, Timer
from faregate.ports.queue import Delivery

Turn = tuple[Delivery, "asyncio.Future[None]"]


class Doubt:
    def __init__(self, several: int, enough: int, clock: Clock, seconds: float) -> None:
        """`several`: how many messages have to fail; `enough`: how many calls tell that it is an outage. `seconds`: how
        long a witness is waited for."""
        self.failures = 0
        """How many calls have failed since the last success."""
        self.witness: Delivery | None = None
        """The one that has a try; the others wait for it."""
        self.timer: Timer | None = None
        """Somebody is waited for, until then: the witness, or those that rest."""
        self._several = several
        self._enough = enough
        self._seconds = seconds
        self._clock = clock
        self._messages: set[str] = set()
        self._failed: deque[Turn] = deque()
        """Those that failed, and have tries left."""
        self._fresh: deque[Turn] = deque()
        """Those that have not begun."""
        self._waiting: list[asyncio.Future[None]] = []
        """Those that have no tries left."""
        self._resting: set[Delivery] = set()
        """Those between two tries."""

    @property
    def is_there(self) -> bool:
        return len(self._messages) >= self._several

    @property
    def waiting(self) -> int:
        """How many wait for the witness."""
        return len(self._failed) + len(self._fresh) + len(self._waiting)

    def failed(self, publication_id: str) -> None:
        """A call of a handler failed, and none has succeeded since the last one that did."""
        self.failures += 1
        if not self.is_there:
            self._messages.add(publication_id)

    async def turn(self, delivery: Delivery, *, fresh: bool = False) -> None:
        """A message is to be tried, or tried again. Returns when it is its turn. `fresh`: it has not failed yet; such a
        one waits only if there is a witness."""
        self._resting.discard(delivery)
        if not self.is_there or self.witness is delivery:
            return
        if self.witness is None:
            if not fresh:
                self._appoint(delivery)
            return
        turn = delivery, asyncio.get_running_loop().create_future()
        line = self._fresh if fresh else self._failed
        line.append(turn)
        try:
            await turn[1]
        except BaseException:
            if turn in line:
                line.remove(turn)
            self.leave(delivery)
            raise

    async def wait(self, delivery: Delivery) -> None:
        """A message has used up its tries. Returns when nobody is waited for."""
        self.leave(delivery)
        if self.timer is None and self.is_there and self._resting:
            self._expect()
        while self.timer is not None:
            told = asyncio.get_running_loop().create_future()
            self._waiting.append(told)
            await told

    def leave(self, delivery: Delivery) -> None:
        """It is not waited for: if it was the witness, the next one is."""
        self._resting.discard(delivery)
        if self.witness is delivery or (self.witness is None and not self._resting):
            self._pass_on()

    def rest(self, delivery: Delivery) -> None:
        """It waits for its next try: others have their turn meanwhile, unless it is time to know."""
        self._resting.add(delivery)
        if self.witness is delivery and self.failures < self._enough:
            self._pass_on()

    def over(self) -> None:
        """There is none any more: everybody goes on."""
        self.failures = 0
        self._messages.clear()
        self._tell()

    def _pass_on(self) -> None:
        self._dismiss()
        lines = (self._fresh, self._failed) if self.failures < self._enough else (self._failed, self._fresh)
        for line in lines:
            while line:
                following, turn = line.popleft()
                if not turn.done():
                    self._appoint(following)
                    turn.set_result(None)
                    return
        if not self._resting:
            self._tell()
        elif self._waiting:
            self._expect()

    def _appoint(self, delivery: Delivery) -> None:
        self._dismiss()
        self.witness = delivery
        self.timer = self._clock.call_later(self._seconds, partial(self.leave, delivery))

    def _expect(self) -> None:
        self.timer = self._clock.call_later(self._seconds, self._tell)

    def _dismiss(self) -> None:
        self.witness = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def _tell(self) -> None:
        self._dismiss()
        told = [*self._waiting, *(turn for _, turn in (*self._failed, *self._fresh))]
        self._waiting.clear()
        self._failed.clear()
        self._fresh.clear()
        for each in told:
            if not each.done():
                each.set_result(None)
