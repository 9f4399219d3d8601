"""Publishing to a journal, beside a bare loop that builds and syncs the same frames, SQLite, and a bare fdatasync.

What is measured, per message, with 200-byte bodies:

    bare loop       envelopes made before; builds the Arrow frame of 1,000, its CRC, writes and syncs it. Nothing else.
    publish_many    `bus.publish_many` of 1,000 at a time: ids, encoding, digest, routing, frame, sync, and into the
                    queue of one (paused) subscription.
    1,000 in flight `bus.publish` from 1,000 tasks, each awaiting its own confirmation.
    SQLite          the same bus and the same 1,000 awaits, on a transport that inserts the same rows into a table in
                    WAL mode with synchronous=FULL, in a thread that commits whatever arrived meanwhile.
    one by one      `bus.publish`, awaited one after the other, beside writing and syncing as many bytes.
"""

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from _harness import Contestant, Report, folder, interleave, options
from _orders import Order, make_order

import faregate as fg
from faregate import ids
from faregate.broker.journal import frame as frames
from faregate.codec import CODECS
from faregate.columns import to_batch, write_batch
from faregate.message import Envelope
from faregate.transports.memory import MemoryTransport

BATCH = 1000
IN_FLIGHT = 1000
MANY_TARGET, SINGLE_TARGET, SQLITE_TARGET, SYNC_TARGET = 0.4, 0.12, 1.1, 0.4


shop = fg.Node("shop")
billing = fg.Node("billing")


@billing.on(Order, source="shop")
async def bill(order: Order) -> None:
    pass


def envelopes(count: int) -> list[Envelope]:
    body = CODECS["json"].encoder(Order)(make_order(1))
    made = []
    for _ in range(count):
        root = ids.root_id()
        made.append(
            Envelope(
                publication_id=root,
                type="Order",
                source="shop",
                body=body[:-1] + b"}",  # bytes of their own, as they are in life
                recipients=("billing",),
                correlation_id=root,
                sent_at=1.0,
                body_digest=b"d" * 16,
            )
        )
    return made


