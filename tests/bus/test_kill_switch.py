"""The kill switch of a subscription (recovery.md, Failure; seed 004, "Kill Switch"): an outage of a dependency
costs no dead letter and no hammering, and everything goes on in order when it is over."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.bus.supplied import Waiting
from faregate.errors import StoreUnavailable
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.stores.sqlite import SqliteStore
from faregate.stores.sqlite.transaction import SqliteTransaction
from faregate.testing import FakeClock
from faregate.transports.memory import MemoryTransport
from tests.bus.core_only import CoreOnly
from tests.bus.outage import SHOP, Outage, Step, effects, steps, until, worker_of
from tests.bus.parted import Parted

LANES = 10
SAMPLE = fg.KillSwitch().sample
TRIES = 3
"""Of a message, in memory."""
ORDERS = pytest.mark.parametrize(
    "order", [fg.Parallel(LANES), fg.ByKey(lanes=LANES), fg.Serial()], ids=lambda each: type(each).__name__
)


def ordered(order: Any) -> dict[str, Any]:
    return {"order": order, **({"key": "key"} if isinstance(order, fg.ByKey) else {})}


# --- the whole thing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "store"),
    [(fg.Parallel(LANES), True), (fg.ByKey(lanes=LANES), False), (fg.Parallel(100), False), (fg.Parallel(100), True)],
    ids=["with a store", "without", "many at once", "many at once with a store"],
)
async def test_an_outage_under_10_000_messages_costs_no_dead_letter_and_hardly_a_call(order: Any, store: bool) -> None:
    """Kill Switch: ten minutes. Without one 500 messages made 6,000 calls and 500 dead letters."""
    outage, clock, sent = Outage(store=store, **ordered(order)), FakeClock(), steps(10_000)
    outage.run = goes_down_after(outage, 3_000)
    where = {"store": "memory:"} if store else {}
    async with outage.bus(clock=clock, **where) as bus:
        await bus.publish_many(sent, node="shop")
        await until(lambda: worker_of(bus).switch.is_open, clock, 0.1)
        await clock.advance(600)
        assert outage.calls_while_down <= max(SAMPLE, order.lanes) + TRIES + 600 / 5, "more than in flight, and probes"
        assert bus.alarms == Counter({"kill-switch": 1})
        outage.is_down, outage.run = False, None
        await until(lambda: bus.outcomes()["handled"] == len(sent), clock)
        assert bus.outcomes()["redelivered"] == bus.outcomes()["dead"] == 0
        assert await bus.dead_letters() == []
        if store:
            assert await effects(bus) == [(each.key, each.number) for each in sent]
    assert set(outage.calls) == set(sent)
    assert outage.total == len(sent) + outage.calls_while_down


def goes_down_after(outage: Outage, calls: int) -> Any:
    async def run(step: Step, ctx: fg.Context) -> None:
        if outage.total > calls:
            outage.is_down = True
            outage.calls_while_down += 1
            raise copy(outage.error)

    return run


@pytest.mark.full
async def test_an_outage_under_10_000_messages_on_a_journal_and_a_real_clock(tmp_path: Path) -> None:
    switch = fg.KillSwitch(every=0.05)
    outage, sent = Outage(kill_switch=switch, **ordered(fg.ByKey(lanes=LANES))), steps(10_000, keys=500)
    async with outage.bus(f"journal:{tmp_path}/journal", store=f"sqlite:{tmp_path}/store.db") as bus:
        publishing = asyncio.create_task(bus.publish_many(sent, node="shop"))
        outages = 0
        while bus.outcomes()["handled"] < len(sent):
            await asyncio.sleep(0.2)
            outage.is_down = not outage.is_down
            outages += outage.is_down
        await publishing
        await bus.idle()
        assert outages and bus.outcomes()["dead"] == 0 and await bus.dead_letters() == []
        assert await effects(bus) == [(each.key, each.number) for each in sent]
    for numbers in outage.ended.values():
        assert list(dict.fromkeys(numbers)) == sorted(set(numbers)), "a key is out of order"


@pytest.mark.full
async def test_500_messages_make_no_dead_letter_where_they_made_500() -> None:
    """With the switch off: what it was like, and why it is there."""
    for switch, dead in ((False, 500), (None, 0)):
        outage, clock = Outage(store=False, kill_switch=switch), FakeClock()
        outage.is_down = True
        async with outage.bus(clock=clock) as bus:
            await bus.publish_many(steps(500), node="shop")
            await clock.advance(1_000)
            assert bus.outcomes()["dead"] == dead
            assert (outage.total == 6_000) is bool(dead)


@pytest.mark.parametrize("keys", [5, 7])
async def test_a_few_strict_keys_are_enough_to_find_an_outage(keys: int) -> None:
    """An hour: each of their first messages would have used up its redeliveries."""
    outage, clock, sent = Outage(store=False, **ordered(fg.ByKey(lanes=LANES))), FakeClock(), steps(50, keys=keys)
    outage.is_down = True
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(sent, node="shop")
        await clock.advance(3_600)
        assert bus.outcomes()["dead"] == 0 and worker_of(bus).switch.is_open
        assert outage.calls_while_down <= 2 * SAMPLE + 3_600 / 5
        outage.is_down = False
        await until(lambda: bus.outcomes()["handled"] == len(sent), clock)
    for numbers in outage.ended.values():
        assert numbers == sorted(numbers)


async def test_one_that_is_out_of_tries_waits_for_those_between_two_tries() -> None:
    """They fail at moments of their own: when the first has used up its tries all others wait for their next one."""
    clock = FakeClock()

    async def run(step: Step, ctx: fg.Context) -> None:
        if outage.calls[step] == 1:
            await clock.sleep(step.number / 100)
        raise ConnectionError("the bank does not answer")

    outage = Outage(store=False, run=run, order=fg.Parallel(LANES))
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(8), node="shop")
        await until(lambda: outage.total >= SAMPLE, clock, 0.01)
        await clock.advance(1)
        assert worker_of(bus).switch.is_open and bus.outcomes()["redelivered"] == 0
        outage.run = None
        await until(lambda: bus.outcomes()["handled"] == 8, clock)


async def test_a_handful_that_always_fails_is_dead_lettered_and_trips_nothing() -> None:
    outage, clock = Outage(store=False, order=fg.Parallel(LANES)), FakeClock()
    outage.is_down = True
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(4), node="shop")
        await until(lambda: bus.outcomes()["dead"] == 4, clock, 5)
        assert worker_of(bus).switch.trips == 0 and outage.total == 4 * 4 * TRIES


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_a_few_that_always_fail_do_not_stop_those_that_come_later(store: str | None) -> None:
    """They are in doubt, with patient retries, when the others come: one of those shows that all is well."""

    async def run(step: Step, ctx: fg.Context) -> None:
        if step.number < 6:
            raise ConnectionError("this one always fails")

    outage = Outage(store=store is not None, run=run, order=fg.Parallel(LANES), retry=fg.Retry(3, delay=2))
    clock, sent = FakeClock(), steps(300)
    async with outage.bus(clock=clock, store=store) as bus:
        await bus.publish_many(sent[:6], node="shop")
        await until(lambda: outage.total >= 7, clock, 0.1)
        await bus.publish_many(sent[6:], node="shop")
        began = clock.monotonic()
        await until(lambda: bus.outcomes()["handled"] == 294, clock, 0.1)
        assert clock.monotonic() - began < 15 and worker_of(bus).switch.trips == 0


# --- what trips it -----------------------------------------------------------------------------------------------


def raises(step: Step, ctx: fg.Context) -> None:
    raise fg.Unavailable("the bank is closed", retry_after=40)


def trips(step: Step, ctx: fg.Context) -> None:
    ctx.trip("the bank is closed", seconds=40)


def raises_among_others(step: Step, ctx: fg.Context) -> None:
    raise ExceptionGroup("tasks", [fg.Permanent("no"), fg.Unavailable("the bank is closed", retry_after=40)])


@ORDERS
@pytest.mark.parametrize("do", [raises, trips, raises_among_others])
async def test_a_handler_trips_it_at_once_and_says_when_to_look(do: Any, order: Any) -> None:
    node, clock = fg.Node("worker"), FakeClock()
    times: list[float] = []
    handled: list[int] = []
    closed = True

    @node.on(Step, source="shop", retry=None, redeliver=None, kill_switch=False, **ordered(order))
    def work(step: Step, ctx: fg.Context) -> None:
        times.append(clock.time())
        if closed:
            do(step, ctx)
        handled.append(step.number)

    async with fg.testing.bench(node) as bench:
        clock = bench.clock
        for step in steps(30, keys=1):
            await bench.publish(step)
        await bench.advance(39)
        worker = worker_of(bench.bus)
        assert worker.pause_reason == "kill switch: Unavailable: the bank is closed"
        assert worker.paused and len(times) <= LANES
        before = len(times)
        await bench.advance(2)
        assert len(times) == before + 1, "one message is tried, when it was asked for"
        closed = False
        await bench.settle()
        assert worker.pause_reason is None
        assert (bench.dead_letters(), bench.outcomes()["redelivered"]) == ([], 0)
        assert bench.outcomes()["handled"] == 30
    if not isinstance(order, fg.Parallel):
        assert handled == list(range(30))


class Bank:
    """A connection that a provider opens, or a middleware tests."""

    is_down = True
    asked = 0

    def connect(self) -> "Bank":
        self.asked += 1
        if self.is_down:
            raise ConnectionRefusedError("the bank does not answer")
        return self


@pytest.mark.parametrize("where", ["provider", "middleware"])
async def test_a_dependency_that_a_provider_or_a_middleware_finds_down_counts(where: str) -> None:
    node, bank = fg.Node("worker"), Bank()

    @node.provides
    async def open_bank() -> AsyncIterator[Bank]:
        yield bank.connect() if where == "provider" else bank

    @node.use
    async def check(ctx: fg.Context, call_next: Any) -> None:
        if where == "middleware":
            bank.connect()
        await call_next()

    @node.on(Step, source="shop")
    async def work(step: Step, bank: Bank) -> None:
        pass

    async with fg.testing.bench(node) as bench:
        for step in steps(50):
            await bench.publish(step)
        await bench.advance(60)
        assert worker_of(bench.bus).switch.is_open
        assert bank.asked <= 20 + LANES + 60 / 5
        bank.is_down = False
        await bench.settle()
        assert bench.outcomes()["handled"] == 50 and bench.dead_letters() == []


async def test_a_store_that_a_handler_of_a_node_without_one_finds_away_trips_it() -> None:
    """One of another node, say, through `fg.outbox`."""
    outage, clock = Outage(store=False, retry=fg.Retry(1), redeliver=None), FakeClock()
    outage.is_down, outage.error = True, StoreUnavailable("the database of orders is away")
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(30), node="shop")
        await clock.advance(60)
        assert worker_of(bus).pause_reason == "kill switch: StoreUnavailable: the database of orders is away"
        assert bus.alarms == Counter({"kill-switch": 1})
        outage.is_down = False
        await until(lambda: bus.outcomes()["handled"] == 30, clock)
        assert bus.outcomes()["dead"] == bus.outcomes()["redelivered"] == 0


async def test_a_node_without_a_store_that_cannot_send_is_switched_off() -> None:
    """Lost connections: nothing is lost with the broker, and no message pays for it."""

    class Away(MemoryTransport):
        is_away = False

        async def publish(self, envelopes: Sequence[Envelope]) -> None:
            if self.is_away and envelopes[0].source == "worker":
                raise fg.BrokerUnavailable("no broker answers", retry_after=5)
            await super().publish(envelopes)

    class Told(fg.Event):
        number: int

    node, hearing, clock = fg.Node("worker"), fg.Node("hearing"), FakeClock()
    calls = 0
    heard: list[int] = []

    @node.on(Step, source="shop", retry=None, redeliver=None)
    async def work(step: Step) -> Told:
        nonlocal calls
        calls += 1
        return Told(number=step.number)

    @hearing.on(Told, source="worker")
    async def hear(told: Told) -> None:
        heard.append(told.number)

    transport = Away(clock=clock)
    transport.is_away = True
    async with fg.Bus(transport, nodes=[SHOP, node, hearing], clock=clock, stall_seconds=None) as bus:
        await bus.publish_many(steps(100), node="shop")
        await clock.advance(60)
        assert worker_of(bus).pause_reason == "kill switch: BrokerUnavailable: no broker answers"
        assert calls <= LANES + 60 / 5
        transport.is_away = False
        await until(lambda: len(heard) == 100, clock)
        assert bus.outcomes()["dead"] == bus.outcomes()["redelivered"] == 0
    assert sorted(heard) == list(range(100))


@pytest.mark.parametrize(
    "error", [fg.Permanent("a closed account"), ValueError("not a number")], ids=["Permanent", "a mistake"]
)
async def test_a_permanent_failure_never_trips_it(error: Exception) -> None:
    """Permanent failures, and local ones: they are the message's own, however many there are."""
    outage, clock = Outage(store=False, retry=fg.Retry(2), redeliver=None), FakeClock()
    outage.is_down, outage.error = True, error
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(60), node="shop")
        await until(lambda: bus.outcomes()["dead"] == 60, clock)
        assert worker_of(bus).switch.trips == 0 and bus.alarms["kill-switch"] == 0


