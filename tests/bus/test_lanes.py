"""Lanes (seed 002): order within a key, at most n at once, a busy key holds nobody else, a bounded buffer, closing.

The transport here withholds no keys, as most brokers do not: it hands out messages in order of position, as many as
its window allows, and returns a released one to its position when the release has arrived.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faregate.bus.lanes import Lanes
from faregate.core.pace import BATCH_LIMIT
from faregate.errors import StaleLock
from faregate.message import Envelope
from faregate.testing.clock import rest

LONG = 20
"""Seconds until a scenario that hangs is failed; never waited for when the code is right."""


class Handed:
    """One delivery of the fake transport."""

    lock_seconds = 60.0
    redelivered = False
    redeliveries = 0

    def __init__(self, transport: "FakeTransport", position: int) -> None:
        self._transport = transport
        self.position = position
        self.key = transport.keys[position]
        self.envelope = Envelope(publication_id=f"message-{position}")
        self.ended = False

    def __repr__(self) -> str:
        return f"{self.key}@{self.position}"

    async def settle(self, outcome: str = "handled") -> None:
        self._end()
        self._transport.settled.append(self.position)
        self._transport.pump_soon()

    async def release(self, *, begun: bool = True) -> None:
        self._end()
        self._transport.releases += 1
        for _ in range(self._transport.release_turns):
            await asyncio.sleep(0)
        self._transport.waiting.append(self.position)
        self._transport.pump_soon()

    def _end(self) -> None:
        if self.ended:
            raise StaleLock("it was ended already")
        self.ended = True
        self._transport.out -= 1


class FakeTransport:
    def __init__(self, keys: list[str | None], *, window: int, release_turns: int = 0) -> None:
        self.keys = keys
        self.waiting = list(range(len(keys)))
        self.settled: list[int] = []
        self.out = 0
        self.releases = 0
        self.release_turns = release_turns
        self.lanes: Lanes | None = None
        self.done = asyncio.Event()
        self._window = window
        self._scheduled = False

    def pump_soon(self) -> None:
        if len(self.settled) == len(self.keys):
            self.done.set()
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        assert self.lanes is not None
        self.waiting.sort()
        while self.waiting and self.out < self._window:
            self.out += 1
            self.lanes.submit(Handed(self, self.waiting.pop(0)))


class Watch:
    """The handler: works for some turns of the loop, and follows what runs together and in which order."""

    def __init__(self, turns: list[int]) -> None:
        self.turns = turns
        self.running: Counter[Any] = Counter()
        self.most = 0
        self.most_of_a_key = 0
        self.most_waiting = 0
        self.started: list[int] = []
        self.lanes: Lanes | None = None

    async def run(self, deliveries: list[Any]) -> list[Any]:
        for delivery in deliveries:
            await self.run_one(delivery)
        return []

    async def run_one(self, delivery: Any) -> None:
        self.started.append(delivery.position)
        self.running[delivery.key] += 1
        self.most = max(self.most, self.running.total())
        if delivery.key is not None:
            self.most_of_a_key = max(self.most_of_a_key, self.running[delivery.key])
        try:
            for _ in range(self.turns[delivery.position]):
                await asyncio.sleep(0)
                if self.lanes is not None:
                    self.most_waiting = max(self.most_waiting, waiting(self.lanes))
        finally:
            self.running[delivery.key] -= 1
        await delivery.settle()


def waiting(lanes: Lanes) -> int:
    return sum(len(behind) for behind in lanes._keys.values() if behind)


async def work_off(
    plan: list[tuple[str | None, int]],
    *,
    size: int,
    window: int,
    by_key: bool = True,
    release_turns: int = 0,
) -> tuple[FakeTransport, Watch]:
    """Run a plan of (key, turns of work) through lanes until everything is settled."""
    transport = FakeTransport([key for key, _ in plan], window=window, release_turns=release_turns)
    watch = Watch([turns for _, turns in plan])
    transport.lanes = watch.lanes = Lanes(size, watch.run, by_key=by_key)
    transport.pump_soon()
    if plan:
        await asyncio.wait_for(transport.done.wait(), LONG)
    await transport.lanes.close(LONG)
    await rest(release_turns + 2)
    return transport, watch


def by_key(plan: list[tuple[str | None, int]], positions: list[int]) -> dict[str, list[int]]:
    found = defaultdict(list)
    for position in positions:
        key = plan[position][0]
        if key is not None:
            found[key].append(position)
    return dict(found)


plans = st.lists(st.tuples(st.sampled_from([None, "a", "a", "b", "c"]), st.integers(0, 4)), max_size=40)
sizes = st.integers(1, 4)
windows = st.integers(1, 12)


@settings(max_examples=150, deadline=None)
@given(plan=plans, size=sizes, window=windows)
def test_each_key_runs_in_order_and_one_at_a_time(plan: list[tuple[str | None, int]], size: int, window: int) -> None:
    transport, watch = asyncio.run(work_off(plan, size=size, window=window))
    assert sorted(transport.settled) == list(range(len(plan))), "lost or doubled"
    for key, positions in by_key(plan, watch.started).items():
        assert positions == sorted(positions), f"{key} ran as {positions}"
    assert watch.most_of_a_key <= 1


@settings(max_examples=100, deadline=None)
@given(plan=plans, size=sizes, window=windows, keyed=st.booleans())
def test_at_most_as_many_run_as_there_are_lanes_and_the_buffer_is_bounded(
    plan: list[tuple[str | None, int]], size: int, window: int, keyed: bool
) -> None:
    transport, watch = asyncio.run(work_off(plan, size=size, window=window, by_key=keyed))
    assert watch.most <= size
    assert watch.most_waiting <= window
    assert sorted(transport.settled) == list(range(len(plan)))


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 30), size=sizes, window=windows)
def test_without_keys_all_lanes_are_used(count: int, size: int, window: int) -> None:
    _, watch = asyncio.run(work_off([(None, 3)] * count, size=size, window=window, by_key=False))
    assert watch.most == min(count, size, window)
    assert watch.started == list(range(count)), "not taken in the order of submission"


# --- examples ---------------------------------------------------------------------------------------------


class Gate:
    """A handler that the test lets go one by one."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.finished: list[Any] = []
        self.cancelled: list[Any] = []
        self._gates: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def run(self, deliveries: list[Any]) -> list[Any]:
        for delivery in deliveries:
            await self.run_one(delivery)
        return []

    async def run_one(self, delivery: Any) -> None:
        self.started.append(delivery.position)
        try:
            await self._gates[delivery.position].wait()
        except asyncio.CancelledError:
            self.cancelled.append(delivery.position)
            raise
        self.finished.append(delivery.position)

    async def let(self, position: int) -> None:
        self._gates[position].set()
        await rest()


