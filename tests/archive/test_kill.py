"""Runs that die anywhere: retention takes what it may after each, and in the end both sides are the log, once.

Everywhere within this process, and by SIGKILL of the real command at the places that matter most. The same checks fail
on archivers that are broken on purpose.
"""

import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from faregate.broker.journal import archive
from faregate.broker.journal.archive import Archiver, archive_journal
from faregate.broker.journal.frame import Footer
from faregate.broker.journal.reader import JournalReader
from faregate.errors import FaregateError
from tests.archive.rig import Written, as_any_engine, both_sides, full_segments
from tests.archive.s3_server import s3_server
from tests.archive.steps import stop_at
from tests.child import Child

ROOT = Path(__file__).parents[2]
END = 42
"""Behind what is full: two segments of twenty messages and a dead letter each."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return full_segments(tmp_path_factory.mktemp("original") / "j", 2)


class Crash(BaseException):
    pass


def crash() -> None:
    raise Crash


def check(written: Written, target: str, folder: Path | None) -> None:
    """A last run, and retention: nothing is missing, nothing is there twice, for our reader and for any engine."""
    archive_journal(written.root, target)
    written.expire()
    assert JournalReader(written.root).earliest() == END, "what is archived stays in the journal for ever"
    assert both_sides(written.root, target).equals(written.table()), "both sides are not the log"
    if folder is not None:
        names = [name for name in written.table().column_names if name != "type"]
        archived = written.table().select(names).slice(0, 40)
        assert as_any_engine(folder).select(names).equals(archived), "the files are not what is archived"


def places(original: Written, tmp_path: Path) -> list[str]:
    """Everything that a run comes to."""
    written = original.copy(tmp_path / "all")
    with pytest.MonkeyPatch.context() as patches:
        seen = stop_at("nowhere", crash, patches)
        archive_journal(written.root, f"file:{tmp_path / 'all-archived'}")
    return seen


UNREGISTERED = [f"{moment} meta 1" for moment in ("before", "within", "after")] + ["before reader 1", "within reader 1"]
"""Until then retention knows of no archive."""


def die_and_go_on(original: Written, tmp_path: Path, place: str) -> None:
    written, folder = original.copy(tmp_path / "j"), tmp_path / "a"
    with pytest.MonkeyPatch.context() as patches:
        stop_at(place, crash, patches)
        with pytest.raises(Crash):
            archive_journal(written.root, f"file:{folder}")
    if place not in UNREGISTERED:
        written.expire()
    check(written, f"file:{folder}", folder)


def test_a_run_that_dies_anywhere_is_repeated(original: Written, tmp_path: Path) -> None:
    found = places(original, tmp_path)
    assert {"after meta 1", "before reader 1", "within file 4", "after manifest 2", "after reader 4"} <= set(found)
    for number, place in enumerate(found):
        die_and_go_on(original, tmp_path / f"{number}", place)


# --- SIGKILL ------------------------------------------------------------------------------------------------------


def kill(place: str, written: Written, target: str) -> None:
    command = [sys.executable, "-m", "tests.archive.worker", place, str(written.root), target]
    with Child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        output, _ = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, f"it ended by itself with {process.returncode}: {output}"


KILLS = ["after reader 1", "within file 2", "before manifest 1", "after manifest 1"]


def test_kills_of_the_command_one_after_another(original: Written, tmp_path: Path) -> None:
    written, folder = original.copy(tmp_path / "j"), tmp_path / "a"
    for place in KILLS:
        kill(place, written, f"file:{folder}")
        written.expire()
    assert [path.name for path in folder.rglob("*.new")], "nothing was half written, so this shows little"
    check(written, f"file:{folder}", folder)


def test_kills_of_the_command_with_an_object_store(original: Written, tmp_path: Path) -> None:
    with s3_server() as server:
        written, target = original.copy(tmp_path / "j"), server.uri("bucket/prefix")
        kill("after file 2", written, target)
        written.expire()
        check(written, target, None)


@pytest.mark.full
def test_kills_of_the_command_anywhere(original: Written, tmp_path: Path) -> None:
    chance, found = random.Random(16), places(original, tmp_path)
    for number in range(10):
        written, folder = original.copy(tmp_path / f"{number}"), tmp_path / f"{number}-archived"
        place = chance.choice(found)
        kill(place, written, f"file:{folder}")
        if place not in UNREGISTERED:
            written.expire()
        check(written, f"file:{folder}", folder)


# --- broken on purpose ----------------------------------------------------------------------------------------------


def manifest_first(patches: pytest.MonkeyPatch) -> None:
    """A segment counts as archived before its files are there."""

    def reversed_order(self: Archiver, footer: Footer) -> Any:
        put, files = archive.put, []
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(archive, "put", lambda *given: files.append(given))
            manifest = honest(self, footer)
        for given in reversed(files):
            put(*given)
        return manifest

    honest = Archiver._archive_segment
    patches.setattr(Archiver, "_archive_segment", reversed_order)


def reader_first(patches: pytest.MonkeyPatch) -> None:
    """Retention may take a segment before it is archived."""
    honest = Archiver._archive_segment

    def early(self: Archiver, footer: Footer) -> Any:
        self._reader.save_reader_offset(self._name, footer.end)
        return honest(self, footer)

    patches.setattr(Archiver, "_archive_segment", early)


def no_reader(patches: pytest.MonkeyPatch) -> None:
    """Retention does not wait."""
    patches.setattr(JournalReader, "save_reader_offset", lambda self, name, offset: None)


def new_names(patches: pytest.MonkeyPatch) -> None:
    """A repetition leaves what was there."""
    honest = archive.file_path
    patches.setattr(archive, "file_path", lambda *given: honest(*given).replace(".parquet", f"-{uuid.uuid4()}.parquet"))


@pytest.mark.parametrize(
    ("mutant", "place", "seen"),
    [
        (manifest_first, "before file 1", "not in the archive"),
        (reader_first, "before file 4", "were removed"),
        (no_reader, "before file 1", "both sides are not the log"),
        (new_names, "after file 1", "the files are not what is archived"),
    ],
)
def test_the_checks_see_an_archiver_that_is_broken(
    original: Written, tmp_path: Path, mutant: Any, place: str, seen: str
) -> None:
    with pytest.MonkeyPatch.context() as patches:
        mutant(patches)
        with pytest.raises((AssertionError, FaregateError), match=seen):
            die_and_go_on(original, tmp_path, place)
