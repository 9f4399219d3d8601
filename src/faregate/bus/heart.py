"""Measures rates every few seconds, and sends the heartbeats of this instance, one for each node, where the transport
brings them to somebody (`ports/presence.py`).

Nothing depends on them: one that cannot be sent is left out, and said once until one can be sent again.
"""

import asyncio
import logging

from faregate.bus.status import Reporter
from faregate.errors import FaregateError
from faregate.ports.clock import Clock, Timer
from faregate.ports.presence import HEARTBEAT_SECONDS, Announcing

log = logging.getLogger("faregate.bus")


class Heart:
    def __init__(self, reporter: Reporter, transport: Announcing | None, clock: Clock) -> None:
        """`transport`: None where heartbeats have nowhere to go; then rates are measured alone."""
        self._reporter = reporter
        self._transport = transport
        self._clock = clock
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None
        self._told = False

    def start(self) -> None:
        self._beat_soon()

    async def stop(self) -> None:
        """With a last one that says so."""
        if self._timer is not None:
            self._timer.cancel()
            if self._task is not None:
                await self._task
            await self._beat(leaving=True)

    @property
    def is_beating(self) -> bool:
        return self._timer is not None

    async def beat(self) -> None:
        """One more now: something has changed that somebody waits for."""
        if self._task is not None:
            await asyncio.wait({self._task})
        await self._beat()

    def _beat_soon(self) -> None:
        self._reporter.measure()
        if self._transport is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._beat())
        self._timer = self._clock.call_later(HEARTBEAT_SECONDS, self._beat_soon)

    async def _beat(self, *, leaving: bool = False) -> None:
        if self._transport is None:
            return
        try:
            await self._transport.announce(self._reporter.heartbeats(leaving=leaving))
            self._told = False
        except Exception as exc:
            if not self._told:
                unforeseen = None if isinstance(exc, FaregateError) else exc
                log.warning(
                    "heartbeats, by which people see this instance, cannot be sent now: %s", exc, exc_info=unforeseen
                )
            self._told = True
