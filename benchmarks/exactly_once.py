"""Exactly-once effects on the journal and a store, beside loops written by hand, Taskiq with SQLAlchemy, and DBOS.

For each message the handler inserts one business row, with the message's id, and publishes one event, which nobody
subscribes to: so it is stored, dispatched to the journal and synced, and no second handler is measured. All messages
were published before, with the subscription paused; the time runs from `resume` until `bus.idle()`.

    ledger, tokens, off   the modes of `dedup` on SQLite, the handler using `ctx.db.execute`.
                          (In mode tokens an event without a subscriber ends in the outbox and is not sent.)
    floor                 by hand, in batches, all that a unit of work must do: decode, look up, handler and its
                          statement, ids, sealing, ledger and outbox rows, commit, settle, a synced frame of a journal,
                          removal with the next commit. With 256 messages for each commit, which is what the target
                          is about, and with as many as `ledger` had when it ran last.
    bare loop             the business row by itself, ledger and outbox rows by `executemany`, then COMMIT: into the
                          same tables, on the same kind of file (write-ahead log, synchronous=FULL), with as many
                          messages for each commit as `ledger`. Its rows are made before: it does nothing else.

    ledger, PostgreSQL    the handler says `ctx.db.write`, where there is such a thing, and `execute` where not.
    awaited loop          the bare loop on PostgreSQL, with psycopg: it awaits each business row. With 100 messages for
                          each commit too, for information.
    best loop             asyncpg, `executemany` for all three tables. With 256 too, for information.

    taskiq, dbos          what people use for this; `_effects_peers.py` says how they are set up.

Latency is that of a single message on a bus at rest: from the call of `publish` until the event that its handler
published arrives at a handler of another node. It holds two syncs of the journal and a commit.

The address of PostgreSQL comes from FAREGATE_TEST_POSTGRES; without one, only SQLite is measured. Processor time is
shown beside, since it suffers less from others on the machine; that of PostgreSQL's own process is not in it.
"""

import asyncio
import time
from functools import partial
from statistics import median, quantiles
from typing import Any

from _effects import INSERT, INVOICES, POSTGRES, place, rows_per_commit
from _effects_by_hand import run_awaited_postgres, run_bare_sqlite, run_best_postgres, run_floor
from _effects_peers import run_dbos, run_taskiq
from _harness import Contestant, Report, folder, interleave, loop, options, processor, timed
from _orders import Billed, Order, make_order

import faregate as fg
from faregate.node.subscription import DedupMode
from faregate.ports.store import Store, Transaction

GOALS = {
    "sqlite_to_floor": ("ledger", "floor, 256 a commit", 0.6),
    "sqlite_to_bare": ("ledger", "bare loop", 0.25),
    "sqlite_to_taskiq": ("ledger", "taskiq", 2.0),
    "postgres_to_awaited": ("ledger, PostgreSQL", "awaited loop, PostgreSQL", 3.0),
    "postgres_to_best": ("ledger, PostgreSQL", "best loop, PostgreSQL", 0.35),
    "postgres_to_taskiq": ("ledger, PostgreSQL", "taskiq, PostgreSQL", 2.0),
    "postgres_to_dbos": ("ledger, PostgreSQL", "dbos, PostgreSQL", 20.0),
}
"""Who is compared with whom, and the least that the ratio has to be."""
OURS = ("ledger", "tokens", "off")
PUBLISHED_TOGETHER = 1000
FLOOR_COMMIT = 256
POSTGRES_SHARE, TASKIQ_SHARE, DBOS_SHARE = 0.1, 0.05, 0.01
LATENCIES = 300
"""So many single messages at most on each store, a tenth of `--messages` where that is less."""


async def bill(order: Order, ctx: fg.Context) -> Billed:
    await ctx.db.execute(INSERT, (order.order_id, ctx.message_id, order.total))
    return Billed(order_id=order.order_id, customer=order.customer, total=order.total, note=order.note)


