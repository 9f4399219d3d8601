"""The schedules: each tick does its work once, and what was missed is made up for."""

from pathlib import Path

import faregate as fg
from examples.cron.carts import CartFilled, CartForgotten, DayClosed, carts
from tests.examples.program import Program, count, faregate

HOUR = 3600.0


async def test_a_cart_is_forgotten_after_an_hour_and_once() -> None:
    async with fg.testing.bench(carts) as bench:
        await bench.publish(CartFilled(cart_id="1"))
        await bench.settle()
        await bench.advance(HOUR - 60)
        assert bench.sent(CartForgotten) == []
        await bench.advance(HOUR)
        assert bench.sent(CartForgotten) == [CartForgotten(cart_id="1")]


async def test_a_crash_forgets_no_cart_twice() -> None:
    async with fg.testing.bench(carts) as bench:
        await bench.publish(CartFilled(cart_id="1"))
        await bench.settle()
        with fg.testing.crash_at("unit.before-commit", times=3):
            await bench.advance(3 * HOUR)
            await bench.settle()
        assert bench.sent(CartForgotten) == [CartForgotten(cart_id="1")]


async def test_the_day_is_closed_at_three_in_berlin() -> None:
    async with fg.testing.bench(carts) as bench:  # its clock starts at 2023-11-14, 22:13 UTC: 23:13 in Berlin
        await bench.advance(3.7 * HOUR)
        assert bench.sent(DayClosed) == []
        await bench.advance(0.2 * HOUR)
        assert bench.sent(DayClosed) == [DayClosed(day="2023-11-15", carts=0)]
        await bench.advance(24 * HOUR)
        assert [closed.day for closed in bench.sent(DayClosed)] == ["2023-11-15", "2023-11-16"]


def test_the_bus_runs_as_the_readme_starts_it(tmp_path: Path) -> None:
    bus, place = "examples.cron.carts:bus", {"CARTS_DATA": str(tmp_path)}
    with Program(tmp_path, "-m", "faregate", "run", bus, **place) as running:
        running.line("running 3 subscriptions of 2 nodes")
        faregate(tmp_path, "publish", bus, "CartFilled", '{"cart_id": "17"}', **place)
        running.line("cart 17 is filled")
        assert "close_day" in faregate(tmp_path, "status", bus, **place)
        running.drain()
    assert "WARNING" not in "".join(running.said)
    assert count(tmp_path / "carts.db", "carts where id = '17'") == 1
