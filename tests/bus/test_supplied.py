"""The bus supplies what a transport lacks: a node with a store works on one that keeps the core alone."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.bus.supplied import ParkedHold, Waiting
from faregate.core.node_store import NodeStore
from faregate.errors import StoreUnavailable
from faregate.ports.store import Parked, Store
from faregate.stores.sqlite import SqliteStore
from faregate.testing import FakeClock
from tests.bus.core_only import CoreHeld, CoreOnly

LONG = 30.0


class Noted(fg.Event):
    number: int


class Station:
    """A reader whose handler fails as often as it is told."""

    def __init__(self, folder: Path, *, failures: int = 0, **subscription: object) -> None:
        self.clock = FakeClock()
        self.transport = CoreOnly(self.clock)
        self.author, self.reader = fg.Node("author"), fg.Node("reader")
        self.failures = failures
        self.tries: list[tuple[int, int]] = []
        """The number of each message, and the redeliveries that it had."""
        self.tried_at = 0.0
        self.store = SqliteStore(f"sqlite:{folder}/reader.db", clock=self.clock)
        options = {"retry": None, "redeliver": fg.Redeliver(10, 20), **subscription}
        self.reader.on(Noted, source="author", **options)(self.handle)  # type: ignore[call-overload]

    async def handle(self, noted: Noted, ctx: fg.Context) -> None:
        self.tries.append((noted.number, ctx.redeliveries))
        self.tried_at = self.clock.time()  # until the store has committed, more time may pass
        if len(self.tries) <= self.failures:
            raise ValueError("not yet")

    def bus(self) -> fg.Bus:
        store: Store = self.store
        return fg.Bus(self.transport, nodes=[self.author, self.reader], store={"reader": store}, clock=self.clock)

    async def until(self, done: Callable[[], bool]) -> None:
        """Hardly any time passes, but what happens now happens."""
        async with asyncio.timeout(LONG):
            while not done():
                await self.clock.advance(0.001)
                await asyncio.sleep(0.001)  # the store has a thread of its own

    async def parked(self) -> list[Parked]:
        async with self.store.transaction() as transaction:
            return await transaction.parked("reader")

    async def ends(self, bus: fg.Bus, *, waiting: int = 0, **counts: int) -> None:
        """Wait until that many messages ended so, and that many wait in the store."""
        await self.until(lambda: {name: bus.outcomes()[name] for name in counts} == counts)
        async with asyncio.timeout(LONG):
            while len(await self.parked()) != waiting:
                await self.clock.advance(0.001)


async def test_a_later_try_waits_in_the_store_and_is_handed_in_when_it_is_due(tmp_path: Path) -> None:
    it = Station(tmp_path, failures=2)
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        await it.ends(bus, redelivered=1, waiting=1)
        [row] = await it.parked()
        assert row.redeliveries == 1 and it.tried_at <= row.due - 10 <= it.clock.time()
        await it.clock.advance(row.due - it.clock.time() - 1)
        assert it.tries == [(1, 0)], "its delay has not passed"
        await it.clock.advance(2)
        await it.ends(bus, redelivered=2, waiting=1)
        await it.clock.advance(21)
        await it.ends(bus, handled=1, dead=0)
    assert it.tries == [(1, 0), (1, 1), (1, 2)]


async def test_a_message_whose_tries_are_used_up_is_a_dead_letter_in_the_store(tmp_path: Path) -> None:
    it = Station(tmp_path, failures=99)
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        for again, delay in ((1, 11), (2, 21)):
            await it.ends(bus, redelivered=again, waiting=1)
            await it.clock.advance(delay)
        await it.ends(bus, dead=1, handled=0)
        [letter] = await bus.dead_letters("reader")
        assert (letter.reason, letter.redeliveries) == ("failed", 2)
        assert await bus.dead_letters() == [letter]


async def test_what_waits_is_handed_in_by_the_process_that_comes_after(tmp_path: Path) -> None:
    it = Station(tmp_path, failures=1)
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        await it.ends(bus, redelivered=1, waiting=1)
    it.transport = CoreOnly(it.clock)  # with nothing in it
    async with it.bus() as bus:
        await it.clock.advance(11)
        await it.ends(bus, handled=1)
    assert it.tries == [(1, 0), (1, 1)]


@pytest.mark.parametrize("failures", [1, 99])
async def test_the_row_of_what_waited_goes_with_the_commit_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """So a process that dies right behind it leaves nothing to handle again, though nobody keeps a ledger."""
    it = Station(tmp_path, failures=failures, redeliver=fg.Redeliver(10), dedup="off" if failures == 1 else "ledger")
    ended = asyncio.Event()

    async def die(self: object, parked: ParkedHold) -> None:
        ended.set()

    monkeypatch.setattr(Waiting, "end", die)
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        await it.ends(bus, redelivered=1, waiting=1)
        await it.clock.advance(11)
        await it.until(ended.is_set)
        assert await it.parked() == []


@pytest.mark.parametrize("copy", ["redelivered", "redelivered and counted", "published again"])
async def test_a_process_that_dies_before_it_settles_leads_to_a_copy_that_is_handled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: str
) -> None:
    it = Station(tmp_path, failures=1)

    async def die(self: CoreHeld, outcome: str) -> None:
        await asyncio.get_running_loop().create_future()

    with monkeypatch.context() as dying:
        dying.setattr(CoreHeld, "settle", die)
        bus = it.bus()
        await bus.start()
        await bus.publish(Noted(number=1), node="author")
        await it.ends(bus, waiting=1)
        await bus.stop(0)
    it.transport = CoreOnly(it.clock)
    is_known = copy.startswith("redelivered")
    if is_known:
        monkeypatch.setattr(CoreHeld, "redelivered", True)
    if copy == "redelivered and counted":  # such a message is not parked for counting its starts
        monkeypatch.setattr(CoreHeld, "tries", 1)
    async with it.bus() as bus:
        [row] = await it.parked()
        await it.transport.publish([row.envelope])  # what was never settled
        if is_known:
            await it.transport._behind.idle()
            assert len(it.tries) == 1, "it was tried before its time"
        else:  # a transport that does not say so
            await it.ends(bus, handled=1, waiting=1)
        await it.clock.advance(11)
        await it.ends(bus, handled=1, duplicate=0 if is_known else 1)
    assert len(it.tries) == 2


async def test_a_scheduled_message_waits_in_the_store_of_whoever_gets_it(tmp_path: Path) -> None:
    it = Station(tmp_path)
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author", delay=100)
        await bus.publish(Noted(number=2), node="author")
        await it.ends(bus, handled=1, waiting=1)
        await it.clock.advance(99)
        assert it.tries == [(2, 0)], "its time has not come"
        await it.clock.advance(2)
        await it.ends(bus, handled=2)
    assert it.tries == [(2, 0), (1, 0)]


@pytest.mark.parametrize("by", ["sender", "subscription"])
async def test_a_message_that_comes_too_late_is_a_dead_letter_as_expired(tmp_path: Path, by: str) -> None:
    it = Station(tmp_path, expires=5.0 if by == "subscription" else None)
    async with it.bus() as bus:
        await bus.pause("reader", Noted)
        options = {"expires": 5.0} if by == "sender" else {}
        await bus.publish(Noted(number=1), node="author", **options)  # type: ignore[arg-type]
        await it.clock.advance(6)
        await bus.resume("reader", Noted)
        await it.ends(bus, dead=1, handled=0)
        await it.until(lambda: not bus._stores._housekeepers["reader"].busy)
        [letter] = await bus.dead_letters("reader")
    assert (letter.reason, it.tries) == ("expired", [])


async def test_what_was_fetched_expires_when_its_turn_comes_too_late(tmp_path: Path) -> None:
    it = Station(tmp_path, expires=5.0, order=fg.Parallel(1), retry=fg.Retry(1, delay=10), failures=1)
    async with it.bus() as bus:
        for number in (1, 2):
            await bus.publish(Noted(number=number), node="author")
        await it.until(lambda: len(it.tries) == 1)
        await it.clock.advance(11)
        await it.ends(bus, handled=1, dead=1)
        [letter] = await bus.dead_letters("reader")
    assert (letter.reason, it.tries) == ("expired", [(1, 0), (1, 0)])


async def test_a_message_that_was_started_too_often_is_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Station(tmp_path)
    monkeypatch.setattr(CoreHeld, "tries", 1_000)
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        await it.ends(bus, dead=1, handled=0)
        await it.until(lambda: not bus._stores._housekeepers["reader"].busy)
        [letter] = await bus.dead_letters("reader")
    assert (letter.reason, it.tries) == ("max-deliveries", [])


async def test_while_the_store_is_away_a_message_waits_here_and_goes_back_to_the_transport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = Station(tmp_path, failures=1)

    async def refuse(self: object, *arguments: object) -> None:
        raise StoreUnavailable("the store is away")

    async with it.bus() as bus:
        with monkeypatch.context() as away:
            away.setattr(type(it.store.transaction()), "park", refuse)
            await bus.publish(Noted(number=1), node="author")
            await it.ends(bus, redelivered=1)
        await it.clock.advance(11)
        await it.ends(bus, handled=1)
    assert it.tries == [(1, 0), (1, 0)]


async def test_a_paused_subscription_is_handed_nothing_that_waited(tmp_path: Path) -> None:
    it = Station(tmp_path, failures=1)
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        await it.ends(bus, redelivered=1, waiting=1)
        await bus.pause("reader", Noted)
        await it.clock.advance(30)
        assert len(it.tries) == 1
        await bus.resume("reader", Noted)
        await it.clock.advance(2)
        await it.ends(bus, handled=1)


# --- what is refused --------------------------------------------------------------------------------------


async def ignore(noted: Noted) -> None:
    """Nothing is done with it."""


def test_a_node_without_a_store_needs_what_the_transport_lacks() -> None:
    reader = fg.Node("reader")
    reader.on(Noted, source="author")(ignore)
    with pytest.raises(fg.ConfigurationError) as refused:
        fg.Bus(CoreOnly(FakeClock()), nodes=[reader])
    assert 'the transport CoreOnly lacks "dead letters", "delay", "expire"' in str(refused.value)
    assert "ignore at reader (Noted from author) needs a store" in str(refused.value)


@pytest.mark.parametrize("order", [fg.Serial(), fg.ByKey()])
def test_a_subscription_with_order_is_refused_by_name(tmp_path: Path, order: object) -> None:
    reader = fg.Node("reader")
    reader.on(Noted, source="author", key="number", order=order)(ignore)  # type: ignore[call-overload]
    with pytest.raises(fg.ConfigurationError, match=r'asks for order, and .* it lacks "order", "place"'):
        fg.Bus(CoreOnly(FakeClock()), nodes=[reader], store=f"sqlite:{tmp_path}/reader.db")


class CountingCore(CoreOnly):
    async def idle(self) -> None:
        await self._behind.idle()


async def test_the_bus_is_not_idle_while_a_later_try_waits_and_idle_while_one_is_scheduled(tmp_path: Path) -> None:
    it = Station(tmp_path, failures=1)
    it.transport = CountingCore(it.clock)
    it.transport.capabilities = frozenset({"count"})
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        await it.ends(bus, redelivered=1, waiting=1)
        landing = asyncio.ensure_future(bus.idle())
        await it.clock.advance(5)
        assert not landing.done()
        await bus.publish(Noted(number=2), node="author", delay=1_000)
        await it.clock.advance(6)
        await it.until(landing.done)
        await landing
        assert bus.outcomes()["handled"] == 1
        assert [row.envelope.delay for row in await it.parked()] == [1_000]


async def test_idle_says_that_the_transport_does_not_know_what_waits(tmp_path: Path) -> None:
    async with Station(tmp_path).bus() as bus:
        with pytest.raises(fg.ConfigurationError, match='lacks "count"'):
            await bus.idle()


def test_a_transport_must_have_what_it_says_it_can_do() -> None:
    transport = CoreOnly(FakeClock())
    transport.capabilities = frozenset({"browse"})
    with pytest.raises(fg.ConfigurationError, match="CoreOnly is no transport: it lacks dead_letters"):
        fg.Bus(transport, nodes=[fg.Node("reader")])


# --- filters --------------------------------------------------------------------------------------------------


async def test_what_is_filtered_has_a_row_in_the_ledger_as_no_settlement_tells_of_it(tmp_path: Path) -> None:
    it = Station(tmp_path, where="number > 1")
    async with it.bus() as bus:
        for number in (1, 2):
            await bus.publish(Noted(number=number), node="author")
        await it.ends(bus, handled=1, filtered=1)
        async with it.store.transaction() as transaction:
            rows = await transaction.fetchall("select outcome, key from faregate_ledger order by outcome")
    assert [tuple(row) for row in rows] == [("filtered", None), ("handled", None)]
    assert it.tries == [(2, 0)]


async def test_while_the_store_is_away_what_is_filtered_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = Station(tmp_path, where="number > 1")
    away = True
    commit = NodeStore.commit

    async def maybe(self: NodeStore, do: Any) -> Any:
        if away:
            raise StoreUnavailable("away")
        return await commit(self, do)

    monkeypatch.setattr(NodeStore, "commit", maybe)
    async with it.bus() as bus:
        await bus.publish(Noted(number=1), node="author")
        await it.ends(bus, filtered=0, waiting=1)
        away = False
        await it.clock.advance(11)
        await it.ends(bus, filtered=1, dead=0)
    assert not it.tries
