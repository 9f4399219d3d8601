"""Lanes (recovery.md, Order; seed 002): order within a key, parallel across keys, bounded."""

import asyncio
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import faregate as fg
from faregate.core import handling
from faregate.core.pace import BATCH_LIMIT, Pace
from faregate.testing.clock import rest
from tests.core.rig import committed

LONG = 30  # seconds until a test that hangs is failed; never waited for when the code is right


class Step(fg.Event):
    key: str
    number: int
    pauses: int = 0
    failures: int = 0


class Watch:
    """Follows handlers as they run: how many at once, in which order, which keys together."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.most = 0
        self.overlapped: set[str] = set()
        self.started: list[tuple[str, int]] = []
        self.finished: list[tuple[str, int]] = []
        self.tries: Counter[tuple[str, int]] = Counter()

    async def run(self, step: Step) -> None:
        name = (step.key, step.number)
        self.started.append(name)
        self.running[step.key] += 1
        self.most = max(self.most, self.running.total())
        if self.running[step.key] > 1:
            self.overlapped.add(step.key)
        try:
            for _ in range(step.pauses):
                await asyncio.sleep(0)
            self.tries[name] += 1
            if self.tries[name] <= step.failures:
                raise ValueError("on purpose")
        finally:
            self.running[step.key] -= 1
        self.finished.append(name)

    def starts_by_key(self) -> dict[str, list[int]]:
        by_key: dict[str, list[int]] = defaultdict(list)
        for key, number in self.started:
            by_key[key].append(number)
        return by_key


def numbered(keys: list[tuple[str, int, int]]) -> list[Step]:
    counts: Counter[str] = Counter()
    steps = []
    for key, pauses, failures in keys:
        steps.append(Step(key=key, number=counts[key], pauses=pauses, failures=failures))
        counts[key] += 1
    return steps


def watched(steps: list[Step], **subscription: Any) -> tuple[Watch, dict[str, int]]:
    """What a subscription made of these steps."""
    watch, node = Watch(), fg.Node("worker")
    node.on(Step, source="feeder", **subscription)(watch.run)

    async def scenario() -> dict[str, int]:
        async with asyncio.timeout(LONG), fg.testing.bench(node) as bench:
            for step in steps:
                await bench.publish(step)
            await bench.settle()
            return bench.outcomes()

    return watch, asyncio.run(scenario())


plans = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 4), st.integers(0, 5)), max_size=30)


@settings(max_examples=60, deadline=None)
@given(plan=plans, lanes=st.integers(1, 4), prefetch=st.none() | st.integers(1, 8))
def test_each_key_runs_strictly_in_order_whatever_fails(
    plan: list[tuple[str, int, int]], lanes: int, prefetch: int | None
) -> None:
    steps = numbered(plan)
    policies = {"retry": fg.Retry(1, delay=0.5), "redeliver": fg.Redeliver(1)}
    watch, outcomes = watched(steps, key="key", order=fg.ByKey(lanes=lanes), prefetch=prefetch, **policies)
    allowed = 4  # two tries in each of two deliveries
    doomed = [step for step in steps if step.failures >= allowed]
    assert outcomes["dead"] == len(doomed)
    assert outcomes["handled"] == len(steps) - len(doomed)
    assert watch.most <= lanes
    assert watch.overlapped == set()
    for key, starts in watch.starts_by_key().items():
        expected = [step.number for step in steps if step.key == key for _ in range(min(step.failures + 1, allowed))]
        assert starts == expected


@settings(max_examples=40, deadline=None)
@given(plan=plans)
def test_a_serial_subscription_runs_one_at_a_time_in_publishing_order(
    plan: list[tuple[str, int, int]],
) -> None:
    steps = numbered([(key, pauses, 0) for key, pauses, _ in plan])
    watch, _ = watched(steps, order=fg.Serial())
    assert watch.most <= 1
    assert watch.finished == [(step.key, step.number) for step in steps]


@settings(max_examples=40, deadline=None)
@given(plan=plans, limit=st.integers(1, 5))
def test_a_parallel_subscription_handles_all_and_never_exceeds_its_limit(
    plan: list[tuple[str, int, int]], limit: int
) -> None:
    steps = numbered([(key, pauses, 0) for key, pauses, _ in plan])
    watch, _ = watched(steps, order=fg.Parallel(limit))
    assert watch.most <= limit
    assert sorted(watch.finished) == sorted((step.key, step.number) for step in steps)


@pytest.mark.parametrize(
    ("order", "at_once"),
    [(fg.Parallel(5), 5), (fg.ByKey(lanes=5), 5), (fg.Parallel(2), 2), (fg.ByKey(lanes=2), 2)],
    ids=["parallel 5", "lanes 5", "parallel 2", "lanes 2"],
)
async def test_all_the_lanes_are_really_used(order: Any, at_once: int) -> None:
    together = asyncio.Barrier(at_once)
    node = fg.Node("worker")

    @node.on(Step, source="feeder", key="key", order=order, redeliver=None, retry=None)
    async def work(step: Step) -> None:
        await together.wait()  # passes only when `at_once` handlers stand here

    async with asyncio.timeout(LONG):
        async with fg.Bus("memory:", nodes=[fg.Node("feeder"), node]) as bus:
            for number in range(at_once * 3):
                await bus.publish(Step(key=f"k{number}", number=number), node="feeder")
            await bus.idle()
            assert bus.outcomes()["handled"] == at_once * 3


@pytest.mark.parametrize("prefetch", [None, 2, 10])  # fewer than the lanes would bound the lanes
async def test_a_busy_key_does_not_hold_the_others(prefetch: int | None) -> None:
    started, release, others = asyncio.Event(), asyncio.Event(), asyncio.Event()
    finished: list[tuple[str, int]] = []
    node = fg.Node("worker")
    options: dict[str, Any] = {} if prefetch is None else {"prefetch": prefetch}

    @node.on(Step, source="feeder", key="key", order=fg.ByKey(lanes=2), **options)
    async def work(step: Step) -> None:
        if step.key == "busy" and step.number == 0:
            started.set()
            await release.wait()
        finished.append((step.key, step.number))
        if step == Step(key="other", number=4):
            others.set()

    async with asyncio.timeout(LONG):
        async with fg.Bus("memory:", nodes=[fg.Node("feeder"), node]) as bus:
            await bus.publish(Step(key="busy", number=0), node="feeder")
            await started.wait()
            for number in range(1, 200):
                await bus.publish(Step(key="busy", number=number), node="feeder")
            for number in range(5):
                await bus.publish(Step(key="other", number=number), node="feeder")
            await others.wait()
            assert finished == [("other", number) for number in range(5)]
            release.set()
            await bus.idle()

    assert finished[5:] == [("busy", number) for number in range(200)]


class Note(fg.Event):
    number: int


async def test_a_key_goes_on_when_its_message_has_ended_though_its_batch_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two messages are taken together. When enough is sent, what has ended is settled, and the rest follows."""
    monkeypatch.setattr(handling, "_MOST_OUTPUTS", 1)
    monkeypatch.setattr(Pace, "batch", BATCH_LIMIT)
    overtaken, worker = asyncio.Event(), fg.Node("worker")

    @worker.on(Step, source="feeder", key="key", order=fg.ByKey(lanes=3))
    async def handle(step: Step) -> Note | None:
        if step.key == "b":
            await overtaken.wait()
        elif step.number:
            overtaken.set()
        return Note(number=step.number) if step.key == "a" else None

    async with fg.Bus("memory:", nodes=[worker, fg.Node("feeder")]) as bus:
        await bus.pause("worker", Step)
        steps = [Step(key="warm", number=0), *numbered([("a", 0, 0), ("b", 0, 0), ("a", 0, 0)])]
        await bus.publish(steps[0], node="feeder")
        await bus.resume("worker", Step)
        await bus.idle()  # a lane learns only by working that batches may be full
        await bus.pause("worker", Step)
        await bus.publish_many(steps[1:], node="feeder")
        await bus.resume("worker", Step)
        await asyncio.wait_for(bus.idle(), LONG)


