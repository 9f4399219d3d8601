"""The store port: a node's own database, with business data, ledger, outbox, business keys and dead letters in one
transaction.

Rules every adapter keeps (and `faregate.testing.store_suite` checks):
- Everything done through one `Transaction` is committed together or not at all.
- A ledger row exists once per (node, message id); a second transaction is told so, and waits if the first
  is still open.
- What `commit` confirmed survives the death of this process and, on a durable store, of the machine.
- Errors of a driver are translated at the edge: `StoreUnavailable` (not reachable), `StoreConflict` (deadlock,
  serialization failure, busy: a retry may work), `CommitUnknown` (the connection broke while committing).
  An error in a statement of the user (a constraint, a typo) is the driver's own error, so that handlers can catch it.

A store is the union of small protocols, one file for each concern. Of each there is a part within a transaction
(`LedgerTransaction`), and one for the store itself (`LedgerStore`).

All methods are called from one event loop. Ids are canonical UUID text. Times are seconds since the epoch.
"""

from typing import Protocol

from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.store.dead_letters import DeadFilter, DeadLetterStore, DeadLetterTransaction
from faregate.ports.store.leases import MIGRATION, REPARTITION, Generation, Lease, LeaseStore, LeaseTransaction
from faregate.ports.store.ledger import Known, LedgerOutcome, LedgerRow, LedgerStore, LedgerTransaction, Sent
from faregate.ports.store.outbox import FROM_OUTSIDE, Insertion, OutboxRow, OutboxStore, OutboxTransaction
from faregate.ports.store.parked import BEHIND, BUCKETS, NEXT, Parked, ParkedTransaction
from faregate.ports.store.reading import COLUMNS, Part, Readable, StoreInfo, StoreReader, Table
from faregate.ports.store.scheduled import SCHEDULE_KEY, ScheduledStore, ScheduledTransaction, is_later
from faregate.ports.store.sessions import Answer, Asked, OpenSession, SessionStore, SessionTransaction, Statements
from faregate.ports.store.tokens import ClaimRecord, ClaimState, ClaimStore, TokenTransaction
from faregate.ports.store.transaction import DatabaseTransaction, TransactionBlock

__all__ = [
    "BEHIND",
    "BUCKETS",
    "COLUMNS",
    "FROM_OUTSIDE",
    "MIGRATION",
    "NEXT",
    "REPARTITION",
    "SCHEDULE_KEY",
    "Answer",
    "Asked",
    "ClaimRecord",
    "ClaimState",
    "DeadFilter",
    "DeadLetter",
    "DeadStatus",
    "Generation",
    "Insertion",
    "Known",
    "Lease",
    "LedgerOutcome",
    "LedgerRow",
    "OpenSession",
    "OutboxRow",
    "Parked",
    "Part",
    "Readable",
    "Sent",
    "SessionStore",
    "SessionTransaction",
    "Statements",
    "Store",
    "StoreInfo",
    "StoreReader",
    "Table",
    "Transaction",
    "TransactionBlock",
    "is_later",
]


class Transaction(
    DatabaseTransaction,
    LedgerTransaction,
    OutboxTransaction,
    ScheduledTransaction,
    DeadLetterTransaction,
    ParkedTransaction,
    LeaseTransaction,
    TokenTransaction,
    Protocol,
):
    """One transaction on one connection. Made by `Store.transaction`; nothing happens before `begin`."""


class Store(LedgerStore, OutboxStore, ScheduledStore, DeadLetterStore, LeaseStore, ClaimStore, Protocol):
    dear_savepoints: bool
    """Whether a savepoint costs a round trip: then batches do without."""
    one_writer: bool
    """Whether its transactions follow each other: then batches that wait for one another are of no use."""

    @property
    def url(self) -> str:
        """Where it is, without a password."""

    @property
    def database_id(self) -> str:
        """Equal for two stores that are the same database."""

    async def open(self) -> None:
        """Connect, and bring our tables up to date under a lock, so that several processes may start at once.

        Raises `StoreUnavailable`, `StoreTooNew`.
        """

    async def close(self) -> None:
        """Closing twice does nothing."""

    async def apply_schema(self, sql: str) -> None:
        """Run a node's own statements, in one transaction. Raises `ConfigurationError` with the database's words."""

    def transaction(self) -> Transaction: ...
