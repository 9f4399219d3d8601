"""Ordered subscriptions on a transport that parts queues: leases, order per key, and what kills its process."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.bus import leases as leasing
from faregate.bus.leases import LeasedConsumer, plan
from faregate.errors import StoreUnavailable
from faregate.ids import SLOTS, message_id_of, slot_of
from faregate.ports import faults
from faregate.ports.clock import SystemClock
from faregate.ports.queue import Binding, Held
from faregate.ports.schemes import open_store
from faregate.ports.store import BEHIND, NEXT, REPARTITION, Lease, Parked, Store
from faregate.testing import FakeClock
from tests.bus.parted import Parted, Server

LONG = 60.0


class Step(fg.Event, key="key"):
    key: str
    number: int


class Town:
    """Instances of one node, on one store and one broker."""

    def __init__(self, folder: Path, **subscription: Any) -> None:
        self.clock: Any = FakeClock()
        self.server = Server(self.clock)
        self.url = f"sqlite:{folder}/town.db"
        self.options = {"key": "key", "retry": None, "redeliver": fg.Redeliver(10, 20), "partitions": 4, **subscription}
        self.began: list[tuple[str, str, int]] = []
        """Which instance began on what."""
        self.ended: dict[str, list[int]] = defaultdict(list)
        self.failing: Counter[tuple[str, int]] = Counter()
        """How often each still fails."""
        self.deadly: tuple[str, int] | None = None
        self.gates: dict[tuple[str, int], asyncio.Event] = {}
        """What handlers wait for."""
        self.buses: dict[str, fg.Bus] = {}

    def node(self, name: str) -> fg.Node:
        node = fg.Node("reader", schema="create table if not exists seen(key text, number integer, at integer)")

        @node.on(Step, source="author", **self.options)
        async def handle(step: Step, ctx: fg.Context) -> None:
            what = (step.key, step.number)
            self.began.append((name, *what))
            if what in self.gates:
                await self.gates[what].wait()
            if what == self.deadly:
                raise faults.Crash
            if self.failing[what] > 0:
                self.failing[what] -= 1
                raise ValueError("not yet")
            ctx.db.write("insert into seen values (?, ?, (select count(*) from seen))", what)
            self.ended[step.key].append(step.number)

        return node

    @asynccontextmanager
    async def instance(self, name: str) -> AsyncIterator[fg.Bus]:
        store = open_store(self.url, self.clock)
        transport = Parted(self.clock, self.server)
        bus = fg.Bus(transport, nodes=[fg.Node("author"), self.node(name)], store={"reader": store}, clock=self.clock)
        self.buses[name] = bus
        async with bus:
            yield bus

    def consumer(self, name: str) -> LeasedConsumer:
        [worker] = self.buses[name]._workers
        assert isinstance(worker._consumer, LeasedConsumer)
        return worker._consumer

    def parts(self, name: str) -> int:
        return len(self.consumer(name).partitions)

    async def publish(self, bus: fg.Bus, *steps: tuple[str, int]) -> None:
        for key, number in steps:
            await bus.publish(Step(key=key, number=number), node="author")

    async def later(self, seconds: float) -> None:
        """Time passes no faster than the store, which has a thread of its own, can follow."""
        for _ in range(round(seconds / 0.1)):
            await self.clock.advance(0.1)
            await asyncio.sleep(0.003)

    async def until(self, done: Callable[[], bool], pace: float = 0.001) -> None:
        async with asyncio.timeout(LONG):
            while not done():
                if isinstance(self.clock, FakeClock):
                    await self.clock.advance(pace)
                await asyncio.sleep(0.003)

    async def parked(self, bus: fg.Bus) -> list[Parked]:
        store = bus.store_of("reader")
        assert store is not None
        async with store.transaction() as transaction:
            return await transaction.parked("reader")

    async def until_parked(self, bus: fg.Bus, count: int) -> list[Parked]:
        async with asyncio.timeout(LONG):
            while len(rows := await self.parked(bus)) != count:
                await self.clock.advance(0.01)
                await asyncio.sleep(0.003)
        return rows

    async def seen(self, bus: fg.Bus) -> dict[str, list[int]]:
        """What is committed, in the order of the commits."""
        store, found = bus.store_of("reader"), defaultdict(list)
        assert store is not None
        async with store.transaction() as transaction:
            for key, number in await transaction.fetchall("select key, number from seen order by at"):
                found[key].append(number)
        return found


# --- who gets what ----------------------------------------------------------------------------------------


QUEUES = [f"q{number}" for number in range(8)]


def lease(queue: str, owner: str | None, wanted_by: str | None = None, left: float = 5.0) -> Lease:
    return Lease("reader", queue, owner, 1, left, wanted_by)


def test_an_instance_claims_what_is_free_and_nothing_that_is_kept_for_another() -> None:
    rows = [lease("q0", "b"), lease("q1", "b", left=-1.0), lease("q2", None, "a"), lease("q3", None, "c")]
    assert plan("a", QUEUES, rows).claim == ["q1", "q2", "q4", "q5", "q6", "q7"]


def test_one_with_fewer_partitions_asks_whoever_has_most() -> None:
    rows = [lease(queue, "b" if queue < "q3" else "c") for queue in QUEUES]
    found = plan("a", QUEUES, rows)
    assert (found.claim, found.let_go) == ([], None)
    assert found.ask is not None and found.ask.owner == "c"
    asked = [each._replace(wanted_by="a") if each.queue == "q3" else each for each in rows]
    assert plan("a", QUEUES, asked).ask is None, "one at a time"
    assert plan("c", QUEUES, asked).let_go == "q3"
    assert plan("b", QUEUES, asked).let_go is None, "nobody asked it"
    even = [lease(queue, "abc"[number % 3]) for number, queue in enumerate(QUEUES)]
    assert plan("c", QUEUES, even) == ([], None, None), "two and three is as even as it gets"


def test_who_asked_and_died_keeps_a_partition_from_others_for_a_while_only() -> None:
    rows = [lease(queue, "a", "gone" if queue == "q0" else None) for queue in QUEUES]
    assert plan("a", QUEUES, rows).let_go == "q0"
    rows[0] = lease("q0", None, "gone", left=-0.1)
    assert plan("a", QUEUES, rows).claim == ["q0"]


async def test_instances_share_the_partitions_and_take_over_from_one_that_ends(tmp_path: Path) -> None:
    it = Town(tmp_path)
    async with it.instance("a"):
        assert it.parts("a") == 4
        async with it.instance("b"):
            assert it.parts("b") == 0
            await it.until(lambda: (it.parts("a"), it.parts("b")) == (2, 2), pace=0.1)
        await it.until(lambda: it.parts("a") == 4, pace=0.1)


async def test_messages_of_one_key_are_handled_in_order_while_instances_come_and_go(tmp_path: Path) -> None:
    it = Town(tmp_path)
    keys = [f"key-{number}" for number in range(12)]
    async with it.instance("a") as a:
        for number in range(5):
            await it.publish(a, *((key, number) for key in keys))
        async with it.instance("b"):
            for number in range(5, 10):
                await it.publish(a, *((key, number) for key in keys))
                await it.later(1.5)
            await it.until(lambda: it.parts("b") == 2, pace=0.1)
            await it.publish(a, *((key, 10) for key in keys))
            await it.until(lambda: all(len(it.ended[key]) >= 11 for key in keys), pace=0.1)
        await it.publish(a, *((key, 11) for key in keys))
        await it.until(lambda: all(len(it.ended[key]) >= 12 for key in keys), pace=0.1)
        assert {name for name, *_ in it.began} == {"a", "b"}
        await it.until(lambda: not it.consumer("a")._leaving and not a._workers[0].busy)
        assert await it.seen(a) == {key: list(range(12)) for key in keys}


async def test_letting_go_waits_for_what_runs_and_what_has_not_begun_goes_to_the_next_owner(tmp_path: Path) -> None:
    it = Town(tmp_path, partitions=2)
    keys = [next(key for key in (f"k{n}" for n in range(99)) if _part(key, 2) == part) for part in (0, 1)]
    it.gates = {(key, 1): asyncio.Event() for key in keys}
    async with it.instance("a") as a:
        await it.publish(a, *((key, number) for number in (1, 2, 3) for key in keys))
        await it.until(lambda: len(it.began) == 2)
        async with it.instance("b"):
            await it.until(lambda: it.parts("a") == 1, pace=0.1)
            await it.later(25)
            assert it.parts("b") == 0 and it.parts("a") == 1, "taken over while a handler ran"
            for gate in it.gates.values():
                gate.set()
            await it.until(lambda: all(it.ended[key] == [1, 2, 3] for key in keys), pace=0.1)
            assert it.parts("b") == 1
            by = {key: [name for name, each, _ in it.began if each == key] for key in keys}
            assert sorted(by.values()) == [["a", "a", "a"], ["a", "b", "b"]]


def _part(key: str, count: int) -> int:
    return int(fg.ids.slot_of(key)) * count // 256


async def test_a_deposed_owner_commits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a stop of the process for longer than its lease: it goes on as if nothing had happened."""
    it = Town(tmp_path, partitions=1)
    it.gates[("k", 1)] = asyncio.Event()
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), ("k", 2))
        await it.until(lambda: len(it.began) == 1)
        with monkeypatch.context() as stopped:
            stopped.setattr(it.consumer("a"), "_look", _nothing)
            for partition in it.consumer("a")._held.values():
                partition.until = float("inf")
            async with it.instance("b") as b:
                await it.until(lambda: it.parts("b") == 1, pace=0.5)
                it.gates.pop(("k", 1)).set()
                await it.until(lambda: a._workers[0].outcomes["lost"] > 0)
                assert await it.seen(a) == {}, "it has committed what another answers for"
                assert [name for name, *_ in it.began] == ["a"], "it began on more of a partition that it has lost"
                stopped.undo()
                await it.until(lambda: b.outcomes()["handled"] == 2, pace=0.1)
                assert await it.seen(b) == {"k": [1, 2]}
    assert it.began == [("a", "k", 1), ("b", "k", 1), ("b", "k", 2)]


