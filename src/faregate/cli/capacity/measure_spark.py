"""Measures what one message costs on Spark: processor time of Java, of the Python workers and of the driver.

Each figure is the difference of two runs, a small and a large one, divided by the messages that the large one has more:
so the start of a query, which takes seconds, is not in it.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import faregate as fg
from faregate.cli.capacity import nodes
from faregate.cli.capacity.measure import TOGETHER, Say
from faregate.cli.capacity.processor import processor_of
from faregate.ports.extras import needs_extra
from faregate.testing.store_subjects import postgres_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SMALL = 0.2
"""The small run, as a share of the large one."""


class _Used(NamedTuple):
    all: float
    driver: float


def measure_spark(store: str | None, messages: int, say: Say) -> dict[str, float]:
    """Without a store the figures with one are left out."""
    with needs_extra("spark", "measuring Spark"):
        from pyspark.sql import SparkSession
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with TemporaryDirectory(prefix="faregate-capacity-") as made:
        folder = Path(made)
        say("Spark: starting")
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.adaptive.enabled", "false")
            .config("spark.python.authenticate.socketTimeout", "300s")  # a busy machine starts workers slowly
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        fg.spark.register(spark)
        try:
            return asyncio.run(_measure(spark, folder, store, messages, say))
        finally:
            spark.stop()


async def _measure(spark: "SparkSession", folder: Path, store: str | None, messages: int, say: Say) -> dict[str, float]:
    async def cost(node: fg.Node, count: int, database: str | None) -> _Used:
        """Microseconds of processor time for one message."""
        say(f"{node.name}")
        small = max(1, int(count * _SMALL))
        runs = []
        for size in (small, small, count):  # the first does not count
            runs.append(await _run(spark, folder, node, size, database))
        more = 1e6 / (count - small)
        return _Used((runs[2].all - runs[1].all) * more, (runs[2].driver - runs[1].driver) * more)

    found = {"spark_none": (await cost(nodes.spark_pass_on, messages, None)).all}
    if store is not None:
        insert = await cost(nodes.spark_insert, messages // 4, store)
        send = await cost(nodes.spark_send, messages // 4, store)
        found |= {
            "spark_postgresql": insert.all,
            "spark_send": send.all - insert.all,
            "spark_driver": send.driver - insert.driver,
        }
    return found


async def _run(spark: "SparkSession", folder: Path, node: fg.Node, size: int, database: str | None) -> _Used:
    name = f"{node.name}-{size}-{time.time_ns()}"
    journal = folder / name
    async with fg.Bus(f"journal:{journal}", nodes=[nodes.publisher]) as bus:
        for first in range(0, size, TOGETHER):
            messages = [nodes.make_message(number) for number in range(first, min(first + TOGETHER, size))]
            await bus.publish_many(messages, node=nodes.publisher)
    if database is None:
        return _spend(spark, node, journal, None, size)
    async with postgres_schema(database) as inside:
        return _spend(spark, node, journal, inside, size)


def _spend(spark: "SparkSession", node: fg.Node, journal: Path, store: str | None, size: int) -> _Used:
    before = processor_of(os.getpid()), time.process_time()
    run = fg.spark.run(node, spark, source=journal, store=store, checkpoint=journal.with_suffix(".checkpoint"))
    run.await_termination()
    handled = run.outcomes["handled"]
    if handled != size:
        raise RuntimeError(f"{node.name} handled {handled} of {size} messages")
    return _Used(processor_of(os.getpid()) - before[0], time.process_time() - before[1])
