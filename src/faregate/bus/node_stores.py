"""The stores of a bus: which node has which, opened together, each with its dispatcher and its housekeeper."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from faregate.bus.attempts import Attempts
from faregate.bus.dead_letter_retention import RetainDead
from faregate.bus.dispatcher import Around, Dispatcher
from faregate.bus.housekeeping import Housekeeper
from faregate.bus.recipients import RecipientLists, topic_for
from faregate.core.alarms import Alarms
from faregate.core.claims import TokenGate
from faregate.core.node_store import NodeStore
from faregate.errors import ConfigurationError
from faregate.node.node import Node
from faregate.ports.clock import Clock
from faregate.ports.progress import Occupation
from faregate.ports.queue import QueueTransport
from faregate.ports.schemes import hide_password, open_store, open_token_store
from faregate.ports.store import Store

log = logging.getLogger("faregate.bus")

_YOUNG_SECONDS = 60.0


class NodeStores:
    """Nodes with the same URL share one store. Made without I/O; `open`, then `start`, then `stop` and `close`."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        store: str | Mapping[str, str] | None,
        *,
        transport: QueueTransport,
        clock: Clock,
        alarms: Alarms,
        retain_ledger: float,
        retain_dead: RetainDead | None = None,
        tokens: str | None = None,
        around: Mapping[str, Around] | None = None,
    ) -> None:
        urls = _urls(nodes, store)
        _check_needs(nodes.values(), urls)
        self._nodes = nodes
        urls, opened_by_url = _open_once(urls, clock)
        self.stores = list(opened_by_url.values())
        token_url = _token_url(nodes.values(), urls, tokens)
        self._tokens = None if token_url is None else open_token_store(token_url, clock)
        self.recipient_lists = RecipientLists(self._tokens) if self._tokens is not None else None
        self.dispatchers: dict[str, Dispatcher] = {}
        for url, opened in opened_by_url.items():
            lists = self.recipient_lists
            attempts = None if lists is None else Attempts(opened, lists, clock, alarms)
            owners = [name for name, its_url in urls.items() if its_url == url]
            self.dispatchers[url] = Dispatcher(opened, transport, clock, alarms, attempts, owners, around)
        self._of: dict[str, NodeStore] = {}
        for name, url in urls.items():
            opened, dispatcher, gate = opened_by_url[url], self.dispatchers[url], None
            if self._tokens is not None and self._tokens.database_id != opened.database_id:
                gate = TokenGate(name, opened, self._tokens, dispatcher, alarms, clock)
            self._of[name] = NodeStore(opened, dispatcher, alarms, self._tokens, gate)
            self._of[name].young_seconds = min(_YOUNG_SECONDS, retain_ledger)
        self._housekeepers = [
            Housekeeper(name, shared, transport, clock, retain_ledger=retain_ledger, retain_dead=retain_dead)
            for name, shared in self._of.items()
        ]

    def of(self, node: str) -> NodeStore | None:
        return self._of.get(node)

    def __bool__(self) -> bool:
        return bool(self.stores)

    async def open(self) -> None:
        """Connect and bring tables up to date; run the nodes' own schemas. Leaves nothing open when that fails."""
        try:
            for store in self.stores:
                await store.open()
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
        """Put the nodes on the recipient lists. Their queues are there already: whoever is listed can be reached."""
        if self.recipient_lists is not None:
            for node in self._nodes.values():
                for subscription in node.subscriptions.values():
                    await self.recipient_lists.subscribe(topic_for(subscription), node.name, subscription.dedup)

    async def start(self) -> None:
        """Send what an earlier process left; drain what the transport gave up on. Before anything is consumed."""
        for dispatcher in self.dispatchers.values():
            await dispatcher.start()
        for housekeeper in self._housekeepers:
            await housekeeper.start()

    async def stop(self, deadline: float) -> None:
        for housekeeper in self._housekeepers:
            await housekeeper.stop()
        for dispatcher in self.dispatchers.values():
            await dispatcher.stop(deadline)

    async def close(self) -> None:
        if self._tokens is not None:
            await self._tokens.close()
        for store in self.stores:
            await store.close()

    async def idle(self) -> None:
        """Return once every outbox is empty and every dead letter of the transport is in its table."""
        for dispatcher in self.dispatchers.values():
            await dispatcher.idle()
        for housekeeper in self._housekeepers:
            await housekeeper.drained()

    def occupations(self) -> Iterator[Occupation]:
        for dispatcher in self.dispatchers.values():
            yield from dispatcher.occupations()
        for housekeeper in self._housekeepers:
            yield from housekeeper.occupations()

    @property
    def activity(self) -> int:
        """Grows with everything that happens in the background."""
        return sum(dispatcher.activity for dispatcher in self.dispatchers.values()) + sum(
            housekeeper.activity for housekeeper in self._housekeepers
        )

    @property
    def busy(self) -> bool:
        return any(dispatcher.busy for dispatcher in self.dispatchers.values()) or any(
            housekeeper.busy for housekeeper in self._housekeepers
        )


