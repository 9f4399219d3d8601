"""The sink's two phases, without Spark: attempts, commits, replays, aborts, garbage, two drivers."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.types import StructType

from faregate.broker.journal import frame as frames
from faregate.broker.journal import spool, staging
from faregate.broker.journal.backup import copy_journal
from faregate.broker.journal.commits import SinkCommits
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.findings import Inspection
from faregate.broker.journal.frame import Part
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.segment import batch_frames
from faregate.broker.journal.verify import Inspector
from faregate.errors import BatchDiffers, FaregateError, JournalCorrupt, MessageTooLarge
from faregate.ports.log import Staged
from faregate.spark.options import InvalidOption
from faregate.spark.sink.writer import BatchWriter, StagedMessage, StreamWriter
from tests.spark.rig import empty_journal, options, run_bus, spooled

SCHEMA = StructType().add("type", "string").add("body", "string").add("source", "string")
QUERY = "11111111-2222-3333-4444-555555555555"


class Task:
    """What a writer sees of the task that it runs in."""

    attempts = 0

    def __init__(self, query: str, batch: int, partition: int) -> None:
        self._properties = {"sql.streaming.queryId": query, "streaming.sql.batchId": str(batch)}
        self._partition = partition
        Task.attempts += 1
        self._attempt = Task.attempts

    def partitionId(self) -> int:
        return self._partition

    def taskAttemptId(self) -> int:
        return self._attempt

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return empty_journal(tmp_path / "j")


Write = Callable[..., StagedMessage]


@pytest.fixture
def write(path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Run one attempt of a task that writes these texts."""

    def attempt(*texts: str, query: str = QUERY, batch: int = 0, partition: int = 0, fail: bool = False) -> Any:
        monkeypatch.setattr(TaskContext, "get", lambda: cast(Any, Task(query, batch, partition)))

        def batches() -> Any:
            for text in texts:
                yield pa.record_batch([["Noted"], [f'{{"text":"{text}"}}'], ["author"]], names=SCHEMA.fieldNames())
            if fail:
                raise RuntimeError("the task was killed")

        return StreamWriter(options(path), SCHEMA, False).write(batches())

    return attempt


def commit(path: Path, *messages: StagedMessage | None, batch: int = 0) -> None:
    StreamWriter(options(path), SCHEMA, False).commit(list(messages), batch)


def staged_files(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "staging").rglob("*") if file.is_file())


def texts(path: Path) -> list[list[bytes]]:
    return [[envelope.body[9:-2] for envelope in batch] for batch in spooled(path)]


def test_a_batch_is_in_the_spool_at_once_in_the_order_of_partitions(path: Path, write: Write) -> None:
    later, none, earlier = write("3", "4", partition=2), write(partition=1), write("1", "2", partition=0)
    assert texts(path) == []
    commit(path, later, none, earlier)
    assert texts(path) == [[b"1", b"2", b"3", b"4"]]
    assert staged_files(path) == []
    assert run_bus(path) == ["1", "2", "3", "4"]


def test_only_the_attempt_that_spark_chose_is_committed(path: Path, write: Write) -> None:
    chosen, speculative = write("1"), write("1")
    assert chosen.staged[0].name != speculative.staged[0].name
    commit(path, chosen)
    zombie = write("1")  # it goes on after the commit
    assert len(staged_files(path)) == 1 and zombie.staged[0].name is not None
    commit(path, write("2", batch=1), batch=1)
    assert staged_files(path) == [], "the next commit collects what zombies leave"
    assert texts(path) == [[b"1"], [b"2"]]


def test_a_failed_attempt_leaves_nothing(path: Path, write: Write) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        write("1", fail=True)
    assert staged_files(path) == []


def test_an_abort_removes_what_it_knows_of_and_nothing_else(path: Path, write: Write) -> None:
    aborted, other_run = write("1"), write("1")
    StreamWriter(options(path), SCHEMA, False).abort([aborted, None], 0)
    assert staged_files(path) == [other_run.staged[0].name]
    commit(path, other_run)
    assert texts(path) == [[b"1"]]


