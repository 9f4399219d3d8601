"""What a message costs with 5,000,000 rows in the ledger, beside 10,000: SQLite, by the store and through the bus.

    store    look up, begin, record 100 ledger rows, commit: what a transaction of 100 messages asks of the ledger.
    bus      the same ledger under a running bus on the journal: handler without effects, all messages published before.

Two kinds of ids, since they decide where in the unique index a row goes:

    time     the first 48 bits are the time of the root, as in all ids that Faregate makes; new ones go to one place.
    hash     all bits are hashed, as for publications with an idempotency key: new ones go anywhere.

The ledger is filled beforehand by SQL, in the order of time (with nothing synced; it is then opened again as ever). The
pages of the index stay in the cache of the system; on a machine without that much free memory, hashed ids cost a
read each. A ratio is the cost of the small ledger by that of the large one: 1 means that size costs nothing.
"""

import argparse
import asyncio
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from _harness import Contestant, Report, Samples, folder, interleave

import faregate as fg
from faregate import ids
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.ports.store import LedgerRow, Store

SMALL = 10_000
BATCH = 100
PUBLISHED_TOGETHER = 1000
TARGETS = {"time": 1 / 1.3, "hash": 1 / 4}
AGES = 10 * 86_400
"""Over how many seconds the rows that are there were handled."""

cpu: dict[str, list[float]] = {}


class Order(fg.Event):
    order_id: str


def make_nodes() -> list[fg.Node]:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(Order, source="shop")
    async def bill(order: Order) -> None:
        pass

    return [shop, billing]


# --- ledgers -----------------------------------------------------------------------------------------------------


async def make_store(path: Path) -> Store:
    store = open_store(f"sqlite:{path}", SystemClock())
    await store.open()
    return store


def fill(path: Path, kind: str, rows: int) -> None:
    """Put rows into an empty ledger as time would have: in order, each with its own id."""

    async def tables() -> None:
        await (await make_store(path)).close()

    asyncio.run(tables())
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("pragma synchronous = off")
    db.execute("pragma cache_size = -400000")
    db.execute("begin")
    # The unique index is made at once from sorted rows, with the text that the store made it with. Its pages are full
    # then. For hashed ids the rest of the rows goes in afterwards, which leaves them as full as they are in life.
    at_once = rows if kind == "time" else rows * 7 // 10
    [index] = db.execute("select sql from sqlite_master where name = 'faregate_ledger_once'").fetchone()
    db.execute("drop index faregate_ledger_once")
    insert = "insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome) values "
    begin = time.time() - AGES
    indexed = False
    for first in range(0, rows, 10_000):
        if first >= at_once and not indexed:
            db.execute(index)
            indexed = True
        count = min(10_000, rows - first)
        noise = os.urandom(16 * count)
        values = []
        for place in range(count):
            at = begin + AGES * (first + place) / rows
            tail = noise[16 * place : 16 * place + 16]
            message_id = int(at * 1000).to_bytes(6, "big") + tail[6:] if kind == "time" else tail
            values.append(("billing", message_id, tail, f"customer-{place % 5000:06}", first + place, at, "handled"))
        db.executemany(insert + "(?, ?, ?, ?, ?, ?, ?)", values)
    if not indexed:
        db.execute(index)
    db.execute("commit")
    db.execute("pragma wal_checkpoint(truncate)")
    db.close()


def fresh(path: Path) -> None:
    """Put a small ledger back to what it was when it was filled: what earlier rounds added would count there."""
    template = path.with_suffix(".filled")
    if template.exists():
        shutil.copyfile(template, path)


def new_id(kind: str) -> str:
    root = ids.root_id() if kind == "time" else ids.idempotent_id("shop", "Order", os.urandom(8).hex())
    return ids.message_id(root, "billing")


@contextmanager
def timed(name: str, messages: int) -> Iterator[list[float]]:
    """Gives a list that holds the seconds afterwards; notes processor time by itself."""
    took: list[float] = []
    begin, used = time.perf_counter(), time.process_time()
    yield took
    took.append(time.perf_counter() - begin)
    cpu.setdefault(name, []).append((time.process_time() - used) / messages)


# --- what is measured --------------------------------------------------------------------------------------------