def _token_url(nodes: Iterable[Node], urls: Mapping[str, str], given: str | None) -> str | None:
    """Where tokens are: where the bus says, or in the one store that all its nodes share."""
    if given is not None:
        if not isinstance(given, str):
            raise ConfigurationError(f"tokens= takes the URL of the shared token store; got {given!r}")
        return given
    wanting = [str(sub) for node in nodes for sub in node.subscriptions.values() if sub.dedup == "tokens"]
    if not wanting:
        return None
    shared = set(urls.values())
    if len(shared) != 1:
        raise ConfigurationError(
            f"{wanting[0]} deduplicates by tokens, which all nodes must find in one place, and these nodes have "
            f"{len(shared)} stores: say where tokens are kept, fg.Bus(…, tokens='sqlite:./tokens.db')"
        )
    return shared.pop()


def _urls(nodes: Mapping[str, Node], store: str | Mapping[str, str] | None) -> dict[str, str]:
    if store is None:
        return {}
    if isinstance(store, str):
        return dict.fromkeys(nodes, _named(store))
    if not isinstance(store, Mapping):
        raise ConfigurationError(f"store= takes a URL, or a mapping of node name to URL; got {store!r}")
    unknown = [name for name in store if name not in nodes]
    if unknown:
        raise ConfigurationError(
            f"store= names {', '.join(map(repr, unknown))}; the nodes of this bus are: {', '.join(nodes)}"
        )
    for name, url in store.items():
        if not isinstance(url, str):
            raise ConfigurationError(f"store={{{name!r}: …}} must be a URL such as 'sqlite:./shop.db'; got {url!r}")
    names = {url: _named(url) for url in set(store.values())}
    return {name: names[url] for name, url in store.items()}


def _open_once(urls: Mapping[str, str], clock: Clock) -> tuple[dict[str, str], dict[str, Store]]:
    """One store for each database, however its URL is written; node -> URL, and URL -> store."""
    opened = {url: open_store(url, clock) for url in dict.fromkeys(urls.values())}
    first: dict[str, str] = {}
    for url, store in opened.items():
        first.setdefault(store.database_id, url)
    return (
        {name: first[opened[url].database_id] for name, url in urls.items()},
        {url: opened[url] for url in first.values()},
    )


def _named(url: str) -> str:
    """A database in memory gets a name, so that everything of this bus that means it finds the same one."""
    return f"memory:bus-{next(_numbers)}" if url == "memory:" else url


_numbers = count(1)


def _check_needs(nodes: Iterable[Node], urls: Mapping[str, str]) -> None:
    for node in nodes:
        if node.name in urls:
            continue
        needs = ["schema="] if node.schema is not None else []
        for subscription in node.subscriptions.values():
            if subscription.identity is not None:
                needs.append(f"identity= of {subscription}")
            if subscription.dedup == "tokens":
                needs.append(f"dedup='tokens' of {subscription}")
        if needs:
            others = f" (stores: {', '.join(hide_password(url) for url in set(urls.values()))})" if urls else ""
            raise ConfigurationError(
                f"node {node.name!r} needs a store for {', '.join(needs)}, and this bus gives it none{others}: "
                f"fg.Bus(…, store='sqlite:./{node.name}.db')"
            )
