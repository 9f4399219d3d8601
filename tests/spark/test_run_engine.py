"""The engine of a worker process without Spark: zombies, failing tasks, crashes around the commit, order, counts.

An attempt of a task is `Engine.run` on the partition's rows; a crash is a fault point that raises.
"""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pyarrow as pa
import pytest

import faregate as fg
from faregate.errors import CommitUnknown, StoreUnavailable
from faregate.message import Envelope
from faregate.ports import faults
from faregate.ports.store import DeadFilter, Parked
from faregate.ports.tokens import Token
from faregate.spark.runs import tasks as run_tasks
from faregate.spark.runs.engine import Engine
from faregate.spark.runs.rows import WORK, Places
from faregate.spark.runs.run import Run
from faregate.spark.runs.spec import RunSpec, provide
from faregate.spark.runs.tasks import handle_partition


class Noted(fg.Event):
    topic: str
    number: int


class Told(fg.Event):
    number: int


SCHEMA = "create table if not exists notes(seq {}, topic text, number integer, id text)"
_runs = iter(range(1_000_000))
Hook = Callable[[Noted], Awaitable[None]]


class Rig:
    """A node, its store, and messages of a log."""

    def __init__(self, folder: Path, url: str = "", **options: Any) -> None:
        self.folder = folder
        self.url = url or f"sqlite:{folder / 'notes.db'}"
        self.schema = SCHEMA.format("bigserial" if url.startswith("postgres") else "integer primary key autoincrement")
        self.node = fg.Node("reader", schema=self.schema)
        self.before: Hook | None = None
        given = {"key": "topic", "retry": fg.Retry(0), "redeliver": fg.Redeliver(0.05, 0.05), **options}

        @self.node.on(Noted, source="author", **given)
        async def note(noted: Noted, ctx: fg.Context) -> Told:
            if self.before is not None:
                await self.before(noted)
            await ctx.db.execute(
                "insert into notes(topic, number, id) values (?, ?, ?)", (noted.topic, noted.number, ctx.message_id)
            )
            return Told(number=noted.number)

        self.spec = RunSpec(
            id=f"run-{next(_runs)}",
            node_name="reader",
            target="nowhere:reader",
            folder=None,
            store=self.url,
            codec="json",
            body_limit=1 << 20,
            tokens=self.url,
        )
        provide(self.spec, self.node)
        self.places = Places(self.spec)

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[Engine]:
        """A worker process of its own."""
        engine = Engine(self.spec)
        await engine.open()
        await engine.store.apply_schema(self.schema)
        try:
            yield engine
        finally:
            await engine.close()

    def rows(self, numbers: range, keys: int = 2, **more: Any) -> list[tuple[Any, ...]]:
        return [self._row(number, f"t{number % keys}", **more) for number in numbers]

    def _row(self, number: int, topic: str, **more: Any) -> tuple[Any, ...]:
        appended_at = more.pop("appended_at", 0.0)
        body = f'{{"topic":"{topic}","number":{number}}}'.encode()
        fields: dict[str, Any] = {"type": "Noted", "source": "author", "body": body, "recipients": ("reader",), **more}
        envelope = Envelope(publication_id=f"00000000-0000-7000-8000-{number:012d}", **fields)
        assert self.places.handler(envelope) == 0
        return self.places.row(0, envelope, number, appended_at, None)

    async def parked(self, engine: Engine, at: float = 1e12) -> list[Parked]:
        transaction = engine.store.transaction()
        await transaction.begin()
        try:
            return await transaction.parked(engine.node.name, at, 1000)
        finally:
            await transaction.roll_back()

    async def due_rows(self, engine: Engine) -> list[tuple[Any, ...]]:
        return self.places.parked_rows(await self.parked(engine))

    def _query(self, sql: str) -> list[tuple[Any, ...]]:
        """By the database's own driver."""
        if self.url.startswith("sqlite:"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:"))) as connection:
                return connection.execute(sql).fetchall()
        with psycopg.connect(self.url) as server:
            return server.execute(sql).fetchall()

    def notes(self) -> list[tuple[Any, ...]]:
        return self._query("select topic, number, id from notes order by seq")

    def outbox(self) -> int:
        return int(self._query("select count(*) from faregate_outbox")[0][0])

    def check(self, numbers: Any) -> None:
        found = self.notes()
        assert sorted(number for _, number, _ in found) == sorted(numbers), found
        assert self.outbox() == len(found)
        for topic in {topic for topic, _, _ in found}:
            own = [number for each, number, _ in found if each == topic]
            assert own == sorted(own), f"{topic} is out of order: {own}"


@pytest.fixture
def rig(tmp_path: Path, store_url: str) -> Rig:
    return Rig(tmp_path, store_url)


@pytest.fixture(autouse=True)
def no_hook() -> Any:
    yield
    faults.hook = None


def crash_at(point: str, after: int = 0) -> None:
    """The task dies at the point, after it was passed so often."""
    passed = 0

    async def hook(name: str) -> None:
        nonlocal passed
        if name == point:
            passed += 1
            if passed > after:
                raise faults.Crash

    faults.hook = hook


@pytest.mark.parametrize(
    "point", ["bus.before-handler", "bus.after-handler", "unit.before-commit", "unit.after-commit"]
)
@pytest.mark.parametrize("after", [0, 1])
async def test_a_task_that_fails_before_in_and_after_the_commit_is_run_again(rig: Rig, point: str, after: int) -> None:
    rows = rig.rows(range(6))
    crash_at(point, after)
    with pytest.raises(faults.Crash):
        async with rig.engine() as engine:
            await engine.run(rows)
    faults.hook = None
    async with rig.engine() as engine:
        counts = await engine.run(rows)
    rig.check(range(6))
    assert counts.get("handled", 0) + counts.get("duplicate", 0) == 6 and counts["last"] == 5


@pytest.mark.parametrize("dedup", ["ledger", "off"])
async def test_a_zombie_overlaps_its_retry_and_nothing_doubles_or_overtakes(
    tmp_path: Path, store_url: str, dedup: str
) -> None:
    rig = Rig(tmp_path, store_url, dedup=dedup)
    rows = rig.rows(range(10), keys=1)
    stalled, go_on = asyncio.Event(), asyncio.Event()

    async def stall(noted: Noted) -> None:
        if noted.number == 3 and not stalled.is_set():
            stalled.set()
            await go_on.wait()

    rig.before = stall
    async with rig.engine() as zombie, rig.engine() as retry:
        living_on = asyncio.create_task(zombie.run(rows))
        await stalled.wait()
        await retry.run(rows)
        rig.check(range(10))
        go_on.set()
        counts = await living_on
    rig.check(range(10))
    assert counts["duplicate"] >= 7


@pytest.mark.services
@pytest.mark.services
async def test_on_postgres_a_zombie_inside_its_transaction_holds_its_bucket(tmp_path: Path, postgres_url: str) -> None:
    rig = Rig(tmp_path, postgres_url, dedup="off")
    rows = rig.rows(range(6), keys=1)
    stalled, go_on = asyncio.Event(), asyncio.Event()

    async def hook(point: str) -> None:
        if point == "unit.before-commit" and not stalled.is_set():
            stalled.set()
            await go_on.wait()

    faults.hook = hook
    async with rig.engine() as zombie, rig.engine() as retry:
        living_on = asyncio.create_task(zombie.run(rows))
        await stalled.wait()
        again = asyncio.create_task(retry.run(rows))
        done, _ = await asyncio.wait({again}, timeout=0.3)
        assert not done, "it waits for the zombie's commit, of which it cannot know what it will be"
        go_on.set()
        await asyncio.gather(living_on, again)
    rig.check(range(6))


async def test_a_zombie_cannot_park_what_its_retry_has_handled(rig: Rig) -> None:
    rows = rig.rows(range(4), keys=1)
    stalled, go_on = asyncio.Event(), asyncio.Event()

    async def stall(noted: Noted) -> None:
        if noted.number == 1 and not stalled.is_set():
            stalled.set()
            await go_on.wait()
            raise RuntimeError("the zombie fails")

    rig.before = stall
    async with rig.engine() as zombie, rig.engine() as retry:
        living_on = asyncio.create_task(zombie.run(rows))
        await stalled.wait()
        await retry.run(rows)
        go_on.set()
        await living_on
        assert await rig.parked(retry) == []
    rig.check(range(4))


async def test_a_failed_message_parks_and_later_ones_of_its_key_park_behind_it(rig: Rig) -> None:
    async def fail(noted: Noted) -> None:
        if noted.number == 2:
            raise RuntimeError("not now")

    rig.before = fail
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(8))) == {"handled": 5, "redelivered": 1, "parked": 2, "last": 7}
        rig.check([0, 1, 3, 5, 7])
        # The batch runs again: what is parked stays parked, and its tries are not used up.
        assert await engine.run(rig.rows(range(8))) == {"duplicate": 5, "parked": 3, "last": 7}
        # A later batch: what follows on the key parks behind as well.
        assert await engine.run(rig.rows(range(8, 10))) == {"handled": 1, "parked": 1, "last": 9}
        parked = [(each.position, each.redeliveries) for each in await rig.parked(engine)]
        assert parked == [(2, 1), (4, 0), (6, 0), (8, 0)]
        # Its time comes and it fails once more: all of them wait on.
        counts = await engine.run(await rig.due_rows(engine))
        assert counts == {"redelivered": 1, "parked": 3, "last": 8}
        rig.before = None
        counts = await engine.run(await rig.due_rows(engine))
        assert counts == {"handled": 4, "last": 8}
        assert await rig.parked(engine) == []
    rig.check(range(10))