async def _nothing() -> None:
    """It does not look."""


async def test_a_lease_that_cannot_be_renewed_in_time_is_as_good_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Town(tmp_path)

    async def away(*given: object) -> None:
        raise StoreUnavailable("the store is away")

    async with it.instance("a") as a:
        store = a.store_of("reader")
        with monkeypatch.context() as broken:
            for name in ("renew_leases", "leases", "claim_lease", "release_lease"):
                broken.setattr(store, name, away)
            await it.later(leasing.LEASE_SECONDS - 0.5)
            await it.publish(a, ("k", 1))
            await it.until(lambda: a.outcomes()["handled"] == 1)
            await it.later(2)
            await it.until(lambda: it.parts("a") == 0)
            await it.publish(a, ("k", 2))
            await it.later(5)
            assert len(it.began) == 1, "it began on what may be another's by now"
        await it.until(lambda: a.outcomes()["handled"] == 2 and it.parts("a") == 4, pace=0.1)


async def test_a_paused_instance_leaves_its_partitions_to_others(tmp_path: Path) -> None:
    it = Town(tmp_path)
    it.gates[("k", 1)] = asyncio.Event()
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), ("k", 2))
        await it.until(lambda: len(it.began) == 1)
        await a.pause("reader", Step)
        async with it.instance("b") as b:
            await it.until(lambda: it.parts("b") == 3, pace=0.1)
            await it.later(12)
            assert it.parts("b") == 3 and len(it.began) == 1, "what runs keeps its partition"
            it.gates.pop(("k", 1)).set()
            await it.until(lambda: b.outcomes()["handled"] == 1, pace=0.1)
            assert it.parts("a") == 0
            await a.resume("reader", Step)
            await it.until(lambda: it.parts("a") == 2, pace=0.1)
    assert it.began == [("a", "k", 1), ("b", "k", 2)]


