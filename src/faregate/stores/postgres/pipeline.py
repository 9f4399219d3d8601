"""Statements that go out together: one round trip for as many as there are.

The driver's own pipeline writes to the socket and waits behind each statement, which costs 16 to 24 µs for a row. Here
they are handed to libpq one after another, it writes them in pieces of 64 kB, and the answers are read together: 4 µs.

Rules kept here:
- They run in order. Those behind one that failed do not run, and its error is raised.
- A statement is prepared once for each connection, up to a bound, so that generated texts do not fill the server's
  memory. Beyond the bound a text is parsed again each time, once for rows that follow each other.
- The driver prepares nothing: it would deallocate our statements with its own. A handler that has the driver's
  connection may do so, too: meanwhile none of ours is used, and afterwards those that are still there.
- A pipeline that is cancelled or breaks closes its connection.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from itertools import count, groupby
from typing import Any, NamedTuple

import psycopg
from psycopg import abc
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult
from psycopg.waiting import READY_R, WAIT_R, WAIT_RW

from faregate.stores.postgres.connection import ReadyConnection

_MOST_PREPARED = 200
_COPY = {ExecStatus.COPY_IN, ExecStatus.COPY_OUT, ExecStatus.COPY_BOTH}
_COPIES = re.compile(r"(?is)\s*copy\b.*\b(stdin|stdout)\b").match
_NUMBERS = {int, float, type(None)}
_numbers = count(1)


class Row(NamedTuple):
    """Parameters as libpq takes them."""

    values: Sequence[Any] = ()
    types: tuple[int, ...] | None = None
    formats: Sequence[Any] | None = None


class Statement(NamedTuple):
    sql: bytes
    """With `$1`, `$2` for parameters."""
    rows: list["Row"]
    """One for each time that it runs."""
    is_ours: bool = False
    numbers: list[int] | None = None
    """Takes the first column of its answer."""


Given = Sequence[Any] | Mapping[str, Any] | None
"""Parameters as the driver takes them."""
Command = tuple[Statement | None, bytes, Any, Any]
"""A statement with its name, parameters and their formats; or, without one, a name to prepare, its text and types."""


def ours(sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Statement:
    """A statement of the store; lists are arrays."""
    text, names = numbered(sql)
    given = [values[name] for name in names] if isinstance(values, Mapping) else values
    row = [None if value is None else _text(value).encode() for value in given]
    if any(b"\0" in each for each in row if each is not None):
        raise psycopg.DataError("PostgreSQL keeps no text with a NUL character in it")  # libpq would cut it off there
    return Statement(text, [Row(row)], is_ours=True)


def theirs(driver: abc.Transformer, sql: str, rows: Sequence[Sequence[Any]]) -> Statement:
    """A statement of the user: a text without any parameters is sent as it is."""
    return driven(driver, sql, rows if rows[0] else [None] * len(rows))


def driven(driver: abc.Transformer, sql: str, given: Sequence[Given]) -> Statement:
    """A statement as the driver takes it, which adapts the parameters: `%s` with sequences, `%(name)s` with mappings,
    and with None a text that is sent as it is. Its errors are raised here, before it joins the statements that wait:
    these must not be lost with it."""
    if _COPIES(sql):
        raise psycopg.NotSupportedError("COPY does not go together with other statements: use ctx.db.raw for it")
    if given[0] is None:
        return Statement(sql.encode(), [Row()] * len(given))
    text, names = numbered(sql)
    rows = [[each[name] for name in names] if isinstance(each, Mapping) else each or () for each in given]
    wrong = next((row for row in rows if len(row) != len(names)), None)
    if wrong is not None:
        raise psycopg.ProgrammingError(f"the statement has {len(names)} parameters, and {len(wrong)} were given")
    if not names:
        return Statement(text, [Row()] * len(rows))
    formats = [PyFormat.AUTO] * len(names)
    return Statement(text, [Row(driver.dump_sequence(row, formats), driver.types, driver.formats) for row in rows])


@lru_cache(maxsize=2048)
def numbered(sql: str) -> tuple[bytes, list[str]]:
    """A statement with `%s` or `%(name)s` for parameters as libpq takes it, and what stands for each."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[0] == "%%":
            return "%"
        if found[0] == "%s" or found[1] not in names:
            names.append(found[1] or "")
        return f"${len(names) if found[0] == '%s' else names.index(found[1]) + 1}"

    return re.sub(r"%(?:\(([^)]+)\))?s|%%", number, sql).encode(), names


def array(values: list[Any]) -> str:
    """Texts, bytes or numbers as the server reads an array of them."""
    kinds = set(map(type, values))
    if kinds <= _NUMBERS:
        return "{" + str(values)[1:-1].replace("None", "NULL") + "}"
    if kinds == {str}:
        joined = '","'.join(values)
        if "\\" not in joined and joined.count('"') == 2 * (len(values) - 1):  # nothing to escape
            return '{"' + joined + '"}'
    return "{" + ",".join([_element(each) for each in values]) + "}"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return array(value)
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)


