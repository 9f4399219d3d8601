"""The proof matrix of Spark runs on RabbitMQ: the driver really dies, and then every effect is there once, in order,
and so are the effects of the services that it sends to."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import faregate as fg
from tests.spark import run_shop
from tests.spark.matrix_driver import POINTS, SINK_POINTS
from tests.spark.rabbitmq_rig import rabbitmq_shop
from tests.spark.run_rig import Shop
from tests.spark.test_matrix_full import driver, finish, judge

pytestmark = [pytest.mark.services, pytest.mark.full]


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with rabbitmq_shop(tmp_path, None) as made:
        made.run_bus("shop", "payments")  # somebody takes what billing sends
        yield made


@pytest.mark.parametrize("point", POINTS[1:])
def test_the_driver_is_killed(shop: Shop, point: str) -> None:
    shop.place(20)
    finish(driver(shop, point), dies=True)
    finish(driver(shop))
    judge(shop, 20)
    shop.run_bus("payments")
    shop.check(20, "charges")


@pytest.mark.parametrize("point", SINK_POINTS)
def test_the_driver_is_killed_while_what_it_sends_is_published(shop: Shop, point: str) -> None:
    """Copies carry one id: whoever has a ledger recognises them."""
    shop.place(20)
    finish(driver(shop, point, node="counting"), dies=True)
    finish(driver(shop, node="counting"))
    first: dict[str, fg.Envelope] = {}
    for each in shop.log("Summed"):
        first.setdefault(each.publication_id, each)
    found = [msgspec.json.decode(each.body, type=run_shop.Summed) for each in first.values()]
    assert sorted(each.number for each in found) == list(range(20))
    for key in {each.order_id for each in found}:
        numbers = [each.number for each in found if each.order_id == key]
        assert numbers == sorted(numbers)
    copies = len(shop.log("Summed")) - len(first)
    assert copies <= 8, "more than one batch was published again"
