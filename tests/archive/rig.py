"""Journals that are archived, what they held before, and what both sides hold together."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as datasets

from faregate.archive.joined import ArchivedLog
from faregate.archive.reading import open_archive
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.retention import Retention, apply_retention
from faregate.broker.journal.sealing import seal_all
from faregate.columns import SCHEMA
from faregate.errors import OffsetGone
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.transports.journal_log import JournalLog

DAY = 24 * 3600.0
BEGIN = 1_794_873_600.0
"""2026-11-17T00:00:00Z"""
TYPES = ("OrderPlaced", "OrderCancelled", "", "a/b=c %ü")
"""Names that a folder cannot have are escaped; no name is one, too."""
DISK = RealDisk()


def message(number: int, type: str = TYPES[0], size: int = 20) -> Envelope:
    """Every third has all fields."""
    more: dict[str, Any] = {} if number % 3 else {
        "kind": "command", "recipients": ("a", "b"), "destination": "d", "correlation_id": "c", "causation_id": "m",
        "depth": 7, "key": f"k{number}", "attempt_id": "t", "sent_at": 1.5, "deliver_at": 2.25, "expires_at": 3.125,
        "redeliveries": 2, "replay": 1, "content_type": "x/y", "content_encoding": "gzip", "key_id": "i",
        "algorithm": "l", "payload_ref": "r", "body_digest": b"\x01" * 16, "traceparent": "00-1", "headers": {"h": "ü"},
    }  # fmt: skip
    return Envelope(
        publication_id=f"p{number}", type=type, source=("shop", "web")[number % 2], body=b"x" * size, **more
    )


class Written:
    """A journal with small segments, and everything that was ever readable in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = Layout(root)
        self.now = BEGIN
        self.held: list[Any] = []
        """Record batches, as they were read from the journal right after they were written."""
        prepare(self.layout, DISK)

    def append(self, numbers: Sequence[int], type: str = TYPES[0], *, size: int = 20, roll: bool = False) -> None:
        """`roll`: in a new segment; the one before is full."""
        with self._log() as [log]:
            if roll:
                log.roll()
            offsets = log.append([message(number, type, size) for number in numbers], [-1] * len(numbers))
            log.sync()
        self.held += JournalReader(self.root).batches(offsets[0], offsets[-1] + 1)

    def bury(self) -> None:
        """Dead letters take offsets, and are no part of the log view."""
        letter = DeadLetter.of("n", message(1), "handler-failed", "it broke", 1.0, queue="q", tries=3, redeliveries=0)
        with self._log() as [log]:
            log.append_dead_letters([letter])
            log.sync()

    def seal(self) -> None:
        seal_all(self.layout, DISK)

    def expire(self, waiting: list[tuple[int, int]] | None = None) -> list[int]:
        """Let retention take what it may: everything is too old."""
        moment = round((self.now + 1000 * DAY) * 1_000_000)
        return apply_retention(self.layout, DISK, JournalReader(self.root), Retention(seconds=0), waiting or [], moment)

    def table(self) -> Any:
        return as_table(self.held)

    def copy(self, root: Path) -> "Written":
        """The same journal elsewhere."""
        shutil.copytree(self.root, root)
        copied = Written(root)
        copied.now, copied.held = self.now, list(self.held)
        return copied

    def _log(self) -> "_Opened":
        return _Opened(Log(self.layout, DISK, segment_size=16 * 1024, clock=lambda: round(self.now * 1_000_000)))


class _Opened(list[Log]):
    def __init__(self, log: Log) -> None:
        super().__init__([log])

    def __enter__(self) -> "_Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self[0].close()


def full_segments(root: Path, count: int = 3) -> Written:
    """Of two types and two days each, and the one that is written to."""
    written = Written(root)
    for number in range(0, count * 20, 20):
        written.append(range(number, number + 5), roll=number > 0)
        written.append(range(number + 5, number + 10), TYPES[1])
        written.bury()
        written.now += DAY
        written.append(range(number + 10, number + 20))
    written.append(range(count * 20, count * 20 + 4), roll=True)
    return written


def refuse(loss: OffsetGone) -> None:
    raise loss


def joined(root: Path, target: str, **more: Any) -> ArchivedLog:
    return ArchivedLog(JournalLog(root), open_archive(target), more.pop("on_loss", refuse), **more)


def as_table(batches: Iterator[Any] | list[Any]) -> Any:
    return pa.Table.from_batches(list(batches), SCHEMA).combine_chunks()


def both_sides(root: Path, target: str, **more: Any) -> Any:
    log = joined(root, target, **more)
    return as_table(log.batches(log.earliest()))


def as_any_engine(folder: Path) -> Any:
    """What is in the files, for who knows nothing of manifests, in the order of the log."""
    found = datasets.dataset(folder, format="parquet", partitioning="hive").to_table()
    return found.sort_by("offset")
