"""A journal read by Spark into an aggregate, beside a bare Arrow data source that gives the same rows from memory.

The bare source maps one file of 10,000 rows and hands it to Spark over and over: what is left is Spark's own cost of
taking rows from Python, the limit that reading a journal can only approach. Both have the same columns, batches and
tasks. Once with the two columns that the aggregate needs (`columns`), once with whole rows, of a sealed journal; and
once whole rows of a journal that is still hot, published message by message.

Then without a peer: a filter that keeps 1 % by time, and one that keeps one message by its correlation, each beside the
full scan that finds the same (`fg.spark.messages` beside `format("faregate")`); and 50,000 messages published one by
one beside the same in large batches.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from _harness import Contestant, Report, Run, folder, interleave, options
from _spark_session import start_spark
from journal_read import fill
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import faregate as fg
from faregate.broker.journal import JournalReader
from faregate.spark.options import parse_options
from faregate.spark.schema import row_schema
from faregate.spark.source.batch_reader import BatchReader
from faregate.spark.source.ranges import TASK_MESSAGES
from faregate.spark.source.reading import BATCH_ROWS

TARGET, HOT_TARGET = 0.85, 0.4
HOT_MESSAGES = 100_000
"""What a segment holds."""
NEEDED = ("type", "body")
KEPT = 0.01
FILTER_TARGET, SINGLES_TARGET = 1 / 0.15, 1 / 1.5
"""How many times faster: a filter takes at most 0.15 of a full scan, single messages at most 1.5 times as long."""
SINGLES = 50_000


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


def part_by_time(journal: Path, messages: int) -> tuple[str, int]:
    """A condition for some messages in the middle, by the time when they were appended; how many it keeps."""
    middle, kept = messages // 2, max(1, int(messages * KEPT))
    log = JournalReader(journal)
    [first, *_] = log.batches(middle, middle + 1)
    [last, *_] = log.batches(middle + kept, middle + kept + 1)
    low, high = (batch.column("time")[0] for batch in (first, last))
    found = 0
    for batch in log.batches():
        times = batch.column("time")
        fits = pc.and_(pc.greater_equal(times, low), pc.less_equal(times, high))
        found += pc.sum(fits).as_py() or 0
    texts = (f"timestamp'{each.as_py():%F %T.%f}'" for each in (low, high))
    return "appended_at >= {} and appended_at <= {}".format(*texts), found


def main() -> None:
    args = options(__doc__, rounds=5, messages=8_000_000)
    report = Report("spark-read", args.json)
    messages = max(BATCH_ROWS, args.messages // BATCH_ROWS * BATCH_ROWS)
    with folder() as scratch:
        journal = scratch / "journal"
        fill(journal, messages)
        fill(scratch / "correlated", messages, correlated=True)
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
        where, kept = part_by_time(journal, messages)
        [middle] = JournalReader(scratch / "correlated").load([messages // 2])
        one = f"correlation_id = '{middle.correlation_id}'"

        def filters(journal: Path, where: str, kept: int) -> Run:
            async def run(_: int) -> float:
                return aggregate(fg.spark.messages(spark, journal).filter(where), kept)

            return run

        def scans(journal: Path, where: str, kept: int) -> Run:
            async def run(_: int) -> float:
                return aggregate(spark.read.format("faregate").load(str(journal)).filter(where), kept)

            return run

        async def run_singles(_: int) -> float:
            return aggregate(spark.read.format("faregate").load(str(scratch / "singles")), singles)

        async def run_batches(_: int) -> float:
            return aggregate(spark.read.format("faregate").load(str(scratch / "batches")), singles)

        singles = max(BATCH_ROWS, min(SINGLES, messages))
        fill(scratch / "singles", singles, 1, seals=False)
        fill(scratch / "batches", singles, seals=False)
        cases += [
            Contestant("journal, 1 % by a full scan", scans(journal, where, kept)),
            Contestant("journal, 1 % by a filter", filters(journal, where, kept)),
            Contestant("journal, a correlation by a full scan", scans(scratch / "correlated", one, 1)),
            Contestant("journal, a correlation by a filter", filters(scratch / "correlated", one, 1)),
            Contestant("journal, in batches", run_batches, singles / messages),
            Contestant("journal, one by one", run_singles, singles / messages),
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
    found = samples.ratio("journal, 1 % by a filter", "journal, 1 % by a full scan")
    report.goal("filter_to_full_scan", found, FILTER_TARGET)
    found = samples.ratio("journal, a correlation by a filter", "journal, a correlation by a full scan")
    report.goal("correlation_to_full_scan", found, FILTER_TARGET)
    report.goal("one_by_one_to_batches", samples.ratio("journal, one by one", "journal, in batches"), SINGLES_TARGET)
    report.finish()


if __name__ == "__main__":
    main()
