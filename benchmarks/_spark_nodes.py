"""The nodes of the Spark benchmarks, where workers can import them."""

from _orders import Billed, Order, bill_order

import faregate as fg

INVOICES = "create table if not exists invoices(order_id text, message_id text not null, total integer)"
INSERT = "insert into invoices(order_id, message_id, total) values (?, ?, ?)"

shop = fg.Node("shop")
stateless = fg.Node("stateless")
billing = fg.Node("billing", schema=INVOICES)


@stateless.on(Order, source="shop")
async def pass_on(order: Order) -> Billed:
    return bill_order(order)


@billing.on(Order, source="shop", order=fg.Parallel(2))
async def bill(order: Order, ctx: fg.Context) -> Billed:
    row = (order.order_id, ctx.message_id, order.total)
    write = getattr(ctx.db, "write", None)
    if write is None:
        await ctx.db.execute(INSERT, row)
    else:
        write(INSERT, row)
    return bill_order(order)
