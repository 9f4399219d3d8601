"""The store port: a node's own database, with business data, ledger, outbox, identities and dead letters in one
transaction.

Rules every adapter keeps (and `faregate.testing.store_suite` checks):
- Everything done through one `Transaction` is committed together or not at all.
- A ledger row exists once per (node, message id); who comes second is told so, after waiting for the first if need be.
- What `commit` confirmed survives the death of this process and, on a durable store, of the machine.
- Errors of a driver are translated at the edge: `StoreUnavailable` (not reachable), `StoreConflict` (deadlock,
  serialization failure, busy: the same again may work), `CommitUnknown` (the connection broke while committing).
  An error in a statement of the user (a constraint, a typo) is the driver's own error, so that handlers can catch it.

All methods are called from one event loop. Ids are canonical UUID text. Times are seconds since the epoch.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from faregate.message import Envelope
from faregate.plain import plain
from faregate.ports.tokens import Recipients, Token

LedgerOutcome = Literal["handled", "skipped"]
DeadStatus = Literal["open", "replayed", "resolved", "discarded"]


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


class Sent(NamedTuple):
    """What the handler of one message sent: kept in its ledger row, so that an audit can count what arrived."""

    message_id: str
    messages: int
    ids: bytes
    """Their publication ids, 16 bytes each, combined by exclusive or: in any order, and one that is lost is told."""


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


class DeadLetter(msgspec.Struct, kw_only=True):
    """A message given up on, with everything a person needs to decide about it. One per (node, message id)."""

    node: str
    message_id: str
    publication_id: str
    type: str
    source: str
    correlation_id: str
    key: str | None = None
    queue: str
    reason: str
    error: str
    """The error's class and text, then the traceback."""
    tries: int = 0
    redeliveries: int = 0
    first_failed_at: float
    last_failed_at: float
    copies: int = 1
    """How many copies of the message ended here."""
    replays: int = 0
    """How often it was replayed; a replay carries this number."""
    status: DeadStatus = "open"
    changed_by: str | None = None
    changed_at: float | None = None
    envelope: Envelope

    def __str__(self) -> str:
        return plain(f"{self.type} {self.message_id} at {self.node} ({self.reason})")


class DeadFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which dead letters are meant; what is None does not matter."""

    node: str | None = None
    type: str | None = None
    reason: str | None = None
    status: DeadStatus | None = None
    message_id: str | None = None
    since: float | None = None
    """Last failed at this time or later."""
    before: float | None = None
    """Neither failed nor was decided about at this time or later."""


class Known(NamedTuple):
    """What a store knows of a message id that it has seen."""

    state: Literal["handled", "dead", "discarded"]
    """`dead`: given up on, and its dead letter waits for a decision or a replay; `discarded`: it must never run."""
    digest: bytes | None
    """Of the body that was handled, for `handled`."""
    replays: int = 0
    """For `dead` and `discarded`: how often it was replayed."""


ClaimState = Literal["NEW", "DONE"]


class ClaimRecord(NamedTuple):
    """A node's claim on one message in mode `tokens`: written before the token is claimed, removed after its end."""

    node: str
    message_id: str
    claim_id: str
    attempt_id: str
    """The token that the claim is for."""
    state: ClaimState
    """`DONE`: the effects are committed."""
    created_at: float