def test_a_replayed_batch_is_a_no_op_before_and_after_the_bus_took_it_in(path: Path, write: Write) -> None:
    commit(path, write("1"))
    commit(path, write("1"))
    assert texts(path) == [[b"1"]]
    assert run_bus(path) == ["1"]
    commit(path, write("1"))
    assert texts(path) == [] and staged_files(path) == []
    assert run_bus(path) == []


def test_a_driver_that_died_between_spool_and_record_does_not_double(path: Path, write: Write) -> None:
    for taken_in in (False, True):
        batch = int(taken_in)
        commit(path, write(f"{batch}", batch=batch), batch=batch)
        assert not taken_in or run_bus(path) == ["1"]
        (path / "sinks" / f"{QUERY}.json").unlink()
        commit(path, write(f"{batch}", batch=batch), batch=batch)
        assert run_bus(path) == ([] if taken_in else ["0"])


def test_a_new_checkpoint_that_restarts_at_batch_0_is_no_replay(path: Path, write: Write) -> None:
    commit(path, write("1"))
    commit(path, write("1", query="another-query"))
    assert sorted(run_bus(path)) == ["1", "1"]


def test_a_batch_with_the_number_of_another_is_refused_not_skipped(path: Path, write: Write) -> None:
    commit(path, write("1"))
    commit(path, write("2", batch=1), batch=1)
    with pytest.raises(BatchDiffers, match=r"batch 0 of query .* had 1 messages, 12 bytes; now it has 2 messages"):
        commit(path, write("1", "2"))
    assert texts(path) == [[b"1"], [b"2"]]


def test_an_empty_batch_is_remembered_and_writes_no_file(path: Path, write: Write) -> None:
    commit(path, write())
    commit(path)
    assert texts(path) == []
    assert [batch.rows for batch in SinkCommits(Layout(path), QUERY)._read().batches] == [0]


