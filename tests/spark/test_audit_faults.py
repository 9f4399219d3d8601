"""The audit is a judge: what an honest run may have is no finding; a planted loss or forgery is one, by name."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.ids import message_id, root_id
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.spark.jobs.audit_result import Audit
from faregate.stores.sql.columns import unpack
from tests.spark.audit_rig import ORDERS, REPLAYED, SKIPPED, TO_NOBODY, Office, alter_body, run_office
from tests.spark.jobs_rig import OrderPlaced, order
from tests.spark.rig import SMALL_SEGMENT, truncate

HANDLED = ORDERS - 1  # one is skipped


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return run_office(tmp_path_factory.mktemp("office"))


@pytest.fixture
def office(honest: Office, tmp_path: Path) -> Office:
    """One that may be spoilt."""
    shutil.copytree(honest.journal.parent, tmp_path, dirs_exist_ok=True)
    return Office(tmp_path)


def audit(spark: SparkSession, office: Office, **more: Any) -> Audit:
    options = {"store": office.stores, "effects": office.effects, "at_rest": True, **more}
    return fg.spark.audit(spark, journal=office.journal, **options)


def listed(found: Audit) -> set[tuple[str, str, str | None]]:
    rows = found.findings.collect()
    assert found.summary["findings"] == len(rows) and not found.ok
    return {(each.kind, each.node, each.message_id) for each in rows}


def digits(text: str) -> bytes:
    return bytes.fromhex(text.replace("-", ""))


@pytest.mark.services
def test_whatever_an_honest_run_has_is_no_finding(spark: SparkSession, honest: Office) -> None:
    found = audit(spark, honest)
    assert found.findings.collect() == [] and found.ok
    handled = {each["node"]: (each["published"], each["handled"], each["skipped"]) for each in found.table}
    billed = sum(n % 4 for n in range(ORDERS) if n not in (SKIPPED, 5))
    assert handled == {
        "accounts": (ORDERS, HANDLED, 1),
        "desk": (ORDERS, ORDERS, 0),
        "glance": (billed, billed, 0),
        "tags": (ORDERS, ORDERS, 0),
    }
    assert sorted(found.notes) == [
        "desk.OrderPlaced.shop: 2 of its messages had their effect more than once; dedup='off' promises no more",
        "desk.OrderPlaced.shop: its store has no ledger row of any of its 60 handled messages, so they are judged by "
        "settlements and effects, not for what they sent (dedup='off')",
        "without a store, judged by settlements alone, and not for order: glance",
    ]


@pytest.mark.services
def test_what_was_lost_altered_or_made_up_is_found_by_name(spark: SparkSession, office: Office) -> None:
    accounts, desk, tags = (office.ids(node) for node in ("accounts", "desk", "tags"))
    # The effects of handlers that keep no ledger, and an effect too many.
    office.sql("delete from notes where message_id = ?", desk[30])
    office.sql("delete from tags where message_id = ?", tags[31])
    office.sql("insert into notes values (?)", desk[32])
    # A body in the log, and a digest in the ledger.
    altered = alter_body(office.journal, b'"order_id":"33"', b'"order_id":"93"')
    for number, digest in ((34, b"\0" * 16), (35, b"\0"), (36, b"")):
        office.sql("update faregate_ledger set digest = ? where message_id = ?", digest, digits(accounts[number]))
    # What nobody published: an effect, and a handled message.
    forged, invented = (message_id(root_id(), node) for node in ("desk", "accounts"))
    office.sql("insert into notes values (?)", forged)
    office.sql(
        "insert into faregate_ledger (node, message_id, position, handled_at, outcome, sent) "
        "select 'accounts', ?, 3, max(handled_at), 'handled', 0 from faregate_ledger",
        digits(invented),
    )
    # Two of one customer trade their places, ten messages apart.
    places = [office.sql("select seq from faregate_ledger where message_id = ?", digits(accounts[n])) for n in (40, 50)]
    for place, number in ((-1, 40), (places[0][0][0], 50), (places[1][0][0], 40)):
        office.sql("update faregate_ledger set seq = ? where message_id = ?", place, digits(accounts[number]))

    found = audit(spark, office)
    assert listed(found) == {
        ("missing", "desk", desk[30]),
        ("missing", "tags", tags[31]),
        ("double", "desk", desk[32]),
        ("altered", "shop", None),
        ("altered", "accounts", accounts[34]),
        ("altered", "accounts", accounts[35]),
        ("altered", "accounts", accounts[36]),
        ("never published", "desk", forged),
        ("never published", "accounts", invented),
        ("out of order", "accounts", accounts[50]),
    }
    by_kind = {(each.kind, each.node): each for each in found.findings.collect()}
    assert by_kind["altered", "shop"].offset == altered
    late = by_kind["out of order", "accounts"]
    assert b'"50"' in JournalReader(office.journal).load([late.offset])[0].body
    said = re.search(r"before an earlier one of its key: the ledger row of offset (\d+) was written later", late.text)
    assert said is not None and int(said[1]) < late.offset


@pytest.mark.services
def test_what_was_lost_from_the_outbox_is_found_by_what_its_sender_recorded(
    spark: SparkSession, office: Office
) -> None:
    office.without_dispatch(*(OrderPlaced(order_id=f"{n}", customer="c9") for n in (101, 103, 104)))
    accounts = office.ids("accounts")
    rows = office.sql("select seq, message_id, ordinal, envelope from faregate_outbox where node = 'accounts'")
    assert len(rows) == 1 + 3 + 0
    lost = {}
    for seq, cause, ordinal, envelope in rows:
        if cause == digits(accounts[101]) or ordinal == 1:
            office.sql("delete from faregate_outbox where seq = ?", seq)
            lost[cause] = unpack(envelope).publication_id
    office.run()  # the other two are sent

    found = audit(spark, office)
    assert listed(found) == {("not sent", "accounts", accounts[101]), ("not sent", "accounts", accounts[103])}
    for each in found.findings.collect():
        sent = 3 if each.message_id == accounts[103] else 1
        text = f"OrderPlaced at accounts sent {sent} messages, and publication {lost[digits(each.message_id)]} neither"
        assert each.text.startswith(text), each.text
    # One that came instead of another is not the same.
    other = digits(accounts[103])
    office.sql("update faregate_ledger set sent = 2, sent_ids = ? where message_id = ?", bytes(16), other)
    office.sql("update faregate_ledger set sent = null where message_id = ?", digits(accounts[101]))
    found = audit(spark, office)
    assert listed(found) == {("not sent", "accounts", accounts[103])}
    assert "1 messages were handled before the ledger kept what handlers send: whether that arrived is not known" in (
        found.notes
    )


@pytest.mark.services
def test_a_node_that_lost_everything_is_found(spark: SparkSession, office: Office) -> None:
    office.sql("delete from faregate_ledger where node = 'accounts'")
    office.sql("delete from invoices")
    office.sql("delete from notes")
    found = audit(spark, office)
    accounts, desk = office.ids("accounts"), office.ids("desk")
    lost = {("missing", "accounts", accounts[n]) for n in range(ORDERS) if n != SKIPPED}
    assert listed(found) == lost | {("missing", "desk", each) for each in desk.values()}
    assert {each["node"]: each["missing"] for each in found.table if each["missing"]} == {
        "accounts": HANDLED,
        "desk": ORDERS,
    }
    assert REPLAYED in accounts


@pytest.mark.full
@pytest.mark.services
def test_what_retention_removed_is_no_finding(spark: SparkSession, tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.segment_size = SMALL_SEGMENT
    for numbers in (range(10, 30), range(30, 50), (REPLAYED, TO_NOBODY, *range(50, 70))):
        office.run(*(order(n) for n in numbers))
    assert truncate(office.journal) > 0
    audited = audit(spark, office)
    assert audited.findings.collect() == [] and "the log begins at offset" in audited.notes[-1]

    # An effect that no ledger row stands for, of a node that has kept its whole ledger.
    forged = message_id(root_id(), "accounts")
    office.sql("insert into invoices values (?, 'forged')", forged)
    assert listed(audit(spark, office)) == {("never published", "accounts", forged)}

    # From here on effects may be older than everything that is remembered.
    [(before,)] = office.sql("select max(handled_at) - 0.001 from faregate_ledger")
    asyncio.run(evict(office.store, before))
    assert len(office.sql("delete from faregate_dead returning message_id")) == 2
    audited = audit(spark, office)
    assert audited.findings.collect() == [] and any("was cut" in note for note in audited.notes)


async def evict(url: str, before: float) -> None:
    store = open_store(url, SystemClock())
    await store.open()
    assert await store.evict("accounts", before, 1000) > 0
    await store.close()


@pytest.mark.services
def test_a_new_journal_on_an_old_store_is_judged_for_itself(spark: SparkSession, tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.run(*(order(n) for n in range(10, 20)))
    shutil.rmtree(office.journal)
    office.run(*(order(n) for n in range(20, 25)))
    audited = audit(spark, office)
    assert audited.findings.collect() == []
    assert {each["node"]: each["handled"] for each in audited.table}["accounts"] == 5
