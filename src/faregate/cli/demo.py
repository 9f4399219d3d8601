"""`faregate demo`: thousands of orders through the shop, with live counters and a summary that is checked."""

import asyncio
import logging
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from faregate.bus.bus import Bus
from faregate.cli.loop import run_async
from faregate.cli.output import console, print_json

_REFRESH_SECONDS = 0.1
_PLACED_AT_ONCE = 200
_REPEATED_PERCENT = 10
_IMPOSSIBLE_PERCENT = 1


def demo(
    orders: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many orders to place.")] = 5000,
    seed: Annotated[int, typer.Option(help="Which orders repeat or are impossible.")] = 17,
    transport: Annotated[Literal["journal", "memory"], typer.Option(help="What the messages travel on.")] = "journal",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Send orders through a shop of four services and check that each was charged and shipped exactly once.

    Some orders are placed twice, some are impossible, and the bank often does not answer. The exit status says
    whether everything came out as expected.
    """
    logging.getLogger("faregate").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="faregate-demo-") as folder:
        url = "memory:" if transport == "memory" else f"journal:{folder}/journal"
        result = run_async(_run(url, orders, seed, live=not as_json and console.is_terminal))
    if as_json:
        print_json(result.as_dict())
    else:
        _show(result)
    if not result.held:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Check:
    """One line of the verdict."""

    what: str
    expected: int
    found: int

    @property
    def held(self) -> bool:
        return self.expected == self.found


@dataclass(frozen=True)
class Result:
    transport: str
    orders: int
    seconds: float
    messages: int
    timeouts: int
    checks: Sequence[Check]

    @property
    def held(self) -> bool:
        return all(check.held for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "transport": self.transport,
            "orders": self.orders,
            "seconds": round(self.seconds, 3),
            "messages": self.messages,
            "messages_per_second": round(self.messages / self.seconds),
            "bank_timeouts": self.timeouts,
            "checks": [
                {"what": check.what, "expected": check.expected, "found": check.found, "held": check.held}
                for check in self.checks
            ],
            "held": self.held,
        }


async def _run(url: str, orders: int, seed: int, *, live: bool) -> Result:
    from faregate.cli.shop import app as shop
    from faregate.cli.shop.messages import OrderPlaced

    chance = random.Random(seed)
    impossible = {number for number in range(orders) if chance.random() * 100 < _IMPOSSIBLE_PERCENT}
    repeated = {number for number in range(orders) if chance.random() * 100 < _REPEATED_PERCENT}
    started = time.perf_counter()
    transport = url.partition(":")[0]
    async with Bus(url, nodes=[shop.shop, shop.billing, shop.payments, shop.shipping]) as bus:
        watching = asyncio.create_task(_watch(bus, transport, orders)) if live else None
        placing: list[asyncio.Task[str]] = []
        for number in range(orders):
            order = OrderPlaced(
                order_id=f"order-{number}", customer=f"customer-{number % 97}", total=-1 if number in impossible else 40
            )
            for _ in range(2 if number in repeated else 1):
                placing.append(asyncio.create_task(bus.publish(order, node="shop", idempotency_key=order.order_id)))
            if len(placing) >= _PLACED_AT_ONCE:
                await asyncio.gather(*placing)
                placing.clear()
        await asyncio.gather(*placing)
        await bus.idle()
        seconds = time.perf_counter() - started
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        dead = await bus.poisoned("billing")
        outcomes = bus.outcomes()
    good = orders - len(impossible)
    checks = [
        Check("orders billed", good, len(set(shop.books.invoices))),
        Check("cards charged", good, len({order for order, _ in shop.books.charges})),
        Check("parcels shipped", good, len({order for order, _ in shop.books.parcels})),
        Check("charged twice", 0, _doubles(shop.books.charges)),
        Check("shipped twice", 0, _doubles(shop.books.parcels)),
        Check("impossible orders given up, with the reason", len(impossible), len(dead)),
        Check("messages lost", 0, orders + 2 * good - outcomes["handled"] - outcomes["dead"]),
    ]
    return Result(transport, orders, seconds, outcomes["handled"] + outcomes["dead"], shop.bank.timeouts, checks)


def _doubles(rows: list[tuple[str, str]]) -> int:
    return sum(count - 1 for count in Counter(order for order, _ in rows).values())


async def _watch(bus: Bus, transport: str, orders: int) -> None:
    """Redraw the counters until cancelled."""
    started = time.perf_counter()
    with Live(_view(bus, transport, orders, 0.0), console=console, auto_refresh=False, transient=True) as view:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            view.update(_view(bus, transport, orders, time.perf_counter() - started), refresh=True)


def _view(bus: Bus, transport: str, orders: int, seconds: float) -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("node")
    table.add_column("handles")
    for heading in ("running", "handled", "redelivered", "given up"):
        table.add_column(heading, justify="right")
    table.add_column("", width=24)
    done = 0
    for count in bus.counts():
        ended = count.handled + count.dead + count.skipped
        done += ended
        table.add_row(
            count.node,
            count.type,
            str(count.busy),
            f"{count.handled:,}",
            f"{count.redelivered:,}" if count.redelivered else "",
            Text(f"{count.dead:,}", style="red") if count.dead else "",
            ProgressBar(total=orders, completed=ended, width=24),
        )
    rate = f"{done / seconds:,.0f} messages a second" if seconds else ""
    return Group(Text(f"{orders:,} orders on {transport}:   {seconds:4.1f} s   {rate}", style="bold"), table)


def _show(result: Result) -> None:
    rate = f"{result.messages / result.seconds:,.0f} a second"
    console.print(
        f"[bold]{result.orders:,} orders[/] made {result.messages:,} messages on {result.transport}: in "
        f"{result.seconds:.1f} s ({rate}); the bank did not answer {result.timeouts:,} times",
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("checked")
    table.add_column("expected", justify="right")
    table.add_column("found", justify="right")
    table.add_column("")
    for check in result.checks:
        mark = Text("held", style="green") if check.held else Text("BROKEN", style="bold red")
        table.add_row(check.what, f"{check.expected:,}", f"{check.found:,}", mark)
    console.print(table)
    if result.held:
        console.print("[green]Every order was charged and shipped exactly once.[/]")
    else:
        console.print("[bold red]This should not be: please report it with the seed and the numbers above.[/]")
