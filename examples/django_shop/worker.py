"""The bus, in a process of its own, on Django's database: `faregate run examples.django_shop.worker:bus`."""

import logging

import faregate as fg

from .messages import NewsletterWanted, OrderPlaced
from .settings import DATA

log = logging.getLogger(__name__)
shop = fg.Node("shop", publishes=[OrderPlaced, NewsletterWanted])
billing = fg.Node(
    "billing", schema="create table if not exists invoices(order_id text not null, total integer not null)"
)
letters = fg.Node("letters", schema="create table if not exists readers(email text not null)")


@billing.on(OrderPlaced, source=shop)
async def bill(order: OrderPlaced, ctx: fg.Context) -> None:
    ctx.db.write("insert into invoices values (?, ?)", (order.order_id, order.total))
    log.info("bill order %s", order.order_id)


@letters.on(NewsletterWanted, source=shop)
async def subscribe(wanted: NewsletterWanted, ctx: fg.Context) -> None:
    ctx.db.write("insert into readers values (?)", (wanted.email,))
    log.info("subscribe %s", wanted.email)


bus = fg.Bus(f"journal:{DATA}/journal", nodes=[shop, billing, letters], store=f"sqlite:{DATA}/shop.db")
