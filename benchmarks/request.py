"""Request and reply on the journal, counted in commits: one bare publish, confirmed, is a commit.

One request after another, from `bus.request` until the answer is there: the command is written and synced, handled, and
answered. The median of a round counts, and beside it the median of bare publishes in the same round: an event that
nobody subscribes to. With a store the handler's unit of work is a commit, too, of SQLite; a bare one of a single row
stands beside it.

Then 1,000 requests at once, for the rate; `memory:` beside it keeps nothing, and shows what the way through the bus
costs by itself.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from time import perf_counter

from _harness import Contestant, Report, folder, interleave, options, processor, timed

import faregate as fg

MOST_COMMITS = 2.0
AT_ONCE = 1000
PATIENCE = 600.0
"""Seconds that a request waits, on however busy a machine."""
SINGLY = 0.1
"""The part of the messages that go one after another."""


class AskPrice(fg.Command):
    sku: str


class PriceFound(fg.Event):
    sku: str
    cents: int


def make_nodes(has_store: bool = False) -> list[fg.Node]:
    schema = "create table if not exists prices(sku text)" if has_store else None
    shop, prices = fg.Node("shop"), fg.Node("prices", schema=schema)

    @prices.on(AskPrice, order=fg.Parallel(100))
    async def find(asked: AskPrice) -> fg.Outgoing:
        return fg.reply(PriceFound(sku=asked.sku, cents=100))

    return [shop, prices]


async def one_by_one(messages: int, *, name: str) -> float:
    """The median latency, times the messages."""
    took = []
    with folder() as path:
        store = f"sqlite:{path}/prices.db" if name in (IN_STORE, WITH_STORE) else None
        async with fg.Bus(f"journal:{path}/journal", nodes=make_nodes(store is not None), store=store) as bus:
            step = partial(STEPS.get(name, ask), bus)
            for number in range(messages):
                started = perf_counter()
                await step(str(number))
                took.append(perf_counter() - started)
    return median(took) * messages


async def ask(bus: fg.Bus, sku: str) -> PriceFound:
    return await bus.request(AskPrice(sku=sku), to="prices", node="shop", reply=PriceFound, timeout=PATIENCE)


async def publish(bus: fg.Bus, sku: str) -> None:
    await bus.publish(PriceFound(sku=sku, cents=100), node="shop")


async def commit_row(bus: fg.Bus, sku: str) -> None:
    store = bus.store_of("prices")
    assert store is not None
    async with store.transaction() as transaction:
        await transaction.execute("insert into prices values (?)", (sku,))


IN_JOURNAL, IN_STORE, WITHOUT_STORE, WITH_STORE = (
    "a commit of the journal",
    "a commit of SQLite",
    "a request, no store",
    "a request, with a store",
)
STEPS: dict[str, Callable[[fg.Bus, str], Awaitable[object]]] = {IN_JOURNAL: publish, IN_STORE: commit_row}


async def at_once(messages: int, *, name: str) -> float:
    with folder() as path:
        url = f"journal:{path}/journal" if name == "journal, at once" else "memory:"
        async with fg.Bus(url, nodes=make_nodes()) as bus:
            with timed(name, messages) as took:
                for first in range(0, messages, AT_ONCE):
                    numbers = range(first, min(first + AT_ONCE, messages))
                    asked = [ask(bus, str(each)) for each in numbers]
                    answers = await asyncio.gather(*asked)
                    if [answer.sku for answer in answers] != [str(each) for each in numbers]:
                        raise RuntimeError("an answer went to somebody else")
    return took[0]


def main() -> None:
    args = options(__doc__, rounds=7, messages=5_000)
    report = Report("request", args.json)
    singly, together = (IN_JOURNAL, WITHOUT_STORE, IN_STORE, WITH_STORE), ("journal, at once", "memory, at once")
    samples = interleave(
        [
            *(Contestant(name, partial(one_by_one, name=name), share=SINGLY) for name in singly),
            *(Contestant(name, partial(at_once, name=name)) for name in together),
        ],
        rounds=args.rounds,
        messages=args.messages,
    )
    commits = 1 / samples.ratio(WITHOUT_STORE, IN_JOURNAL)
    both = samples.cost(IN_JOURNAL) + samples.cost(IN_STORE)
    report.table(
        ("one by one, on the journal", "p50, µs"), [(name, f"{samples.cost(name) * 1e6:,.0f}") for name in singly]
    )
    report.say(
        f"without a store {commits:.2f} commits of the journal; with one {samples.cost(WITH_STORE) / both:.2f} times "
        "what a bare commit of each takes"
    )
    used = {name: processor(name) * 1e6 for name in together}
    report.table(
        (f"{AT_ONCE:,} at once, without a store", "requests/s", "µs of processor"),
        [(name, f"{samples.rate(name):,.0f}", f"{used[name]:,.1f}") for name in together],
    )
    report.ours = {
        "p50 us": samples.cost(WITHOUT_STORE) * 1e6,
        "commits": commits,
        "p50 us, with a store": samples.cost(WITH_STORE) * 1e6,
        "of both commits, with a store": samples.cost(WITH_STORE) / both,
        "at once": samples.rate("journal, at once"),
        "at once, processor us": used["journal, at once"],
    }
    report.peers = {
        "commit us": samples.cost(IN_JOURNAL) * 1e6,
        "commit of SQLite us": samples.cost(IN_STORE) * 1e6,
        "memory, at once": samples.rate("memory, at once"),
    }
    report.goal("two_commits", MOST_COMMITS / commits, 1.0)
    report.finish()


if __name__ == "__main__":
    main()
