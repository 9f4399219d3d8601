"""What travels from the driver to the Python workers: which node, which store, where its subscriptions begin.

Rules kept here:
- Handlers go by name: a node that a module holds is imported there (`module:attribute`), so both engines run the same
  objects. Only a node that no module holds travels by value, pickled by Spark itself as it pickles every function.
  Nothing that is read from a message is ever unpickled.
- A worker process loads a node once.
"""

import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from faregate.bus.node import Node
from faregate.bus.policy import ByKey, Serial
from faregate.bus.subscription import Subscription
from faregate.errors import ConfigurationError


@dataclass(frozen=True)
class Begin:
    """Where a subscription begins in the log."""

    offset: int
    history: int


@dataclass(frozen=True)
class RunSpec:
    id: str
    """Of this run: what a worker process keeps its engine by."""
    node_name: str
    target: str | None
    """module:attribute, and the folder it is imported from."""
    folder: str | None
    node: Node | None
    """Only where there is no target."""
    store: str | None
    codec: str
    body_limit: int
    begins: dict[str, Begin] = field(default_factory=dict)
    """By queue."""


_loaded: dict[str, Node] = {}


def node_of(spec: RunSpec) -> Node:
    """The node, in this process."""
    found = _loaded.get(spec.id)
    if found is None:
        found = spec.node if spec.target is None else load_node(spec.target, spec.folder)
        assert found is not None
        _loaded[spec.id] = found
    return found


def load_node(target: str, folder: str | None = None) -> Node:
    """Import `module:attribute`. Raises `ConfigurationError`."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(f"{target!r} does not name a node: write module:attribute, for example shop.app:billing")
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not module_name.startswith(exc.name):
            raise
        raise ConfigurationError(
            f"there is no module {exc.name!r} in this process: on a cluster, ship it with --py-files or install it there"
        ) from exc
    found: Any = getattr(module, name, None)
    if not isinstance(found, Node):
        nodes = [key for key, value in vars(module).items() if isinstance(value, Node)]
        told = f"its nodes are: {', '.join(nodes)}" if nodes else "it has no fg.Node at all"
        raise ConfigurationError(f"{target} is no fg.Node; {told}")
    return found


def locate(node: Node) -> tuple[str | None, str | None]:
    """Where to import a node from, and from which folder; nowhere when no module holds it."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "__main__" or module is None:
            continue
        for name, value in list(vars(module).items()):
            if value is node:
                return f"{module_name}:{name}", _folder(module)
    return None, None


def _folder(module: Any) -> str | None:
    """The folder that `module` is imported from under its name."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    depth = module.__name__.count(".") + (1 if path.name == "__init__.py" else 0)
    return str(path.parents[depth])


def ordering(subscription: Subscription) -> str | None:
    """How a subscription is ordered: by "key", as a whole ("serial"), or not at all."""
    if isinstance(subscription.order, Serial):
        return "serial"
    return "key" if isinstance(subscription.order, ByKey) and subscription.key is not None else None


def is_strict(subscription: Subscription) -> bool:
    return not isinstance(subscription.order, ByKey) or subscription.order.strict
