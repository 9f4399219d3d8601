"""Topics as recipient lists: who gets a publication, and how each of them deduplicates. Kept in the token store.

Rules kept here:
- A list is changed by compare-and-swap on its version only, so two nodes that subscribe at once are both on it.
- A publication's list is resolved once and kept with it; who subscribes later gets later ones.
"""

from collections.abc import Iterable

from faregate.message import Envelope
from faregate.node.subscription import Subscription
from faregate.ports.tokens import Mode, Recipients, TokenStore


def topic_of(envelope: Envelope) -> str:
    address = envelope.source if envelope.kind == "event" else envelope.destination
    return f"{envelope.kind}:{address}.{envelope.type}"


def topic_for(subscription: Subscription) -> str:
    kind, wire = subscription.message_type.kind, subscription.message_type.wire
    return f"{kind}:{subscription.source if kind == 'event' else subscription.node}.{wire}"


class RecipientLists:
    def __init__(self, tokens: TokenStore) -> None:
        self.tokens = tokens

    async def subscribe(self, topic: str, node: str, mode: Mode) -> None:
        """Put a node on a topic's list, or note how it deduplicates from now on."""
        while True:
            current = await self._read(topic)
            if current.modes.get(node) == mode:
                return
            if await self.tokens.swap(topic, current.version, {**current.modes, node: mode}):
                return

    async def unsubscribe(self, topic: str, node: str) -> None:
        """Take a node off a topic's list. What is on its way to it still arrives."""
        while True:
            current = await self._read(topic)
            if node not in current.modes:
                return
            rest = {name: mode for name, mode in current.modes.items() if name != node}
            if await self.tokens.swap(topic, current.version, rest):
                return

    async def resolve(self, envelopes: Iterable[Envelope]) -> dict[str, Recipients]:
        """The lists of the topics of these publications, as they are now."""
        return await self.tokens.recipients(list(dict.fromkeys(map(topic_of, envelopes))))

    async def _read(self, topic: str) -> Recipients:
        return (await self.tokens.recipients([topic]))[topic]
