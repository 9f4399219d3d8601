"""The `use_outgoing` middlewares of a node, around what it sends.

    bus.publish, bus.send        call_next is the publish itself: it returns once that is confirmed, or raises why not
    a handler without a store    the same, for all that it sends together
    a handler with a store       call_next returns once the message is recorded in the unit of work; the commit and the
                                 dispatcher see to the rest
    fg.outbox                    the dispatcher runs them; call_next is the publish itself

Middlewares may take the resources of the node: those of the message that is handled, which stay open for that long; or,
outside of handlers, ones of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import force_setattr

from faregate.core.context import OWN_HEADERS, Context
from faregate.core.handler import Held, Places, fill
from faregate.core.observer import Step
from faregate.core.pipeline import provide
from faregate.core.resources import Resources
from faregate.errors import ConfigurationError
from faregate.message import Envelope, Kind
from faregate.node.node import Node
from faregate.node.outgoing import check_headers

Last = Callable[[], Awaitable[None]]
Chain = Callable[["OutgoingContext", Last], Awaitable[None]]
"""Runs the middlewares of a node around the last step."""
PublishAll = Callable[[list[Envelope]], Awaitable[Mapping[str, Exception]]]
"""Publishes together. Returns the errors of those that were dealt with singly, by publication id; raises for all."""


class OutgoingContext:
    """What an outgoing middleware sees. Only `headers` may be changed."""

    __slots__ = ("_envelope", "_message", "_resources", "cause", "headers")
    _trying = None  # resources are provided to it as to the context of a handler; none runs here

    def __init__(self, envelope: Envelope, message: Any, cause: Context | None) -> None:
        self._envelope = envelope
        self._message = message
        self._resources: tuple[Any, ...] = () if cause is None else cause._resources
        self.cause = cause
        """The context of the handler that sends this; None outside handlers."""
        self.headers = {name: value for name, value in envelope.headers.items() if name not in OWN_HEADERS}

    @property
    def message(self) -> Any:
        """The message; None when `fg.outbox` recorded one that no node of this bus handles."""
        return self._message

    @property
    def publication_id(self) -> str:
        return self._envelope.publication_id

    @property
    def type(self) -> str:
        return self._envelope.type

    @property
    def kind(self) -> Kind:
        return self._envelope.kind

    @property
    def destination(self) -> str | None:
        return self._envelope.destination


def compile_outgoing(node: Node, places: Places) -> Chain | None:
    """The middlewares with the resources of a handler's scope; None when there are none."""
    if not node.outgoing_middlewares:
        return None
    functions = [(middleware.function, fill(middleware, places)) for middleware in node.outgoing_middlewares]

    def chain(out: OutgoingContext, last: Last) -> Awaitable[None]:
        step: Callable[..., Awaitable[None]] = partial(_with_headers, out, last)
        for function, resources in reversed(functions):
            step = partial(_call, function, resources, out, step)
        return step()

    return chain


def _with_headers(out: OutgoingContext, last: Last, again: OutgoingContext | None = None) -> Awaitable[None]:
    ours = {name: value for name, value in out._envelope.headers.items() if name in OWN_HEADERS}
    force_setattr(out._envelope, "headers", check_headers(out.headers) | ours)
    return last()


def _call(
    function: Callable[..., Awaitable[None]],
    resources: Callable[[Any], list[Any]],
    out: OutgoingContext,
    following: Callable[..., Awaitable[None]],
    again: OutgoingContext | None = None,
) -> Awaitable[None]:
    return function(out, following, *resources(out))


def compile_own_scope(resources: Resources) -> Chain | None:
    """The same for what is sent outside of handlers: resources are opened for it, and released when it is sent."""
    node = resources.node
    places = resources.places(node.outgoing_middlewares)
    classes = [cls for cls, place in places.items() if not isinstance(place, Held)]
    inner = compile_outgoing(node, places)
    if inner is None or not classes:
        return inner
    unfit = next((cls for cls in classes if node.providers[cls].signature.takes_context), None)

    async def chain(out: OutgoingContext, last: Last) -> None:
        if unfit is not None:
            raise ConfigurationError(
                f"the provider of {unfit.__name__} takes the context of the message that is handled, and an outgoing "
                f"middleware of node {node.name!r} takes a {unfit.__name__}: outside of handlers there is no such "
                "context. Let the provider do without it, or send from a handler"
            )
        step: Step = lambda ctx, again=None: inner(out, last)  # noqa: E731
        for cls in reversed(classes):
            step = provide(cls, resources, step, places)
        await step(out)

    return chain


async def send_together(chain: Chain, outs: Sequence[OutgoingContext], publish: PublishAll) -> None:
    """Each message within its middlewares, all of them published at once, when the last one has called on.

    Raises what a middleware raises; if that was before it called on, nothing is published.
    """
    waiting: dict[int, asyncio.Future[None]] = {}
    failed: list[BaseException] = []
    undecided, decided = len(outs), asyncio.Event()

    def decide() -> None:
        nonlocal undecided
        undecided -= 1
        if not undecided:
            decided.set()

    async def send(place: int, out: OutgoingContext) -> None:
        async def arrive() -> None:
            if place not in waiting:
                waiting[place] = asyncio.get_running_loop().create_future()
                decide()
            await asyncio.shield(waiting[place])

        try:
            await chain(out, arrive)
        except BaseException as exc:
            if place not in waiting:
                failed.append(exc)
            raise
        finally:
            if place not in waiting:
                decide()

    tasks = [asyncio.create_task(send(place, out)) for place, out in enumerate(outs)]
    try:
        await decided.wait()
        error = failed[0] if failed else None
        singly: Mapping[str, Exception] = {}
        if error is None:
            try:
                singly = await publish([outs[place]._envelope for place in sorted(waiting)])
            except Exception as exc:
                error = exc
        for place, future in waiting.items():
            own = error or singly.get(outs[place].publication_id)
            if own is None:
                future.set_result(None)
            else:
                future.set_exception(own)
                future.exception()  # a middleware need not wait for it
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    for out, result in zip(outs, ended, strict=True):
        if result is not None and result is not singly.get(out.publication_id):
            raise result
