"""The four services and the bus they run on: `faregate run examples.shop.app:bus`.

Rules kept here:
- Nodes are declarations: nothing happens before a bus starts them. Handlers return what they want sent.
- What a handler did is a row in its node's own table, written through `ctx.db`: it is there once, however often the
  handler ran. Every row keeps the id of its message, and no constraint keeps a second one out: a double would show.
- Where it runs: in memory, or on the folder that `SHOP_DATA` names (a journal and a SQLite file). Or each service in
  processes of its own, on the broker `SHOP_BROKER` and the database `SHOP_STORE`; `SHOP_SERVICE` says which one it is.
"""

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import faregate as fg

from .bank import Bank
from .messages import CardCharged, ChargeCard, OrderPlaced, OrderShipped

TRIES = 3
"""How often the bank is asked before the message waits for a redelivery."""

shop = fg.Node("shop")
billing = fg.Node(
    "billing",
    schema="create table if not exists invoices"
    "(order_id text not null, customer text not null, total integer not null, message_id text not null)",
)
payments = fg.Node(
    "payments",
    schema="create table if not exists charges"
    "(order_id text not null, amount integer not null, message_id text not null)",
)
shipping = fg.Node(
    "shipping",
    schema="create table if not exists parcels(order_id text not null, message_id text not null)",
)
bank = Bank()


@dataclass(frozen=True)
class WriteInvoice:
    """An effect: what shall be written, as data. The interpreter below writes it."""

    order_id: str
    customer: str
    total: int


@billing.on(OrderPlaced, source="shop", key="customer")
async def bill(order: OrderPlaced) -> list[object]:
    """A pure handler: it decides and does nothing itself, so it is tested without a bus. A customer's orders are
    billed in the order in which they were placed."""
    if order.total <= 0:
        raise fg.Permanent(f"order {order.order_id} has the impossible total {order.total}")
    return [
        WriteInvoice(order.order_id, order.customer, order.total),
        fg.send(ChargeCard(order_id=order.order_id, amount=order.total), to="payments"),
    ]


@billing.interprets(WriteInvoice)
async def write_invoice(effect: WriteInvoice, ctx: fg.Context) -> None:
    ctx.db.write(
        "insert into invoices(order_id, customer, total, message_id) values (?, ?, ?, ?)",
        (effect.order_id, effect.customer, effect.total, ctx.message_id),
    )


@payments.provides
async def open_bank() -> AsyncIterator[Bank]:
    """One line to the bank per message, closed when the message is done."""
    yield bank


@payments.on(
    ChargeCard,
    order=fg.Parallel(50),
    retry=fg.Retry(TRIES - 1, delay=0.05),
    redeliver=fg.Redeliver(0.5, 2, 10),
)
async def charge(command: ChargeCard, ctx: fg.Context, bank: Bank) -> AsyncIterator[CardCharged]:
    """Asks first and writes afterwards: while the bank takes its time, no transaction is open."""
    await bank.charge(command.order_id, ctx.redeliveries * TRIES + ctx.attempt)
    ctx.db.write(
        "insert into charges(order_id, amount, message_id) values (?, ?, ?)",
        (command.order_id, command.amount, ctx.message_id),
    )
    yield CardCharged(order_id=command.order_id, amount=command.amount)


@shipping.on(CardCharged, source="payments", key="order_id")
async def ship(charged: CardCharged, ctx: fg.Context) -> OrderShipped:
    ctx.db.write("insert into parcels(order_id, message_id) values (?, ?)", (charged.order_id, ctx.message_id))
    return OrderShipped(order_id=charged.order_id)


services = {node.name: node for node in (shop, billing, payments, shipping)}


def make_bus(folder: Path | None = None) -> fg.Bus:
    """The shop in memory, or on a folder."""
    nodes = list(services.values())
    if folder is None:
        return fg.Bus("memory:", nodes=nodes, store="memory:")
    return fg.Bus(f"journal:{folder}/journal", nodes=nodes, store=f"sqlite:{folder}/shop.db")


def make_service(name: str) -> fg.Bus:
    """One of the services, to be run in as many processes as you like."""
    return fg.Bus(os.environ["SHOP_BROKER"], nodes=[services[name]], store=os.environ["SHOP_STORE"])


def _chosen() -> fg.Bus:
    if service := os.environ.get("SHOP_SERVICE"):
        return make_service(service)
    folder = os.environ.get("SHOP_DATA")
    return make_bus(Path(folder) if folder else None)


bus = _chosen()
