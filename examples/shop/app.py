"""The four services and the bus they run on: `faregate run examples.shop.app:bus`.

Nodes are declarations: nothing happens before a bus starts them. Handlers return what they want sent.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import faregate as fg

from .bank import Bank
from .messages import CardCharged, ChargeCard, OrderPlaced, OrderShipped

shop = fg.Node("shop")
billing = fg.Node("billing")
payments = fg.Node("payments")
shipping = fg.Node("shipping")


@dataclass
class Books:
    """What the services have done, with the id of the message that made them do it."""

    invoices: list[tuple[str, str]] = field(default_factory=list)
    charges: list[tuple[str, str]] = field(default_factory=list)
    parcels: list[tuple[str, str]] = field(default_factory=list)


books = Books()
bank = Bank()


@dataclass(frozen=True)
class WriteInvoice:
    """An effect: what shall be written, as data. The interpreter below writes it."""

    order_id: str


@billing.on(OrderPlaced, source="shop", key="order_id")
async def bill(order: OrderPlaced) -> list[object]:
    """A pure handler: it decides and does nothing itself, so it is tested without a bus."""
    if order.total <= 0:
        raise fg.Permanent(f"order {order.order_id} has the impossible total {order.total}")
    return [
        WriteInvoice(order.order_id),
        fg.send(ChargeCard(order_id=order.order_id, amount=order.total), to="payments"),
    ]


@billing.interprets(WriteInvoice)
async def write_invoice(effect: WriteInvoice, ctx: fg.Context) -> None:
    books.invoices.append((effect.order_id, ctx.message_id))


@payments.provides
async def open_bank() -> AsyncIterator[Bank]:
    """One line to the bank per message, closed when the message is done."""
    yield bank


@payments.on(
    ChargeCard,
    order=fg.Parallel(50),
    retry=fg.Retry(2, delay=0.05),
    redeliver=fg.Redeliver(0.5, 2, 10),
)
async def charge(command: ChargeCard, ctx: fg.Context, bank: Bank) -> AsyncIterator[CardCharged]:
    await bank.charge(command.order_id)
    books.charges.append((command.order_id, ctx.message_id))
    yield CardCharged(order_id=command.order_id, amount=command.amount)


@shipping.on(CardCharged, source="payments", key="order_id")
async def ship(charged: CardCharged, ctx: fg.Context) -> OrderShipped:
    books.parcels.append((charged.order_id, ctx.message_id))
    return OrderShipped(order_id=charged.order_id)


bus = fg.Bus("memory:", nodes=[shop, billing, payments, shipping])
