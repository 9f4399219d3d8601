"""How a type checker sees publications. `./dev check` runs mypy on this file: what must not pass says which error it
is, and an ignore that nothing needs is an error itself."""

from datetime import UTC, datetime, timedelta

import faregate as fg


class Placed(fg.Event):
    order_id: str


class Charge(fg.Command):
    order_id: str


shop = fg.Node("shop", publishes=[Placed])
billing = fg.Node("billing")


@billing.on(Placed)
async def bill(order: Placed, ctx: fg.Context) -> fg.Outgoing:
    ctx.publish(order, id_key="1", delay=timedelta(seconds=3))
    ctx.publish(fg.publish(order, headers={"a": "b"}))
    ctx.send(fg.send(Charge(order_id="1"), to=billing, expires=30))
    ctx.publish(order, dely=3)  # type: ignore[call-arg]
    return fg.send(Charge(order_id="1"), to="billing", at=datetime.now(UTC))


@billing.on(Charge)
async def answer(charge: Charge) -> fg.Reply[Placed | Charge]:
    if charge.order_id == "2":
        return fg.reply("2")  # type: ignore[arg-type]
    return fg.reply(charge) if charge.order_id == "1" else fg.reply(Placed(order_id="1"))


async def on_the_bus(bus: fg.Bus, event: Placed) -> list[str]:
    options: fg.Options = {"delay": 3.0, "idempotency_key": "17"}
    one: str = await bus.publish(event, **options)
    two: str = await bus.publish(fg.publish(event, **options), node=shop)
    three: str = await bus.send(Charge(order_id="1"), to=billing, expires=3)
    await bus.publish(event, idempotency_key=17)  # type: ignore[arg-type]
    await bus.send(Charge(order_id="1"), to=billing, dely=3)  # type: ignore[call-arg]
    return [one, two, three, *await bus.publish_many([event, fg.send(Charge(order_id="1"), to="billing")])]


def a_command_says_where_it_goes() -> fg.Outgoing:
    return fg.send(Charge(order_id="1"))  # type: ignore[call-arg]


def in_a_transaction(outbox: fg.Outbox, event: Placed) -> str:
    return outbox.publish(fg.publish(event, at=3.0)) + outbox.send(Charge(order_id="1"), to="billing", delay=3)


async def in_an_awaited_transaction(outbox: fg.AsyncOutbox, event: Placed) -> str:
    return await outbox.publish(event, node=shop, delay=3) + await outbox.send(fg.send(Charge(order_id="1"), to=shop))
