"""Frameworks that people use for what `exactly-once` measures, each as its own guide sets it up.

    taskiq      `InMemoryBroker`, and what its users write beside it with SQLAlchemy's asyncio: in one transaction an
                inbox row that refuses a second time, the business row and an outbox row; a relay sends what the outbox
                holds, many rows at a time, and removes it. One commit for each message. The broker forgets all its
                messages when the process ends: it is spared what makes ours durable.
    dbos        a queue of workflows with one transaction each, on a datasource, with its defaults; the synchronous
                kind, which was faster than the asynchronous one. What a workflow returns is recorded; it sends nothing.

All messages wait before the time begins. Libraries are imported where they are used: not everybody has them.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from _effects import INVOICES, POSTGRES
from _harness import folder, note_processor, timed
from _orders import make_order

from faregate.testing.store_subjects import postgres_schema

RELAYED_TOGETHER = 500
AT_ONCE = {"sqlite": 1, "postgres": 10}
"""Handlers side by side. SQLite has one writer; on PostgreSQL five or twenty made no clear difference."""
TABLES = (
    INVOICES,
    "create table inbox(message_id text primary key)",
    "create table outbox(id {number} primary key, body text not null)",
)


# --- Taskiq with SQLAlchemy --------------------------------------------------------------------------------------


@asynccontextmanager
async def engine(kind: str) -> AsyncIterator[Any]:
    """SQLAlchemy's engine on an empty database with the tables."""
    from sqlalchemy import event, text
    from sqlalchemy.ext.asyncio import create_async_engine

    with folder() as path:
        if kind == "sqlite":
            made = create_async_engine(f"sqlite+aiosqlite:///{path}/store.db")

            @event.listens_for(made.sync_engine, "connect")
            def make_durable(connection: Any, _: Any) -> None:
                connection.execute("pragma journal_mode = wal")
                connection.execute("pragma synchronous = full")

            async with _with_tables(made, text, "integer"):
                yield made
        else:
            assert POSTGRES is not None
            async with postgres_schema(POSTGRES) as url:
                address = POSTGRES.replace("postgresql://", "postgresql+asyncpg://")
                made = create_async_engine(
                    address,
                    pool_size=AT_ONCE[kind] + 1,
                    connect_args={"server_settings": {"search_path": schema_of(url)}},
                )
                async with _with_tables(made, text, "bigserial"):
                    yield made


@asynccontextmanager
async def _with_tables(made: Any, text: Any, number: str) -> AsyncIterator[None]:
    async with made.begin() as connection:
        for table in TABLES:
            await connection.execute(text(table.format(number=number)))
    try:
        yield
    finally:
        await made.dispose()


def schema_of(url: str) -> str:
    """The schema that a URL of `postgres_schema` names."""
    return parse_qs(urlsplit(url).query)["options"][0].removeprefix("-csearch_path=")


