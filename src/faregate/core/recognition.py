"""How copies of the messages of one subscription are recognised: the dedup of each, and the business key."""

from collections.abc import Sequence

from faregate.core.alarms import Alarms
from faregate.core.dedup import Dedup, by_dedup
from faregate.core.dedup.business_key import BusinessKey
from faregate.core.dedup.ledger import Ledger, LookUp
from faregate.core.dedup.tokens import Tokens
from faregate.core.feed import Feed
from faregate.core.node_store import NodeStore
from faregate.core.states import RUNNING
from faregate.core.work import Work
from faregate.ids import message_ids
from faregate.message import set_out_at
from faregate.node.subscription import Subscription
from faregate.ports.clock import Clock
from faregate.ports.store import Transaction


class Recognition:
    def __init__(self, subscription: Subscription, feed: Feed, store: NodeStore, clock: Clock, alarms: Alarms) -> None:
        node, young, recognises = subscription.node, store.young_seconds, subscription.dedup != "off"
        self._message_id = message_ids(node)
        self._feed = feed
        self._look_up = LookUp(store.store, node, clock, alarms, young, recognises=recognises)
        self._dedup = Ledger(node, alarms, clock, young) if recognises else Dedup()
        # Whatever the mode is by now: if the sender made a token, it has to go, even if the message is unreadable.
        self._tokens = store.claims or Tokens(store)
        key = subscription.business_key
        self.business_key = (
            None if key is None else BusinessKey(store, node, subscription.name, key, subscription.claim)
        )
        self.one_by_one = self._tokens.one_by_one or key is not None
        """Whether each message is claimed in a commit of its own, and so comes by itself."""

    def enlist(self, work: Work, now: float) -> None:
        """A message is at hand: how copies of it are recognised."""
        envelope = work.envelope
        work.set_out_at = began = set_out_at(envelope)
        work.at = now if now > began else began
        dedup = self._dedup
        if envelope.attempt_id is not None:
            work.attempt_id, dedup = envelope.attempt_id, self._tokens
        if work.ctx is None:
            work.dedup = dedup
            return
        work.message_id = self._message_id(envelope.publication_id)
        dedup.enlist(work)

    async def admit(self, works: Sequence[Work]) -> None:
        """Before anything runs: look up, and ask the tokens and the business key, which may not."""
        await self._look_up.look_up(works)
        for dedup, group in by_dedup([work for work in works if work.state == "new"]):
            await dedup.admit(group)
        if self.business_key is not None:
            for work in works:
                if work.state == "new":
                    await self.business_key.admit(work)

    async def mark(self, transaction: Transaction, works: Sequence[Work]) -> None:
        """First in every transaction: whoever comes second with a message learns it here."""
        running = [work for work in works if work.state in RUNNING]
        await self._feed.join(transaction, running)
        for dedup, group in by_dedup([work for work in running if work.state in RUNNING]):
            await dedup.mark(transaction, group)
        if self.business_key is not None:
            await self.business_key.mark(transaction, [work for work in running if work.state in RUNNING])