class Transaction(Protocol):
    """One transaction on one connection. Made by `Store.transaction`; nothing happens before `begin`.

    `begin`, then anything, then `commit` or `roll_back`; both may be called once more without effect. A driver's error
    inside leaves it to be rolled back to the savepoint, or as a whole.
    """

    async def begin(self) -> None:
        """Open it; waits for the writer's turn (SQLite) or a free connection (PostgreSQL)."""
        ...

    async def commit(self) -> None:
        """Durable when it returns. Raises `CommitUnknown` when it may or may not have happened."""
        ...

    async def roll_back(self) -> None:
        """As if it had never been. Never raises for a connection that is gone."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the database still has this transaction open: false too when somebody ended it by the back door."""
        ...

    @property
    def was_closed(self) -> bool:
        """Whether somebody closed the connection, as opposed to its being lost."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether a statement failed and the database refuses everything but rolling back (PostgreSQL)."""
        ...

    def retire(self) -> None:
        """Close the connection when this transaction ends: somebody who should not may still hold it."""
        ...

    # --- savepoints: one level, remade after `release_savepoint` ---

    async def savepoint(self) -> None: ...
    async def release_savepoint(self) -> None: ...
    async def roll_back_to_savepoint(self) -> None:
        """Undo everything since; the savepoint itself stays."""
        ...

    # --- the user's statements: `?` stands for a parameter, `??` for a question mark ---

    async def execute(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        """Run it; how many rows it changed."""
        ...

    async def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> int: ...
    async def fetchone(self, sql: str, parameters: Sequence[Any] = ()) -> tuple[Any, ...] | None: ...
    async def fetchall(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...
    @property
    def raw(self) -> Any:
        """The driver's connection."""
        ...

    # --- our records ---

    async def record(self, node: str, rows: Sequence[LedgerRow]) -> dict[str, bytes | None]:
        """Insert ledger rows, in one sorted go; returns the ids that were there already, with their digests.

        An id may be given once; twice in one call raises ValueError: the second could not be told from the first.
        """
        ...

    async def unrecord(self, node: str, message_ids: Sequence[str]) -> None:
        """Take ledger rows out again that this transaction put in."""
        ...

    async def note_sent(self, node: str, rows: Sequence[Sent]) -> None:
        """Keep what the handlers of some messages sent, in the ledger rows that this transaction put in.

        A row that nothing is noted in has sent nothing.
        """
        ...

    async def floor(self, node: str) -> float | None:
        """As `Store.floor`, as this transaction sees it."""
        ...

    async def identify(self, node: str, handler: str, identity: str, at: float) -> bool:
        """Claim a business key for a handler; False when it is taken."""
        ...

    async def unidentify(self, node: str, handler: str, identity: str) -> None:
        """Give a business key back."""
        ...

    async def send(self, rows: Sequence[OutboxRow]) -> list[int]:
        """Insert outbox rows; returns the `seq` given to each, growing in the order of the rows."""
        ...

    async def revise(self, rows: Sequence[OutboxRow]) -> set[int]:
        """Give outbox rows another envelope and other chosen attempts, each if its version is still this one; it then
        grows by one. They keep their `seq`. Returns those that were changed, after waiting for others.
        """
        ...

    async def dispatched(self, seqs: Sequence[int]) -> None:
        """Remove outbox rows whose messages the transport has safe. Unknown ones are fine."""
        ...

    async def bury(self, letter: DeadLetter) -> DeadLetter:
        """Insert the dead letter, or fold it into the one of the same (node, message id); returns what is there now.

        Folding: `copies` grows by one; error, reason, tries, redeliveries, last failure, envelope are the new ones, and
        the status becomes open, unless the one there was discarded: then only `copies` grows.
        """
        ...

    async def fold(self, node: str, message_id: str) -> None:
        """Another copy of a dead letter came: `copies` grows by one."""
        ...

    async def resolve(self, node: str, message_ids: Sequence[str], at: float) -> None:
        """These were handled after all: their dead letters, if there are any, become resolved."""
        ...

    async def mark_dead(
        self, node: str, message_id: str, status: DeadStatus, *, by: str, at: float
    ) -> DeadLetter | None:
        """Set the status of a dead letter, for an operator; `replayed` counts `replays` up by one.

        Returns the letter as it is then; None when there is none that is open or replayed.
        """
        ...

    async def remove_dead(self, letters: Sequence[DeadLetter]) -> int:
        """Remove dead letters for good, but for those that are not as given any more; how many went."""
        ...

    # --- mode `tokens` where this database is the token store too ---

    async def create_tokens(self, tokens: Sequence[Token]) -> None:
        """Create those that are absent and in time by the store's clock; silently not the others."""
        ...

    async def consume_tokens(self, attempt_ids: Sequence[str]) -> set[str]:
        """Delete tokens, in a sorted go; returns those that were there."""
        ...

    async def recipients(self, topics: Sequence[str]) -> dict[str, Recipients]:
        """The recipient list of each topic; `NOBODY` for one that has none."""
        ...

    async def finish_claim(self, node: str, message_id: str, claim_id: str) -> bool:
        """NEW becomes DONE; False, and the effects must not be committed, when this claim does not hold it as NEW."""
        ...


class Store(Protocol):
    dear_savepoints: bool
    """Whether a savepoint costs a round trip, so that batches better do without."""

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        ...

    @property
    def identity(self) -> str:
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

    # --- reads of what is committed, each on its own ---

    async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
        """Those of the ids that were handled or are dead (open, replayed or discarded)."""
        ...

    async def has_identity(self, node: str, handler: str, identity: str) -> bool: ...
    async def undispatched(self, limit: int, nodes: Sequence[str] | None = None) -> list[OutboxRow]:
        """Outbox rows that are not dispatched, by `seq`; of these nodes, or of all."""
        ...

    async def dead(self, which: DeadFilter, limit: int = 1000) -> list[DeadLetter]:
        """Dead letters, oldest last failure first."""
        ...

    async def floor(self, node: str) -> float | None:
        """Ledger rows before this time were removed; None when none ever were."""
        ...

    async def evict(self, node: str, before: float, limit: int) -> int:
        """Remove up to `limit` ledger rows older than `before` whose outputs are dispatched; how many it were.

        If any went, the same commit raises the floor to `before`, and never lowers it. Identities as old go too.
        """
        ...

    # --- mode `tokens`: claims on incoming messages, attempts at outgoing ones; each change is a commit of its own ---

    async def claim_record(self, node: str, message_id: str) -> ClaimRecord | None: ...

    async def claim_records(self, before: float, limit: int) -> list[ClaimRecord]:
        """Claims made before this time, oldest first: what a sweeper looks at."""
        ...

    async def insert_claim(self, node: str, message_id: str, claim_id: str, attempt_id: str, at: float) -> bool:
        """Record a NEW claim; False when there is one of the same message already, which stays as it is."""
        ...

    async def delete_claim(self, node: str, message_id: str, claim_id: str, *, only_new: bool) -> bool:
        """Remove the claim if it is this one (and, with `only_new`, still NEW); whether it was removed."""
        ...

    async def register_attempts(self, seq: int, version: int, attempts: Sequence[str], not_after: float) -> bool:
        """Add attempts to the registered ones if the row's version is still this one; it then grows by one."""
        ...

    async def choose_attempts(self, seq: int, version: int, chosen: Sequence[str]) -> bool:
        """Set the chosen attempts if the row's version is still this one; it then grows by one."""
        ...

    async def outbox_row(self, seq: int) -> OutboxRow | None: ...

    async def outbox_rows_of(self, node: str, message_id: str) -> list[OutboxRow]:
        """The rows that this message caused and that are not dispatched, by `seq`."""
        ...

    async def mark_dispatched(self, seqs: Sequence[int], at: float) -> None:
        """Mark rows as dispatched that must stay until their stray attempts are discarded. Unknown ones are fine."""
        ...

    async def dispatched_rows(self, limit: int) -> list[OutboxRow]:
        """Rows that are marked as dispatched, by `seq`."""
        ...


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


class Insertion(Protocol):
    """How a row gets into the outbox of a backend on a connection that is not ours; without I/O."""

    def insertion(self, row: OutboxRow) -> tuple[str, tuple[Any, ...]]:
        """The statement and its parameters, for the backend's own driver."""
        ...

    def lacks_tables(self, exc: BaseException) -> bool:
        """Whether the driver refused the statement because our tables are not in that database."""
        ...
