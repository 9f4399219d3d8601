"""A handler with one insert for each message into PostgreSQL, exactly once, on Spark, beside a hand-written job.

    spark         `fg.spark.run`: ledger, business row and outbox in one commit, many messages a commit; then dispatch
    by hand       `foreachPartition` on the same source: decodes with msgspec, and writes the same rows (business,
                  ledger, outbox), 256 messages a commit, with `executemany`. It keeps no order and sends nothing
    asyncio       the bus on the same messages, for information

The address of PostgreSQL comes from FAREGATE_TEST_POSTGRES. Time includes the start of the query; that the node reads
the log was agreed on before.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _harness import Contestant, Report, interleave, options
from _orders import Order, bill_order, make_order
from _spark_nodes import INSERT, INVOICES, billing, shop
from _spark_session import start_spark
from spark_stateless import fill

import faregate as fg
from faregate.bus.bus import MAX_MESSAGE_BYTES
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.spark.runs.views import bindings_of, take_views
from faregate.testing.store_subjects import postgres_schema

TARGET = 0.7
_COMMIT = 256


def write_by_hand(url: str) -> Any:
    def write(rows: Iterator[Any]) -> None:
        from itertools import islice

        import msgspec
        import psycopg

        from faregate import ids
        from faregate.message import Envelope
        from faregate.stores.sql.columns import pack

        decoder, encoder = msgspec.json.Decoder(Order), msgspec.json.Encoder()
        business = INSERT.replace("?", "%s")
        ledger = (
            "insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome) "
            "values ('billing', %s, %s, null, %s, %s, 'handled') on conflict do nothing"
        )
        outbox = (
            "insert into faregate_outbox (node, message_id, ordinal, destination, key, envelope) "
            "values ('billing', %s, 0, 'billing.Billed', null, %s)"
        )
        with psycopg.connect(url) as connection, connection.cursor() as cursor:
            while some := list(islice(rows, _COMMIT)):
                made = []
                for row in some:
                    order = decoder.decode(row["body"])
                    message_id = ids.message_id(row["publication_id"], "billing")
                    envelope = Envelope(ids.root_id(), "Billed", "event", "billing", encoder.encode(bill_order(order)))
                    made.append((order, message_id, row, envelope))
                now = time.time()
                cursor.executemany(ledger, [(each[1], each[2]["body_digest"], each[2]["offset"], now) for each in made])
                cursor.executemany(business, [(each[0].order_id, each[1], each[0].total) for each in made])
                cursor.executemany(outbox, [(each[1], pack(each[3])) for each in made])
                connection.commit()

    return write


def main() -> None:
    args = options(__doc__, rounds=3, messages=300_000)
    report = Report("spark-effects", args.json)
    server = os.environ["FAREGATE_TEST_POSTGRES"]
    scratch = Path(tempfile.mkdtemp(prefix="faregate-bench-"))
    spark = start_spark(scratch, "spark-effects")
    source = scratch / "source"
    fill(source, args.messages)
    take_views(
        source,
        bindings_of(billing, MAX_MESSAGE_BYTES),
        has_store=True,
        handover=False,
        check=lambda begins: None,
        check_bound=lambda bound: None,
    )
    fg.spark.register(spark)
    runs = iter(range(1_000_000))

    async def run_ours(messages: int) -> float:
        copy = scratch / f"journal-{next(runs)}"
        shutil.copytree(source, copy)
        async with postgres_schema(server) as url:
            begin = time.perf_counter()
            run = await asyncio.to_thread(
                fg.spark.run, billing, spark, source=copy, store=url, checkpoint=scratch / f"checkpoint-{copy.name}"
            )
            await asyncio.to_thread(run.await_termination)
            took = time.perf_counter() - begin
            assert run.outcomes["handled"] == messages, run.outcomes  # type: ignore[union-attr]
        shutil.rmtree(copy)
        return took

    async def run_by_hand(messages: int) -> float:
        async with postgres_schema(server) as url:
            store = open_store(url, SystemClock())
            await store.open()
            await store.apply_schema(INVOICES)
            begin = time.perf_counter()
            frame = spark.readStream.format("faregate").option("columns", "offset,publication_id,body,body_digest")
            query = (
                frame.load(str(source))
                .writeStream.foreachBatch(
                    lambda batch, _: batch.repartition(2, "publication_id").foreachPartition(write_by_hand(url))
                )
                .option("checkpointLocation", str(scratch / f"hand-{next(runs)}"))
                .trigger(availableNow=True)
                .start()
            )
            await asyncio.to_thread(query.awaitTermination)
            took = time.perf_counter() - begin
            await store.close()
        return took

    async def run_bus(messages: int) -> float:
        journal = scratch / f"bus-{next(runs)}"
        async with (
            postgres_schema(server) as url,
            fg.Bus(f"journal:{journal}", nodes=[shop, billing], store=url) as bus,
        ):
            await bus.pause(billing, Order)
            await bus.publish_many([make_order(number) for number in range(messages)], node="shop")
            begin = time.perf_counter()
            await bus.resume(billing, Order)
            await bus.idle()
            took = time.perf_counter() - begin
        shutil.rmtree(journal)
        return took

    cases = [
        Contestant("spark", run_ours),
        Contestant("by hand", run_by_hand),
        Contestant("asyncio", run_bus, share=0.2),
    ]
    try:
        samples = interleave(cases, rounds=args.rounds, messages=args.messages)
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    names = [case.name for case in cases]
    report.table(
        (f"{args.messages:,} messages", "per second"), [(name, f"{samples.rate(name):,.0f}") for name in names]
    )
    report.ours = {"spark": samples.rate("spark"), "asyncio": samples.rate("asyncio")}
    report.peers = {"by hand": samples.rate("by hand")}
    report.goal("spark_to_by_hand", samples.ratio("spark", "by hand"), TARGET)
    report.finish()


if __name__ == "__main__":
    main()
