"""The nodes and messages of the Spark benchmarks, where workers can import them."""

import faregate as fg


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


def bill_order(order: Order) -> Billed:
    return Billed(order_id=order.order_id, customer=order.customer, total=order.total + 1, note=order.note)


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


def make_order(number: int) -> Order:
    return Order(order_id=f"order-{number:07}", customer=f"customer-{number % 5000:06}", total=number, note="n" * 110)
