"""`faregate journal archive`: what it prints, what it refuses, and that it shows no secret."""

import fcntl
import logging
import os
from pathlib import Path

import pytest

from faregate.archive.target import FORMS
from faregate.broker.journal.archive import archive_journal
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.repair import repair
from tests.archive.rig import both_sides, full_segments
from tests.archive.s3_server import s3_server
from tests.cli.journal_rig import damage, journal, write


def test_a_run_says_what_it_did_and_the_next_has_nothing_to_do(tmp_path: Path) -> None:
    written, target = full_segments(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    first = journal("archive", written.root, target)
    assert (first.code, first.error) == (0, "")
    assert "archived 60 messages of 3 segments in 9 files (" in first.out
    assert f"{target} has the offsets 0 to 62, and 4 follow in the journal" in first.out
    again = journal("archive", f"journal:{written.root}?retain=7d", target)
    assert again.out.strip() == f"nothing to archive: no segment is full that is not in {target} already"
    written.append(range(64, 70), roll=True)
    told = journal("archive", written.root, target, "--json").json
    [reader] = JournalReader(written.root).reader_offsets()
    assert told.pop("bytes") > 1000
    assert told == {
        "path": str(written.root), "target": target, "reader": reader.name, "segments": 1, "messages": 4, "files": 1,
        "start": 0, "end": 67, "left": 6,
    }  # fmt: skip
    assert reader.offset == 67
    assert reader.name in journal("info", written.root).out


def test_before_anything_is_full_retention_knows_of_the_archive(tmp_path: Path) -> None:
    layout = write(tmp_path / "j", 3)
    assert "nothing to archive" in journal("archive", layout.root, f"file:{tmp_path / 'a'}").out
    assert [each.offset for each in JournalReader(layout.root).reader_offsets()] == [0]


def test_what_is_no_journal_and_no_place_is_refused(tmp_path: Path) -> None:
    root = full_segments(tmp_path / "j").root
    (tmp_path / "link").symlink_to(root)
    for place, why in [
        (
            "a",
            f"'a' is no place for an archive: write {FORMS}; for this folder, file:{Path.cwd()}/a",
        ),
        ("gs://bucket/x", "'gs://bucket/x' is no place for an archive: write s3://BUCKET/PREFIX or file:/PATH"),
        ("file:", "'file:' is no place for an archive"),
        ("file://host/a", "'file://host/a' is no place for an archive"),
        ("s3://", "'s3://' is no place for an archive"),
        (f"file:{root}/archive", f"file:{root}/archive lies within the journal {root}: choose a place outside"),
        (f"file:{tmp_path}/x/../j/archive", "lies within the journal"),
        (f"file:{tmp_path}/link/archive", "lies within the journal"),
        (f"file:{tmp_path}", f"file:{tmp_path} has files but no _faregate/archive.json, so it is no archive"),
    ]:
        refused = journal("archive", root, place)
        assert (refused.code, refused.out) == (1, "")
        assert why in refused.error
    assert "there is no journal in" in journal("archive", tmp_path / "nowhere", f"file:{tmp_path / 'a'}").error
    (tmp_path / "file").write_text("x")
    assert "file cannot be used: " in journal("archive", root, f"file:{tmp_path / 'file'}").error
    assert JournalReader(root).reader_offsets() == []


def test_the_archive_of_another_journal_is_refused(tmp_path: Path) -> None:
    one, other, target = full_segments(tmp_path / "one"), full_segments(tmp_path / "other"), f"file:{tmp_path / 'a'}"
    assert journal("archive", one.root, target).code == 0
    refused = journal("archive", other.root, target)
    assert refused.code == 1
    assert f"{target} is the archive of the journal {JournalReader(one.root).meta.id}, and" in refused.error
    (tmp_path / "a/_faregate/archive.json").write_text('{"log":"x","id":"y","version":2}')
    assert "is written in version 2 of its format" in journal("archive", one.root, target).error
    (tmp_path / "a/_faregate/archive.json").write_text("{}")
    assert "_faregate/archive.json in file:" in journal("archive", one.root, target).error


def test_a_journal_that_went_another_way_is_refused(tmp_path: Path) -> None:
    """It was restored from a backup, and has gone on since."""
    written, target = full_segments(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    older = written.copy(tmp_path / "older")
    longer = written.copy(tmp_path / "longer")
    longer.append(range(64, 70), roll=True)
    archive_journal(longer.root, target)
    refused = journal("archive", older.root, target)
    assert "it goes up to offset 67, where no segment of the journal ends. The journal was restored" in refused.error
    older.now += 1
    older.append(range(64, 70), roll=True)
    assert journal("archive", older.root, target).code == 0  # the segment that is on both sides is the same
    other = full_segments(tmp_path / "other", 4)
    (tmp_path / "other/journal.json").write_bytes((tmp_path / "older/journal.json").read_bytes())
    assert "does not fit" in journal("archive", other.root, target).error


def test_one_run_at_a_time(tmp_path: Path) -> None:
    root = full_segments(tmp_path / "j").root
    held = os.open(Layout(root).readers, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert f"another process archives {root}: wait" in journal("archive", root, f"file:{tmp_path / 'a'}").error
    os.close(held)
    assert journal("archive", root, f"file:{tmp_path / 'a'}").code == 0


@pytest.mark.usefixtures("quiet")
def test_a_damaged_segment_is_not_archived_and_a_repaired_one_is(tmp_path: Path) -> None:
    written, target = full_segments(tmp_path / "j"), f"file:{tmp_path / 'a'}"
    damage(written.layout.segment(21), 400)
    assert "is damaged at byte" in journal("archive", written.root, target).error
    [reader] = JournalReader(written.root).reader_offsets()
    assert reader.offset == 21
    repair(written.root, act=True)
    assert journal("archive", written.root, target).code == 0
    log = JournalReader(written.root)
    left = [offset for offset, _ in log.envelopes()]
    assert len(left) < 64
    written.expire()
    assert both_sides(written.root, target).column("offset").to_pylist() == left
    assert Layout(written.root).segment_bases(RealDisk()) == [63]


def test_credentials_are_shown_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    written = full_segments(tmp_path / "j")
    with s3_server() as server:
        target = server.uri("bucket/prefix", "SOMEKEY:se%2Fcret")
        shown = [journal("archive", written.root, target), journal("archive", written.root, target, "--json")]
        assert [each.code for each in shown] == [0, 0]
        assert "s3://bucket/prefix has the offsets 0 to 62" in shown[0].out
        keys = [name for name in server.objects if name.startswith("bucket/prefix/day=")]
        assert len(keys) == 9
        written.expire()
        assert both_sides(written.root, target).equals(written.table())
        server.refused = True
        shown.append(journal("archive", written.root, target))
        assert "the archive s3://bucket/prefix cannot be used: " in shown[-1].error
    for wrong in (
        f"{target}&bogus=1",
        target.replace("s3:", "s3a:"),
        "s3:SOMEKEY:se%2Fcret@bucket",
        "s3://SOMEKEY:se%2Fcret@",
    ):
        shown.append(journal("archive", written.root, wrong))
        assert shown[-1].code == 1, wrong
    told = "".join(each.out + each.error for each in shown) + caplog.text
    assert "SOMEKEY" not in told
    assert "cret" not in told