async def test_a_handler_that_fails_now_and_then_does_not_trip_it(store_url: str) -> None:
    async def run(step: Step, ctx: fg.Context) -> None:
        if step.number % 5 == 0 and outage.calls[step] == 1:
            raise OSError("now and then")

    outage = Outage(run=run, retry=fg.Retry(2, delay=0.001))
    async with outage.bus(store=store_url) as bus:
        await bus.publish_many(steps(1_000), node="shop")
        await bus.idle(timeout=120)
        assert worker_of(bus).switch.trips == 0
        assert bus.outcomes()["handled"] == 1_000


@ORDERS
@pytest.mark.parametrize("store", [None, "memory:"])
async def test_a_handler_whose_second_try_succeeds_never_trips_it_and_goes_on_after_an_outage(
    order: Any, store: str | None
) -> None:
    """A message has failed when its tries are used up, also in a batch and also on trial."""

    async def run(step: Step, ctx: fg.Context) -> None:
        if ctx.attempt == 1:
            raise OSError("the first try always fails")

    outage, clock, sent = Outage(store=store is not None, run=run, **ordered(order)), FakeClock(), steps(200, keys=200)
    async with outage.bus(clock=clock, store=store) as bus:
        await bus.publish_many(sent[:100], node="shop")
        await until(lambda: bus.outcomes()["handled"] == 100, clock, 0.1)
        assert worker_of(bus).switch.trips == 0 and outage.total == 200
        worker_of(bus).switch.failed(fg.Unavailable("an outage"))
        await bus.publish_many(sent[100:], node="shop")
        await until(lambda: bus.outcomes()["handled"] == 200, clock, 0.1)
        assert worker_of(bus).switch.trips == 1 and not worker_of(bus).switch.is_open
        assert bus.outcomes()["redelivered"] == bus.outcomes()["dead"] == 0
    assert outage.total == 400


