"""The stores of a bus: which node has which, opened together, each with its dispatcher and its housekeeper."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from faregate.bus.attempts import Attempts
from faregate.bus.dead_letter_retention import RetainDead
from faregate.bus.dispatcher import Around, Dispatcher
from faregate.bus.housekeeping import Housekeeper
from faregate.bus.outbox_place import OutboxPlace
from faregate.bus.supplied import Waiting
from faregate.core.alarms import Alarms
from faregate.core.breaker import Circuit
from faregate.core.dedup.claims import Claims
from faregate.core.escalation import Escalation
from faregate.core.node_store import NodeStore
from faregate.core.observer import Observers
from faregate.core.recipients import RecipientLists, topic_for
from faregate.core.replies import Replies
from faregate.errors import ConfigurationError
from faregate.node.node import Node
from faregate.ports.clock import Clock
from faregate.ports.progress import Occupation
from faregate.ports.queue import QueueTransport
from faregate.ports.schemes import open_store, open_token_store
from faregate.ports.store import Store
from faregate.ports.tokens import TokenStore

log = logging.getLogger("faregate.bus")

_YOUNG_SECONDS = 60.0
Given = str | Store
"""What `store=` takes for a node: a URL, or a store."""
GivenByNode = Mapping[str, Given] | Mapping[Node, Given] | Mapping[str | Node, Given]


class NodeStores:
    """Nodes with the same database share one store. Made without I/O; `open`, then `start`, then `stop` and `close`."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        store: Given | GivenByNode | None,
        *,
        transport: QueueTransport,
        clock: Clock,
        alarms: Alarms,
        retain_ledger: float,
        retain_dead: RetainDead | None,
        tokens: str | TokenStore | None,
        around: Mapping[str, Around],
        instance: str,
        replies: Replies,
        observers: Observers,
        circuit: Circuit | None,
        escalations: Mapping[str, Escalation],
    ) -> None:
        given = _given(nodes, store)
        stores = _open_once(given, clock)
        _check_needs(nodes.values(), stores)
        self._nodes = nodes
        self.stores = list({each.database_id: each for each in stores.values()}.values())
        if tokens is None:
            tokens = _shared_tokens(nodes.values(), given, len(self.stores))
        self._tokens = None if tokens is None else open_token_store(tokens, clock)
        self.recipient_lists = RecipientLists(self._tokens) if self._tokens is not None else None
        self.dispatchers: dict[str, Dispatcher] = {}
        for opened in self.stores:
            lists = self.recipient_lists
            attempts = None if lists is None else Attempts(opened, lists, clock, alarms)
            owners = [name for name, its_store in stores.items() if its_store is opened]
            several = "partitions" in transport.capabilities
            place = OutboxPlace(opened, instance, clock) if several else None
            dispatcher = Dispatcher(
                opened,
                transport,
                clock,
                alarms,
                attempts,
                owners,
                around,
                place=place,
                replies=replies,
                observers=observers,
                circuit=circuit,
            )
            self.dispatchers[opened.database_id] = dispatcher
        self._of: dict[str, NodeStore] = {}
        for name, opened in stores.items():
            dispatcher, claims = self.dispatchers[opened.database_id], None
            if self._tokens is not None and self._tokens.database_id != opened.database_id:
                claims = Claims(name, opened, self._tokens, dispatcher.dispatch, alarms, clock)
            young = min(_YOUNG_SECONDS, retain_ledger)
            self._of[name] = NodeStore(opened, dispatcher, alarms, self._tokens, claims, young_seconds=young)
        self._clock = clock
        self._instance = instance
        self._waiting: dict[str, Waiting] = {}
        """By node: what waits in its store because the transport cannot delay."""
        self._housekeepers = {
            name: Housekeeper(
                name,
                shared,
                self.dispatchers[shared.store.database_id],
                transport,
                clock,
                retain_ledger=retain_ledger,
                retain_dead=retain_dead,
                escalation=escalations[name],
            )
            for name, shared in self._of.items()
        }

    def waiting(self, node: str) -> Waiting:
        if node not in self._waiting:
            keep_dead = self._housekeepers[node].keep_dead
            look_around = self.dispatchers[self._of[node].store.database_id].look_around
            self._waiting[node] = Waiting(
                node, self._of[node].store, self._clock, keep_dead, self._instance, look_around
            )
        return self._waiting[node]

    def hand_in(self) -> None:
        """All subscriptions consume by now: hand in what waits in the stores when it is due."""
        for waiting in self._waiting.values():
            waiting.start()

    async def hand_in_no_more(self) -> None:
        for waiting in self._waiting.values():
            await waiting.stop()

    def of(self, node: str) -> NodeStore | None:
        return self._of.get(node)

    @property
    def outboxes(self) -> dict[str, Dispatcher]:
        """By node."""
        return {name: self.dispatchers[shared.store.database_id] for name, shared in self._of.items()}

    def __bool__(self) -> bool:
        return bool(self.stores)

    async def open(self) -> None:
        """Connect and bring tables up to date; run the nodes' own schemas. Leaves nothing open when that fails."""
        try:
            for store in self.stores:
                await store.open()
            for store in self.stores:
                owners = [name for name, shared in self._of.items() if shared.store is store]
                await store.note_nodes(owners, self._clock.time())
            if self._tokens is not None:
                await self._tokens.open()
            for name, shared in self._of.items():
                schema = self._nodes[name].schema
                if schema is not None:
                    await shared.store.apply_schema(schema)
        except BaseException:
            await self.close()
            raise

    async def subscribe(self) -> None:
        """Put the nodes on the recipient lists. Their queues must be there already."""
        if self.recipient_lists is not None:
            for node in self._nodes.values():
                for subscription in node.subscriptions.values():
                    await self.recipient_lists.subscribe(topic_for(subscription), node.name, subscription.dedup)

    async def start(self) -> None:
        """Send what an earlier process left; take in the dead letters of the transport. Before anything is consumed."""
        for dispatcher in self.dispatchers.values():
            await dispatcher.start()
        for housekeeper in self._housekeepers.values():
            await housekeeper.start()

    async def stop(self, deadline: float) -> None:
        for housekeeper in self._housekeepers.values():
            await housekeeper.stop()
        for dispatcher in self.dispatchers.values():
            await dispatcher.stop(deadline)
        for waiting in self._waiting.values():
            await waiting.close()

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()
        for store in self.stores:
            await store.close()

    async def idle(self) -> None:
        """Return once every outbox is empty and every dead letter of the transport is in its table."""
        for waiting in self._waiting.values():
            await waiting.idle()
        for dispatcher in self.dispatchers.values():
            await dispatcher.idle()
        for housekeeper in self._housekeepers.values():
            await housekeeper.drained()

    def occupations(self) -> Iterator[Occupation]:
        for part in self._parts():
            yield from part.occupations()

    @property
    def activity(self) -> int:
        """Grows with everything that happens in the background."""
        return sum(part.activity for part in self._parts())

    @property
    def busy(self) -> bool:
        return any(part.busy for part in self._parts())

    def _parts(self) -> list[Dispatcher | Housekeeper]:
        return [*self.dispatchers.values(), *self._housekeepers.values()]


