"""The Spark session of the commands: small, quiet, on this machine by default; its progress and its errors.

What Java and Spark's workers write to standard error goes to a file. When no session starts, its last line is shown.
A command that runs a user's code keeps the file, and says where it is.

A signal to end may go to every process of a service. Java outlives it, and ends when its command has ended.
"""

import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from faregate.cli.output import errors
from faregate.errors import ConfigurationError, FaregateError
from faregate.ports.extras import needs_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Master = Annotated[str, typer.Option("--master", help="Where Spark runs: local[*], or the URL of a cluster.")]
LOCAL = "local[*]"
_REDRAW_SECONDS = 0.2
_OURS = re.compile(r"^(?:faregate\.[\w.]+\.)(\w+): (.+)$", re.MULTILINE)


class SparkFailed(FaregateError):
    """A job failed; the text is what its task said."""


def import_spark() -> None:
    """Load what the jobs need, before anything is started. Raises `MissingExtra`."""
    import faregate.spark  # noqa: F401

    with needs_extra("spark", "Spark"):
        import numpy  # noqa: F401


@contextmanager
def session(master: str, name: str, *, keep_log: bool = False) -> "Iterator[SparkSession]":
    """A session that ends with the command. Raises `ConfigurationError`, `MissingExtra`, `SparkFailed`."""
    if master.startswith("sc:"):
        raise ConfigurationError(
            f"{master} is Spark Connect, and the commands need Spark itself: give --master local[*] or spark://HOST:PORT"
        )
    import_spark()
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"faregate spark {name}").master(master)
    for key, value in _settings(master).items():
        builder = builder.config(key, value)
    with _java_aside(keep=keep_log) as said, _outlives(signal.SIGTERM):
        try:
            spark = builder.getOrCreate()
        except PySparkException as exc:
            last = [line for line in said.read_text(errors="replace").splitlines() if line.strip()][-1:]
            raise ConfigurationError(f"Spark does not start; it needs Java 17 or newer. {' '.join(last)}") from exc
    if keep_log:
        errors.print(f"what Spark and its workers log goes to {said}", soft_wrap=True, highlight=False)
    try:
        yield spark
    except PySparkException as exc:
        raise _told(exc) from exc
    finally:
        spark.stop()


def _settings(master: str) -> dict[str, str]:
    common = {
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.log.level": "ERROR",
        "spark.ui.enabled": "false",
    }
    if not master.startswith("local"):
        return common
    cores = os.cpu_count() or 2
    local = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": f"{4 * cores}",
        "spark.sql.warehouse.dir": tempfile.gettempdir(),
    }
    return common | local


@contextmanager
def _java_aside(*, keep: bool) -> Iterator[Path]:
    """What a process started in here writes to standard error goes to a file."""
    with tempfile.NamedTemporaryFile(prefix="faregate-spark-", suffix=".log", delete=not keep) as file:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield Path(file.name)
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def _outlives(number: signal.Signals) -> Iterator[None]:
    """A process started in here does not take that signal; nor does this one, until it is started."""
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _told(exc: Exception) -> FaregateError:
    """Our error, found in the text that Spark makes of it."""
    found = _OURS.findall(str(exc))
    if found:
        name, text = found[-1]
        return SparkFailed(f"{name}: {text}")
    lines = str(exc).strip().splitlines() or [type(exc).__name__]
    return SparkFailed(lines[0])


@contextmanager
def watched(spark: "SparkSession", what: str) -> Iterator[None]:
    """A bar of finished tasks on standard error, on a terminal, while jobs run."""
    if not errors.is_terminal or not hasattr(spark, "sparkContext"):
        yield
        return
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    bar = Progress(*columns, console=errors, transient=True)
    task = bar.add_task(what, total=None)
    tracker = spark.sparkContext.statusTracker()
    over = threading.Event()

    def look() -> None:
        seen: dict[int, tuple[int, int]] = {}
        while not over.wait(_REDRAW_SECONDS):
            for stage in tracker.getActiveStageIds():
                info = tracker.getStageInfo(stage)
                if info is not None:
                    seen[stage] = (info.numCompletedTasks, info.numTasks)
            for stage in set(seen) - set(tracker.getActiveStageIds()):
                seen[stage] = (seen[stage][1], seen[stage][1])
            done, total = sum(pair[0] for pair in seen.values()), sum(pair[1] for pair in seen.values())
            bar.update(task, completed=done, total=total or None)

    watcher = threading.Thread(target=look, daemon=True)
    with bar:
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