# --- what a trip does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_what_was_fetched_goes_back_and_what_runs_ends(store: str | None) -> None:
    """In flight: what fails goes back and uses up no try, what succeeds is handled, what had not begun never did."""
    node, clock = fg.Node("worker"), FakeClock()
    running: dict[int, asyncio.Future[None]] = {}
    tries: list[tuple[int, int, int]] = []

    @node.on(Step, source="shop", order=fg.Parallel(3), retry=fg.Retry(5, delay=1), redeliver=None)
    async def work(step: Step, ctx: fg.Context) -> None:
        tries.append((step.number, ctx.attempt, ctx.redeliveries))
        if step.number < 3:
            if step.number not in running:
                running[step.number] = asyncio.get_running_loop().create_future()
            await running[step.number]

    async with fg.Bus("memory:", nodes=[SHOP, node], store=store, clock=clock, stall_seconds=None) as bus:
        await bus.publish_many(steps(50), node="shop")
        await until(lambda: len(running) == 3, clock, 0.01)
        worker = worker_of(bus)
        running[0].set_exception(fg.Unavailable("down", retry_after=100))
        await until(lambda: worker.switch.is_open, clock, 0.01)
        running[1].set_exception(TimeoutError("in flight"))
        running[2].set_result(None)
        await clock.advance(50)
        assert [number for number, *_ in tries] == [0, 1, 2], "something began, or was tried again"
        assert bus.outcomes()["handled"] == 1 and worker.busy == 0
        for number in (0, 1):
            running[number] = asyncio.get_running_loop().create_future()
            running[number].set_result(None)
        await until(lambda: bus.outcomes()["handled"] == 50, clock)
        assert (bus.outcomes()["redelivered"], bus.outcomes()["dead"]) == (0, 0)
    again = [each for each in tries if each[0] in (0, 1)][2:]
    assert sorted(again) == [(0, 1, 0), (1, 1, 0)]


async def test_tries_in_memory_do_not_go_on_when_others_trip_it() -> None:
    outage, clock = Outage(store=False, order=fg.Parallel(4), retry=fg.Retry(100, delay=10)), FakeClock()
    outage.is_down = True
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(4), node="shop")
        await until(lambda: outage.total == 4, clock, 0.1)
        worker_of(bus).switching.store_is_down("by somebody else")
        await clock.advance(4)
        before = outage.total
        await clock.advance(100)
        # There is no store to ask, so one message is tried every 5 seconds, and once each.
        assert outage.total - before <= 100 / 5 + 1


async def test_a_claim_on_a_business_key_is_free_again_when_its_message_goes_back() -> None:
    outage, clock = Outage(identity="number", claim="eager", retry=None, redeliver=None), FakeClock()
    outage.is_down, outage.error = True, fg.Unavailable("down", retry_after=1)
    async with outage.bus(clock=clock, store="memory:") as bus:
        await bus.publish_many(steps(5), node="shop")
        await until(lambda: worker_of(bus).switch.is_open, clock, 0.1)
        outage.is_down = False
        await until(lambda: bus.outcomes()["handled"] == 5, clock)
        assert len(await effects(bus)) == 5


