"""How many messages are best handled together: slow ones one at a time, so that lanes share them; fast ones share a
commit."""

from time import perf_counter, thread_time

BATCH_LIMIT = 256
_FIRST_GUESS = 0.05
"""Seconds; a message is taken for slow until one knows better."""


class Pace:
    """How long the messages of one subscription take.

    While the event loop is busy it is so for all batches at work, so a batch counts its share of that. Reading the
    thread's clock is dear: where batches are full it is done now and then, and after a slow one.
    """

    def __init__(self, batch_seconds: float) -> None:
        self.batch_seconds = batch_seconds
        self._seconds = _FIRST_GUESS
        """Of one message by itself, as a moving average."""
        self._full = batch_seconds / BATCH_LIMIT
        """What it may take for batches to be full."""
        self._batches = 0
        self._measures = True
        """Whether the next batch is measured."""

    @property
    def batch(self) -> int:
        return max(1, min(BATCH_LIMIT, int(self.batch_seconds / self._seconds)))

    def start(self) -> tuple[float, float]:
        """A batch begins."""
        return perf_counter(), thread_time() if self._measures else 0.0

    def note(self, started: tuple[float, float], messages: int, waited: float, batches: int) -> None:
        """A batch of so many is over, beside others; it has `waited` for its transaction, which is none of its time."""
        seconds = perf_counter() - started[0] - waited
        if self._measures:
            seconds = max(seconds, 1e-9)
            busy = min(thread_time() - started[1], seconds)
            own = seconds - busy + busy / batches
            # The first one counts whole, and then the more, the more messages it is made of: among many, what one of
            # them waited for the processor, or for a cache to fill, does not matter.
            weight = max(0.5, messages / (messages + 16)) if self._batches else 1.0
            self._seconds += (own / messages - self._seconds) * weight
        self._batches += 1
        slow = self._seconds > self._full or seconds > messages * self._full
        self._measures = slow or self._batches % 256 == 0