async def test_a_pause_and_a_resume_while_a_consumer_is_made_leave_no_partition_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Town(tmp_path)
    made, go_on = asyncio.Event(), asyncio.Event()
    async with it.instance("a") as a:
        await a.pause("reader", Step)
        await it.until(lambda: it.parts("a") == 0)
        consume = Parted.consume

        async def slowly(self: Parted, *arguments: Any, **options: Any) -> Any:
            consumer = await consume(self, *arguments, **options)
            made.set()
            await go_on.wait()
            return consumer

        monkeypatch.setattr(Parted, "consume", slowly)
        await a.resume("reader", Step)
        await it.until(made.is_set)
        await a.pause("reader", Step)
        await it.later(1)
        await a.resume("reader", Step)
        go_on.set()
        await it.until(lambda: it.parts("a") == 4, pace=0.1)
        await it.publish(a, *((f"k{number}", number) for number in range(40)))
        await it.until(lambda: a.outcomes()["handled"] == 40)  # before a lock runs out


@pytest.mark.services
async def test_three_instances_on_postgresql_keep_the_order_of_every_key(postgres_url: str) -> None:
    """On a clock that goes by itself, with a server that decides on it."""
    it = Town(Path())
    it.clock = SystemClock()
    it.server = Server(it.clock)
    it.url = postgres_url
    keys = [f"key-{number}" for number in range(12)]
    steps = iter(range(200))

    async def publish(bus: fg.Bus, rounds: int) -> None:
        for number in islice(steps, rounds):
            await it.publish(bus, *((key, number) for key in keys))
            await asyncio.sleep(0.01)

    async with it.instance("a") as a:
        await publish(a, 20)
        async with it.instance("b"):
            await publish(a, 20)
            await it.until(lambda: it.parts("a") == it.parts("b") == 2)
            async with it.instance("c"):
                await publish(a, 20)
                await it.until(lambda: it.parts("c") == 1)
                await publish(a, 20)
                await it.until(lambda: "c" in {name for name, *_ in it.began})
        await publish(a, 20)
        await it.until(lambda: sum(map(len, it.ended.values())) >= 100 * len(keys))
        await it.until(lambda: not a._workers[0].busy)
        found = await it.seen(a)
    assert found == {key: list(range(100)) for key in keys}


