"""The saga with the nodes around it: `faregate run examples.saga.app:bus`.

`payments` and `audit` are stubs. A card pays up to 1,000 at once; whoever asks for more gets no answer.
"""

import logging
import os

import faregate as fg

from .orders import CardCharged, ChargeCard, OrderCancelled, OrderConfirmed, OrderPlaced, RefundCard, orders

log = logging.getLogger(__name__)

shop = fg.Node("shop", publishes=[OrderPlaced])
payments = fg.Node("payments", publishes=[CardCharged])
audit = fg.Node("audit")


@payments.on(ChargeCard)
async def charge(command: ChargeCard) -> CardCharged | None:
    return CardCharged(order_id=command.order_id) if command.amount <= 1_000 else None


@payments.on(RefundCard)
async def refund(command: RefundCard) -> None:
    log.info("order %s is paid back", command.order_id)


@audit.on(OrderConfirmed, source=orders)
async def note_confirmed(confirmed: OrderConfirmed) -> None:
    log.info("order %s is confirmed", confirmed.order_id)


@audit.on(OrderCancelled, source=orders)
async def note_cancelled(cancelled: OrderCancelled) -> None:
    log.info("order %s is cancelled: %s", cancelled.order_id, cancelled.why)


DATA = os.environ.get("SAGA_DATA", "saga-data")
bus = fg.Bus(f"journal:{DATA}/journal", nodes=[shop, orders, payments, audit], store=f"sqlite:{DATA}/saga.db")
