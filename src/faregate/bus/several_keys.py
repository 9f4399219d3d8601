"""Lanes of a subscription whose messages may have several keys (`fg.Each`): a message runs when all its keys are free.

Rules kept here:
- A message enters the lines of all its keys at once, in the order of submission, and runs when it is first in all of
  them. Any two messages are in the same order in every line that both are in: nobody waits in a circle.
- It leaves its lines when it has ended. So of each key at most one message runs, in order, and those without a common
  key run together.
"""

from collections import deque
from collections.abc import Callable, Sequence

from faregate.bus.lanes import Lanes, Run
from faregate.node.subscription import Subscription
from faregate.ports.keys import keys_of
from faregate.ports.queue import Delivery


class SeveralKeysLanes(Lanes):
    def __init__(self, size: int, run: Run, *, full_batches: int | None = None) -> None:
        super().__init__(size, run, by_key=True, full_batches=full_batches)
        self._lines: dict[str, deque[Delivery]] = {}
        """By key: who has it, ready or running or waiting for its other keys; then who waits for it."""
        self._waiting: dict[Delivery, int] = {}
        """Those that wait, in the order of submission, with how many of their keys others have."""

    def submit(self, delivery: Delivery) -> None:
        if self.closing:
            return
        taken = 0
        for key in keys_of(delivery.key):
            line = self._lines.get(key)
            if line is None:
                self._lines[key] = deque((delivery,))
            else:
                line.append(delivery)
                taken += 1
        if taken:
            self._waiting[delivery] = taken
        else:
            self._make_ready(delivery)

    def _next_of_keys(self, ended: Sequence[Delivery]) -> None:
        lines, waiting = self._lines, self._waiting
        for delivery in ended:
            for key in keys_of(delivery.key):
                line = lines.get(key)
                if line is None or line[0] is not delivery:
                    continue  # it was closed meanwhile
                line.popleft()
                if not line:
                    del lines[key]
                    continue
                following = line[0]
                waiting[following] -= 1
                if not waiting[following]:
                    del waiting[following]
                    self._ready.append(following)
                    self._wake()

    def take_back(self, is_meant: Callable[[Delivery], bool] = lambda delivery: True) -> list[Delivery]:
        back = [delivery for delivery in (*self._ready, *self._waiting) if is_meant(delivery)]
        gone = set(back)
        self._alone.difference_update(gone)
        for key in {key for delivery in back for key in keys_of(delivery.key)}:
            left = deque(delivery for delivery in self._lines[key] if delivery not in gone)
            if left:
                self._lines[key] = left
            else:
                del self._lines[key]
        self._ready = deque(delivery for delivery in self._ready if delivery not in gone)
        before, self._waiting = self._waiting, {}
        for delivery in before:
            if delivery not in gone:
                taken = sum(self._lines[key][0] is not delivery for key in keys_of(delivery.key))
                if taken:
                    self._waiting[delivery] = taken
                else:
                    self._make_ready(delivery)
        return back

    def _forget(self) -> None:
        super()._forget()
        self._lines.clear()
        self._waiting.clear()


def lanes_of(subscription: Subscription, run: Run, *, full_batches: int | None = None) -> Lanes:
    """As many as its order says, of the kind that its keys need."""
    size = subscription.order.lanes
    if subscription.several:
        return SeveralKeysLanes(size, run, full_batches=full_batches)
    return Lanes(size, run, by_key=subscription.by_key, full_batches=full_batches)
