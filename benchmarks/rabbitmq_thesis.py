"""The experiments of the SafeBunny thesis (chapter 8) on a cluster of three RabbitMQ nodes, as a report with charts.

Publishing: 128 publications at the same time make an iteration; 8 iterations warm up, 32 count. Each publication is
timed from the call to its confirmation: durable, mandatory, to a quorum queue. The contestants are connected side by
side and take turns, iteration by iteration. What is allocated is looked at in iterations of its own: the most that
Python held at a time above what it held before, by tracemalloc, for one of the 128. (.NET counts every allocated byte;
Python has no such counter.)

Consuming: 20,000 messages of one size wait in a durable queue; prefetch 10, acknowledgements on, an empty handler. The
moment of each is noted, and counted in bins of 100 ms.

    faregate    all defaults, no store: `bus.publish`, an `fg.Event` in the handler.
    aiormq, aio-pika, faststream
                as in rabbitmq-publish and rabbitmq-consume.

The thesis compares SafeBunny with MassTransit, on other hardware: its figures stand in the report for orientation.
Everybody connects to the first node of a cluster that is made for this run and removed afterwards (`--nodes`; with 0 it
is the RabbitMQ at FAREGATE_TEST_RABBITMQ). The report is one HTML file (`--report`).
"""

import argparse
import asyncio
import gc
import os
import platform
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles, stdev
from typing import Any

import rabbitmq_consume as consume
import rabbitmq_publish as publish
from _cluster import cluster
from _harness import Contestant, Report, interleave, loop, options
from _rabbitmq import OURS, fill, queues, wait_until_it_holds

from faregate.charts import Series, lines, page, table

REPORT = Path(__file__).parent / "out" / "rabbitmq-thesis.html"
AT_ONCE, WARM_UP, COUNTED, TRACED = 128, 8, 32, 3
PREFETCH, BIN = 10, 0.1
NAMES = {"faregate": None, "aiormq": None, "aio-pika": "aio_pika", "faststream": "faststream"}
"""Each contestant, and what has to be installed for it."""
PUBLISHING = {
    "faregate": publish.faregate,
    "aiormq": publish.bare,
    "aio-pika": publish.aio_pika,
    "faststream": publish.faststream,
}
CONSUMING = {
    "faregate": consume.faregate,
    "aiormq": consume.bare,
    "aio-pika": consume.aio_pika,
    "faststream": consume.faststream,
}
PUBLISH_TARGETS = {name: publish.TARGETS[f"{name}, 100 in flight"] for name in ("aiormq", "aio-pika", "faststream")}


@dataclass
class Published:
    """What publishing took, contestant by contestant."""

    iterations: list[list[float]] = field(default_factory=list)
    """The seconds of each publication, by iteration."""
    bytes_held: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        return [each for iteration in self.iterations for each in iteration]

    def percentile(self, percent: int) -> float:
        return quantiles(self.seconds, n=100)[percent - 1]


# --- publishing --------------------------------------------------------------------------------------------------


async def publish_all(names: Sequence[str], found: dict[str, Published], *, warm_up: int, counted: int) -> float:
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(queues(publish.QUEUE, *OURS, made=publish.QUEUE))
        ways = {name: await stack.enter_async_context(PUBLISHING[name]()) for name in names}
        for number in range(warm_up + counted):
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                gc.collect()
                took = await asyncio.gather(*(_timed(ways[name]) for _ in range(AT_ONCE)))
                if number >= warm_up:
                    found[name].iterations.append(took)
        for name in names:
            for _ in range(TRACED):
                found[name].bytes_held.append(await _held(ways[name]))
        each = AT_ONCE * (warm_up + counted + TRACED)
        await wait_until_it_holds(channel, OURS[0], each)
        await wait_until_it_holds(channel, publish.QUEUE, each * (len(names) - 1))
    return 0.0


async def _timed(way: publish.Publish) -> float:
    begin = time.perf_counter()
    await way()
    return time.perf_counter() - begin


