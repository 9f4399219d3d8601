"""`asking` asks, `answering` writes a note for each question and answers; and what is in the table afterwards."""

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

import faregate as fg
from faregate.core.unit import UnitOfWork
from faregate.core.work import Work
from faregate.ports.store import Store

LONG = 30  # seconds until a test that hangs is failed
TABLE = "create table if not exists notes(n integer)"
INSERT = "insert into notes values (?)"


class Asked(fg.Event):
    n: int


class Answered(fg.Event):
    n: int


class Told(fg.Command):
    n: int


def numbers(count: int) -> list[Asked]:
    return [Asked(n=n) for n in range(count)]


def in_memory() -> Counter[type]:
    """What messages under way are made of; other tests may have left some."""
    return Counter(type(each) for each in gc.get_objects() if type(each) in (fg.Context, Work, UnitOfWork))


def the_store(bus: fg.Bus) -> Store:
    """All nodes of the bus share it."""
    [store] = {id(store): store for store in bus.stores.values()}.values()
    return store


async def committed(bus: fg.Bus, sql: str) -> list[tuple[Any, ...]]:
    """It needs the writer, so it hangs where a transaction was left open."""
    transaction = the_store(bus).transaction()
    await asyncio.wait_for(transaction.begin(), LONG)
    try:
        return [tuple(row) for row in await transaction.fetchall(sql)]
    finally:
        await transaction.roll_back()


async def notes(bus: fg.Bus) -> list[int]:
    return [n for (n,) in await committed(bus, "select n from notes order by n")]


async def count(bus: fg.Bus, table: str) -> int:
    [(found,)] = await committed(bus, f"select count(*) from faregate_{table}")
    return int(found)


async def dead_numbers(bus: fg.Bus) -> list[int]:
    return sorted(msgspec.json.decode(letter.envelope.body)["n"] for letter in await bus.dead_letters())


Handle = Callable[[Asked, fg.Context], Awaitable[Any]]


async def run(url: str, handle: Handle, *, count: int = 6, prepare: Any = None, **options: Any) -> tuple[fg.Bus, Any]:
    """Everything published at once; what is in the table, and what was answered."""
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("hearing")
    answers: list[int] = []
    policy = {"order": fg.Parallel(1), "retry": fg.Retry(2, delay=0.001), "redeliver": None, **options}
    answering.on(Asked, source="asking", **policy)(handle)

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        answers.append(answered.n)

    if prepare is not None:
        prepare(answering)
    async with fg.Bus("memory:", nodes=[asking, answering, hearing], store=url, drain_seconds=1) as bus:
        await bus.publish_many(numbers(count), node="asking")
        await bus.idle(timeout=LONG)
        return bus, (await notes(bus), sorted(answers))
