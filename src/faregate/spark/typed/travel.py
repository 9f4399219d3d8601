"""How a message class gets to the workers.

A class of a module goes by its name, and the worker imports it: so both have the same class, and the codecs that its
module registers. (Spark's pickle cannot carry a struct: it arrives without its fields.) A class of the main program or
of a notebook has no name that a worker could import, so it goes as a plan of its fields.
"""

import sys
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from faregate.spark.runs.spec import folder_of
from faregate.spark.typed.plan import Plan, make_class, plan_of


class Named(NamedTuple):
    """Where a class is imported from."""

    module: str
    name: str
    folder: str | None


Traveller = Named | Plan


def pack_class(cls: type) -> Traveller:
    """Raises `ConfigurationError`."""
    module = sys.modules.get(cls.__module__)
    # Without a specification it was not imported, as the main program is not; a worker could not import it either.
    imported = getattr(module, "__spec__", None) is not None and cls.__module__ != "__main__"
    if imported and _found(module, cls.__qualname__) is cls:
        return Named(cls.__module__, cls.__qualname__, folder_of(module))
    return plan_of(cls)


def unpack_class(traveller: Traveller) -> type:
    """The class, in this process."""
    if isinstance(traveller, Plan):
        return make_class(traveller)
    if traveller.folder is not None and traveller.folder not in sys.path:
        sys.path.insert(0, traveller.folder)
    found: type = attrgetter(traveller.name)(import_module(traveller.module))
    return found


def _found(module: Any, name: str) -> Any:
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None