async def test_redeliveries_are_used_up_and_the_rest_of_the_key_goes_on(rig: Rig) -> None:
    async def fail(noted: Noted) -> None:
        if noted.number == 0:
            raise RuntimeError("never")

    rig.before = fail
    async with rig.engine() as engine:
        await engine.run(rig.rows(range(4)))
        await engine.run(await rig.due_rows(engine))
        counts = await engine.run(await rig.due_rows(engine))
        assert counts == {"dead": 1, "handled": 1, "last": 2}
        assert await rig.parked(engine) == []
    rig.check([1, 2, 3])


async def test_without_strict_order_later_messages_pass(tmp_path: Path) -> None:
    rig = Rig(tmp_path, order=fg.ByKey(strict=False))

    async def fail(noted: Noted) -> None:
        if noted.number == 0:
            raise RuntimeError("not now")

    rig.before = fail
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(4))) == {"handled": 3, "redelivered": 1, "last": 3}
        rig.before = None
        assert await engine.run(rig.rows(range(4))) == {"duplicate": 3, "parked": 1, "last": 3}
        assert await engine.run(await rig.due_rows(engine)) == {"handled": 1, "last": 0}
    assert sorted(number for _, number, _ in rig.notes()) == [0, 1, 2, 3]


async def test_without_a_ledger_the_positions_of_keys_recognise_a_batch_that_runs_again(
    tmp_path: Path, store_url: str
) -> None:
    rig = Rig(tmp_path, store_url, dedup="off")
    async with rig.engine() as engine:
        await engine.run(rig.rows(range(4)))
        assert await engine.run(rig.rows(range(6))) == {"handled": 2, "duplicate": 4, "last": 5}
    rig.check(range(6))