@pytest.mark.parametrize("how", ["resume", "store"])
async def test_what_was_fetched_goes_back_even_if_somebody_resumes_or_the_store_goes_meanwhile(
    how: str, tmp_path: Path
) -> None:
    """A trip gives back what was fetched, one after another; to end that half-way would leave the rest nowhere."""
    clock, phase, count = FakeClock(), "first", 40
    reader, handled, tripped = fg.Node("worker"), set[int](), asyncio.Event()

    @reader.on(Step, source="shop", retry=None, redeliver=fg.Redeliver(10, 20, 30), order=fg.Parallel(2))
    async def work(step: Step) -> None:
        nonlocal phase
        if phase == "first":
            raise ValueError("not yet")
        if phase == "trip":
            phase = "well"
            tripped.set()
            raise fg.Unavailable("down", retry_after=1)
        handled.add(step.number)

    store = SqliteStore(f"sqlite:{tmp_path}/store.db", clock=clock)
    async with fg.Bus(
        CoreOnly(clock), nodes=[SHOP, reader], store={"worker": store}, clock=clock, stall_seconds=None
    ) as bus:
        await bus.publish_many(steps(count), node="shop")
        await until(lambda: bus.outcomes()["redelivered"] == count, clock, 0.001)
        phase, worker = "trip", worker_of(bus)

        async def interfere() -> None:
            await tripped.wait()
            while not worker.switch.is_open:  # noqa: ASYNC110 (to the turn of the loop)
                await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.sleep(0)
            if how == "resume":
                await bus.resume("worker", Step)
            else:
                worker.switching.store_is_down("the connection is lost")

        interfering = asyncio.create_task(interfere())
        await clock.advance(11)
        await until(lambda: len(handled) == count, clock)
        await interfering


async def test_a_pause_while_a_lane_gives_back_lets_its_partition_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    giving, go_on = asyncio.Event(), asyncio.Event()
    park_or_count = Waiting._park_or_count

    async def slow(self: Any, *given: Any) -> Any:
        giving.set()
        await go_on.wait()
        return await park_or_count(self, *given)

    monkeypatch.setattr(Waiting, "_park_or_count", slow)
    node, handled = fg.Node("worker"), list[int]()

    @node.on(Step, source="shop", order=fg.Serial(), retry=None, redeliver=fg.Redeliver(0.05, 0.05))
    async def work(step: Step, ctx: fg.Context) -> None:
        if step.number == 0 and not ctx.redeliveries:
            raise ValueError("not yet")
        handled.append(step.number)

    clock = SystemClock()
    where = {"store": f"sqlite:{tmp_path}/store.db", "stall_seconds": None}
    async with fg.Bus(Parted(clock), nodes=[SHOP, node], clock=clock, **where) as bus:  # type: ignore[arg-type]
        await bus.publish_many(steps(20, keys=1), node="shop")
        await giving.wait()
        pausing = asyncio.create_task(bus.pause("worker", Step))
        await asyncio.sleep(0.05)
        go_on.set()
        await pausing
        await bus.resume("worker", Step)
        await until(lambda: len(handled) == 20)
    assert handled == list(range(20))


# --- order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
@pytest.mark.parametrize("where", ["memory", "journal", "parted"])
@pytest.mark.parametrize("order", [fg.ByKey(lanes=LANES), fg.Serial()], ids=["ByKey", "Serial"])
async def test_order_holds_over_trips_and_pauses(order: Any, where: str, seed: int, tmp_path: Path) -> None:
    """Strict order per key: whatever trips, pauses and resumes, and whichever message is tried."""
    chance, clock = random.Random(seed), FakeClock()
    options = ordered(order) | {"kill_switch": fg.KillSwitch(sample=2, every=2), "retry": fg.Retry(1, delay=0.1)}
    outage, sent = Outage(**options), steps(200, keys=7)
    errors = [OSError("down"), fg.Unavailable("down", retry_after=3), ValueError("of its own")]

    async def run(step: Step, ctx: fg.Context) -> None:
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        if chance.random() < 0.1:
            outage.is_down = chance.random() < 0.5
            raise copy(chance.choice(errors))

    outage.run = run
    transport: Any = {"memory": "memory:", "journal": f"journal:{tmp_path}/journal"}.get(where) or Parted(clock)
    async with outage.bus(transport, clock=clock, store="memory:") as bus:
        await bus.publish_many(sent, node="shop")
        worker = worker_of(bus)
        rounds = 0
        while bus.outcomes()["handled"] + bus.outcomes()["dead"] < len(sent):
            rounds += 1
            outage.is_down, outage.error = False, chance.choice(errors[:2])
            if chance.random() < 0.2:
                await bus.pause("worker", Step, seconds=chance.choice([None, 3]))
            await clock.advance(chance.choice([0.1, 1, 5]))
            if chance.random() < 0.3 or worker.is_paused_by_hand:
                await bus.resume("worker", Step)
            await clock.advance(chance.choice([0.1, 1, 30]))
            assert rounds < 2_000
        assert worker.switch.trips > 2
        assert bus.outcomes()["dead"] == 0
        assert await effects(bus) == [(each.key, each.number) for each in sent]
    for numbers in outage.ended.values():
        assert list(dict.fromkeys(numbers)) == sorted(set(numbers)), "a key is out of order"
    if isinstance(order, fg.Serial):
        done = list(dict.fromkeys(outage.calls))
        assert [each.number for each in done] == list(range(200))


# --- probes ------------------------------------------------------------------------------------------------------


class Probed:
    """A probe, and how it answers."""

    def __init__(self) -> None:
        self.answer: Any = False
        self.asked = 0
        self.hanging = 0

    async def __call__(self) -> Any:
        self.asked += 1
        if isinstance(self.answer, asyncio.Event):
            self.hanging += 1
            try:
                await self.answer.wait()
            except asyncio.CancelledError:  # it does not heed that
                await self.answer.wait()
            finally:
                self.hanging -= 1
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Ambiguous:
    """Neither true nor false, as some arrays."""

    def __bool__(self) -> bool:
        raise TypeError("ambiguous")

    def __repr__(self) -> str:
        return "ambiguous"


