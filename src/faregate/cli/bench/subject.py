"""What is measured: the nodes of somebody's bus, or two private nodes on a transport. And whether that is safe.

Rules kept here:
- Nothing real is touched unless somebody says so. The nodes of a bus run on a temporary journal (or in memory, if they
  do so anyway), with a temporary store: on `--on` and `--store` only where these name them.
- What is there already, a server, a journal or a database, needs `--yes`, and the sentence says what would happen.
- Private nodes have names that nobody else has: no other node gets their messages, and their queues are removed.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from faregate.bus.bus import Bus
from faregate.cli.load import load_bus, load_named
from faregate.cli.publish import find, only
from faregate.codec import find_codec
from faregate.core.context import Context
from faregate.errors import ConfigurationError
from faregate.message import Event, MessageMeta, MessageType, check_name, describe, known
from faregate.node.node import Node
from faregate.node.outgoing import Outgoing
from faregate.node.policy import Parallel
from faregate.node.signature import read_signature
from faregate.ports.clock import Clock
from faregate.ports.schemes import TRANSPORTS, hide_password, is_known

Watch = Callable[[Context, Callable[[], Awaitable[None]]], Awaitable[None]]
"""An `after` middleware."""


@dataclass(frozen=True)
class Choice:
    """What the command line says."""

    target: str
    message: str
    on: str | None = None
    store: str | None = None
    node: str | None = None
    to: str | None = None
    consumers: int | None = None
    empty: bool = False
    yes: bool = False


@dataclass(frozen=True)
class Subject:
    bus: Bus
    sender: str
    """The node that publishes."""
    to: str | None
    """The node that commands go to."""
    message_type: MessageType
    cls: type | None
    """None where nobody here has a class for the message."""
    recipients: int
    where: str
    """For people."""
    private: list[str] = field(default_factory=list)
    """Queues to remove from a broker."""

    def outgoing(self, message: Any) -> Outgoing:
        return Outgoing(message, self.message_type, self.to)


@contextmanager
def subject_of(choice: Choice, watch: Watch, clock: Clock) -> Iterator[Subject]:
    """Nothing is opened yet; temporary folders are gone afterwards."""
    scheme, colon, _ = choice.target.partition(":")
    if colon and is_known(TRANSPORTS, scheme):
        yield _private(choice, watch, clock)
        return
    with TemporaryDirectory(prefix="faregate-bench-") as folder:
        yield _nodes_of(choice, watch, clock, Path(folder))


def _private(choice: Choice, watch: Watch, clock: Clock) -> Subject:
    for given, option in ((choice.on, "--on"), (choice.node, "--node"), (choice.to, "--to")):
        if given is not None:
            raise ConfigurationError(f"{option} is for the nodes of a bus; {hide_password(choice.target)} is a URL")
    url = _safe(choice.target, choice, f"send {choice.message} through private queues there, which it removes again")
    store = None if choice.store is None else _safe(choice.store, choice, "keep a ledger and an outbox there")
    name = f"bench-{token_hex(4)}"
    producer, consumer = Node(name), Node(f"{name}-consumer")
    message_type, cls = _message_type(choice.message)
    handled = message_type.cls if cls is not None else MessageMeta("Any", (Event,), {}, wire=message_type.wire)
    source = producer if message_type.kind == "event" else None
    consumer.on(handled, source=source, order=Parallel(choice.consumers or 10))(_do_nothing)
    consumer.use(watch, after=True)
    bus = Bus(url, nodes=[producer, consumer], store=store, clock=clock)
    queues = [binding.queue for binding in bus.bindings]
    dead = [f"{node.name}-dead" for node in (producer, consumer)]
    to = consumer.name if message_type.kind == "command" else None
    return Subject(bus, name, to, message_type, cls, 1, f"private nodes on {bus.url}", [*queues, *dead])


def _message_type(message: str) -> tuple[MessageType, type | None]:
    if ":" in message:
        cls = load_named(message, "class", "for example shop.messages:OrderPlaced")
        declared = known(cls) if isinstance(cls, type) else None
        return describe(cls, declared.kind if declared else "event"), cls
    return MessageType(msgspec.Raw, check_name(message, "the message"), "event", frozenset()), None


async def _do_nothing(message: Any) -> None: ...


def _nodes_of(choice: Choice, watch: Watch, clock: Clock, folder: Path) -> Subject:
    if choice.consumers is not None:
        raise ConfigurationError("--consumers is for URLs: each subscription of a bus says itself how many it handles")
    bus = load_bus(choice.target)
    subscriptions = find(bus, choice.message)
    message_type = subscriptions[0].message_type
    told = f"publish {choice.message} there under the names of your nodes, to whoever handles it"
    in_memory = bus.url.partition(":")[0] == "memory"
    url = "memory:" if in_memory else f"journal:{folder / 'journal'}"
    if choice.on is not None:
        url = _safe(choice.on, choice, told)
    if message_type.kind == "event":
        to, sender = None, choice.node or only({each.source for each in subscriptions}, "--node", "nodes publish it")
        taking = [each for each in subscriptions if each.source == sender]
    else:
        to = choice.to or only({each.node for each in subscriptions}, "--to", "nodes handle it")
        sender, taking = choice.node or to, [each for each in subscriptions if each.node == to]
    if not taking:
        raise ConfigurationError(f"nobody on this bus handles a {choice.message} of {sender if to is None else to}")
    nodes = [_watched(node, watch, choice.empty) for node in bus.nodes.values()]
    sources = {each.source for node in nodes for each in node.subscriptions.values()} - {None, *bus.nodes}
    made = Bus(
        url,
        nodes=[*nodes, *(Node(str(name)) for name in sorted(map(str, sources)))],
        store=_stores(bus, choice, folder),
        codec=find_codec(bus.content_type),
        max_message_bytes=64 << 20,
        clock=clock,
        drain_seconds=5,
    )
    where = f"the nodes of {choice.target} on {made.url}"
    if choice.on is None:
        where = f"the nodes of {choice.target}, {'in memory' if in_memory else 'on a temporary journal'}"
    return Subject(made, sender, to, message_type, message_type.cls, len(taking), where)


def _watched(node: Node, watch: Watch, empty: bool) -> Node:
    found = copy(node)
    found.after_middlewares = [*node.after_middlewares]
    found.use(watch, after=True)
    if empty:
        nothing = read_signature(_do_nothing, "the empty handler", 1, None)
        found.subscriptions = {address: replace(each, handler=nothing) for address, each in node.subscriptions.items()}
    return found


def _stores(bus: Bus, choice: Choice, folder: Path) -> dict[str, str] | None:
    """A temporary one, for the nodes that have a store. If none has, the one that was given is for all of them."""
    having = {name: store for name in bus.nodes if (store := bus.store_of(name)) is not None}
    if choice.store is not None:
        return dict.fromkeys(having or bus.nodes, _safe(choice.store, choice, "have your handlers write there"))
    if not having:
        return None
    if all(store.url.startswith("memory:") for store in having.values()):
        url = "memory:"
    else:
        url = f"sqlite:{folder / 'store.db'}"
    return dict.fromkeys(having, url)


def _safe(url: str, choice: Choice, what: str) -> str:
    """Raises `ConfigurationError` for what is there already, unless somebody said yes to it."""
    scheme, _, rest = url.partition(":")
    path = Path(rest.partition("?")[0])
    fresh = scheme == "memory" or (scheme in ("journal", "sqlite") and not _holds_something(path))
    if not fresh and not choice.yes:
        kind = "has something in it" if scheme in ("journal", "sqlite") else "is a server that others may use"
        raise ConfigurationError(
            f"{hide_password(url)} {kind}. The bench would {what}. If that is what you want, say so with --yes; "
            "otherwise take memory:, or journal: with a new folder"
        )
    return url


def _holds_something(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))
