"""The logs that can be read, by option: a journal today, RabbitMQ streams later.

Readers know only this: a log has a name for people, an id, and partitions, each behind the log port.
"""

import time
from dataclasses import dataclass

from faregate.broker.journal.reader import JournalReader
from faregate.errors import JournalCorrupt
from faregate.ports.log import LogTransport
from faregate.spark.options import Options

PATIENCE = 10.0
"""Seconds that a writer may take, on a busy disk, from its first segment to its first mark."""
_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class OpenLog:
    name: str
    log_id: str
    """The same as long as its offsets mean the same; a folder that was emptied and filled anew has another."""
    partitions: dict[str, LogTransport]


def open_log(options: Options) -> OpenLog:
    """Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`, `JournalCorrupt`."""
    reader = JournalReader(options.path)
    _await_mark(reader)
    return OpenLog(f"the journal {options.path}", reader.meta.id, {"0": reader})


def _await_mark(reader: JournalReader) -> None:
    """A journal that is opened for the first time has a segment before it has a mark, and the reader takes that for
    damage. A stream that waits on an empty journal meets that moment, and must outlast it."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            reader.high_water()
            return
        except JournalCorrupt:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE)
