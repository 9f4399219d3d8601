"""The web example: one order, one invoice and one answer per Idempotency-Key, whatever is repeated or crashes."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import faregate as fg
from examples.web import app as web
from examples.web import orders, worker
from tests.examples.program import Program, count

LONG = 30  # seconds until a test that hangs is failed
ORDER = {"customer": "ann", "total": 40}


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        transport = httpx.ASGITransport(web.create_app(folder), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://shop")

    async def post(self, key: str | None, **changes: Any) -> httpx.Response:
        headers = {} if key is None else {"Idempotency-Key": key}
        return await self.client.post("/orders", json={**ORDER, **changes}, headers=headers)

    @asynccontextmanager
    async def nodes(self) -> AsyncIterator[None]:
        """The bus while the block runs, and until it has done everything."""
        async with asyncio.timeout(LONG), worker.make_bus(self.folder) as bus:
            yield
            await bus.idle(timeout=LONG)
            assert await bus.dead_letters() == []

    def count(self, table: str) -> int:
        return count(self.folder / "shop.db", table)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    await orders.make_tables(tmp_path)
    yield made
    await made.client.aclose()


async def test_an_order_is_taken_and_billed(site: Site) -> None:
    async with site.nodes():
        answer = await site.post("order-1")
    assert answer.status_code == 201
    order_id = answer.json()["order_id"]
    assert (await site.client.get(f"/orders/{order_id}")).json() == {"order_id": order_id, "total": 40, "billed": True}
    assert site.count("invoices") == 1
    assert (await site.client.get("/orders/nope")).status_code == 404


async def test_orders_are_taken_before_a_bus_ever_ran(site: Site) -> None:
    answer = await site.post("order-1")
    assert answer.status_code == 201
    order = f"/orders/{answer.json()['order_id']}"
    assert (await site.client.get(order)).json()["billed"] is False
    async with site.nodes():
        pass
    assert (await site.client.get(order)).json()["billed"] is True


async def test_a_repeated_post_gets_the_same_answer_and_has_one_effect(site: Site) -> None:
    async with site.nodes():
        first, second = await site.post("order-1"), await site.post("order-1")
        third = await site.post("order-2")
    assert (second.status_code, second.json()) == (first.status_code, first.json())
    assert third.json() != first.json()
    assert (site.count("orders"), site.count("invoices")) == (2, 2)


async def test_two_posts_at_once_with_one_key_are_one_order(site: Site) -> None:
    async with site.nodes():
        answers = await asyncio.gather(*(site.post("order-1") for _ in range(5)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.text for answer in answers}) == 1
    assert (site.count("orders"), site.count("invoices")) == (1, 1)


async def test_another_order_under_the_same_key_is_refused(site: Site) -> None:
    await site.post("order-1")
    assert (await site.post("order-1", total=41)).status_code == 422
    assert site.count("orders") == 1


@pytest.mark.parametrize(("key", "total"), [(None, 40), ("", 40), ("order-1", 0)])
async def test_a_post_without_a_key_or_with_an_impossible_order_is_refused(
    site: Site, key: str | None, total: int
) -> None:
    assert (await site.post(key, total=total)).status_code == 422
    assert site.count("orders") == site.count("faregate_outbox") == 0


async def test_a_crash_between_commit_and_answer_is_made_good_by_the_repetition(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place_and_crash(*arguments: Any) -> Any:
        orders.place_order(*arguments)
        raise OSError("the connection to the client is gone")

    with monkeypatch.context() as patched:
        patched.setattr(web, "place_order", place_and_crash)
        assert (await site.post("order-1")).status_code == 500
    assert site.count("orders") == site.count("faregate_outbox") == 1
    async with site.nodes():  # sent at the next start
        answer = await site.post("order-1")
    assert answer.status_code == 201
    assert (site.count("orders"), site.count("invoices"), site.count("faregate_outbox")) == (1, 1, 0)


async def test_a_crash_before_the_commit_leaves_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = orders.transaction

    @contextmanager
    def crash_at_the_end(path: Path) -> Iterator[sqlite3.Connection]:
        with begin(path) as connection:
            yield connection
            assert connection.execute("select count(*) from faregate_outbox").fetchone() == (1,)
            raise OSError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(orders, "transaction", crash_at_the_end)
        assert (await site.post("order-1")).status_code == 500
    assert site.count("orders") == site.count("faregate_outbox") == site.count("answers") == 0
    async with site.nodes():
        assert (await site.post("order-1")).status_code == 201
    assert (site.count("orders"), site.count("invoices")) == (1, 1)


async def test_the_service_prepares_its_tables_and_no_journal(tmp_path: Path) -> None:
    app = web.create_app(tmp_path / "new")
    async with app.router.lifespan_context(app):
        answer = await asyncio.to_thread(orders.place_order, tmp_path / "new" / "shop.db", "k", "ann", 7)
    assert answer["publication_id"] == fg.ids.idempotent_id("shop", "OrderPlaced", "k")
    assert not (tmp_path / "new" / "journal").exists()


ORDERS = 24


async def test_four_web_processes_and_a_worker_that_is_killed(tmp_path: Path) -> None:
    """The commands of the README. Orders go on being taken while the worker is down, and each is billed once."""
    with Program(tmp_path, "-m", "faregate", "store", "init", "examples.web.worker:bus") as made:
        made.line(r"its nodes: shop, billing")
        assert made.wait(LONG) == 0
    uvicorn = ["-m", "uvicorn", "--factory", "examples.web.app:create_app", "--workers", "4", "--port", "0"]
    with Program(tmp_path, *uvicorn) as service:
        url = service.line(r"running on (http://\S+)")[1]
        for _ in range(4):
            service.line("Application startup complete")
        async with httpx.AsyncClient(base_url=url, timeout=LONG) as client:

            async def post(numbers: range) -> None:
                for number in (*numbers, *numbers):
                    answer = await client.post("/orders", json=ORDER, headers={"Idempotency-Key": f"order-{number}"})
                    assert answer.status_code == 201, answer.text

            await post(range(8))
            with Program(tmp_path, "-m", "faregate", "run", "examples.web.worker:bus") as worker:
                worker.line("billed order")
                worker.kill()
            await post(range(8, ORDERS))
            left = count(tmp_path / "shop.db", "orders where billed = 0")
            with Program(tmp_path, "-m", "faregate", "run", "examples.web.worker:bus") as worker:
                billed: set[str] = set()
                while len(billed) < left:
                    billed.add(worker.line(r"billed order (\S+)")[1])
                worker.drain()
        service.drain()
    for rows in ("orders", "invoices", "orders where billed = 1"):
        assert count(tmp_path / "shop.db", rows) == ORDERS, rows
