"""A crash at any of the fault points neither loses nor doubles an effect."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ports.faults import POINTS, Crash

LONG = 30  # seconds until a test that hangs is failed


class Placed(fg.Event):
    name: str


class Noted(fg.Event):
    text: str


class Look(fg.Command):
    """Asks a node what is in its store."""


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


ALWAYS_REACHED = ("bus.before-handler", "bus.after-handler", "bus.before-settle", "bus.after-settle")


def chain(found: dict[str, list[str]], dedup: str) -> list[fg.Node]:
    """first -> second; each writes one note per message into a table of its own, and tells `found` when asked."""
    nodes = [
        fg.Node(name, schema=f"create table if not exists {name}_notes(number integer primary key, text text)")
        for name in ("first", "second")
    ]
    first, second = nodes

    @first.on(Placed, source="shop", dedup=dedup)
    async def begin(placed: Placed, ctx: fg.Context) -> AsyncIterator[Any]:
        await ctx.db.execute("insert into first_notes(text) values (?)", (placed.name,))
        yield Noted(text=f"{placed.name} a")
        yield Noted(text=f"{placed.name} b")

    @second.on(Noted, source="first", dedup=dedup)
    async def end(note: Noted, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into second_notes(text) values (?)", (note.text,))

    @first.on(Look)
    async def look_first(cmd: Look, ctx: fg.Context) -> None:
        found["first"] = [row[0] for row in await ctx.db.fetchall("select text from first_notes order by text")]

    @second.on(Look)
    async def look_second(cmd: Look, ctx: fg.Context) -> None:
        found["second"] = [row[0] for row in await ctx.db.fetchall("select text from second_notes order by text")]

    return nodes


async def publish_for_sure(bench: Any, event: Any, key: str) -> None:
    """A publisher that dies within `publish` comes back and repeats it with the same key."""
    for _ in range(5):
        try:
            await bench.publish(event, idempotency_key=key)
            return
        except (Crash, fg.OutcomeUnknown):
            continue
    raise AssertionError("publishing crashed more often than it was told to")


@pytest.mark.parametrize("dedup", ["ledger", "tokens"])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("point", list(POINTS))
async def test_a_crash_at_any_point_neither_loses_nor_doubles_an_effect(point: str, times: int, dedup: str) -> None:
    # In `tokens` the two nodes need one store of tokens; reading: the `memory:` stores of a bench are enough for that.
    found: dict[str, list[str]] = {}
    async with asyncio.timeout(60), fg.testing.bench(*chain(found, dedup)) as bench:
        with fg.testing.crash_at(point, times) as reached:
            for name in ("1", "2"):
                await publish_for_sure(bench, Placed(name=name), name)
            await bench.settle()
        await bench.settle()
        assert bench.dead_letters() == []
        assert bench.bus.alarms["disagreement"] == 0
        for node in ("first", "second"):
            await bench.send(Look(), to=node)
        await bench.settle()
    assert found == {"first": ["1", "2"], "second": ["1 a", "1 b", "2 a", "2 b"]}
    if point in ALWAYS_REACHED:
        assert reached[point] > times


@pytest.mark.parametrize("point", list(POINTS))
async def test_a_crash_at_any_point_is_harmless_on_files_too(point: str, tmp_path: Path) -> None:
    nodes = [fg.Node("shop"), *chain({}, "ledger")]
    store = {"first": f"sqlite:{tmp_path}/first.db", "second": f"sqlite:{tmp_path}/second.db"}
    async with asyncio.timeout(60):
        with fg.testing.crash_at(point):
            for _ in range(2):  # the second bus is the process that comes back
                with contextlib.suppress(Crash, fg.OutcomeUnknown):
                    async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=store) as bus:
                        await bus.publish(Placed(name="1"), node="shop", idempotency_key="1")
                        await bus.idle(timeout=LONG)
        async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=store) as bus:
            await bus.idle(timeout=LONG)
            assert await bus.dead_letters() == []
    assert rows(tmp_path / "first.db", "select text from first_notes") == [("1",)]
    assert rows(tmp_path / "second.db", "select text from second_notes order by text") == [("1 a",), ("1 b",)]