async def run_bare(messages: int) -> float:
    rows = envelopes(BATCH)
    with folder() as path:
        descriptor = os.open(path / "bare", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(descriptor, 0, 64 << 20)
        os.fsync(descriptor)
        position = previous = 0
        begin = time.perf_counter()
        for commit in range(messages // BATCH):
            body = write_batch(to_batch(rows, [0] * BATCH, range(commit * BATCH, (commit + 1) * BATCH), commit))
            header, padding, previous = frames.pack_frame(
                body,
                kind=1,
                previous=previous,
                rows=BATCH,
                commit=commit,
                base=commit * BATCH,
                time=commit,
                segment_id=1,
            )
            position += os.pwritev(descriptor, (header, body, padding), position)
            os.fdatasync(descriptor)
        seconds = time.perf_counter() - begin
        os.close(descriptor)
    return seconds


@contextmanager
def journal_bus() -> Iterator[fg.Bus]:
    with folder() as path:
        yield fg.Bus(f"journal:{path}/journal", nodes=[shop, billing])


async def run_many(messages: int) -> float:
    orders = [make_order(number) for number in range(messages)]
    with journal_bus() as made:
        async with made as bus:
            await bus.pause("billing", Order)
            await bus.publish_many(orders[:BATCH], node="shop")
            begin = time.perf_counter()
            for first in range(0, messages, BATCH):
                await bus.publish_many(orders[first : first + BATCH], node="shop")
            return time.perf_counter() - begin


async def publish_in_flight(bus: fg.Bus, messages: int) -> float:
    orders = iter([make_order(number) for number in range(messages)])

    async def publisher() -> None:
        for order in orders:
            await bus.publish(order, node="shop")

    await bus.publish(make_order(0), node="shop")
    begin = time.perf_counter()
    await asyncio.gather(*(publisher() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - begin


async def run_single(messages: int) -> float:
    with journal_bus() as made:
        async with made as bus:
            await bus.pause("billing", Order)
            return await publish_in_flight(bus, messages)


class SqliteTransport(MemoryTransport):
    """Publishing is confirmed when a thread has committed it to a table; the rest is the memory transport."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        routes = self.broker.routes(envelopes)
        done = self._loop.create_future()
        self._items.put((envelopes, done))
        await done
        for envelope, route in zip(envelopes, routes, strict=True):
            for queue in route.queues:
                queue.enqueue(envelope)

    async def close(self) -> None:
        self._items.put(None)
        await asyncio.to_thread(self._thread.join)
        await super().close()

    def _run(self) -> None:
        db = sqlite3.connect(self._path)
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = full")
        db.execute(
            "create table log(offset integer primary key, publication_id text, type text, kind text, source text, "
            "correlation_id text, sent_at real, body_digest blob, recipients text, payload blob)"
        )
        while True:
            group = [self._items.get()]
            while len(group) < 10_000:
                try:
                    group.append(self._items.get_nowait())
                except Empty:
                    break
            ending = None in group
            group = [item for item in group if item is not None]
            db.executemany(
                "insert into log(publication_id, type, kind, source, correlation_id, sent_at, body_digest, recipients, "
                "payload) values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (e.publication_id, e.type, e.kind, e.source, e.correlation_id, e.sent_at, e.body_digest,
                     ",".join(e.recipients), e.body)
                    for rows, _ in group
                    for e in rows
                ],
            )  # fmt: skip
            db.commit()
            self._loop.call_soon_threadsafe(self._confirm, [done for _, done in group])
            if ending:
                db.close()
                return

    def _confirm(self, futures: list[Any]) -> None:
        for future in futures:
            future.set_result(None)


async def run_sqlite(messages: int) -> float:
    with folder() as path:
        async with fg.Bus(SqliteTransport(path / "log.db"), nodes=[shop, billing]) as bus:
            await bus.pause("billing", Order)
            return await publish_in_flight(bus, messages)


async def run_one_by_one(messages: int) -> float:
    with journal_bus() as made:
        async with made as bus:
            await bus.pause("billing", Order)
            await bus.publish(make_order(0), node="shop")
            begin = time.perf_counter()
            for number in range(messages):
                await bus.publish(make_order(number), node="shop")
            return time.perf_counter() - begin


async def run_sync(messages: int) -> float:
    with folder() as path:
        descriptor = os.open(path / "bare", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(descriptor, 0, 64 << 20)
        os.fsync(descriptor)
        data = b"x" * 2600
        begin = time.perf_counter()
        for number in range(messages):
            os.pwrite(descriptor, data, number * len(data))
            os.fdatasync(descriptor)
        seconds = time.perf_counter() - begin
        os.close(descriptor)
    return seconds


def main() -> None:
    args = options(__doc__, rounds=7, messages=50_000)
    report = Report("journal-write", args.json)
    samples = interleave(
        [
            Contestant("bare", run_bare),
            Contestant("many", run_many),
            Contestant("single", run_single, share=0.4),
            Contestant("sqlite", run_sqlite, share=0.4),
            Contestant("one", run_one_by_one, share=0.005),
            Contestant("sync", run_sync, share=0.005),
        ],
        rounds=args.rounds,
        messages=args.messages // BATCH * BATCH,
    )
    labels = {
        "bare": "bare loop: build and sync frames of 1,000",
        "many": "publish_many, 1,000 at a time",
        "single": "publish, 1,000 in flight",
        "sqlite": "the same awaits on a SQLite table (WAL)",
        "one": "publish, one by one",
        "sync": "bare write and fdatasync",
    }
    rows = [(label, f"{samples.rate(name):,.0f}", f"{samples.cost(name) * 1e6:,.1f}") for name, label in labels.items()]
    report.table(("200-byte messages", "per second", "µs each"), rows)
    report.ours = {name: samples.rate(name) for name in ("many", "single", "one")}
    report.peers = {name: samples.rate(name) for name in ("bare", "sqlite", "sync")}
    report.goal("many_to_bare", samples.ratio("many", "bare"), MANY_TARGET)
    report.goal("single_to_bare", samples.ratio("single", "bare"), SINGLE_TARGET)
    report.goal("single_to_sqlite", samples.ratio("single", "sqlite"), SQLITE_TARGET)
    report.goal("one_to_fdatasync", samples.ratio("one", "sync"), SYNC_TARGET)
    report.finish()


if __name__ == "__main__":
    main()
