"""Two schedules of a shop: `faregate run examples.cron.carts:bus`.

A function of `@node.every` is a handler: what it writes and what it returns are one commit, once for each tick, however
many processes run the node. It is retried, redelivered and at last a dead letter as any other.
"""

import logging
import os
from datetime import timedelta

import faregate as fg

log = logging.getLogger(__name__)

FORGET_AFTER = timedelta(hours=1)


class CartFilled(fg.Event):
    cart_id: str


class CartForgotten(fg.Event):
    cart_id: str


class DayClosed(fg.Event):
    day: str
    carts: int


shop = fg.Node("shop", publishes=[CartFilled])
carts = fg.Node(
    "carts", schema="create table if not exists carts(id text primary key, filled_at real not null, forgotten integer)"
)


@carts.on(CartFilled, source=shop)
async def fill(filled: CartFilled, ctx: fg.Context) -> None:
    ctx.db.write("insert into carts values (?, ?, 0)", (filled.cart_id, ctx.sent_at))
    log.info("cart %s is filled", filled.cart_id)


@carts.every(timedelta(minutes=5), missed="last")
async def forget(tick: fg.Tick, ctx: fg.Context) -> list[CartForgotten]:
    """`tick.due` and not the clock: a tick that is tried again later does the same."""
    before = (tick.due - FORGET_AFTER).timestamp()
    rows = await ctx.db.fetchall(
        "update carts set forgotten = 1 where forgotten = 0 and filled_at < ? returning id", (before,)
    )
    return [CartForgotten(cart_id=cart_id) for (cart_id,) in rows]


@carts.every("0 3 * * *", tz="Europe/Berlin", missed="all")
async def close_day(tick: fg.Tick, ctx: fg.Context) -> DayClosed:
    [count] = await ctx.db.fetchone("select count(*) from carts where forgotten = 0")
    ctx.db.write("delete from carts where forgotten = 1")
    return DayClosed(day=tick.due.date().isoformat(), carts=count)


DATA = os.environ.get("CARTS_DATA", "carts-data")
bus = fg.Bus(f"journal:{DATA}/journal", nodes=[shop, carts], store=f"sqlite:{DATA}/carts.db")
