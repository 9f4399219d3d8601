"""What is in a SQLite store, for people: read without changing it, whatever version of Faregate has set it up."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from faregate.errors import ConfigurationError
from faregate.ports.store import StoreInfo
from faregate.stores.sqlite.faults import code_of, raise_translated
from faregate.stores.sqlite.migrate import MIGRATIONS
from faregate.stores.sqlite.rows import QUERIES, outbox_row


def describe(path: str) -> StoreInfo:
    """Raises `ConfigurationError` for what is no SQLite file, `StoreUnavailable` for one that cannot be read."""
    url = f"sqlite:{path}"
    if not Path(path).is_file():
        raise ConfigurationError(f"there is no file {path!r}: a bus, or `faregate store migrate {url}`, makes it")
    try:
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as connection:
            return _describe(url, lambda sql, values=(): connection.execute(sql, values).fetchall())
    except sqlite3.Error as exc:
        if code_of(exc) == sqlite3.SQLITE_NOTADB:
            raise ConfigurationError(f"{url} is a file, but not a SQLite database: name another path") from exc
        raise_translated(exc, url)


def _describe(url: str, read: Callable[..., list[Any]]) -> StoreInfo:
    names = [name for (name,) in read(QUERIES["our_tables"])]
    info = StoreInfo(url=url, known=len(MIGRATIONS))
    if "faregate_migrations" not in names:
        return info
    info.version = read(QUERIES["schema_version"])[0][0]
    info.tables = {name: read(f'select count(*) from "{name}"')[0][0] for name in names}
    if 0 < info.version <= info.known:
        info.floors = dict(read(QUERIES["floors"]))
        info.oldest = next(map(outbox_row, read(QUERIES["undispatched"], {"nodes": None, "limit": 1})), None)
    return info
