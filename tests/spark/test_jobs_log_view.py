"""Jobs on nodes that Spark runs: they settle nothing, and some of them remember nothing."""

import asyncio
from typing import Any

import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.spool import spool
from faregate.ids import message_id
from faregate.message import Envelope
from faregate.spark.jobs.audit_result import COLUMNS
from faregate.spark.jobs.settlements import plan_journal
from faregate.spark.jobs.stores import open_stores, with_marks
from tests.spark.jobs_rig import Noted, Stored, Tagged, World, glance, shelf

EFFECTS = ["shelf:select message_id from shelved"]


def publish(world: World, *events: Any, nodes: Any = ()) -> None:
    async def main() -> None:
        shop = fg.Node("shop")
        async with fg.Bus(
            f"journal:{world.journal}", nodes=[shop, *nodes], store=world.store, tokens=world.store
        ) as bus:
            for event in events:
                await bus.publish(event, node="shop")
            await bus.idle(timeout=30)

    asyncio.run(main())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> World:
    """Four notes from before anybody was known; then shelf has a queue, and is handed over to Spark."""
    folder = tmp_path_factory.mktemp("on-spark")
    world = World(folder)
    publish(world, *(Noted(number=n) for n in range(4)))
    publish(world, Stored(number=100, customer="c0"), nodes=[shelf])
    nameless = Envelope(publication_id="", type="Stored", source="shop", body=b'{"number":9,"customer":"c9"}')
    spool(Layout(world.journal), RealDisk(), [nameless])
    stored = [Stored(number=n, customer=f"c{n % 3}") for n in range(6)]
    publish(world, *stored, *(Noted(number=n) for n in (4, 5)), *(Tagged(number=n) for n in (0, 1)))
    for node, options in ((shelf, {"store": world.store, "handover": True}), (glance, {})):
        run = fg.spark.run(node, spark, source=f"journal:{world.journal}", checkpoint=folder / node.name, **options)
        run.await_termination()
    return world


def row(node: str, **given: int) -> dict[str, object]:
    return {"node": node, **dict.fromkeys(COLUMNS, 0), **given}


def at(world: World, kind: str, number: int, node: str) -> str:
    for _, envelope in JournalReader(world.journal).envelopes():
        if envelope.type == kind and envelope.body.startswith(b'{"number":%d' % number):
            return message_id(envelope.publication_id, node)
    raise AssertionError((kind, number))


@pytest.mark.services
def test_what_spark_has_read_past_adds_up_at_rest(spark: SparkSession, world: World) -> None:
    found = fg.spark.audit(spark, journal=world.journal, store={"shelf": world.store}, effects=EFFECTS, at_rest=True)
    # The one without an id, and number 1, are dead. Number 2 is parked, and number 5 behind it.
    assert found.table == [
        row("glance", published=6, handled=5, dead=1),
        row("shelf", published=12, handled=8, dead=2, parked=2),
    ]
    assert found.ok
    assert sorted(note.partition(" of its messages count as handled")[0] for note in found.notes) == [
        "glance.Noted.shop: 5",
        "shelf.Noted.shop: 2",
        "shelf.Tagged.shop: 2",
        "without a store, judged by settlements alone, and not for order: glance",
    ]


@pytest.mark.services
def test_how_far_spark_has_read_is_known_from_its_marks(world: World) -> None:
    end = max(offset for offset, _ in JournalReader(world.journal).envelopes()) + 1
    plan = plan_journal(world.journal)
    marked = with_marks(plan, open_stores(world.store))
    names = ("glance.Noted.shop", "shelf.Noted.shop", "shelf.Stored.shop", "shelf.Tagged.shop")
    assert {(each.queue.name, each.read) for each in marked.handed_over} == {(name, end) for name in names}
    # Without a store, by how long retention waits: for what is parked as well.
    read = {each.queue.name: each.read for each in with_marks(plan, ()).handed_over}
    parked = world.sql("select min(position) from faregate_parked")[0][0]
    assert (read["glance.Noted.shop"], read["shelf.Stored.shop"]) == (end, parked)


@pytest.mark.services
def test_rates_know_the_dead_letters_of_spark(spark: SparkSession, world: World) -> None:
    rows = fg.spark.rates(spark, journal=world.journal, store=world.store, window="1d").collect()
    ended = {(each["node"], each["type"]): (each["handled"], each["dead"]) for each in rows}
    assert ended == {("glance", "Noted"): (0, 1), ("shelf", "Stored"): (4, 2)}


@pytest.mark.services
def test_faults_behind_the_mark_are_found_each_by_its_id(spark: SparkSession, world: World) -> None:
    # Nothing but the ledger tells of 0; 4 keeps no ledger, so its effect has to be missed; 5 was done twice.
    lost, bare, twice = (
        at(world, "Stored", 0, "shelf"),
        at(world, "Noted", 4, "shelf"),
        at(world, "Noted", 5, "shelf"),
    )
    world.sql("delete from faregate_ledger where message_id = ?", bytes.fromhex(lost.replace("-", "")))
    world.sql("delete from shelved where message_id = ?", bare)
    world.sql("insert into shelved values (?, 5)", twice)
    # Of these two it is not known yet, and the node may be running.
    world.sql("update faregate_positions set position = position - 2 where handler = '' and key like 'shelf.Tagged%'")
    found = fg.spark.audit(spark, journal=world.journal, store=world.store, effects=EFFECTS)
    assert {(each.kind, each.message_id) for each in found.findings.collect()} == {
        ("missing", lost),
        ("missing", bare),
        ("double", twice),
    }
    assert [(each["node"], each["parked"], each["in_flight"]) for each in found.table] == [
        ("glance", 0, 0),
        ("shelf", 2, 2),
    ]