@pytest.mark.parametrize(
    ("ill", "well"),
    [(False, True), (0, "yes"), (OSError("refused"), None), (asyncio.CancelledError(), True), (Ambiguous(), True)],
    ids=repr,
)
async def test_a_probe_is_asked_until_it_says_that_all_is_well_and_then_no_more(
    ill: Any, well: Any, caplog: pytest.LogCaptureFixture
) -> None:
    probe, clock = Probed(), FakeClock()
    probe.answer = ill
    outage = Outage(store=False, kill_switch=fg.KillSwitch(probe=probe, every=7))
    outage.is_down = True
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(100), node="shop")
        await until(lambda: worker_of(bus).switch.is_open, clock, 0.1)
        calls = outage.calls_while_down
        assert calls <= (SAMPLE + LANES) * TRIES
        await clock.advance(70.5)
        assert (probe.asked, outage.calls_while_down) == (10, calls), "no message is tried while there is a probe"
        told = [each for each in caplog.records if "its probe" in each.getMessage() and each.levelno >= logging.WARNING]
        assert len(told) == 1, "a probe that fails is told of once"
        outage.is_down, probe.answer = False, well
        await until(lambda: bus.outcomes()["handled"] == 100, clock)
        asked = probe.asked
        await clock.advance(1_000)
        assert probe.asked == asked == 11


@pytest.mark.parametrize("store", [None, "memory:"])
@pytest.mark.parametrize(("order", "count"), [(fg.Serial(), 50), (fg.ByKey(lanes=LANES), 50), (fg.Parallel(LANES), 3)])
async def test_a_probe_is_asked_before_a_message_is_given_up(order: Any, count: int, store: str | None) -> None:
    """Too few fail for a sample. Twenty minutes: their redeliveries are over after eleven."""
    asked: list[float] = []

    async def probe() -> bool:
        asked.append(clock.monotonic())
        return not outage.is_down

    outage, clock = Outage(store=False, kill_switch=fg.KillSwitch(probe=probe), **ordered(order)), FakeClock()
    outage.is_down, sent = True, steps(count, keys=2)
    async with outage.bus(clock=clock, store=store) as bus:
        await bus.publish_many(sent, node="shop")
        await until(lambda: clock.monotonic() > 1_200, clock, 10)
        assert bus.outcomes()["dead"] == 0 and worker_of(bus).switch.is_open
        assert outage.calls_while_down <= 3 * 4 * TRIES and asked[0] > 670
        outage.is_down = False
        await until(lambda: bus.outcomes()["handled"] == count, clock)
        assert bus.outcomes()["dead"] == 0 and bus.alarms == Counter({"kill-switch": 1})
    if not isinstance(order, fg.Parallel):
        for numbers in outage.ended.values():
            assert numbers == sorted(numbers)


async def test_a_message_is_given_up_while_the_probe_says_that_all_is_well() -> None:
    asked: list[float] = []

    async def probe() -> None:
        asked.append(clock.monotonic())

    switch = fg.KillSwitch(probe=probe)
    outage, clock = Outage(store=False, kill_switch=switch, redeliver=None, order=fg.Parallel(LANES)), FakeClock()
    outage.is_down = True
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(4), node="shop")
        await until(lambda: bus.outcomes()["dead"] == 4, clock, 0.1)
        assert worker_of(bus).switch.trips == 0 and len(asked) == 1, "one answer is enough for a while"
        outage.error = ValueError("its own")
        await clock.advance(switch.every)
        await bus.publish(steps(1)[0], node="shop")
        await until(lambda: bus.outcomes()["dead"] == 5, clock, 0.1)
        assert len(asked) == 1, "it is no error that counts"


async def test_a_probe_that_hangs_has_failed_and_is_not_asked_twice_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    probe, clock = Probed(), FakeClock()
    probe.answer = hangs = asyncio.Event()
    outage = Outage(store=False, kill_switch=fg.KillSwitch(probe=probe, every=5, timeout=2))
    outage.is_down, outage.error = True, fg.Unavailable("down", retry_after=1)
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(10), node="shop")
        await clock.advance(200)
        assert probe.asked == probe.hanging == 1 and worker_of(bus).switch.is_open
        assert "it did not answer within 2 s" in caplog.text
        outage.is_down, probe.answer = False, True
        hangs.set()
        await until(lambda: bus.outcomes()["handled"] == 10, clock)
        assert probe.asked == 2


class Header(fg.Unavailable):
    """It has what a server said there, whatever that was."""

    def __init__(self, found: Any) -> None:
        super().__init__("the bank is down")
        self.retry_after = found


class Broken(fg.Unavailable):
    @property
    def retry_after(self) -> float:  # type: ignore[override]
        raise RuntimeError("no header")

    @retry_after.setter
    def retry_after(self, found: float) -> None: ...


ODD = ["1", None, timedelta(seconds=1), float("nan"), float("inf"), 10**400, 1.8e9, -1, True, [1]]


@pytest.mark.parametrize(
    "error", [*map(Header, ODD), Broken("down")], ids=[*(f"{each!r:.9}" for each in ODD), "property"]
)
async def test_an_odd_retry_after_counts_as_the_default(error: fg.Unavailable) -> None:
    outage, clock = Outage(store=False), FakeClock()
    outage.is_down, outage.error = True, error
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(10), node="shop")
        await clock.advance(9.5)
        assert worker_of(bus).switch.is_open
        calls = outage.calls_while_down
        await clock.advance(1)
        assert outage.calls_while_down == calls + 1, "the first trial is after ten seconds"
        outage.is_down = False
        await clock.advance(11)
        assert bus.outcomes()["handled"] == 10


