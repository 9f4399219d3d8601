"""Makes the ticks of recurring functions: commands of a node to itself, each once over all its instances.

Rules kept here:
- Where the node has a store, it keeps up to which tick everything is done (as a position of its own). Whoever moves
  that on puts the ticks into the outbox in the same commit; the others find it moved. So a tick that is committed is
  sent, and no tick is made twice.
- The id of a tick is made of the node, the schedule and its time: should it come twice all the same, the second one is
  a repetition like any other.
- Without a store nothing is remembered: ticks begin with the start of the bus; the transport recognises repetitions.
- The first start of a schedule makes up for nothing.
- A tick that cannot be made, whatever the error, is tried again in a while, and keeps no other schedule waiting.
- A clock timer never sleeps for longer than a minute, so that a wall clock that was set forward is noticed. Where it
  was set back, ticks that were made are not made again.
"""

import asyncio
import logging
from collections.abc import Sequence

from faregate.core.node_store import NodeStore
from faregate.core.sender import Sender
from faregate.errors import ConfigurationError, FaregateError
from faregate.node.every import Schedule
from faregate.node.node import Node
from faregate.node.outgoing import Outgoing, send
from faregate.ports import faults
from faregate.ports.cancellation import end
from faregate.ports.clock import Clock, Timer
from faregate.ports.presence import ScheduleStatus
from faregate.ports.queue import QueueTransport
from faregate.ports.store import FROM_OUTSIDE, OutboxRow, Transaction

log = logging.getLogger("faregate.bus")

_POSITIONS = "@every"
"""What positions of schedules are kept under; no handler has a name like that."""
_BUCKET = 0
"""Whose lock two instances meet at."""
_LONGEST_SLEEP, _AGAIN_SECONDS = 60.0, 5.0
_ROUNDING = 1e-6


def check_schedules(node: Node, transport: QueueTransport, url: str, has_store: bool) -> None:
    if node.schedules and not has_store and "recognise" not in transport.capabilities:
        raise ConfigurationError(
            f"node {node.name!r} has the schedule {next(iter(node.schedules))!r}, which must run once over all its "
            f"processes, and {url} recognises no repetitions: give the node a store, fg.Bus(…, store='postgresql://…')"
        )


class Ticker:
    """The schedules of one node in one process."""

    def __init__(self, node: Node, sender: Sender, shared: NodeStore | None, clock: Clock) -> None:
        self._node = node.name
        self._schedules = list(node.schedules.values())
        self._sender = sender
        self._shared = shared
        self._clock = clock
        self._last: dict[str, int] = {}
        """By schedule: up to which moment everything is done, as far as this process knows."""
        self._made: dict[str, int] = {}
        self._timer: Timer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make up for what was missed, and go on from there."""
        if self._schedules:
            await self._make_due()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await end(self._task)

    def status(self) -> list[ScheduleStatus]:
        now = self._now()
        return [
            ScheduleStatus(
                each.name,
                each.when,
                each.zone,
                next=_seconds(each.times.after(max(now, self._last.get(each.name, 0)))),
                last=_seconds(self._made.get(each.name)),
            )
            for each in self._schedules
        ]

    def _now(self) -> int:
        return int((self._clock.time() + _ROUNDING) * 1000)

    def _ring(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._make_due(), name="faregate-ticker")

    async def _make_due(self) -> None:
        """Make what is due, and wait for what comes next."""
        wait = _LONGEST_SLEEP
        for schedule in self._schedules:
            wait = min(wait, await self._make_one(schedule))
        self._timer = self._clock.call_later(max(0.0, wait), self._ring)

    async def _make_one(self, schedule: Schedule) -> float:
        """Make what is due of one schedule; in how many seconds to look again."""
        try:
            last = self._last.get(schedule.name)
            following = None if last is None else schedule.times.after(last)
            if last is None or (following is not None and following <= self._now()):
                await (self._make(schedule) if self._shared is None else self._commit(schedule, self._shared))
            following = schedule.times.after(max(self._now(), self._last[schedule.name]))
        except (Exception, faults.Crash) as exc:  # whatever it is: without a timer the schedules would end here
            text = "the schedule %r of node %s waits %g s, as a tick cannot be made: %s"
            known = isinstance(exc, FaregateError)
            log.warning(text, schedule.name, self._node, _AGAIN_SECONDS, exc, exc_info=not known)
            return _AGAIN_SECONDS
        return _LONGEST_SLEEP if following is None else following / 1000 - self._clock.time()

    async def _make(self, schedule: Schedule) -> None:
        """Without a store: publish, and remember it here."""
        now = self._now()
        for at in schedule.due(self._last.setdefault(schedule.name, now), now):
            _, published = self._sender.publish(self._outgoing(schedule, at))
            await published
            self._made[schedule.name] = self._last[schedule.name] = at
        self._last[schedule.name] = max(now, self._last[schedule.name])

    async def _commit(self, schedule: Schedule, shared: NodeStore) -> None:
        rows: list[OutboxRow] = []
        ticks: list[int] = []
        now = self._now()
        done = now

        async def move_on(transaction: Transaction) -> bool:
            await transaction.lock_buckets(self._node, [_BUCKET])
            found = await transaction.positions(self._node, _POSITIONS, [schedule.name])
            nonlocal done
            last = found.get(schedule.name, now)
            done = max(now, last)
            ticks[:] = schedule.due(last, now)
            rows[:] = self._rows(schedule, ticks)
            await transaction.advance(self._node, _POSITIONS, {schedule.name: now})
            if rows and faults.hook is not None:
                await faults.hook("ticks.before-commit")
            return bool(rows)

        await shared.commit_sending(move_on, rows)
        if rows and faults.hook is not None:
            await faults.hook("ticks.after-commit")
        self._last[schedule.name] = done
        if ticks:
            self._made[schedule.name] = ticks[-1]

    def _rows(self, schedule: Schedule, ticks: Sequence[int]) -> list[OutboxRow]:
        sealed = [self._sender.seal_root(self._outgoing(schedule, at), self._clock.time()) for at in ticks]
        return [self._sender.outbox_row(envelope, None, FROM_OUTSIDE) for envelope in sealed]

    def _outgoing(self, schedule: Schedule, at: int) -> Outgoing:
        return send(schedule.tick(at), to=self._node, idempotency_key=schedule.key(at))


def _seconds(tick: int | None) -> float | None:
    return None if tick is None else tick / 1000
