"""A shop that has run: a journal and a store with handled, skipped, dead, duplicate and delayed messages.

300 orders go to billing (ordered by customer) and to stock. Billing skips 6 of them (7, 57, …); 8 are dead letters
(3, 43, …). Ten orders came twice under one id (20 to 29). `delayed` orders wait for an hour.

Two nodes are for Spark's workers to import: `shelf`, of which each subscription remembers in another way, and `glance`,
which has no store.
"""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from time import time
from typing import Any

import msgspec

import faregate as fg
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.spool import spool

ORDERS = 300
SKIPPED = [n for n in range(ORDERS) if n % 50 == 7]
DEAD = [n for n in range(ORDERS) if n % 40 == 3 and n not in SKIPPED]
TWICE = list(range(20, 30))
DEAD_TWICE = [n for n in TWICE if n in DEAD]
SKIPPED_TWICE = [n for n in TWICE if n in SKIPPED]
HANDLED = ORDERS - len(SKIPPED) - len(DEAD)


class OrderPlaced(fg.Event):
    order_id: str
    customer: str


class Billed(fg.Event):
    order_id: str


class Stored(fg.Event):
    number: int
    customer: str


class Noted(fg.Event):
    number: int


class Tagged(fg.Event):
    number: int


shelf = fg.Node("shelf", schema="create table if not exists shelved(message_id text, number integer)")
glance = fg.Node("glance")
BAD, LATER = 1, 2
"""The numbers of the dead letters, and that wait for an hour."""


@shelf.on(Stored, source="shop", key="customer", retry=None, redeliver=fg.Redeliver(3600))
async def shelve(stored: Stored, ctx: fg.Context) -> None:
    if stored.number == BAD:
        raise fg.Permanent("too heavy")
    if stored.number == LATER:
        raise RuntimeError("full")
    await ctx.db.execute("insert into shelved(message_id, number) values (?, ?)", (ctx.message_id, stored.number))


@shelf.on(Noted, source="shop", dedup="off")
async def note(noted: Noted, ctx: fg.Context) -> None:
    await ctx.db.execute("insert into shelved(message_id, number) values (?, ?)", (ctx.message_id, noted.number))


@shelf.on(Tagged, source="shop", dedup="tokens")
async def tag(tagged: Tagged, ctx: fg.Context) -> None:
    await ctx.db.execute("insert into shelved(message_id, number) values (?, ?)", (ctx.message_id, tagged.number))


@glance.on(Noted, source="shop")
async def look(noted: Noted) -> None:
    if noted.number == BAD:
        raise fg.Permanent("ugly")


class World:
    def __init__(self, folder: Path, store: str | None = None) -> None:
        self.journal = folder / "journal"
        self.database = folder / "shop.db"
        self.store = store or f"sqlite:{self.database}"
        self.effects = ["billing:select message_id from invoices", "stock:select message_id from reservations"]

    def bus(self) -> fg.Bus:
        shop, stock = (
            fg.Node("shop"),
            fg.Node("stock", schema="create table if not exists reservations(message_id text)"),
        )
        billing = fg.Node("billing", schema="create table if not exists invoices(message_id text, order_id text)")

        @billing.on(OrderPlaced, source="shop", key="customer", retry=None, redeliver=fg.Redeliver(0.01))
        async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
            if int(order.order_id) in DEAD:
                raise fg.Permanent("no such customer")
            sql = "insert into invoices(message_id, order_id) values (?, ?)"
            await ctx.db.execute(sql, (ctx.message_id, order.order_id))
            if int(order.order_id) == 30 and not ctx.redeliveries:
                raise RuntimeError("once")
            return Billed(order_id=order.order_id)

        async def skip(ctx: fg.Context, call_next: Callable[[], Awaitable[None]]) -> None:
            if int(ctx.message.order_id) not in SKIPPED:
                await call_next()

        billing.use(skip)

        @stock.on(OrderPlaced, source="shop", order=fg.Parallel(4))
        async def reserve(order: OrderPlaced, ctx: fg.Context) -> None:
            await ctx.db.execute("insert into reservations(message_id) values (?)", (ctx.message_id,))

        return fg.Bus(f"journal:{self.journal}", nodes=[shop, billing, stock], store=self.store)

    def run(self, *orders: OrderPlaced, delay: float | None = None) -> None:
        async def main() -> None:
            async with self.bus() as bus:
                if delay is None and orders:
                    await bus.publish_many(list(orders), node="shop")
                elif delay is not None:
                    # As a node without a store schedules it: it waits at the broker.
                    sealed = [bus._senders["shop"].seal_root(fg.publish(each, delay=delay), time()) for each in orders]
                    await bus.transport.publish(sealed)
                await bus.idle()

        asyncio.run(main())

    def repeat(self, offsets: list[int]) -> None:
        """The same publications once more, in a way that the broker's window lets them pass."""
        found = dict(JournalReader(self.journal).envelopes(0))
        again = [msgspec.structs.replace(found[offset], replay=1) for offset in offsets]
        spool(Layout(self.journal), RealDisk(), again)

    def sql(self, statement: str, *values: Any) -> list[Any]:
        with closing(sqlite3.connect(self.database)) as connection, connection:
            return connection.execute(statement, values).fetchall()


def order(number: int) -> OrderPlaced:
    return OrderPlaced(order_id=f"{number}", customer=f"c{number % 7}")


def build(folder: Path, *, delayed: int = 0) -> World:
    world = World(folder)
    world.run(*(order(n) for n in range(ORDERS)))
    world.repeat(TWICE)
    world.run()
    if delayed:
        world.run(*(order(1000 + n) for n in range(delayed)), delay=3600.0)
    return world
