"""Replay: the same messages are recognised, new ones run again, and only those that were chosen come."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.errors import ConfigurationError
from faregate.spark.jobs.replay import FIRST_NUMBER, REPLAYED_FROM
from tests.spark.jobs_rig import World, order
from tests.spark.rig import spooled


@pytest.mark.services
def test_the_same_are_recognised_and_new_ones_run_again(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(*(order(n) for n in range(10, 30)))
    count = "select (select count(*) from invoices), (select count(*) from reservations)"
    assert world.sql(count) == [(20, 20)]
    counted = fg.spark.replay(spark, journal=world.journal, start=5, end=9, dry_run=True)
    assert (counted.counts["messages"], counted.counts["batches"], spooled(world.journal)) == (4, 0, [])
    assert [row.offset for row in counted.messages.orderBy("offset").collect()] == [5, 6, 7, 8]

    told: list[tuple[int, int]] = []
    done = fg.spark.replay(
        spark, journal=world.journal, start=5, end=9, batch=3, name="again", progress=lambda *at: told.append(at)
    )
    assert (done.counts["messages"], done.counts["batches"], told) == (4, 2, [(3, 4), (4, 4)])
    assert {each.replay for batch in spooled(world.journal) for each in batch} == {FIRST_NUMBER + 1}
    world.run()
    assert world.sql(count) == [(20, 20)]  # recognised
    outcomes = fg.spark.settlements(spark, world.journal).where("outcome = 'duplicate'")
    assert outcomes.count() == 8

    # A second one gets another number; a repeated one of the same name is the same, and is taken in once.
    second = fg.spark.replay(spark, journal=world.journal, start=5, end=9, recipients=["stock"], name="more")
    assert second.counts["number"] == FIRST_NUMBER + 2
    assert {each.recipients for batch in spooled(world.journal) for each in batch} == {("stock",)}
    world.run()

    for _ in range(2):
        fresh = fg.spark.replay(spark, journal=world.journal, start=5, end=9, identity="new", name="fresh")
        world.run()
        assert fresh.counts["messages"] == 4
        assert world.sql(count) == [(24, 24)]
    # Another range, or other recipients, under a name that was used is another replay.
    fg.spark.replay(spark, journal=world.journal, start=9, end=11, identity="new", name="fresh")
    world.run()
    assert world.sql(count) == [(26, 26)]
    fg.spark.replay(spark, journal=world.journal, start=11, end=12, identity="new", name="fresh", recipients=["stock"])
    world.run()
    assert world.sql(count) == [(26, 27)]
    originals = {envelope.publication_id for _, envelope in JournalReader(world.journal).envelopes(5, 9)}
    made = [each for _, each in JournalReader(world.journal).envelopes(9) if REPLAYED_FROM in each.headers]
    assert {each.headers[REPLAYED_FROM] for each in made} >= originals
    assert not {each.publication_id for each in made} & originals
    assert fg.spark.audit(spark, journal=world.journal, store=world.store, effects=world.effects, at_rest=True).ok


@pytest.mark.services
def test_what_a_replay_has_in_the_spool_was_sent_by_no_handler(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(*(order(n) for n in range(10, 13)))
    fg.spark.replay(spark, journal=world.journal, nodes=["billing"], recipients=["stock"], identity="new")
    assert spooled(world.journal)
    found = fg.spark.audit(spark, journal=world.journal, store=world.store)
    assert found.ok, [row.text for row in found.findings.collect()]


@pytest.mark.services
def test_types_and_nodes_choose_and_nonsense_is_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(*(order(n) for n in range(10, 13)))

    def count(**given: object) -> int:
        found = fg.spark.replay(spark, journal=world.journal, dry_run=True, **given)  # type: ignore[arg-type]
        return found.counts["messages"]

    assert count(types=["OrderPlaced"], nodes=["shop"]) == 3
    assert count(nodes=["billing"]) == 0  # what billing published went to nobody
    assert count(nodes=["billing"], recipients=["stock"]) == 3
    assert count(start="2999-01-01T00:00:00Z") == 0
    for given, why in (
        ({"identity": "other"}, "the identity 'other' is none"),
        ({"recipients": ["payments"]}, "no node 'payments' takes messages of this log; there are billing, stock"),
        ({"start": "yesterday"}, "the start 'yesterday' is no bound: allowed are 'earliest'"),
        ({"start": 5, "end": 2}, "the start, offset 5, lies behind the end, offset 2"),
        ({"name": "a/b"}, "the replay's name 'a/b' is none"),
        ({"batch": 0}, "batch=0 is no size of a batch: use 1 to 100,000 messages"),
        ({"name": "x"}, "its end 'latest' moves as the log grows, .* the log ends at offset 6 now"),
        ({"name": "x", "end": 99}, "its end 99 moves"),
        ({"name": "x", "end": "2999-01-01T00:00:00Z"}, "its end '2999-01-01T00:00:00Z' moves"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            count(**given)