def test_two_drivers_on_one_checkpoint_commit_once(path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = write("1"), write("1")
    move = staging.move_into_spool

    def overtaken(*arguments: Any) -> None:
        monkeypatch.setattr("faregate.broker.journal.commits.move_into_spool", move)
        commit(path, two)
        move(*arguments)

    monkeypatch.setattr("faregate.broker.journal.commits.move_into_spool", overtaken)
    commit(path, one)
    assert run_bus(path) == ["1"]


def test_a_staged_file_that_the_driver_cannot_see_is_named(path: Path, write: Write) -> None:
    message = write("1")
    assert message.staged[0].name is not None
    (staging.batch_folder(Layout(path), QUERY, 0) / message.staged[0].name).unlink()
    with pytest.raises(FaregateError, match=r"staged, is not there for the driver: .* under the same path"):
        commit(path, message)


def damage(file: Path, at: bytes) -> None:
    data = bytearray(file.read_bytes())
    data[data.index(at)] ^= 1
    file.write_bytes(data)


def test_a_damaged_staged_file_is_not_committed(path: Path, write: Write) -> None:
    message, longer = write("1", "2"), write("3", partition=1)
    [file] = staging.batch_folder(Layout(path), QUERY, 0).glob("000000-*")
    [other] = staging.batch_folder(Layout(path), QUERY, 0).glob("000001-*")
    other.write_bytes(other.read_bytes() + b"x")
    with pytest.raises(JournalCorrupt, match=r"the staged file .* goes on behind byte \d+; the batch is not committed"):
        commit(path, message, longer)
    damage(file, b"FGJ")
    with pytest.raises(JournalCorrupt, match=r"the staged file .* is damaged at byte 0; the batch is not committed"):
        commit(path, message)
    assert texts(path) == [] and parts(path) == []


def parts(path: Path) -> list[Path]:
    return sorted((path / "spool").glob("*.frames"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize("harm", [lambda file: damage(file, b'"text"'), cut, Path.unlink], ids=["bit", "cut", "gone"])
def test_a_batch_that_lost_some_of_it_is_set_aside_as_a_whole_and_told(
    path: Path, write: Write, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    commit(path, write("1"), write("2", partition=1))
    commit(path, write("3", batch=1), batch=1)
    whole, harmed, _ = parts(path)
    harm(harmed)
    found = inspect(path)
    assert [(each.path, each.what) for each in found.problems] == [
        (harmed, f"is not what spark-{QUERY}-{0:020}.batch was made of")
    ]
    assert run_bus(path) == ["3"], "nothing of the one, and all of the other"
    aside = {file.name for file in (path / "quarantine").iterdir()}
    assert aside == {f"spark-{QUERY}-{0:020}.batch", whole.name, *([] if harm is Path.unlink else [harmed.name])}
    assert f"{harmed.name} is missing, or is damaged at byte" in caplog.text
    assert list((path / "spool").iterdir()) == []


def test_what_an_older_program_has_set_aside_can_be_taken_in_later(path: Path, write: Write) -> None:
    """It moves the batch alone."""
    commit(path, write("1"), write("2", partition=1))
    [batch] = (path / "spool").glob("*.batch")
    (path / "quarantine").mkdir()
    batch.rename(path / "quarantine" / batch.name)
    commit(path, write("3", batch=1), batch=1)
    assert run_bus(path) == ["3"]
    (path / "quarantine" / batch.name).rename(batch)
    assert run_bus(path) == ["1", "2"]


def test_a_commit_that_failed_leaves_nothing_once_it_is_aborted(
    path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = write("1")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(RealDisk, "replace", full)
        commit(path, message)
    assert len(parts(path)) == 1, "it was moved before the disk was full"
    StreamWriter(options(path), SCHEMA, False).abort([message], 0)
    assert parts(path) == staged_files(path) == []
    commit(path, done := write("1"))
    StreamWriter(options(path), SCHEMA, False).abort([done], 0)
    assert run_bus(path) == ["1"], "what is committed stays"


def inspect(path: Path) -> Inspection:
    return Inspector(Layout(path), RealDisk(), None).run()


OWN = "mine.a.frames"


@pytest.mark.parametrize(
    "named",
    [
        [Part("other.a.frames", 1, 0)],
        [Part("mine.a\0b.frames", 1, 0)],
        [Part("mine." + "a" * 300 + ".frames", 1, 0)],
        [Part("mine.../../x.frames", 1, 0)],
        [Part(OWN, 1, 1 << 40)],
        [Part(OWN, 0, 8)],
        [Part(OWN, -1, 8)],
        [Part(OWN, 1, 8)],
        [Part(OWN, 1, 8)] * 1000,
    ],
    ids=["another's", "nul", "long", "path", "huge", "none", "negative", "rubbish", "again and again"],
)
def test_a_batch_that_names_what_is_none_of_its_own_is_no_batch(path: Path, write: Write, named: list[Part]) -> None:
    run_bus(path)
    commit(path, write("1"))
    made, own = path / "spool" / "mine.batch", path / "spool" / OWN
    [frame] = batch_frames([(frames.PARTS, msgspec.json.encode(named), len(named))], 1)
    made.write_bytes(b"".join(frame))
    own.write_bytes(b"x" * 8)
    if named[0].bytes > 1 << 30:
        os.truncate(own, named[0].bytes)
    with pytest.raises(JournalCorrupt, match=r"mine\.batch is not a whole batch"):
        spool.read_spooled(made, RealDisk())
    assert len(inspect(path).problems) == 1
    if own.stat().st_size == 8:
        with pytest.raises(JournalCorrupt, match=r"the copy of .* is not sound"):
            copy_journal(path, path.parent / "copy")
    assert run_bus(path) == ["1"]
    assert {file.name for file in (path / "quarantine").iterdir()} == {"mine.batch", OWN}


def test_a_pipe_in_the_spool_holds_up_no_backup(path: Path) -> None:
    run_bus(path)
    os.mkfifo(path / "spool" / "pipe.batch")
    assert spool.parts_of(path / "spool" / "pipe.batch", RealDisk()) == []
    copy_journal(path, path.parent / "copy")


def test_a_backup_has_what_a_batch_is_made_of(path: Path, write: Write, tmp_path: Path) -> None:
    run_bus(path)
    commit(path, write("1"), write("2", partition=1))
    copy_journal(path, tmp_path / "copy")
    assert inspect(tmp_path / "copy").problems == []
    assert run_bus(tmp_path / "copy") == ["1", "2"]
    assert list((tmp_path / "copy" / "spool").iterdir()) == []


def test_a_restored_journal_refuses_another_batch_of_a_known_number(path: Path, write: Write, tmp_path: Path) -> None:
    """As after a disaster: the journal of last night, and a checkpoint that is older."""
    run_bus(path)
    for batch in range(2):
        commit(path, write(f"{batch}", batch=batch), batch=batch)
    assert run_bus(path) == ["0", "1"]
    copy_journal(path, tmp_path / "copy")
    shutil.rmtree(path)
    copy_journal(tmp_path / "copy", path)
    with pytest.raises(BatchDiffers, match="batch 1 of query"):
        commit(path, write("1", "2", batch=1), batch=1)


def test_a_driver_that_slept_does_not_take_back_what_another_noted(
    path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = SinkCommits.add

    def sleeps(commits: SinkCommits, noted: Any) -> None:
        monkeypatch.setattr(SinkCommits, "add", add)
        for batch in range(1, 4):
            commit(path, write(f"{batch}", batch=batch), batch=batch)
        add(commits, noted)

    commit(path, write("0"))
    monkeypatch.setattr(SinkCommits, "add", sleeps)
    commit(path, write("1", batch=1), batch=1)
    with pytest.raises(BatchDiffers, match="batch 2 of query"):
        commit(path, write("2", "3", batch=2), batch=2)
    assert run_bus(path) == ["0", "1", "2", "3"]


def test_what_waits_is_neither_foreign_nor_garbage_however_old(path: Path, write: Write) -> None:
    for batch in range(3):
        commit(path, write(f"{batch}", batch=batch), batch=batch)
        for file in parts(path):
            os.utime(file, (0, 0))
    assert Layout(path).foreign_files(RealDisk()) == []
    assert run_bus(path) == ["0", "1", "2"]
    assert list((path / "spool").iterdir()) == [], "a batch goes with what it is made of"


def test_what_a_driver_moved_before_it_died_is_collected_by_others_after_a_day(path: Path, write: Write) -> None:
    old, new = path / "spool" / "spark-dead-0.x.frames", path / "spool" / "spark-busy-0.x.frames"
    for file in (old, new):
        file.write_bytes(b"x")
    os.utime(old, (0, 0))
    commit(path, write("1"))
    assert not old.exists() and new.exists()


def test_bodies_count_as_long_as_they_are_however_well_they_compress(
    path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bus reads a batch as a whole, so what it unpacks to is bounded: for who commits, and for who finds a file."""
    commit(path, write("x" * 50_000))
    [file] = parts(path)
    assert file.stat().st_size < 10_000
    for module in (staging, spool):
        monkeypatch.setattr(module, "MOST_UNPACKED", 40_000)
    with pytest.raises(MessageTooLarge, match=r"a batch of \d+ bytes, 50011 unpacked, .*maxMessagesPerTrigger"):
        commit(path, write("x" * 50_000, batch=1), batch=1)
    with pytest.raises(JournalCorrupt, match="is not a batch: its bodies have more than 40000 bytes"):
        texts(path)


def test_what_dead_sinks_staged_goes_after_a_day_and_not_before(path: Path, write: Write) -> None:
    write("1", query="dead-for-long")
    write("1", query="at-work")
    long_ago = time.time() - 25 * 3600
    for entry in (path / "staging/dead-for-long", *(path / "staging/dead-for-long").rglob("*")):
        os.utime(entry, (long_ago, long_ago))
    commit(path, write("2"))
    assert [entry.name for entry in (path / "staging").iterdir()] == ["at-work"]


def test_a_bus_cannot_be_overwritten(path: Path) -> None:
    for writer in (StreamWriter, BatchWriter):
        with pytest.raises(InvalidOption, match=r"cannot be overwritten: use mode\('append'\)"):
            writer(options(path), SCHEMA, True)


@pytest.mark.parametrize("name", ["../../../etc/passwd", "000001-1-00.frames", "x"])
def test_what_a_task_passes_on_names_files_of_its_own_only(name: str, path: Path) -> None:
    foreign = StagedMessage(QUERY, 0, 0, [Staged(name, 1, 1, 1)])
    writer = StreamWriter(options(path), SCHEMA, False)
    for use in (writer.commit, writer.abort):
        with pytest.raises(ValueError, match="is not the name of a staged file"):
            use([foreign], 0)
