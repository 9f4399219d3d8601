"""Streams of each kind, whose batches are noted in a file, in this process or in a driver of its own that dies within a
batch: `python -m tests.spark.stream_driver KIND FOLDER BATCH`."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import faregate as fg
from faregate.broker.journal.archive import archive_journal
from tests.archive.rig import Written, full_segments
from tests.spark.rig import append, journal, note
from tests.spark.test_typed_read import orders
from tests.spark.typed_messages import Placed


class Streamed:
    """Logs in a folder, and a stream over them with one checkpoint; the same again is a restart."""

    kind: str
    count: int
    """Of rows, in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.checkpoint = folder / "checkpoint"
        self._notes = folder / "seen"

    def make(self) -> None:
        """The logs as they are in the beginning."""
        raise NotImplementedError

    def go_on(self) -> None:
        """More messages, and what else happens to such logs."""
        raise NotImplementedError

    def stream(self, spark: SparkSession) -> DataFrame:
        raise NotImplementedError

    def read(self, spark: SparkSession) -> DataFrame:
        """Everything, in a batch."""
        raise NotImplementedError

    def start(self, spark: SparkSession, after: Callable[[int], None] = lambda batch: None) -> StreamingQuery:
        def take(frame: DataFrame, batch: int) -> None:
            with self._notes.open("a") as notes:
                notes.write(json.dumps([batch, rows_of(frame)]) + "\n")
            after(batch)

        writer = self.stream(spark).writeStream.foreachBatch(take).trigger(availableNow=True)
        return writer.option("checkpointLocation", str(self.checkpoint)).start()

    def seen(self) -> list[tuple[int, list[str]]]:
        """(batch, its rows) of every batch that any query handed over."""
        return [(batch, rows) for batch, rows in map(json.loads, self._notes.read_text().splitlines())]

    def forget_commit(self, batch: int) -> None:
        """As if the driver had died before it noted the end of the batch."""
        for name in (f"{batch}", f".{batch}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)


def rows_of(frame: DataFrame) -> list[str]:
    return sorted(repr(row) for row in frame.collect())


class TypedStream(Streamed):
    """One message in two is of the class, and one of these cannot be decoded."""

    kind, count = "typed", 30

    def make(self) -> None:
        orders(self.log, range(20))

    def go_on(self) -> None:
        orders(self.log, range(20, 30))

    def stream(self, spark: SparkSession) -> DataFrame:
        return fg.spark.read_stream(spark, self.log, Placed, maxMessagesPerTrigger=15)

    def read(self, spark: SparkSession) -> DataFrame:
        return fg.spark.read(spark, self.log, Placed)


class ArchiveStream(Streamed):
    """What was read from the journal is in the archive alone when it is read again."""

    kind, count = "archive", 80

    def make(self) -> None:
        self._archive(full_segments(self.log))

    def go_on(self) -> None:
        written = Written(self.log)
        written.append(range(64, 80), roll=True)
        self._archive(written)
        assert len(written.expire()) == 4

    def _archive(self, written: Written) -> None:
        archive_journal(written.root, f"file:{self.folder}/archive")

    def stream(self, spark: SparkSession) -> DataFrame:
        chosen = spark.readStream.format("faregate").options(archive=f"file:{self.folder}/archive")
        return chosen.option("maxMessagesPerTrigger", 25).load(str(self.log))

    def read(self, spark: SparkSession) -> DataFrame:
        return spark.read.format("faregate").option("archive", f"file:{self.folder}/archive").load(str(self.log))


class SeveralStream(Streamed):
    """Of two journals, and then of three."""

    kind, count = "several", 33

    def make(self) -> None:
        journal(self.log / "a", 20)
        journal(self.log / "b", 5)

    def go_on(self) -> None:
        append(self.log / "a", [note(20)])
        append(self.log / "b", [note(number) for number in range(5, 9)])
        journal(self.log / "c", 3)

    def stream(self, spark: SparkSession) -> DataFrame:
        return spark.readStream.format("faregate").option("maxMessagesPerTrigger", 10).load(f"{self.log}/*")

    def read(self, spark: SparkSession) -> DataFrame:
        return spark.read.format("faregate").load(f"{self.log}/*")


STREAMS: dict[str, type[Streamed]] = {each.kind: each for each in (TypedStream, ArchiveStream, SeveralStream)}


def main() -> None:
    kind, folder, last = sys.argv[1:]
    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    fg.spark.register(spark)

    def die(batch: int) -> None:
        if batch == int(last):
            os.killpg(0, signal.SIGKILL)  # with the JVM

    STREAMS[kind](Path(folder)).start(spark, die).awaitTermination()


if __name__ == "__main__":
    main()
