"""The outbox: outgoing messages, recorded with the effects that they tell of, and dispatched after the commit."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from faregate.message import Envelope

FROM_OUTSIDE = -1
"""The ordinal of an outgoing message that has not seen the outgoing middlewares of its node yet."""


class OutboxRow(NamedTuple):
    """One outgoing publication, recorded with the effects and dispatched after the commit."""

    seq: int
    """Given by the store, growing, never used again; 0 in a row that is not stored yet."""
    node: str
    message_id: str | None
    """The message whose handling sends it; None for one from outside a handler."""
    ordinal: int
    """Its place among what its cause sends; `FROM_OUTSIDE` for one that `fg.outbox` recorded."""
    destination: str
    """What it is addressed to: the node of a command, `source.type` of an event."""
    key: str | None
    envelope: Envelope
    registered: tuple[str, ...] = ()
    """Attempt ids for which tokens may have been created (see docs/guarantees.md)."""
    chosen: tuple[str, ...] = ()
    """The attempt ids that its signals carry: of the first of its envelope's recipients, one each."""
    not_after: float | None = None
    """The token store's time after which no registered attempt can be created any more."""
    version: int = 0
    dispatched_at: float | None = None


class OutboxTransaction(Protocol):
    async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
        """Insert outbox rows. Returns a list with the `seq` of each, growing in the order of the rows; it may be empty
        until the commit."""

    async def revise(self, rows: Sequence[OutboxRow]) -> set[int]:
        """Give outbox rows another envelope and other chosen attempts, each if its version is still this one, which
        then grows by one. They keep their `seq`. Returns the `seq` of those that changed; waits for other writers."""

    async def dispatched(self, seqs: Sequence[int]) -> None:
        """Remove outbox rows whose messages the transport has confirmed. Unknown ones are fine."""


class OutboxStore(Protocol):
    """Each call is a transaction of its own; reads see what is committed."""

    async def undispatched(self, limit: int, nodes: Sequence[str] | None = None) -> list[OutboxRow]:
        """Outbox rows that are not dispatched, by `seq`; of these nodes, or of all."""

    async def unsent(self) -> dict[str, tuple[int, int]]:
        """By node: how many of its rows are not dispatched, and the `seq` of the first."""

    async def note_nodes(self, nodes: Sequence[str], at: float) -> None:
        """A bus runs these nodes on this store, from this time on."""

    async def known_nodes(self) -> list[str]:
        """The nodes that a bus has ever run on this store."""

    async def keyed_before(self, seq: int, nodes: Sequence[str] | None = None) -> list[tuple[int, str, str]]:
        """Of the rows below `seq` that have a key and are not dispatched: `seq`, destination and key, by `seq`."""

    async def outbox_row(self, seq: int) -> OutboxRow | None: ...
    async def outbox_rows_of(self, node: str, message_id: str) -> list[OutboxRow]:
        """The rows that this message caused and that are not dispatched, by `seq`."""

    async def keep_dispatched(self, seqs: Sequence[int], at: float) -> None:
        """These are dispatched, and stay until their stray attempts are discarded. Unknown ones are fine."""

    async def dispatched_rows(self, limit: int) -> list[OutboxRow]:
        """Rows that are dispatched and stay, by `seq`."""


class Insertion(Protocol):
    """How a row gets into the outbox of a backend on a connection that is not ours; without I/O. A store class that
    `fg.outbox` can use has it as `insertion`."""

    def insertion(self, row: OutboxRow) -> tuple[str, tuple[Any, ...]]:
        """The statement and its parameters, for the backend's own driver. It changes no row where its node is none that
        a bus has run on this store, and where it is scheduled already."""

    def known_nodes(self) -> str:
        """The query that gives the nodes that a bus has run on this store."""

    def lacks_tables(self, exc: BaseException) -> bool:
        """Whether the driver refused the statement because our tables are not in that database."""
