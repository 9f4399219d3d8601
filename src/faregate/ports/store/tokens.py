"""Mode `tokens`: claims on incoming messages, attempts at outgoing ones, and tokens where this database is the token
store too."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from faregate.ports.tokens import Token

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


class TokenTransaction(Protocol):
    async def create_tokens(self, tokens: Sequence[Token]) -> None:
        """Create those that are absent and in time by the store's clock; silently not the others."""

    async def consume_tokens(self, attempt_ids: Sequence[str]) -> set[str]:
        """Delete tokens, sorted by id; returns those that were there."""

    async def finish_claim(self, node: str, message_id: str, claim_id: str) -> bool:
        """NEW becomes DONE; False, and the effects must not be committed, when this claim does not hold it as NEW."""

    async def delete_claims(self, records: Sequence[ClaimRecord]) -> int:
        """Remove those that are still these claims, in whatever state; how many."""


class ClaimStore(Protocol):
    """Each change is a commit of its own."""

    async def claim_record(self, node: str, message_id: str) -> ClaimRecord | None: ...
    async def claim_records(self, before: float, limit: int) -> list[ClaimRecord]:
        """Claims made before this time, oldest first: what a sweeper looks at."""

    async def done_claims(self, node: str) -> list[ClaimRecord]:
        """A node's claims whose effects are committed: where one sends for many, what it finishes afterwards."""

    async def insert_claim(self, node: str, message_id: str, claim_id: str, attempt_id: str, at: float) -> bool:
        """Record a NEW claim; False when there is one of the same message already, which stays as it is."""

    async def delete_claim(self, node: str, message_id: str, claim_id: str, *, only_new: bool) -> bool:
        """Remove the claim if it is this one (and, with `only_new`, still NEW); whether it was removed."""

    async def register_attempts(self, seq: int, version: int, attempts: Sequence[str], not_after: float) -> bool:
        """Add attempts to the registered ones if the row's version is still this one; it then grows by one."""

    async def choose_attempts(self, seq: int, version: int, chosen: Sequence[str]) -> bool:
        """Set the chosen attempts if the row's version is still this one; it then grows by one."""
