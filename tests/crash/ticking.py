"""A process to be killed: runs a node with a schedule, and one that hears of its ticks.

    python -m tests.crash.ticking JSON

Both keep what they get in tables without a constraint, so that a second run is seen. With `kill` it ends itself by
SIGKILL when it reaches that fault point for the `nth` time; else it prints the points that it reached.

On a fake clock (`minutes` is not None) it starts that many minutes after the first start ever, sees `ticks` of them
pass and comes to rest. On the real one it prints a line when it runs, and one for each tick that it has heard of, until
it is killed or standard input ends.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

import faregate as fg
from faregate.ports import faults
from faregate.ports.clock import SystemClock
from faregate.testing import FakeClock

LONG = 60.0
"""Seconds until a run that hangs is ended."""
MINUTE = 60.0
SCHEMA = "create table if not exists {} (due double precision)"


class Task(msgspec.Struct, kw_only=True):
    url: str
    store: str
    name: str = "ticking"
    """Of the node; what it tells goes to a node that is named after it."""
    minutes: float | None = None
    ticks: int = 0
    kill: str | None = None
    nth: int = 1


class Ticked(fg.Event):
    due: float


class Called:
    """The latest tick whose handler was called."""

    def __init__(self) -> None:
        self.due = 0.0
        self.changed = asyncio.Event()

    def note(self, due: float) -> None:
        self.due = max(self.due, due)
        self.changed.set()

    async def until(self, due: float) -> None:
        async with asyncio.timeout(LONG):
            while self.due < due:
                self.changed.clear()
                await self.changed.wait()


def nodes(task: Task, called: Called) -> list[fg.Node]:
    period = 1 if task.minutes is None else MINUTE
    ticking, audit = (
        fg.Node(f"{task.name}{end}", schema=SCHEMA.format(f"{table}_of_{task.name}"))
        for end, table in (("", "runs"), ("-audit", "told"))
    )

    @ticking.every(period, missed="all")
    async def clean(tick: fg.Tick, ctx: fg.Context) -> Ticked:
        due = tick.due.timestamp()
        await ctx.db.execute(f"insert into runs_of_{task.name} values (?)", (due,))
        called.note(due)
        return Ticked(due=due)

    @audit.on(Ticked, source=ticking)
    async def tell(ticked: Ticked, ctx: fg.Context) -> None:
        await ctx.db.execute(f"insert into told_of_{task.name} values (?)", (ticked.due,))

    async def say(ctx: fg.Context, call_next: Callable[[], Awaitable[None]]) -> None:
        await call_next()
        print("heard", flush=True)

    audit.use(say, after=True)
    return [ticking, audit]


def arm(task: Task) -> Counter[str]:
    reached: Counter[str] = Counter()

    async def hook(point: str) -> None:
        reached[point] += 1
        if point == task.kill and reached[point] == task.nth:
            os.kill(os.getpid(), signal.SIGKILL)

    faults.hook = hook
    return reached


async def run(task: Task) -> None:
    reached, called = arm(task), Called()
    clock: SystemClock | FakeClock = SystemClock()
    if task.minutes is not None:
        clock = FakeClock()
        clock.set_wall(task.minutes * MINUTE)
    async with fg.Bus(task.url, nodes=nodes(task, called), store=task.store, clock=clock) as bus:
        if isinstance(clock, FakeClock):
            await bus.idle(LONG)
            for _ in range(task.ticks):
                clock.jump(MINUTE)
                await called.until(clock.time() // MINUTE * MINUTE)
                await bus.idle(LONG)
        else:
            print("running", flush=True)
            await asyncio.to_thread(sys.stdin.read)
    print("reached", msgspec.json.encode(reached).decode())


if __name__ == "__main__":
    asyncio.run(run(msgspec.json.decode(sys.argv[1], type=Task)))
