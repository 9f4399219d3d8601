"""The journal: a durable, append-only log of Arrow frames, with what became of its messages beside it.

Other processes read it through `JournalReader`; one process writes it with `Journal`. Both load on first use, so that
whoever only wants to name an error does not load pyarrow.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faregate.broker.journal.journal import Journal
    from faregate.broker.journal.reader import JournalReader

__all__ = ["Journal", "JournalReader"]


def __getattr__(name: str) -> Any:
    if name == "Journal":
        from faregate.broker.journal.journal import Journal

        return Journal
    if name == "JournalReader":
        from faregate.broker.journal.reader import JournalReader

        return JournalReader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
