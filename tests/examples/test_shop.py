"""The shop of the examples, on the bench: every order is billed, charged and shipped once, whatever the bank does."""

from collections.abc import Iterator

import pytest

import faregate as fg
from examples.shop import app
from examples.shop.bank import Bank
from examples.shop.messages import CardCharged, ChargeCard, OrderPlaced, OrderShipped


@pytest.fixture(autouse=True)
def fresh_shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(app, "books", app.Books())
    monkeypatch.setattr(app, "bank", Bank(latency=0, failing_percent=50))
    yield


async def test_every_order_is_charged_and_shipped_once() -> None:
    async with fg.testing.bench(app.shop, app.billing, app.payments, app.shipping) as bench:
        for number in range(50):
            for _ in range(2):
                await bench.publish(
                    OrderPlaced(order_id=f"{number}", customer="ann", total=40), idempotency_key=f"{number}"
                )
        await bench.settle()
        assert len(bench.sent(ChargeCard)) == len(bench.sent(OrderShipped)) == 50
        assert bench.poisoned() == []
    assert app.bank.timeouts > 0, "the bank should have failed, or this shows nothing"
    for rows in (app.books.invoices, app.books.charges, app.books.parcels):
        assert sorted(order for order, _ in rows) == sorted(f"{number}" for number in range(50))


async def test_an_impossible_order_is_given_up_and_charges_nobody() -> None:
    async with fg.testing.bench(app.billing, app.payments) as bench:
        await bench.publish(OrderPlaced(order_id="1", customer="ann", total=-1))
        await bench.settle()
        assert bench.sent() == []
        [dead] = bench.poisoned()
    assert (dead.reason, dead.tries) == ("permanent", 1)


async def test_billing_decides_without_a_bus() -> None:
    effect, outgoing = await app.bill(OrderPlaced(order_id="1", customer="ann", total=7))
    assert effect == app.WriteInvoice("1")
    assert isinstance(outgoing, fg.Outgoing)
    assert (outgoing.destination, outgoing.message) == ("payments", ChargeCard(order_id="1", amount=7))


async def test_shipping_works_alone() -> None:
    async with fg.testing.bench(app.shipping) as bench:
        await bench.publish(CardCharged(order_id="1", amount=7))
        await bench.settle()
        assert bench.sent(OrderShipped) == [OrderShipped(order_id="1")]