@pytest.mark.parametrize("when", ["asking", "going on"])
async def test_an_error_that_nobody_foresaw_does_not_leave_it_open(
    when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outage, clock = Outage(store=False, kill_switch=fg.KillSwitch(every=7)), FakeClock()
    outage.is_down, outage.error = True, fg.Unavailable("down", retry_after=1)
    failing = 2

    def unforeseen(*_: Any) -> None:
        nonlocal failing
        if failing:
            failing -= 1
            raise ZeroDivisionError
        monkeypatch.undo()
        if when == "going on":
            worker_of(bus).go_on_consuming()

    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(10), node="shop")
        await until(lambda: worker_of(bus).switch.is_open, clock, 0.1)
        outage.is_down = False
        if when == "asking":
            monkeypatch.setattr(type(worker_of(bus).switching), "_put_off_seconds", unforeseen)
        else:
            monkeypatch.setattr(worker_of(bus), "go_on_consuming", unforeseen)
        await clock.advance(1.5)
        assert worker_of(bus).switch.is_open and "an unexpected error" in caplog.text
        await clock.advance(15)
        assert not worker_of(bus).switch.is_open and bus.outcomes()["handled"] == 10
        assert bus.alarms == Counter({"kill-switch": 1}), "somebody was told already"


async def test_a_message_that_always_fails_does_not_hold_the_others_when_it_is_tried() -> None:
    """A poison message as trial: it waits for longer each time, another is next, and it keeps its tries."""
    calls: Counter[int] = Counter()
    node, clock = fg.Node("worker"), FakeClock()
    down = True

    @node.on(Step, source="shop", order=fg.Parallel(2))
    async def work(step: Step, ctx: fg.Context) -> None:
        calls[step.number] += 1
        if down or step.number < 3:
            raise RuntimeError("poison, or down")

    async with fg.Bus("memory:", nodes=[SHOP, node], clock=clock, stall_seconds=None) as bus:
        await bus.publish_many(steps(20), node="shop")
        await until(lambda: worker_of(bus).switch.is_open, clock, 0.1)
        down = False
        await until(lambda: bus.outcomes()["handled"] == 17, clock)
        assert bus.outcomes()["dead"] == 0
        await until(lambda: bus.outcomes()["dead"] == 3, clock, 30)
    assert all(calls[number] >= 12 for number in range(3)), "tries of its own, all of them, come after that"


async def test_a_trial_that_fails_for_a_reason_of_its_own_shows_that_all_is_well() -> None:
    outage, clock = Outage(store=False, retry=fg.Retry(1), redeliver=None), FakeClock()
    outage.is_down, outage.error = True, fg.Unavailable("down", retry_after=2)
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(30), node="shop")
        await clock.advance(1)
        outage.error = ValueError("its own")
        await until(lambda: bus.outcomes()["dead"] == 30, clock)
        assert not worker_of(bus).switch.is_open
    assert set(outage.calls.values()) <= {2, 3}


async def test_what_was_handled_before_is_no_trial() -> None:
    """A duplicate proves nothing: the next message is tried instead."""
    envelopes: list[Envelope] = []

    async def run(step: Step, ctx: fg.Context) -> None:
        envelopes.append(ctx.envelope)

    outage, clock = Outage(run=run), FakeClock()
    transport = MemoryTransport(clock=clock)
    async with outage.bus(transport, clock=clock, store="memory:") as bus:
        await bus.publish_many(steps(3), node="shop")
        await bus.idle()
        outage.is_down, outage.error = True, OSError("still down")
        worker_of(bus).switch.failed(fg.Unavailable("down", retry_after=1))
        for envelope in envelopes:
            transport.broker.queue("worker.Step.shop").enqueue(envelope)
        await bus.publish_many(steps(5)[3:], node="shop")
        await clock.advance(20)
        assert bus.outcomes()["duplicate"] == 3
        assert worker_of(bus).switch.is_open and outage.calls_while_down >= 2
        outage.is_down = False
        await until(lambda: bus.outcomes()["handled"] == 5, clock)


@pytest.mark.parametrize("make", [CoreOnly, Parted])
async def test_what_expired_is_no_trial(make: Any) -> None:
    options = ordered(fg.ByKey(lanes=LANES)) if make is Parted else {}
    outage, clock = Outage(expires=60, **options), FakeClock()
    outage.is_down = True
    async with outage.bus(make(clock), clock=clock, store="memory:") as bus:
        worker_of(bus).switch.failed(fg.Unavailable("down", retry_after=100))
        await bus.publish_many(steps(3), node="shop")
        await until(lambda: bus.outcomes()["dead"] == 3, clock, 5)
        await clock.advance(1)
        assert worker_of(bus).switch.is_open and not outage.calls
        outage.is_down = False
        await bus.publish_many(steps(5)[3:], node="shop")
        await until(lambda: bus.outcomes()["handled"] == 2, clock)


async def test_a_trial_that_goes_with_its_partition_is_over() -> None:
    """Its lane was not free yet; what comes when the partition is back is tried instead."""
    hangs = asyncio.Event()

    async def run(step: Step, ctx: fg.Context) -> None:
        if step.number == 0:
            await hangs.wait()

    outage, clock = Outage(run=run, order=fg.ByKey(lanes=1), key="key"), FakeClock()
    async with outage.bus(Parted(clock), clock=clock, store="memory:") as bus:
        worker = worker_of(bus)
        await bus.publish(steps(1)[0], node="shop")
        await until(lambda: bool(outage.calls), clock, 0.1)
        worker.switch.failed(fg.Unavailable("down", retry_after=1))
        await bus.publish_many(steps(20)[1:], node="shop")
        await until(lambda: worker._trial is not None and worker._trial.delivery is not None, clock, 0.1)
        first = worker._trial
        assert first is not None and worker._waiting is not None and not first.ran
        await worker._move_out(worker._waiting, first.delivery.partition, False)
        assert first.ended
        first.delivery.partition.ended = True  # the consumer lets it go, and takes it up anew
        hangs.set()
        await until(lambda: bus.outcomes()["handled"] == 20, clock)
        assert not worker.switch.is_open


async def test_a_trial_waits_for_a_message_where_there_is_none() -> None:
    outage, clock = Outage(store=False), FakeClock()
    async with outage.bus(clock=clock) as bus:
        worker = worker_of(bus)
        worker.switch.failed(fg.Unavailable("down", retry_after=1))
        await clock.advance(100)
        assert worker.switch.is_open
        await bus.publish_many(steps(50), node="shop")
        await until(lambda: bus.outcomes()["handled"] == 50, clock, 0.1)
        assert not worker.switch.is_open


# --- by hand -----------------------------------------------------------------------------------------------------


