"""What rows of SQLite are: ids are 16 bytes there. The named queries, loaded once, and lists of values in them."""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import Any

from faregate.ports.store import Known
from faregate.ports.tokens import Token
from faregate.stores.sql.columns import id_bytes, id_text
from faregate.stores.sql.files import load_queries
from faregate.stores.sql.records import SqlRecords

QUERIES = load_queries(__package__)
ANY_DEAD = QUERIES["any_dead"]
"""Mostly there is none, and then nobody need look among them."""
ROWS_TOGETHER = 64
"""How many rows one statement inserts, where there are many. More at a time are not faster."""
_AT_ONCE = 256
_ID = Struct("16s")


class SqliteRecords(SqlRecords):
    id_in = staticmethod(id_bytes)
    id_out = staticmethod(id_text)

    async def _rows(self, sql: str, parameters: Any = ()) -> list[Any]:
        """The rows of a statement."""
        raise NotImplementedError

    async def _read(self, name: str, parameters: Any = ()) -> list[Any]:
        return await self._rows(QUERIES[name], parameters)

    async def _read_among(self, name: str, given: Sequence[Any], texts: Iterable[str], *, ids: bool) -> list[Any]:
        """The rows of a query that has a list of texts behind the values given; `ids`: they are ids."""
        found: list[Any] = []
        wanted = sorted(set(texts))
        for sql, some in _among(name, id_blobs(wanted) if ids else wanted):
            found += await self._rows(sql, (*given, *some))
        return found

    async def known(self, node: str, message_ids: Sequence[str]) -> dict[str, Known]:
        found: dict[str, Known] = {}
        if await self._rows(ANY_DEAD, (node,)):
            for message_id, state, replays in await self._read_among("known_dead", (node,), message_ids, ids=True):
                found[id_text(message_id)] = Known(state, None, replays)
        for message_id, digest in await self._read_among("known_handled", (node,), message_ids, ids=True):
            found[id_text(message_id)] = Known("handled", digest)
        return found


def id_blobs(texts: Sequence[str]) -> list[bytearray]:
    """Ids as they are bound by the thousand: all are read at once, and for `bytes` the driver would look for an
    adapter, each time in vain."""
    joined = bytes.fromhex("".join(texts).replace("-", ""))
    if len(joined) != _ID.size * len(texts):
        raise ValueError(f"not all of these are ids: {texts}")
    return list(map(bytearray, chain.from_iterable(_ID.iter_unpack(joined))))


def _among(name: str, values: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """A query with a list of values, so many at a time. The last value is repeated up to a power of two, so that few
    statements need preparing."""
    for start in range(0, len(values), _AT_ONCE):
        some = list(values[start : start + _AT_ONCE])
        some += some[-1:] * ((1 << (len(some) - 1).bit_length()) - len(some))
        yield _with_parameters(name, len(some)), some


@lru_cache
def _with_parameters(name: str, count: int) -> str:
    return QUERIES[name].replace("/*values*/", ", ".join("?" * count))


@lru_cache
def insert_together(name: str) -> str:
    """An insertion of one row, for `ROWS_TOGETHER` of them."""
    head, _, tail = QUERIES[name].partition("values (")
    row, _, rest = tail.partition(")")
    return f"{head}values {', '.join([f'({row})'] * ROWS_TOGETHER)}{rest}"


def token_values(tokens: Sequence[Token], now: float) -> list[tuple[Any, ...]]:
    """The columns of those tokens that may still be created."""
    return [
        (token.attempt_id, id_bytes(token.message_id), *token[2:])
        for token in sorted(tokens, key=lambda token: token.attempt_id)
        if now < token.not_after
    ]
