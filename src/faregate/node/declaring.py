"""What a type checker knows of the functions that a node is given.

`on` and `interprets` check the first parameter: it has to take the class that they are for. Whatever follows (`ctx`,
resources) and whatever comes back stays as it is. What they return takes anything first, so that one function can be
subscribed to several classes: a type variable cannot be bounded by another, which would say it exactly.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from faregate.node.kill_switch import SwitchTripped
from faregate.ports.dead_letter import DeadLetter

P = ParamSpec("P")
R = TypeVar("R")
First = TypeVar("First", covariant=True)
Middleware = TypeVar("Middleware", bound=Callable[..., Awaitable[Any]])
F = TypeVar("F", bound=Callable[..., Any])
Escalation = TypeVar("Escalation", bound=Callable[[DeadLetter], Any] | Callable[[SwitchTripped], Any])


class Declares(Protocol[First]):
    """Declares a function whose first parameter takes a `First`."""

    def __call__(self, function: Callable[Concatenate[First, P], R], /) -> Callable[Concatenate[Any, P], R]: ...
