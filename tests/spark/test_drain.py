"""The drain: every dead letter once, what changed once more, and nothing on repetition."""

import asyncio
import gzip
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.errors import ConfigurationError
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.schemes import open_store
from faregate.spark.jobs import drain as drain_job
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


AT = datetime(2026, 11, 15, 2, tzinfo=UTC).timestamp()


def add_dead(url: str, node: str, bodies: list[bytes]) -> None:
    """Dead letters with these bodies, which say that they are compressed."""

    async def main() -> None:
        store = open_store(url, SystemClock())
        await store.open()
        transaction = store.transaction()
        await transaction.begin()
        for body in bodies:
            envelope = Envelope(
                publication_id=fg.ids.root_id(), type="T", source="s", body=body, content_encoding="gzip"
            )
            letter = DeadLetter(
                node=node,
                message_id=fg.ids.message_id(envelope.publication_id, node),
                publication_id=envelope.publication_id,
                type="T",
                source="s",
                correlation_id=envelope.publication_id,
                key=None,
                queue=f"{node}.T.s",
                reason="undecodable",
                error="",
                tries=1,
                redeliveries=0,
                first_failed_at=AT,
                last_failed_at=AT,
                envelope=envelope,
            )
            await transaction.add_dead(letter)
        await transaction.commit()
        await store.close()

    asyncio.run(main())


@pytest.fixture
def in_new_york(spark: SparkSession) -> Iterator[None]:
    zone = "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    spark.conf.set(zone, "America/New_York")
    yield
    spark.conf.set(zone, before)


@pytest.mark.services
@pytest.mark.usefixtures("in_new_york")
def test_odd_bodies_nodes_and_zones_are_drained_once(spark: SparkSession, tmp_path: Path) -> None:
    url, to = f"sqlite:{tmp_path}/store.db", tmp_path / "letters"
    damaged = bytearray(gzip.compress(b"some text that is long enough" * 3))
    damaged[14] ^= 0xFF
    bodies = [gzip.compress(b"whole"), bytes(damaged), b"no gzip", gzip.compress(b"cut short")[:-9], b""]
    add_dead(url, "01", [*bodies, gzip.compress(bytes(drain_job._BODY_LIMIT + 1))])
    first = fg.spark.drain(spark, store=url, to=to)
    assert first.counts == {"found": 6, "new": 6, "changed": 0, "unchanged": 0}
    assert fg.spark.drain(spark, store=url, to=to).counts == {"found": 6, "new": 0, "changed": 0, "unchanged": 6}
    found = first.letters.collect()
    assert sorted(row.body or "" for row in found) == ["", "", "", "", "", "whole"]
    assert {(row.node, row.date) for row in found} == {("01", date(2026, 11, 15))}
    assert [path.name for path in to.glob("node=*/*")] == ["date=2026-11-15"]