@pytest.mark.parametrize("order", [fg.Serial(), fg.Parallel(3)])
async def test_the_other_orders(tmp_path: Path, order: Any) -> None:
    rig = Rig(tmp_path, key=None, order=order)
    async with rig.engine() as engine:
        await engine.run(rig.rows(range(8)))
        await engine.run(rig.rows(range(8)))
    numbers = [number for _, number, _ in rig.notes()]
    assert sorted(numbers) == list(range(8))
    assert numbers == sorted(numbers) or isinstance(order, fg.Parallel)


async def test_a_serial_subscription_waits_for_what_is_parked(tmp_path: Path, store_url: str) -> None:
    rig = Rig(tmp_path, store_url, key=None, order=fg.Serial(), redeliver=fg.Redeliver(0.05, 0.05, 0.05))
    tried: list[int] = []

    async def fail_twice(noted: Noted) -> None:
        tried.append(noted.number)
        if noted.number == 1 and tried.count(1) < 3:
            raise RuntimeError("not now")

    rig.before = fail_twice
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(4))) == {"handled": 1, "redelivered": 1, "parked": 2, "last": 3}
        assert await engine.run(rig.rows(range(4, 6))) == {"parked": 2, "last": 5}, "it waits in another batch, too"
        counts = await engine.run(await rig.due_rows(engine))
        assert (counts["redelivered"], counts["parked"]) == (1, 4)
    async with rig.engine() as engine:
        assert (await engine.run(await rig.due_rows(engine)))["handled"] == 5
    assert tried == [0, 1, 1, 1, 2, 3, 4, 5]
    assert [number for _, number, _ in rig.notes()] == [0, 1, 2, 3, 4, 5]


