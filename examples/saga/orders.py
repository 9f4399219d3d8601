"""The saga of an order: confirmed when it is paid in time, else cancelled; money that comes late is paid back.

Rules kept here:
- The state is a row in the node's store, and changes in the commit that records what is sent: no step is half done.
- The timeout is a message that the saga schedules to itself and cancels when the answer comes. Either may win, so each
  step says from which state it goes on (`_move`), and who comes second finds the order elsewhere.
- What was done is not rolled back but made good by another command: `RefundCard`.
"""

import os

import faregate as fg

PAY_WITHIN = float(os.environ.get("SAGA_PAY_WITHIN", 15 * 60))
"""Seconds."""


class OrderPlaced(fg.Event):
    order_id: str
    total: int


class ChargeCard(fg.Command):
    order_id: str
    amount: int


class RefundCard(fg.Command):
    order_id: str


class CardCharged(fg.Event):
    order_id: str


class PaymentOverdue(fg.Command):
    order_id: str


class OrderConfirmed(fg.Event):
    order_id: str


class OrderCancelled(fg.Event):
    order_id: str
    why: str


orders = fg.Node("orders", schema="create table if not exists orders(id text primary key, state text not null)")


@orders.on(OrderPlaced, source="shop")
async def start(placed: OrderPlaced, ctx: fg.Context) -> list[fg.Outgoing]:
    ctx.db.write("insert into orders(id, state) values (?, 'waiting')", (placed.order_id,))
    timeout = PaymentOverdue(order_id=placed.order_id)
    return [
        fg.send(ChargeCard(order_id=placed.order_id, amount=placed.total), to="payments"),
        fg.send(timeout, to=orders, delay=PAY_WITHIN, id_key=_timeout_of(placed.order_id)),
    ]


@orders.on(CardCharged, source="payments")
async def confirm(charged: CardCharged, ctx: fg.Context) -> OrderConfirmed | fg.Outgoing:
    if not await _move(ctx, charged.order_id, "waiting", "confirmed"):
        return fg.send(RefundCard(order_id=charged.order_id), to="payments")  # too late: it was cancelled
    await ctx.cancel(key=_timeout_of(charged.order_id))
    return OrderConfirmed(order_id=charged.order_id)


@orders.on(PaymentOverdue)
async def give_up(overdue: PaymentOverdue, ctx: fg.Context) -> OrderCancelled | None:
    if not await _move(ctx, overdue.order_id, "waiting", "cancelled"):
        return None  # it was paid while this was on its way
    return OrderCancelled(order_id=overdue.order_id, why="not paid in time")


async def _move(ctx: fg.Context, order_id: str, before: str, after: str) -> bool:
    """Whether the order was in that state; then it is in the next one."""
    changed: int = await ctx.db.execute(
        "update orders set state = ? where id = ? and state = ?", (after, order_id, before)
    )
    return changed == 1


def _timeout_of(order_id: str) -> str:
    return f"payment-of-{order_id}"
