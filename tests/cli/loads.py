"""What `faregate bench` is pointed at in the tests, and functions that make messages for it."""

import os
from pathlib import Path
from typing import Any

import faregate as fg


class Placed(fg.Event, key="number"):
    number: int
    text: str = ""


class Check(fg.Command, wire="check"):
    number: int


class Checked(fg.Event):
    number: int


shop = fg.Node("shop", publishes=[Placed])
billing = fg.Node("billing", schema="create table if not exists bills(number integer not null)")
stock = fg.Node("stock")


@billing.on(Placed)
async def bill(placed: Placed, ctx: fg.Context) -> fg.Outgoing:
    """Leaves a trace outside of its store, if somebody asks for one."""
    if trace := os.environ.get("BENCH_TRACE"):
        with Path(trace).open("a") as file:
            file.write(f"{placed.number} {placed.text}\n")
    ctx.db.write("insert into bills(number) values (?)", (placed.number,))
    return fg.send(Check(number=placed.number), to="stock")


@stock.on(Check, retry=None, redeliver=None)
async def check(command: Check) -> Checked:
    if command.number == 13:
        raise fg.Permanent("no thirteen")
    return Checked(number=command.number)


bus = fg.Bus("journal:/nowhere/real", nodes=[shop, billing, stock], store="sqlite:/nowhere/real.db")
"""Nobody can open these: a bench must not try to."""

BROKER = os.environ.get("FAREGATE_TEST_RABBITMQ", "memory:")
alone = fg.Bus("memory:", nodes=[stock])


def by_number(number: int) -> Placed:
    return Placed(number=number, text=f"number {number}")


def as_fields() -> dict[str, Any]:
    return {"number": 7}


def unlucky(number: int) -> Check:
    return Check(number=13)


def wrong(number: int) -> Any:
    return {"number": "many"} if number == 3 else 17 if number > 3 else Placed(number=number)


def broken() -> Any:
    raise LookupError("no more")
