"""`fg.Requeue`: behind everything that waits, so often as asked, counted with the message and not in a process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.node.subscription import SPARE_DELIVERIES
from faregate.ports.faults import POINTS, Crash
from faregate.testing import FakeClock
from tests.bus.test_supplied import Noted, Station
from tests.core.rig import INSERT, LONG, TABLE, Answered, Asked, notes, numbers


class Job(fg.Event):
    name: str
    team: str = ""


NO_TIME = {"retry": None, "redeliver": None}


def failing_worker(failures: dict[str, int], calls: list[str], **options: Any) -> fg.Node:
    """Each job fails as often as it is told."""
    node = fg.Node("worker")

    @node.on(Job, source="boss", kill_switch=False, **options)
    async def work(job: Job) -> None:
        calls.append(job.name)
        if calls.count(job.name) <= failures.get(job.name, 0):
            raise ValueError(f"{job.name} fails")

    return node


async def test_a_requeued_message_comes_behind_everything_that_waits() -> None:
    calls: list[str] = []
    node = failing_worker({"a": 2}, calls, order=fg.Parallel(1), prefetch=1, requeue=fg.Requeue(delay=0), **NO_TIME)
    async with fg.testing.bench(node) as bench:
        await bench.bus.pause("worker", Job)
        for name in "abcd":
            await bench.publish(Job(name=name))
        await bench.bus.resume("worker", Job)
        await bench.settle()
        assert calls == ["a", "b", "c", "d", "a", "a"]
        assert bench.outcomes()["handled"] == 4
        assert bench.dead_letters() == []


async def test_it_comes_after_retries_and_redeliveries_and_before_the_dead_letter() -> None:
    calls: list[tuple[int, int]] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=fg.Retry(1), redeliver=fg.Redeliver(10), requeue=fg.Requeue(2, delay=5))
    async def work(job: Job, ctx: fg.Context) -> None:
        calls.append((ctx.redeliveries, ctx.attempt))
        raise ValueError("no")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        [letter] = bench.dead_letters()
        assert calls == [(times, attempt) for times in range(4) for attempt in (1, 2)]
        assert (letter.reason, letter.redeliveries) == ("failed", 3)
        assert bench.outcomes()["redelivered"] == 3


async def test_without_a_number_it_goes_on_for_ever_and_counts_nothing() -> None:
    calls: list[str] = []
    often = 3 * SPARE_DELIVERIES
    node = failing_worker({"x": often}, calls, requeue=fg.Requeue(), **NO_TIME)
    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert len(calls) == often + 1
        assert bench.dead_letters() == []
        assert bench.outcomes()["handled"] == 1


async def test_a_number_above_what_a_process_may_die_of_is_kept() -> None:
    calls: list[str] = []
    often = 3 * SPARE_DELIVERIES
    node = failing_worker({"x": 1000}, calls, requeue=fg.Requeue(often), **NO_TIME)
    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert len(calls) == often + 1
        assert [letter.reason for letter in bench.dead_letters()] == ["failed"]


async def test_where_later_ones_of_its_key_may_pass_it_is_behind_them() -> None:
    calls: list[str] = []
    order = fg.ByKey(lanes=1, strict=False)
    node = failing_worker({"a1": 1}, calls, key="team", order=order, prefetch=1, requeue=fg.Requeue(delay=0), **NO_TIME)
    async with fg.testing.bench(node) as bench:
        await bench.bus.pause("worker", Job)
        for name in ("a1", "a2", "b1", "a3"):
            await bench.publish(Job(name=name, team=name[0]))
        await bench.bus.resume("worker", Job)
        await bench.settle()
        assert calls[0] == "a1" and calls[-1] == "a1" and sorted(calls[1:-1]) == ["a2", "a3", "b1"]


@pytest.mark.parametrize("options", [{"order": fg.Serial()}, {"key": "team"}, {"key": "team", "order": fg.ByKey(3)}])
@pytest.mark.parametrize(
    "asked", [{"requeue": fg.Requeue()}, {"rules": [fg.When(OSError, requeue=fg.Requeue(1))]}], ids=str
)
def test_a_strict_order_refuses_it_where_it_is_declared(options: dict[str, Any], asked: dict[str, Any]) -> None:
    with pytest.raises(fg.ConfigurationError, match=r"worker.*Job.*requeue= sends a message behind later ones"):
        failing_worker({}, [], **options, **asked)


@pytest.mark.parametrize("wrong", [{"times": 0}, {"times": True}, {"delay": -1}])
def test_a_requeue_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(fg.ConfigurationError, match="Requeue"):
        fg.Requeue(**wrong)


async def test_the_count_survives_a_restart_of_the_journal(tmp_path: Path) -> None:
    clock, calls = FakeClock(), []  # type: tuple[FakeClock, list[str]]

    def bus() -> fg.Bus:
        node = failing_worker({"x": 1000}, calls, requeue=fg.Requeue(3, delay=60), **NO_TIME)
        return fg.Bus(f"journal:{tmp_path}", nodes=[fg.Node("boss"), node], clock=clock)

    async def until(seen: int) -> None:
        async with asyncio.timeout(LONG):
            while len(calls) < seen:
                await clock.advance(1)

    async with bus() as first:
        await first.publish(Job(name="x"), node="boss")
        await until(2)
    async with bus() as second:
        await until(3)
        assert await second.dead_letters() == []
    async with bus() as third:
        await until(4)
        await asyncio.wait_for(third.idle(), LONG)
        [letter] = await third.dead_letters()
        assert (letter.reason, letter.redeliveries) == ("failed", 3)
    assert calls == ["x"] * 4


async def test_what_the_journal_keeps_for_a_requeued_message_is_its_own_place_alone(tmp_path: Path) -> None:
    """A snapshot tells what waits by runs of offsets: one that moved to the end must not bring back what is done."""
    clock, calls = FakeClock(), []  # type: tuple[FakeClock, list[str]]
    fails = {"b": 1000}

    def bus() -> fg.Bus:
        options = {"order": fg.Parallel(1), "requeue": fg.Requeue(delay=0.5), **NO_TIME}
        return fg.Bus(
            f"journal:{tmp_path}", nodes=[fg.Node("boss"), failing_worker(fails, calls, **options)], clock=clock
        )

    async with bus() as first:
        await first.publish_many([Job(name=name) for name in "abcde"], node="boss")
        async with asyncio.timeout(LONG):
            while calls.count("b") < 3:
                await clock.advance(0.1)
        await first.pause("worker", Job)
        await first.publish_many([Job(name=name) for name in "fg"], node="boss")
        await clock.advance(5)
    calls.clear()
    fails.clear()
    async with bus() as second:
        await clock.advance(5)
        await asyncio.wait_for(second.idle(), LONG)
        assert sorted(calls) == ["b", "f", "g"]
        assert await second.dead_letters() == []


@pytest.mark.parametrize("point", list(POINTS))
async def test_a_requeue_doubles_no_effect_whatever_crashes(point: str) -> None:
    clock, runs = FakeClock(), 0
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("hearing")
    heard: list[int] = []

    @answering.on(Asked, source="asking", kill_switch=False, requeue=fg.Requeue(20, delay=1), **NO_TIME)
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        nonlocal runs
        runs += 1
        await ctx.db.execute(INSERT, (asked.n,))
        if runs % 3:
            raise ValueError("not this time")
        return Answered(n=asked.n)

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered, ctx: fg.Context) -> None:
        await ctx.db.execute("select 1")
        heard.append(answered.n)

    nodes = [asking, answering, hearing]
    async with fg.Bus("memory:", nodes=nodes, store="memory:", clock=clock, stall_seconds=None) as bus:
        with fg.testing.crash_at(point, 2):
            for asked in numbers(4):
                for _ in range(5):
                    try:
                        await bus.publish(asked, node="asking", idempotency_key=f"{asked.n}")
                        break
                    except Crash:
                        continue
            async with asyncio.timeout(LONG):
                idle = asyncio.ensure_future(bus.idle())
                while not idle.done():
                    await clock.advance(1)
            await idle
        assert await notes(bus) == [0, 1, 2, 3]
        assert sorted(set(heard)) == [0, 1, 2, 3]
        assert await bus.dead_letters() == []


async def test_where_the_store_keeps_what_waits_it_comes_again_and_is_counted_there(tmp_path: Path) -> None:
    it = Station(tmp_path, failures=99, redeliver=None, requeue=fg.Requeue(2, delay=5))
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        for again in (1, 2):
            await it.ends(bus, redelivered=again, waiting=1)
            [row] = await it.parked()
            assert row.redeliveries == again and it.tried_at <= row.due - 5 <= it.clock.time()
            await it.clock.advance(6)
        await it.ends(bus, dead=1, handled=0)
    assert it.tries == [(1, 0), (1, 1), (1, 2)]
