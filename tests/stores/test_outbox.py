"""The boundary: `fg.outbox(connection)` publishes within the user's own transaction (a web request, a script).

Reading: the store has been set up by a bus before (its tables are there), the connection is the user's, and whoever
commits it decides; the bus that has the node on that store sends what was committed.
"""

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import faregate as fg

LONG = 30  # seconds until a test that hangs is failed
ORDERS = "create table if not exists orders(id text primary key)"


class OrderPlaced(fg.Event):
    order_id: str


class ChargeCard(fg.Command):
    order_id: str


class Heard:
    """What billing got, and a way to wait for a certain order."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.envelopes: list[tuple[str, str, str]] = []
        self.waiting: dict[str, asyncio.Event] = {}

    def event(self, order: str) -> asyncio.Event:
        return self.waiting.setdefault(order, asyncio.Event())


class Shop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "shop.db"
        self.heard = Heard()

    def bus(self, journal: str = "data") -> fg.Bus:
        billing = fg.Node("billing")

        @billing.on(OrderPlaced, source="shop", order=fg.Serial())
        async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
            self.heard.orders.append(order.order_id)
            self.heard.envelopes.append((ctx.source, ctx.publication_id, ctx.correlation_id))
            self.heard.event(order.order_id).set()

        store = {"shop": f"sqlite:{self.path}", "billing": f"sqlite:{self.folder}/billing.db"}
        nodes = [fg.Node("shop", schema=ORDERS), billing]
        return fg.Bus(f"journal:{self.folder}/{journal}", nodes=nodes, store=store)

    async def set_up(self) -> None:
        async with self.bus() as bus:
            await bus.idle(timeout=LONG)

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=LONG)) as connection:
            yield connection

    def place(self, order: str, key: str | None = None, fail: bool = False) -> Any:
        """A web request: an order and its event in one transaction of the user's own."""
        with self.connection() as connection, connection:
            connection.execute("insert or ignore into orders(id) values (?)", (order,))
            options = {} if key is None else {"idempotency_key": key}
            answer = fg.outbox(connection, node="shop").publish(OrderPlaced(order_id=order), **options)
            if fail:
                raise ZeroDivisionError
        return answer

    def orders(self) -> list[str]:
        with self.connection() as connection:
            return [order for (order,) in connection.execute("select id from orders order by id")]


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


async def test_what_is_committed_beside_a_running_bus_is_sent_once(shop: Shop) -> None:
    async with asyncio.timeout(60), shop.bus() as bus:
        await asyncio.to_thread(shop.place, "1")
        await shop.heard.event("1").wait()
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert shop.heard.orders == ["1"]
    assert shop.orders() == ["1"]


async def test_what_is_rolled_back_is_never_sent(shop: Shop) -> None:
    async with asyncio.timeout(60), shop.bus() as bus:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(shop.place, "1", fail=True)
        await asyncio.to_thread(shop.place, "2")
        await shop.heard.event("2").wait()
        await bus.idle(timeout=LONG)
    assert shop.heard.orders == ["2"]
    assert shop.orders() == ["2"]


async def test_nothing_is_sent_before_the_user_commits(shop: Shop) -> None:
    def request() -> None:
        with shop.connection() as connection:
            fg.outbox(connection, node="shop").publish(OrderPlaced(order_id="1"))
            assert connection.in_transaction, "the outbox does not commit for the user"
            connection.rollback()
            fg.outbox(connection, node="shop").publish(OrderPlaced(order_id="2"))
            connection.commit()

    async with asyncio.timeout(60), shop.bus() as bus:
        await asyncio.to_thread(request)
        await shop.heard.event("2").wait()
        await bus.idle(timeout=LONG)
    assert shop.heard.orders == ["2"]


async def test_what_is_committed_while_nothing_runs_is_sent_at_the_next_start(shop: Shop) -> None:
    await shop.set_up()
    shop.place("1")
    shop.place("2")
    async with asyncio.timeout(60), shop.bus() as bus:
        await bus.idle(timeout=LONG)  # idle: the outbox is empty
    assert sorted(shop.heard.orders) == ["1", "2"]
    async with asyncio.timeout(60), shop.bus() as bus:
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == 0
    assert len(shop.heard.orders) == 2


