"""The nodes of the simulated world: `a` gets an Order, writes it down and sends a Bill to `b`, which writes that down.
A third, `c`, may listen.

Rules kept here:
- What a handler does is written to a table without any constraint, with the number of its run: nothing but the bus
  keeps it from being there twice.
- What it sends carries the number of the run too, so that outputs of another run than the committed one are seen.
- `Script` says which runs fail, and how; without one every run succeeds.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import faregate as fg
from faregate.ports import faults

SCHEMA = """
create table if not exists effects(
    number integer primary key, node text, message_id text, run integer, key text, position integer, name text)
"""


class Order(fg.Command):
    name: str
    key: str | None = None


class Bill(fg.Command):
    name: str
    run: int
    key: str | None = None


class Noted(fg.Event):
    name: str


Habit = Callable[[Callable[[], Coroutine[Any, Any, None]], BaseException | None], Awaitable[None]]
"""(write, error): writes once, or fails with the error."""


async def plainly(write: Callable[[], Coroutine[Any, Any, None]], error: BaseException | None) -> None:
    await write()
    if error is not None:
        raise error


async def gathering(write: Callable[[], Coroutine[Any, Any, None]], error: BaseException | None) -> None:
    """Fails while its own write is under way, and leaves that behind."""

    async def fail() -> None:
        await asyncio.sleep(0)
        if error is not None:
            raise error

    await asyncio.gather(write(), fail())


async def cancelling(write: Callable[[], Coroutine[Any, Any, None]], error: BaseException | None) -> None:
    """Gives its first statement little time, and writes later what was not written then."""
    first = asyncio.ensure_future(write())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    if error is not None:
        raise error
    if first.cancelled():
        await write()
    else:
        first.result()


async def shielding(write: Callable[[], Coroutine[Any, Any, None]], error: BaseException | None) -> None:
    """Lets its write go on, whatever becomes of it: one that failed may still be waiting for the store."""
    writing = asyncio.ensure_future(write())
    await asyncio.sleep(0)
    if error is not None:
        raise error
    await asyncio.shield(writing)


async def swallowing(write: Callable[[], Coroutine[Any, Any, None]], error: BaseException | None) -> None:
    """Catches everything, also what is not for it."""
    try:
        await write()
    except BaseException:
        pass
    if error is not None:
        raise error


async def lingering(write: Callable[[], Coroutine[Any, Any, None]], error: BaseException | None) -> None:
    """Fails, and leaves a task behind that writes at any time later."""

    async def late() -> None:
        assert faults.hook is not None
        await faults.hook("bus.before-handler")
        await write()

    if error is None:
        await write()
    else:
        left = asyncio.ensure_future(late())
        left.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise error


HABITS = (gathering, cancelling, shielding, swallowing, lingering)


class Runs:
    """Counts the runs of all handlers, and says what each is to do."""

    def __init__(self) -> None:
        self.count = 0
        self.script: Callable[[str, int, str], BaseException | None] = lambda node, run, name: None
        """(node, run of that node and name, name) -> what to raise after the writes."""
        self.of: dict[tuple[str, str], int] = {}
        self.outputs = 1
        self.to = "b"
        self.notes = False
        """Whether `a` publishes a Noted, too; `c` may be subscribed to it."""
        self.habit: Habit = plainly
        """How `a` goes about its write."""
        self.before: Callable[[str], Awaitable[None]] | None = None
        """What `a` waits for before it writes."""
        self.writes = False
        """Whether handlers write without waiting."""
        self.outside: list[str] = []
        """Effects that are not in the store."""

    def begin(self, node: str, name: str) -> tuple[int, int]:
        self.count += 1
        nth = self.of[node, name] = self.of.get((node, name), 0) + 1
        return self.count, nth


def make_nodes(runs: Runs, dedup: Any, *, subscriber: bool, **options: Any) -> dict[str, fg.Node]:
    a, b = fg.Node("a"), fg.Node("b")
    options = {"retry": None, "redeliver": fg.Redeliver(1, 1), **options}

    async def write(ctx: fg.Context, name: str, run: int, key: str | None) -> None:
        sql = "insert into effects(node, message_id, run, key, position, name) values (?, ?, ?, ?, ?, ?)"
        values = (ctx.node, ctx.message_id, run, key, ctx._work.delivery.position, name)
        if runs.writes:
            ctx.db.write(sql, values)
        else:
            await ctx.db.execute(sql, values)

    @a.on(Order, dedup=dedup, **options)
    async def take(order: Order, ctx: fg.Context) -> AsyncIterator[Any]:
        run, nth = runs.begin("a", order.name)
        runs.outside.append(ctx.message_id)
        for number in range(runs.outputs):
            yield fg.send(Bill(name=f"{order.name}.{number}", run=run, key=order.key), to=runs.to)
        if runs.notes:
            yield Noted(name=order.name)
        if runs.before is not None:
            await runs.before(order.name)
        error = runs.script("a", nth, order.name)
        await runs.habit(lambda: write(ctx, order.name, run, order.key), error)

    @b.on(Bill, dedup="ledger" if dedup == "off" else dedup, **options)
    async def bill(bill: Bill, ctx: fg.Context) -> None:
        run, nth = runs.begin("b", bill.name)
        await write(ctx, bill.name, run, bill.key)
        error = runs.script("b", nth, bill.name)
        if error is not None:
            raise error

    if not subscriber:
        return {"a": a, "b": b}
    c = fg.Node("c")

    @c.on(Noted, source="a", dedup=dedup, **options)
    async def note(noted: Noted, ctx: fg.Context) -> None:
        run, _ = runs.begin("c", noted.name)
        await write(ctx, noted.name, run, None)

    return {"a": a, "b": b, "c": c}