async def bill_writing(order: Order, ctx: fg.Context) -> Billed:
    write = getattr(ctx.db, "write", None)
    if write is None:
        return await bill(order, ctx)
    write(INSERT, (order.order_id, ctx.message_id, order.total))
    return Billed(order_id=order.order_id, customer=order.customer, total=order.total, note=order.note)


def make_nodes(dedup: DedupMode, *, writing: bool) -> list[fg.Node]:
    shop, billing = fg.Node("shop"), fg.Node("billing", schema=INVOICES)
    handler = bill_writing if writing else bill
    billing.on(Order, source="shop", key="customer", dedup=dedup, name="bill")(handler)
    return [shop, billing]


class Commits:
    """Counts the commits of a store that carry outgoing messages: one for each transaction of handlers."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        self._make = store.transaction
        store.transaction = self._transaction  # type: ignore[method-assign]

    def _transaction(self) -> Transaction:
        transaction = self._make()
        send = transaction.send

        async def counted(rows: Any) -> list[int]:
            self.count += 1
            return await send(rows)

        transaction.send = counted  # type: ignore[method-assign]
        return transaction


# --- ours --------------------------------------------------------------------------------------------------------


async def run_bus(messages: int, *, name: str, kind: str, dedup: DedupMode, writing: bool) -> float:
    orders = [make_order(number) for number in range(messages)]
    with folder() as path:
        async with (
            place(kind, path) as url,
            fg.Bus(f"journal:{path}/journal", nodes=make_nodes(dedup, writing=writing), store=url) as bus,
        ):
            [store] = bus.stores.values()
            await bus.pause("billing", Order)
            for first in range(0, messages, PUBLISHED_TOGETHER):
                await bus.publish_many(orders[first : first + PUBLISHED_TOGETHER], node="shop")
            while await store.undispatched(1):  # noqa: ASYNC110 - mode tokens publishes by way of the outbox
                await asyncio.sleep(0.05)
            commits = Commits(store)
            with timed(name, messages) as took:
                await bus.resume("billing", Order)
                await bus.idle()
            if dedup == "ledger" and writing == (kind == "postgres"):
                rows_per_commit[kind].append(messages / commits.count)
            await check(store, messages)
    return took[0]


async def check(store: Store, messages: int) -> None:
    """Every message had its effect, and nothing waits to be sent."""
    transaction = store.transaction()
    await transaction.begin()
    [invoices] = await transaction.fetchone("select count(*) from invoices") or (0,)
    [waiting] = await transaction.fetchone("select count(*) from faregate_outbox") or (0,)
    await transaction.roll_back()
    if (invoices, waiting) != (messages, 0):
        raise RuntimeError(f"{invoices} of {messages} messages had their effect, and {waiting} wait in the outbox")


async def measure_latencies(count: int, *, kind: str) -> list[float]:
    """Seconds from the publication of an order until its `Billed` is handled, one order after another."""
    nodes = make_nodes("ledger", writing=kind == "postgres")
    archive = fg.Node("archive")
    arrived = asyncio.Event()

    @archive.on(Billed, source="billing")
    async def note(billed: Billed) -> None:
        arrived.set()

    found = []
    with folder() as path:
        async with (
            place(kind, path) as url,
            fg.Bus(f"journal:{path}/journal", nodes=[*nodes, archive], store={"billing": url}) as bus,
        ):
            for number in range(count):
                order = make_order(number)
                begin = time.perf_counter()
                await bus.publish(order, node="shop")
                await arrived.wait()
                found.append(time.perf_counter() - begin)
                arrived.clear()
                await bus.idle()
    return found


# --- all of it ---------------------------------------------------------------------------------------------------


def bus_contestant(name: str, kind: str, dedup: DedupMode, part: float, *, writing: bool = False) -> Contestant:
    return Contestant(name, partial(run_bus, name=name, kind=kind, dedup=dedup, writing=writing), share=part)


def contestant(name: str, run: Any, part: float = 1.0, **options: Any) -> Contestant:
    return Contestant(name, partial(run, name=name, **options), share=part)


def on_sqlite(report: Report) -> list[Contestant]:
    found = [
        bus_contestant("ledger", "sqlite", "ledger", 1.0),
        contestant("floor, 256 a commit", run_floor, size=FLOOR_COMMIT),
        contestant("floor, as many a commit", run_floor, size=None),
        contestant("bare loop", run_bare_sqlite),
        bus_contestant("tokens", "sqlite", "tokens", 0.5),
        bus_contestant("off", "sqlite", "off", 0.5),
    ]
    if report.has_peer("taskiq") and report.has_peer("aiosqlite"):
        found.append(contestant("taskiq", run_taskiq, TASKIQ_SHARE, kind="sqlite"))
    return found


def on_postgres(report: Report) -> list[Contestant]:
    if POSTGRES is None:
        report.say("PostgreSQL is not measured: FAREGATE_TEST_POSTGRES names none")
        return []
    found = [
        bus_contestant("ledger, PostgreSQL", "postgres", "ledger", POSTGRES_SHARE, writing=True),
        bus_contestant("ledger, PostgreSQL, execute", "postgres", "ledger", POSTGRES_SHARE),
        contestant("awaited loop, PostgreSQL", run_awaited_postgres, POSTGRES_SHARE, size=None),
        contestant("awaited loop, PostgreSQL, 100 a commit", run_awaited_postgres, POSTGRES_SHARE, size=100),
    ]
    has_asyncpg = report.has_peer("asyncpg")
    if has_asyncpg:
        found.append(contestant("best loop, PostgreSQL", run_best_postgres, POSTGRES_SHARE, size=None))
        found.append(contestant("best loop, PostgreSQL, 256 a commit", run_best_postgres, POSTGRES_SHARE, size=256))
    if has_asyncpg and report.has_peer("taskiq"):
        found.append(contestant("taskiq, PostgreSQL", run_taskiq, TASKIQ_SHARE, kind="postgres"))
    if report.has_peer("dbos"):
        found.append(contestant("dbos, PostgreSQL", run_dbos, DBOS_SHARE))
    return found


def report_latencies(report: Report, messages: int) -> None:
    rows = []
    for kind in ("sqlite", "postgres") if POSTGRES is not None else ("sqlite",):
        found = loop(measure_latencies(max(3, min(LATENCIES, messages // 10)), kind=kind))
        at = quantiles(found[1:], n=100, method="inclusive")
        rows.append((kind, f"{at[49] * 1e3:.2f}", f"{at[98] * 1e3:.2f}"))
        report.ours |= {f"{kind} p50 ms": at[49] * 1e3, f"{kind} p99 ms": at[98] * 1e3}
    report.table(("latency of a single message, ms", "p50", "p99"), rows)


def main() -> None:
    args = options(__doc__, rounds=7, messages=20_000)
    report = Report("exactly-once", args.json)
    contestants = on_sqlite(report) + on_postgres(report)
    samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    names = [each.name for each in contestants]
    used = {name: processor(name) for name in names}
    report.table(
        ("one insert and one event for each message", "messages/s", "µs each", "µs of processor"),
        [
            (name, f"{samples.rate(name):,.0f}", f"{samples.cost(name) * 1e6:,.1f}", f"{used[name] * 1e6:,.1f}")
            for name in names
        ],
    )
    report.say()
    for kind, sizes in rows_per_commit.items():
        if sizes:
            report.say(f"messages for each commit of ledger on {kind}: {median(sizes[1:] or sizes):.0f}")
    for name in names:
        figures = report.ours if name.startswith(OURS) else report.peers
        figures |= {name: samples.rate(name), f"{name}, processor us": used[name] * 1e6}
    by_processor = used["floor, 256 a commit"] / used["ledger"]
    report.say(f"by processor time alone, ledger is {by_processor:.2f} of the floor with 256 a commit")
    report.ours["sqlite_to_floor, by processor"] = by_processor
    report_latencies(report, args.messages)
    for goal, (ours, other, target) in GOALS.items():
        if other in names:
            report.goal(goal, samples.ratio(ours, other), target)
    report.finish()


if __name__ == "__main__":
    main()
