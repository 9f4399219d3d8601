"""Spark reads in a segment while it is sealed: every message comes once, whatever form its bytes have by then."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import InputPartition

from faregate.broker.journal import reader as reading_frames
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.log import Log
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.sealing import seal_all
from faregate.spark.source import reading
from faregate.spark.source.batch_reader import BatchReader
from faregate.spark.source.stream_reader import StreamReader
from tests.spark.rig import SCHEMA, empty_journal, note, options

COUNT = 200
READERS = ["batch", "stream"]


def write(path: Path, count: int, *, per_frame: int = 1, segment_size: int = 1 << 18) -> Path:
    """A journal whose messages lie in one hot segment."""
    empty_journal(path)
    log = Log(Layout(path), RealDisk(), segment_size=segment_size)
    for start in range(0, count, per_frame):
        log.append([note(number) for number in range(start, start + per_frame)], [-1] * per_frame)
    log.sync()
    log.close()
    return path


def go_on_and_seal(path: Path, *, more: int = 5) -> None:
    """What its writer does: the segment grows, is rolled and sealed, and the next one begins."""
    layout, disk = Layout(path), RealDisk()
    log = Log(layout, disk, segment_size=1 << 18)
    log.append([note(log.next_offset + number) for number in range(more)], [-1] * more)
    log.sync()
    log.roll()
    log.append([note(log.next_offset + number) for number in range(more)], [-1] * more)
    log.sync()
    log.close()
    assert seal_all(layout, disk) == 1


def planned(path: Path, kind: str) -> tuple[Any, list[InputPartition]]:
    """A reader as Spark makes it, and its tasks: three, so that two begin within the segment."""
    chosen = options(path, minPartitions=3)
    if kind == "batch":
        batch = BatchReader(chosen, SCHEMA)
        return batch, batch.partitions()
    stream = StreamReader(chosen, SCHEMA)
    first = {**stream.initialOffset(), "0": 0}
    return stream, stream.partitions(first, stream.latestOffset(first, stream.getDefaultReadLimit()))


def offsets(batches: Iterator[Any]) -> list[int]:
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a task is in the middle of a segment when it has given one."""
    monkeypatch.setattr(reading_frames, "_GROUP_ROWS", 10)
    monkeypatch.setattr(reading, "BATCH_ROWS", 10)


@pytest.mark.parametrize("kind", READERS)
def test_what_was_planned_before_the_sealing_is_read_after_it(tmp_path: Path, kind: str) -> None:
    reader, tasks = planned(write(tmp_path / "j", COUNT), kind)
    assert len(tasks) == 3
    go_on_and_seal(tmp_path / "j")
    assert JournalReader(tmp_path / "j").is_sealed(0)
    assert [offset for task in tasks for offset in offsets(reader.read(task))] == [*range(COUNT)]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.usefixtures("small_batches")
def test_tasks_in_the_middle_of_a_segment_go_on_when_it_is_sealed(tmp_path: Path, kind: str) -> None:
    reader, tasks = planned(write(tmp_path / "j", COUNT), kind)
    running = [reader.read(task) for task in tasks]
    begun = [next(task).column("offset").to_pylist() for task in running]
    assert all(0 < len(each) < COUNT // 3 for each in begun), "a task was done before the segment was sealed"
    go_on_and_seal(tmp_path / "j")
    found = [offset for each, task in zip(begun, running, strict=True) for offset in [*each, *offsets(task)]]
    assert found == [*range(COUNT)]


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.usefixtures("small_batches")
def test_it_may_be_sealed_between_any_two_looks_at_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also between reading how far the log goes and opening the segment that it named."""
    moments = 0
    while True:
        path = write(tmp_path / f"{moments}", 30)
        reader, tasks = planned(path, kind)
        with monkeypatch.context() as during:
            looks = SealsBeforeLook(path, moments, during)
            found = [offset for task in tasks for offset in offsets(reader.read(task))]
        if not looks.has_sealed:
            break
        assert found == [*range(30)], f"sealed before look {moments}"
        moments += 1
    assert moments > 10, "hardly anything was looked at"


class SealsBeforeLook:
    """Has the segment sealed before somebody reads from the disk for the n-th time."""

    def __init__(self, path: Path, number: int, patch: pytest.MonkeyPatch) -> None:
        self.has_sealed = False
        self._path = path
        self._left = number
        for name in ("view", "read", "list"):
            patch.setattr(RealDisk, name, self._counted(getattr(RealDisk, name)))

    def _counted(self, look: Any) -> Any:
        def counted(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0 and not self.has_sealed:
                self.has_sealed = True
                go_on_and_seal(self._path)
            return look(*args)

        return counted


@pytest.mark.parametrize("kind", READERS)
def test_a_task_that_is_tried_again_gives_the_same_rows_of_the_other_form(tmp_path: Path, kind: str) -> None:
    reader, tasks = planned(write(tmp_path / "j", COUNT), kind)
    hot = [batch for task in tasks for batch in reader.read(task)]
    go_on_and_seal(tmp_path / "j")
    sealed = [batch for task in tasks for batch in reader.read(task)]
    assert [row for each in sealed for row in each.to_pylist()] == [row for each in hot for row in each.to_pylist()]


@pytest.mark.services
def test_spark_sees_every_message_once_while_its_task_is_in_a_segment_that_is_sealed(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Whoever gets the first rows has the segment sealed. The task that reads is not done then: it waits for them to
    be taken."""
    count = 100_000
    path = write(tmp_path / "j", count, per_frame=1000, segment_size=1 << 26)

    def seal_at_the_first(batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if not number:
                go_on_and_seal(path)
            yield batch.select(["offset"])

    read = spark.read.format("faregate").option("columns", "offset,body").load(str(path))
    found = read.coalesce(1).mapInArrow(seal_at_the_first, "offset bigint").collect()
    assert JournalReader(path).is_sealed(0), "it was not sealed meanwhile"
    assert sorted(row["offset"] for row in found) == [*range(count)]
