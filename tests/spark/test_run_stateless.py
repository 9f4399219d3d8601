"""The fast path: a node without a store, from the log to the sink, each output once."""

import shutil
from typing import Any

import pytest

import faregate as fg
from tests.spark import run_shop
from tests.spark.run_rig import Shop, the_shop

__all__ = ["the_shop"]
pytestmark = pytest.mark.services


def run(shop: Shop, **more: Any) -> None:
    options: dict[str, Any] = {"source": shop.journal, "checkpoint": shop.folder / "counting", **more}
    fg.spark.run(run_shop.counting, shop.spark, **options).await_termination()


def summed(shop: Shop) -> list[int]:
    found = shop.log("Summed")
    assert len({each.publication_id for each in found}) == len(found)
    numbers: dict[str, list[int]] = {}
    for each in found:
        body = each.body.decode()
        numbers.setdefault(body.split('"')[3], []).append(int(body.rpartition(":")[2].rstrip("}")))
    assert all(own == sorted(own) for own in numbers.values())
    return sorted(number for own in numbers.values() for number in own)


def test_a_node_without_a_store_takes_the_fast_path(the_shop: Shop) -> None:
    the_shop.place(10)
    run(the_shop, max_messages_per_trigger=4)
    assert summed(the_shop) == list(range(10))
    [commits] = (the_shop.folder / "counting").glob("*/commits")
    (commits / "2").unlink()
    (commits / ".2.crc").unlink(missing_ok=True)
    the_shop.place(2)
    run(the_shop)
    assert summed(the_shop) == list(range(12))


def test_without_an_order_nothing_is_shuffled(the_shop: Shop) -> None:
    the_shop.place(6)
    handle = fg.spark.run(
        run_shop.looking, the_shop.spark, source=the_shop.journal, checkpoint=the_shop.folder / "looking"
    )
    handle.await_termination()
    assert sorted(int(each.body.rpartition(b":")[2].rstrip(b"}")) for each in the_shop.log("Seen")) == list(range(6))


def test_a_failure_without_a_store_stops_the_run_and_names_the_message(the_shop: Shop) -> None:
    the_shop.place(1)
    the_shop.place(1, total=-1)
    with pytest.raises(Exception, match=r"HandlerFailed: OrderPlaced .* at offset 1 failed, and it is given up on"):
        run(the_shop)
    shutil.rmtree(the_shop.folder / "counting")
    with pytest.raises(fg.ConfigurationError, match="node 'billing' needs a store for schema="):
        fg.spark.run(run_shop.billing, the_shop.spark, source=the_shop.journal, checkpoint=the_shop.folder / "x")
