"""What mode `tokens` leaves behind once everything is handled: nothing, however many messages there were.

Messages go from the shop to billing (tokens), whose handler inserts a row and sends a command to shipping (tokens).
Then the rows of all tables that could grow are counted: tokens, claims, outbox and ledger.

    merged      all nodes and the tokens share one SQLite database: claiming and the effects are one transaction.
    separate    each node has a database of its own and the tokens another: the full protocol, on 3 % of the messages.

The goal is zero rows; the ratio is 1 when nothing is left, and otherwise falls towards 0.
"""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from _harness import Report, folder, loop, options

import faregate as fg

PUBLISHED_TOGETHER = 1000
SEPARATE_SHARE = 0.03
TABLES = ("faregate_tokens", "faregate_claims", "faregate_outbox", "faregate_ledger")

left: dict[str, dict[str, int]] = {}
"""Rows at rest by form and table; the most of all rounds."""


class Order(fg.Event):
    order_id: str
    customer: str


class Ship(fg.Command):
    order_id: str


def make_nodes() -> list[fg.Node]:
    table = "create table if not exists {}(order_id text primary key, message_id text)"
    shop = fg.Node("shop")
    billing = fg.Node("billing", schema=table.format("invoices"))
    shipping = fg.Node("shipping", schema=table.format("parcels"))

    @billing.on(Order, source="shop", key="customer", dedup="tokens")
    async def bill(order: Order, ctx: fg.Context) -> fg.Outgoing:
        await ctx.db.execute("insert into invoices values (?, ?)", (order.order_id, ctx.message_id))
        return fg.send(Ship(order_id=order.order_id), to="shipping")

    @shipping.on(Ship, dedup="tokens")
    async def ship(command: Ship, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into parcels values (?, ?)", (command.order_id, ctx.message_id))

    return [shop, billing, shipping]


async def run_merged(messages: int) -> float:
    with folder() as path:
        nodes = make_nodes()
        bus = fg.Bus(f"journal:{path}/journal", nodes=nodes, store=f"sqlite:{path}/all.db")
        seconds = await run(bus, messages)
        look("merged", path, messages)
    return seconds


async def run_separate(messages: int) -> float:
    with folder() as path:
        nodes = make_nodes()
        stores = {node.name: f"sqlite:{path}/{node.name}.db" for node in nodes}
        bus = fg.Bus(f"journal:{path}/journal", nodes=nodes, store=stores, tokens=f"sqlite:{path}/tokens.db")
        seconds = await run(bus, messages)
        look("separate", path, messages)
    return seconds


async def run(made: fg.Bus, messages: int) -> float:
    begin = time.perf_counter()
    async with made as bus:
        for first in range(0, messages, PUBLISHED_TOGETHER):
            numbers = range(first, min(first + PUBLISHED_TOGETHER, messages))
            orders = [Order(order_id=f"order-{n:07}", customer=f"customer-{n % 5000:04}") for n in numbers]
            await bus.publish_many(orders, node="shop")
        await bus.idle()
    return time.perf_counter() - begin


def look(form: str, path: Path, messages: int) -> None:
    """Count what is left, over all databases. Raises if the messages did not have their effects once each."""
    counts = dict.fromkeys((*TABLES, "invoices", "parcels"), 0)
    for file in path.glob("*.db"):
        with closing(sqlite3.connect(file)) as db:
            tables = {name for (name,) in db.execute("select name from sqlite_master where type = 'table'")}
            for table in tables & counts.keys():
                counts[table] += db.execute(f"select count(*) from {table}").fetchone()[0]
    if (counts["invoices"], counts["parcels"]) != (messages, messages):
        raise RuntimeError(f"{messages} messages made {counts['invoices']} invoices and {counts['parcels']} parcels")
    most = left.setdefault(form, dict.fromkeys(TABLES, 0))
    for table in TABLES:
        most[table] = max(most[table], counts[table])


def main() -> None:
    args = options(__doc__, rounds=1, messages=100_000)
    report = Report("tokens-at-rest", args.json)
    counts = {"merged": args.messages, "separate": max(1, int(args.messages * SEPARATE_SHARE))}
    seconds: dict[str, list[float]] = {form: [] for form in counts}
    for _ in range(args.rounds or 1):
        seconds["merged"].append(loop(run_merged(counts["merged"])))
        seconds["separate"].append(loop(run_separate(counts["separate"])))
    rows = [
        (
            form,
            f"{count:,}",
            *(str(left[form][table]) for table in TABLES),
            f"{count / median(seconds[form]):,.0f}",
        )
        for form, count in counts.items()
    ]
    names = [table.removeprefix("faregate_") for table in TABLES]
    report.table(("rows left", "messages", *names, "messages/s"), rows)
    for form, count in counts.items():
        total = sum(left[form].values())
        report.ours[f"left_{form}"] = total
        report.ours[f"{form}_per_second"] = count / median(seconds[form])
        report.peers[f"messages_{form}"] = count
        report.goal(form, 1 / (1 + total), 1.0)
    report.finish()


if __name__ == "__main__":
    main()