async def _held(way: publish.Publish) -> float:
    """The most bytes at a time, above what was held before, for one publication."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await asyncio.gather(*(way() for _ in range(AT_ONCE)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (most - before) / AT_ONCE


# --- consuming ---------------------------------------------------------------------------------------------------


class Moments(consume.Counter):
    """Notes when each message came to its handler."""

    def __init__(self, messages: int) -> None:
        super().__init__(messages)
        self.noted: list[float] = []

    def add(self) -> None:
        self.noted.append(time.perf_counter())
        super().add()


async def consume_all(messages: int, *, name: str, runs: list[list[float]]) -> float:
    ours = name == "faregate"
    queue = OURS[0] if ours else consume.QUEUE
    async with queues(consume.QUEUE, *OURS, made=None if ours else consume.QUEUE) as channel:
        if ours:
            await consume.fill_ours(messages, channel)
        else:
            await fill(channel, consume.QUEUE, consume.plain_messages(messages))
        moments = Moments(messages)
        async with CONSUMING[name](moments, PREFETCH):
            await moments.last()
            took = moments.seconds(name)
        await wait_until_it_holds(channel, queue, 0, or_up_to=0 if ours else PREFETCH)
    runs.append([moment - moments.noted[0] for moment in moments.noted])
    return took


def bins(run: Sequence[float]) -> list[int]:
    """How many came in each 100 ms; without the last one, which is not over when the last message comes."""
    counts = [0] * (int(run[-1] / BIN) + 1)
    for moment in run:
        counts[int(moment / BIN)] += 1
    return counts[:-1] or counts


def middle(runs: Sequence[list[float]]) -> list[float]:
    """The run whose length is the median."""
    return sorted(runs, key=lambda run: run[-1])[len(runs) // 2]


# --- the report --------------------------------------------------------------------------------------------------


def sections(published: dict[str, Published], runs: dict[str, list[list[float]]]) -> list[tuple[str, str, str]]:
    shown = {name: middle(found) for name, found in runs.items()}
    over_iterations = [
        Series(name, [(at, mean(iteration) * 1e3) for at, iteration in enumerate(found.iterations, 1)])
        for name, found in published.items()
    ]
    consumed = [
        Series(name, [(run[at], at + 1) for at in range(0, len(run), max(1, len(run) // 200))])
        for name, run in shown.items()
    ]
    per_bin = [Series(name, [(at * BIN, count) for at, count in enumerate(bins(run))]) for name, run in shown.items()]
    return [
        (
            f"Publishing, {AT_ONCE} at the same time (figure 8.1)",
            f"From the call to the confirmation of one publication. Held: the most memory at a time, for one of the "
            f"{AT_ONCE}. In the thesis: SafeBunny 3.931 ms and 4 KB, MassTransit 15.595 ms and 25 KB allocated.",
            table(*publish_table(published)),
        ),
        (
            "Publishing, over the iterations (figure 8.2)",
            f"The mean of the {AT_ONCE} publications of each iteration.",
            lines(over_iterations, title="Publish latency", x_name="iteration", y_name="ms, mean of the iteration"),
        ),
        (
            "Consuming, message by message (figure 8.3)",
            f"All messages wait in the queue; prefetch {PREFETCH}; an empty handler. The run of median length.",
            lines(consumed, title="Messages consumed", x_name="seconds since the first", y_name="messages handled"),
        ),
        (
            "Consuming, in bins of 100 ms (figure 8.4)",
            "How many messages came to their handler within each 100 ms. In the thesis: SafeBunny about 600, "
            "MassTransit about 500.",
            lines(per_bin, title="Messages in 100 ms", x_name="seconds since the first", y_name="messages in 100 ms")
            + table(*consume_table(runs)),
        ),
    ]


def publish_table(published: dict[str, Published]) -> tuple[Sequence[str], list[Sequence[str]]]:
    head = ("publish", "mean ms", "deviation", "p50", "p99", "KB held each")
    rows: list[Sequence[str]] = []
    for name, found in published.items():
        seconds = found.seconds
        figures = (mean(seconds), stdev(seconds), median(seconds), found.percentile(99))
        rows.append((name, *(f"{each * 1e3:.2f}" for each in figures), f"{median(found.bytes_held) / 1024:.1f}"))
    return head, rows


def consume_table(runs: dict[str, list[list[float]]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    head = ("consume", "seconds", "messages in 100 ms, mean", "median", "least", "most")
    rows: list[Sequence[str]] = []
    for name, found in runs.items():
        run = middle(found)
        counts = bins(run)
        figures = (mean(counts), median(counts), min(counts), max(counts))
        rows.append((name, f"{run[-1]:.2f}", *(f"{each:,.0f}" for each in figures)))
    return head, rows


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=3, help="of the cluster (default 3); 0: that of the tests")
    parser.add_argument("--report", type=Path, default=REPORT, help="the HTML file (default benchmarks/out/…)")


def main() -> None:
    args = options(__doc__, rounds=3, messages=20_000, more=more_options)
    report = Report("rabbitmq-thesis", args.json)
    names = [name for name, module in NAMES.items() if module is None or report.has_peer(module)]
    published = {name: Published() for name in names}
    runs: dict[str, list[list[float]]] = {name: [] for name in names}
    with cluster(args.nodes) as told:
        report.say(told)
        warm_up, counted = (WARM_UP, COUNTED) if args.rounds else (0, 1)
        loop(publish_all(names, published, warm_up=warm_up, counted=counted))
        contestants: list[Any] = [Contestant(name, partial(consume_all, name=name, runs=runs[name])) for name in names]
        samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    for found in runs.values():
        del found[: len(found) - max(1, args.rounds)]  # the warm-up
    report.table(*publish_table(published))
    report.table(*consume_table(runs))
    for name in names:
        seconds = published[name].seconds
        figures = report.ours if name == "faregate" else report.peers
        figures |= {
            f"{name}, publish ms": mean(seconds) * 1e3,
            f"{name}, publish p99 ms": published[name].percentile(99) * 1e3,
            f"{name}, KB held": median(published[name].bytes_held) / 1024,
            f"{name}, messages in 100 ms": mean(bins(middle(runs[name]))),
        }
        if name != "faregate":
            ratio = mean(seconds) / mean(published["faregate"].seconds)
            report.goal(f"{name}, publish", ratio, PUBLISH_TARGETS[name])
            report.goal(f"{name}, consume", samples.ratio("faregate", name), consume.TARGETS[name])
    args.report.parent.mkdir(exist_ok=True)
    where = f"{told}. Python {platform.python_version()}, {os.cpu_count()} cores, clients and brokers on one machine"
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    title = "Faregate in the experiments of the SafeBunny thesis"
    args.report.write_text(page(title, f"{where}. {made}.", sections(published, runs)))
    report.say(f"\nthe report: {args.report}")
    report.finish()


if __name__ == "__main__":
    main()
