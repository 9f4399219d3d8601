"""The journal: a durable, append-only log of Arrow frames, with what became of its messages beside it.

Other processes read it through `JournalReader`, which loads on first use: whoever only wants to name an error does not
load pyarrow. One process writes it with `Journal`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from faregate.broker.journal.reader import JournalReader

__all__ = ["JournalReader"]


def __getattr__(name: str) -> Any:
    if name != "JournalReader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from faregate.broker.journal.reader import JournalReader

    return JournalReader
