"""A typed handler without a store on Spark, exactly once, beside a bare mapInArrow job with the same function.

    spark         journal -> decode -> handler -> encode -> the two-phase sink: `fg.spark.run` without a store
    bare          the same source; one `mapInArrow` that decodes with msgspec, calls the same function and encodes; rows
                  into Spark's sink for measuring, which drops them: no ids, no order, no sink
    asyncio       the bus on the same messages, for information

    bytewax       for information: the same function on the same bodies, a line each, from a file into a file, in one
                  process: no journal, no ids, nothing durable

The journal is sealed before, as one is that was not written just now. Time includes the start of the query; that the
node reads the log was agreed on before. With far fewer messages the start of a query hides what a message costs. The
session is warm: the two jobs have run a few times, as Java compiles what it has run for some seconds.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from _harness import Contestant, Report, interleave, loop, options
from _orders import Order, bill_order, make_order
from _spark_nodes import shop, stateless
from _spark_session import start_spark

import faregate as fg
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.sealing import seal_all
from faregate.bus.bus import MAX_MESSAGE_BYTES
from faregate.spark.runs.stateless_query import batch_counts
from faregate.spark.runs.views import bindings_of, take_views

TARGET = 0.7
_WARM_UPS = 2
"""Of each job on Spark, before the round of everything that is not counted either."""
_AT_ONCE = 5_000


def fill(journal: Path, messages: int, *nodes: fg.Node) -> None:
    async def main() -> None:
        async with fg.Bus(f"journal:{journal}", nodes=[shop, *nodes]) as bus:
            for node in nodes:
                await bus.pause(node, Order)
            for start in range(0, messages, _AT_ONCE):
                numbers = range(start, min(start + _AT_ONCE, messages))
                await bus.publish_many([make_order(number) for number in numbers], node="shop")

    asyncio.run(main())


def bare(batches: Iterable[Any]) -> Iterator[Any]:
    import msgspec
    import pyarrow as pa

    decoder, encoder = msgspec.json.Decoder(Order), msgspec.json.Encoder()
    for batch in batches:
        bodies = [encoder.encode(bill_order(decoder.decode(body))) for body in batch.column("body").to_pylist()]
        yield pa.RecordBatch.from_arrays([pa.array(bodies, pa.binary())], names=["body"])


def main() -> None:
    args = options(__doc__, rounds=5, messages=1_000_000)
    report = Report("spark-stateless", args.json)
    scratch = Path(tempfile.mkdtemp(prefix="faregate-bench-"))
    spark = start_spark(scratch, "spark-stateless")
    source = scratch / "source"
    fill(source, args.messages)
    seal_all(Layout(source), RealDisk())
    take_views(
        source,
        bindings_of(stateless, MAX_MESSAGE_BYTES),
        has_store=False,
        handover=False,
        check=lambda begins: None,
        check_bound=lambda bound: None,
    )
    fg.spark.register(spark)
    runs = iter(range(1_000_000))

    async def run_ours(messages: int) -> float:
        copy = scratch / f"journal-{next(runs)}"
        shutil.copytree(source, copy)
        os.sync()  # or the run would wait until the copy is on the disk, too
        begin = time.perf_counter()
        run = fg.spark.run(stateless, spark, source=copy, checkpoint=scratch / f"checkpoint-{copy.name}")
        run.query.awaitTermination()  # type: ignore[union-attr]
        took = time.perf_counter() - begin
        handled = sum(batch_counts(progress).get("handled", 0) for progress in run.query.recentProgress)  # type: ignore[union-attr]
        assert handled == messages, handled
        shutil.rmtree(copy)
        return took

    async def run_bare(messages: int) -> float:
        begin = time.perf_counter()
        frame = spark.readStream.format("faregate").option("columns", "body").load(str(source))
        query = (
            frame.mapInArrow(bare, "body binary")
            .writeStream.format("noop")
            .option("checkpointLocation", str(scratch / f"bare-{next(runs)}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return time.perf_counter() - begin

    async def run_bus(messages: int) -> float:
        journal = scratch / f"bus-{next(runs)}"
        async with fg.Bus(f"journal:{journal}", nodes=[shop, stateless]) as bus:
            await bus.pause(stateless, Order)
            await bus.publish_many([make_order(number) for number in range(messages)], node="shop")
            begin = time.perf_counter()
            await bus.resume(stateless, Order)
            await bus.idle()
            took = time.perf_counter() - begin
        shutil.rmtree(journal)
        return took

    async def run_bytewax(messages: int) -> float:
        import bytewax.operators as op
        from bytewax.connectors.files import FileSink, FileSource
        from bytewax.dataflow import Dataflow
        from bytewax.testing import run_main

        lines, written = scratch / "lines.jsonl", scratch / f"bytewax-{next(runs)}.jsonl"
        if not lines.exists():
            lines.write_text("".join(msgspec.json.encode(make_order(n)).decode() + "\n" for n in range(messages)))
        decoder, encoder = msgspec.json.Decoder(Order), msgspec.json.Encoder()
        flow = Dataflow("bench")
        stream = op.input("bodies", flow, FileSource(lines, batch_size=1000))
        handled = op.map(
            "handle", stream, lambda body: ("all", encoder.encode(bill_order(decoder.decode(body))).decode())
        )
        op.output("write", handled, FileSink(written))
        begin = time.perf_counter()
        run_main(flow)
        took = time.perf_counter() - begin
        with written.open() as file:
            assert sum(1 for _ in file) == messages
        return took

    cases = [Contestant("spark", run_ours), Contestant("bare", run_bare), Contestant("asyncio", run_bus, share=0.1)]
    if report.has_peer("bytewax"):
        cases.append(Contestant("bytewax", run_bytewax))
    try:
        for case in cases[:2] * _WARM_UPS * bool(args.rounds):
            loop(case.run(args.messages))
        samples = interleave(cases, rounds=args.rounds, messages=args.messages)
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    names = [case.name for case in cases]
    report.table(
        (f"{args.messages:,} messages", "per second"), [(name, f"{samples.rate(name):,.0f}") for name in names]
    )
    report.ours = {"spark": samples.rate("spark"), "asyncio": samples.rate("asyncio")}
    report.peers = {name: samples.rate(name) for name in names if name in ("bare", "bytewax")}
    report.goal("spark_to_bare", samples.ratio("spark", "bare"), TARGET)
    report.finish()


if __name__ == "__main__":
    main()
