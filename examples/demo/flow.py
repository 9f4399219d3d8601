"""Runs the plan: publishes, kills what is to be killed again and again, and waits until all is at rest.

Rules kept here:
- One thread and one loop: publish a batch when there is room, look, kill when it is time, tell the view.
- Workers are processes of their own. They are killed by SIGKILL, without a warning, while messages are on their way;
  the moments, and who it is, follow from the seed and the progress.
- Publishing goes on while there is no worker, or no broker: the spool, or the outbox, is there for that.
- However this ends, no process is left.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .plan import Envelopes, Plan
from .site import Site, WorkerFailed

_LONGEST_SILENCE = 60.0
"""Seconds without any progress after which the demo stops waiting, and lets the verdict say what is missing."""
_LONGEST_START = 120.0
_LONGEST_END = 30.0
_BATCHES_AHEAD = 4
_EARLIEST, _LATEST = 0.04, 0.92
"""Between which parts of the work something is killed."""


class Sample(NamedTuple):
    """What there is at one moment; `at` in seconds since the beginning."""

    at: float
    published: int = 0
    invoices: int = 0
    charges: int = 0
    parcels: int = 0
    outbox: int = 0
    dead: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        return self[1:]

    @property
    def done(self) -> int:
        return self.invoices + self.charges + self.parcels


@dataclass
class Progress:
    """What has happened so far; the view draws it, the report too."""

    began: float
    crashes: int
    samples: list[Sample] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    """What it was that was killed, each time."""
    restarts: int = 0
    pids: list[int] = field(default_factory=list)
    """The workers that are at work."""
    is_up: bool = False
    """Whether everything is."""
    timeouts: int = 0
    redelivered: int = 0
    duplicates: int = 0
    """What workers that are no more had counted is in these three, too, up to their last word."""
    seconds: float = 0.0

    @property
    def last(self) -> Sample:
        return self.samples[-1] if self.samples else Sample(0.0)

    @property
    def pauses(self) -> list[float]:
        """For each kill, how many seconds passed until somebody's work was done again."""
        found = []
        for kill in self.kills:
            before = max(sample.done for sample in self.samples if sample.at <= kill)
            found += [sample.at - kill for sample in self.samples if sample.at > kill and sample.done > before][:1]
        return found


Show = Callable[[Progress], None]


class Flow:
    def __init__(self, plan: Plan, site: Site, crashes: int, show: Show) -> None:
        self._plan = plan
        self._site = site
        self._show = show
        chance = random.Random(f"kills of {plan.seed}")
        # One in each stretch of the work: spread over it, and at a random place there.
        stretch = (_LATEST - _EARLIEST) / max(1, crashes)
        moments = [_EARLIEST + stretch * (number + chance.random()) for number in range(crashes)]
        self._kill_at = [int(moment * len(plan.good)) for moment in moments]
        self._hesitations = [chance.uniform(0.0, 0.25) for _ in range(crashes)]
        self._victims = site.victims(crashes, chance)
        self._batches = plan.batches()
        self._envelopes = Envelopes()
        self._all_published = False
        self._published = 0
        self._batch = 0
        self.progress = Progress(time.time(), crashes)

    def run(self) -> Progress:
        """Raises `WorkerFailed`, and `ServerFailed`."""
        workers = self._site.workers
        try:
            for worker in workers:
                worker.start()
            self._await_start()
            self._until_rest()
            for worker in workers:
                worker.ask_to_end()
            for worker in workers:
                worker.await_end(_LONGEST_END)
        finally:
            for worker in workers:
                worker.kill()
        self.progress.seconds = time.time() - self.progress.began
        return self.progress

    def _until_rest(self) -> None:
        last_counts: tuple[int, ...] = ()
        changed = time.monotonic()
        while time.monotonic() - changed < _LONGEST_SILENCE:
            self._publish()
            self._look()
            counts = self.progress.last.counts
            if counts != last_counts:
                last_counts, changed = counts, time.monotonic()
            if self._is_time_to_kill():
                self._crash()
                changed = time.monotonic()
            elif self._is_at_rest():
                return
            self._show(self.progress)
            time.sleep(self._site.turn)

    def _is_time_to_kill(self) -> bool:
        last = self.progress.last
        if not self._kill_at or not self.progress.is_up or last.parcels < self._kill_at[0]:
            return False
        return self._all_published or self._published > last.invoices + last.dead  # something is on its way

    def _publish(self) -> None:
        """One batch at most, unless the workers have enough to do already. While something starts, what is left for
        the next kill is held back: messages shall be on their way then."""
        last = self.progress.last
        ahead = self._published - last.invoices - last.dead
        if self._all_published or ahead >= _BATCHES_AHEAD * self._plan.batch_size:
            return
        if self._kill_at and not self.progress.is_up and self._published + self._plan.batch_size >= self._kill_at[0]:
            return
        batch = next(self._batches, None)
        if batch is None:
            self._all_published = True
            return
        now = time.time()
        self._site.publish([self._envelopes.seal(placement, now) for placement in batch], f"orders-{self._batch:06d}")
        self._batch += 1
        self._published = min(self._plan.orders, self._batch * self._plan.batch_size)

    def _look(self) -> None:
        site, progress = self._site, self.progress
        for part in site.parts:
            part.look()
        was_up, progress.is_up = progress.is_up, all(part.is_up for part in site.parts)
        if progress.is_up and not was_up:
            progress.restarts = len(progress.kills)
        progress.pids = [worker.status.pid for worker in site.workers if worker.status is not None]
        counted = zip(*(worker.counted for worker in site.workers), strict=True)
        progress.timeouts, progress.redelivered, progress.duplicates = map(sum, counted)
        self._count()

    def _count(self) -> None:
        rows = self._site.count() or self.progress.last[2:]
        self.progress.samples.append(Sample(time.time() - self.progress.began, self._published, *rows))

    def _is_at_rest(self) -> bool:
        """Everything is published and taken in, what must come of it has come, and all workers say, later than that,
        that nothing is left to do."""
        last, plan = self.progress.last, self._plan
        if self._kill_at or not self._all_published or not self.progress.is_up:
            return False
        if last.parcels < len(plan.good) or last.dead < plan.dead or last.outbox or not self._site.is_taken_in():
            return False
        known = time.time()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            self._look()
            said = [worker.status for worker in self._site.workers if worker.status is not None]
            if said and min(status.at for status in said) > known:
                return all(status.is_at_rest for status in said) and not self.progress.last.outbox
            time.sleep(self._site.turn)
        return False

    def _await_start(self) -> None:
        """The first worker makes the journal; there is no spool before."""
        deadline = time.monotonic() + _LONGEST_START
        while not self.progress.is_up:
            self._look()
            self._show(self.progress)
            if time.monotonic() > deadline:
                late = next(worker for worker in self._site.workers if not worker.is_up)
                raise WorkerFailed(f"{late.name} did not start within {_LONGEST_START:.0f} s:\n{late.last_words()}")
            time.sleep(self._site.turn)

    def _crash(self) -> None:
        self._kill_at.pop(0)
        time.sleep(self._hesitations.pop(0))
        self._look()
        victim, progress = self._victims.pop(0), self.progress
        victim.kill()
        self._count()  # what it had done by then
        progress.kills.append(time.time() - progress.began)
        progress.killed.append(victim.name)
        progress.is_up = False
        self._show(progress)
        victim.start()
