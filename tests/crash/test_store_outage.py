"""The store is away: at the start that is an error which says so; while running, messages wait and lose no try."""

import asyncio
from types import SimpleNamespace
from uuid import uuid4

import psycopg
import pytest

import faregate as fg
from faregate.errors import StoreUnavailable
from faregate.stores.postgres.server import PostgresServer
from faregate.stores.sql import opening
from tests.bus.outage import Outage, effects, steps, worker_of
from tests.crash.places import query
from tests.crash.sequence import EVERYTHING, STEPS, Line, arrivals
from tests.crash.server import PrivatePostgres

UNREACHABLE = "postgresql://shop:secret@127.0.0.1:1/shop"
LONG = 60


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries to open a store, which take no time here."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(opening, "asyncio", SimpleNamespace(sleep=sleep))
    return waited


@pytest.fixture
def database(server: PrivatePostgres) -> str:
    """A database of the test's own on the server that may be crashed."""
    name = f"steps_{uuid4().hex[:8]}"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return server.url(name)


class PostgresLine(Line):
    """Nothing is tried twice: a failure that counts would be a dead letter at once."""

    def __init__(self) -> None:
        super().__init__(retry=None, redeliver=None)
        self.second.schema = "create table if not exists arrivals (place serial, lane text, number integer)"


async def test_a_store_that_is_down_at_the_start_is_named_after_some_tries(pauses: list[float]) -> None:
    bus = fg.Bus("memory:", nodes=Line().nodes, store=UNREACHABLE)
    with pytest.raises(
        StoreUnavailable, match=r"gave up on postgresql://.*127\.0\.0\.1:1/shop after 5 tries"
    ) as caught:
        await bus.start()
    assert "secret" not in str(caught.value)
    assert "check that the server runs" in str(caught.value)
    assert pauses == [1, 2, 3, 4]
    with pytest.raises(fg.ConfigurationError):
        await bus.publish(STEPS[0], node="shop")


@pytest.mark.services
async def test_a_store_that_comes_while_the_bus_starts_is_waited_for(server: PrivatePostgres, database: str) -> None:
    server.crash()
    try:
        async with asyncio.timeout(LONG):
            bus = fg.Bus("memory:", nodes=PostgresLine().nodes, store=database)
            starting = asyncio.ensure_future(bus.start())
            await asyncio.sleep(0)
            assert not starting.done()
    finally:
        await asyncio.to_thread(server.start)
    async with asyncio.timeout(LONG):
        await starting
        await bus.publish(STEPS[0], node="shop")
        await bus.idle()
        assert await arrivals(bus) == {"lane-0": [0]}
        await bus.stop()


@pytest.mark.services
@pytest.mark.usefixtures("impatient")
async def test_messages_wait_for_a_store_that_is_down_and_lose_no_try(
    server: PrivatePostgres, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PostgresServer.__init__.__kwdefaults__, "wait_seconds", 0.3)
    half = len(STEPS) // 2
    line = PostgresLine()
    async with asyncio.timeout(2 * LONG), fg.Bus("memory:", nodes=line.nodes, store=database) as bus:
        for step in STEPS[:half]:
            await bus.publish(step, node="shop")
        await asyncio.to_thread(server.crash)
        try:
            for step in STEPS[half:]:
                await bus.publish(step, node="shop")
            while not all(each.paused for each in bus.counts()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        finally:
            await asyncio.to_thread(server.start)
        while True:
            try:
                await bus.idle()
                break
            except StoreUnavailable:  # the connections come back one after another
                await asyncio.sleep(0.05)
        assert await bus.dead_letters() == []
        assert await arrivals(bus) == EVERYTHING
        assert bus.outcomes()["dead"] == 0
    assert query(database, "select count(*) from faregate_dead") == [(0,)]
    assert query(database, "select count(*) from faregate_outbox") == [(0,)]
    assert query(database, "select count(*) from faregate_ledger") == [(2 * len(STEPS),)]


@pytest.mark.services
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
async def test_postgresql_stopped_and_started_costs_no_dead_letter_and_doubles_nothing(
    count: int, server: PrivatePostgres, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, under load. Some messages wait for each crash, so that somebody needs the store while it is away."""
    monkeypatch.setitem(PostgresServer.__init__.__kwdefaults__, "wait_seconds", 0.3)
    switch = fg.KillSwitch(every=0.5)
    outage, sent = Outage(key="key", retry=None, redeliver=None, kill_switch=switch), steps(count)
    gates = {count // 2: asyncio.Event(), count - 20: asyncio.Event()}

    async def run(step: object, ctx: fg.Context) -> None:
        for number, gate in gates.items():
            if getattr(step, "number", 0) >= number:
                await gate.wait()

    def done(bus: fg.Bus) -> int:
        """Those whose commit was cut off, and had happened, are duplicates when they come again."""
        return bus.outcomes()["handled"] + bus.outcomes()["duplicate"]

    outage.run = run
    async with asyncio.timeout(10 * LONG), outage.bus(store=database) as bus:
        await bus.publish_many(sent, node="shop")
        for share, gate in zip((0.1, 0.5), gates.values(), strict=True):
            while done(bus) < share * count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.to_thread(server.crash)
            gate.set()
            try:
                while not worker_of(bus).switch.is_open or worker_of(bus).busy:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                calls = outage.total
                await asyncio.sleep(2 * switch.every)
                assert outage.total == calls, "a handler began while the store was away"
            finally:
                await asyncio.to_thread(server.start)
        while done(bus) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert bus.outcomes()["dead"] == 0
        assert bus.outcomes()["redelivered"] <= 2 * 10, "more than 10 lanes commit at a time"
        assert await bus.dead_letters() == []
        assert await effects(bus) == [(each.key, each.number) for each in sent]
        assert bus.alarms["kill-switch"] >= 1
    for numbers in outage.ended.values():
        assert list(dict.fromkeys(numbers)) == sorted(set(numbers)), "a key is out of order"