async def test_to_resume_by_hand_closes_it() -> None:
    outage, clock = Outage(store=False), FakeClock()
    outage.is_down = True
    async with outage.bus(clock=clock) as bus:
        await bus.publish_many(steps(100), node="shop")
        await until(lambda: worker_of(bus).switch.is_open, clock, 0.1)
        outage.is_down = False
        await bus.resume("worker", Step)
        assert not worker_of(bus).paused and worker_of(bus).pause_reason is None
        await until(lambda: bus.outcomes()["handled"] == 100, clock, 0.1)
        assert [each.paused for each in bus.counts()] == [False]


@pytest.mark.parametrize("seconds", [None, 50])
async def test_a_switch_that_closes_does_not_end_a_pause_by_hand(seconds: float | None) -> None:
    probe, clock = Probed(), FakeClock()
    outage = Outage(store=False, kill_switch=fg.KillSwitch(probe=probe))
    outage.is_down = True
    async with outage.bus(clock=clock) as bus:
        worker = worker_of(bus)
        await bus.publish_many(steps(100), node="shop")
        await until(lambda: worker.switch.is_open, clock, 0.1)
        await bus.pause("worker", Step, seconds=seconds)
        outage.is_down, probe.answer = False, True
        calls = outage.total
        await clock.advance(40)
        assert not worker.switch.is_open and worker.pause_reason == "paused by hand"
        assert outage.total == calls, "it was paused by hand, and went on"
        if seconds is None:
            await bus.resume("worker", Step)
        await until(lambda: bus.outcomes()["handled"] == 100, clock)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_no_message_is_tried_while_it_is_paused_by_hand(has_begun: bool) -> None:
    outage, clock = Outage(store=False), FakeClock()
    async with outage.bus(clock=clock) as bus:
        worker = worker_of(bus)
        worker.switch.failed(fg.Unavailable("down", retry_after=5))
        if has_begun:
            await clock.advance(10)  # a trial waits for its message
        await bus.pause("worker", Step, seconds=100)
        await bus.publish_many(steps(10), node="shop")
        await clock.advance(50)
        assert not outage.calls and worker.pause_reason == "paused by hand"
        await clock.advance(49)
        assert not outage.calls
        await until(lambda: bus.outcomes()["handled"] == 10, clock)
        assert not worker.switch.is_open, "the end of a pause is no verdict: a message was tried"


@pytest.mark.parametrize("error", [fg.Unavailable("down", retry_after=1), StoreUnavailable("away")], ids=repr)
async def test_a_handler_that_trips_it_while_the_bus_stops_leaves_nothing_behind(error: Exception) -> None:
    outage, clock = Outage(), FakeClock()
    hangs = asyncio.Event()

    async def run(step: Step, ctx: fg.Context) -> None:
        await hangs.wait()
        raise error

    outage.run = run
    bus = outage.bus(clock=clock, store="memory:")
    await bus.start()
    worker = worker_of(bus)
    await bus.publish_many(steps(3), node="shop")
    await until(lambda: bool(outage.calls), clock, 0.1)
    stopping = asyncio.create_task(bus.stop())
    await until(lambda: worker.paused)
    hangs.set()
    await stopping
    await clock.advance(100)
    assert worker.switch.is_open and worker.paused
    assert [task for task in asyncio.all_tasks() if "kill-switch" in task.get_name()] == []


@pytest.mark.parametrize("when", ["before a trial", "while one waits", "while one runs"])
async def test_a_bus_stops_while_it_is_open(when: str) -> None:
    outage, clock = Outage(store=False), FakeClock()
    hangs = asyncio.Event()

    async def run(step: Step, ctx: fg.Context) -> None:
        await hangs.wait()

    outage.run = run
    async with asyncio.timeout(60):
        bus = outage.bus(clock=clock, drain_seconds=0)
        await bus.start()
        worker_of(bus).switch.failed(fg.Unavailable("down", retry_after=5))
        if when != "before a trial":
            await clock.advance(6)
        if when == "while one runs":
            await bus.publish_many(steps(10), node="shop")
            await until(lambda: bool(outage.calls), clock, 0.1)
        await bus.stop()
    assert [task for task in asyncio.all_tasks() if "kill-switch" in task.get_name()] == []


# --- the store ---------------------------------------------------------------------------------------------------