# --- what waits -------------------------------------------------------------------------------------------


async def test_later_ones_of_a_key_park_behind_one_that_waits_and_follow_in_order(tmp_path: Path) -> None:
    it = Town(tmp_path, partitions=1)
    it.failing["k", 1] = 2
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), ("k", 2), ("other", 1), ("k", 3))
        rows = await it.until_parked(a, 3)
        await it.publish(a, ("k", 4), ("other", 2))
        rows = await it.until_parked(a, 4)
        assert [row.due > it.clock.time() + 1_000 for row in rows] == [False, True, True, True]
        assert {(row.queue, row.key) for row in rows} == {(*it.consumer("a").partitions, "k")}
        await it.until(lambda: it.ended["other"] == [1, 2])
        await it.later(11)
        await it.publish(a, ("k", 5))
        await it.until_parked(a, 5)
        assert it.ended["k"] == [], "it failed once more"
        await it.later(21)
        await it.until(lambda: it.ended["k"] == [1, 2, 3, 4, 5])
        await it.until_parked(a, 0)
        await it.publish(a, ("k", 6))
        await it.until(lambda: a.outcomes()["handled"] == 8)
        assert await it.seen(a) == {"k": [1, 2, 3, 4, 5, 6], "other": [1, 2]}
        assert it.consumer("a")._held.popitem()[1].keys == set(), "a key is thought to wait for ever"


async def test_what_waits_of_a_key_follows_a_filtered_one(tmp_path: Path) -> None:
    it = Town(tmp_path, partitions=1, where="number <> 2")
    it.failing["k", 1] = 1
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), ("k", 2), ("k", 3))
        await it.until_parked(a, 3)
        await it.later(11)
        await it.until(lambda: it.ended["k"] == [1, 3])
        await it.until_parked(a, 0)
        await it.publish(a, ("k", 4))
        await it.until(lambda: a.outcomes()["handled"] == 3)
        assert a.outcomes()["filtered"] == 1 and await it.seen(a) == {"k": [1, 3, 4]}


async def test_what_waits_of_a_key_follows_a_dead_letter(tmp_path: Path) -> None:
    it = Town(tmp_path, partitions=1, redeliver=None)
    it.failing["k", 1] = 9
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), ("k", 2))
        await it.until(lambda: a.outcomes()["handled"] == 1)
        assert [letter.reason for letter in await a.dead_letters("reader")] == ["failed"]


