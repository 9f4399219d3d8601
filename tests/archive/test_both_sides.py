"""Archive and journal together are the log as it was before retention: every message, every column, once."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faregate.broker.journal.archive import archive_journal
from faregate.broker.journal.reader import JournalReader
from faregate.errors import ArchiveUnavailable, NotAnArchive, OffsetGone
from tests.archive.rig import (
    BEGIN,
    DAY,
    TYPES,
    Written,
    as_any_engine,
    as_table,
    both_sides,
    full_segments,
    joined,
)

STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 30), st.sampled_from(TYPES), st.sampled_from([10, 600, 3000])),
    st.sampled_from([("bury",), ("roll",), ("seal",), ("archive",), ("archive",), ("expire",), ("compact",)]),
    st.tuples(st.just("pass"), st.sampled_from([1.0, DAY / 3, 2 * DAY])),
)


def run(written: Written, target: str, steps: list[Any]) -> None:
    number = 0
    for what, *more in steps:
        if what == "append":
            count, type, size = more
            written.append(range(number, number + count), type, size=size)
            number += count
        elif what == "roll":
            written.append([number], roll=number > 0)
            number += 1
        elif what == "pass":
            written.now += more[0]
        elif what == "archive":
            archive_journal(written.root, target)
        elif what == "compact":
            written.expire([(number // 2, number // 2 + 1)])
        else:
            getattr(written, what)()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, max_size=25), data=st.data())
def test_whatever_happens_after_the_first_run_both_sides_are_the_log(
    steps: list[Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("archived")
    written, target = Written(folder / "j"), f"file:{folder / 'a'}"
    archive_journal(written.root, target)
    run(written, target, steps)
    whole = written.table()
    assert both_sides(written.root, target).equals(whole)
    if not whole.num_rows:
        return
    log = joined(written.root, target)
    offsets = whole.column("offset").to_pylist()
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, log.latest())] * 2)))
    expected = whole.filter((pc.field("offset") >= start) & (pc.field("offset") < end))
    assert as_table(log.batches(start, end, rows=7)).equals(expected)
    assert [offset for offset, _ in log.envelopes(start, end)] == expected.column("offset").to_pylist()
    assert sum(part.end - part.start for part in log.parts()) == log.latest() - log.earliest()
    stretches = list(log.stretches(start, end))
    for row in expected.select(["offset", "type", "source"]).to_pylist():
        [own] = [each for each in stretches if each.start <= row["offset"] < each.end]
        assert own.types is None or row["type"] in own.types
        assert own.sources is None or row["source"] in own.sources
        time = whole.column("time").cast("int64")[offsets.index(row["offset"])].as_py()
        assert own.times is None or own.times[0] <= time <= own.times[1]
    chosen = sorted({*data.draw(st.lists(st.sampled_from(offsets), max_size=5))})
    assert [each.publication_id for each in log.load(chosen)] == [
        whole.column("publication_id")[offsets.index(offset)].as_py() for offset in chosen
    ]
    moment = BEGIN + data.draw(st.floats(-1.0, 10 * DAY))
    later = whole.filter(pc.field("time") >= pa.scalar(round(moment * 1_000_000), pa.timestamp("us", "UTC")))
    assert log.offset_at(moment) == (later.column("offset")[0].as_py() if later.num_rows else log.latest())


def test_types_and_sources_that_are_not_wanted_are_not_read(tmp_path: Path) -> None:
    written, target = full_segments(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    archive_journal(written.root, target)
    written.expire()
    for file in (tmp_path / "a").glob("day=*/type=OrderPlaced/*"):
        file.unlink()
    first = JournalReader(written.root).earliest()
    whole = written.table().filter(pc.field("offset") < first)
    wanted = (pc.field("type") == TYPES[1]) & (pc.field("source") == "web")
    log = joined(written.root, target, types=[TYPES[1]], sources=["web"])
    assert as_table(log.batches(0, first)).equals(whole.filter(wanted))


def test_a_log_that_is_open_learns_of_what_is_archived_later(tmp_path: Path) -> None:
    written, target = full_segments(tmp_path / "j", 1), f"file:{tmp_path / 'a'}"
    archive_journal(written.root, target)
    log = joined(written.root, target)
    assert (log.earliest(), log.offset_at(BEGIN + DAY + 1), len(log.parts())) == (0, log.latest(), 2)
    written.now += DAY
    written.append(range(24, 30), roll=True)
    written.append(range(30, 33), roll=True)
    archive_journal(written.root, target)
    assert len(written.expire()) == 3
    assert log.offset_at(BEGIN + DAY + 1) == 25
    assert [(part.start, part.end) for part in log.parts()] == [(0, 21), (21, 25), (25, 31), (31, 34)]
    assert as_table(log.batches(0)).equals(written.table())


def test_retention_goes_by_while_the_log_is_read(tmp_path: Path) -> None:
    written, target = full_segments(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    written.seal()
    archive_journal(written.root, target)
    log = joined(written.root, target)
    batches = log.batches(0, rows=3)
    found = [next(batches) for _ in range(2)]
    assert len(written.expire()) == 3
    assert as_table([*found, *batches]).equals(written.table())


def test_what_is_on_neither_side_is_told_before_what_is_behind_it(tmp_path: Path) -> None:
    written, target = full_segments(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    reader = archive_journal(written.root, target).reader
    written.append(range(64, 70))
    written.append(range(70, 75), roll=True)
    JournalReader(written.root).forget_reader(reader)
    written.expire()
    first = JournalReader(written.root).earliest()
    log, got = joined(written.root, target), []
    with pytest.raises(OffsetGone, match=rf"the messages from 63 to {first - 1} are missing in the journal"):
        got.extend(log.batches(0))
    assert max(batch.column("offset")[-1].as_py() for batch in got) < 63
    losses: list[OffsetGone] = []
    rest = both_sides(written.root, target, on_loss=losses.append)
    lost = (pc.field("offset") >= 63) & (pc.field("offset") < first)
    assert rest.equals(written.table().filter(~lost))
    assert len(losses) == 1
    # Who archives is told, too, and nothing happens unless it is allowed.
    with pytest.raises(OffsetGone, match=rf"the messages from 63 to {first - 1} were removed"):
        archive_journal(written.root, target)
    written.append([75], roll=True)
    assert archive_journal(written.root, target, allow_gap=True).end > first
    written.expire()
    assert both_sides(written.root, target, on_loss=losses.append).equals(written.table().filter(~lost))
    with pytest.raises(OffsetGone, match="begins at offset 0; reading was to start at -1"):
        next(log.batches(-1))
    with pytest.raises(OffsetGone, match=r"is not in .* yet"):
        next(log.batches(1000))


def test_files_that_somebody_removed_are_a_loss(tmp_path: Path) -> None:
    written, target = full_segments(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    archive_journal(written.root, target)
    written.expire()
    for file in (tmp_path / "a").glob("day=*/type=OrderCancelled/*-00000000000000000021.parquet"):
        file.unlink()
    with pytest.raises(OffsetGone, match=r"the messages 21 to 41 are not in the archive .* any more"):
        both_sides(written.root, target)
    losses: list[OffsetGone] = []
    rest = both_sides(written.root, target, on_loss=losses.append)
    assert rest.equals(written.table().filter((pc.field("offset") < 21) | (pc.field("offset") >= 42)))


def test_a_file_that_is_damaged_is_never_read_as_something_else(tmp_path: Path) -> None:
    """In the last byte of each column, where its values are; in its footer; and cut off."""
    written, target = full_segments(tmp_path / "j", 1), f"file:{tmp_path / 'a'}"
    archive_journal(written.root, target)
    written.expire()
    file = next((tmp_path / "a").glob("day=*/type=OrderPlaced/*.parquet"))
    sound, columns = file.read_bytes(), parquet.ParquetFile(file).metadata.row_group(0)
    for number in range(columns.num_columns):
        column = columns.column(number)
        first = column.dictionary_page_offset or column.data_page_offset
        last = first + column.total_compressed_size - 1
        file.write_bytes(sound[:last] + bytes([sound[last] ^ 0x10]) + sound[last + 1 :])
        with pytest.raises(ArchiveUnavailable, match=r"\.parquet in file:.* cannot be read"):
            both_sides(written.root, target)
    for at in range(len(sound) - 8 - parquet.ParquetFile(file).metadata.serialized_size, len(sound), 7):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 0x01]) + sound[at + 1 :])
        with pytest.raises(ArchiveUnavailable, match=r"\.parquet in file:.* cannot be read"):
            both_sides(written.root, target)
    for size in (0, 200, len(sound) - 1):
        file.write_bytes(sound[:size])
        with pytest.raises(ArchiveUnavailable, match=r"\.parquet in file:.* cannot be read"):
            both_sides(written.root, target)
    file.write_bytes(sound)
    assert both_sides(written.root, target).equals(written.table())


def test_any_engine_reads_the_files_by_day_and_type(tmp_path: Path) -> None:
    written, target = Written(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    for number, type in enumerate(TYPES):
        written.append([number], type)
        written.now += DAY / 2
    written.append([4])
    written.append([5], roll=True)
    archive_journal(written.root, target)
    found = as_any_engine(tmp_path / "a")
    rows = zip(*(found.column(name).to_pylist() for name in ("offset", "type", "day")), strict=True)
    days = ["2026-11-17"] * 2 + ["2026-11-18"] * 2 + ["2026-11-19"]
    assert [(offset, type, str(day)) for offset, type, day in rows] == [
        *zip(range(5), [*TYPES[:2], None, TYPES[3], TYPES[0]], days, strict=True)
    ]
    plain = [name for name in written.table().column_names if name != "type"]
    assert found.select(plain).equals(written.table().select(plain).slice(0, 5))


def test_the_archive_of_another_journal_is_not_read(tmp_path: Path) -> None:
    one, other = full_segments(tmp_path / "one"), full_segments(tmp_path / "other")
    archive_journal(one.root, f"file:{tmp_path / 'a'}")
    with pytest.raises(NotAnArchive, match=r"is the archive of the log .* is the log"):
        joined(other.root, f"file:{tmp_path / 'a'}")
    with pytest.raises(NotAnArchive, match=r"there is no archive in file:.*/b: 'faregate journal archive"):
        joined(other.root, f"file:{tmp_path / 'b'}")
