"""The logs that can be read, by option: a journal today, RabbitMQ streams later.

Readers know only this: a log has a name for people, an identity, and partitions, each behind the log port.
"""

from dataclasses import dataclass

from faregate.broker.journal.reader import JournalReader
from faregate.ports.log import LogTransport
from faregate.spark.options import Options


@dataclass(frozen=True, slots=True)
class OpenLog:
    name: str
    identity: str
    """The same as long as its offsets mean the same; a folder that was emptied and filled anew has another."""
    partitions: dict[str, LogTransport]


def open_log(options: Options) -> OpenLog:
    """Raises `JournalNotFound`, `NotAJournal`, `JournalTooNew`, `JournalCorrupt`."""
    reader = JournalReader(options.path)
    return OpenLog(f"the journal {options.path}", reader.meta.id, {"0": reader})
