"""A handler that takes its time, in a batch of many: the others go on without it, and everything happens once."""

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.bus.lanes import Lanes
from faregate.core.recognition import Recognition
from faregate.core.settling import Settling
from faregate.core.unit import UnitOfWork
from faregate.errors import StoreConflict
from faregate.message import Envelope
from faregate.transports.memory import MemoryTransport
from tests.core.rig import INSERT, LONG, TABLE, Answered, Asked, committed, in_memory, notes, numbers

MANY, HANGING = 256, 100


class Noted(fg.Event):
    account: str
    n: int


class Hang:
    """The node `answering`, whose handler hangs at one message until `gate` is set."""

    def __init__(
        self,
        url: str | None,
        *,
        at: int = HANGING,
        others: int = MANY - 1,
        writes_first: bool = False,
        **options: Any,
    ) -> None:
        self.heard: Counter[int] = Counter()
        self.runs: Counter[int] = Counter()
        self.tries: set[int] = set()
        self.hangs, self.gate, self.others_are_done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        asking, answering, hearing = (
            fg.Node("asking"),
            fg.Node("answering", schema=TABLE if url else None),
            fg.Node("hearing"),
        )

        @answering.on(Asked, source="asking", **options)
        async def answer(asked: Asked, ctx: fg.Context) -> Answered:
            self.runs[asked.n] += 1
            self.tries.add(ctx._work.delivery.tries)
            if asked.n == at and not writes_first:
                self.hangs.set()
                await self.gate.wait()
            if url is not None:
                await ctx.db.execute(INSERT, (asked.n,))
            if asked.n == at and writes_first:
                self.hangs.set()
                await self.gate.wait()
            return Answered(n=asked.n)

        @hearing.on(Answered, source="answering")
        async def hear(answered: Answered) -> None:
            self.heard[answered.n] += 1
            if len(self.heard) == others:
                self.others_are_done.set()

        store = {} if url is None else {"answering": url}
        self.bus = fg.Bus("memory:", nodes=[asking, answering, hearing], store=store, drain_seconds=1)


@pytest.mark.usefixtures("one_batch")
async def test_of_many_without_a_store_one_hangs_and_all_others_are_handled() -> None:
    it = Hang(None)
    async with asyncio.timeout(LONG), it.bus:
        await it.bus.publish_many(numbers(MANY), node="asking")
        await it.others_are_done.wait()
        assert it.hangs.is_set() and HANGING not in it.heard
        it.gate.set()
        await it.bus.idle()
    assert it.runs == it.heard == Counter(range(MANY))
    assert it.tries == {1}, "what was put back has begun once"


async def test_of_many_with_a_store_one_hangs_and_all_others_are_handled(either_way: str) -> None:
    it = Hang(either_way)
    async with asyncio.timeout(LONG), it.bus:
        await it.bus.publish_many(numbers(MANY), node="asking")
        await it.others_are_done.wait()
        assert HANGING not in it.heard and len(await notes(it.bus)) == MANY - 1
        it.gate.set()
        await it.bus.idle()
        assert await notes(it.bus) == [*range(MANY)]
    assert it.runs == it.heard == Counter(range(MANY))
    assert it.tries == {1}


async def test_one_that_hangs_with_the_transaction_open_keeps_what_is_in_there_and_nothing_happens_twice(
    either_way: str,
) -> None:
    it = Hang(either_way, writes_first=True)
    async with asyncio.timeout(LONG), it.bus:
        await it.bus.publish_many(numbers(MANY), node="asking")
        await it.hangs.wait()
        await asyncio.sleep(0.3)  # longer than it is waited for
        it.gate.set()
        await it.bus.idle()
        assert await notes(it.bus) == [*range(MANY)]
    assert it.heard == Counter(range(MANY)) and it.bus.outcomes()["dead"] == 0


