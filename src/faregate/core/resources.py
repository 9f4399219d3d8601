"""The resources of one node in one engine: who needs which, in which order they are made, and where they are found.

Rules kept here:
- Each is made behind the ones that it is made from; what nobody asks for is not made.
- What lives as long as the bus is not made from what lives as long as a message.
- A provider is called as an async generator, whatever it is. Plain functions and generators run in a thread, as plain
  handlers do.
"""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from faregate.core.alarms import Alarms
from faregate.core.handler import Held, Places, fill
from faregate.core.resource_cost import SAMPLE, Cost
from faregate.core.threads import HandlerThreads
from faregate.errors import ConfigurationError, WrongSignature
from faregate.node.node import Node
from faregate.node.provider import Provider
from faregate.node.signature import Signature
from faregate.node.subscription import Subscription

Generate = Callable[..., AsyncGenerator[Any, None]]


class Resources:
    def __init__(
        self,
        node: Node,
        pool: Executor | None = None,
        alarms: Alarms | None = None,
        *,
        only_outgoing: bool = False,
    ) -> None:
        """`only_outgoing`: the node sends here, and handles nothing. Raises `ConfigurationError` for resources that
        cannot be made."""
        self.node = node
        self.pool = pool or HandlerThreads()
        self._alarms = alarms or Alarms()
        self._costs: dict[type, Cost] = {}
        self.start_hooks = [] if only_outgoing else node.start_hooks
        self.stop_hooks = [] if only_outgoing else node.stop_hooks
        self._held: dict[type, Held] = {}
        users = node.outgoing_middlewares if only_outgoing else node.users
        for cls in self._ordered(users):
            if node.providers[cls].scope == "bus":
                self._held[cls] = Held(node.providers[cls].what)
        for hook in (*self.start_hooks, *self.stop_hooks):
            self.check_outlives(hook, f"a function that node {node.name!r} starts or stops with")

    # --- of a message ----------------------------------------------------------------------------------------

    def of_message(self, subscription: Subscription) -> Places:
        """What one message of the subscription is provided with."""
        node = self.node
        users = [subscription.handler, *node.middlewares, *node.outgoing_middlewares, *node.interpreters.values()]
        return self.places(users)

    def places(self, users: Sequence[Signature]) -> Places:
        """Where these find what they ask for."""
        made = [cls for cls in self._ordered(users) if cls not in self._held]
        return {**{cls: place for place, cls in enumerate(made)}, **self._held}

    def cost(self, cls: type) -> Cost:
        """One for each resource, whoever uses it."""
        if cls not in self._costs:
            what = self.node.providers[cls].what

            def tell(making: float, using: float) -> None:
                text = (
                    f"{what} takes {making * 1000:.1f} ms to make a {cls.__name__} for each message, and what it is "
                    f"made for {using * 1000:.1f} ms (the mean of {SAMPLE} messages). If messages can share one, make "
                    f'it once: @{self.node.name}.provides(scope="bus")'
                )
                self._alarms.sound("slow-resource", self.node.name, "", text)

            self._costs[cls] = Cost(tell)
        return self._costs[cls]

    # --- of the bus ------------------------------------------------------------------------------------------

    @property
    def held(self) -> dict[type, Held]:
        """The resources that live as long as the bus, in the order in which they are made."""
        return self._held

    def check_outlives(self, user: Signature, what: str) -> None:
        """Raises `WrongSignature` when that asks for something that lives as long as a message."""
        for cls in user.resources:
            if cls not in self._held:
                raise WrongSignature(
                    f"{what} asks for a {cls.__name__}, which node {self.node.name!r} makes for each message: let it "
                    f'live as long as the bus, @{self.node.name}.provides(scope="bus"), or do without it'
                )

    def arguments(self, user: Signature) -> list[Any]:
        """What a provider of the bus, or a hook, is called with."""
        return [self._held[cls].value for cls in user.resources]

    # --- both ------------------------------------------------------------------------------------------------

    def generate(self, cls: type) -> Generate:
        return generate(self.node.providers[cls], self.pool)

    def filled(self, cls: type, places: Places) -> Callable[[Any], list[Any]] | None:
        """What to call the provider of a message's resource with; None: nothing."""
        signature = self.node.providers[cls].signature
        return fill(signature, places) if signature.extra else None

    def _ordered(self, users: Sequence[Signature]) -> list[type]:
        """All that these ask for, each behind the ones that it is made from."""
        node, order = self.node, list[type]()

        def need(cls: type, path: tuple[type, ...]) -> None:
            if cls in order:
                return
            if cls in path:
                names = " -> ".join(step.__name__ for step in (*path, cls))
                raise ConfigurationError(f"node {node.name!r} provides resources that need each other: {names}")
            provider = node.providers.get(cls)
            if provider is None:
                raise WrongSignature(
                    f"node {node.name!r} asks for a {cls.__name__} in a parameter but provides none: "
                    f"add an async generator with @{node.name}.provides that yields it"
                )
            for other in provider.signature.resources:
                need(other, (*path, cls))
                if provider.scope == "bus" and node.providers[other].scope != "bus":
                    raise ConfigurationError(
                        f"{provider.what} makes what lives as long as the bus from a {other.__name__}, which is made "
                        f'for each message: give that scope="bus", too, or make a {cls.__name__} for each message'
                    )
            order.append(cls)

        for user in users:
            for cls in user.resources:
                need(cls, ())
        return order


def generate(provider: Provider, pool: Executor) -> Generate:
    """The provider as an async generator."""
    function, shape = provider.signature.function, provider.signature.shape
    if shape == "async generator":
        return function
    if shape == "generator":
        manage = contextmanager(function)

        async def managed(*args: Any) -> AsyncGenerator[Any, None]:
            manager = manage(*args)
            yielded = await in_thread(pool, manager.__enter__)
            try:
                yield yielded
            except BaseException as exc:
                if not await in_thread(pool, manager.__exit__, type(exc), exc, exc.__traceback__):
                    raise
            else:
                await in_thread(pool, manager.__exit__, None, None, None)

        return managed

    async def returned(*args: Any) -> AsyncGenerator[Any, None]:
        yield await (function(*args) if shape == "coroutine" else in_thread(pool, function, *args))

    return returned


async def in_thread(pool: Executor, function: Callable[..., Any], *args: Any) -> Any:
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, context.run, function, *args)
