"""The ledger: which messages a node has handled, and which business keys; retention with its floor."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

LedgerOutcome = Literal["handled", "skipped", "filtered"]


class LedgerRow(NamedTuple):
    """One handled message."""

    message_id: str
    digest: bytes | None
    """The digest of the body that was handled."""
    key: str | None
    position: int | None
    """Its place in the transport's log."""
    at: float
    """The later of when it was handled and when it was sent: what retention goes by."""
    outcome: LedgerOutcome = "handled"
    sent: int = 0
    """How many messages its handler sent, and which (see `Sent`), if it has run before its row is recorded."""
    sent_ids: bytes | None = None


class Sent(NamedTuple):
    """What the handler of one message sent: kept in its ledger row, so that an audit can count what arrived."""

    message_id: str
    messages: int
    ids: bytes
    """Their publication ids, 16 bytes each, combined by exclusive or: order does not matter, and a lost one shows."""


class Known(NamedTuple):
    """What a store knows of a message id that it has seen."""

    state: Literal["handled", "dead", "discarded"]
    """`dead`: its dead letter waits for a decision or a replay; `discarded`: it must never run."""
    digest: bytes | None
    """Of the body that was handled, for `handled`."""
    replays: int = 0
    """For `dead` and `discarded`: how often it was replayed."""


class LedgerTransaction(Protocol):
    async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
        """As `Store.known`, as this transaction sees it."""

    async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
        """Insert ledger rows, sorted by id; returns the ids that were there already, with their digests.

        Raises ValueError for an id that is given twice: the second could not be told from the first.
        """

    async def unrecord(self, node: str, message_ids: Sequence[str]) -> None:
        """Remove ledger rows that this transaction inserted."""

    async def note_sent(self, node: str, rows: Sequence[Sent]) -> None:
        """Keep what handlers sent, in the ledger rows of this transaction. A row without a note has sent nothing."""

    async def floor(self, node: str) -> float | None:
        """As `Store.floor`, as this transaction sees it."""

    async def take_business_key(self, node: str, handler: str, key: str, at: float) -> bool:
        """Keep that a handler has taken a business key; False when it was taken before."""

    async def free_business_key(self, node: str, handler: str, key: str) -> None:
        """The handler failed: the business key may be taken again."""


class LedgerStore(Protocol):
    """Each call is a transaction of its own; reads see what is committed."""

    async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
        """Those of the ids that were handled or are dead (open, replayed or discarded)."""

    async def has_business_key(self, node: str, handler: str, key: str) -> bool: ...
    async def floor(self, node: str) -> float | None:
        """Ledger rows before this time were removed; None when none ever were."""

    async def evict(self, node: str, before: float, limit: int) -> int:
        """Remove up to `limit` ledger rows older than `before` whose outputs are dispatched; returns how many.

        If any went, the same commit raises the floor to `before`, and never lowers it. Business keys as old go too.
        """
