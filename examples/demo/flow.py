"""Runs the plan: publishes through the spool, kills the worker again and again, and waits until all is at rest.

Rules kept here:
- One thread and one loop: publish a batch when there is room, look, kill when it is time, tell the view.
- The worker is a process of its own. It is killed by SIGKILL, without a warning, while messages are on their way; the
  moments follow from the seed and the progress.
- Publishing goes on while there is no worker: that is what the spool is for.
- However this ends, no process is left.
"""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.spool import spool, waiting
from faregate.errors import FaregateError

from .plan import Envelopes, Plan
from .worker import STATUS, Status, read_status

_TURN = 0.05
_LONGEST_SILENCE = 60.0
"""Seconds without any progress after which the demo stops waiting, and lets the verdict say what is missing."""
_LONGEST_START = 60.0
_BATCHES_AHEAD = 4
_EARLIEST, _LATEST = 0.04, 0.92
"""Between which parts of the work the worker is killed."""


class WorkerFailed(FaregateError):
    """The demo's worker ended, and nobody had killed it."""


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


@dataclass
class Progress:
    """What has happened so far; the view draws it, the report too."""

    began: float
    crashes: int
    samples: list[Sample] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    """When workers began to work; the first one is no restart."""
    status: Status | None = None
    is_up: bool = False
    timeouts: int = 0
    redelivered: int = 0
    duplicates: int = 0
    """What workers that are no more had counted is in these three, too, up to their last word."""
    seconds: float = 0.0

    @property
    def last(self) -> Sample:
        return self.samples[-1] if self.samples else Sample(0.0)


Show = Callable[[Progress], None]


class Flow:
    def __init__(self, plan: Plan, folder: Path, crashes: int, show: Show) -> None:
        self._plan = plan
        self._folder = folder
        self._show = show
        chance = random.Random(f"kills of {plan.seed}")
        # One in each stretch of the work: spread over it, and at a random place there.
        stretch = (_LATEST - _EARLIEST) / max(1, crashes)
        moments = [_EARLIEST + stretch * (number + chance.random()) for number in range(crashes)]
        self._kill_at = [int(moment * len(plan.good)) for moment in moments]
        self._hesitations = [chance.uniform(0.0, 0.25) for _ in range(crashes)]
        self._batches = plan.batches()
        self._envelopes = Envelopes()
        self._all_published = False
        self._published = 0
        self._batch = 0
        self._worker: subprocess.Popen[bytes] | None = None
        self._layout = Layout(folder / "journal")
        self._gone = [0, 0, 0]
        self.progress = Progress(time.time(), crashes)

    def run(self) -> Progress:
        """Raises `WorkerFailed`."""
        try:
            self._start()
            self._await_start()
            self._until_rest()
            self._stop()
        finally:
            self._kill()
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
            if self._kill_at and self.progress.is_up and counts[2] >= self._kill_at[0]:
                self._crash()
                changed = time.monotonic()
            elif self._is_at_rest():
                return
            self._show(self.progress)
            time.sleep(_TURN)

    # --- publishing ----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """One batch at most, unless the worker has enough to do already."""
        last = self.progress.last
        ahead = self._published - last.invoices - last.dead
        if self._all_published or ahead >= _BATCHES_AHEAD * self._plan.batch_size:
            return
        batch = next(self._batches, None)
        if batch is None:
            self._all_published = True
            return
        now = time.time()
        envelopes = [self._envelopes.seal(placement, now) for placement in batch]
        spool(self._layout, RealDisk(), envelopes, f"orders-{self._batch:06d}")
        self._batch += 1
        self._published = min(self._plan.orders, self._batch * self._plan.batch_size)

    # --- looking -------------------------------------------------------------------------------------------

    def _look(self) -> None:
        worker, progress = self._worker, self.progress
        if worker is not None and worker.poll() is not None:
            raise WorkerFailed(f"the worker ended with status {worker.returncode}:\n{self._last_words()}")
        status = read_status(self._folder)
        if status is not None and worker is not None and status.pid == worker.pid and status.is_running:
            if not progress.is_up:
                progress.is_up = True
                progress.starts.append(time.time() - progress.began)
            progress.status = status
            outcomes = status.outcomes
            counted = (status.timeouts, outcomes["redelivered"], outcomes["duplicate"])
            sums = [before + now for before, now in zip(self._gone, counted, strict=True)]
            progress.timeouts, progress.redelivered, progress.duplicates = sums
        rows = count_rows(self._folder) or progress.last[2:]
        progress.samples.append(Sample(time.time() - progress.began, self._published, *rows))

    def _last_words(self) -> str:
        return "\n".join((self._folder / "worker.log").read_text(errors="replace").splitlines()[-15:])

    def _is_at_rest(self) -> bool:
        """Everything is published and taken in, and the worker says, later than that, that nothing is left to do."""
        if self._kill_at or not self._all_published or not self.progress.is_up:
            return False
        if waiting(self._layout, RealDisk()):
            return False
        known = time.time()
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            status = read_status(self._folder)
            if status is not None and status.at > known + 0.5:  # what it says began after the spool was empty
                rows = count_rows(self._folder)
                return status.is_at_rest and rows is not None and not rows[3]
            if status is not None and not status.is_at_rest:
                return False
            time.sleep(_TURN)
        return False

    # --- the worker's life ---------------------------------------------------------------------------------

    def _start(self) -> None:
        with (self._folder / "worker.log").open("ab") as log:
            # A group of its own: a Ctrl-C is for this process, which then ends the worker itself.
            self._worker = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", str(self._folder), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await_start(self) -> None:
        """The first worker makes the journal; there is no spool before."""
        deadline = time.monotonic() + _LONGEST_START
        while not self.progress.is_up:
            self._look()
            self._show(self.progress)
            if time.monotonic() > deadline:
                raise WorkerFailed(f"the worker did not start within {_LONGEST_START:.0f} s:\n{self._last_words()}")
            time.sleep(_TURN)

    def _crash(self) -> None:
        self._kill_at.pop(0)
        time.sleep(self._hesitations.pop(0))
        self._look()
        self._kill()
        progress = self.progress
        progress.kills.append(time.time() - progress.began)
        self._gone = [progress.timeouts, progress.redelivered, progress.duplicates]
        progress.is_up = False
        self._show(progress)
        self._start()

    def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            if worker.poll() is None:
                worker.send_signal(signal.SIGKILL)
            worker.wait()
            (self._folder / STATUS).unlink(missing_ok=True)

    def _stop(self) -> None:
        """The last one may end in an orderly way, as a service does."""
        if self._worker is not None:
            self._worker.terminate()
            try:
                self._worker.wait(30)
            except subprocess.TimeoutExpired:
                raise WorkerFailed(f"the worker did not stop within 30 s:\n{self._last_words()}") from None


_COUNTS = """
select (select coalesce(max(rowid), 0) from invoices), (select coalesce(max(rowid), 0) from charges),
       (select coalesce(max(rowid), 0) from parcels),
       (select count(*) from faregate_outbox where dispatched_at is null), (select count(*) from faregate_dead)
"""


def count_rows(folder: Path) -> tuple[int, ...] | None:
    """Invoices, charges, parcels (by the last row, which is quick), what waits in the outbox, dead letters.

    None while there are no tables yet, or while the database cannot be read because it is being recovered.
    """
    path = folder / "shop.db"
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            found: tuple[int, ...] = connection.execute(_COUNTS).fetchone()
            return found
    except sqlite3.OperationalError:
        return None
