"""Idempotent consumers by a business key, for upstreams that repeat themselves under new message ids.

    claim="transaction"   the key is inserted in the transaction of the effect: exactly once, for effects in the store
    claim="eager"         the key first, in a commit of its own, removed on failure: a crash in between loses the effect
    claim="lazy"          the key after success: a crash in between, or two at the same moment, double the effect

Eager and lazy are for effects that are not in the store (a mail, a payment); which of the two losses is the smaller is
for the handler's author to say.
"""

from collections.abc import Sequence

from faregate.core.node_store import NodeStore
from faregate.core.work import Work
from faregate.node.key import Key
from faregate.node.subscription import ClaimMode
from faregate.ports.store import Transaction


class BusinessKey:
    def __init__(self, shared: NodeStore, node: str, handler: str, key: Key, claim: ClaimMode) -> None:
        self._shared = shared
        self._node = node
        self._handler = handler
        self._key = key
        self._claim = claim
        self._ours: set[str] = set()
        """Messages under way that took their key before the handler: they may come to `admit` again."""

    async def admit(self, work: Work) -> None:
        """Before the handler: a message whose key is taken is a duplicate. One without a key is always new."""
        key = self._of(work)
        if key is None:
            return
        if self._claim != "eager":
            if self._claim == "transaction":
                work.business_key = key  # and the transaction sees to it that nobody else was faster
            taken = await self._shared.store.has_business_key(self._node, self._handler, key)
        elif work.message_id in self._ours:
            taken = False
        else:
            taken = not await self._shared.commit(
                lambda transaction: transaction.take_business_key(self._node, self._handler, key, work.at)
            )
            if not taken:
                self._ours.add(work.message_id)
        if taken:
            work.move("known")
            work.key_taken = True

    async def mark(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """First in the transaction: whoever finds the key taken is a duplicate."""
        for work in works:
            key = work.business_key
            if key is not None and not await transaction.take_business_key(self._node, self._handler, key, work.at):
                work.move("known")
                work.key_taken = True

    async def commit(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """With the effects of these."""
        for work in works:
            key = self._of(work) if self._claim == "lazy" else None
            if key is not None:
                await transaction.take_business_key(self._node, self._handler, key, work.at)

    async def fail(self, work: Work) -> None:
        """The handler failed: the key is free again, if it was ours."""
        key = self._of(work) if work.message_id in self._ours else None
        if key is not None:
            await self._shared.commit(lambda transaction: transaction.free_business_key(self._node, self._handler, key))
            self._ours.discard(work.message_id)

    def forget(self, work: Work) -> None:
        """It is settled."""
        self._ours.discard(work.message_id)

    def _of(self, work: Work) -> str | None:
        assert work.ctx is not None
        return self._key.of(work.ctx.message)