async def test_a_scheduled_message_waits_and_holds_nobody_up(rig: Rig) -> None:
    later = rig.rows(range(1), deliver_at=4e9)
    async with rig.engine() as engine:
        assert await engine.run([*later, *rig.rows(range(2, 4))]) == {"scheduled": 1, "handled": 2, "last": 3}
        assert [(each.due, each.key) for each in await rig.parked(engine)] == [(4e9, None)]
        assert await engine.run(await rig.due_rows(engine)) == {"handled": 1, "last": 0}


async def test_what_expired_or_cannot_be_read_is_dead_and_the_rest_goes_on(rig: Rig) -> None:
    told: list[tuple[Any, str | None]] = []

    async def tell(ctx: fg.Context, call_next: Any) -> None:
        told.append((ctx.message and ctx.message.number, ctx.outcome))

    rig.node.use(tell, after=True)
    expired, broken = rig.rows(range(1), expires_at=1.0), rig.rows(range(1, 2), body=b"\xff")
    async with rig.engine() as engine:
        counts = await engine.run([*expired, *broken, *rig.rows(range(2, 4))])
        assert engine.shared.alarms.counts == {"dead-letter": 2}
    assert counts == {"dead": 2, "handled": 2, "last": 3}
    assert set(told) == {(0, "dead"), (None, "dead"), (2, "handled"), (3, "handled")}
    rig.check([2, 3])


async def test_a_message_expires_by_when_it_set_out_and_not_by_when_it_was_appended(tmp_path: Path) -> None:
    rig, now = Rig(tmp_path, expires=60), time.time()
    old, foreign = {"sent_at": now - 100, "appended_at": now}, {"appended_at": now - 100}
    rows = [
        *rig.rows(range(1), **old),
        *rig.rows(range(1, 2), **old, deliver_at=now - 10),
        *rig.rows(range(2, 3), **old, replay=1),
        *rig.rows(range(3, 4), sent_at=now - 10, appended_at=now, expires_at=now - 1),
        *rig.rows(range(4, 5), **foreign),
        *rig.rows(range(5, 6), sent_at=now, appended_at=now),
    ]
    async with rig.engine() as engine:
        assert await engine.run(rows) == {"dead": 3, "handled": 3, "last": 5}
        assert {letter.reason for letter in await engine.store.dead(DeadFilter())} == {"expired"}
    rig.check([1, 2, 5])


