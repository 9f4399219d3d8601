"""Looks for what would fail in silence: an event that is awaited from a node that nobody runs, and outgoing messages of
a node that nobody runs. And for what would fail only with the first message: `ctx.session` without SQLAlchemy.

Rules kept here:
- None of it is an error: the other node may run elsewhere, or later. So it is said once, and stands in the status until
  it is no longer so.
- Where a transport hears the nodes of other processes, a source is missed only after some heartbeats without it. Where
  it does not, nobody but this process can publish, and it is said at the start.
- What another node left in the outbox of a store is missed when the first of it has not moved for a minute.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from faregate.core.alarms import Alarms
from faregate.core.unit import TRANSACTION_LOST
from faregate.errors import FaregateError
from faregate.node.sources import did_you_mean
from faregate.node.subscription import Subscription
from faregate.ports.cancellation import end
from faregate.ports.clock import Clock, Timer
from faregate.ports.presence import HEARTBEAT_SECONDS, Heartbeat, Overhearing
from faregate.ports.queue import QueueTransport
from faregate.ports.store import Store

log = logging.getLogger("faregate.bus")

_HEARD_SECONDS = 3 * HEARTBEAT_SECONDS
_LOOK_SECONDS, _UNSENT_SECONDS = 30.0, 60.0
_AGAIN_SECONDS = 10.0


class Mistakes:
    def __init__(
        self,
        nodes: Sequence[str],
        subscriptions: Sequence[Subscription],
        transport: QueueTransport,
        stores: Sequence[Store],
        clock: Clock,
        alarms: Alarms,
    ) -> None:
        self._nodes = nodes
        self._waiting: dict[str, list[Subscription]] = {}
        """The subscriptions to each source that is not known yet."""
        for each in subscriptions:
            if each.source is not None and each.source not in nodes:
                self._waiting.setdefault(each.source, []).append(each)
        self._with_session = [each for each in subscriptions if _names_session(each)]
        self._heard = set(nodes)
        self._transport = transport if isinstance(transport, Overhearing) else None
        self._stores = [each for each in stores if not each.url.startswith("memory:")]
        self._clock = clock
        self._alarms = alarms
        self._missed: set[str] = set()
        """The sources that were missed, and are not there yet."""
        self._unsent: dict[tuple[str, str], tuple[int, float, int]] = {}
        """By store and node: the first row, since when it is that one, and how many there are."""
        self._told: set[tuple[str, str]] = set()
        self._timers: list[Timer] = []
        self._overhearing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._with_session and find_spec("sqlalchemy") is None:
            for each in self._with_session:
                text = "%s seems to use ctx.session, and that needs sqlalchemy, which is not installed: pip install %r"
                log.warning(text, each, "faregate[sqlalchemy]")
        if self._waiting and self._transport is None:
            self._miss_sources()
        elif self._waiting and self._transport is not None:
            self._overhearing = asyncio.create_task(self._overhear(self._transport), name="faregate-overhears")
            self._timers.append(self._clock.call_later(_HEARD_SECONDS, self._miss_sources))
        if self._stores:
            self._timers.append(self._clock.call_later(_LOOK_SECONDS, self._look_soon))

    async def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        for task in (self._overhearing, self._looking):
            if task is not None:
                await end(task)

    @property
    def notices(self) -> Mapping[str, list[str]]:
        """By node of this bus, what looks like a mistake now; what is in the outbox of its store, for the first one."""
        found: dict[str, list[str]] = {}
        for source in sorted(self._missed):
            for subscription in self._waiting[source]:
                found.setdefault(subscription.node, []).append(self._of_source(source, subscription))
        texts = [self._of_outbox(*place) for place in sorted(self._told)]
        if texts:
            found.setdefault(self._nodes[0], []).extend(texts)
        return found

    # --- sources ------------------------------------------------------------------------------------------------

    def _of_source(self, source: str, subscription: Subscription) -> str:
        return (
            f"{subscription} waits for events of node {source!r}, and nobody is known to run that"
            f"{did_you_mean(source, self._heard)}"
        )

    def _miss_sources(self) -> None:
        for source in sorted(self._waiting):
            self._missed.add(source)
            for subscription in self._waiting[source]:
                text = self._of_source(source, subscription)
                if self._transport is None:
                    log.warning("%s", text)
                else:
                    self._alarms.sound("unknown-source", subscription.node, "", text)

    async def _overhear(self, transport: Overhearing) -> None:
        while self._waiting:
            try:
                await transport.overhear(self._hear)
            except FaregateError as exc:
                log.debug("other nodes cannot be heard now: %s", exc)
            await asyncio.sleep(_AGAIN_SECONDS)

    def _hear(self, beat: Heartbeat) -> None:
        if beat.leaving or beat.node in self._heard:
            return
        self._heard.add(beat.node)
        if self._waiting.pop(beat.node, None) is not None and beat.node in self._missed:
            self._missed.discard(beat.node)
            log.warning("node %s is there by now: its events arrive", beat.node)
        if not self._waiting and self._overhearing is not None:
            self._overhearing.cancel()

    # --- outboxes -----------------------------------------------------------------------------------------------

    def _of_outbox(self, store: str, node: str) -> str:
        _, _, count = self._unsent[store, node]
        messages, verb = ("1 message", "is") if count == 1 else (f"{count:,} messages", "are")
        return (
            f"{messages} of node {node!r} in the outbox of {store} {verb} sent by nobody: no bus that has this store "
            f"runs that node{did_you_mean(node, self._nodes)}"
        )

    def _look_soon(self) -> None:
        self._timers[-1] = self._clock.call_later(_LOOK_SECONDS, self._look_soon)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="faregate-looks-for-mistakes")

    async def _look(self) -> None:
        now = self._clock.monotonic()
        found: dict[tuple[str, str], tuple[int, float, int]] = {}
        for store in self._stores:
            try:
                unsent = await store.unsent()
            except TRANSACTION_LOST as exc:
                log.debug("the outbox of %s cannot be read now: %s", store.url, exc)
                return
            for node in unsent.keys() - set(self._nodes):
                count, first = unsent[node]
                before = self._unsent.get((store.url, node))
                since = before[1] if before is not None and before[0] == first else now
                found[store.url, node] = first, since, count
        self._unsent = found
        old = {place for place, (_, since, _) in found.items() if now - since >= _UNSENT_SECONDS}
        new, self._told = old - self._told, old
        for store_url, node in sorted(new):
            self._alarms.sound("nobody-sends", node, "", self._of_outbox(store_url, node))


def _names_session(subscription: Subscription) -> bool:
    """Whether its handler takes ctx, and there is a `.session` in it. The annotation does not tell: a handler may have
    an `AsyncContext` for the sake of `ctx.db`."""
    code = getattr(subscription.handler.function, "__code__", None)
    return subscription.handler.takes_context and code is not None and "session" in code.co_names
