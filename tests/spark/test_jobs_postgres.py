"""The jobs on a PostgreSQL store."""

import asyncio
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.ids import message_id, root_id
from faregate.spark.jobs.audit_result import Audit, outbox_findings
from faregate.spark.jobs.stores import open_stores
from tests.spark.jobs_rig import World, order


@pytest.mark.services
async def test_an_audit_of_a_store_on_postgresql(spark: SparkSession, tmp_path: Path, postgres_url: str) -> None:
    world = World(tmp_path, postgres_url)
    await asyncio.to_thread(world.run, *(order(n) for n in range(30)))

    def audit() -> Audit:
        return fg.spark.audit(spark, journal=world.journal, store=postgres_url, effects=world.effects, at_rest=True)

    good = await asyncio.to_thread(audit)
    assert (good.ok, good.notes) == (True, [])
    assert [(each["node"], each["handled"], each["skipped"], each["dead"]) for each in good.table] == [
        ("billing", 28, 1, 1),
        ("stock", 30, 0, 0),
    ]
    envelopes = dict(JournalReader(world.journal).envelopes())
    orders = [message_id(envelopes[n].publication_id, "billing") for n in range(30)]
    first, lost, twice, unsent, altered = (orders[n] for n in (0, 10, 11, 12, 13))
    with psycopg.connect(postgres_url) as connection:
        connection.execute("delete from faregate_ledger where message_id = %s", (lost,))
        connection.execute("insert into invoices values (%s, 'again')", (twice,))
        connection.execute("update invoices set message_id = %s where message_id = %s", (never := root_id(), lost))
        connection.execute("update faregate_ledger set sent = 2 where message_id = %s", (unsent,))
        connection.execute("update faregate_ledger set digest = '\\x00' || digest where message_id = %s", (altered,))
        # All of these are written anew, and so after the later ones of its customer.
        connection.execute("update faregate_ledger set outcome = outcome where message_id = %s", (first,))
    with psycopg.connect(postgres_url) as connection:
        connection.execute(
            "insert into faregate_outbox (node, ordinal, destination, envelope) "
            "select node, 0, 'x', '' from (values ('billing'), ('billing'), ('stranger')) as given(node)"
        )
    found = await asyncio.to_thread(audit)
    assert {(each.kind, each.message_id) for each in found.findings.collect()} == {
        ("missing", lost),
        ("double", twice),
        ("not sent", unsent),
        ("altered", altered),
        ("never published", never),
        # The second of the customer was handled before the first; so were those behind the two that were changed.
        ("out of order", orders[7]),
        ("out of order", orders[19]),
        ("out of order", orders[20]),
        ("outbox", None),
    }
    assert found.summary["findings"] == 10
    count, listed = outbox_findings(open_stores(postgres_url), ["billing"], 1)
    assert (count, len(listed)) == (2, 1)
