"""The public API by example, as the design has it: each block works as written. What is listed in a sentence there (the
fields of `ctx`, the options of a subscription) is listed here."""

import inspect
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import faregate as fg

EXAMPLE = """
import faregate as fg

class OrderPlaced(fg.Event):            # a frozen msgspec struct; dataclasses, attrs and pydantic models work too
    order_id: str                       # (fg.Event, key="order_id") names the key by which brokers may partition
    total: int

class ChargeCard(fg.Command, wire="charge-card"):   # wire name: the class name unless given
    order_id: str
    amount: int

class CardCharged(fg.Event):
    order_id: str

shop = fg.Node("shop")
billing = fg.Node("billing", schema="create table if not exists invoices(id text primary key, total integer)")
payments = fg.Node("payments")

@billing.on(OrderPlaced, source="shop", key="order_id")         # def or async def
async def bill(order: OrderPlaced, ctx: fg.Context):
    await ctx.db.execute("insert into invoices(id, total) values (?, ?)", (order.order_id, order.total))
    return fg.send(ChargeCard(order_id=order.order_id, amount=order.total), to="payments")

@payments.on(ChargeCard, retry=fg.Retry(2, delay=0.1), redeliver=fg.Redeliver(10, 60, 600))
async def charge(cmd: ChargeCard, ctx: fg.Context):
    yield CardCharged(order_id=cmd.order_id)                    # return one, return a list, or yield

async def main():
    async with fg.Bus("journal:./data", nodes=[shop, billing, payments], store="sqlite:./shop.db") as bus:
        await bus.publish(OrderPlaced(order_id="17", total=40), node="shop", idempotency_key="order-17")
        await bus.idle()            # nothing in flight, outbox empty; scheduled messages do not count
        return bus.outcomes(), [count.type for count in bus.counts()]
"""
FIELDS = (
    *("message_id", "publication_id", "correlation_id", "causation_id", "depth", "type", "source", "key", "headers"),
    *("attempt", "redeliveries", "redelivered", "sent_at", "db"),
)


class Placed(fg.Event):
    order_id: str
    total: int


class Charge(fg.Command):
    order_id: str


def customer(placed: Placed) -> str:
    return placed.order_id[:1]


async def test_the_example_works_as_written_also_when_it_is_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    exec(EXAMPLE, names)
    outcomes, types = await names["main"]()
    assert outcomes["handled"] == 2
    assert sorted(types) == ["OrderPlaced", "charge-card"]
    outcomes, _ = await names["main"]()
    assert outcomes["handled"] == 0, "the same idempotency key is the same publication"
    with closing(sqlite3.connect("shop.db")) as connection:
        assert connection.execute("select id, total from invoices").fetchall() == [("17", 40)]


async def test_ctx_has_the_fields_and_nobody_can_set_them() -> None:
    billing, payments = fg.Node("billing"), fg.Node("payments")
    seen: dict[str, dict[str, Any]] = {}
    kept: list[str] = []

    async def look(ctx: fg.Context) -> None:
        seen[ctx.type] = {name: getattr(ctx, name) for name in FIELDS}
        for name in FIELDS:
            try:
                setattr(ctx, name, None)
            except AttributeError:
                kept.append(name)

    @billing.on(Placed, source="shop", key="order_id")
    async def bill(placed: Placed, ctx: fg.Context) -> fg.Outgoing:
        await look(ctx)
        assert await ctx.db.fetchone("select '??', ? + 1", (1,)) == ("?", 2)
        assert await ctx.db.fetchall("select 1") == [(1,)]
        assert ctx.db.raw is not None
        return fg.send(Charge(order_id=placed.order_id), to="payments", headers={"region": "north"})

    @payments.on(Charge)
    def charge(command: Charge, ctx: fg.Context) -> None:
        assert ctx.db.fetchone("select 1") == (1,)
        seen["Charge"] = {name: getattr(ctx, name) for name in FIELDS}

    async with fg.testing.bench(billing, payments) as bench:
        await bench.publish(Placed(order_id="17", total=40))
        await bench.settle()
        assert bench.dead_letters() == []
    placed, charged = seen["Placed"], seen["Charge"]
    assert kept == list(FIELDS)
    assert (placed["source"], placed["key"], placed["depth"], placed["causation_id"]) == ("shop", "17", 0, None)
    assert placed["correlation_id"] == placed["publication_id"] != placed["message_id"]
    assert (placed["attempt"], placed["redeliveries"], placed["redelivered"]) == (1, 0, False)
    assert (charged["source"], charged["key"], charged["depth"]) == ("billing", None, 1)
    assert charged["correlation_id"] == placed["publication_id"]
    assert charged["causation_id"] == placed["message_id"]
    assert charged["headers"] == {"region": "north"}
    assert charged["sent_at"] >= placed["sent_at"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"order": fg.Serial()},
        {"order": fg.Parallel(3)},
        {"order": fg.ByKey(lanes=4), "key": "order_id"},
        {"key": ("order_id", "total")},
        {"key": customer},
        {"prefetch": 5},
        {"retry": fg.Retry(1, delay=0.1)},
        {"redeliver": fg.Redeliver(10, 60)},
        {"dedup": "ledger"},
        {"dedup": "tokens"},
        {"dedup": "off"},
        {"identity": "order_id"},
        {"identity": ("order_id", "total")},
        {"identity": customer},
        {"where": "total > 10"},
        {"expires": 60},
        {"name": "bill_it"},
    ],
    ids=lambda options: ",".join(options),
)
async def test_a_subscription_takes_every_option(options: dict[str, Any]) -> None:
    billing, handled = fg.Node("billing"), []

    @billing.on(Placed, source="shop", **options)
    async def bill(placed: Placed) -> None:
        handled.append(placed.order_id)

    [subscription] = billing.subscriptions.values()
    assert subscription.name == options.get("name", "bill")
    async with fg.testing.bench(billing) as bench:
        await bench.publish(Placed(order_id="17", total=40))
        await bench.settle()
    assert handled == ["17"]


def test_the_defaults_are_those_of_the_design() -> None:
    parameters = inspect.signature(fg.Node.on).parameters
    assert parameters["retry"].default == fg.Retry(2, delay=0.1)
    assert parameters["redeliver"].default == fg.Redeliver(10, 60, 600)
    assert parameters["dedup"].default == "ledger"
    node = fg.Node("billing")

    @node.on(Placed, source="shop", key="order_id")
    async def bill(placed: Placed) -> None: ...

    [subscription] = node.subscriptions.values()
    assert isinstance(subscription.order, fg.ByKey)
