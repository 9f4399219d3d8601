"""Memory over a million messages of RabbitMQ, published and handled exactly once by one process: it stays flat.

`shop` publishes batches of 500 and keeps 5,000 ahead at most; `billing` handles them, with its ledger on SQLite. The
resident size of the process is read 200 times, each time as many messages later. The ratio is the mean of the second
tenth by the mean of the last: 1 means that nothing grew. (In the first tenth caches fill.) There is one round, whatever
`--rounds` says. The address of RabbitMQ comes from FAREGATE_TEST_RABBITMQ.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

from _harness import Report, folder, loop, options
from _orders import Order
from _rabbitmq import OURS, address, order, queues, wait_until_it_holds

import faregate as fg

TOGETHER, AHEAD, SAMPLES = 500, 5_000, 200
TARGET = 0.95
MEGABYTE = 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def run(messages: int, sizes: list[int]) -> float:
    """Fills `sizes` while the messages are handled."""
    every = max(1, messages // SAMPLES)
    handled = 0
    moved = asyncio.Event()
    billing = fg.Node("billing")

    @billing.on(Order, source="shop")
    async def bill(order: Order) -> None:
        nonlocal handled
        handled += 1
        if not handled % every:
            sizes.append(resident())
        if not handled % TOGETHER or handled == messages:
            moved.set()

    async def until(count: int) -> None:
        while handled < count:
            moved.clear()
            await moved.wait()

    with folder() as path:
        async with (
            queues(*OURS) as channel,
            fg.Bus(address(), nodes=[fg.Node("shop"), billing], store={"billing": f"sqlite:{path}/store.db"}) as bus,
        ):
            begin = time.perf_counter()
            for first in range(0, messages, TOGETHER):
                await until(first - AHEAD)
                numbers = range(first, min(first + TOGETHER, messages))
                await bus.publish_many([order(number) for number in numbers], node="shop")
            await until(messages)
            await bus.idle()
            took = time.perf_counter() - begin
            if handled != messages or bus.outcomes()["dead"]:
                raise RuntimeError(f"{handled} of {messages} messages were handled, {bus.outcomes()['dead']} are dead")
            await wait_until_it_holds(channel, OURS[0], 0)
    return took


def tenths(sizes: Sequence[int]) -> list[float]:
    """The mean of each tenth, in megabytes."""
    edges = [len(sizes) * tenth // 10 for tenth in range(11)]
    return [mean(sizes[first : max(first + 1, end)]) / MEGABYTE for first, end in pairwise(edges)]


def main() -> None:
    args = options(__doc__, rounds=1, messages=1_000_000)
    report = Report("rabbitmq-memory", args.json)
    sizes: list[int] = []
    seconds = loop(run(args.messages, sizes))
    found = tenths(sizes)
    report.say(f"{args.messages:,} messages in {seconds:,.0f} s")
    rows = [(f"{number}", f"{size:,.1f}") for number, size in enumerate(found, 1)]
    report.table(("tenth of the messages", "MB resident"), rows)
    report.ours = {
        "messages_per_second": args.messages / seconds,
        "second tenth MB": found[1],
        "last tenth MB": found[-1],
        "most MB": max(sizes) / MEGABYTE,
    }
    report.goal("flat", found[1] / found[-1], TARGET)
    report.finish()


if __name__ == "__main__":
    main()