async def test_a_serial_subscription_waits_as_a_whole(tmp_path: Path) -> None:
    it = Town(tmp_path, order=fg.Serial(), partitions=None)
    it.failing["k", 2] = 1
    steps = [("k", 1), ("k", 2), ("a", 1), ("k", 3), ("b", 1), ("a", 2)]
    async with it.instance("a") as a:
        await it.publish(a, *steps)
        await it.until_parked(a, 5)
        assert [each[1:] for each in it.began] == [("k", 1), ("k", 2)]
        await it.publish(a, ("c", 1))
        await it.until_parked(a, 6)
        await it.later(11)
        await it.until(lambda: a.outcomes()["handled"] == 7)
    assert [each[1:] for each in it.began] == [("k", 1), ("k", 2), *steps[1:], ("c", 1)]


async def test_a_scheduled_message_keeps_nobody_waiting_and_waits_behind_what_waits_of_its_key(tmp_path: Path) -> None:
    it = Town(tmp_path)
    it.failing["k", 2] = 1
    async with it.instance("a") as a:
        await a.publish(Step(key="k", number=1), node="author", delay=5)
        await it.until_parked(a, 1)
        await it.publish(a, ("k", 2), ("k", 3))
        await it.until_parked(a, 3)
        await it.later(6)
        assert it.ended["k"] == [], "it passed one that waits"
        await it.later(6)
        await it.until(lambda: it.ended["k"] == [2, 3, 1])
        await it.until_parked(a, 0)
        await a.publish(Step(key="k", number=4), node="author", delay=5)
        await it.until_parked(a, 1)
        await it.later(6)
        await it.until(lambda: it.ended["k"][3:] == [4])
        await it.until_parked(a, 0)
        assert not any(partition.keys for partition in it.consumer("a")._held.values())


async def test_a_key_that_is_not_strict_lets_later_ones_pass(tmp_path: Path) -> None:
    it = Town(tmp_path, order=fg.ByKey(strict=False))
    it.failing["k", 1] = 1
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), ("k", 2), ("k", 3))
        await it.until(lambda: it.ended["k"] == [2, 3])
        await it.later(11)
        await it.until(lambda: it.ended["k"] == [2, 3, 1])


async def test_what_waits_goes_with_its_partition_to_the_next_owner(tmp_path: Path) -> None:
    it = Town(tmp_path)
    it.failing["k", 1] = 1
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), ("k", 2))
        await it.until_parked(a, 2)
    async with it.instance("b") as b:
        await it.publish(b, ("k", 3))
        await it.until_parked(b, 3)
        await it.later(11)
        await it.until(lambda: b.outcomes()["handled"] == 3)
        assert await it.seen(b) == {"k": [1, 2, 3]}


async def test_while_the_store_is_away_a_partition_is_let_go_and_everything_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Town(tmp_path)
    it.failing["k", 1] = 1

    async def refuse(self: object, *arguments: object) -> None:
        raise StoreUnavailable("the store is away")

    async with it.instance("a") as a:
        store = a.store_of("reader")
        assert store is not None
        with monkeypatch.context() as away:
            away.setattr(type(store.transaction()), "park", refuse)
            await it.publish(a, ("k", 1), ("k", 2), ("k", 3))
            await it.until(lambda: it.parts("a") == 3)
            assert [each[1:] for each in it.began] == [("k", 1)]
        await it.until(lambda: a.outcomes()["handled"] == 3, pace=0.1)
        assert await it.seen(a) == {"k": [1, 2, 3]}


async def test_a_first_delivery_costs_nothing_beside_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Town(tmp_path)
    async with it.instance("a") as a:
        store, begun = a.store_of("reader"), []
        assert store is not None
        kind = type(store.transaction())
        begin = kind.begin

        async def note(self: Any) -> None:
            begun.append(self)
            await begin(self)

        await it.later(0.5)  # until it looks again there is half a second
        monkeypatch.setattr(kind, "begin", note)
        await it.publish(a, *(("k", number) for number in range(5)))
        await it.until(lambda: a.outcomes()["handled"] == 5)
        assert len(begun) == 5


# --- another generation of partitions ---------------------------------------------------------------------


