"""The logs that Spark works on, each opened for what is needed of it.

Where a log lies is a journal's folder, or a URL whose scheme a package has registered. Both travel to tasks, which open
it for themselves.
"""

from dataclasses import dataclass
from pathlib import Path

from faregate.ports import schemes
from faregate.ports.log import Appendable, LogTransport, Settled, Staging, Subscribed
from faregate.spark.options import Options

Place = str | Path


@dataclass(frozen=True, slots=True)
class OpenLog:
    name: str
    log_id: str
    partitions: dict[str, LogTransport]


def open_partitions(options: Options) -> OpenLog:
    """A log as the source reads it. Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`."""
    log = open_log(options.path)
    return OpenLog(log.name, log.log_id, {"0": log})


def open_log(place: Place) -> LogTransport:
    """Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`, as the others do, and `ConfigurationError`."""
    log: LogTransport = schemes.open_log(place, LogTransport)
    return log


def open_appendable(place: Place) -> Appendable:
    log: Appendable = schemes.open_log(place, Appendable)
    return log


def open_staging(place: Place) -> Staging:
    log: Staging = schemes.open_log(place, Staging)
    return log


def open_subscribed(place: Place) -> Subscribed:
    log: Subscribed = schemes.open_log(place, Subscribed)
    return log


def open_settled(place: Place) -> Settled:
    log: Settled = schemes.open_log(place, Settled)
    return log
