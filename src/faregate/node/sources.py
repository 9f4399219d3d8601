"""Who publishes an event, as far as the nodes of one bus say so. A node is known to publish a type when
it says so itself (`fg.Node("shop", publishes=[OrderPlaced])`), or when a subscription names it as the `source=`.

Types go by wire name: a subscriber may have a class of its own for an event of another node.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from difflib import get_close_matches

from faregate.errors import ConfigurationError, HandlerConflict
from faregate.node.node import Node
from faregate.node.subscription import Subscription
from faregate.plain import plain

Publishers = dict[str, set[str]]
"""The wire name of an event -> the nodes that are known to publish it."""


def publishers(nodes: Iterable[Node]) -> Publishers:
    found: Publishers = {}
    for node in nodes:
        for wire in node.publishes:
            found.setdefault(wire, set()).add(node.name)
        for wire, source in node.subscriptions:
            if source is not None:
                found.setdefault(wire, set()).add(source)
    return found


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint at the nearest of some names; nothing where none is near."""
    found = get_close_matches(name, sorted(set(names) - {name}), 1)
    return f" (did you mean {plain(found[0])!r}?)" if found else ""


def with_sources(nodes: Sequence[Node], known: Publishers) -> list[Node]:
    """The nodes, with the source of every subscription to an event. A node without one is copied, as it may be on
    several buses. Raises `ConfigurationError` where the source is not clear, and `HandlerConflict`."""
    return [node if not open_events(node) else _with_sources(node, known) for node in nodes]


def open_events(node: Node) -> list[Subscription]:
    """The subscriptions that do not say who publishes their event."""
    every = node.subscriptions.values()
    return [each for each in every if each.source is None and each.message_type.kind == "event"]


def _with_sources(node: Node, known: Publishers) -> Node:
    found = copy(node)
    found.subscriptions = {}
    for (wire, source), subscription in node.subscriptions.items():
        if source is None and subscription.message_type.kind == "event":
            source = _only(subscription, known.get(wire, set()))
        if (wire, source) in found.subscriptions:
            raise HandlerConflict(
                f"node {node.name!r} handles {wire} from {source} twice: {subscription.name} leaves out source=, and "
                f"{source} is the only one that publishes it; do both things in one handler, or make another node"
            )
        found.subscriptions[wire, source] = replace(subscription, source=source)
    return found


def _only(subscription: Subscription, names: set[str]) -> str:
    if len(names) == 1:
        return next(iter(names))
    wire, cls = subscription.message_type.wire, subscription.message_type.cls.__name__
    if names:
        raise ConfigurationError(
            f"{subscription}: {', '.join(sorted(names))} publish {wire}; say from which one, on({cls}, source='…')"
        )
    raise ConfigurationError(
        f"{subscription}: no node here is known to publish {wire}. Name the one that does, on({cls}, source='shop'), "
        f"or have it say so, fg.Node('shop', publishes=[{cls}])"
    )
