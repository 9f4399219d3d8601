"""Opening a log: also in the moment in which its writer makes it."""

import threading
from pathlib import Path

import pytest

from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.errors import JournalCorrupt
from faregate.spark import logs
from faregate.transports import journal_log
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