class Away:
    """Stores whose URLs have one of these names in them answer nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: set[str] = set()
        self.asked = self.refusals = 0
        plain = SqliteTransaction.begin

        async def begin(transaction: SqliteTransaction) -> None:
            self.asked += 1
            url = transaction._database.url
            if any(name in url for name in self.names):
                self.refusals -= 1
                if not self.refusals:
                    self.names.clear()
                raise StoreUnavailable(f"{url} is away")
            await plain(transaction)

        monkeypatch.setattr(SqliteTransaction, "begin", begin)


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Away:
    return Away(monkeypatch)


class Other(fg.Event):
    n: int


async def test_a_store_that_is_away_switches_off_all_its_subscriptions_and_no_other(away: Away) -> None:
    one, two = Outage(retry=None, redeliver=None), fg.Node("second")
    seen: list[str] = []
    clock = FakeClock()

    @one.node.on(Other, source="shop")
    async def other(message: Other) -> None:
        seen.append("worker")

    @two.on(Other, source="shop")
    async def elsewhere(message: Other) -> None:
        seen.append("second")

    stores = {"worker": "memory:one", "second": "memory:two"}
    async with fg.Bus("memory:", nodes=[SHOP, one.node, two], store=stores, clock=clock, stall_seconds=None) as bus:
        away.names = {"memory:one"}
        await bus.publish_many(steps(200), node="shop")
        await until(lambda: worker_of(bus).switch.is_open, clock, 0.1)
        await clock.advance(1)
        found = {
            (each.subscription.node, each.subscription.message_type.wire): each.pause_reason for each in bus._workers
        }
        assert found["second", "Other"] is None
        assert found["worker", "Other"] == found["worker", "Step"]
        assert str(found["worker", "Step"]).startswith("kill switch: StoreUnavailable: memory:")
        asked, calls = away.asked, one.total
        await bus.publish(Other(n=1), node="shop")
        await clock.advance(100)
        assert seen == ["second"]
        assert away.asked - asked <= 2 * (100 / 5 + 1) + 100, "it hammers the store"
        assert one.total == calls
        away.names = set()
        await until(lambda: bus.outcomes()["handled"] == 202, clock)
        assert bus.outcomes()["dead"] == bus.outcomes()["redelivered"] == 0
        assert bus.alarms == Counter({"kill-switch": 2})
        assert await effects(bus) == [(each.key, each.number) for each in steps(200)]


async def test_a_connection_that_is_lost_once_is_no_alarm_and_holds_up_nobody(away: Away) -> None:
    outage, clock = Outage(retry=None, redeliver=None), FakeClock()
    async with outage.bus(clock=clock, store="memory:") as bus:
        await bus.publish_many(steps(50), node="shop")
        await bus.idle()
        away.names, away.refusals = {"memory:"}, 1
        await bus.publish_many(steps(100)[50:], node="shop")
        await until(lambda: bus.outcomes()["handled"] == 100, clock, 0.01)
        assert clock.monotonic() < 5
        assert worker_of(bus).switch.trips == 1 and bus.alarms == Counter()


async def test_a_store_that_answers_and_refuses_in_turn_is_not_hammered(away: Away) -> None:
    """Throttled: it answers when it is asked, and refuses the next transaction."""
    outage, clock = Outage(retry=None, redeliver=None), FakeClock()
    throttled = True

    async def run(step: Step, ctx: fg.Context) -> None:
        if throttled:
            raise StoreUnavailable("too many connections")

    outage.run = run
    async with outage.bus(clock=clock, store="memory:") as bus:
        await bus.publish_many(steps(100), node="shop")
        await clock.advance(100)
        assert outage.total <= (100 / 5 + 2) * LANES
        assert bus.alarms["kill-switch"] >= 1
        throttled = False
        await until(lambda: bus.outcomes()["handled"] == 100, clock)
        assert bus.outcomes()["dead"] == 0


# --- what a transport lacks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [CoreOnly, Parted])
async def test_an_outage_on_a_transport_that_cannot_delay(make: Any) -> None:
    options = ordered(fg.ByKey(lanes=LANES)) if make is Parted else {}
    outage, clock, sent = Outage(**options), FakeClock(), steps(300)
    async with outage.bus(make(clock), clock=clock, store="memory:") as bus:
        outage.is_down = True
        await bus.publish_many(sent, node="shop")
        await until(lambda: worker_of(bus).switch.is_open, clock, 0.1)
        await clock.advance(600)
        assert outage.calls_while_down <= (SAMPLE + LANES + 600 / 5) * TRIES
        outage.is_down = False
        await until(lambda: bus.outcomes()["handled"] == len(sent), clock)
        assert bus.outcomes()["dead"] == 0
        assert await effects(bus) == [(each.key, each.number) for each in sent]


# --- ready-made probes ---------------------------------------------------------------------------------------------


async def answering(status: str) -> AbstractAsyncContextManager[asyncio.Server]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


async def test_the_ready_made_http_probe() -> None:
    async with await answering("204 No Content") as server:
        port = server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        assert await fg.probes.http(f"http://127.0.0.1:{port}/health")()
    with pytest.raises(OSError, match=r"refused|reset"):
        await fg.probes.http(f"http://127.0.0.1:{port}/health")()
    async with await answering("503 Service Unavailable") as server:
        port = server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="503"):
            await fg.probes.http(f"http://127.0.0.1:{port}/health")()
    with pytest.raises(fg.ConfigurationError, match=r"http:// or https:// URL; got 'ftp://u:\*\*\*@x'"):
        fg.probes.http("ftp://u:secret@x")


async def test_a_ready_made_probe_that_hangs_is_asked_once_at_a_time_and_leaves_other_threads_alone() -> None:
    asked, over = 0, asyncio.Event()

    async def never_ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.write(b"HTTP/1.1 200 OK\r\nX: ")
        await over.wait()
        writer.close()

    server = await asyncio.start_server(never_ends, "127.0.0.1", 0)
    probe = fg.probes.http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", seconds=30)
    first = asyncio.ensure_future(probe())
    while not asked:  # noqa: ASYNC110 (another thread asks)
        await asyncio.sleep(0.001)
    first.cancel()
    assert [await probe() for _ in range(3)] == [False] * 3 and asked == 1
    async with asyncio.timeout(10):
        assert await asyncio.gather(*(asyncio.to_thread(int) for _ in range(50))) == [0] * 50
    over.set()
    server.close()
    await server.wait_closed()


async def test_the_ready_made_sql_probe(store_url: str, tmp_path: Path) -> None:
    async with Outage().bus(store=store_url):
        await fg.probes.sql(store_url)()
        await fg.probes.sql(store_url, "select count(*) from effects")()
        with pytest.raises(fg.ConfigurationError, match="refuses"):
            await fg.probes.sql(store_url, "select nonsense from nowhere")()
    with pytest.raises(fg.StoreUnavailable):
        await fg.probes.sql("postgresql://shop:secret@127.0.0.1:1/shop")()
    with pytest.raises(fg.ConfigurationError, match="names no store"):
        fg.probes.sql("mysql://x")


# --- the bench -----------------------------------------------------------------------------------------------------


async def test_the_bench_moves_its_clock_until_the_switch_closes() -> None:
    outage = Outage()
    calls = 0

    async def run(step: Step, ctx: fg.Context) -> None:
        nonlocal calls
        calls += 1
        if calls < 25:
            raise OSError("down for a while")

    outage.run = run
    async with fg.testing.bench(outage.node) as bench:
        for step in steps(30):
            await bench.publish(step)
        await bench.settle()
        assert bench.outcomes()["handled"] == 30 and bench.dead_letters() == []


async def test_the_bench_says_so_when_a_switch_never_closes() -> None:
    outage = Outage(kill_switch=fg.KillSwitch(sample=3))
    outage.is_down = True
    async with fg.testing.bench(outage.node) as bench:
        for step in steps(30):
            await bench.publish(step)
        with pytest.raises(fg.testing.BenchStuck, match=r"kill switch of worker\.Step\.shop is open"):
            await bench.settle(timeout=0.5)
