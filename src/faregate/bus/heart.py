"""Sends the heartbeats of this instance, one for each node (`ports/presence.py`).

Nothing depends on them: one that cannot be sent is left out, and said once until one can be sent again.
"""

import asyncio
import logging
from collections.abc import Sequence

from faregate.bus.worker import Worker
from faregate.core.alarms import Alarms
from faregate.errors import FaregateError
from faregate.ports.clock import Clock, Timer
from faregate.ports.presence import HEARTBEAT_SECONDS, Announcing, Consumed, Heartbeat
from faregate.version import __version__

log = logging.getLogger("faregate.bus")


class Heart:
    def __init__(
        self,
        transport: Announcing,
        instance: str,
        nodes: Sequence[str],
        workers: Sequence[Worker],
        clock: Clock,
        alarms: Alarms,
    ) -> None:
        self._transport = transport
        self._instance = instance
        self._nodes = nodes
        self._workers = workers
        self._clock = clock
        self._alarms = alarms
        self._counted: dict[Worker, int] = {}
        """What each had handled at the last heartbeat."""
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None
        self._told = False

    def start(self) -> None:
        self._since = self._clock.time()
        self._last = self._clock.monotonic()
        self._beat_soon()

    async def stop(self) -> None:
        """With a last one that says so."""
        if self._timer is not None:
            self._timer.cancel()
            if self._task is not None:
                await self._task
            await self._beat(leaving=True)

    def _beat_soon(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._beat())
        self._timer = self._clock.call_later(HEARTBEAT_SECONDS, self._beat_soon)

    async def _beat(self, *, leaving: bool = False) -> None:
        try:
            await self._transport.announce(self._heartbeats(leaving))
            self._told = False
        except Exception as exc:
            if not self._told:
                unforeseen = None if isinstance(exc, FaregateError) else exc
                log.warning(
                    "heartbeats, by which people see this instance, cannot be sent now: %s", exc, exc_info=unforeseen
                )
            self._told = True

    def _heartbeats(self, leaving: bool) -> list[Heartbeat]:
        now = self._clock.monotonic()
        seconds, self._last = now - self._last, now
        consumed: dict[str, list[Consumed]] = {node: [] for node in self._nodes}
        for worker in self._workers:
            consumed[worker.subscription.node].append(self._consumed(worker, seconds))
        at, alarms = self._clock.time(), dict(self._alarms.counts)
        return [
            Heartbeat(node, self._instance, __version__, self._since, at, consumes, alarms, leaving)
            for node, consumes in consumed.items()
        ]

    def _consumed(self, worker: Worker, seconds: float) -> Consumed:
        handled = worker.outcomes["handled"]
        recent = handled - self._counted.get(worker, 0)
        self._counted[worker] = handled
        return Consumed(
            type=worker.subscription.message_type.wire,
            source=worker.subscription.source,
            queues=worker.queues,
            per_second=round(recent / seconds, 1) if seconds > 0 else 0.0,
            handled=handled,
            redelivered=worker.outcomes["redelivered"],
            dead=worker.outcomes["dead"],
            busy=worker.busy,
            paused=worker.paused,
        )
