"""The audit on a journal and a store that a real bus has filled: exact numbers, planted faults, and bad input."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

import faregate as fg
from faregate.broker.journal import settled
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.errors import ConfigurationError
from faregate.ids import message_id
from faregate.spark.jobs import audit as audit_job
from faregate.spark.jobs.audit_result import COLUMNS
from faregate.spark.jobs.deliveries import id_pairs, id_text
from faregate.spark.jobs.settlements import plan_journal
from faregate.spark.jobs.stores import open_stores
from faregate.spark.logs import open_settled
from tests.spark.jobs_rig import DEAD, HANDLED, ORDERS, SKIPPED, TWICE, OrderPlaced, World, build
from tests.spark.rig import empty_journal, journal


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("shop"))


def copy(world: World, folder: Path) -> World:
    """One that may be spoilt."""
    shutil.copytree(world.journal.parent, folder, dirs_exist_ok=True)
    return World(folder)


def row(node: str, **given: int) -> dict[str, object]:
    return {"node": node, **dict.fromkeys(COLUMNS, 0), "published": ORDERS, "duplicate": len(TWICE), **given}


@pytest.mark.services
def test_what_ran_well_adds_up_exactly(spark: SparkSession, shop: World) -> None:
    found = fg.spark.audit(spark, journal=shop.journal, store=shop.store, effects=shop.effects, at_rest=True)
    assert found.table == [
        row("billing", handled=HANDLED, skipped=len(SKIPPED), dead=len(DEAD)),
        row("stock", handled=ORDERS),
    ]
    assert (found.ok, found.summary["findings"], found.notes) == (True, 0, [])
    assert found.findings.count() == 0
    assert found.findings.columns == ["kind", "node", "message_id", "publication_id", "offset", "text"]


@pytest.mark.services
def test_planted_faults_are_found_each_by_its_id(spark: SparkSession, shop: World, tmp_path: Path) -> None:
    world = copy(shop, tmp_path)
    envelopes = dict(JournalReader(world.journal).envelopes(0))

    def at(node: str, offset: int) -> str:
        return message_id(envelopes[offset].publication_id, node)

    def forget(node: str, offset: int) -> None:
        world.sql("delete from faregate_ledger where message_id = ?", bytes.fromhex(at(node, offset).replace("-", "")))

    # Lost with its settlement: it looks as if it still waits, but its effect is there. Lost without: nobody remembers.
    forget("billing", 100)
    unsettle(world, 100, "billing")
    forget("stock", 101)
    world.sql("delete from reservations where message_id = ?", at("stock", 102))
    world.sql("insert into invoices values (?, 'again')", at("billing", 104))
    world.sql("insert into reservations values (?)", at("stock", 102 + 3))
    # Two of one customer (every seventh) trade their places in the order of the commits. Clocks may err as they like.
    trade_places(world, at("billing", 112), at("billing", 119))
    world.sql("update faregate_ledger set handled_at = handled_at - 3600 where seq % 3 = 0")

    found = fg.spark.audit(spark, journal=world.journal, store=world.store, effects=world.effects, at_rest=True)
    billing = row("billing", handled=HANDLED - 1, skipped=len(SKIPPED), dead=len(DEAD), in_flight=1, double=1)
    assert found.table == [{**billing, "out_of_order": 1}, row("stock", handled=ORDERS - 2, missing=2, double=1)]
    assert not found.ok
    listed = {(each.kind, each.node, each.message_id, each.offset) for each in found.findings.collect()}
    assert listed == {
        ("in flight", "billing", at("billing", 100), 100),
        ("unrecorded effect", "billing", at("billing", 100), 100),
        ("missing", "stock", at("stock", 101), 101),
        ("missing", "stock", at("stock", 102), 102),
        ("double", "billing", at("billing", 104), 104),
        ("double", "stock", at("stock", 105), 105),
        ("out of order", "billing", at("billing", 119), 119),
    }
    assert found.summary["findings"] == len(listed)
    published = {each.publication_id for each in found.findings.collect()}
    assert published == {envelopes[n].publication_id for n in (100, 101, 102, 104, 105, 119)}


def trade_places(world: World, *messages: str) -> None:
    early, late = (bytes.fromhex(each.replace("-", "")) for each in messages)
    places = [world.sql("select seq from faregate_ledger where message_id = ?", n)[0][0] for n in (early, late)]
    assert places[0] < places[1]
    for place, which in ((-1, early), (places[0], late), (places[1], early)):
        world.sql("update faregate_ledger set seq = ? where message_id = ?", place, which)


@pytest.mark.services
def test_what_a_running_bus_does_while_the_order_is_looked_at_again_is_no_finding(
    spark: SparkSession, shop: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = copy(shop, tmp_path)
    envelopes = dict(JournalReader(world.journal).envelopes(0))
    messages = [message_id(envelopes[offset].publication_id, "billing") for offset in (112, 119)]
    trade_places(world, *messages)
    sender = bytes.fromhex(messages[0].replace("-", ""))
    count = audit_job._stretches

    def later(rows: DataFrame) -> dict[int, int]:
        # Behind the outbox, which was read at first: a row says that something was sent.
        world.sql("update faregate_ledger set sent = sent + 1 where message_id = ?", sender)
        return count(rows)

    monkeypatch.setattr(audit_job, "_stretches", later)
    found = fg.spark.audit(spark, journal=world.journal, store=world.store)
    assert (found.summary["out_of_order"], found.summary["not_sent"], found.summary["findings"]) == (1, 0, 1)


@pytest.mark.services
def test_a_message_that_was_late_stays_so_when_its_stretch_is_not_found_again(
    spark: SparkSession, shop: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may take the rows between the two looks."""
    world = copy(shop, tmp_path)
    envelopes = dict(JournalReader(world.journal).envelopes(0))
    trade_places(world, *(message_id(envelopes[offset].publication_id, "billing") for offset in (112, 119)))
    monkeypatch.setattr(audit_job, "_stretches", lambda rows: {})
    found = fg.spark.audit(spark, journal=world.journal, store=world.store)
    assert not found.ok and found.summary["out_of_order"] == 1


