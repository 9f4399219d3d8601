"""Lanes: how many deliveries of one subscription are worked on at a time, and in which order.

Rules kept here:
- At most `size` deliveries, or batches of them, run at once. `batch` bounds what a lane takes at a time; it depends
  on how long messages take. A lane leaves their share to the other free lanes, unless messages are so fast that a full
  batch takes no time. While many lanes are at work it leaves some to all of them, so that whoever ends finds something
  ready, also where there are only so many keys. Where full batches follow each other anyway (`full_batches`), no more
  are begun: they would only wait, and leave so little to fetch that the next ones are small.
- A batch that is slower than expected puts back what it has not begun (`put_back`).
- Of one key at most one message runs, in the order of submission. Keys do not wait for each other, and the next message
  of a key never waits while a lane is free. (Of messages with several keys: `several_keys.py`.)
- What waits is bounded by the transport's prefetch. The embedded broker withholds what follows a busy key, so that a
  busy key does not fill the prefetch; other transports have to do so themselves.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from itertools import islice, takewhile
from typing import cast

from faregate.core.lane_task import LaneTask
from faregate.core.pace import BATCH_LIMIT
from faregate.ports.queue import Delivery

log = logging.getLogger("faregate.bus")

Run = Callable[[list[Delivery]], Awaitable[list[Delivery]]]
"""Works on a batch; returns those that run again, each alone, before everything else of their keys."""

_CANCEL_SECONDS = 5.0
_RUNS_PER_TURN = 64
"""After so many a lane lets the rest of the event loop run, as its handler may never wait."""
_FEW_LANES = 10
"""As many as there are unless somebody asks for more. Where more are at work handlers wait, however fast they seem to
be while the event loop is busy."""


class Lanes:
    def __init__(self, size: int, run: Run, *, by_key: bool, full_batches: int | None = None) -> None:
        """`full_batches`: how many of them are worked on at a time; None: as many as there are lanes."""
        self._size = size
        self._full_batches = size if full_batches is None else full_batches
        self._run = run
        self._by_key = by_key
        self._ready: deque[Delivery] = deque()
        self._keys: dict[str, deque[Delivery] | None] = {}
        """The keys that are ready or running, with what waits behind each."""
        self._alone: set[Delivery] = set()
        """Ready deliveries that are not taken together with others."""
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.closing = False
        self.batch = 1
        """How many deliveries a lane takes at a time, at most."""
        self.at_work: dict[asyncio.Task[None], list[Delivery]] = {}
        """What each lane works on now."""

    @property
    def busy(self) -> int:
        return len(self.at_work)

    @property
    def neglected(self) -> Delivery | None:
        """The first ready delivery while no lane is at work: if it stays, something is wrong."""
        return self._ready[0] if self._ready and not self.at_work else None

    def submit(self, delivery: Delivery) -> None:
        """Take a delivery from the transport."""
        if self.closing:
            return
        key = delivery.key if self._by_key else None
        if key is not None:
            if key in self._keys:
                behind = self._keys[key]
                if behind is None:
                    behind = self._keys[key] = deque()
                behind.append(delivery)
                return
            self._keys[key] = None
        self._make_ready(delivery)

    def _make_ready(self, delivery: Delivery) -> None:
        self._ready.append(delivery)
        # Free lanes share what is ready: all begin in this turn of the loop. A full batch is for one of them.
        if self.batch < BATCH_LIMIT or len(self._ready) % BATCH_LIMIT == 1:
            self._wake()

    def put_back(self, unbegun: Sequence[Delivery], ended: Sequence[Delivery] = ()) -> None:
        """Of a batch at work: deliveries that have not begun are ready again, before all others; some have ended."""
        gone = {*unbegun, *ended}
        own = self.at_work.get(cast("asyncio.Task[None]", asyncio.current_task()))
        for taken in self.at_work.values() if own is None else (own,):  # of which lane it is, others do not know
            taken[:] = [delivery for delivery in taken if delivery not in gone]
        if self.closing:
            return
        self._ready.extendleft(reversed(unbegun))
        if self._by_key:
            self._next_of_keys(ended)
        self._wake()

    def _wake(self) -> None:
        """Let a lane take what is ready."""
        while self._idle:
            idle = self._idle.pop()
            if not idle.done():
                idle.set_result(None)
                return
        if len(self._tasks) < self._size:
            task = LaneTask(self._lane(), loop=asyncio.get_running_loop(), name=f"lane-{len(self._tasks)}")
            self._tasks.add(task)
            task.add_done_callback(self._lane_ended)

    def _lane_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._ready and not self.closing:
            self._wake()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a lane failed; its message will be redelivered", exc_info=error)

    async def _lane(self) -> None:
        lane = asyncio.current_task()
        assert lane is not None
        loop = lane.get_loop()
        runs = 0
        while not self.closing:
            while self._ready and not self.closing and not self._has_enough():
                taken = self._take()
                again: list[Delivery] = []
                self.at_work[lane] = taken
                try:
                    again = await self._run(taken)
                finally:
                    del self.at_work[lane]
                    if again and not self.closing:
                        self._alone.update(again)
                        self._ready.extendleft(reversed(again))
                        for _ in again:
                            self._wake()
                    if self._by_key:
                        alone = self._alone
                        self._next_of_keys([each for each in taken if each not in alone] if alone else taken)
                runs += 1
                if runs == _RUNS_PER_TURN:
                    runs = 0
                    await asyncio.sleep(0)
            if self.closing:
                return
            idle = loop.create_future()
            self._idle.append(idle)
            await idle

    def _has_enough(self) -> bool:
        """Whether full batches are at work, and the next one had better wait for them. Looks at what is left of each:
        a batch of which a slow handler is left holds up nobody."""
        if self.batch < BATCH_LIMIT or len(self._ready) < BATCH_LIMIT:
            return False
        return [len(taken) for taken in self.at_work.values()].count(BATCH_LIMIT) >= self._full_batches

    def _take(self) -> list[Delivery]:
        ready, alone = self._ready, self._alone
        most, busy = self.batch, self.busy
        if busy >= _FEW_LANES and self._full_batches == self._size:
            most = min(most, -(-3 * len(ready) // self._size))
        elif most < BATCH_LIMIT:
            most = min(most, -(-len(ready) // (self._size - busy)))
        if not alone:
            taken = [ready.popleft() for _ in range(min(most, len(ready)))]
        elif ready[0] in alone:
            taken = [ready.popleft()]
            alone.discard(taken[0])
        else:
            together = takewhile(lambda delivery: delivery not in alone, islice(ready, most))
            taken = [ready.popleft() for _ in list(together)]
        # This lane is not at work yet; those that are neither idle nor at work are about to take something themselves.
        if len(ready) >= len(self._tasks) - len(self._idle) - self.busy:
            self._wake()
        return taken

    def _next_of_keys(self, ended: Sequence[Delivery]) -> None:
        keys = self._keys
        for delivery in ended:
            key = delivery.key
            if key is None:
                continue
            behind = keys.pop(key, None)
            if behind:
                keys[key] = behind
                self._ready.append(behind.popleft())
                self._wake()

    def take_back(self, is_meant: Callable[[Delivery], bool] = lambda delivery: True) -> list[Delivery]:
        """What no lane has taken yet, of those that are meant: all of a key or none. The caller has it from now on."""
        back = [delivery for delivery in self._ready if is_meant(delivery)]
        keys = {delivery.key for delivery in back}
        self._ready = deque(delivery for delivery in self._ready if not is_meant(delivery))
        self._alone.difference_update(back)
        for key, behind in list(self._keys.items()):
            if behind and is_meant(behind[0]):
                back += behind
                self._keys[key] = None
            if key in keys:
                del self._keys[key]
        return back

    async def close(self, deadline: float, on_late: Callable[[list[Delivery]], None] | None = None) -> int:
        """Start nothing more; let what runs finish for that many seconds, then cancel it.

        Returns how many batches were cancelled; `on_late` is told of each before it is.
        """
        late_batches = 0
        self.closing = True
        self._forget()
        for idle in self._idle:
            if not idle.done():
                idle.set_result(None)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=deadline)
            for task in late:
                if task in self.at_work:
                    late_batches += 1
                    if on_late is not None:
                        on_late(self.at_work[task])
                Context().run(task.cancel)  # not as the handler's own cancellation, even if the handler closes us
            if late:
                _, stuck = await asyncio.wait(late, timeout=_CANCEL_SECONDS)
                if stuck:
                    log.error("%d handlers ignore their cancellation; they are left running", len(stuck))
        return late_batches

    def _forget(self) -> None:
        self._ready.clear()
        self._alone.clear()
        self._keys.clear()
