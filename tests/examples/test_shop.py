"""The shop of the examples, on the bench and on a journal with a SQLite file: every order is billed, charged and
shipped once, whatever the bank does."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from examples.shop import app
from examples.shop.bank import Bank, BankTimeout
from examples.shop.messages import CardCharged, ChargeCard, OrderPlaced, OrderShipped

TABLES = ("invoices", "charges", "parcels")


@pytest.fixture(autouse=True)
def moody_bank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(app, "bank", Bank(latency=0, failing_percent=50))
    yield


def order(number: int, **changes: Any) -> OrderPlaced:
    return OrderPlaced(**{"order_id": f"{number}", "customer": f"customer-{number % 3}", "total": 40, **changes})


async def test_every_order_is_charged_and_shipped_once() -> None:
    async with fg.testing.bench(app.shop, app.billing, app.payments, app.shipping) as bench:
        for number in range(50):
            for _ in range(2):
                await bench.publish(order(number), idempotency_key=f"{number}")
        await bench.settle()
        assert len(bench.sent(ChargeCard)) == len(bench.sent(OrderShipped)) == 50
        assert bench.dead_letters() == []
    assert app.bank.timeouts > 0, "the bank should have failed, or this shows nothing"


async def test_what_was_done_is_in_the_tables_once_after_a_restart_too(tmp_path: Path) -> None:
    for _ in range(2):
        async with app.make_bus(tmp_path) as bus:
            for number in range(30):
                await bus.publish(order(number), node="shop", idempotency_key=f"{number}")
            await bus.idle(timeout=60)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        for table in TABLES:
            rows = connection.execute(f"select order_id, message_id from {table}").fetchall()
            assert sorted(order_id for order_id, _ in rows) == sorted(f"{number}" for number in range(30)), table
            assert len({message_id for _, message_id in rows}) == 30, table
        billed = connection.execute("select order_id from invoices where customer = 'customer-1' order by rowid")
        assert [int(order_id) for (order_id,) in billed] == list(range(1, 30, 3)), "a customer's orders, in order"


async def test_a_double_would_show(tmp_path: Path) -> None:
    async with app.make_bus(tmp_path) as bus:
        await bus.publish(order(1), node="shop")
        await bus.idle(timeout=60)
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        for table in TABLES:
            connection.execute(f"insert into {table} select * from {table}")  # no constraint keeps it out
            assert connection.execute(f"select count(*) from {table}").fetchone() == (2,), table


async def test_an_impossible_order_is_a_dead_letter_and_charges_nobody() -> None:
    async with fg.testing.bench(app.billing, app.payments) as bench:
        await bench.publish(order(1, total=-1))
        await bench.settle()
        assert bench.sent() == []
        [dead] = bench.dead_letters()
    assert (dead.reason, dead.tries) == ("permanent", 1)


async def test_billing_decides_without_a_bus() -> None:
    effect, outgoing = await app.bill(order(1, total=7))
    assert effect == app.WriteInvoice("1", "customer-1", 7)
    assert isinstance(outgoing, fg.Outgoing)
    assert (outgoing.destination, outgoing.message) == ("payments", ChargeCard(order_id="1", amount=7))


async def test_shipping_works_alone() -> None:
    async with fg.testing.bench(app.shipping) as bench:
        await bench.publish(CardCharged(order_id="1", amount=7))
        await bench.settle()
        assert bench.sent(OrderShipped) == [OrderShipped(order_id="1")]


async def test_the_bank_answers_after_the_same_number_of_calls_in_every_process() -> None:
    moody = Bank(latency=0, failing_percent=100)
    failures = moody.failures_of("order-1")
    assert 1 <= failures <= 4
    for call in range(1, failures + 1):
        with pytest.raises(BankTimeout):
            await moody.charge("order-1", call)
    await Bank(latency=0, failing_percent=100).charge("order-1", failures + 1)
