"""Exactly-once effects on the journal and a store, beside a bare loop that makes the same inserts and commits.

For each message the handler inserts one business row, with the message's id, and publishes one event, which nobody
subscribes to: so it is stored, dispatched to the journal and synced, and no second handler is measured. All messages
were published before, with the subscription paused; the time runs from `resume` until `bus.idle()`.

    ledger, tokens, off   the modes of `dedup`, all on SQLite; `ledger` on PostgreSQL too, where there is one.
                          (In mode tokens an event without a subscriber ends in the outbox and is not sent.)
    bare loop             the business row by itself, ledger and outbox rows by `executemany`, then COMMIT: into the
                          same tables, on the same kind of file (write-ahead log, synchronous=FULL), with as many
                          messages for each commit as `ledger` had when it ran last. Its rows are made before: it does
                          nothing else.
    100 a commit          the same with 100 messages for each commit, for information: what batches are worth there.

The address of PostgreSQL comes from FAREGATE_TEST_POSTGRES; without one, only SQLite is measured. Processor time is
shown beside, since it suffers less from others on the machine; that of PostgreSQL's own process is not in it.
"""

import asyncio
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from _harness import Contestant, Report, interleave, options

import faregate as fg
from faregate import ids
from faregate.codec import CODECS
from faregate.message import Envelope
from faregate.node.subscription import Dedup
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.ports.store import Store, Transaction
from faregate.stores.sql.columns import id_bytes, pack
from faregate.testing.store_subjects import postgres_schema

TARGET = 0.35
PUBLISHED_TOGETHER = 1000
CUSTOMERS = 5000
POSTGRES_SHARE = 0.1
INVOICES = "create table if not exists invoices(order_id text primary key, message_id text not null, total integer)"
INSERT = "insert into invoices(order_id, message_id, total) values (?, ?, ?)"
POSTGRES = os.environ.get("FAREGATE_TEST_POSTGRES")

cpu: dict[str, list[float]] = {}
"""Processor seconds per message, by contestant, run by run; the first is the warm-up."""
rows_per_commit: dict[str, list[float]] = {"sqlite": [], "postgres": []}
"""What `ledger` had, run by run."""


class Order(fg.Event):
    order_id: str
    customer: str
    total: int
    note: str


class Billed(fg.Event):
    order_id: str
    customer: str
    total: int
    note: str


def make_order(number: int) -> Order:
    return Order(
        order_id=f"order-{number:06}", customer=f"customer-{number % CUSTOMERS:06}", total=number, note="n" * 110
    )


def make_nodes(dedup: Dedup) -> list[fg.Node]:
    shop, billing = fg.Node("shop"), fg.Node("billing", schema=INVOICES)

    @billing.on(Order, source="shop", key="customer", dedup=dedup)
    async def bill(order: Order, ctx: fg.Context) -> Billed:
        await ctx.db.execute(INSERT, (order.order_id, ctx.message_id, order.total))
        return Billed(order_id=order.order_id, customer=order.customer, total=order.total, note=order.note)

    return [shop, billing]


# --- places ------------------------------------------------------------------------------------------------------


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="faregate-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@asynccontextmanager
async def place(kind: str, path: Path) -> AsyncIterator[str]:
    """The URL of an empty store."""
    if kind == "sqlite":
        yield f"sqlite:{path}/store.db"
    else:
        assert POSTGRES is not None
        async with postgres_schema(POSTGRES) as url:
            yield url


