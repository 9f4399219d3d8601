"""The audit of a journal and its ledger on Spark at 5, 10 and 20 million messages: time grows no faster than they do.

The journal is written through the log itself, the side logs and the ledger by hand, as a bus would have left them: one
recipient, 1,000 keys, every message handled in order. Each size is audited in every round, in the same session, and the
result must hold. What counts is the time for each message at the largest size beside that at the smallest; below
200,000 messages Spark's fixed costs are all there is to see.

Beside them, at the smallest size, the bare limit: the same tasks read and hash the same evidence, and Spark counts it.
"""

import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from _harness import Contestant, Report, folder, interleave, options
from _spark_session import start_spark
from pyspark.sql import SparkSession

from faregate import ids
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, write_json
from faregate.broker.journal.layout import prepare as make_folders
from faregate.broker.journal.log import Log
from faregate.broker.journal.sealing import seal_all
from faregate.broker.journal.settled_columns import RECORD, checksums
from faregate.message import Envelope
from faregate.ports.log import HANDLED
from faregate.ports.queue import Binding
from faregate.ports.topology import Topology
from faregate.spark.jobs import audit_evidence
from faregate.spark.jobs.audit import audit, prepare
from faregate.stores.sqlite import SqliteStore

TARGET = 0.87
"""The time for a message at the largest size is at most 1.15 of that at the smallest."""
BEFORE, FASTER = 60_000, 3
"""Messages a second on two such cores before the audit went by columns, and how many times that is wanted."""
READING = 0.4
"""Adding up, checking the order and Spark's fixed costs take at most one and a half times as long as reading."""
SHARES = (0.25, 0.5, 1.0)
BATCH, KEYS, NODE = 10_000, 1000, "billing"
BODY = b"x" * 20
DIGEST = sha256(BODY).digest()[:16]


def fill(scratch: Path, sizes: Sequence[int]) -> Iterator[tuple[int, Path, str]]:
    """By size, a journal, its side logs and a store, in which every message was handled once. What is written for one
    size is copied, and goes on to the next."""
    growing = scratch / "growing"
    journal = growing / "journal"
    disk, layout = RealDisk(), Layout(journal)
    make_folders(layout, disk)
    topology = Topology()
    topology.add(Binding(node=NODE, type="Order", kind="event", source="shop", remembers="ledger"))
    write_json(layout.topology, disk, topology)
    [queue] = [each.number for each in topology.queues if not each.is_dead_letter_queue]
    make_store(growing / "store.db")
    with closing(sqlite3.connect(growing / "store.db")) as connection:
        connection.executescript("pragma journal_mode = wal; pragma synchronous = off")
        log = Log(layout, disk)
        for begin, size in pairwise([0, *sizes]):
            for start in range(begin, size, BATCH):
                handle(log, connection, range(start, min(size, start + BATCH)))
            log.sync()
            connection.execute("pragma wal_checkpoint(truncate)")
            shutil.copytree(growing, scratch / f"{size}")
            yield size, *settle(scratch / f"{size}", size, queue)
        log.close()
    shutil.rmtree(growing)


def handle(log: Log, connection: sqlite3.Connection, places: range) -> None:
    """Append so many messages, and give each its row in the ledger."""
    message_id = ids.message_ids(NODE)
    publications = [ids.root_id() for _ in places]
    keys = [f"k{place % KEYS}" for place in places]
    append(log, publications, keys)
    handled = time.time()
    connection.executemany(
        "insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome, sent) "
        "values (?, ?, ?, ?, ?, ?, 'handled', 0)",
        [
            (NODE, bytes.fromhex(message_id(each).replace("-", "")), DIGEST, key, place, handled + number * 1e-6)
            for number, (each, key, place) in enumerate(zip(publications, keys, places, strict=True))
        ],
    )
    connection.commit()
    time.sleep(max(0.0, handled + len(places) * 1e-6 - time.time()))


def settle(folder: Path, messages: int, queue: int) -> tuple[Path, str]:
    disk, layout = RealDisk(), Layout(folder / "journal")
    for base, following in pairwise([*layout.segment_bases(disk), messages]):
        layout.settled_log(base).write_bytes(settlements(base, following, queue))
    seal_all(layout, disk)  # as a bus does with full segments
    return layout.root, f"sqlite:{folder / 'store.db'}"


