"""The fast path: a node without a store, from the log to the sink, each output once."""

import asyncio
from typing import Any

import pytest

import faregate as fg
from faregate.spark.runs.stateless_query import check_stateless
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


@pytest.mark.parametrize("node", ["counting", "looking"])
def test_a_message_that_fails_becomes_a_dead_letter_and_the_batch_goes_on(the_shop: Shop, node: str) -> None:
    the_shop.place(2)
    the_shop.place(1, total=-1)
    the_shop.place(2)
    found: list[fg.spark.RunProgress] = []
    place = {"source": the_shop.journal, "checkpoint": the_shop.folder / node}
    handle = fg.spark.run(getattr(run_shop, node), the_shop.spark, **place, on_progress=found.append)
    handle.await_termination()
    assert (handle.outcomes, handle.sent) == ({"handled": 4, "dead": 1}, 4)
    assert [progress.outcomes for progress in found] == [{"handled": 4, "dead": 1}]
    assert len(the_shop.log({"counting": "Summed", "looking": "Seen"}[node])) == 4
    [letter] = dead_letters(the_shop, node)
    assert (letter.reason, letter.envelope.type, letter.queue) == (
        "permanent",
        "OrderPlaced",
        f"{node}.OrderPlaced.shop",
    )
    assert "a negative total" in letter.error


def dead_letters(shop: Shop, node: str) -> list[Any]:
    async def main() -> list[Any]:
        async with fg.Bus(f"journal:{shop.journal}", nodes=[run_shop.shop]) as bus:
            await bus.idle()
            return list(await bus.transport.dead_letters(node, 10))

    return asyncio.run(main())


def test_a_command_that_nobody_handles_is_a_dead_letter_of_its_sender(the_shop: Shop) -> None:
    the_shop.place(2)
    place = {"source": the_shop.journal, "checkpoint": the_shop.folder / "asking"}
    handle = fg.spark.run(run_shop.asking, the_shop.spark, **place)
    handle.await_termination()
    assert handle.outcomes == {"handled": 2}
    found = dead_letters(the_shop, "asking")
    assert [(each.reason, each.envelope.type) for each in found] == [("unroutable", "ChargeCard")] * 2


def test_what_needs_time_or_a_database_needs_a_store(the_shop: Shop) -> None:
    the_shop.place(1, total=run_shop.BUSY)
    with pytest.raises(Exception, match=r"HandlerFailed: OrderPlaced .* at offset 0 asks to be handled in 60 s"):
        run(the_shop)
    with pytest.raises(fg.ConfigurationError, match="node 'billing' needs a store for schema="):
        fg.spark.run(run_shop.billing, the_shop.spark, source=the_shop.journal, checkpoint=the_shop.folder / "x")


def test_a_requeue_needs_a_store() -> None:
    node = fg.Node("billing")
    node.on(run_shop.OrderPlaced, source="shop", requeue=fg.Requeue(), name="bill")(lambda order: None)
    with pytest.raises(fg.ConfigurationError, match=r"node 'billing' needs a store for requeue= of "):
        check_stateless(node)