async def test_a_key_alone_makes_the_order_by_key() -> None:
    watch = Watch()
    node = fg.Node("worker")

    @node.on(Step, source="feeder", key="key")
    async def work(step: Step) -> None:
        await watch.run(step)

    steps = numbered([(key, 200, 0) for key in "aabbabab"])
    async with fg.testing.bench(node) as bench:
        for step in steps:
            await bench.publish(step)
        await bench.settle()

    assert watch.starts_by_key() == {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}
    assert watch.overlapped == set()
    assert watch.most == 2


async def finishing_order(order: Any) -> list[tuple[str, int]]:
    """a0 fails once and waits ten seconds for its redelivery, with a1 behind it and b0 beside it."""
    watch = Watch()
    node = fg.Node("worker")

    @node.on(Step, source="feeder", key="key", order=order, retry=None, redeliver=fg.Redeliver(10, 10))
    async def work(step: Step) -> None:
        await watch.run(step)

    async with fg.testing.bench(node) as bench:
        for step in numbered([("a", 0, 1), ("a", 0, 0), ("b", 0, 0)]):
            await bench.publish(step)
        await bench.settle()
        assert bench.outcomes()["handled"] == 3
    return watch.finished


async def test_a_message_waiting_for_redelivery_keeps_its_key_waiting() -> None:
    assert await finishing_order(fg.ByKey(lanes=2)) == [("b", 0), ("a", 0), ("a", 1)]