async def run_taskiq(messages: int, *, name: str, kind: str) -> float:
    from pydantic import BaseModel
    from sqlalchemy import text
    from sqlalchemy.exc import IntegrityError
    from sqlalchemy.ext.asyncio import async_sessionmaker
    from taskiq import InMemoryBroker

    class OrderModel(BaseModel):
        order_id: str
        customer: str
        total: int
        note: str

    broker = InMemoryBroker()
    slots = asyncio.Semaphore(0)
    """How many handlers may run. None at first, so that all messages are there when the time begins."""
    filled, sent, handled = asyncio.Event(), 0, 0
    into_inbox = text("insert into inbox(message_id) values (:message_id)")
    into_invoices = text("insert into invoices(order_id, message_id, total) values (:order_id, :message_id, :total)")
    into_outbox = text("insert into outbox(body) values (:body)")
    from_outbox = text("select id, body from outbox order by id limit :count")
    out_of_outbox = text("delete from outbox where id <= :last")

    async with engine(kind) as made:
        sessions = async_sessionmaker(made)

        @broker.task
        async def bill(order: OrderModel, message_id: str) -> None:
            nonlocal handled
            async with slots, sessions() as session:
                try:
                    await session.execute(into_inbox, {"message_id": message_id})
                except IntegrityError:  # a second delivery
                    return
                await session.execute(
                    into_invoices, {"order_id": order.order_id, "message_id": message_id, "total": order.total}
                )
                await session.execute(into_outbox, {"body": order.model_dump_json()})
                await session.commit()
            handled += 1
            filled.set()

        @broker.task
        async def billed(body: str) -> None:
            nonlocal sent
            sent += 1

        async def relay() -> None:
            while sent < messages:
                await filled.wait()
                filled.clear()
                async with slots, sessions() as session:
                    rows = (await session.execute(from_outbox, {"count": RELAYED_TOGETHER})).all()
                    for row in rows:
                        await billed.kiq(row.body)
                    if rows:
                        await session.execute(out_of_outbox, {"last": rows[-1].id})
                    await session.commit()
                await asyncio.sleep(0)

        await broker.startup()
        for number in range(messages):
            order = make_order(number)
            model = OrderModel(order_id=order.order_id, customer=order.customer, total=order.total, note=order.note)
            await bill.kiq(model, f"message-{number}")
        await asyncio.sleep(0.05)  # lets the tasks decode their messages and wait for a slot
        with timed(name, messages) as took:
            for _ in range(AT_ONCE[kind]):
                slots.release()
            await relay()
            await broker.wait_all()
        await broker.shutdown()
    if (handled, sent) != (messages, messages):
        raise RuntimeError(f"{handled} of {messages} messages had their effect, and {sent} were sent")
    return took[0]


# --- DBOS --------------------------------------------------------------------------------------------------------


async def run_dbos(messages: int, *, name: str) -> float:
    assert POSTGRES is not None
    async with postgres_schema(POSTGRES) as url:
        return await asyncio.to_thread(_run_dbos, messages, name, POSTGRES, schema_of(url))


def _run_dbos(messages: int, name: str, server: str, schema: str) -> float:
    """Its workflows run in threads of its own. The time begins with the first of them: looking for a new queue once a
    second is not counted."""
    import psycopg
    from dbos import DBOS, SQLAlchemyDatasource
    from sqlalchemy import text

    DBOS(
        config={
            "name": "bench",
            "system_database_url": server,
            "dbos_system_schema": schema,
            "application_version": "1",
            "log_level": "ERROR",
        }
    )
    insert = text(f"insert into {schema}.invoices(order_id, message_id, total) values (:order_id, :message_id, :total)")
    source = SQLAlchemyDatasource.create(server.replace("postgresql://", "postgresql+psycopg://"), schema=schema)
    begun: list[tuple[float, float]] = []

    @source.transaction()
    def write(order_id: str, message_id: str, total: int) -> None:
        source.sql_session().execute(insert, {"order_id": order_id, "message_id": message_id, "total": total})

    @DBOS.workflow()
    def bill(order_id: str, customer: str, total: int, note: str) -> dict[str, Any]:
        if not begun:
            begun.append((time.perf_counter(), time.process_time()))
        write(order_id, DBOS.workflow_id, total)
        return {"order_id": order_id, "customer": customer, "total": total, "note": note}

    DBOS.launch()
    try:
        with psycopg.connect(server, autocommit=True) as db:
            db.execute(INVOICES.replace("invoices", f"{schema}.invoices"))
            for number in range(messages):
                order = make_order(number)
                DBOS.enqueue_workflow("orders", bill, order.order_id, order.customer, order.total, order.note)
            DBOS.register_queue("orders")
            states = f"select status, count(*) from {schema}.workflow_status group by status"
            while (found := dict(db.execute(states).fetchall())) != {"SUCCESS": messages}:
                if not found.keys() <= {"ENQUEUED", "PENDING", "SUCCESS"}:
                    raise RuntimeError(f"workflows failed: {found}")
                time.sleep(0.01)
        started, used = begun[0]
        note_processor(name, (time.process_time() - used) / messages)
        return time.perf_counter() - started
    finally:
        DBOS.destroy(destroy_registry=True)
