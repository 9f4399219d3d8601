"""Recurring functions on a bus: each tick once, whatever restarts, and however many processes run the node."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.testing import FakeClock
from faregate.testing.clock import START
from faregate.transports.memory import MemoryTransport

HOUR = 3600.0


class Cleaned(fg.Event):
    at: float


class Ticks(list[datetime]):
    """What was called so far; says when there are enough."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def append(self, due: datetime) -> None:
        super().append(due)
        self.changed.set()

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self) < count:
                self.changed.clear()
                await self.changed.wait()


def cleaner(seen: list[Any], when: Any = "0 * * * *", **options: Any) -> fg.Node:
    node = fg.Node("shop")

    @node.every(when, **options)
    async def clean(tick: fg.Tick, ctx: fg.Context) -> Cleaned:
        assert tick.schedule == "clean"
        seen.append(tick.due)
        return Cleaned(at=tick.due.timestamp())

    return node


def hours(*numbers: int) -> list[datetime]:
    """The bench's clock starts at 22:13:20."""
    return [datetime.fromtimestamp((1_700_000_000 // 3600 + number) * 3600, UTC) for number in numbers]


async def test_a_function_is_called_at_each_tick_and_what_it_returns_is_sent() -> None:
    seen: list[Any] = []
    async with fg.testing.bench(cleaner(seen)) as bench:
        await bench.advance(40 * 60)
        assert seen == []
        await bench.advance(2 * HOUR)
        assert seen == hours(1, 2)
        assert [each.at for each in bench.sent(Cleaned)] == [each.timestamp() for each in seen]


async def test_a_tick_is_handled_like_any_message() -> None:
    node, tries = fg.Node("shop"), []

    @node.every(60, retry=None, redeliver=fg.Redeliver(5))
    async def fails(tick: fg.Tick) -> None:
        tries.append(tick.due)
        if len(tries) == 1:
            raise RuntimeError("once")
        if len(tries) > 2:
            raise fg.Permanent("no more")

    async with fg.testing.bench(node) as bench:
        await bench.advance(50)
        await bench.settle()
        assert len(tries) == 2 and tries[0] == tries[1]
        await bench.advance(120)
        assert [letter.type for letter in bench.dead_letters()] == ["tick-fails", "tick-fails"]
        assert len(set(tries)) == 3


@pytest.mark.parametrize(("missed", "made"), [("skip", []), ("last", hours(5)), ("all", hours(2, 3, 4, 5))])
async def test_ticks_that_were_missed_while_nobody_ran(tmp_path: Path, missed: Any, made: list[datetime]) -> None:
    seen, clock = Ticks(), FakeClock()
    for hour in (4, 0):
        node = cleaner(seen, missed=missed)
        async with fg.Bus("memory:", nodes=[node], store=f"sqlite:{tmp_path}/s.db", clock=clock) as bus:
            await bus.idle(timeout=10)
            if hour:
                assert seen == [], "the first start makes up for nothing"
                clock.jump(47 * 60)
                await seen.reach(1)
                await bus.idle(timeout=10)
                assert seen == hours(1)
        clock.jump(hour * HOUR + 300)
    assert seen == hours(1) + made


async def test_two_processes_make_each_tick_once(tmp_path: Path) -> None:
    """Both on one store, as instances on a broker: whoever comes second finds the tick made. Both send it, since each
    has a broker of its own here, and both may begin on it; one commits."""
    seen, clock = Ticks(), FakeClock()
    store = f"sqlite:{tmp_path}/s.db"
    one = fg.Bus("memory:", nodes=[cleaner(seen)], store=store, clock=clock)
    two = fg.Bus("memory:", nodes=[cleaner(seen)], store=store, clock=clock)
    async with one, two:
        for hour in range(3):
            clock.jump(HOUR)
            await seen.reach(hour + 1)
            await one.idle(timeout=10)
            await two.idle(timeout=10)
    assert sorted(set(seen)) == hours(1, 2, 3)
    assert one.outcomes()["handled"] + two.outcomes()["handled"] == 3


@pytest.mark.parametrize("point", ["ticks.before-commit", "ticks.after-commit", "unit.before-commit"])
async def test_a_crash_makes_no_tick_twice_and_loses_none(point: str) -> None:
    node = fg.Node("shop")

    @node.every(60, missed="all")
    async def clean(tick: fg.Tick) -> Cleaned:
        return Cleaned(at=tick.due.timestamp())

    async with fg.testing.bench(node) as bench:
        with fg.testing.crash_at(point, times=2) as reached:
            await bench.advance(5 * 60)
            await bench.settle()
        first = (START // 60 + 1) * 60
        assert [each.at for each in bench.sent(Cleaned)] == [first + 60 * number for number in range(5)]
    assert reached[point] >= 5


async def test_a_wall_clock_that_is_set_back_makes_no_tick_twice() -> None:
    seen: list[Any] = []
    async with fg.testing.bench(cleaner(seen)) as bench:
        await bench.advance(50 * 60)
        bench.clock.set_wall(-30 * 60)
        await bench.advance(40 * 60)
        assert seen == hours(1)
        await bench.advance(50 * 60)
        assert seen == hours(1, 2)


async def test_a_wall_clock_that_is_set_forward_is_noticed() -> None:
    seen: list[Any] = []
    async with fg.testing.bench(cleaner(seen)) as bench:
        bench.clock.set_wall(5 * HOUR)
        await bench.advance(61)
        assert seen == hours(5)


async def test_without_a_store_ticks_begin_with_the_bus() -> None:
    seen: list[Any] = []
    clock = FakeClock()
    async with fg.Bus("memory:", nodes=[cleaner(seen)], clock=clock) as bus:
        await bus.idle(timeout=10)
        await clock.advance(2 * HOUR)
        await bus.idle(timeout=10)
    assert seen == hours(1, 2)


@pytest.mark.parametrize("error", [ValueError, fg.Permanent])
async def test_a_schedule_whose_ticks_cannot_be_made_is_tried_again_and_holds_up_no_other(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    node, seen, clock = fg.Node("shop"), list[str](), FakeClock()
    broken = True

    @node.use_outgoing
    async def refuse(out: Any, call_next: Any) -> None:
        if broken and out.message.schedule == "first":
            raise error("not now")
        await call_next()

    @node.every(60)
    async def first(tick: fg.Tick) -> None:
        seen.append("first")

    @node.every(60)
    async def second(tick: fg.Tick) -> None:
        seen.append("second")

    async with fg.Bus("memory:", nodes=[node], clock=clock) as bus:
        await clock.advance(60)
        await bus.idle(timeout=10)
        assert seen == ["second"]
        assert "the schedule 'first' of node shop waits 5 s, as a tick cannot be made: not now" in caplog.text
        broken = False
        await clock.advance(10)
        await bus.idle(timeout=10)
    assert seen == ["second", "first"]


def test_a_node_without_a_store_needs_a_transport_that_recognises_repetitions() -> None:
    class Forgetful(MemoryTransport):
        capabilities = MemoryTransport.capabilities - {"recognise"}

    with pytest.raises(fg.ConfigurationError, match="the schedule 'clean', which must run once"):
        fg.Bus(Forgetful(), nodes=[cleaner([])])
    fg.Bus(Forgetful(), nodes=[cleaner([])], store="memory:")


async def test_the_status_says_when_a_schedule_comes_next() -> None:
    async with fg.testing.bench(cleaner([], tz="Europe/Madrid")) as bench:
        [found] = bench.bus.status().nodes[0].schedules
        assert (found.name, found.when, found.zone, found.last) == ("clean", "0 * * * *", "Europe/Madrid", None)
        assert found.next == hours(1)[0].timestamp()
        await bench.advance(HOUR)
        [found] = bench.bus.status().nodes[0].schedules
        assert (found.last, found.next) == tuple(each.timestamp() for each in hours(1, 2))