async def test_without_strictness_later_messages_of_the_key_pass() -> None:
    finished = await finishing_order(fg.ByKey(lanes=2, strict=False))
    assert finished[-1] == ("a", 0)
    assert sorted(finished[:2]) == [("a", 1), ("b", 0)]


async def test_a_dead_letter_lets_its_key_go_on() -> None:
    watch = Watch()
    node = fg.Node("worker")

    @node.on(Step, source="feeder", key="key", retry=None, redeliver=fg.Redeliver(10))
    async def work(step: Step) -> None:
        await watch.run(step)

    async with fg.testing.bench(node) as bench:
        for step in numbered([("a", 0, 99), ("a", 0, 0), ("a", 0, 0)]):
            await bench.publish(step)
        await bench.settle()
        assert len(bench.dead_letters()) == 1
    assert watch.started == [("a", 0), ("a", 0), ("a", 1), ("a", 2)]


async def test_a_message_waiting_for_redelivery_frees_its_lane() -> None:
    watch = Watch()
    node = fg.Node("worker")

    @node.on(
        Step,
        source="feeder",
        key="key",
        order=fg.ByKey(lanes=1),
        prefetch=1,
        retry=None,
        redeliver=fg.Redeliver(1000),
    )
    async def work(step: Step) -> None:
        await watch.run(step)

    async with fg.testing.bench(node) as bench:
        for step in numbered([("a", 0, 1), ("b", 0, 1), ("c", 0, 1), ("d", 0, 0)]):
            await bench.publish(step)
        await bench.settle()
        assert bench.outcomes()["handled"] == 4
    assert watch.finished[0] == ("d", 0)


async def test_one_subscriptions_busy_lane_does_not_hold_another_subscription() -> None:
    class Other(fg.Event):
        number: int

    started, release, passed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    node = fg.Node("worker")

    @node.on(Step, source="feeder", order=fg.Serial())
    async def work(step: Step) -> None:
        started.set()
        await release.wait()

    async def note(other: Any) -> None:
        passed.set()

    node.on(Other, source="feeder", order=fg.Serial())(note)
    async with asyncio.timeout(LONG):
        async with fg.Bus("memory:", nodes=[fg.Node("feeder"), node]) as bus:
            await bus.publish(Step(key="a", number=0), node="feeder")
            await started.wait()
            await bus.publish(Other(number=1), node="feeder")
            await passed.wait()
            assert bus.outcomes()["handled"] <= 1  # the first is still running
            release.set()
            await bus.idle()
            assert bus.outcomes()["handled"] == 2


# --- serial, across failures ------------------------------------------------------------------------------


class Serially:
    """A serial subscription whose message 0 fails, and which tries were made in which order."""

    def __init__(self, failures: int = 4, *, later: float = 50, **options: Any) -> None:
        self.tries: list[int] = []
        self.node = fg.Node("worker")
        self.feeder = fg.Node("feeder")

        @self.node.on(Step, source="feeder", order=fg.Serial(), redeliver=fg.Redeliver(later, later, later), **options)
        async def work(step: Step) -> None:
            self.tries.append(step.number)
            if step.number == 0 and self.tries.count(0) <= failures:
                raise RuntimeError("not now")

    def bus(self, url: str, store: str | None, clock: fg.testing.FakeClock) -> fg.Bus:
        more = {} if store is None else {"store": store}
        return fg.Bus(url, nodes=[self.feeder, self.node], clock=clock, drain_seconds=0, **more)


