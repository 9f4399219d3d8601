"""A run beside a long ledger: what its statements read does not grow with the rows that are there.

Everything that touches a store in a run is played here, without Spark: a driver that begins, a task that handles,
parks, recognises and gives up, the end of the batch with its eviction. PostgreSQL says by itself whether it read a
table from end to end; SQLite is asked for the plan of every statement that it ran, and counts its own steps.
"""

import asyncio
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import psycopg
import pytest

import faregate as fg
from faregate.ports.topology import Reading
from faregate.spark.runs.driver import Driver
from faregate.stores.sqlite.database import SqliteDatabase
from tests.spark.test_run_engine import Noted, Rig

ROWS = 200_000
MANY = int(os.environ.get("FAREGATE_TEST_LEDGER_ROWS", 5_000_000))
"""A hundred million takes 15 GB and some minutes on SQLite."""
MESSAGES = 300
OLD, YOUNG = 1.0e9, 4.0e9
"""When the first row was handled, and one that nobody removes."""

_FILL = {
    "sqlite": """
        with recursive n(i) as (select 1 union all select i + 1 from n where i < {count})
        insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome, sent)
        select {node}, cast(printf('%016x', {first} + i) as blob), randomblob(16), 'k' || (i % 1000), i,
            {at}, 'handled', 0 from n
    """,
    "postgresql": """
        insert into faregate_ledger (node, message_id, digest, key, position, handled_at, outcome, sent)
        select {node}, lpad(to_hex({first} + i), 32, '0')::uuid, decode(md5(i::text), 'hex'), 'k' || (i % 1000), i,
            {at}, 'handled', 0 from generate_series(1, {count}) as i
    """,
}


_READS_ALL = re.compile(r"^SCAN faregate_ledger|^SEARCH faregate_ledger .*\((rowid[<>]\?|node=\?)\)$")
"""A plan of SQLite that reads all rows, all on one side of a number, or all of a node."""