async def test_instances_follow_a_new_generation_and_consume_it_when_whoever_noted_it_lets_them(
    tmp_path: Path,
) -> None:
    it = Town(tmp_path)
    gate = it.gates["k", 1] = asyncio.Event()
    async with it.instance("a") as a, it.instance("b"):
        store, transport = a.store_of("reader"), Parted(it.clock, it.server)
        assert store is not None
        [binding] = a.bindings
        earlier = await transport_queues(transport, binding)
        await it.until(lambda: it.parts("a") == it.parts("b") == 2, pace=0.1)
        await it.publish(a, ("k", 1), ("k", 2))
        await it.until(lambda: len(it.began) == 1)
        later = replace(binding, generation=2, partitions=6)
        following = await transport_queues(transport, later)
        epochs = {queue: await store.claim_lease("reader", queue, REPARTITION, 1e9) for queue in following}
        assert await store.next_generation("reader", binding.queue, 1, 6)
        await it.publish(a, ("k", 3))
        before = {each.queue: each.epoch for each in await store.leases("reader", earlier)}

        async def held() -> int:
            return sum(each.is_held for each in await store.leases("reader", earlier))

        async with asyncio.timeout(LONG):
            while await held() > 1:
                await it.later(0.1)
        await it.later(3)
        assert await held() == 1, "it did not wait for what runs, or kept what does not"
        gate.set()
        await it.until(lambda: it.ended["k"] == [1])
        await it.later(2)
        assert not [each for each in await store.leases("reader", earlier) if each.is_held], "it was not let go"
        assert {each.owner for each in await store.leases("reader", following)} == {REPARTITION}
        assert it.parts("a") == it.parts("b") == 0
        await it.later(4)
        assert it.ended["k"] == [1], "the new generation was consumed before it might be"
        assert {each.queue: each.epoch for each in await store.leases("reader", earlier)} == before, "claimed again"
        await move_to(it, store, transport, earlier, following)
        for queue, epoch in epochs.items():
            assert epoch is not None
            await store.release_lease("reader", queue, REPARTITION, epoch, 0)
        await it.until(lambda: it.ended["k"] == [1, 2, 3])
        await it.until(lambda: it.parts("a") == it.parts("b") == 3, pace=0.1)
        assert it.server.parts["Step", None] == {6}, "something still leads to the earlier generation"
        assert await it.seen(a) == {"k": [1, 2, 3]}


@pytest.mark.parametrize("paused", [False, True])
async def test_an_instance_without_a_new_partition_abandons_the_former_ones_until_it_has_worked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    """Another instance has all the new ones, and the broker is away at the first attempt."""
    it = Town(tmp_path)
    abandon, failures = Parted.abandon, [fg.BrokerUnavailable("the broker is away")]

    async def fails_once(self: Parted, binding: Binding) -> None:
        if failures:
            raise failures.pop()
        await abandon(self, binding)

    monkeypatch.setattr(Parted, "abandon", fails_once)
    async with it.instance("a") as a:
        store, [binding] = a.store_of("reader"), a.bindings
        assert store is not None
        if paused:
            await a.pause("reader", Step)
        following = await transport_queues(Parted(it.clock, it.server), replace(binding, generation=2, partitions=6))
        epochs = {queue: await store.claim_lease("reader", queue, REPARTITION, 1e9) for queue in following}
        assert await store.next_generation("reader", binding.queue, 1, 6)
        await it.until(lambda: it.consumer("a")._binding.generation == 2, pace=0.1)
        await it.later(3)
        assert it.server.parts["Step", None] == {4, 6}, "it abandoned what is not all moved"
        for queue, epoch in epochs.items():
            assert epoch is not None
            await store.release_lease("reader", queue, REPARTITION, epoch, 0)
            assert await store.claim_lease("reader", queue, "other", 1e9) is not None
        await it.until(lambda: it.server.parts["Step", None] == {6}, pace=0.1)
        assert (it.parts("a"), failures) == (0, [])


async def transport_queues(transport: Parted, binding: Binding) -> list[str]:
    await transport.bind(binding)
    return await transport.partitions(binding.queue)


