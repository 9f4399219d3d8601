"""A PostgreSQL store as a reader sees it: in a read-only transaction, streamed by a cursor of the server's."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.adapt import Loader

from faregate.errors import StoreUnavailable
from faregate.stores.postgres.migrate import MIGRATIONS
from faregate.stores.postgres.rows import QUERIES
from faregate.stores.sql.reading import SqlReader, Values

_ROWS = 10_000
"""How many come at a time."""


class _UuidBytes(Loader):
    """Ids as 16 bytes."""

    def load(self, data: Buffer) -> bytes:
        return bytes.fromhex(bytes(data).replace(b"-", b"").decode())


@dataclass(frozen=True, slots=True)
class PostgresReader(SqlReader):
    url: str
    conninfo: str = field(repr=False)

    queries = QUERIES
    known_version = len(MIGRATIONS)

    def _stream(self, sql: str, values: Values = ()) -> Iterator[list[tuple[Any, ...]]]:
        try:
            with psycopg.connect(self.conninfo, connect_timeout=5) as connection:
                connection.read_only = True
                connection.adapters.register_loader("uuid", _UuidBytes)
                with connection.cursor("faregate_reader") as cursor:
                    cursor.itersize = _ROWS
                    cursor.execute(sql.encode(), values or None)
                    while rows := cursor.fetchmany(_ROWS):
                        yield rows
        except psycopg.OperationalError as exc:
            raise StoreUnavailable(f"cannot reach {self.url}: {' '.join(str(exc).split())}") from exc
        except psycopg.Error as exc:
            raise self._refused(sql, exc) from exc
