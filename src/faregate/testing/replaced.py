"""Nodes as declared, but with resources of a test in place of their own."""

import inspect
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from faregate.errors import ConfigurationError
from faregate.node.node import Node
from faregate.node.provider import Provider, read_provider


def with_resources(nodes: Sequence[Node], given: Mapping[type, Any] | None) -> list[Node]:
    """The nodes, copied, with what `provide=` gives to those that ask for it. Raises `ConfigurationError`."""
    if not given:
        return list(nodes)
    wanted = {node.name: _asked_for(node) for node in nodes}
    for cls, fake in given.items():
        if not isinstance(cls, type):
            raise ConfigurationError(f"provide= maps the class of a resource to what stands in for it; got {cls!r}")
        if isinstance(fake, type):
            raise ConfigurationError(
                f"provide= gives the class {fake.__name__} for a {cls.__name__}: give an instance, {fake.__name__}(), "
                "or a function that makes one"
            )
        if not any(cls in classes for classes in wanted.values()):
            asked = sorted({each.__name__ for classes in wanted.values() for each in classes})
            raise ConfigurationError(
                f"provide= gives a {cls.__name__}, and no function of {', '.join(map(repr, wanted))} asks for one; "
                f"they ask for: {', '.join(asked) or 'nothing'}"
            )
    return [_with_resources(node, {cls: given[cls] for cls in given if cls in wanted[node.name]}) for node in nodes]


def _asked_for(node: Node) -> set[type]:
    users = [*node.users, *(provider.signature for provider in node.providers.values())]
    return {cls for user in users for cls in user.resources}


def _with_resources(node: Node, given: Mapping[type, Any]) -> Node:
    found = copy(node)
    found.providers = {**node.providers, **{cls: _provider(node, cls, fake) for cls, fake in given.items()}}
    return found


def _provider(node: Node, cls: type, fake: Any) -> Provider:
    what = f"what provide= gives for {cls.__name__} to node {node.name!r}"
    if inspect.isroutine(fake):  # it lives as long as what it stands in for
        own = node.providers.get(cls)
        return read_provider(fake, what, "message" if own is None else own.scope, None)

    async def give() -> Any:
        return fake

    return read_provider(give, what, "bus", None)