async def move_to(it: Town, store: Store, transport: Parted, earlier: list[str], following: list[str]) -> None:
    """Park what waits in earlier partitions for those that follow."""
    found: list[Held] = []
    consumers = [await transport.consume(queue, found.append, prefetch=10) for queue in earlier]
    await it.until(lambda: len(found) == 2)
    async with store.transaction() as transaction:
        for held in found:
            queue = following[int(slot_of(held.envelope.key)) * len(following) // SLOTS]
            row = Parked(message_id_of(held.envelope, "reader"), BEHIND, 0, "k", NEXT, held.envelope, queue)
            await transaction.park("reader", [(row, None)])
            await transaction.next_of_key("reader", queue, "k", it.clock.time())
    for held in found:
        await held.settle("skipped")
    for consumer in consumers:
        await consumer.close()


# --- what kills its process -------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["key", "serial", "none"])
async def test_what_kills_its_process_is_a_dead_letter_in_the_end_and_holds_up_nobody(
    tmp_path: Path, order: str
) -> None:
    options: dict[str, Any] = {
        "key": {},
        "serial": {"order": fg.Serial(), "partitions": None},
        "none": {"key": None, "partitions": None},
    }
    it = Town(tmp_path, **options[order])
    deadly = ("k", 2)
    it.deadly = deadly
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), deadly, ("k", 3), ("other", 1))
        await it.until(lambda: a.outcomes()["dead"] == 1 and sum(map(len, it.ended.values())) >= 3, pace=0.5)
        await it.until_parked(a, 0)
        [letter] = await a.dead_letters("reader")
        assert letter.reason == "max-deliveries"
        most = a._workers[0].binding.max_deliveries
        assert most <= [each[1:] for each in it.began].count(deadly) <= most + 1
        assert {key: sorted(numbers) for key, numbers in (await it.seen(a)).items()} == {"k": [1, 3], "other": [1]}


async def test_restarts_use_up_no_tries(tmp_path: Path) -> None:
    it = Town(tmp_path)
    it.failing["k", 1] = 1
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1), ("k", 2))
        await it.until_parked(a, 2)
    for _ in range(30):
        async with it.instance("again"):
            await it.later(0.2)
    async with it.instance("b") as b:
        assert [row.starts for row in await it.parked(b)] == [0, 0]
        await it.later(11)
        await it.until(lambda: b.outcomes()["handled"] == 2)


async def test_a_handler_that_asks_for_later_again_and_again_uses_up_no_starts(tmp_path: Path) -> None:
    it = Town(tmp_path)
    tries = []
    node = fg.Node("reader")

    @node.on(Step, source="author", key="key")
    async def handle(step: Step) -> None:
        tries.append(step.number)
        if len(tries) < 40:
            raise fg.RetryAfter(1)

    it.node = lambda name: node  # type: ignore[method-assign]
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1))
        await it.until(lambda: a.outcomes()["handled"] == 1, pace=0.5)
        assert (len(tries), a.outcomes()["dead"]) == (40, 0)


async def test_what_waits_of_no_partition_is_tried_by_one_instance(tmp_path: Path) -> None:
    it = Town(tmp_path, key=None, partitions=None)
    numbers = range(20)
    it.failing.update({("k", number): 1 for number in numbers})
    async with it.instance("a") as a, it.instance("b"):
        await it.publish(a, *(("k", number) for number in numbers))
        await it.until_parked(a, 20)
        await it.later(11)
        await it.until_parked(a, 0)
    assert Counter(number for _, _, number in it.began) == dict.fromkeys(numbers, 2)


async def test_what_a_dead_instance_had_claimed_is_tried_by_another(tmp_path: Path) -> None:
    it = Town(tmp_path, key=None, partitions=None)
    it.failing["k", 1] = 1
    async with it.instance("a") as a:
        await it.publish(a, ("k", 1))
        await it.until_parked(a, 1)
        store = a.store_of("reader")
        assert store is not None
        async with store.transaction() as transaction:  # one that dies after it has claimed it
            assert await transaction.claim_parked("reader", [], it.clock.time() + 20, 10, "dead", 30)
        await it.later(25)
        assert len(it.began) == 1
        await it.later(10)
        await it.until(lambda: a.outcomes()["handled"] == 1)


# --- what is refused --------------------------------------------------------------------------------------


def test_order_by_partitions_needs_a_store() -> None:
    node = Town(Path()).node("a")
    node.schema = None
    with pytest.raises(fg.ConfigurationError, match=r'needs a store: the transport Parted lacks .*"order", "place"'):
        fg.Bus(Parted(FakeClock()), nodes=[node])
