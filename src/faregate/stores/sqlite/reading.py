"""A SQLite store as a reader sees it: opened read-only, a ledger cut by its row numbers."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from faregate.errors import ConfigurationError
from faregate.ports.store import Part
from faregate.stores.sql.reading import SqlReader, Values
from faregate.stores.sqlite.faults import code_of, raise_translated
from faregate.stores.sqlite.migrate import MIGRATIONS
from faregate.stores.sqlite.rows import QUERIES

_LEDGER_PART = 1_000_000
_ROWS = 1000
"""How many come at a time: few enough to be in the processor's cache still when columns are made of them."""
_BUSY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class SqliteReader(SqlReader):
    url: str
    path: Path

    queries = QUERIES
    known_version = len(MIGRATIONS)

    def check(self) -> None:
        if not self.path.is_file():
            where = self.url.partition(":")[2]
            raise ConfigurationError(
                f"there is no file {where}: {self.url} was never set up by a bus, nor by `faregate store init`"
            )

    def _stream(self, sql: str, values: Values = ()) -> Iterator[list[tuple[Any, ...]]]:
        self.check()
        try:
            target = f"file:{quote(str(self.path))}?mode=ro"
            with closing(sqlite3.connect(target, uri=True, timeout=_BUSY_SECONDS)) as connection:
                cursor = connection.execute(sql, values)
                while rows := cursor.fetchmany(_ROWS):
                    yield rows
        except sqlite3.Error as exc:
            if code_of(exc) == sqlite3.SQLITE_NOTADB:
                raise ConfigurationError(f"{self.url} is a file, but not a SQLite database: name another path") from exc
            try:
                raise_translated(exc, self.url)
            except sqlite3.Error:
                raise self._refused(sql, exc) from exc

    def _cut(self, part: Part) -> list[Part]:
        if part.table != "ledger":
            return [part]
        [(low, high)] = self._all("ledger_span")
        starts = range(low, high + 1, _LEDGER_PART) if low is not None else ()
        return [part._replace(values=(start, min(high, start + _LEDGER_PART - 1))) for start in starts]
