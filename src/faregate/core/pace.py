"""How many messages are best handled together: slow ones one at a time, so that lanes share them; fast ones share a
commit."""

from time import perf_counter, thread_time

BATCH_LIMIT = 256
_FIRST_GUESS = 0.05
"""Seconds; a message is taken for slow until one knows better."""


class Pace:
    """How long the messages of one subscription take.

    While the event loop is busy it is so for all batches at work, so a batch counts its share of that. Reading the
    thread's clock is dear: it is done for the first batches, now and then, and after a slow one.
    """

    def __init__(self, batch_seconds: float) -> None:
        self.batch_seconds = batch_seconds
        self._seconds = _FIRST_GUESS
        """Of one message by itself, as a moving average."""
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
        seconds = max(perf_counter() - started[0] - waited, 1e-9)
        if self._measures:
            busy = min(thread_time() - started[1], seconds)
            own = seconds - busy + busy / batches
            self._seconds += (own / messages - self._seconds) / 4
        self._batches += 1
        self._measures = self._batches < 16 or self._batches % 256 == 0 or seconds > 2 * messages * self._seconds
