"""Statements that go out together in one round trip: nothing is lost, mixed up or left on the server."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg.adapt import Transformer

from faregate.errors import StoreConflict
from faregate.stores.postgres import PostgresStore, pipeline
from faregate.stores.postgres.connection import PollingConnection, ReadyConnection
from faregate.stores.postgres.pipeline import Row, Statement, array, exchange, ours, theirs
from tests.presence import address

pytestmark = pytest.mark.services
LONG = 20  # seconds until a test that hangs is failed


@pytest.fixture(params=[ReadyConnection, PollingConnection])
async def connection(request: pytest.FixtureRequest) -> AsyncIterator[ReadyConnection]:
    made: ReadyConnection = await request.param.connect(address("FAREGATE_TEST_POSTGRES"), autocommit=True)
    await made.execute("create temporary table rows(n serial, body text)")
    yield made
    await made.close()


async def bodies(connection: ReadyConnection) -> list[str]:
    return [body for (body,) in await (await connection.execute("select body from rows order by n")).fetchall()]


def given(connection: ReadyConnection, sql: str, rows: Sequence[Sequence[Any]]) -> Statement:
    return theirs(Transformer(connection), sql, rows)


INSERT = "insert into rows(body) values (%s)"


async def test_large_rows_and_large_answers_pass_each_other(connection: ReadyConnection) -> None:
    rows = [(str(n) + "x" * n * 100,) for n in range(500)]
    async with asyncio.timeout(LONG):
        answers = await exchange(
            connection,
            [given(connection, INSERT, rows), given(connection, "select repeat('y', %s)", [(300_000,)] * 30)],
        )
    assert [len(answer.get_value(0, 0) or b"") for answer in answers] == [300_000] * 30
    assert await bodies(connection) == [body for (body,) in rows]


async def test_behind_a_statement_that_fails_nothing_runs_and_the_connection_goes_on(
    connection: ReadyConnection,
) -> None:
    wrong = Statement(b"insert into nowhere_at_all values (1)", [Row()])
    with pytest.raises(psycopg.errors.UndefinedTable):
        await exchange(connection, [given(connection, INSERT, [("a",)]), wrong, given(connection, INSERT, [("b",)])])
    assert await bodies(connection) == [], "a pipeline is all or nothing"
    for body in ("c", "d"):
        await exchange(connection, [given(connection, INSERT, [(body,)])])
    assert await bodies(connection) == ["c", "d"]


async def test_each_row_has_the_types_that_the_driver_gives_it(connection: ReadyConnection) -> None:
    sql = "insert into rows(body) values (pg_typeof(%s)::text)"
    await exchange(connection, [given(connection, sql, [(1,), (100_000,), (1,), (1 << 40,), (1.5,), (True,)])])
    types = ["smallint", "integer", "smallint", "bigint", "double precision", "boolean"]
    assert await bodies(connection) == types


async def test_a_wrong_number_of_parameters_is_an_error_of_the_statement(connection: ReadyConnection) -> None:
    with pytest.raises(psycopg.ProgrammingError, match="has 1 parameters, and 2 were given"):
        given(connection, INSERT, [("a",), ("b", "c")])


async def test_a_parameter_that_the_driver_cannot_adapt_leaves_the_connection_as_it_was(
    connection: ReadyConnection,
) -> None:
    with pytest.raises(psycopg.ProgrammingError, match="cannot adapt"):
        await exchange(connection, [given(connection, INSERT, [("a",), (object(),)])])
    await exchange(connection, [given(connection, INSERT, [("b",)])])
    assert await bodies(connection) == ["b"]


async def test_copy_is_refused_before_it_is_sent_and_a_file_of_the_server_is_not(connection: ReadyConnection) -> None:
    for sql in ("copy rows to stdout", " COPY rows (body)\nfrom STDIN"):
        with pytest.raises(psycopg.NotSupportedError, match=r"use ctx\.db\.raw"):
            given(connection, sql, [()])
    given(connection, "copy rows from '/data/rows.csv'", [()])


async def test_texts_that_are_made_up_do_not_fill_the_server(
    connection: ReadyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_MOST_PREPARED", 3)
    for number in range(6):
        sql = f"insert into rows(body) values (%s || '{number}')"
        await exchange(connection, [given(connection, sql, [("a",), ("b",)]), given(connection, INSERT, [("c",)])])
        with pytest.raises(psycopg.errors.DivisionByZero):
            await exchange(connection, [given(connection, "insert into rows(body) values (%s), (1 / 0)", [("x",)])])
    [(prepared,)] = await (await connection.execute("select count(*) from pg_prepared_statements")).fetchall()
    assert prepared <= 3
    assert await bodies(connection) == [text for n in range(6) for text in (f"a{n}", f"b{n}", "c")]


async def test_statements_that_somebody_deallocated_are_prepared_again(connection: ReadyConnection) -> None:
    await exchange(connection, [given(connection, INSERT, [("a",)])])
    await connection.execute("deallocate all")
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        await exchange(connection, [given(connection, INSERT, [("lost",)])])
    await exchange(connection, [given(connection, INSERT, [("b",)])])
    assert await bodies(connection) == ["a", "b"]


async def prepared(connection: ReadyConnection) -> int:
    [(count,)] = await (await connection.execute("select count(*) from pg_prepared_statements")).fetchall()
    return int(count)


async def test_a_statement_that_fails_is_prepared_once(connection: ReadyConnection) -> None:
    for _ in range(5):
        with pytest.raises(psycopg.errors.DivisionByZero):
            await exchange(
                connection, [given(connection, "select 1 / %s", [(0,)]), given(connection, INSERT, [("a",)])]
            )
    assert await prepared(connection) == len(connection.prepared) == 1


@pytest.mark.parametrize("meddles", [True, False])
async def test_a_connection_that_was_lent_keeps_its_statements_and_gets_no_more_of_them(meddles: bool) -> None:
    store = PostgresStore(address("FAREGATE_TEST_POSTGRES"), pool_size=1)
    await store.open()
    try:
        counts = []
        for _ in range(4):
            async with store.transaction() as transaction:
                await transaction.execute("select 1")
                connection = transaction.raw
                await connection.execute("deallocate all" if meddles else "select 2")
                await transaction.execute("select 3")
            counts.append(await prepared(connection))
        assert counts == [0 if meddles else counts[0]] * 4 and len(connection.prepared) == counts[0]
    finally:
        await store.close()


async def test_an_array_arrives_as_it_is(connection: ReadyConnection) -> None:
    texts = ["plain", "", "NULL", 'a"b', "back\\slash", "{x,y}", " blank ", "new\nline", "ü€😀", None]
    numbers = [None, -1, 1 << 40]
    await connection.execute(
        "create temporary table given(texts text[], bytes bytea[], numbers bigint[], reals float8[])"
    )
    values = (texts, [b"", b'\x00\\"', None], numbers, [1.5, 0.1])
    await exchange(connection, [ours("insert into given values (%s, %s, %s, %s)", values)])
    [row] = await (await connection.execute("select * from given")).fetchall()
    assert row == values
    plain = ["plain", "", "NULL", "{x,y}", " blank ", "ü€😀"]
    assert (array([]), array(plain)) == ("{}", "{" + ",".join(f'"{text}"' for text in plain) + "}")
    for tricky in ('a"b', 'a","b', '"', "\\"):
        assert await (await connection.execute("select %s::text[]", (array(["x", tricky]),))).fetchone() == (
            ["x", tricky],
        )


@pytest.mark.parametrize("value", ["a\0b", ["a\0b"]])
def test_a_text_that_the_server_cannot_keep_is_refused_whole(value: object) -> None:
    with pytest.raises(psycopg.DataError, match="NUL"):
        ours("select %s", [value])


async def test_writes_that_are_cancelled_take_their_connection_with_them() -> None:
    store = PostgresStore(address("FAREGATE_TEST_POSTGRES"), pool_size=1)
    await store.open()
    try:
        async with asyncio.timeout(LONG):
            transaction = store.transaction()
            await transaction.begin()
            [before] = await transaction.fetchone("select pg_backend_pid()") or ()
            for _ in range(20):
                transaction.write("select pg_sleep(?)", (60,))
            flush = asyncio.create_task(transaction.flush())
            await asyncio.sleep(0)
            flush.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flush
            with pytest.raises(StoreConflict):
                await transaction.execute("select 1")
            await transaction.roll_back()
            async with store.transaction() as after:
                [now] = await after.fetchone("select pg_backend_pid()") or ()
    finally:
        await store.close()
    assert now != before, "a connection in the middle of a pipeline was used again"