def _shared_tokens(nodes: Iterable[Node], given: Mapping[str, Given], databases: int) -> str | None:
    """Where tokens are if the bus does not say: in the one store that all its nodes share."""
    wanting = [str(sub) for node in nodes for sub in node.subscriptions.values() if sub.dedup == "tokens"]
    if not wanting:
        return None
    urls = [each for each in given.values() if isinstance(each, str)]
    if databases == 1 and urls:
        return urls[0]
    what = "its store was given as an object" if databases == 1 else f"these nodes have {databases} stores"
    raise ConfigurationError(
        f"{wanting[0]} deduplicates by tokens, which all nodes must find in one place, and {what}: say where tokens "
        "are kept, fg.Bus(…, tokens='sqlite:./tokens.db')"
    )


def _given(nodes: Mapping[str, Node], store: Given | GivenByNode | None) -> dict[str, Given]:
    """By node. A database in memory gets a name, so that all of this bus find the same one."""
    if store is None:
        return {}
    by_node: Mapping[Any, Given] = store if isinstance(store, Mapping) else dict.fromkeys(nodes, store)
    given = {node.name if isinstance(node, Node) else node: each for node, each in by_node.items()}
    unknown = [name for name in given if name not in nodes]
    if unknown:
        raise ConfigurationError(
            f"store= names {', '.join(map(repr, unknown))}; the nodes of this bus are: {', '.join(nodes)}"
        )
    memory = f"memory:bus-{next(_numbers)}"
    return {name: memory if each == "memory:" else each for name, each in given.items()}


def _open_once(given: Mapping[str, Given], clock: Clock) -> dict[str, Store]:
    """By node, one store for each database, however it is given; the first one counts."""
    first: dict[str, Store] = {}
    made = {name: open_store(each, clock) for name, each in given.items()}
    return {name: first.setdefault(store.database_id, store) for name, store in made.items()}


_numbers = count(1)


def _check_needs(nodes: Iterable[Node], stores: Mapping[str, Store]) -> None:
    for node in nodes:
        if node.name in stores:
            continue
        needs = ["schema="] if node.schema is not None else []
        for subscription in node.subscriptions.values():
            if subscription.business_key is not None:
                needs.append(f"identity= of {subscription}")
            if subscription.dedup == "tokens":
                needs.append(f"dedup='tokens' of {subscription}")
        if needs:
            others = f" (stores: {', '.join({store.url for store in stores.values()})})" if stores else ""
            raise ConfigurationError(
                f"node {node.name!r} needs a store for {', '.join(needs)}, and this bus gives it none{others}: "
                f"fg.Bus(…, store='sqlite:./{node.name}.db')"
            )