def append(log: Log, publications: list[str], keys: list[str]) -> None:
    rows = [
        Envelope(
            publication_id=publication,
            correlation_id=publication,
            type="Order",
            source="shop",
            body=BODY,
            body_digest=DIGEST,
            recipients=(NODE,),
            key=key,
            sent_at=time.time(),
        )
        for publication, key in zip(publications, keys, strict=True)
    ]
    log.append(rows, [0] * len(rows))


def make_store(path: Path) -> None:
    import asyncio

    from faregate.ports.clock import SystemClock

    async def main() -> None:
        store = SqliteStore(str(path), clock=SystemClock())
        await store.open()
        await store.close()

    asyncio.run(main())


def settlements(first: int, stop: int, queue: int) -> bytes:
    records = np.zeros(stop - first, RECORD)
    records["offset"] = np.arange(first, stop)
    records["queue"], records["outcome"], records["tries"], records["time"] = queue, HANDLED, 1, time.time()
    records["crc"] = checksums(records.view(np.uint8).reshape(len(records), -1))
    return records.tobytes()


def main() -> None:
    args = options(__doc__, rounds=2, messages=20_000_000)
    report = Report("spark-audit", args.json)
    with folder() as scratch:
        settings = {
            "spark.driver.memory": "2g",
            "spark.sql.shuffle.partitions": "16",
            "spark.sql.adaptive.enabled": "true",
            "spark.local.dir": str(scratch / "local"),
        }
        spark = start_spark(scratch, "spark-audit", **settings)
        cases, bare = [], []
        shares = {max(1, int(args.messages * share)): share for share in SHARES}
        begin = time.perf_counter()
        for count, journal, store in fill(scratch, [*shares]):
            report.say(f"{count:,} messages written after {time.perf_counter() - begin:,.0f} s")
            cases.append(Contestant(f"{count:,}", run(spark, journal, store), share=shares[count]))
            if not bare:
                bare.append(Contestant("reading alone", read(spark, journal, store), share=shares[count]))
        samples = interleave([*bare, *cases], rounds=args.rounds, messages=args.messages)
        spark.stop()
    names = [case.name for case in cases]
    rows = [
        (name, f"{samples.cost(name) * int(name.replace(',', '')):,.1f}", f"{samples.rate(name):,.0f}")
        for name in names
    ]
    report.table(("messages", "seconds", "per second"), rows)
    report.say(f"\n  Reading alone, at {names[0]}: {samples.rate('reading alone'):,.0f} per second.")
    report.ours = {f"per_second_{name.replace(',', '')}": samples.rate(name) for name in names}
    report.peers = {"reading_per_second": samples.rate("reading alone")}
    report.goal("largest_to_smallest", samples.ratio(names[-1], names[0]), TARGET)
    report.goal("largest_to_middle", samples.ratio(names[-1], names[len(names) // 2]), TARGET)
    report.goal("times_as_fast_as_before", samples.rate(names[-1]) / BEFORE, FASTER)
    report.goal("smallest_to_reading", samples.ratio(names[0], "reading alone"), READING)
    report.finish()


def run(spark: SparkSession, journal: Path, store: str) -> Any:
    async def once(count: int) -> float:
        begin = time.perf_counter()
        found = audit(spark, journal=journal, store=store, at_rest=True)
        seconds = time.perf_counter() - begin
        assert found.ok, (found.summary, found.findings.take(3))
        assert found.summary["handled"] == count, found.summary
        return seconds

    return once


def read(spark: SparkSession, journal: Path, store: str) -> Any:
    async def once(count: int) -> float:
        begin = time.perf_counter()
        case = prepare(journal, store, at_rest=True)
        stored = audit_evidence.stored(spark, case.databases, (), case.plan.nodes)
        evidence = audit_evidence.deliveries(spark, case.plan).unionByName(stored, allowMissingColumns=True)
        rows = evidence.where("hi is not null").count()
        assert rows == 2 * count, rows
        return time.perf_counter() - begin

    return once


if __name__ == "__main__":
    main()