def gated(
    keys: list[str | None], *, size: int = 2, run: Callable[[Any], Awaitable[None]] | None = None
) -> tuple[Gate, Lanes, list[Handed]]:
    gate = Gate()
    lanes = Lanes(size, run or gate.run, by_key=True)
    transport = FakeTransport(keys, window=len(keys))
    transport._scheduled = True  # this one delivers nothing by itself
    transport.out = len(keys)
    handed = [Handed(transport, position) for position in transport.waiting]
    transport.waiting.clear()
    return gate, lanes, handed


async def test_busy_counts_what_runs() -> None:
    gate, lanes, handed = gated([None] * 3, size=2)
    for delivery in handed:
        lanes.submit(delivery)
    await rest()
    assert lanes.busy == 2
    for position in range(3):
        await gate.let(position)
    assert lanes.busy == 0
    assert gate.finished == [0, 1, 2]
    await lanes.close(LONG)


async def test_free_lanes_begin_in_the_same_turn_of_the_event_loop_and_no_more_than_are_needed() -> None:
    gate, lanes, handed = gated([None] * 20, size=30)
    lanes.batch = 50
    for delivery in handed[:10]:
        lanes.submit(delivery)
    await asyncio.sleep(0)
    assert gate.started == list(range(10))
    assert len(lanes._tasks) == 10
    for position in range(10):
        await gate.let(position)
    for delivery in handed[10:]:
        lanes.submit(delivery)
    await asyncio.sleep(0)
    assert sorted(gate.started) == list(range(20))
    assert len(lanes._tasks) == 10, "those that were free have taken them"
    for position in range(10, 20):
        await gate.let(position)
    await lanes.close(LONG)


async def test_lanes_that_never_wait_let_the_event_loop_go_on() -> None:
    async def run(deliveries: list[Any]) -> list[Any]:
        (delivery,) = deliveries
        ran.append(delivery.position)
        return []

    ran: list[int] = []
    _, lanes, handed = gated([None] * 1000, size=1, run=run)
    for delivery in handed:
        lanes.submit(delivery)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 0 < len(ran) < 500, f"{len(ran)} ran in two turns"
    await rest(50)
    assert ran == list(range(1000))
    await lanes.close(LONG)