async def until(clock: fg.testing.FakeClock, done: Any) -> None:
    """Let time pass until that holds."""
    async with asyncio.timeout(LONG):
        while not done():
            await clock.advance(1.0)
            await asyncio.sleep(0.001)  # journals and stores have threads of their own


@pytest.mark.parametrize("later", [0, 50])
@pytest.mark.parametrize("store", [None, "memory:"])
async def test_a_message_that_waits_for_its_later_try_holds_all_behind_it_in_a_serial_subscription(
    store: str | None, later: float
) -> None:
    it, clock = Serially(later=later, retry=fg.Retry(1, delay=0.1)), fg.testing.FakeClock()
    async with it.bus("memory:", store, clock) as bus:
        await bus.publish_many([Step(key="x", number=number) for number in range(600)], node="feeder")
        await until(clock, lambda: len(it.tries) >= 604)
        assert it.tries == [0, 0, 0, 0, *range(600)]
        assert bus.outcomes() == {
            "handled": 600,
            "skipped": 0,
            "filtered": 0,
            "duplicate": 0,
            "redelivered": 2,
            "dead": 0,
        }


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_a_serial_subscription_goes_on_when_the_message_it_waits_for_is_a_dead_letter(store: str | None) -> None:
    it, clock = Serially(failures=1_000, retry=None), fg.testing.FakeClock()
    async with it.bus("memory:", store, clock) as bus:
        await bus.publish_many([Step(key="x", number=number) for number in range(3)], node="feeder")
        await until(clock, lambda: len(it.tries) >= 6)
        assert it.tries == [0, 0, 0, 0, 1, 2]
        assert len(await bus.dead_letters()) == 1


async def test_a_serial_subscription_goes_on_when_the_message_it_waits_for_expires() -> None:
    it, clock = Serially(later=1_000, retry=None, expires=100.0), fg.testing.FakeClock()
    async with it.bus("memory:", None, clock) as bus:
        await bus.publish(Step(key="x", number=0), node="feeder")
        await until(clock, lambda: it.tries == [0])
        await clock.advance(50)
        await bus.publish(Step(key="x", number=1), node="feeder")
        await until(clock, lambda: len(it.tries) == 2)
        assert it.tries == [0, 1] and len(await bus.dead_letters()) == 1


@pytest.mark.parametrize("store", [False, True])
async def test_a_serial_subscription_still_waits_after_a_restart(store: bool, tmp_path: Path) -> None:
    it, clock = Serially(failures=1, retry=None), fg.testing.FakeClock()
    places = (f"journal:{tmp_path}/journal", f"sqlite:{tmp_path}/store.db" if store else None, clock)
    async with it.bus(*places) as bus:
        await bus.publish_many([Step(key="x", number=number) for number in range(600)], node="feeder")
        async with asyncio.timeout(LONG):
            while not bus.outcomes()["redelivered"]:
                await rest()
    async with it.bus(*places) as bus:
        await bus.publish(Step(key="x", number=600), node="feeder")
        await clock.advance(40)
        assert it.tries == [0]
        await until(clock, lambda: len(it.tries) >= 602)
    assert it.tries == [0, *range(601)]


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_a_handler_that_cancels_its_own_lane_is_tried_again_and_overtaken_by_nobody(store: str | None) -> None:
    tries: list[int] = []
    clock = fg.testing.FakeClock()
    node = fg.Node("worker", schema="create table if not exists notes(number integer)" if store else None)

    @node.on(Step, source="feeder", order=fg.Serial())
    async def work(step: Step, ctx: fg.Context) -> None:
        tries.append(step.number)
        if store:
            await ctx.db.execute("insert into notes values (?)", (step.number,))
        if step.number == 1 and tries.count(1) < 3:
            lane = asyncio.current_task()
            assert lane is not None
            lane.cancel()
            await asyncio.sleep(0)

    more = {} if store is None else {"store": store}
    async with fg.Bus("memory:", nodes=[fg.Node("feeder"), node], clock=clock, **more) as bus:
        await bus.publish_many([Step(key="x", number=number) for number in range(4)], node="feeder")
        await until(clock, lambda: len(tries) >= 6)
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == 4
        if store:
            assert await committed(bus, "select number from notes order by number") == [(0,), (1,), (2,), (3,)]
    assert [number for number in tries if number != 0] == [1, 1, 1, 2, 3]