class Commits:
    """Counts the commits of a store that carry outgoing messages: one for each transaction of handlers."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        self._make = store.transaction
        store.transaction = self._transaction  # type: ignore[method-assign]

    def _transaction(self) -> Transaction:
        transaction = self._make()
        send = transaction.send

        async def counted(rows: Any) -> list[int]:
            self.count += 1
            return await send(rows)

        transaction.send = counted  # type: ignore[method-assign]
        return transaction


@contextmanager
def timed(name: str, messages: int) -> Iterator[list[float]]:
    """Gives a list that holds the seconds afterwards; notes processor time by itself."""
    took: list[float] = []
    begin, used = time.perf_counter(), time.process_time()
    yield took
    took.append(time.perf_counter() - begin)
    cpu.setdefault(name, []).append((time.process_time() - used) / messages)


# --- ours --------------------------------------------------------------------------------------------------------


async def run_bus(messages: int, *, name: str, kind: str, dedup: Dedup) -> float:
    orders = [make_order(number) for number in range(messages)]
    with folder() as path:
        async with (
            place(kind, path) as url,
            fg.Bus(f"journal:{path}/journal", nodes=make_nodes(dedup), store=url) as bus,
        ):
            [store] = bus.stores.values()
            await bus.pause("billing", Order)
            for first in range(0, messages, PUBLISHED_TOGETHER):
                await bus.publish_many(orders[first : first + PUBLISHED_TOGETHER], node="shop")
            while await store.undispatched(1):  # noqa: ASYNC110 - mode tokens publishes by way of the outbox
                await asyncio.sleep(0.05)
            commits = Commits(store)
            with timed(name, messages) as took:
                await bus.resume("billing", Order)
                await bus.idle()
            if dedup == "ledger":
                rows_per_commit[kind].append(messages / commits.count)
            await check(store, messages)
    return took[0]


async def check(store: Store, messages: int) -> None:
    """Every message had its effect, and nothing waits to be sent."""
    transaction = store.transaction()
    await transaction.begin()
    [invoices] = await transaction.fetchone("select count(*) from invoices") or (0,)
    [waiting] = await transaction.fetchone("select count(*) from faregate_outbox") or (0,)
    await transaction.roll_back()
    if (invoices, waiting) != (messages, 0):
        raise RuntimeError(f"{invoices} of {messages} messages had their effect, and {waiting} wait in the outbox")


# --- the bare loop -----------------------------------------------------------------------------------------------

Rows = list[tuple[Any, ...]]


def make_rows(count: int, as_id: Callable[[str], Any]) -> tuple[Rows, Rows, Rows]:
    """What the transactions of the handlers insert: business, ledger and outbox rows."""
    business: Rows = []
    ledger: Rows = []
    outbox: Rows = []
    encode = CODECS["json"].encoder(Order)
    for number in range(count):
        order, root = make_order(number), ids.root_id()
        message_id = ids.message_id(root, "billing")
        billed = Envelope(
            publication_id=ids.message_id(root, "another"),
            type="Billed",
            source="billing",
            body=encode(order),
            correlation_id=root,
            causation_id=message_id,
            marker=1,
            sent_at=1e9,
            body_digest=b"d" * 16,
        )
        business.append((order.order_id, message_id, order.total))
        ledger.append(("billing", as_id(message_id), b"d" * 16, order.customer, number, 1e9 + number, "handled"))
        outbox.append(("billing", as_id(message_id), 0, "billing.Billed", None, pack(billed)))
    return business, ledger, outbox


LEDGER = (
    "insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome) "
    "values (?, ?, ?, ?, ?, ?, ?) on conflict do nothing"
)
OUTBOX = "insert into faregate_outbox (node, message_id, ordinal, destination, key, envelope) values (?, ?, ?, ?, ?, ?)"


def share(kind: str) -> int:
    """How many messages the bare loop puts into a commit."""
    return round(rows_per_commit[kind][-1])


async def make_tables(url: str) -> None:
    store = open_store(url, SystemClock())
    await store.open()
    await store.apply_schema(INVOICES)
    await store.close()


async def run_bare_sqlite(messages: int) -> float:
    business, ledger, outbox = make_rows(messages, id_bytes)
    size = share("sqlite")
    with folder() as path:
        await make_tables(f"sqlite:{path}/store.db")
        db = sqlite3.connect(path / "store.db", isolation_level=None)
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = full")
        with timed("bare loop", messages) as took:
            for first in range(0, messages, size):
                part = slice(first, first + size)
                db.execute("begin immediate")
                db.executemany(LEDGER, ledger[part])
                for row in business[part]:
                    db.execute(INSERT, row)
                db.executemany(OUTBOX, outbox[part])
                db.execute("commit")
        db.close()
    return took[0]


async def run_bare_postgres(messages: int, *, name: str, size: int | None) -> float:
    import psycopg

    business, ledger, outbox = make_rows(messages, str)
    size = size or share("postgres")
    insert, insert_ledger, insert_outbox = (sql.replace("?", "%s") for sql in (INSERT, LEDGER, OUTBOX))
    assert POSTGRES is not None
    async with postgres_schema(POSTGRES) as url:
        await make_tables(url)
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as db:
            cursor = db.cursor()
            with timed(name, messages) as took:
                for first in range(0, messages, size):
                    part = slice(first, first + size)
                    await cursor.execute("begin")
                    await cursor.executemany(insert_ledger, ledger[part])
                    for row in business[part]:
                        await cursor.execute(insert, row)
                    await cursor.executemany(insert_outbox, outbox[part])
                    await cursor.execute("commit")
    return took[0]


# --- all of it ---------------------------------------------------------------------------------------------------


def bus_contestant(name: str, kind: str, dedup: Dedup, part: float) -> Contestant:
    return Contestant(name, partial(run_bus, name=name, kind=kind, dedup=dedup), share=part)


def bare_postgres(name: str, size: int | None) -> Contestant:
    return Contestant(name, partial(run_bare_postgres, name=name, size=size), share=POSTGRES_SHARE)


def main() -> None:
    args = options(__doc__, rounds=7, messages=20_000)
    report = Report("exactly-once", args.json)
    contestants = [
        bus_contestant("ledger", "sqlite", "ledger", 1.0),
        Contestant("bare loop", run_bare_sqlite),
        bus_contestant("tokens", "sqlite", "tokens", 0.5),
        bus_contestant("off", "sqlite", "off", 0.5),
    ]
    if POSTGRES is None:
        report.say("PostgreSQL is not measured: FAREGATE_TEST_POSTGRES names none")
    else:
        contestants += [
            bus_contestant("ledger, PostgreSQL", "postgres", "ledger", POSTGRES_SHARE),
            bare_postgres("bare loop, PostgreSQL", None),
            bare_postgres("bare loop, PostgreSQL, 100 a commit", 100),
        ]
    samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    rows = [
        (
            contestant.name,
            f"{samples.rate(contestant.name):,.0f}",
            f"{samples.cost(contestant.name) * 1e6:,.1f}",
            f"{median(cpu[contestant.name][1:] or cpu[contestant.name]) * 1e6:,.1f}",
        )
        for contestant in contestants
    ]
    report.table(("one insert and one event for each message", "messages/s", "µs each", "µs of processor"), rows)
    report.say()
    for kind, sizes in rows_per_commit.items():
        if sizes:
            report.say(f"messages for each commit of ledger on {kind}: {median(sizes[1:] or sizes):.0f}")
    report.ours = {name: samples.rate(name) for name in samples.seconds if not name.startswith("bare")}
    report.peers = {name: samples.rate(name) for name in samples.seconds if name.startswith("bare")}
    report.goal("sqlite", samples.ratio("ledger", "bare loop"), TARGET)
    if POSTGRES is not None:
        report.goal("postgres", samples.ratio("ledger, PostgreSQL", "bare loop, PostgreSQL"), TARGET)
    report.finish()


if __name__ == "__main__":
    main()
