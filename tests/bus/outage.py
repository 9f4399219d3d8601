"""A node whose handler needs a dependency, and the dependency, which goes away and comes back."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any

import faregate as fg
from faregate.bus.worker import Worker
from faregate.testing import FakeClock

TABLE = "create table if not exists effects(key text, number integer)"
SHOP = fg.Node("shop")


class Step(fg.Event, key="key"):
    key: str
    number: int


class Outage:
    """`node` handles steps from "shop". While `is_down` its handler fails with `error`."""

    def __init__(
        self, *, store: bool = True, run: Callable[[Step, fg.Context], Awaitable[None]] | None = None, **options: Any
    ) -> None:
        self.is_down = False
        self.error: BaseException = ConnectionError("the bank does not answer")
        self.calls: Counter[Step] = Counter()
        self.total = self.calls_while_down = 0
        self.ended: dict[str, list[int]] = defaultdict(list)
        """By key, in the order in which handlers succeeded."""
        self.node = fg.Node("worker", schema=TABLE if store else None)
        self.run = run

        @self.node.on(Step, source="shop", **options)
        async def work(step: Step, ctx: fg.Context) -> None:
            self.calls[step] += 1
            self.total += 1
            if self.is_down:
                self.calls_while_down += 1
                raise copy(self.error)  # raised again and again, one would carry all their tracebacks
            if self.run is not None:
                await self.run(step, ctx)
            if store:
                await ctx.db.execute("insert into effects values (?, ?)", (step.key, step.number))
            self.ended[step.key].append(step.number)

    def bus(self, transport: Any = "memory:", *, clock: Any = None, **options: Any) -> fg.Bus:
        return fg.Bus(transport, nodes=[SHOP, self.node], clock=clock, stall_seconds=None, **options)


def steps(count: int, keys: int = 10) -> list[Step]:
    return [Step(key=f"key-{number % keys}", number=number) for number in range(count)]


def worker_of(bus: fg.Bus, wire: str = "Step") -> Worker:
    [found] = [each for each in bus._workers if each.subscription.message_type.wire == wire]
    return found


async def until(is_so: Callable[[], bool], clock: FakeClock | None = None, step: float = 0.5) -> None:
    """Let time pass until it is so; real time, too, as stores have threads."""
    async with asyncio.timeout(240):
        while not is_so():
            if clock is not None:
                await clock.advance(step)
            await asyncio.sleep(0.002)


async def effects(bus: fg.Bus, node: str = "worker") -> list[tuple[str, int]]:
    store = bus.store_of(node)
    assert store is not None
    async with store.transaction() as transaction:
        found = await transaction.fetchall("select key, number from effects order by number")
        await transaction.roll_back()
    return [(key, number) for key, number in found]