def _element(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return "NULL" if value is None else str(value)


_PREPARED = ours("select name from pg_prepared_statements")


async def exchange(connection: ReadyConnection, statements: Sequence[Statement]) -> list[PGresult]:
    """Run them; the answers of the last one, one for each of its rows."""
    answers: list[PGresult] = []
    for several, group in groupby(statements, _is_several):
        if several:  # only texts without parameters can be; a pipeline takes single statements
            for each in group:
                cursor = await connection.execute(each.sql)
                answers = [cursor.pgresult] if cursor.pgresult is not None else []
        else:
            answers = await _exchange(connection, list(group))
    return answers


def rows_of(connection: ReadyConnection, answer: PGresult) -> list[tuple[Any, ...]]:
    """What an answer holds, as the driver loads it."""
    driver = Transformer(connection)
    driver.set_pgresult(answer)
    return driver.load_rows(0, answer.ntuples, tuple)


def columns_of(connection: ReadyConnection, answer: PGresult) -> list[tuple[Any, ...]] | None:
    """How a cursor of the driver describes it, as far as names and types; None for an answer without rows."""
    names = [(answer.fname(place) or b"").decode(connection.info.encoding) for place in range(answer.nfields)]
    return [(name, answer.ftype(place)) + (None,) * 5 for place, name in enumerate(names)] or None


def _is_several(statement: Statement) -> bool:
    return b";" in statement.sql and not statement.rows[0].values


async def _exchange(connection: ReadyConnection, statements: Sequence[Statement]) -> list[PGresult]:
    pgconn, ended = connection.pgconn, False
    commands = _plan(connection, statements)
    async with connection.lock:
        pgconn.enter_pipeline_mode()
        try:
            for statement, name, given, form in commands:
                if statement is None:
                    pgconn.send_prepare(name, given, form)
                else:
                    pgconn.send_query_prepared(name, given, form)
            pgconn.pipeline_sync()
            answers = await connection.wait(_answers(pgconn))
            pgconn.exit_pipeline_mode()
            ended = True
        finally:
            if not ended:
                pgconn.finish()
    last = []
    for (statement, name, given, form), answer in zip(commands, answers, strict=True):
        if answer.status == ExecStatus.FATAL_ERROR:
            error = psycopg.errors.error_from_result(answer, encoding=connection.info.encoding)
            if isinstance(error, psycopg.errors.InvalidSqlStatementName):
                connection.prepared.clear()
            raise error
        if statement is None:
            if name:
                connection.prepared[given, form] = name
            continue
        if statement.numbers is not None:
            statement.numbers.extend(int(answer.get_value(row, 0) or 0) for row in range(answer.ntuples))
        if statement is statements[-1]:
            last.append(answer)
    return last


async def take_back(connection: ReadyConnection) -> None:
    """Whoever had the driver's connection may have deallocated some of our statements."""
    [answer] = await exchange(connection, [_PREPARED])
    there = {name.encode() for (name,) in rows_of(connection, answer)}
    connection.prepared = {key: name for key, name in connection.prepared.items() if name in there}
    connection.lent = False


def _plan(connection: ReadyConnection, statements: Sequence[Statement]) -> list[Command]:
    """What to hand to libpq."""
    prepared = connection.prepared
    most = 0 if connection.lent else _MOST_PREPARED
    commands: list[Command] = []
    fresh: dict[Any, bytes] = {}
    unnamed = None
    for statement in statements:
        for values, types, formats in statement.rows:
            key = statement.sql, types
            name = (prepared.get(key) or fresh.get(key, b"")) if most else b""
            if not name and unnamed != key:
                if len(prepared) + len(fresh) < most:
                    name = fresh[key] = b"faregate_%d" % next(_numbers)
                else:
                    unnamed = key
                commands.append((None, name, statement.sql, types))
            commands.append((statement, name, values, formats))
    return commands


def _answers(pgconn: PGconn) -> Generator[Any, int, list[PGresult]]:
    """All answers of the pipeline. They are read while statements are still written: a server whose answers nobody
    reads stops reading, too."""
    found: list[PGresult] = []
    more = False
    while True:
        ready = yield WAIT_RW if pgconn.flush() else WAIT_R
        if not ready or not ready & READY_R:
            continue
        pgconn.consume_input()
        while not pgconn.is_busy():
            answer = pgconn.get_result()
            if answer is None:  # the end of one answer; a second None: no more has come yet
                if not more:
                    break
                more = False
            elif answer.status == ExecStatus.PIPELINE_SYNC:
                return found
            elif answer.status in _COPY:
                raise psycopg.NotSupportedError("COPY cannot go out together with other statements: use ctx.db.raw")
            else:
                found.append(answer)
                more = True
