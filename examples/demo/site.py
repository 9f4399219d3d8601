"""Where the shop runs: what its processes are, how orders get in, and what is to be read afterwards.

    Site          what the flow and the verdict need to know of it
    JournalSite   one process, a journal, a SQLite file
    RabbitmqSite  (rabbitmq_site.py) two processes of each service, RabbitMQ, PostgreSQL

A worker is a process of its own, and ends with this one.
"""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any, Protocol

from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.spool import spool, waiting
from faregate.errors import FaregateError
from faregate.message import Envelope

from .worker import Status, read_status


class WorkerFailed(FaregateError):
    """A worker of the demo ended, and nobody had killed it."""


class Part(Protocol):
    """What can be killed by SIGKILL, and started again."""

    name: str

    @property
    def is_up(self) -> bool: ...

    def look(self) -> None:
        """Learn how it is. Raises what says that it ended by itself."""

    def start(self) -> None:
        """Returns at once."""

    def kill(self) -> None: ...


class Database(Protocol):
    """A connection of sqlite3 or psycopg."""

    def execute(self, query: Any, /) -> Any: ...


class Site(Protocol):
    turn: float
    """Seconds between two looks."""
    threat: str
    """What is killed, `{}` times."""
    options: str
    """Of the command, for this site."""
    log: str
    """The URL of the log."""
    keeps_copies: bool
    """Whether the log has every copy of a publication; else the broker recognised them."""

    @property
    def stores(self) -> str | dict[str, str]:
        """Of the nodes, for Spark."""

    @property
    def workers(self) -> "Sequence[Worker]": ...

    @property
    def parts(self) -> Sequence[Part]:
        """The workers, and what else may be killed."""

    def victims(self, crashes: int, chance: Random) -> list[Part]:
        """Which part is killed each time."""

    def publish(self, envelopes: Sequence[Envelope], name: str) -> None:
        """Durable when it returns, whatever is killed meanwhile."""

    def is_taken_in(self) -> bool:
        """Whether everything that was published has left this process' hands."""

    def count(self) -> tuple[int, ...] | None:
        """Invoices, charges, parcels, what waits in the outbox, dead letters. None while that cannot be read."""

    def database(self) -> AbstractContextManager[Database]:
        """The business tables, with `rowid` in the order in which rows were written, and Faregate's."""

    def change(self, statement: str) -> None:
        """Behind everybody's back."""


class Worker:
    """One process that runs worker.py."""

    def __init__(self, folder: Path, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._folder = folder
        self._arguments = arguments
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._gone: tuple[int, ...] = (0, 0, 0)
        self.status: Status | None = None
        """What the process that runs now said last."""

    @property
    def is_up(self) -> bool:
        return self.status is not None and self.status.is_running

    @property
    def counted(self) -> tuple[int, ...]:
        """Silences of the bank, redeliveries, duplicates; of processes that are no more, up to their last word."""
        return tuple(before + now for before, now in zip(self._gone, _counted(self.status), strict=True))

    def look(self) -> None:
        """Raises `WorkerFailed`."""
        process = self._process
        if process is None:
            return
        if process.poll() is not None:
            raise WorkerFailed(f"{self.name} ended with status {process.returncode}:\n{self.last_words()}")
        status = read_status(self._folder, self.name)
        if status is not None and status.pid == process.pid:
            self.status = status

    def last_words(self) -> str:
        path = self._folder / f"{self.name}.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:])

    def start(self) -> None:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            # A group of its own: a Ctrl-C is for this process, which then ends the worker itself.
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", f"{__package__}.worker"),
                    *(str(self._folder), self.name, str(os.getpid()), *self._arguments),
                ],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            self._gone, self.status = self.counted, None

    def ask_to_end(self) -> None:
        """In an orderly way, as a service does."""
        if self._process is not None:
            self._process.terminate()

    def await_end(self, seconds: float) -> None:
        """Raises `WorkerFailed`."""
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise WorkerFailed(f"{self.name} did not stop within {seconds:g} s:\n{self.last_words()}") from None


def _counted(status: Status | None) -> tuple[int, int, int]:
    if status is None:
        return 0, 0, 0
    return status.timeouts, status.outcomes["redelivered"], status.outcomes["duplicate"]


_COUNTS = """
select (select coalesce(max(rowid), 0) from invoices), (select coalesce(max(rowid), 0) from charges),
       (select coalesce(max(rowid), 0) from parcels),
       (select count(*) from faregate_outbox where dispatched_at is null), (select count(*) from faregate_dead)
"""
"""Rows by the last one, which is quick."""


class JournalSite:
    turn = 0.05
    threat = "a worker that is killed {} times"
    options = ""
    keeps_copies = False

    def __init__(self, folder: Path) -> None:
        self._layout = Layout(folder / "journal")
        self._path = folder / "shop.db"
        self.workers = self.parts = [Worker(folder, "worker")]
        self.log = f"journal:{folder / 'journal'}"
        self.stores = f"sqlite:{self._path}"

    def victims(self, crashes: int, chance: Random) -> list[Part]:
        return [self.workers[0]] * crashes

    def publish(self, envelopes: Sequence[Envelope], name: str) -> None:
        spool(self._layout, RealDisk(), envelopes, name)

    def is_taken_in(self) -> bool:
        return not waiting(self._layout, RealDisk())

    def count(self) -> tuple[int, ...] | None:
        """None while there are no tables yet, or while the database cannot be read because it is being recovered."""
        if not self._path.exists():
            return None
        try:
            with self.database() as connection:
                found: tuple[int, ...] = connection.execute(_COUNTS).fetchone()
                return found
        except sqlite3.OperationalError:
            return None

    @contextmanager
    def database(self) -> Iterator[Database]:
        path = f"{self._path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(path, uri=True, timeout=5)) as connection:
            yield connection

    def change(self, statement: str) -> None:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute(statement)
