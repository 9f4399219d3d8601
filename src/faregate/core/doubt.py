"""Doubt: handlers of several messages have failed, one after another, and none has succeeded since. That may be an
outage, and there are not enough of them yet to say so.

Rules kept here:
- While there is doubt one message, the witness, has its tries. Nothing else begins or is tried again, and what has used
  up its tries waits before anything becomes of it. So an outage costs few calls, and nobody's redeliveries.
- The witness succeeds, or fails for a reason of its own: there is no outage, and everybody goes on.
- Its tries are used up: the next one that failed is the witness. When enough calls have failed the switch trips.
- Nobody is left who could be the witness: everybody goes on, and what failed has failed.
- A witness that takes its time is not waited for; it goes on as it would have.
"""

import asyncio
from collections import deque
from functools import partial

from faregate.ports.clock import Clock, Timer
from faregate.ports.queue import Delivery


class Doubt:
    def __init__(self, several: int, clock: Clock, seconds: float) -> None:
        """`several`: how many messages have to fail. `seconds`: how long a witness is waited for."""
        self.failures = 0
        """How many calls have failed since the last success."""
        self.witness: Delivery | None = None
        """The one that has its tries; the others wait for it."""
        self._several = several
        self._seconds = seconds
        self._clock = clock
        self._messages: set[str] = set()
        self._turns: deque[tuple[Delivery, asyncio.Future[None]]] = deque()
        """Those that have tries left."""
        self._waiting: list[asyncio.Future[None]] = []
        """Those that have none left, or have not begun."""
        self._timer: Timer | None = None

    @property
    def is_there(self) -> bool:
        return len(self._messages) >= self._several

    @property
    def waiting(self) -> int:
        """How many wait for the witness."""
        return len(self._turns) + len(self._waiting)

    def failed(self, publication_id: str) -> None:
        """A call of a handler failed, and none has succeeded since the last one that did."""
        self.failures += 1
        if not self.is_there:
            self._messages.add(publication_id)

    async def turn(self, delivery: Delivery) -> None:
        """A message is to be tried again. Returns when it is its turn."""
        if not self.is_there or self.witness is delivery:
            return
        if self.witness is None:
            self._appoint(delivery)
            return
        turn = delivery, asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn[1]
        except BaseException:
            if turn in self._turns:
                self._turns.remove(turn)
            self.leave(delivery)
            raise

    async def wait(self, delivery: Delivery | None = None) -> None:
        """A message has used up its tries, or one is to begin. Returns when nobody is waited for."""
        self.leave(delivery)
        while self.witness is not None:
            told = asyncio.get_running_loop().create_future()
            self._waiting.append(told)
            await told

    def leave(self, delivery: Delivery | None) -> None:
        """It is the witness no longer, if it was: the next one is."""
        if delivery is None or self.witness is not delivery:
            return
        self._dismiss()
        while self._turns:
            following, turn = self._turns.popleft()
            if not turn.done():
                self._appoint(following)
                turn.set_result(None)
                return
        self._tell()

    def over(self) -> None:
        """There is none any more: everybody goes on."""
        self.failures = 0
        self._messages.clear()
        self._dismiss()
        self._tell()

    def _appoint(self, delivery: Delivery) -> None:
        self.witness = delivery
        self._timer = self._clock.call_later(self._seconds, partial(self.leave, delivery))

    def _dismiss(self) -> None:
        self.witness = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        turns, self._turns = self._turns, deque()
        for told in (*waiting, *(turn for _, turn in turns)):
            if not told.done():
                told.set_result(None)
