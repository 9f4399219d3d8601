"""The drain: every dead letter once, what changed once more, and nothing on repetition."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.errors import ConfigurationError
from tests.spark.jobs_rig import DEAD, World, build


@pytest.mark.services
def test_a_drain_adds_what_is_new_or_changed_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    world: World = build(tmp_path)
    to = tmp_path / "letters"
    first = fg.spark.drain(spark, store=world.store, to=to)
    assert first.counts == {"found": len(DEAD), "new": len(DEAD), "changed": 0, "unchanged": 0}
    assert [path.name for path in to.glob("node=*")] == ["node=billing"]
    assert {path.parent.name.partition("=")[0] for path in to.rglob("*.parquet")} == {"date"}
    row = first.letters.orderBy("last_failed").first()
    assert row is not None
    assert (row.node, row.type, row.status, row.reason) == ("billing", "OrderPlaced", "open", "permanent")
    assert (row.body, row.kind, row.headers) == (f'{{"order_id":"{DEAD[0]}","customer":"c3"}}', "event", {})
    files = sorted(to.rglob("*.parquet"))
    again = fg.spark.drain(spark, store=world.store, to=to)
    assert again.counts == {"found": len(DEAD), "new": 0, "changed": 0, "unchanged": len(DEAD)}
    assert sorted(to.rglob("*.parquet")) == files
    world.sql(
        "update faregate_dead set status = 'discarded', changed_by = 'me' where publication_id = ?", row.publication_id
    )
    changed = fg.spark.drain(spark, store={"billing": world.store}, to=to)
    assert changed.counts == {"found": len(DEAD), "new": 0, "changed": 1, "unchanged": len(DEAD) - 1}
    assert spark.read.parquet(str(to)).count() == len(DEAD) + 1
    assert {(each.message_id, each.status) for each in changed.letters.collect()} >= {(row.message_id, "discarded")}
    assert changed.letters.count() == len(DEAD)
    nobody = fg.spark.drain(spark, store={"stock": world.store}, to=tmp_path / "nobody")
    assert (nobody.counts["found"], nobody.letters.count()) == (0, 0)


def test_dead_letters_need_a_store(tmp_path: Path) -> None:
    nothing: SparkSession = None  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="dead letters are in stores: name one"):
        fg.spark.drain(nothing, store=None, to=tmp_path)
