"""A journal read by Spark into an aggregate, beside a bare Arrow data source that gives the same rows from memory.

The bare source maps one file of 10,000 rows and hands it to Spark over and over: what is left is Spark's own cost of
taking rows from Python, the limit that reading a journal can only approach. Both have the same columns, batches and
tasks. Once with the two columns that the aggregate needs (`columns`), once with whole rows, of a sealed journal; and
once whole rows of a journal that is still hot, published message by message.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from _harness import Contestant, Report, folder, interleave, options
from _spark_session import start_spark
from journal_read import fill
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from faregate.spark.options import parse_options
from faregate.spark.schema import row_schema
from faregate.spark.source.batch_reader import BatchReader
from faregate.spark.source.ranges import TASK_MESSAGES
from faregate.spark.source.reading import BATCH_ROWS

TARGET, HOT_TARGET = 0.75, 0.4
HOT_MESSAGES = 100_000
"""What a segment holds."""
NEEDED = ("type", "body")


class BareSource(DataSource):
    """Rows of a file, again and again. It stands in this script, so Spark carries it to its workers by value."""

    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> StructType:
        columns = self.options["columns"]
        return row_schema(tuple(columns.split(",")) if columns else ())

    def reader(self, schema: StructType) -> DataSourceReader:
        return BareReader(self.options["file"], int(self.options["batches"]), int(self.options["tasks"]))


class BareReader(DataSourceReader):
    def __init__(self, file: str, batches: int, tasks: int) -> None:
        self.file, self.batches, self.tasks = file, batches, tasks

    def partitions(self) -> list[InputPartition]:
        shares = [self.batches * (n + 1) // self.tasks - self.batches * n // self.tasks for n in range(self.tasks)]
        return [InputPartition(share) for share in shares]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow

        batch = pyarrow.ipc.open_file(pyarrow.memory_map(self.file)).get_batch(0)
        for _ in range(partition.value):
            yield batch


def write_sample(journal: Path, columns: tuple[str, ...], file: Path) -> None:
    """The first batch of rows as Spark gets it."""
    reader = BatchReader(parse_options({"path": str(journal)}), row_schema(columns))
    batch = next(reader.read(reader.partitions()[0]))
    with pa.ipc.new_file(str(file), batch.schema) as writer:
        writer.write_batch(batch)


def aggregate(frame: DataFrame, messages: int) -> float:
    begin = time.perf_counter()
    [found] = frame.groupBy("type").agg(F.count("*").alias("count"), F.sum(F.length("body")).alias("size")).collect()
    seconds = time.perf_counter() - begin
    assert (found["count"], found["size"]) == (messages, messages * 200)
    return seconds


def main() -> None:
    args = options(__doc__, rounds=5, messages=4_000_000)
    report = Report("spark-read", args.json)
    messages = max(BATCH_ROWS, args.messages // BATCH_ROWS * BATCH_ROWS)
    with folder() as scratch:
        journal = scratch / "journal"
        fill(journal, messages)
        hot_messages = max(BATCH_ROWS, min(HOT_MESSAGES, messages // BATCH_ROWS * BATCH_ROWS))
        fill(scratch / "hot", hot_messages, 1, seals=False)
        spark = start_spark(scratch, "spark-read", **{"spark.sql.adaptive.enabled": "true"})
        spark.dataSource.register(BareSource)

        def contestants(name: str, columns: tuple[str, ...], journal: Path, messages: int) -> list[Contestant]:
            file = scratch / f"{name}.arrow"
            write_sample(journal, columns, file)
            ours = spark.read.format("faregate")
            if columns:
                ours = ours.option("columns", ",".join(columns))
            counts = {"batches": messages // BATCH_ROWS, "tasks": -(-messages // TASK_MESSAGES)}
            bare = spark.read.format("bare").options(file=str(file), columns=",".join(columns), **counts)

            async def run_ours(_: int) -> float:
                return aggregate(ours.load(str(journal)), messages)

            async def run_bare(_: int) -> float:
                return aggregate(bare.load(), messages)

            share = messages / whole
            return [Contestant(f"bare, {name}", run_bare, share), Contestant(f"journal, {name}", run_ours, share)]

        whole = messages
        cases = [
            *contestants("two columns", NEEDED, journal, messages),
            *contestants("whole rows", (), journal, messages),
            *contestants("hot rows", (), scratch / "hot", hot_messages),
        ]
        samples = interleave(cases, rounds=args.rounds, messages=messages)
        spark.stop()
    names = [case.name for case in cases]
    report.table(
        (f"{messages:,} messages of 200 bytes", "per second"), [(name, f"{samples.rate(name):,.0f}") for name in names]
    )
    report.ours = {name: samples.rate(name) for name in names if name.startswith("journal")}
    report.peers = {name: samples.rate(name) for name in names if name.startswith("bare")}
    report.goal("two_columns_to_bare", samples.ratio("journal, two columns", "bare, two columns"), TARGET)
    report.goal("whole_rows_to_bare", samples.ratio("journal, whole rows", "bare, whole rows"), TARGET)
    report.goal("hot_rows_to_bare", samples.ratio("journal, hot rows", "bare, hot rows"), HOT_TARGET)
    report.finish()


if __name__ == "__main__":
    main()