@pytest.mark.parametrize("error", [StoreConflict, fg.CommitUnknown])
async def test_a_commit_without_the_one_that_hangs_may_fail_and_everything_happens_once(
    either_way: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, failed = UnitOfWork.commit, asyncio.Event()

    async def commit(unit: UnitOfWork) -> None:
        if it.hangs.is_set() and not failed.is_set():
            failed.set()
            if error is fg.CommitUnknown:
                await plain(unit)
            raise error("once")
        await plain(unit)

    monkeypatch.setattr(UnitOfWork, "commit", commit)
    it = Hang(either_way)
    async with asyncio.timeout(LONG), it.bus:
        await it.bus.publish_many(numbers(MANY), node="asking")
        await failed.wait()
        it.gate.set()
        await it.bus.idle()
        assert await notes(it.bus) == [*range(MANY)]
    assert it.heard == Counter(range(MANY)) and it.bus.outcomes()["dead"] == 0


@pytest.mark.usefixtures("one_batch")
@pytest.mark.parametrize("store", [None, "memory:"])
async def test_what_a_batch_that_parts_is_made_of_is_gone_without_the_garbage_collector(store: str | None) -> None:
    it = Hang(store)
    async with asyncio.timeout(LONG), it.bus:
        gc.collect()
        before = in_memory()
        gc.disable()
        try:
            await it.bus.publish_many(numbers(MANY), node="asking")
            await it.others_are_done.wait()
            it.gate.set()
            await it.bus.idle()
            left = in_memory() - before
        finally:
            gc.enable()
    assert not left


@pytest.mark.parametrize("order", [fg.Serial(), fg.Parallel(1)], ids=["serial", "one lane"])
async def test_in_one_lane_nothing_overtakes_the_one_that_hangs(either_way: str, order: Any) -> None:
    it = Hang(either_way, at=3, others=3, order=order)
    async with asyncio.timeout(LONG), it.bus:
        await it.bus.publish_many(numbers(8), node="asking")
        await it.others_are_done.wait()
        assert [*it.runs] == [0, 1, 2, 3] and it.heard == Counter(range(3)), "what has ended is sent"
        it.gate.set()
        await it.bus.idle()
    assert [*it.runs] == [*range(8)] and it.heard == it.runs == Counter(range(8))


@pytest.mark.usefixtures("one_batch")
@pytest.mark.parametrize("store", [None, "memory:"])
async def test_what_follows_a_message_of_a_slow_batch_in_its_key_does_not_wait_for_the_batch(store: str | None) -> None:
    shop, books = fg.Node("shop"), fg.Node("books")
    noted: list[tuple[str, int]] = []
    gate, followed = asyncio.Event(), asyncio.Event()

    @books.on(Noted, source="shop", key="account", order=fg.ByKey(lanes=2))
    async def note(event: Noted) -> None:
        if event.account == "slow":
            await gate.wait()
        noted.append((event.account, event.n))
        if event.n == 1:
            followed.set()

    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=[shop, books], store=store) as bus:
        batch = [("a", 0), ("slow", 0), ("b", 0), ("a", 1)]
        await bus.publish_many([Noted(account=account, n=n) for account, n in batch], node="shop")
        await followed.wait()
        assert ("slow", 0) not in noted and noted.index(("a", 0)) < noted.index(("a", 1))
        gate.set()
        await bus.idle()
    assert sorted(noted) == sorted(batch)


@pytest.mark.usefixtures("one_batch")
async def test_a_batch_that_is_slower_than_was_thought_puts_back_what_it_has_not_begun() -> None:
    shop, books = fg.Node("shop"), fg.Node("books")
    units: set[int] = set()
    tries: list[int] = []

    @books.on(Asked, source="shop")
    async def note(asked: Asked, ctx: fg.Context) -> None:
        assert ctx._work is not None
        units.add(id(ctx._work.unit))
        kept.append(ctx._work.unit)
        tries.append(ctx._work.delivery.tries)
        await asyncio.sleep(0.03)

    kept: list[Any] = []
    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=[shop, books]) as bus:
        await bus.publish_many(numbers(6), node="shop")
        await bus.idle()
    assert len(units) >= 3 and tries == [1] * 6


HOT = "create table if not exists hot(n integer); insert into hot values (0)"
RAISE = "update hot set n = n + 1"


async def test_one_that_goes_on_while_the_others_are_committed_does_not_wait_for_them_with_what_they_want(
    either_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=HOT)
    apart: list[UnitOfWork] = []
    hung: list[int] = []
    gate, has_locked_the_row = asyncio.Event(), asyncio.Event()
    plain_part, plain_commit = UnitOfWork.part, UnitOfWork.commit

    def part(unit: UnitOfWork, *given: Any) -> UnitOfWork:
        apart.append(plain_part(unit, *given))
        return apart[-1]

    async def commit(unit: UnitOfWork) -> None:
        if unit in apart:
            gate.set()
            await asyncio.wait([asyncio.ensure_future(has_locked_the_row.wait())], timeout=0.2)
        await plain_commit(unit)

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        assert ctx._work is not None and ctx._work.unit is not None
        if not hung and ctx._work is not ctx._work.unit.works[0]:  # others of its batch are decided
            hung.append(asked.n)
            await gate.wait()
            await ctx.db.execute(RAISE)
            has_locked_the_row.set()
        else:
            ctx.db.write(RAISE)

    monkeypatch.setattr(UnitOfWork, "part", part)
    monkeypatch.setattr(UnitOfWork, "commit", commit)
    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=[asking, answering], store=either_way) as bus:
        await bus.publish_many(numbers(MANY), node="asking")
        await bus.idle()
        assert apart and await committed(bus, "select n from hot") == [(MANY,)]