async def run_store(messages: int, *, name: str, kind: str, path: Path) -> float:
    fresh(path)
    store = await make_store(path)
    now = time.time()
    rows = [LedgerRow(new_id(kind), b"d" * 16, "customer-000042", place, now) for place in range(messages)]
    with timed(name, messages) as took:
        for first in range(0, messages, BATCH):
            part = rows[first : first + BATCH]
            await store.known("billing", [row.message_id for row in part])
            transaction = store.transaction()
            await transaction.begin()
            await transaction.record("billing", part)
            await transaction.commit()
    await store.close()
    return took[0]


async def run_bus(messages: int, *, name: str, kind: str, path: Path) -> float:
    fresh(path)
    folder = path.parent / f"journal-{time.monotonic_ns()}"
    try:
        async with fg.Bus(f"journal:{folder}", nodes=make_nodes(), store=f"sqlite:{path}") as bus:
            await bus.pause("billing", Order)
            orders = [Order(order_id=str(place)) for place in range(messages)]
            for first in range(0, messages, PUBLISHED_TOGETHER):
                if kind == "time":
                    await bus.publish_many(orders[first : first + PUBLISHED_TOGETHER], node="shop")
                else:
                    await publish_hashed(bus, orders[first : first + PUBLISHED_TOGETHER])
            with timed(name, messages) as took:
                await bus.resume("billing", Order)
                await bus.idle()
            if bus.outcomes()["handled"] != messages:
                raise RuntimeError(f"{bus.outcomes()} of {messages} messages")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return took[0]


async def publish_hashed(bus: fg.Bus, orders: Sequence[Order]) -> None:
    keys = [os.urandom(8).hex() for _ in orders]
    pairs = zip(orders, keys, strict=True)
    await asyncio.gather(*(bus.publish(order, node="shop", idempotency_key=key) for order, key in pairs))


# --- all of it ---------------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    """As other benchmarks have them, and `--rows`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="rounds that count (default 7)")
    parser.add_argument("--messages", type=int, default=5_000, help="messages a round (default 5,000)")
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the large ledger (default 5,000,000)")
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    return parser.parse_args()


def main() -> None:
    args = options()
    report = Report("ledger-growth", args.json)
    sizes = {"small": min(SMALL, args.rows), "large": args.rows}
    with folder() as root:
        contestants = []
        for kind in TARGETS:
            for size, rows in sizes.items():
                path = root / f"{kind}-{size}.db"
                begin = time.perf_counter()
                fill(path, kind, rows)
                if size == "small":
                    shutil.copyfile(path, path.with_suffix(".filled"))
                took, size_mb = time.perf_counter() - begin, path.stat().st_size / 1e6
                report.say(f"{rows:,} rows with {kind} ids: {size_mb:,.0f} MB, filled in {took:.0f} s")
                for way, run in (("store", run_store), ("bus", run_bus)):
                    name = f"{kind} {size} {way}"
                    work: Any = partial(run, name=name, kind=kind, path=path)
                    contestants.append(Contestant(name, work, share=1.0 if way == "store" else 0.4))
        samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    show(report, samples, args.rows)


def show(report: Report, samples: Samples, rows: int) -> None:
    table = []
    for kind, target in TARGETS.items():
        for way in ("store", "bus"):
            small, large = f"{kind} small {way}", f"{kind} large {way}"
            times = samples.ratio(small, large)
            used = [median(cpu[name][1:] or cpu[name]) for name in (small, large)]
            table.append(
                (
                    f"{kind} ids, {way}",
                    f"{samples.cost(small) * 1e6:,.1f}",
                    f"{samples.cost(large) * 1e6:,.1f}",
                    f"{times:.2f}",
                    f"{used[1] / used[0]:.2f}",
                )
            )
            report.peers[f"{kind}_{way}_us_small"] = samples.cost(small) * 1e6
            report.ours[f"{kind}_{way}_us"] = samples.cost(large) * 1e6
            report.goal(f"{kind}_{way}", samples.ratio(large, small), target)
    head = ("µs for each message", f"{SMALL:,} rows", f"{rows:,} rows", "times the cost", "by processor time")
    report.table(head, table)
    report.finish()


if __name__ == "__main__":
    main()
