"""A handler that calls a bank by HTTP: `faregate run examples.http_call.payments:bus`.

Rules kept here:
- `ctx.message_id` is the remote's Idempotency-Key. It is the same in every try, redelivery, restart and replay of this
  message, and another one for every other message.
- The call comes first and the writing afterwards: while the bank takes its time no transaction is open.
- One client for the bus, so that connections are used again: a client for each message would connect each time.
- An answer that will not change is not an error (declined: an event) or `fg.Permanent`. What may pass is raised, and
  the subscription's policy tries again.
"""

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

import faregate as fg

log = logging.getLogger(__name__)

BANK = os.environ.get("BANK_URL", "http://127.0.0.1:8001")
DATA = Path(os.environ.get("PAYMENTS_DATA", "payments-data"))


class ChargeCard(fg.Command):
    order_id: str
    amount: int


class CardCharged(fg.Event):
    order_id: str
    charge_id: str


class CardDeclined(fg.Event):
    order_id: str
    why: str


payments = fg.Node(
    "payments",
    schema="create table if not exists charges(order_id text not null, charge_id text not null, amount integer)",
)


@payments.provides(scope="bus")
async def open_bank() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=BANK, timeout=5) as client:
        yield client


@payments.on(
    ChargeCard,
    order=fg.Parallel(50),
    retry=fg.Retry(2, delay=0.2, backoff=2),
    redeliver=fg.Redeliver(10, 60, 600, jitter=0.2),
)
async def charge(command: ChargeCard, ctx: fg.Context, bank: httpx.AsyncClient) -> CardCharged | CardDeclined:
    answer = await bank.post(
        "/charges",
        json={"order_id": command.order_id, "amount": command.amount},
        headers={"Idempotency-Key": ctx.message_id},
    )
    if answer.status_code == 402:
        return CardDeclined(order_id=command.order_id, why=answer.json()["detail"])
    if answer.status_code == 429:  # uses up no try
        raise fg.RetryAfter(float(answer.headers.get("Retry-After", 10)))
    if answer.status_code == 503:  # stops this subscription until the bank is back; uses up no try
        raise fg.Unavailable("the bank is closed", retry_after=30)
    if answer.is_client_error:
        raise fg.Permanent(f"the bank refuses the charge for order {command.order_id}: {answer.text}")
    answer.raise_for_status()
    charge_id = answer.json()["charge_id"]
    ctx.db.write("insert into charges values (?, ?, ?)", (command.order_id, charge_id, command.amount))
    log.info("order %s is charged", command.order_id)
    return CardCharged(order_id=command.order_id, charge_id=charge_id)


bus = fg.Bus(f"journal:{DATA}/journal", nodes=[payments], store=f"sqlite:{DATA}/payments.db")
