"""How many messages are best handled together: slow ones one at a time, so that lanes share them; fast ones share a
commit."""

from time import perf_counter, thread_time

BATCH_LIMIT = 256
_FIRST_GUESS = 0.05
"""Seconds; a message is taken for slow until one knows better."""
_MOST_UNMEASURED = 255
"""So many full batches are not measured between two that are."""


class Pace:
    """How long the messages of one subscription take.

    While the event loop is busy it is so for all batches at work, so a batch counts its share of that. Batches at work
    together see the same time, and reading the thread's clock is dear: one of so many is measured. Where batches are
    full it is done now and then, and after a slow one.
    """

    def __init__(self, batch_seconds: float) -> None:
        self.batch_seconds = batch_seconds
        self._seconds = _FIRST_GUESS
        """Of one message by itself, as a moving average."""
        self._full = batch_seconds / BATCH_LIMIT
        """What it may take for batches to be full."""
        self._weight = 1.0
        """What the next batch that is measured counts at least: the first one whole."""
        self._unmeasured = 0
        """How many batches begin before the next that is measured."""

    @property
    def batch(self) -> int:
        return max(1, min(BATCH_LIMIT, int(self.batch_seconds / self._seconds)))

    def start(self) -> tuple[float, float | None]:
        """A batch begins."""
        self._unmeasured -= 1
        return perf_counter(), thread_time() if self._unmeasured < 0 else None

    def note(self, started: tuple[float, float | None], messages: int, waited: float, batches: int) -> None:
        """A batch of so many is over, beside others; it has `waited` for its transaction, which is none of its time."""
        begun, used = started
        seconds = perf_counter() - begun - waited
        if used is not None:
            seconds = max(seconds, 1e-9)
            busy = min(thread_time() - used, seconds)
            own = seconds - busy + busy / batches
            # It counts the more, the more messages it is made of: among many, what one of them waited for the
            # processor, or for a cache to fill, does not matter.
            self._seconds += (own / messages - self._seconds) * max(self._weight, messages / (messages + 16))
            self._weight = 0.5
            self._unmeasured = _MOST_UNMEASURED
        if self._seconds > self._full or seconds > messages * self._full:
            self._unmeasured = min(self._unmeasured, batches - 1)
