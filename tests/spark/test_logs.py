"""Opening a log: also in the moment in which its writer makes it."""

import threading
from pathlib import Path
from typing import Any

import pytest

from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.errors import ConfigurationError, InvalidOption, JournalCorrupt
from faregate.ports import schemes
from faregate.ports.log import LogTransport
from faregate.ports.schemes import members
from faregate.spark import logs
from faregate.spark.options import parse_options
from faregate.spark.schema import row_schema
from faregate.spark.source.batch_reader import BatchReader
from faregate.transports import journal_log
from faregate.transports.journal_log import JournalLog
from tests.spark.rig import journal


def without_mark(path: Path) -> bytes:
    """A journal whose first segment is there and whose mark is not yet; returns the mark."""
    file = Layout(journal(path, 3)).high_water
    mark = file.read_bytes()
    file.write_bytes(b"")
    return mark


def test_a_journal_that_is_being_made_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = without_mark(tmp_path / "j")
    refused = threading.Event()
    look = JournalReader.high_water

    def tell(reader: JournalReader) -> object:
        try:
            return look(reader)
        except JournalCorrupt:
            refused.set()
            raise

    def finish() -> None:
        refused.wait(10)
        Layout(tmp_path / "j").high_water.write_bytes(mark)

    monkeypatch.setattr(JournalReader, "high_water", tell)
    writer = threading.Thread(target=finish)
    writer.start()
    latest = logs.open_log(tmp_path / "j").latest()
    writer.join()
    assert refused.is_set()
    assert latest == 3


def test_a_mark_that_stays_damaged_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_log, "PATIENCE", 0.0)
    without_mark(tmp_path / "j")
    with pytest.raises(JournalCorrupt, match="high-water is damaged"):
        logs.open_log(tmp_path / "j").latest()


class Foreign:
    """A log of another package, that can be read and nothing else."""

    def __init__(self, url: str) -> None:
        known = JournalLog(Path(url.removeprefix("foreign://")))
        for name in members(LogTransport):
            setattr(self, name, getattr(known, name))


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(schemes.OWN[schemes.LOGS], "foreign", f"{__name__}:Foreign")
    return f"foreign://{journal(tmp_path / 'j', 3)}"


def test_a_log_of_another_package_is_read_by_its_url(foreign: str) -> None:
    given = parse_options({"url": foreign})
    schema = row_schema(("offset",))
    reader = BatchReader(given, schema)
    rows = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
    assert rows == [{"offset": 0}, {"offset": 1}, {"offset": 2}]
    assert logs.log_place(foreign) == foreign
    assert logs.options_of(foreign) == {"url": foreign}


def test_what_a_log_lacks_is_named_when_it_is_needed(foreign: str) -> None:
    with pytest.raises(ConfigurationError, match=r"it lacks commit, discard, stage\. Needed is a log that takes"):
        logs.open_staging(foreign)
    with pytest.raises(ConfigurationError, match=r"it lacks dead_letters, settlements\. Needed is a log that"):
        logs.open_settled(foreign)


def test_a_log_has_one_place(foreign: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="options path and url mean the same"):
        parse_options({"url": foreign, "path": str(tmp_path)})


@pytest.mark.parametrize("given", ["journal:data?retain=1d", "journal:data", "data"])
def test_a_journal_is_its_folder(given: str) -> None:
    assert logs.log_place(given) == Path("data").absolute()
    assert logs.options_of(Path("/data")) == {"path": "/data"}


@pytest.mark.parametrize("given", ["shop?", "/data/odd?x", "./*/j?"])
def test_a_question_mark_in_a_path_is_part_of_it(given: str) -> None:
    assert logs.options_of_all(given) == {"path": str(Path(given).absolute())}


@pytest.mark.parametrize("given", [5, None, b"/data", [b"/data"]])
def test_what_is_no_path_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"a log is a folder or a URL, and several are a list: .* is neither"):
        logs.options_of_all(given)


def test_a_scheme_that_nobody_serves_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match=r"'rabbit://me:\*\*\*@host' names no log; known: .*journal:PATH"):
        logs.log_place("rabbit://me:secret@host")
    with pytest.raises(ConfigurationError, match="write journal:PATH"):
        logs.log_place("journal:")
