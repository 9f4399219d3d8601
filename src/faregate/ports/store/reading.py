"""Reading a store's tables as they lie, whatever version has set them up: for people, and for jobs that read millions
of rows in many processes.

Rules every reader keeps (`faregate.testing.READER_CASES`):
- Nothing is written, made or brought up to date.
- It needs no event loop and no open store. It is made of plain values, so it travels to other processes; a password in
  it is never shown.
- Message ids are 16 bytes.
- Errors: `StoreUnavailable`, `StoreConflict`; `ConfigurationError` for what is no database, and for a query that it
  refuses.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from faregate.ports.dead_letter import DeadLetter
from faregate.ports.store.outbox import OutboxRow

Table = Literal["ledger", "dead", "dead_states", "parked", "outbox", "scheduled", "waiting", "unroutable"]
COLUMNS: dict[Table, tuple[str, ...]] = {
    "ledger": (
        *("node", "message_id", "key", "position", "handled_at", "outcome"),
        *("written", "digest", "sent", "sent_ids"),
    ),
    "dead": DeadLetter.__struct_fields__,
    "dead_states": ("node", "message_id", "last_failed_at", "status"),
    "parked": ("node", "message_id", "due_at", "tries", "key", "position"),
    "outbox": ("seq", "node", "message_id", "ordinal", "destination", "key", "dispatched_at"),
    "scheduled": ("node", "envelope"),
    "waiting": ("node", "envelope"),
    "unroutable": ("node", "envelope"),
}
"""What rows of each have, in this order. `written` grows with the order of the commits, by no clock; it and what comes
behind it may be null where nobody kept it. `outbox` is in the order of `seq`. `scheduled`: what handlers sent and what
is due later, or was cancelled; `waiting`: what they sent and what is not dispatched; `unroutable`: what left the outbox
for the dead letters. An envelope is packed."""


class Part(NamedTuple):
    """Some rows of a table: what one task reads. What is in it is the reader's business."""

    table: Table
    query: str
    values: tuple[int, ...] = ()


class StoreInfo(msgspec.Struct, kw_only=True):
    """What is in a database, as far as it is ours."""

    url: str
    """Without a password."""
    version: int = 0
    """Of its schema; 0 when Faregate has set nothing up there."""
    known: int
    """The version that this Faregate makes of it."""
    tables: dict[str, int] = {}
    """How many rows each has."""
    floors: dict[str, float] = {}
    """By node. This and the next only where the version is one that is known here."""
    oldest: OutboxRow | None = None
    """The outbox row that has waited longest."""


class StoreReader(Protocol):
    @property
    def url(self) -> str:
        """Where it is, without a password."""

    def check(self) -> None:
        """Raises `ConfigurationError` when there is no database; of a server that is known only when it is read."""

    def version(self) -> int:
        """Of its schema; 0 when Faregate has set nothing up there."""

    def describe(self) -> StoreInfo: ...

    def parts(self, table: Table) -> list[Part]:
        """All rows of a table, cut into parts of a size that one task can read."""

    def rows(self, part: Part) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a part, some thousands at a time."""

    def query(self, sql: str, limit: int | None = None) -> Iterator[list[tuple[Any, ...]]]:
        """The rows of a query of the user's, on business data."""

    def nodes(self, table: Literal["ledger", "business_keys"]) -> set[str]:
        """The nodes that have a row there; what it costs does not depend on how many rows there are."""

    def floors(self) -> dict[str, float]:
        """By node, up to when ledger rows were removed."""

    def low_water(self) -> dict[tuple[str, str], int]:
        """The low-water marks, by node and name: positions that are kept for no handler ("")."""


@runtime_checkable
class Readable(Protocol):
    """A store whose tables can be read so."""

    def reader(self) -> StoreReader: ...
