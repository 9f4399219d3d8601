"""The logs that Spark works on, each opened for what is needed of it.

Where a log lies is a journal's folder, or a URL whose scheme a package has registered. Both travel to tasks, which open
it for themselves. Several journals that are read as one are its partitions, each named by its folder.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeGuard

import pyarrow as pa

from faregate.errors import ConfigurationError, JournalNotFound, NotAJournal
from faregate.ports import schemes
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.log import Appendable, ArrowBatch, LogPart, LogTransport, Settled, Staging, Subscribed, TwoViews
from faregate.spark.options import Options, Place, is_pattern, shown
from faregate.spark.source.bounds import LogId


@dataclass(frozen=True, slots=True)
class OpenLog:
    name: str
    log_id: LogId
    partitions: dict[str, LogTransport]


def open_partitions(options: Options) -> OpenLog:
    """A log as the source reads it. Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`, `NotAnArchive`,
    `ArchiveUnavailable`."""
    if not options.several:
        log = open_partition(options, "0")
        return OpenLog(log.name, log.log_id, {"0": log})
    found: dict[str, LogTransport] = {}
    for place in options.places:
        found |= _matching(place) if is_pattern(place) else {shown(place): open_log(place)}
    ids = {name: log.log_id for name, log in sorted(found.items())}
    _refuse_copies(ids)
    return OpenLog(f"the journals {', '.join(options.named)}", ids, {name: found[name] for name in ids})


def open_partition(options: Options, name: str) -> LogTransport:
    """One of them, for a task that has nothing to do with the others."""
    if options.several:
        return open_log({shown(place): place for place in options.places}.get(name, Path(name)))
    log = open_log(options.path)
    if options.archive is None:
        return log
    from faregate.spark.source.archive import with_archive  # who reads none needs no Parquet

    return with_archive(log, options)


def _matching(pattern: Place) -> dict[str, LogTransport]:
    """The journals among the folders that match now; other folders may lie beside them."""
    found: dict[str, LogTransport] = {}
    root = Path(Path(pattern).anchor)
    for folder in filter(Path.is_dir, root.glob(str(Path(pattern).relative_to(root)))):
        try:
            found[str(folder)] = open_log(folder)
        except (JournalNotFound, NotAJournal):
            continue
    if not found:
        raise JournalNotFound(f"no journal matches {pattern}")
    return found


def _refuse_copies(ids: dict[str, str]) -> None:
    """Of one journal under two names every message would be read twice."""
    names: dict[str, str] = {}
    for name, log_id in ids.items():
        if log_id in names:
            raise ConfigurationError(
                f"{names[log_id]} and {name} are the same journal ({log_id}), one a copy of the other or a link to "
                "it: name one of them"
            )
        names[log_id] = name


def log_place(given: Place) -> Place:
    """The folder that `journal:PATH`, or a path, names, made absolute; or the URL of another log. Options of a bus may
    stand behind `journal:PATH?`; in a path a question mark is part of a name, or of a pattern."""
    if isinstance(given, Path):
        return given.absolute()
    if not isinstance(given, str):
        raise ConfigurationError(f"a log is a folder or a URL, and several are a list: {given!r} is neither")
    scheme, colon, rest = given.partition(":")
    if colon and scheme != "journal":
        if schemes.is_known(schemes.LOGS, scheme):
            return given
        if scheme.isalpha():
            known = schemes.known_schemes(schemes.LOGS)
            raise ConfigurationError(f"{schemes.hide_password(given)!r} names no log; known: {known}, or a path")
    path = rest.partition("?")[0] if scheme == "journal" and colon else given
    if not path:
        raise ConfigurationError("the log has no folder: write journal:PATH, for example journal:./data")
    return Path(path).absolute()


def options_of(place: Place) -> dict[str, str]:
    """How `format("faregate")` is told."""
    return {"path": str(place)} if isinstance(place, Path) else {"url": place}


def options_of_all(given: Place | Sequence[Place]) -> dict[str, str]:
    """The same of one log, or of several journals."""
    if isinstance(given, str | bytes | Path) or not isinstance(given, Sequence):
        return options_of(log_place(given))
    return {"path": json.dumps([str(log_place(each)) for each in given])}


# Each raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`, and `ConfigurationError` for a log that lacks it.
open_log: Callable[[Place], LogTransport] = partial(schemes.open_log, port=LogTransport)
open_appendable: Callable[[Place], Appendable] = partial(schemes.open_log, port=Appendable)
open_staging: Callable[[Place], Staging] = partial(schemes.open_log, port=Staging)
open_subscribed: Callable[[Place], Subscribed] = partial(schemes.open_log, port=Subscribed)
open_two_views: Callable[[Place], TwoViews] = partial(schemes.open_log, port=TwoViews)
open_settled: Callable[[Place], Settled] = partial(schemes.open_log, port=Settled)


def settlements_of(place: Place, part: LogPart) -> ArrowBatch:
    """What the log knows of what became of messages. One that keeps no such thing knows nothing: stores may."""
    log = open_log(place)
    return log.settlements(part) if _is_settled(log) else _NO_SETTLEMENTS


def dead_letters_of(place: Place, start: int) -> Iterator[list[DeadLetter]]:
    """Those that were given to the log, if it takes any."""
    log = open_log(place)
    return log.dead_letters(start) if _is_settled(log) else iter(())


def _is_settled(log: LogTransport) -> TypeGuard[Settled]:
    return all(hasattr(log, name) for name in schemes.members(Settled))


_SETTLEMENT = {
    "offset": pa.int64(),
    **dict.fromkeys(("queue", "outcome", "tries", "redeliveries"), pa.int32()),
    "time": pa.float64(),
}
# Of nulls: an array of a list imports pandas, and with it every worker would.
_NO_SETTLEMENTS: ArrowBatch = pa.record_batch({name: pa.nulls(0, kind) for name, kind in _SETTLEMENT.items()})
