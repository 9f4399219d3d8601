"""The token store port: tokens, their claims, and the recipient lists that senders obey. Shared by all nodes of a bus.

A token says: this attempt at sending this message to this recipient counts, and has not been consumed. Rules every
adapter keeps (and `faregate.testing.token_suite` checks):
- Creating, claiming and deleting are each atomic, and every read sees what was done before it.
- A token is created only while it is absent and the store's clock is before `not_after`, so that a late packet with an
  old attempt creates nothing. An adapter sends one attempt at most once: it never repeats a create by itself.
- A claim is set once. Claiming again with the same claim id succeeds; with another one it does not.

Stores without a compare-and-swap of their own (object stores) can keep a claim as an object of its own that is created
if absent, and deleted after its token.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

Claim = Literal["claimed", "missing", "taken"]
Mode = Literal["ledger", "tokens", "off"]


class Token(NamedTuple):
    """The inbox record that a sender creates for one recipient of one message."""

    attempt_id: str
    message_id: str
    recipient: str
    producer: str
    created_at: float
    not_after: float
    """The store's time after which it must not be created any more."""
    payload_ref: str | None = None
    claim_id: str | None = None


class Recipients(NamedTuple):
    """The recipient list of one topic, as it was at a version; 0: there is none yet."""

    version: int
    modes: Mapping[str, Mode]
    """Recipient node -> how it deduplicates."""


NOBODY = Recipients(0, {})


class TokenStore(Protocol):
    @property
    def url(self) -> str:
        """Where it is, without a password."""

    @property
    def database_id(self) -> str:
        """Equal to the `Store.database_id` of a store that is the same database."""

    async def open(self) -> None:
        """Raises `StoreUnavailable`, `StoreTooNew`."""

    async def close(self) -> None: ...

    async def now(self) -> float:
        """The store's own clock, which `not_after` is compared with."""

    async def create(self, tokens: Sequence[Token]) -> None:
        """Create those that are absent and in time; silently not the others.

        An error means that any of them may have been created, or may be later: use new attempt ids then.
        """

    async def read(self, attempt_id: str) -> Token | None: ...

    async def claim(self, attempt_id: str, claim_id: str) -> Claim:
        """Set the claim if none is set. `claimed` when it is this one now; `taken` when it is another's."""

    async def delete(self, attempt_id: str, claim_id: str) -> None:
        """Delete the token if this claim holds it. Deleting twice is fine."""

    async def discard(self, attempt_ids: Sequence[str]) -> None:
        """Delete tokens that no signal carries, or whose message was discarded, whoever may have claimed them."""

    async def count(self) -> int: ...

    # --- recipient lists -----------------------------------------------------------------------------------

    async def recipients(self, topics: Sequence[str]) -> dict[str, Recipients]:
        """The recipient list of each topic; `NOBODY` for one that has none."""

    async def swap(self, topic: str, version: int, modes: Mapping[str, Mode]) -> bool:
        """Replace the list of a topic if its version is still this one; the version then grows by one."""
