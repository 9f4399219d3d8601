"""One instance of a node in a process of its own: python -m tests.rabbitmq.instance BROKER STORE NODE SOURCE PARTITIONS

Every effect is a row; the handler fails now and then, by what is in the message, so that some messages wait for a
later try and others park behind them.
"""

import asyncio
import logging
import signal
import sys
from typing import Any, Literal

import faregate as fg


class Step(fg.Event, key="account"):
    account: str
    number: int
    fails: int = 0
    """How many of its tries fail."""


def make_node(
    name: str,
    source: str,
    partitions: int,
    at: str = "serial",
    *,
    ordered: bool = True,
    dedup: Literal["ledger", "off"] = "ledger",
) -> fg.Node:
    """`at`: the type of the column that numbers the effects."""
    columns = f"at {at}, account text, number int, tries int, publication text"
    node = fg.Node(name, schema=f"create table if not exists effects({columns})")

    order: dict[str, Any] = {"key": "account", "order": fg.ByKey(4), "partitions": partitions} if ordered else {}

    @node.on(
        Step,
        source=source,
        **order,
        dedup=dedup,
        retry=fg.Retry(0),
        redeliver=fg.Redeliver(0.2, 0.2, 0.2),
    )
    async def apply(step: Step, ctx: fg.Context) -> None:
        if ctx.redeliveries < step.fails:
            raise ValueError("not yet")
        ctx.db.write(
            "insert into effects(account, number, tries, publication) values (?, ?, ?, ?)",
            (step.account, step.number, ctx.redeliveries, ctx.publication_id),
        )

    return node


async def main(broker: str, store: str, name: str, source: str, partitions: int) -> None:
    logging.getLogger("faregate").setLevel(logging.ERROR)  # failures are what it is about
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with fg.Bus(broker, nodes=[make_node(name, source, partitions)], store=store):
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    broker, store, name, source, partitions = sys.argv[1:]
    asyncio.run(main(broker, store, name, source, int(partitions)))
