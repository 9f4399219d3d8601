"""The reader of a SQL store: its named queries are in `queries.sql`; a backend says how their rows are streamed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from faregate.errors import ConfigurationError
from faregate.ports.store import Part, StoreInfo, Table
from faregate.stores.sql.columns import id_text, outbox_row

_COUNTED_SINCE = 2
"""The version of the schema whose ledger keeps what handlers sent."""
_SCHEDULED_SINCE = 5
"""The version of the schema that has scheduled messages."""

Values = Sequence[Any] | Mapping[str, Any]


class SqlReader:
    url: str
    queries: ClassVar[dict[str, str]]
    known_version: ClassVar[int]

    def _stream(self, sql: str, values: Values = ()) -> Iterator[list[tuple[Any, ...]]]:
        raise NotImplementedError

    def _all(self, name: str, values: Values = ()) -> list[Any]:
        return [row for rows in self._stream(self.queries[name], values) for row in rows]

    def check(self) -> None:
        """A server is asked only when it is read."""

    def version(self) -> int:
        return self._version([name for (name,) in self._all("our_tables")])

    def _version(self, tables: Sequence[str]) -> int:
        is_ours = {"faregate_migrations", "faregate_ledger"}.issubset(tables)
        return int(self._all("schema_version")[0][0]) if is_ours else 0

    def describe(self) -> StoreInfo:
        names = [name for (name,) in self._all("our_tables")]
        info = StoreInfo(url=self.url, known=self.known_version, version=self._version(names))
        if info.version:
            counts = " union all ".join(f"""select '{name}', count(*) from "{name}" """ for name in names)
            info.tables = {name: count for rows in self._stream(counts) for name, count in rows}
        if 0 < info.version <= info.known:
            info.floors = self.floors()
            waiting = self._all("undispatched", {"nodes": None, "limit": 1})
            info.oldest = next((outbox_row(row, _as_text) for row in waiting), None)
        return info

    def parts(self, table: Table) -> list[Part]:
        if table == "scheduled" and self.version() < _SCHEDULED_SINCE:
            return []
        counted = table != "ledger" or self.version() >= _COUNTED_SINCE
        return self._cut(Part(table, f"read_{table}" if counted else "read_uncounted_ledger"))

    def _cut(self, part: Part) -> list[Part]:
        return [part]

    def rows(self, part: Part) -> Iterator[list[tuple[Any, ...]]]:
        return self._stream(self.queries[part.query], part.values)

    def query(self, sql: str, limit: int | None = None) -> Iterator[list[tuple[Any, ...]]]:
        sql = sql.strip().rstrip(";")
        return self._stream(sql if limit is None else f"select * from ({sql}) as given limit {int(limit)}")

    def nodes(self, table: Literal["ledger", "business_keys"]) -> set[str]:
        return {node for (node,) in self._all(f"{table}_nodes")}

    def floors(self) -> dict[str, float]:
        return dict(self._all("floors"))

    def low_water(self) -> dict[tuple[str, str], int]:
        return {(node, name): position for node, name, position in self._all("low_water")}

    def _refused(self, sql: str, exc: Exception) -> ConfigurationError:
        return ConfigurationError(f"{self.url} refuses {' '.join(sql.split())!r}: {' '.join(str(exc).split())}")


def _as_text(message_id: Any) -> str:
    return id_text(message_id) if isinstance(message_id, bytes) else str(message_id)