@pytest.mark.parametrize("full_batches", [None, 2])
async def test_while_many_lanes_are_at_work_none_takes_all_that_is_ready(full_batches: int | None) -> None:
    """However fast messages seem to be. Where transactions follow each other, large ones are better."""
    gate, _, handed = gated([f"key-{number}" for number in range(120)])
    taken: list[int] = []

    async def run(deliveries: list[Any]) -> list[Any]:
        taken.append(len(deliveries))
        return await gate.run(deliveries)

    lanes = Lanes(20, run, by_key=True, full_batches=full_batches)
    for delivery in handed[:20]:
        lanes.submit(delivery)
    await rest()
    assert taken == [1] * 20, "all lanes are at work"
    lanes.batch = BATCH_LIMIT
    for delivery in handed[20:]:
        lanes.submit(delivery)
    await gate.let(0)
    assert taken[20:] == ([15] if full_batches is None else [100])
    for position in range(120):
        await gate.let(position)
    await lanes.close(LONG)


async def test_full_batches_that_would_wait_for_each_other_are_not_begun_and_those_behind_stay_full() -> None:
    started: list[list[Any]] = []
    ends: list[asyncio.Event] = []

    async def run(deliveries: list[Any]) -> list[Any]:
        started.append(deliveries)
        ends.append(asyncio.Event())
        await ends[-1].wait()
        return []

    _, _, handed = gated([None] * 4 * BATCH_LIMIT)
    lanes = Lanes(10, run, by_key=True, full_batches=2)
    lanes.batch = BATCH_LIMIT
    for delivery in handed:
        lanes.submit(delivery)
    await rest()
    assert [len(batch) for batch in started] == [BATCH_LIMIT] * 2
    ends[0].set()
    await rest()
    assert [len(batch) for batch in started] == [BATCH_LIMIT] * 3, "the lane that ended takes the next one"
    lanes.put_back(started[1][1:])
    await rest()
    sizes = [len(batch) for batch in started]
    assert sizes == [BATCH_LIMIT, 1, BATCH_LIMIT, BATCH_LIMIT, BATCH_LIMIT - 1], "a slow handler holds up nobody"
    for end in ends:
        end.set()
    await lanes.close(LONG)


@pytest.mark.parametrize("keys", [[None, None, None], ["a", "a", "a"]])
async def test_a_lane_that_dies_does_not_stall_what_is_ready(
    keys: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    async def run(deliveries: list[Any]) -> list[Any]:
        (delivery,) = deliveries
        ran.append(delivery.position)
        if delivery.position == 0:
            raise ConnectionError("settling failed")
        return []

    ran: list[int] = []
    _, lanes, handed = gated(keys, size=1, run=run)
    with caplog.at_level(logging.CRITICAL, "faregate.bus"):
        for delivery in handed:
            lanes.submit(delivery)
        await rest()
    assert "a lane failed" in caplog.text
    await lanes.close(LONG)
    assert ran == [0, 1, 2], "what was ready waits for a submission that may never come"


# --- closing ----------------------------------------------------------------------------------------------


async def test_closing_starts_nothing_more_and_lets_finish_what_runs() -> None:
    gate, lanes, handed = gated([None, "a", "a", None], size=2)
    for delivery in handed:
        lanes.submit(delivery)
    await rest()
    assert gate.started == [0, 1]
    closing = asyncio.ensure_future(lanes.close(LONG))
    await rest()
    assert not closing.done(), "it did not wait for what runs"
    await gate.let(0)
    await gate.let(1)
    await asyncio.wait_for(closing, LONG)
    assert gate.finished == [0, 1]
    assert gate.started == [0, 1], "something was started while closing"
    assert lanes.busy == 0


async def test_closing_cancels_what_is_late() -> None:
    gate, lanes, handed = gated([None, "a"], size=2)
    for delivery in handed:
        lanes.submit(delivery)
    await rest()
    await lanes.close(0)
    assert sorted(gate.cancelled) == [0, 1]
    assert lanes.busy == 0


async def test_what_is_submitted_after_closing_does_not_run() -> None:
    gate, lanes, handed = gated([None, "a", "b"])
    lanes.submit(handed[0])
    await gate.let(0)
    await lanes.close(LONG)
    for delivery in handed[1:]:
        lanes.submit(delivery)
    await rest()
    assert gate.started == [0]


async def test_closing_idle_lanes_returns_at_once_and_leaves_no_task() -> None:
    gate, lanes, handed = gated([None, "a"])
    for delivery in handed:
        lanes.submit(delivery)
    for position in range(2):
        await gate.let(position)
    await asyncio.wait_for(lanes.close(LONG), LONG)
    await lanes.close(LONG)
    await rest()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_busy_key_does_not_hold_the_others() -> None:
    gate, lanes, handed = gated(["a", "a", "a", "b", None, "c"], size=2)
    for delivery in handed:
        lanes.submit(delivery)
    await rest()
    assert gate.started == [0, 3]
    await gate.let(3)
    await gate.let(4)
    assert gate.started == [0, 3, 4, 5], "what follows a busy key took a lane from the others"
    await gate.let(0)
    assert gate.started == [0, 3, 4, 5, 1]
    await lanes.close(0)