async def test_a_batch_does_not_part_from_a_message_that_is_about_to_be_done(
    either_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=HOT)
    plain, slow = Recognition.mark, asyncio.Event()

    async def mark(recognition: Recognition, transaction: Any, works: Any) -> None:
        await plain(recognition, transaction, works)
        if len(works) > 50 and works[0].unit.current is not None and not slow.is_set():
            slow.set()
            await asyncio.sleep(0.3)  # longer than it is waited for

    @answering.use
    async def count(ctx: fg.Context, call_next: Any) -> None:
        await call_next()
        if ctx.message.n >= HANGING:
            ctx.db.write(RAISE)

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> None:
        pass

    monkeypatch.setattr(Recognition, "mark", mark)
    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=[asking, answering], store=either_way) as bus:
        await bus.publish_many(numbers(MANY), node="asking")
        await bus.idle()
        assert await committed(bus, "select n from hot") == [(MANY - HANGING,)]


@pytest.mark.usefixtures("one_batch")
async def test_what_has_not_begun_when_the_bus_stops_in_the_middle_of_parting_has_used_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")
    plain_part, plain_settle, plain_close = UnitOfWork.part, Settling.settle_all, Lanes.close
    parted, stops, closes = asyncio.Event(), asyncio.Event(), asyncio.Event()
    counts: dict[int, tuple[int, bool]] = {}

    def part(unit: UnitOfWork, *given: Any) -> UnitOfWork:
        parted.set()
        return plain_part(unit, *given)

    async def settle_all(settling: Settling, works: Any) -> None:
        await plain_settle(settling, works)
        if parted.is_set():
            stops.set()
            await closes.wait()

    async def close(lanes: Lanes, *given: Any) -> int:
        closes.set()
        return await plain_close(lanes, *given)

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        if asked.n == HANGING and not closes.is_set():
            await asyncio.Event().wait()
        if closes.is_set():
            counts[asked.n] = ctx._work.delivery.tries, ctx.redelivered

    monkeypatch.setattr(UnitOfWork, "part", part)
    monkeypatch.setattr(Settling, "settle_all", settle_all)
    monkeypatch.setattr(Lanes, "close", close)
    async with asyncio.timeout(LONG):
        async with fg.Bus(f"journal:{tmp_path}", nodes=[asking, answering], drain_seconds=0) as bus:
            await bus.publish_many(numbers(MANY), node="asking")
            await stops.wait()
        async with fg.Bus(f"journal:{tmp_path}", nodes=[asking, answering]) as bus:
            await bus.idle()
    assert counts.pop(HANGING) == (2, True)
    assert counts and set(counts.values()) == {(1, False)}


@pytest.mark.usefixtures("one_batch")
async def test_without_a_store_the_one_that_hung_sends_its_message_whatever_other_lanes_did_meanwhile() -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering"), fg.Node("hearing")
    gate, hangs, sending, send, silent = (asyncio.Event() for _ in range(5))
    heard: Counter[int] = Counter()

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> Answered | None:
        if asked.n == MANY:
            silent.set()
            return None
        if asked.n == MANY - 1:
            hangs.set()
            await gate.wait()
        return Answered(n=asked.n)

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard[answered.n] += 1

    class Slow(MemoryTransport):
        async def publish(self, envelopes: Sequence[Envelope]) -> None:
            if hangs.is_set() and not gate.is_set():
                sending.set()
                await send.wait()
            await super().publish(envelopes)

    async with asyncio.timeout(LONG), fg.Bus(Slow(), nodes=[asking, answering, hearing]) as bus:
        await bus.publish_many(numbers(MANY), node="asking")
        await sending.wait()  # the batch parts; what the others answered is on its way
        gate.set()
        await bus.publish(Asked(n=MANY))
        await silent.wait()
        send.set()
        await bus.idle()
    assert heard == Counter(range(MANY))
