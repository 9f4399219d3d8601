"""A bench on every store: rows can be read, the clock is simulated, and nothing is left behind."""

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
import pytest

import faregate as fg
from tests.presence import address

STORES = ["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.services)]


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {"memory": lambda: "memory:", "sqlite": lambda: f"sqlite:{tmp_path}/bench.db"}
    return places.get(request.param, lambda: address("FAREGATE_TEST_POSTGRES"))()


class OrderPlaced(fg.Event):
    order_id: str
    fails: int = 0


class Billed(fg.Event):
    order_id: str


def billing_node(**options: Any) -> fg.Node:
    billing = fg.Node("billing", schema="create table if not exists invoices(id text, total integer)")

    @billing.on(OrderPlaced, source="shop", retry=None, redeliver=fg.Redeliver(10, 60), **options)
    async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        await ctx.db.execute("insert into invoices values (?, ?)", (order.order_id, 1))
        if ctx.redeliveries < order.fails:
            raise OSError("not yet")
        return Billed(order_id=order.order_id)

    return billing


async def test_rows_time_and_dead_letters(url: str) -> None:
    billing = billing_node()
    async with fg.testing.bench(billing, store=url) as bench:
        assert await bench.execute(billing, "insert into invoices values (?, ?)", ("seed", 5)) == 1
        await bench.publish(OrderPlaced(order_id="1", fails=2))
        await bench.publish(OrderPlaced(order_id="2", fails=3))
        await bench.advance(9)
        assert bench.outcomes()["redelivered"] == 2
        assert await bench.fetchall("billing", "select id from invoices") == [("seed",)]
        await bench.advance(2)
        assert bench.outcomes()["redelivered"] == 4
        await bench.settle()
        assert bench.sent() == [Billed(order_id="1")]
        [letter] = bench.dead_letters()
        assert bench.dead_letters("billing") == bench.dead_letters(billing, status=None) == [letter]
        assert bench.dead_letters("shop") == bench.dead_letters(status="discarded") == []
        rows = await bench.fetchall(billing, "select id, total from invoices where id <> ? order by id", ("seed",))
        assert rows == [("1", 1)]
        assert await bench.fetchone(billing, "select total from invoices where id = ?", ("seed",)) == (5,)
        assert await bench.fetchone(billing, "select total from invoices where id = ?", ("none",)) is None
        await bench.bus.discard(letter.message_id)
        await bench.settle()
        assert [each.status for each in bench.dead_letters(status=None)] == ["discarded"] and bench.dead_letters() == []


async def test_a_plain_handler_and_a_crash(url: str) -> None:
    billing = fg.Node("billing", schema="create table if not exists invoices(id text)")

    @billing.on(OrderPlaced, source="shop")
    def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        ctx.db.execute("insert into invoices values (?)", (order.order_id,))
        return Billed(order_id=order.order_id)

    with fg.testing.crash_at("unit.after-commit"):
        async with fg.testing.bench(billing, store=url) as bench:
            await bench.publish(OrderPlaced(order_id="1"))
            await bench.settle()
            assert len(bench.sent()) == 1 and bench.outcomes()["duplicate"] == 1
            assert await bench.fetchall(billing, "select * from invoices") == [("1",)]


async def test_tokens_are_in_the_same_store(url: str) -> None:
    async with fg.testing.bench(billing_node(dedup="tokens"), store=url) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await bench.settle()
        assert bench.sent() == [Billed(order_id="1")]


async def test_a_query_on_a_store_that_a_handler_holds_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    billing, holding, go_on = fg.Node("billing", schema="create table t(x int)"), asyncio.Event(), asyncio.Event()

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into t values (1)")
        holding.set()
        await go_on.wait()

    async with fg.testing.bench(billing) as bench:
        await bench.publish(OrderPlaced(order_id="1"))
        await holding.wait()
        with monkeypatch.context() as patch:
            patch.setattr(import_module("faregate.testing.bench"), "_QUERY_SECONDS", 0.01)
            with pytest.raises(fg.testing.BenchStuck, match="in the middle of its transaction"):
                await bench.fetchall(billing, "select * from t")
        go_on.set()
        await bench.settle()
        assert await bench.fetchone(billing, "select count(*) from t") == (1,)


async def test_a_file_stays(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path}/bench.db"
    for expected in (0, 1):
        async with fg.testing.bench(billing_node(), store=url) as bench:
            assert await bench.fetchone("billing", "select count(*) from invoices") == (expected,)
            await bench.publish(OrderPlaced(order_id="1"))
            await bench.settle()


@pytest.mark.services
@pytest.mark.parametrize("failing", ["nothing", "test", "start"])
async def test_a_schema_of_postgresql_is_dropped_whatever_happens(failing: str) -> None:
    url = address("FAREGATE_TEST_POSTGRES")
    billing, seen = billing_node(), list[str]()

    @billing.on_start
    async def start() -> None:
        seen.extend(await schemas() - before)
        if failing == "start":
            raise OSError("no start")

    async def schemas() -> set[str]:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            found = await connection.execute("select nspname from pg_namespace where nspname like 'faregate_test_%'")
            return {name for (name,) in await found.fetchall()}

    before = await schemas()
    try:
        async with fg.testing.bench(billing, store=url) as bench:
            await bench.publish(OrderPlaced(order_id="1"))
            await bench.settle()
            assert failing == "nothing"
    except (AssertionError, fg.ResourceFailed):
        assert failing != "nothing"
    assert len(seen) == 1
    assert seen[0] not in await schemas()


async def test_what_a_bench_does_not_take() -> None:
    with pytest.raises(fg.ConfigurationError, match="takes the nodes to test"):
        async with fg.testing.bench():
            pass
    with pytest.raises(fg.ConfigurationError, match="is a URL"):
        async with fg.testing.bench(billing_node(), store=None):  # type: ignore[arg-type]
            pass
    async with fg.testing.bench(billing_node()) as bench:
        with pytest.raises(fg.ConfigurationError, match="no node 'biling' on this bench; its nodes are: billing, shop"):
            await bench.fetchall("biling", "select 1")


def test_without_an_event_loop_of_asyncio_it_says_so() -> None:
    starting = fg.testing.bench(billing_node()).__aenter__()
    with pytest.raises(fg.ConfigurationError, match="anyio_backend"):
        starting.send(None)