async def test_events_of_one_transaction_are_all_sent_and_in_order(shop: Shop) -> None:
    # Reading: rows without a key are one ordered sequence.
    await shop.set_up()
    with shop.connection() as connection, connection:
        outbox = fg.outbox(connection, node="shop")
        for number in range(10):
            outbox.publish(OrderPlaced(order_id=str(number)))
    async with asyncio.timeout(60), shop.bus() as bus:
        await bus.idle(timeout=LONG)
    assert shop.heard.orders == [str(number) for number in range(10)]


async def test_a_repeated_request_with_one_idempotency_key_has_one_effect(shop: Shop) -> None:
    """The browser posts twice; each time the transaction commits."""
    async with asyncio.timeout(60), shop.bus() as bus:
        await asyncio.to_thread(shop.place, "1", key="order-1")
        await shop.heard.event("1").wait()
        await bus.idle(timeout=LONG)
        await asyncio.to_thread(shop.place, "1", key="order-1")
        await asyncio.to_thread(shop.place, "2", key="order-2")
        await shop.heard.event("2").wait()
        await bus.idle(timeout=LONG)
    async with asyncio.timeout(60), shop.bus(journal="a-new-one") as bus:
        await asyncio.to_thread(shop.place, "1", key="order-1")
        await asyncio.to_thread(shop.place, "3", key="order-3")
        await shop.heard.event("3").wait()
        await bus.idle(timeout=LONG)
    assert shop.heard.orders == ["1", "2", "3"]


async def test_the_same_key_twice_in_one_transaction_is_one_publication(shop: Shop) -> None:
    # Reading: as with `bus.publish`, publishing again with the key is the same publication and no error.
    await shop.set_up()
    with shop.connection() as connection, connection:
        outbox = fg.outbox(connection, node="shop")
        outbox.publish(OrderPlaced(order_id="1"), idempotency_key="order-1")
        outbox.publish(OrderPlaced(order_id="1"), idempotency_key="order-1")
    async with asyncio.timeout(60), shop.bus() as bus:
        await bus.idle(timeout=LONG)
    assert shop.heard.orders == ["1"]


async def test_it_has_the_identity_that_the_bus_would_give_it(shop: Shop) -> None:
    await shop.set_up()
    # Reading: it returns the publication id, as `bus.publish` does.
    assert shop.place("1", key="order-1") == fg.ids.idempotent_id("shop", "OrderPlaced", "order-1")
    async with asyncio.timeout(60), shop.bus() as bus:
        await bus.publish(OrderPlaced(order_id="1"), node="shop", idempotency_key="order-1")
        await bus.idle(timeout=LONG)
    expected = fg.ids.idempotent_id("shop", "OrderPlaced", "order-1")
    assert shop.heard.envelopes == [("shop", expected, expected)]


async def test_without_a_key_each_publication_is_a_root_of_its_own(shop: Shop) -> None:
    await shop.set_up()
    roots = [shop.place("1"), shop.place("1")]
    async with asyncio.timeout(60), shop.bus() as bus:
        await bus.idle(timeout=LONG)
    assert len(set(roots)) == 2
    assert sorted(found for _, found, _ in shop.heard.envelopes) == sorted(roots)


@pytest.mark.parametrize("thing", [42, None, {"order_id": "1"}, OrderPlaced, ChargeCard(order_id="1")])
async def test_what_is_no_event_cannot_be_published(thing: Any, shop: Shop) -> None:
    await shop.set_up()
    with shop.connection() as connection, pytest.raises(fg.FaregateError):
        fg.outbox(connection, node="shop").publish(thing)


@pytest.mark.parametrize("thing", [None, "sqlite:shop.db", 42])
def test_what_is_no_connection_is_refused(thing: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match="connection"):
        fg.outbox(thing, node="shop").publish(OrderPlaced(order_id="1"))


def test_a_database_that_is_no_store_is_refused_and_named_as_such(tmp_path: Path) -> None:
    # Reading: a file on which no bus ever ran lacks the tables; that is told in our words.
    with (
        contextlib.closing(sqlite3.connect(tmp_path / "empty.db")) as connection,
        pytest.raises(fg.FaregateError, match="store"),
    ):
        fg.outbox(connection, node="shop").publish(OrderPlaced(order_id="1"))
