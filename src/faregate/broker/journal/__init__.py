"""The journal: a durable, append-only log of Arrow frames, with what became of its messages beside it.

Other processes read it through `JournalReader`; one process writes it.
"""

from faregate.broker.journal.journal import Journal
from faregate.broker.journal.reader import JournalReader

__all__ = ["Journal", "JournalReader"]
