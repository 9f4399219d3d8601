"""What the toys have instead of a driver: another backend, of which only what the port names can be reached.

So nothing leans on the backend behind by accident. A backend on a driver has the port's methods itself.
"""

from typing import Any

from faregate.ports.schemes import members


class Through:
    def __init__(self, port: type, behind: Any) -> None:
        self._names = frozenset(members(port))
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"{type(self).__name__} has no {name!r}: the port does not ask for it")
        return getattr(self._behind, name)
