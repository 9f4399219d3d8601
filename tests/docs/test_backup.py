"""The commands that operating.md gives for a store on SQLite copy and restore it, also beside a process that writes."""

import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.docs.pages import DOCS

COMMANDS = [
    line for line in re.findall(r"^\$ (.*)$", (DOCS / "operating.md").read_text(), re.MULTILINE) if "shop.db" in line
]


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        found: int = connection.execute("select count(*) from orders").fetchone()[0]
    return found


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="sqlite3 is not installed")
def test_a_store_on_sqlite_is_backed_up_and_restored(tmp_path: Path) -> None:
    backup, restore = [line for line in COMMANDS if "faregate" not in line]
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = wal")
        connection.execute("create table orders(id text)")
        connection.execute("insert into orders values ('17')")
        subprocess.run(backup, shell=True, cwd=tmp_path, check=True)
        connection.execute("insert into orders values ('18')")
        assert (tmp_path / "shop.db-wal").stat().st_size, "the newest commits are not in the file itself"
    subprocess.run(restore, shell=True, cwd=tmp_path, check=True)
    assert rows(tmp_path / "shop.db") == 1
