"""What travels from the driver to the Python workers: which node, which store, where its subscriptions begin.

Rules kept here:
- Handlers go by name, `module:attribute`: the worker imports what the bus would, so both engines run the same objects,
  and nothing is pickled. (Spark's pickle would carry a message class that no module holds without its fields, and every
  message would be decoded as an empty one.)
- A worker process loads a node once.
"""

import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from faregate.core.observer import Observers, check_observers
from faregate.errors import ConfigurationError
from faregate.node.node import Node
from faregate.ports.topology import Reading


@dataclass(frozen=True)
class RunSpec:
    id: str
    """Of this run: what a worker process keeps its engine by."""
    node_name: str
    target: str
    """module:attribute, and the folder it is imported from."""
    folder: str | None
    store: str | None = field(repr=False)
    codec: str
    """The content type of what its handlers send."""
    body_limit: int
    begins: dict[str, Reading] = field(default_factory=dict)
    """By queue, where its subscription goes on in the log."""
    observe: str | None = None
    """module:attribute of who observes the run, in the driver and in each worker."""
    tokens: str | None = field(default=None, repr=False)
    """Where signals with an attempt have their tokens; the node's own store, or another database."""


_loaded: dict[str, Node] = {}
_observers: dict[str, Observers] = {}


def node_of(spec: RunSpec) -> Node:
    """The node, in this process."""
    found = _loaded.get(spec.id)
    if found is None:
        found = _loaded[spec.id] = load_node(spec.target, spec.folder)
    return found


def observers_of(spec: RunSpec) -> Observers:
    """Who observes the run, in this process."""
    if spec.id not in _observers:
        _observers[spec.id] = load_observers(spec.observe, spec.folder)
    return _observers[spec.id]


def load_observers(target: str | None, folder: str | None) -> Observers:
    """Import `module:attribute`: an observer, or a list of them. Raises `ConfigurationError`."""
    if target is None:
        return ()
    if not isinstance(target, str):
        raise ConfigurationError(
            f"observe= of a Spark run is a name, module:attribute: each worker imports it for itself; got {target!r}"
        )
    found = _load(target, folder, "who observes the run")
    if found is None:
        raise ConfigurationError(f"there is no {target!r}: observe= names an observer of fg.observe, module:attribute")
    return check_observers(found)


def provide(spec: RunSpec, node: Node) -> None:
    """Have this node stand for what would be imported, in this process."""
    _loaded[spec.id] = node


def load_node(target: str, folder: str | None = None) -> Node:
    """Import `module:attribute`. Raises `ConfigurationError`."""
    found: Any = _load(target, folder, "a node")
    if not isinstance(found, Node):
        nodes = [key for key, value in vars(sys.modules[target.partition(":")[0]]).items() if isinstance(value, Node)]
        told = f"its nodes are: {', '.join(nodes)}" if nodes else "it has no fg.Node at all"
        raise ConfigurationError(f"{target} is no fg.Node; {told}")
    return found


def _load(target: str, folder: str | None, what: str) -> Any:
    """None where the module has no such attribute."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ConfigurationError(
            f"{target!r} does not name {what}: write module:attribute, for example shop.app:billing"
        )
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not module_name.startswith(exc.name):
            raise
        raise ConfigurationError(
            f"there is no module {exc.name!r} here: write it as you would import it from this folder; on a cluster, "
            "ship it with --py-files, or install it there"
        ) from exc
    return getattr(module, name, None)


def locate(node: Node) -> tuple[str, str | None]:
    """Where to import a node from, and from which folder. Raises `ConfigurationError`."""
    own = [subscription.handler.function.__module__ for subscription in node.subscriptions.values()]
    modules = {name: sys.modules.get(name) for name in (*own, *sys.modules)}  # where its handlers stand, first
    for module_name, module in modules.items():
        if module_name == "__main__" or module is None or getattr(module, "__spec__", None) is None:
            continue
        for name, value in list(vars(module).items()):
            if value is node:
                return f"{module_name}:{name}", folder_of(module)
    raise ConfigurationError(
        f"Spark's workers import node {node.name!r} by name, and no module holds it: put it, with its messages and "
        "handlers, into a module of its own (not the main program, not a notebook cell), at its top level"
    )


def folder_of(module: Any) -> str | None:
    """The folder that `module` is imported from under its name."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    depth = module.__name__.count(".") + (1 if path.name == "__init__.py" else 0)
    return str(path.parents[depth])
