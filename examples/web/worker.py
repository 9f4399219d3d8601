"""The bus, in one process of its own: `faregate run examples.web.worker:bus`.

It finds what requests have committed to the outbox of `shop`, sends it, and runs the handlers. While it is down, orders
are taken and their events wait.
"""

import logging
from pathlib import Path

import faregate as fg

from .orders import OrderPlaced, data_folder, shop

log = logging.getLogger(__name__)


class OrderBilled(fg.Event):
    order_id: str


billing = fg.Node(
    "billing", schema="create table if not exists invoices(order_id text not null, total integer not null)"
)


@billing.on(OrderPlaced, source=shop)
async def bill(order: OrderPlaced, ctx: fg.Context) -> OrderBilled:
    ctx.db.write("insert into invoices values (?, ?)", (order.order_id, order.total))
    return OrderBilled(order_id=order.order_id)


@shop.on(OrderBilled, source=billing)
async def note_bill(billed: OrderBilled, ctx: fg.Context) -> None:
    ctx.db.write("update orders set billed = 1 where id = ?", (billed.order_id,))
    log.info("billed order %s", billed.order_id)


def make_bus(folder: Path) -> fg.Bus:
    return fg.Bus(f"journal:{folder}/journal", nodes=[shop, billing], store=f"sqlite:{folder}/shop.db")


bus = make_bus(data_folder())
