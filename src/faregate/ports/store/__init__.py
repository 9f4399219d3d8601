"""The store port: a node's own database, with business data, ledger, outbox, identities and dead letters in one
transaction.

Rules every adapter keeps (and `faregate.testing.store_suite` checks):
- Everything done through one `Transaction` is committed together or not at all.
- A ledger row exists once per (node, message id); who comes second is told so, after waiting for the first if need be.
- What `commit` confirmed survives the death of this process and, on a durable store, of the machine.
- Errors of a driver are translated at the edge: `StoreUnavailable` (not reachable), `StoreConflict` (deadlock,
  serialization failure, busy: the same again may work), `CommitUnknown` (the connection broke while committing).
  An error in a statement of the user (a constraint, a typo) is the driver's own error, so that handlers can catch it.

A store is the union of small protocols, one file for each concern. Of each there is a part within a transaction
(`LedgerTransaction`), and one for the store itself (`LedgerStore`).

All methods are called from one event loop. Ids are canonical UUID text. Times are seconds since the epoch.
"""

from typing import Protocol, runtime_checkable

import msgspec

from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.store.dead_letters import DeadFilter, DeadLetterStore, DeadLetterTransaction
from faregate.ports.store.ledger import Known, LedgerOutcome, LedgerRow, LedgerStore, LedgerTransaction, Sent
from faregate.ports.store.outbox import FROM_OUTSIDE, Insertion, OutboxRow, OutboxStore, OutboxTransaction
from faregate.ports.store.tokens import ClaimRecord, ClaimState, ClaimStore, TokenTransaction
from faregate.ports.store.transaction import DatabaseTransaction, TransactionBlock

__all__ = [
    "FROM_OUTSIDE",
    "ClaimRecord",
    "ClaimState",
    "DeadFilter",
    "DeadLetter",
    "DeadStatus",
    "Describable",
    "Insertion",
    "Known",
    "LedgerOutcome",
    "LedgerRow",
    "OutboxRow",
    "Sent",
    "Store",
    "StoreInfo",
    "Transaction",
    "TransactionBlock",
]


class Transaction(
    DatabaseTransaction, LedgerTransaction, OutboxTransaction, DeadLetterTransaction, TokenTransaction, Protocol
):
    """One transaction on one connection. Made by `Store.transaction`; nothing happens before `begin`."""


class Store(LedgerStore, OutboxStore, DeadLetterStore, ClaimStore, Protocol):
    dear_savepoints: bool
    """Whether a savepoint costs a round trip, so that batches better do without."""

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        ...

    @property
    def database_id(self) -> str:
        """Equal for two stores that are the same database."""
        ...

    async def open(self) -> None:
        """Connect, and bring our tables up to date under a lock, so that several processes may start at once.

        Raises `StoreUnavailable`, `StoreTooNew`.
        """
        ...

    async def close(self) -> None:
        """Closing twice does nothing."""
        ...

    async def apply_schema(self, sql: str) -> None:
        """Run a node's own statements, in one transaction. Raises `ConfigurationError` with the database's words."""
        ...

    def transaction(self) -> Transaction: ...


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


@runtime_checkable
class Describable(Protocol):
    """A store that can be looked at without being opened or brought up to date: `faregate store info`."""

    async def describe(self) -> StoreInfo: ...
