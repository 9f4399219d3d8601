"""The node between the two: bills each order once, and says so: `python -m examples.without_faregate.billing`.

The table has no unique constraint: were an order billed twice, it would stand there twice.
"""

import argparse
import asyncio
import signal

import faregate as fg


class OrderPlaced(fg.Event):
    order_id: str
    total: int


class OrderBilled(fg.Event):
    order_id: str
    total: int


billing = fg.Node(
    "billing", schema="create table if not exists invoices(order_id text, total integer)", publishes=[OrderBilled]
)


@billing.on(OrderPlaced, source="shop")
async def bill(order: OrderPlaced, ctx: fg.Context) -> OrderBilled:
    ctx.db.write("insert into invoices(order_id, total) values (?, ?)", (order.order_id, order.total))
    return OrderBilled(order_id=order.order_id, total=order.total)


async def run(broker: str, store: str) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with fg.Bus(broker, nodes=[billing], store=store) as bus:
        print("billing is ready; Ctrl-C ends it", flush=True)
        await stop.wait()
    outcomes = bus.outcomes()
    print(f"billed {outcomes['handled']} orders, recognised {outcomes['duplicate']} copies")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Bill orders.")
    parser.add_argument("--broker", default="amqp://guest:guest@localhost:5672/")
    parser.add_argument("--store", default="sqlite:./billing.db", help="or postgresql://…")
    given = parser.parse_args()
    asyncio.run(run(given.broker, given.store))
