"""A process to be killed: runs the line, publishes orders, and says what is confirmed.

    python -m tests.crash.worker JSON

Each line on standard output is one fact: `confirmed NUMBER`, `handled NODE`, at the end `reached {"point": times}` and
`alarms {…}`. With `kill` it ends itself by SIGKILL when it reaches that fault point for the `nth` time.
"""

import asyncio
import os
import signal
import sys
from collections import Counter

import msgspec

import faregate as fg
from faregate.bus import attempts, housekeeping
from faregate.ports import faults
from tests.crash.line import nodes, ordered
from tests.crash.mutants import MUTANTS

LONG = 60.0
"""Seconds until a run that hangs is ended."""


class Task(msgspec.Struct, kw_only=True):
    journal: str
    dedup: str
    stores: dict[str, str]
    tokens: str | None = None
    numbers: list[int]
    """The orders to publish."""
    kill: str | None = None
    nth: int = 1
    at_once: int = 4
    """How many orders to publish before waiting for their end."""
    together: bool = False
    """Whether these are published by one call, so that all are under way at the same time."""
    mutant: str | None = None
    talk: bool = False
    """Whether handlers state facts, too."""


def arm(task: Task) -> Counter[str]:
    reached: Counter[str] = Counter()

    async def hook(point: str) -> None:
        reached[point] += 1
        if point == task.kill and reached[point] == task.nth:
            os.kill(os.getpid(), signal.SIGKILL)

    faults.hook = hook
    return reached


def shorten() -> None:
    """Sweep up within a second or two: what it does is the same, and a minute is long for a test."""
    attempts.FENCE_SECONDS = 1.0
    housekeeping._LONGEST_PERIOD = housekeeping._SHORTEST_PERIOD = 0.2
    housekeeping.CLAIM_AGE = 1.0


def state(fact: str) -> None:
    print(fact, flush=True)


async def talk(ctx: fg.Context, call_next: object) -> None:
    await call_next()  # type: ignore[operator]
    state(f"handled {ctx.node}")


async def run(task: Task) -> None:
    reached = arm(task)
    made = nodes(task.dedup)  # type: ignore[arg-type]
    for node in made if task.talk else ():
        node.use(talk)
    async with fg.Bus(f"journal:{task.journal}", nodes=made, store=task.stores, tokens=task.tokens) as bus:
        for start in range(0, len(task.numbers), task.at_once):
            numbers = task.numbers[start : start + task.at_once]
            size = len(numbers) if task.together else 1
            for some in (numbers[place : place + size] for place in range(0, len(numbers), size)):
                await bus.publish_many(
                    [fg.publish(ordered(number), idempotency_key=f"order-{number}") for number in some], node="shop"
                )
                for number in some:
                    state(f"confirmed {number}")
            await bus.idle(LONG)
        await bus.idle(LONG)
        await swept(bus)
        state(f"alarms {msgspec.json.encode(bus.alarms).decode()}")
    state(f"reached {msgspec.json.encode(reached).decode()}")


async def swept(bus: fg.Bus) -> None:
    """Return once the housekeepers have removed what an earlier process left half done."""
    async with asyncio.timeout(LONG):
        for store in bus._stores.stores:
            while await store.dispatched_rows(1) or await store.claim_records(1e12, 1):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Task)
    shorten()
    if given.mutant is not None:
        MUTANTS[given.mutant].break_it()
    asyncio.run(run(given))
