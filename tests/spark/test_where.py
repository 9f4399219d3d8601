"""Filters on Spark as on the bus, and the audit that counts what they did not take as rightly not handled."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.spark.jobs.audit_result import Audit
from tests.spark import run_shop
from tests.spark.run_rig import Shop, the_shop

__all__ = ["the_shop"]
pytestmark = pytest.mark.services

EFFECTS = ["sifting:select message_id from sifted"]


def audit(shop: Shop, **more: Any) -> tuple[Audit, dict[str, Any]]:
    found = fg.spark.audit(
        shop.spark, journal=shop.journal, store={"sifting": shop.store}, effects=EFFECTS, at_rest=True, **more
    )
    [row] = [row for row in found.table if row["node"] == "sifting"]
    return found, {name: count for name, count in row.items() if count and name != "node"}


def spoil(shop: Shop, sql: str) -> None:
    with closing(sqlite3.connect(shop.store.removeprefix("sqlite:"))) as connection, connection:
        assert connection.execute(sql).rowcount == 1


def test_a_bus_then_spark_and_an_audit_of_both(the_shop: Shop) -> None:
    nodes = (run_shop.shop, run_shop.sifting)

    async def main() -> None:
        async with fg.Bus(the_shop.url, nodes=list(nodes), store={"sifting": the_shop.store}) as bus:
            for number in range(3):
                order = run_shop.OrderPlaced(order_id=the_shop.key(number), number=number, total=1)
                await bus.publish(order, node="shop")
            await bus.publish(order, node="shop", headers={"region": "north"})
            await bus.idle(timeout=30)
            assert (bus.outcomes()["handled"], bus.outcomes()["filtered"]) == (2, 2)

    asyncio.run(main())
    the_shop.placed = 3
    the_shop.place(4)
    run = the_shop.run_to_end("sifting", handover=True)
    assert run.outcomes == {"handled": 3, "filtered": 1}
    found, row = audit(the_shop)
    assert (found.ok, row) == (True, {"published": 8, "handled": 5, "filtered": 3}), found.notes
    assert not [note for note in found.notes if "sifting" in note]

    rates = fg.spark.rates(the_shop.spark, journal=the_shop.journal, store={"sifting": the_shop.store}, window="1d")
    counted = [(row["handled"], row["filtered"]) for row in rates.collect() if row["node"] == "sifting"]
    assert (sum(handled for handled, _ in counted), sum(filtered for _, filtered in counted)) == (5, 3)

    spoil(the_shop, "delete from faregate_ledger where outcome = 'filtered'")
    found, row = audit(the_shop)
    assert (found.ok, row) == (False, {"published": 8, "handled": 5, "filtered": 2, "missing": 1})


def test_an_effect_of_what_was_filtered_is_found(the_shop: Shop) -> None:
    the_shop.place(3)
    assert the_shop.run_to_end("sifting").outcomes == {"handled": 2, "filtered": 1}
    spoil(
        the_shop,
        "insert into sifted(order_id, number, message_id) select '', 1, lower(substr(hex(message_id), 1, 8) || '-' || "
        "substr(hex(message_id), 9, 4) || '-' || substr(hex(message_id), 13, 4) || '-' || "
        "substr(hex(message_id), 17, 4) || '-' || substr(hex(message_id), 21)) "
        "from faregate_ledger where outcome = 'filtered'",
    )
    found, row = audit(the_shop)
    assert not found.ok and row["filtered"] == 1
    assert [each["kind"] for each in found.findings.collect()] == ["unrecorded effect"]


def test_a_node_without_a_store_filters_whole_columns(the_shop: Shop, spark: SparkSession, tmp_path: Path) -> None:
    the_shop.place(5)
    progress: list[fg.spark.RunProgress] = []
    handle = fg.spark.run(
        run_shop.peeking, spark, source=the_shop.journal, checkpoint=tmp_path / "peeking", on_progress=progress.append
    )
    handle.await_termination()
    assert (handle.outcomes, handle.sent) == ({"handled": 2, "filtered": 3}, 2)
    assert [each.outcomes for each in progress] == [{"handled": 2, "filtered": 3}]
    assert len(the_shop.log("Seen")) == 2