async def test_a_message_expires_when_its_turn_comes_too_late(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes a minute, as the clock has it; the others come after it in the same task."""
    async with rig.engine() as engine:

        async def be_slow(noted: Noted) -> None:
            monkeypatch.setattr(engine.clock, "time", lambda: time.time() + 60)

        rig.before = be_slow
        rows = rig.rows(range(4), keys=1, expires_at=time.time() + 30)
        assert await engine.run(rows) == {"handled": 1, "dead": 3, "last": 3}
        assert {letter.reason for letter in await engine.store.dead(DeadFilter())} == {"expired"}
    rig.check([0])


async def test_what_expired_is_dead_also_while_its_key_waits_and_a_copy_of_what_was_handled_is_not(
    tmp_path: Path,
) -> None:
    rig, now = Rig(tmp_path, redeliver=fg.Redeliver(60), key=None, order=fg.Serial()), time.time()
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(1))) == {"handled": 1, "last": 0}

        async def fail(noted: Noted) -> None:
            raise OSError("not now")

        rig.before = fail
        copy = rig.rows(range(1), expires_at=now - 1)
        assert await engine.run([*copy, *rig.rows(range(1, 2))]) == {"duplicate": 1, "redelivered": 1, "last": 1}
        stale = rig.rows(range(2, 3), expires_at=now - 1)
        assert await engine.run([*stale, *rig.rows(range(3, 4))]) == {"dead": 1, "parked": 1, "last": 3}
        [letter] = await engine.store.dead(DeadFilter())
        assert (letter.reason, letter.publication_id[-1]) == ("expired", "2")


async def test_a_message_that_waits_for_redelivery_beyond_its_expiry_is_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, life = Rig(tmp_path, redeliver=fg.Redeliver(0.05)), 60.0

    async def fail(noted: Noted) -> None:
        raise OSError("not now")

    rig.before = fail
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(1), expires_at=time.time() + life)) == {"redelivered": 1, "last": 0}
        monkeypatch.setattr(engine.clock, "time", lambda: time.time() + life)
        assert await engine.run(await rig.due_rows(engine)) == {"dead": 1, "last": 0}
        [letter] = await engine.store.dead(DeadFilter())
        assert letter.reason == "expired" and await rig.parked(engine) == []


@pytest.mark.parametrize("waits", [True, False])
async def test_a_handler_that_cancels_the_task_it_runs_in_uses_up_its_tries_and_is_a_dead_letter(
    rig: Rig, waits: bool
) -> None:
    tried: list[int] = []

    async def cancel(noted: Noted) -> None:
        if noted.number == 1:
            tried.append(noted.number)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            if waits:
                await asyncio.sleep(0)

    rig.before = cancel
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(3))) == {"handled": 2, "redelivered": 1, "last": 2}
        assert await engine.run(await rig.due_rows(engine)) == {"redelivered": 1, "last": 1}
        assert await engine.run(await rig.due_rows(engine)) == {"dead": 1, "last": 1}
        [letter] = await engine.store.dead(DeadFilter())
    assert (letter.reason, tried) == ("failed", [1, 1, 1])
    assert "the handler cancelled the task that it runs in" in letter.error
    rig.check([0, 2])


async def test_a_store_that_is_gone_fails_the_task_and_uses_nothing_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rig.rows(range(4))
    async with rig.engine() as engine:

        async def down() -> None:
            raise StoreUnavailable("the store is down")

        real = engine.store.transaction

        def transaction() -> Any:
            made = real()
            monkeypatch.setattr(made, "begin", down)
            return made

        monkeypatch.setattr(engine.store, "transaction", transaction)
        with pytest.raises(Exception, match="the store is down"):
            await engine.run(rows)
    async with rig.engine() as engine:
        assert await engine.run(rows) == {"handled": 4, "last": 3}
        assert await rig.parked(engine) == []
    rig.check(range(4))


def lose_an_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch, committed: bool) -> list[Any]:
    """The first commit is carried out, or not, and nobody learns of it; that transaction is in the list then."""
    lost: list[Any] = []
    real = engine.store.transaction

    def transaction() -> Any:
        made = real()
        commit = made.commit

        async def unanswered() -> None:
            if lost or not made.is_open:
                return await commit()
            lost.append(made)
            await (commit() if committed else made.roll_back())
            raise CommitUnknown("the connection broke before the answer came")

        monkeypatch.setattr(made, "commit", unanswered)
        return made

    monkeypatch.setattr(engine.store, "transaction", transaction)
    return lost


async def test_after_a_commit_whose_outcome_is_unknown_nothing_waits_here_for_what_the_driver_sends(
    tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, store_url, retry=fg.Retry(1, delay=0.0))
    async with rig.engine() as engine, asyncio.timeout(30):
        lost = lose_an_answer(engine, monkeypatch, committed=True)
        await engine.run(rig.rows(range(4), keys=1))
        assert len(lost) == 1
        await engine.run(rig.rows(range(4, 8), keys=1))
    rig.check(range(8))


@pytest.mark.parametrize("committed", [True, False])
async def test_a_commit_whose_outcome_is_unknown(rig: Rig, monkeypatch: pytest.MonkeyPatch, committed: bool) -> None:
    """The answer to COMMIT is lost, and it was carried out, or not: the message is handled once."""
    rows = rig.rows(range(6))
    async with rig.engine() as engine:
        lost = lose_an_answer(engine, monkeypatch, committed)
        with suppress(CommitUnknown):  # the task may fail, or see to it itself
            await engine.run(rows)
        assert len(lost) == 1
    async with rig.engine() as engine:
        counts = await engine.run(rows)
        for row in await rig.due_rows(engine):
            await engine.run([row])
    assert counts["last"] == 5
    rig.check(range(6))


async def test_a_token_in_the_nodes_own_store_is_used_up_with_the_effect(tmp_path: Path, store_url: str) -> None:
    rig = Rig(tmp_path, store_url, dedup="tokens")
    rows = rig.rows(range(2), attempt_id="attempt-1")[:1]
    async with rig.engine() as engine:
        transaction = engine.store.transaction()
        await transaction.begin()
        now = engine.clock.time()
        message_id = fg.ids.message_id("00000000-0000-7000-8000-000000000000", "reader")
        await transaction.create_tokens([Token("attempt-1", message_id, "reader", "author", now, now + 60)])
        await transaction.commit()
        assert await engine.run(rows) == {"handled": 1, "last": 0}
        assert await engine.run(rows) == {"duplicate": 1, "last": 0}
    rig.check([0])


async def test_what_is_filtered_is_in_the_ledger_and_has_no_effect(tmp_path: Path, store_url: str) -> None:
    rig = Rig(tmp_path, store_url, where="number not in (1, 2) and topic is not null")
    rows = rig.rows(range(6))
    for _ in range(2):  # the second is a task that runs again
        async with rig.engine() as engine:
            counts = await engine.run(rows)
            assert (counts["filtered"], counts["last"]) == (2, 5)
            assert counts.get("handled", 0) + counts.get("duplicate", 0) == 4
    rig.check([0, 3, 4, 5])
    found = rig._query(
        "select position, key, outcome from faregate_ledger where outcome <> 'handled' order by position"
    )
    assert [tuple(row) for row in found] == [(1, None, "filtered"), (2, None, "filtered")]


async def test_what_is_filtered_behind_a_parked_one_is_parked_no_longer(tmp_path: Path, store_url: str) -> None:
    rig = Rig(tmp_path, store_url, where="number <> 2")

    async def fail(noted: Noted) -> None:
        rig.before = None
        raise RuntimeError("once")

    rig.before = fail
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(5), keys=1)) == {"redelivered": 1, "parked": 4, "last": 4}
        assert await engine.run(await rig.due_rows(engine)) == {"handled": 4, "filtered": 1, "last": 4}
        assert await rig.parked(engine) == []
    rig.check([0, 1, 3, 4])


async def test_a_worker_process_serves_one_run_after_another(tmp_path: Path, store_url: str) -> None:
    one, other = Rig(tmp_path, store_url), Rig(tmp_path, store_url)
    async with one.engine():
        pass  # makes the tables

    def work(rig: Rig, numbers: range) -> dict[str, int]:
        rows = rig.rows(numbers)
        columns = [pa.array(values) for values in zip(*rows, strict=True)]
        batch = pa.RecordBatch.from_arrays(columns, names=WORK.fieldNames())
        [counts] = handle_partition(rig.spec)(iter([batch]))
        return dict(zip(*(column.to_pylist() for column in counts.columns), strict=True))

    def both() -> None:
        assert work(one, range(2)) == {"handled": 2, "last": 1}
        assert work(other, range(4)) == {"duplicate": 2, "handled": 2, "last": 3}
        for run in list(run_tasks._engines):
            run_tasks._discard(run)

    await asyncio.to_thread(both)
    one.check(range(4))


def test_a_run_sends_what_is_in_the_outbox_while_no_batch_comes(tmp_path: Path) -> None:
    """A zombie committed it after its batch, or a person replays a dead letter."""
    driver = mock.Mock(**{"run": lambda work: work, "due.return_value": [], "send.return_value": 2})
    run = Run(Rig(tmp_path).spec, driver, 1, None)
    assert not run.handle_parked(mock.Mock())
    assert run.sent == 2
    driver.finish_batch.assert_not_called()


# --- several keys -------------------------------------------------------------------------------------------


def topics_of(noted: Noted) -> Any:
    return noted.topic.split("+")


TOPICS = ["a", "b", "a+b", "c", "b+c", "d", "a+d", "c"]


def in_order_of_each(rig: Rig) -> None:
    """Each message once, and those of each key in the order of the log."""
    found = rig.notes()
    assert sorted(number for _, number, _ in found) == list(range(len(TOPICS)))
    for topic in "abcd":
        own = [number for each, number, _ in found if topic in each.split("+")]
        assert own == sorted(own), f"{topic} is out of order: {own}"


@pytest.mark.parametrize("point", ["bus.before-handler", "unit.before-commit", "unit.after-commit"])
@pytest.mark.parametrize("after", [0, 2])
async def test_messages_with_several_keys_are_handled_once_and_in_order_though_the_task_fails(
    tmp_path: Path, store_url: str, point: str, after: int
) -> None:
    rig = Rig(tmp_path, store_url, key=fg.Each(topics_of), dedup="off")
    rows = [rig._row(number, topic) for number, topic in enumerate(TOPICS)]
    assert len({row[1] for row in rows}) == 1, "one task has all of them"
    crash_at(point, after)
    with suppress(faults.Crash):  # so few may be one batch
        async with rig.engine() as engine:
            await engine.run(rows)
    faults.hook = None
    async with rig.engine() as engine:
        await engine.run(rows)
    in_order_of_each(rig)


async def test_what_shares_a_key_with_a_parked_message_parks_behind_it_and_nothing_else_does(
    tmp_path: Path, store_url: str
) -> None:
    rig = Rig(tmp_path, store_url, key=fg.Each(topics_of))
    rows = [rig._row(number, topic) for number, topic in enumerate(TOPICS)]
    failed: list[int] = []

    async def fail_once(noted: Noted) -> None:
        if noted.number == 1 and not failed:
            failed.append(noted.number)
            raise RuntimeError("on purpose")

    rig.before = fail_once
    async with rig.engine() as engine:
        first = await engine.run(rows)
        assert sorted(number for _, number, _ in rig.notes()) == [0, 3, 5], "a, c and d have nobody before them"
        assert (first["redelivered"], first["parked"]) == (1, 4)
        assert {row.key for row in await rig.parked(engine)} == {""}
        assert (await engine.run(rows)).get("handled", 0) == 0, "what runs again finds them parked, or done"
        later = rig._row(8, "d+e")
        await engine.run([later])
        assert 8 not in [number for _, number, _ in rig.notes()], "d waits for a+d"
        while due := await rig.due_rows(engine):
            await engine.run(sorted(due))
    for topic in "abcde":
        own = [number for each, number, _ in rig.notes() if topic in each.split("+")]
        assert own == sorted(own), f"{topic} is out of order: {own}"
    assert len(rig.notes()) == 9


async def test_cancelling_on_spark_is_refused_in_one_sentence(tmp_path: Path) -> None:
    rig = Rig(tmp_path, redeliver=None)

    async def cancel(ctx: fg.Context, call_next: Any) -> None:
        await ctx.cancel(key="order-17")
        await call_next()

    rig.node.use(cancel)
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(1))) == {"dead": 1, "last": 0}
        [letter] = await engine.store.dead(DeadFilter(node="reader"))
        assert "runs on Spark, which sends what is due later at once" in letter.error
