"""Idempotent consumers by a business key, for upstreams that repeat themselves under new message ids.

    claim="transaction"   the key is inserted in the transaction of the effect: exactly once, for effects in the store
    claim="eager"         the key first, in a commit of its own, removed on failure: a crash in between loses the effect
    claim="lazy"          the key after success: a crash in between, or two at the same moment, double the effect

Eager and lazy are for effects that are not in the store (a mail, a payment); which of the two losses is the smaller is
for the handler's author to say.
"""

from faregate.core.unit import Work
from faregate.node.key import Key
from faregate.node.subscription import Claim
from faregate.ports.store import Store, Transaction


class BusinessIdentity:
    def __init__(self, store: Store, node: str, handler: str, key: Key, claim: Claim) -> None:
        self._store = store
        self._node = node
        self._handler = handler
        self._key = key
        self._claim = claim
        self._claimed: set[str] = set()
        """Messages under way whose eager claim is theirs: they may come to `admit` again."""

    async def admit(self, work: Work) -> bool:
        """Before the handler: False when the key is taken. A message without one is always new."""
        key = self._of(work)
        if key is None:
            return True
        if self._claim != "eager":
            if self._claim == "transaction":
                work.identity = key  # and the transaction sees to it that nobody else was faster
            return not await self._store.has_identity(self._node, self._handler, key)
        if work.message_id in self._claimed:
            return True
        transaction = self._store.transaction()
        try:
            await transaction.begin()
            taken = await transaction.identify(self._node, self._handler, key, work.at)
            await transaction.commit()
        finally:
            await transaction.roll_back()
        if taken:
            self._claimed.add(work.message_id)
        return taken

    async def succeed(self, transaction: Transaction, work: Work) -> None:
        """Within the commit of a success."""
        key = self._of(work) if self._claim == "lazy" else None
        if key is not None:
            await transaction.identify(self._node, self._handler, key, work.at)

    async def fail(self, work: Work) -> None:
        """The handler failed: the key is free again."""
        key = self._of(work) if self._claim == "eager" and work.ctx is not None else None
        if key is None:
            return
        transaction = self._store.transaction()
        try:
            await transaction.begin()
            await transaction.unidentify(self._node, self._handler, key)
            await transaction.commit()
        finally:
            await transaction.roll_back()
        self._claimed.discard(work.message_id)

    def forget(self, work: Work) -> None:
        """It is settled."""
        self._claimed.discard(work.message_id)

    def _of(self, work: Work) -> str | None:
        assert work.ctx is not None
        return self._key.of(work.ctx.message)