class LongLedger(Rig):
    """A node whose ledger has rows already: old ones of its own, young ones, and those of a node that is gone."""

    def __init__(self, folder: Path, url: str = "") -> None:
        super().__init__(folder, url)
        self.journal = folder / "journal"
        self.filled = 0
        asyncio.run(self._prepare())

        async def fail(noted: Noted) -> None:
            if noted.number % 50 == 7:
                raise fg.Permanent("never")
            if noted.number % 50 == 9:
                raise RuntimeError("not now")

        self.before = fail

    async def _prepare(self) -> None:
        async with fg.Bus(f"journal:{self.journal}", nodes=[fg.Node("author")]):
            pass
        async with self.engine():
            pass  # its tables

    def change(self, sql: str, autocommit: bool = False) -> None:
        if self.url.startswith("sqlite:"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:"))) as connection, connection:
                connection.execute(sql)
        else:
            with psycopg.connect(self.url, autocommit=autocommit) as connection:
                connection.execute(sql)

    def fill(self, count: int) -> None:
        """Grow to this many rows: a node that is gone has half of them, and all of these are old."""
        more, half = count - self.filled, (count - self.filled) // 2
        sql = _FILL[self.url.partition(":")[0]]
        for node, at, first, size in (
            ("'gone'", f"{OLD} + i", self.filled, half),
            ("'reader'", f"{YOUNG} + i * 0.001", self.filled + half, more - half),
        ):
            self.change(sql.format(node=node, at=at, first=first, count=size))
        self.filled = count
        if not self.url.startswith("sqlite:"):
            self.change("vacuum (analyze) faregate_ledger", autocommit=True)

    def age(self, count: int, at: float) -> None:
        """Add a few old rows of its own, for the eviction."""
        sql = _FILL[self.url.partition(":")[0]]
        self.change(sql.format(node="'reader'", at=f"{OLD} + i", first=int(at), count=count))

    def batch(self, number: int) -> dict[str, int]:
        """A run of one batch, from its beginning to its end; its messages come twice."""
        driver = Driver(self.node, self.url, self.journal, 3600.0, 1 << 20)
        try:
            driver.run(driver.open())
            queue = next(iter(self.node.subscriptions.values())).binding(1 << 20).queue
            driver.run(driver.begin("run", {queue: Reading()}, None, 0))
            driver.run(driver.due())
            first = number * MESSAGES
            rows = self.rows(range(first, first + MESSAGES), keys=40, sent_at=YOUNG)

            async def task() -> dict[str, int]:
                async with self.engine() as engine:
                    counts = await engine.run(rows)
                    again = await engine.run(rows)
                    assert again["duplicate"] + again.get("parked", 0) + again.get("dead", 0) == MESSAGES, again
                    await engine.run(self.places.parked_rows(await self.parked(engine)))
                    return counts

            counts = asyncio.run(task())
            driver.run(driver.finish_batch(first + MESSAGES))
        finally:
            driver.close()
        return counts

    def old(self) -> int:
        return int(
            self._query(f"select count(*) from faregate_ledger where node = 'reader' and handled_at < {YOUNG}")[0][0]
        )


@contextmanager
def traced(on_connection: Callable[[sqlite3.Connection], None]) -> Iterator[None]:
    connect = SqliteDatabase._connect

    def connecting(self: SqliteDatabase) -> sqlite3.Connection:
        connection = connect(self)
        on_connection(connection)
        return connection

    with mock.patch.object(SqliteDatabase, "_connect", connecting):
        yield


def check_outcomes(counts: dict[str, int]) -> None:
    assert counts["handled"] and counts["dead"], counts
    # Those that fail are tried later; in a second batch they wait behind the ones of their keys that failed before.
    assert counts.get("redelivered") or counts.get("parked"), counts


def test_no_statement_of_a_run_scans_the_ledger_on_sqlite(tmp_path: Path) -> None:
    rig = LongLedger(tmp_path)
    rig.fill(20_000)
    rig.age(100, 1e15)
    said: set[str] = set()
    with traced(lambda connection: connection.set_trace_callback(said.add)):
        check_outcomes(rig.batch(0))
    assert rig.old() == 0, "nothing was evicted"
    asked = [sql for sql in said if "faregate_ledger" in sql and not sql.lstrip().lower().startswith("create")]
    assert any(sql.startswith("delete from faregate_ledger where seq in") for sql in asked), "the eviction was not seen"
    plans = {}
    with closing(sqlite3.connect(rig.url.removeprefix("sqlite:"))) as connection:
        for sql in asked:
            plans[sql] = [row[3] for row in connection.execute(f"explain query plan {sql}")]
    scans = {sql: plan for sql, plan in plans.items() if any(_READS_ALL.search(step) for step in plan)}
    assert not scans, scans


@pytest.mark.services
def test_no_statement_of_a_run_scans_the_ledger_on_postgres(tmp_path: Path, postgres_url: str) -> None:
    rig = LongLedger(tmp_path, postgres_url)
    rig.fill(ROWS)
    rig.age(100, 1e15)
    before = _reads(rig)
    check_outcomes(rig.batch(0))
    after = _reads(rig)
    assert after["seq_scan"] == before["seq_scan"], "the ledger was read from end to end"
    fetched = after["idx_tup_fetch"] - before["idx_tup_fetch"]
    print(f"rows of the ledger that a batch of {MESSAGES} fetched beside {ROWS:,}: {fetched:,}")
    assert 0 < fetched < 20 * MESSAGES, f"{fetched} rows were read by indexes"
    assert rig.old() == 0, "nothing was evicted"


@pytest.mark.services
def test_a_first_run_reads_no_more_while_its_ledger_grows_on_postgres(tmp_path: Path, postgres_url: str) -> None:
    """A new table has no statistics for a minute. Plans that fit its first rows must fit the others."""
    rig = LongLedger(tmp_path, postgres_url)
    rig.before = None
    rig.change("alter table faregate_ledger set (autovacuum_enabled = off)")
    messages = 20_000

    async def task() -> None:
        async with rig.engine() as engine:
            for first in range(0, messages, 5000):
                counts = await engine.run(rig.rows(range(first, first + 5000), keys=5000, sent_at=YOUNG))
                assert counts["handled"] == 5000, counts

    asyncio.run(task())
    found = _reads(rig)
    assert found["seq_tup_read"] < messages, found
    assert found["idx_tup_fetch"] < 20 * messages, found


def _reads(rig: LongLedger) -> dict[str, int]:
    """What PostgreSQL has read of the ledger; connections tell when they close, and those of the run are closed."""
    names = ("seq_scan", "seq_tup_read", "idx_scan", "idx_tup_fetch")
    with psycopg.connect(rig.url, autocommit=True) as connection:
        connection.execute("select pg_stat_force_next_flush()")
        row = connection.execute(
            f"select {', '.join(names)} from pg_stat_user_tables where relname = 'faregate_ledger' "
            "and schemaname = current_schema()"
        ).fetchone()
    assert row is not None
    return dict(zip(names, row, strict=True))


def _blocks(rig: LongLedger) -> int:
    with psycopg.connect(rig.url, autocommit=True) as connection:
        row = connection.execute(
            "select heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit from pg_statio_user_tables "
            "where relname = 'faregate_ledger' and schemaname = current_schema()"
        ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.full
def test_a_run_takes_no_more_steps_beside_millions_of_rows_on_sqlite(tmp_path: Path) -> None:
    rig = LongLedger(tmp_path)
    taken = []
    for number, count in enumerate((50_000, MANY)):
        rig.fill(count)
        rig.age(100, 1e15 + 1000 * number)
        steps = [0]

        def step(steps: list[int] = steps) -> int:
            steps[0] += 1
            return 0

        with traced(lambda connection, step=step: connection.set_progress_handler(step, 100)):
            check_outcomes(rig.batch(number))
        taken.append(steps[0] * 100)
    print(f"steps of SQLite beside 50,000 rows and {MANY:,}: {taken[0]:,} and {taken[1]:,}")
    assert taken[1] < 1.5 * taken[0]


@pytest.mark.full
@pytest.mark.services
def test_a_run_reads_no_more_blocks_beside_millions_of_rows_on_postgres(tmp_path: Path, postgres_url: str) -> None:
    rig = LongLedger(tmp_path, postgres_url)
    read = []
    for number, count in enumerate((50_000, MANY)):
        rig.fill(count)
        rig.age(100, 1e15 + 1000 * number)
        before = _blocks(rig)
        check_outcomes(rig.batch(number))
        read.append(_blocks(rig) - before)
    print(f"blocks that PostgreSQL reads beside 50,000 rows and {MANY:,}: {read[0]:,} and {read[1]:,}")
    assert read[1] < 2 * read[0]
