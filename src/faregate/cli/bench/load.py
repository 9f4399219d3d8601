"""Puts load on a bus, and measures what becomes of it. Each producer publishes one message, or burst, after another.

Rules kept here:
- With a rate, message n has its turn n / rate seconds after the beginning, whatever became of those before it; how late
  it was sent is a figure of the report. Without one, producers go as fast as they get confirms, but never have more
  than `most_waiting` messages unhandled: else a backlog would be measured.
- A first message goes alone, and must be published: what is wrong with all of them is raised. What was sent during the
  warm-up does not count. What was sent before the end is waited for, up to `drain` seconds.
- A producer that cannot publish counts the error and goes on. A transport that fails for good ends the run.
- Durations come from a clock that does not jump.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from faregate.cli.bench.meter import Meter
from faregate.cli.bench.subject import Subject
from faregate.core.context import Context
from faregate.core.verdict import first_line
from faregate.errors import FaregateError
from faregate.ports.clock import SystemClock, Timer

_PAUSE_AFTER_ERROR = 0.05
_FIRST_SECONDS = 5.0
_ENDS = ("handled", "skipped", "filtered", "duplicate", "dead")


class SteadyClock:
    """Wall time that does not jump while this process runs, so that differences of it are durations."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._system = SystemClock()
        self._offset = time.time() - time.perf_counter()

    def time(self) -> float:
        return self._offset + time.perf_counter()

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return self._system.call_later(seconds, callback)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(frozen=True)
class Plan:
    producers: int
    rate: float | None
    burst: int
    count: int | None
    duration: float
    warm_up: float
    most_waiting: int
    drain: float


class Load:
    """One run. `watch` is an `after` middleware of all nodes that are measured."""

    def __init__(self, plan: Plan, clock: SteadyClock) -> None:
        self.plan, self.meter, self._clock = plan, Meter(), clock
        self.start = self.end = 0.0
        """Of what counts: behind the warm-up, until the last message was sent."""
        self.sent = self.ended = 0
        """Messages that were confirmed; deliveries of them that came to an end."""
        self.phase = "starting"
        self.waiting = 0
        """What had not come to an end when the run was over."""
        self._taken = 0
        self._limit: int | None = None
        self._stopped = False
        self._room = asyncio.Event()
        self._over = asyncio.Event()
        self._done = asyncio.Event()
        self._recipients = 1
        self._wire = ""

    async def watch(self, ctx: Context, call_next: Callable[[], Awaitable[None]]) -> None:
        outcome, now = ctx.outcome, self._clock.time()
        if ctx.causation_id is None and ctx.type == self._wire:
            self.meter.outcomes[outcome or "lost"] += 1
            if outcome in _ENDS:
                self.ended += 1
                if self.unhandled < self.plan.most_waiting:
                    self._room.set()
                if self._stopped and self.unhandled <= 0:
                    self._done.set()
        if outcome == "handled":
            self.meter.ended(ctx.node, ctx.type, now, max(0.0, now - ctx.sent_at))
        await call_next()

    @property
    def unhandled(self) -> int:
        return self.sent * self._recipients - self.ended

    def stop(self) -> None:
        """Send no more."""
        if not self._stopped:
            self._stopped = True
            self._over.set()
            self.end = self._clock.time()
            self.start = self.start or self.end  # it was interrupted during the warm-up
            self._room.set()

    async def run(self, subject: Subject, messages: Iterator[Any]) -> None:
        """Raises what starting the bus raises, what its transport fails with, and what the messages' function does."""
        self._recipients, self._wire = subject.recipients, subject.message_type.wire
        async with subject.bus as bus:
            await self._first(subject, messages)
            failed = asyncio.create_task(bus.failed())
            if not self.plan.warm_up:
                self._begin()  # before any producer has taken a number
            began = time.perf_counter()
            timing = asyncio.create_task(self._time())
            producing = asyncio.create_task(self._produce_all(subject, messages, began))
            with _interrupted_by(self.stop):
                try:
                    waited: set[asyncio.Task[Any]] = {failed, producing}
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    self.stop()
                    if failed.done():
                        raise failed.result()
                    await producing
                    self.phase = "waiting for the last ones"
                    await self._drain()
                finally:
                    for task in (failed, producing, timing):
                        task.cancel()
            self.waiting = max(0, self.unhandled)

    async def _first(self, subject: Subject, messages: Iterator[Any]) -> None:
        """Behind it files, connections and tables are made, which is not to be measured."""
        self.phase = "sending a first one"
        await subject.bus.publish(subject.outgoing(next(messages)), node=subject.sender)
        self.sent += 1
        try:
            async with asyncio.timeout(_FIRST_SECONDS):
                while self.unhandled > 0:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            pass

    async def _time(self) -> None:
        if self.plan.warm_up:
            self.phase = "warming up"
            await asyncio.sleep(self.plan.warm_up)
            self._begin()
        if self.plan.count is None:
            await asyncio.sleep(self.plan.duration)
            self.stop()

    def _begin(self) -> None:
        """From now on it counts."""
        self.phase = "measuring"
        self.start = self._clock.time()
        if self.plan.count is not None:
            self._limit = self._taken + self.plan.count

    async def _drain(self) -> None:
        # While producers were finishing, all that was counted as sent may have ended for a moment.
        self._done.clear()
        if self.unhandled > 0:
            try:
                await asyncio.wait_for(self._done.wait(), self.plan.drain)
            except TimeoutError:
                pass

    async def _produce_all(self, subject: Subject, messages: Iterator[Any], began: float) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.plan.producers):
                    group.create_task(self._produce(subject, messages, began))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None

    async def _produce(self, subject: Subject, messages: Iterator[Any], began: float) -> None:
        plan, meter, clock, bus = self.plan, self.meter, self._clock, subject.bus
        while True:
            while plan.rate is None and self.unhandled >= plan.most_waiting and not self._stopped:
                self._room.clear()
                await self._room.wait()
            number = self._taken
            if self._stopped or (self._limit is not None and number >= self._limit):
                return
            size = plan.burst if self._limit is None else min(plan.burst, self._limit - number)
            self._taken += size
            if plan.rate is not None:
                await self._turn(began + number / plan.rate)
                if self._stopped:
                    return
            batch = [subject.outgoing(next(messages)) for _ in range(size)]
            begin = clock.time()
            try:
                if size == 1:
                    await bus.publish(batch[0], node=subject.sender)
                else:
                    await bus.publish_many(batch, node=subject.sender)
            except FaregateError as exc:
                meter.errors[first_line(exc)] += size
                await asyncio.sleep(_PAUSE_AFTER_ERROR)
                continue
            now = clock.time()
            self.sent += size
            for _ in batch:
                meter.published.add(now, now - begin)
            # In memory a publish may be over without a turn of the event loop; consumers need some, too.
            await asyncio.sleep(0)

    async def _turn(self, due: float) -> None:
        early = due - time.perf_counter()
        if early > 0:
            try:
                async with asyncio.timeout(early):
                    await self._over.wait()
            except TimeoutError:
                pass
        self.meter.late.add(self._clock.time(), max(0.0, time.perf_counter() - due))


@contextmanager
def _interrupted_by(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C ends the sending; what was measured is still shown. A second one ends the waiting as well."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        stop()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, once)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
