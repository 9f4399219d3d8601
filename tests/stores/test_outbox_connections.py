"""`fg.outbox` on every kind of connection that it knows, each in a transaction of the user's own."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.ports.store import OutboxRow


class Placed(fg.Event):
    order: str


class Charge(fg.Command):
    order: str


async def rows(url: str) -> list[OutboxRow]:
    store = open_store(url, SystemClock())
    await store.open()
    try:
        return await store.undispatched(100)
    finally:
        await store.close()


async def scheduled(url: str) -> list[OutboxRow]:
    store = open_store(url, SystemClock())
    await store.open()
    try:
        async with store.transaction() as transaction:
            found = await transaction.take_due(float("inf"), 10)
            await transaction.roll_back()
            return found
    finally:
        await store.close()


@pytest.fixture
async def sqlite_url(tmp_path: Path) -> str:
    url = f"sqlite:{tmp_path}/store.db"
    assert await rows(url) == []
    return url


@pytest.fixture
async def postgres_store(postgres_url: str) -> str:
    assert await rows(postgres_url) == []
    return postgres_url


def put(connection: Any) -> list[str]:
    outbox = fg.outbox(connection, node="shop")
    first = outbox.publish(Placed(order="1"), idempotency_key="k", headers={"a": "b"}, expires=7)
    return [first, outbox.send(Charge(order="1"), to="bank", node=fg.Node("billing"), delay=5, expires=7)]


async def put_async(connection: Any) -> list[str]:
    outbox = fg.outbox(connection, node="shop")
    first = await outbox.publish(Placed(order="1"), idempotency_key="k", headers={"a": "b"}, expires=7)
    return [first, await outbox.send(Charge(order="1"), to="bank", node=fg.Node("billing"), delay=5, expires=7)]


async def check(url: str, published: list[str]) -> None:
    [placed], [charge] = await rows(url), await scheduled(url)
    assert published == [placed.envelope.publication_id, charge.envelope.publication_id]
    assert published[0] == fg.ids.idempotent_id("shop", "Placed", "k")
    assert (placed.node, placed.destination, placed.envelope.headers) == ("shop", "shop.Placed", {"a": "b"})
    assert (charge.node, charge.destination, charge.envelope.source) == ("billing", "bank", "billing")
    assert charge.envelope.deliver_at == pytest.approx(charge.envelope.sent_at + 5)
    assert placed.envelope.expires_at == pytest.approx(placed.envelope.sent_at + 7)
    assert charge.envelope.expires_at == pytest.approx(charge.envelope.sent_at + 12)
    assert (placed.message_id, placed.registered, placed.version, placed.dispatched_at) == (None, (), 0, None)


def sqlite_path(url: str) -> str:
    return url.removeprefix("sqlite:")


async def test_sqlite3_in_a_transaction_and_rolled_back(sqlite_url: str) -> None:
    with contextlib.closing(sqlite3.connect(sqlite_path(sqlite_url))) as connection:
        put(connection)
        connection.rollback()
        with connection:
            published = put(connection)
    await check(sqlite_url, published)


async def test_sqlite3_in_autocommit_commits_each_row_by_itself(sqlite_url: str) -> None:
    with contextlib.closing(sqlite3.connect(sqlite_path(sqlite_url), isolation_level=None)) as connection:
        published = put(connection)
        await check(sqlite_url, published)


class Traced(sqlite3.Connection):
    """A connection as a framework may wrap it."""


async def test_a_subclass_of_a_connection_is_one(sqlite_url: str) -> None:
    with contextlib.closing(sqlite3.connect(sqlite_path(sqlite_url), factory=Traced)) as connection, connection:
        published = put(connection)
    await check(sqlite_url, published)


@pytest.mark.services
async def test_psycopg(postgres_store: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(postgres_store) as connection:
        put(connection)
        connection.rollback()
        published = put(connection)
        assert await rows(postgres_store) == [], "it was committed by the outbox"
        connection.commit()
    await check(postgres_store, published)


@pytest.mark.services
async def test_psycopg_on_asyncio(postgres_store: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    async with await psycopg.AsyncConnection.connect(postgres_store) as connection:
        await put_async(connection)
        await connection.rollback()
        published = await put_async(connection)
        assert await rows(postgres_store) == [], "it was committed by the outbox"
    await check(postgres_store, published)


@pytest.mark.services
async def test_a_postgres_database_that_is_no_store_is_named_as_such(postgres_url: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    refused = pytest.raises(fg.ConfigurationError, match="faregate store init")
    with psycopg.connect(postgres_url) as connection, refused:
        put(connection)


async def test_a_connection_of_sqlalchemy(sqlite_url: str) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(f"sqlite:///{sqlite_path(sqlite_url)}")
    with contextlib.closing(engine.connect()) as connection:
        put(connection)
        connection.rollback()
        published = put(connection)  # nothing else is done in this transaction
        connection.commit()
    engine.dispose()
    await check(sqlite_url, published)


async def test_a_session_of_sqlalchemy(sqlite_url: str) -> None:
    orm = pytest.importorskip("sqlalchemy.orm")
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(f"sqlite:///{sqlite_path(sqlite_url)}")
    with orm.Session(engine) as session, session.begin():
        published = put(session)
    engine.dispose()
    await check(sqlite_url, published)


@pytest.mark.services
async def test_sqlalchemy_on_psycopg(postgres_store: str) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(postgres_store.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        published = put(connection)
    engine.dispose()
    await check(postgres_store, published)


@pytest.mark.services
async def test_sqlalchemy_on_asyncio(postgres_store: str) -> None:
    asyncio_ = pytest.importorskip("sqlalchemy.ext.asyncio")
    pytest.importorskip("greenlet")
    engine = asyncio_.create_async_engine(postgres_store.replace("postgresql://", "postgresql+psycopg://"))
    async with asyncio_.AsyncSession(engine) as session, session.begin():
        published = await put_async(session)
    await check(postgres_store, published)
    await engine.dispose()


def test_sqlalchemy_on_an_empty_database_is_told_what_to_do() -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(fg.ConfigurationError, match="faregate store init"):
        put(connection)
    engine.dispose()


async def known(url: str, *nodes: str) -> None:
    store = open_store(url, SystemClock())
    await store.open()
    await store.note_nodes(nodes, 1.0)
    await store.close()


REFUSED = r"no bus has run node 'shpo' on this store.*its nodes are: billing, shop \(did you mean 'shop'\?\)\."


def put_as(connection: Any, node: str) -> None:
    outbox = fg.outbox(connection, node=node)
    outbox.publish(Placed(order="1"))
    outbox.publish(Placed(order="1"), idempotency_key="k", delay=60)
    outbox.publish(Placed(order="1"), idempotency_key="k", delay=60)  # it waits already


async def test_a_node_that_nobody_has_run_on_a_store_is_refused(sqlite_url: str) -> None:
    await known(sqlite_url, "shop", "billing")
    with contextlib.closing(sqlite3.connect(sqlite_path(sqlite_url))) as connection, connection:
        put_as(connection, "shop")
        for options in ({}, {"delay": 60}):
            with pytest.raises(fg.ConfigurationError, match=REFUSED):
                fg.outbox(connection, node="shpo").publish(Placed(order="1"), **options)  # type: ignore[arg-type]
    assert (len(await rows(sqlite_url)), len(await scheduled(sqlite_url))) == (1, 1)


async def test_the_same_through_sqlalchemy(sqlite_url: str) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy")
    await known(sqlite_url, "shop", "billing")
    engine = sqlalchemy.create_engine(f"sqlite:///{sqlite_path(sqlite_url)}")
    with engine.begin() as connection:
        put_as(connection, "shop")
        with pytest.raises(fg.ConfigurationError, match=REFUSED):
            put_as(connection, "shpo")
    engine.dispose()
    assert (len(await rows(sqlite_url)), len(await scheduled(sqlite_url))) == (1, 1)


@pytest.mark.services
async def test_the_same_on_postgresql(postgres_store: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    await known(postgres_store, "shop", "billing")
    with psycopg.connect(postgres_store) as connection:
        put_as(connection, "shop")
        with pytest.raises(fg.ConfigurationError, match=REFUSED):
            put_as(connection, "shpo")
    async with await psycopg.AsyncConnection.connect(postgres_store) as connection:
        with pytest.raises(fg.ConfigurationError, match=REFUSED):
            await fg.outbox(connection, node="shpo").publish(Placed(order="1"))
    assert (len(await rows(postgres_store)), len(await scheduled(postgres_store))) == (1, 1)


class Dialect:
    name, driver = "mysql", "pymysql"


def test_another_database_is_refused_by_name() -> None:
    foreign = type("Connection", (), {"__module__": "sqlalchemy.engine.base", "dialect": Dialect()})
    with pytest.raises(fg.ConfigurationError, match=r"mysql\+pymysql"):
        put(foreign())


@pytest.mark.parametrize("node", [None, "", "no such name!"])
def test_a_publication_needs_a_node(node: Any) -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection, pytest.raises(fg.ConfigurationError):
        fg.outbox(connection, node).publish(Placed(order="1"))


@pytest.mark.parametrize("key", ["", 17])
def test_an_idempotency_key_is_a_text(key: Any) -> None:
    with (
        contextlib.closing(sqlite3.connect(":memory:")) as connection,
        pytest.raises(fg.ConfigurationError, match="idempotency_key"),
    ):
        fg.outbox(connection, "shop").publish(Placed(order="1"), idempotency_key=key)