def unsettle(world: World, offset: int, node: str) -> None:
    """As if the machine had died before this settlement reached the disk."""
    reader = JournalReader(world.journal)
    [queue] = [each.number for each in reader.topology().queues if each.node == node and not each.is_dead_letter_queue]
    path = reader.layout.settled_log(0)
    found = filter(None, settled.walk(path.read_bytes()))
    records = [each for each in found if (each.offset, each.queue) != (offset, queue)]
    path.write_bytes(b"".join(map(settled.pack, records)))


@pytest.mark.services
def test_a_running_bus_may_have_messages_in_flight(spark: SparkSession, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(OrderPlaced(order_id="1", customer="a"))
    world.run(OrderPlaced(order_id="2", customer="a"), OrderPlaced(order_id="4", customer="a"), delay=3600.0)
    found = fg.spark.audit(spark, journal=f"journal:{world.journal}", store={"billing": world.store})
    assert [(each["node"], each["handled"], each["in_flight"]) for each in found.table] == [
        ("billing", 1, 2),
        ("stock", 1, 2),
    ]
    assert found.ok
    assert found.notes == ["without a store, judged by settlements alone, and not for order: stock"]
    rest = fg.spark.audit(spark, journal=world.journal, at_rest=True, limit=3)
    assert (rest.ok, rest.summary["findings"], rest.findings.count()) == (False, 4, 3)
    taken = fg.spark.settlements(spark, world.journal).orderBy("node").collect()
    assert [(each.offset, each.queue, each.outcome, each.tries) for each in taken if each.outcome == "handled"] == [
        (0, "billing.OrderPlaced.shop", "handled", 1),
        (0, "stock.OrderPlaced.shop", "handled", 1),
    ]
    assert {each.time for each in taken if each.outcome == "started"} == {None}
    ended = [each.time for each in taken if each.outcome == "handled"]
    assert abs(ended[0].timestamp() - JournalReader(world.journal).high_water().time / 1e6) < 600


@pytest.mark.services
def test_a_business_key_seen_before_is_no_loss(spark: SparkSession, tmp_path: Path) -> None:
    till = fg.Node("till")

    @till.on(OrderPlaced, source="shop", identity="order_id")
    async def ring(order: OrderPlaced, ctx: fg.Context) -> None:
        """Its effect is the claim on the order's number."""

    async def main() -> None:
        async with fg.Bus(f"journal:{world.journal}", nodes=[fg.Node("shop"), till], store=world.store) as bus:
            for number in ("1", "2", "1"):
                await bus.publish(OrderPlaced(order_id=number, customer="a"), node="shop")
                await bus.idle()

    world = World(tmp_path)
    asyncio.run(main())
    found = fg.spark.audit(spark, journal=world.journal, store=world.store, at_rest=True)
    assert (found.ok, found.table[0]["handled"], found.table[0]["duplicate"]) == (True, 3, 1)


@pytest.mark.services
def test_what_waits_at_its_sender_or_was_cancelled_there_is_accounted_for(spark: SparkSession, tmp_path: Path) -> None:
    till = fg.Node("till")

    @till.on(OrderPlaced, source="shop")
    async def remind(order: OrderPlaced, ctx: fg.Context) -> fg.Outgoing:
        return fg.publish(OrderPlaced(order_id="x", customer="a"), delay=3600, id_key=order.order_id)

    async def main() -> None:
        async with fg.Bus(f"journal:{world.journal}", nodes=[fg.Node("shop"), till], store=world.store) as bus:
            for number in ("1", "2"):
                await bus.publish(OrderPlaced(order_id=number, customer="a"), node="shop")
            await bus.idle()
            assert await bus.cancel(key="2")

    world = World(tmp_path)
    asyncio.run(main())
    found = fg.spark.audit(spark, journal=world.journal, store=world.store, at_rest=True)
    assert found.ok, found.findings.collect()


def test_bad_input_is_one_sentence(shop: World, tmp_path: Path) -> None:
    # Before anything runs: these need no session.
    nothing: SparkSession = None  # type: ignore[assignment]
    with pytest.raises(fg.JournalNotFound, match=r"there is no journal in .*nowhere"):
        fg.spark.audit(nothing, journal=tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="has no messages: there is nothing to audit"):
        fg.spark.audit(nothing, journal=empty_journal(tmp_path / "empty"))
    newer = Layout(journal(tmp_path / "newer", 1))
    newer.meta.write_text(json.dumps({**json.loads(newer.meta.read_text()), "version": 99}))
    with pytest.raises(fg.JournalTooNew, match="written in version 99 of the format"):
        fg.spark.audit(nothing, journal=newer.root)
    for url, why in {
        "sqlite:/nowhere.db": "there is no file /nowhere.db",
        "memory:": "a memory: store ends with the process of its bus",
        "mysql://x": "'mysql://x' names no store",
        f"sqlite:{shop.journal / 'journal.json'}": "is a file, but not a SQLite database",
    }.items():
        with pytest.raises(ConfigurationError, match=why):
            fg.spark.audit(nothing, journal=shop.journal, store=url)
    other = copy(shop, tmp_path / "other")
    other.sql("update faregate_ledger set node = 'else' || node")
    with pytest.raises(ConfigurationError, match=r"is another store: it is of elsebilling, elsestock, and the log"):
        fg.spark.audit(nothing, journal=shop.journal, store=other.store)
    other.sql("drop table faregate_ledger")
    with pytest.raises(ConfigurationError, match="has no tables of Faregate"):
        fg.spark.audit(nothing, journal=shop.journal, store=other.store)
    with pytest.raises(ConfigurationError, match="knows no node payments; there are billing, shop, stock"):
        fg.spark.audit(nothing, journal=shop.journal, store={"payments": shop.store})
    for effects, why in {
        "select message_id from invoices": "do not name their node: write NODE:SELECT",
        "payments:select 1": "no node 'payments' gets messages",
        "billing:select message_id from nowhere": "refuses .*no such table: nowhere",
        "billing:select order_id from invoices": "is no message id: the query must give ctx.message_id",
    }.items():
        with pytest.raises(ConfigurationError, match=why):
            fg.spark.audit(nothing, journal=shop.journal, store=shop.store, effects=[effects])
    with pytest.raises(ConfigurationError, match="there is no queue or node 'x'"):
        fg.spark.audit(nothing, journal=shop.journal, unordered=["x"])


def test_side_logs_as_arrays_are_what_the_broker_reads(shop: World, tmp_path: Path) -> None:
    world = copy(shop, tmp_path)
    path = Layout(world.journal).settled_log(0)
    data = bytearray(path.read_bytes())
    data[5 * settled.RECORD_BYTES + 3] ^= 1  # damaged: passed over by both
    path.write_bytes(bytes(data) + b"torn")
    plan = plan_journal(world.journal)
    records = open_settled(plan.path).settlements(plan.segments[0])
    rows = zip(*(column.to_pylist() for column in records.columns), strict=True)
    assert list(rows) == [tuple(each) for each in filter(None, settled.walk(path.read_bytes()))]
    assert len(records) == len(data) // settled.RECORD_BYTES - 1


def test_ids_are_longs_and_back() -> None:
    texts = [message_id(f"p-{n}", "billing") for n in range(50)]
    hi, lo = id_pairs([bytes.fromhex(each.replace("-", "")) for each in texts])
    assert hi.dtype == np.int64
    assert [id_text(a, b) for a, b in zip(hi.tolist(), lo.tolist(), strict=True)] == texts


def test_one_database_of_several_nodes_is_read_once(shop: World) -> None:
    [one] = open_stores({"billing": shop.store, "stock": shop.store})
    assert one.nodes == ("billing", "stock")
    assert RealDisk().list(shop.journal)
