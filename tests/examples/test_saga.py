"""The saga: whoever comes first, the payment or the timeout, decides; the other one changes nothing that was said."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import faregate as fg
from examples.saga.orders import (
    PAY_WITHIN,
    CardCharged,
    ChargeCard,
    OrderCancelled,
    OrderConfirmed,
    OrderPlaced,
    PaymentOverdue,
    RefundCard,
    orders,
)
from tests.examples.program import Program, count, faregate


@pytest.fixture
async def bench() -> AsyncIterator[fg.testing.Bench]:
    """An order is placed, and its card to be charged."""
    async with fg.testing.bench(orders) as made:
        await made.publish(OrderPlaced(order_id="17", total=40))
        await made.settle()
        assert made.sent(ChargeCard) == [ChargeCard(order_id="17", amount=40)]
        yield made
        assert made.dead_letters() == []


async def test_a_payment_in_time_confirms_and_cancels_the_timeout(bench: fg.testing.Bench) -> None:
    await bench.advance(PAY_WITHIN - 1)
    await bench.publish(CardCharged(order_id="17"))
    await bench.settle()
    assert bench.sent(OrderConfirmed) == [OrderConfirmed(order_id="17")]
    assert bench.sent(PaymentOverdue) == [], "it was taken back"
    handled = bench.outcomes()["handled"]
    await bench.advance(PAY_WITHIN)
    assert bench.outcomes()["handled"] == handled
    assert bench.sent(OrderCancelled) == bench.sent(RefundCard) == []


async def test_without_a_payment_the_order_is_cancelled(bench: fg.testing.Bench) -> None:
    await bench.advance(PAY_WITHIN - 1)
    assert bench.sent(OrderCancelled) == []
    await bench.advance(2)
    assert bench.sent(OrderCancelled) == [OrderCancelled(order_id="17", why="not paid in time")]


async def test_a_payment_that_comes_too_late_is_paid_back(bench: fg.testing.Bench) -> None:
    await bench.advance(PAY_WITHIN + 1)
    await bench.publish(CardCharged(order_id="17"))
    await bench.settle()
    assert bench.sent(RefundCard) == [RefundCard(order_id="17")]
    assert bench.sent(OrderConfirmed) == []


async def test_a_timeout_that_was_on_its_way_changes_nothing(bench: fg.testing.Bench) -> None:
    await bench.publish(CardCharged(order_id="17"))
    await bench.settle()
    await bench.send(PaymentOverdue(order_id="17"), to=orders)
    await bench.settle()
    assert bench.sent(OrderCancelled) == []


async def test_a_crash_in_a_step_leaves_it_undone_or_done(bench: fg.testing.Bench) -> None:
    with fg.testing.crash_at("unit.before-commit", times=2):
        await bench.publish(CardCharged(order_id="17"))
        await bench.settle()
    assert bench.sent(OrderConfirmed) == [OrderConfirmed(order_id="17")]
    await bench.advance(PAY_WITHIN + 1)
    assert bench.sent(OrderCancelled) == bench.sent(RefundCard) == []


def test_the_bus_runs_as_the_readme_starts_it(tmp_path: Path) -> None:
    bus, place = "examples.saga.app:bus", {"SAGA_DATA": str(tmp_path)}
    with Program(tmp_path, "-m", "faregate", "run", bus, **place) as running:
        running.line("running 7 subscriptions of 4 nodes")
        faregate(tmp_path, "publish", bus, "OrderPlaced", '{"order_id": "17", "total": 40}', **place)
        running.line("order 17 is confirmed")
        running.drain()
    assert "WARNING" not in "".join(running.said)
    with Program(tmp_path, "-m", "faregate", "run", bus, **place, SAGA_PAY_WITHIN="1") as running:
        faregate(tmp_path, "publish", bus, "OrderPlaced", '{"order_id": "18", "total": 2000}', **place)
        running.line("order 18 is cancelled: not paid in time")
        running.drain()
    assert count(tmp_path / "saga.db", "orders where id = '17' and state = 'confirmed'") == 1
    assert count(tmp_path / "saga.db", "orders where id = '18' and state = 'cancelled'") == 1
