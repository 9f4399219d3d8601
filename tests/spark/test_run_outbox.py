"""What a driver sends from the outbox of its store, without Spark: `fg.outbox` and the node's outgoing middlewares."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.core.sealing import outbox_row
from faregate.ports.clock import SystemClock
from faregate.ports.store import DeadFilter, OutboxRow
from faregate.spark.runs import outbox, run
from faregate.spark.runs.outbox import OutboxSpooler
from faregate.stores.sqlite import SqliteStore
from faregate.transports.journal_log import JournalLog

LONG = 30.0


class Placed(fg.Event):
    number: int


class Charge(fg.Command):
    number: int


class Shop:
    """A node that runs on Spark, and one on a bus that listens to it."""

    def __init__(self, folder: Path) -> None:
        self.journal, self.file = folder / "journal", folder / "shop.db"
        self.node, self.billing = fg.Node("shop"), fg.Node("billing")
        self.billed: list[tuple[int, dict[str, str]]] = []
        self.both_billed = asyncio.Event()
        self.billing.on(Placed, source="shop", order=fg.Serial())(self.bill)
        self.node.on(Placed, source="shop")(self.echo)

    async def bill(self, placed: Placed, ctx: fg.Context) -> None:
        self.billed.append((placed.number, dict(ctx.headers)))
        if len(self.billed) == 2:
            self.both_billed.set()

    async def echo(self, placed: Placed) -> None: ...

    def bus(self, *nodes: fg.Node) -> fg.Bus:
        return fg.Bus(f"journal:{self.journal}", nodes=nodes, store={"shop": f"sqlite:{self.file}"})

    @asynccontextmanager
    async def spooler(self) -> AsyncIterator[tuple[OutboxSpooler, SqliteStore]]:
        """What runs once both are known to the journal."""
        await self.bus(self.node, self.billing).prepare()
        store = SqliteStore(f"sqlite:{self.file}")
        await store.open()
        try:
            yield OutboxSpooler(store, self.node, self.journal, SystemClock(), None, 1 << 20), store
        finally:
            await store.close()

    def record(self, *messages: Any) -> None:
        with contextlib.closing(sqlite3.connect(self.file)) as connection, connection:
            for message in messages:
                put = fg.outbox(connection, node="shop")
                if isinstance(message, Charge):
                    put.send(message, to="nobody")
                else:
                    put.publish(message)

    async def listen(self) -> None:
        async with fg.Bus(f"journal:{self.journal}", nodes=[self.node, self.billing]) as bus:
            await bus.pause(self.node, Placed)
            await asyncio.wait_for(self.both_billed.wait(), LONG)


async def test_outgoing_middlewares_see_what_was_recorded_through_the_outbox(tmp_path: Path) -> None:
    """As on the bus: they mark it, hold it back, see its error; in the order in which it was recorded."""
    shop, seen = Shop(tmp_path), list[tuple[Any, str]]()

    @shop.node.use_outgoing
    async def watch(out: Any, call_next: Any) -> None:
        out.headers["by"] = "watch"
        if out.message == Placed(number=2):
            return
        try:
            await call_next()
        except fg.Unroutable:
            seen.append((out.message, "unroutable"))
            raise
        seen.append((out.message, "sent"))

    async with shop.spooler() as (spooler, store):
        shop.record(Placed(number=1), Placed(number=2), Placed(number=3), Charge(number=4))
        assert await spooler.send() == 4
        assert await spooler.take_in()
        assert await store.undispatched(10) == []
        assert [letter.reason for letter in await store.dead(DeadFilter())] == ["unroutable"]
    await shop.listen()
    assert shop.billed == [(1, {"by": "watch"}), (3, {"by": "watch"})]
    assert seen == [(Placed(number=1), "sent"), (Placed(number=3), "sent"), (None, "unroutable")]


async def test_a_reply_that_a_bus_left_in_the_outbox_is_dropped(tmp_path: Path) -> None:
    """No log brings it, and what is behind it must go out."""
    shop = Shop(tmp_path)
    async with shop.spooler() as (spooler, store):
        reply = fg.Envelope(fg.ids.root_id(), "Placed", "reply", "shop", b"{}", destination="here-0")
        async with store.transaction() as transaction:
            await transaction.send([outbox_row("shop", reply)])
        shop.record(Placed(number=1), Placed(number=2))
        await spooler.send()
        assert await spooler.take_in()
        assert await store.undispatched(10) == []
        assert await store.dead(DeadFilter()) == []
    await shop.listen()
    assert [number for number, _ in shop.billed] == [1, 2]


async def test_a_middleware_that_goes_on_failing_fails_the_run_and_what_was_recorded_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "_PATIENCE", 0.0)
    shop, broken = Shop(tmp_path), True

    @shop.node.use_outgoing
    async def refuse(out: Any, call_next: Any) -> None:
        if broken:
            raise LookupError("not now")
        await call_next()

    async with shop.spooler() as (spooler, store):
        shop.record(Placed(number=1), Placed(number=2))
        with pytest.raises(LookupError, match="not now"):
            await spooler.send()
        assert len(await store.undispatched(10)) == 2
        broken = False
        assert await spooler.send() == 2
        assert await spooler.take_in()
    await shop.listen()
    assert [number for number, _ in shop.billed] == [1, 2]


async def test_the_log_is_opened_once_however_many_batches_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, opened = Shop(tmp_path), list[Path]()

    def counted(path: Path) -> JournalLog:
        opened.append(path)
        return JournalLog(path)

    monkeypatch.setattr(outbox, "open_appendable", counted)
    async with shop.spooler() as (spooler, _):
        for number in range(3):
            shop.record(Placed(number=number))
            assert await spooler.send() == 1
            assert await spooler.take_in()
    assert opened == [tmp_path / "journal"]


async def test_what_was_scheduled_goes_out_when_it_is_due(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    async with shop.spooler() as (spooler, store):
        with contextlib.closing(sqlite3.connect(shop.file)) as connection, connection:
            put = fg.outbox(connection, node="shop")
            put.publish(Placed(number=1), delay=3600)
            due = put.publish(Placed(number=2), delay=3600)
            connection.execute("update faregate_scheduled set due_at = 1 where publication_id = ?", (due,))
        assert await spooler.send() == 1
        assert await store.undispatched(10) == []
        [left] = await store.scheduled(10)
        assert left.envelope.publication_id != due
        assert await store.known_nodes() == ["shop"]


async def test_what_a_bus_takes_at_the_same_time_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL then finds nothing to take, though it is due."""
    shop, asked = Shop(tmp_path), list[float]()

    async def take_due(self: Any, now: float, *args: Any, **options: Any) -> list[OutboxRow]:
        assert not asked, "it asks again and again"
        asked.append(now)
        return []

    async with shop.spooler() as (spooler, store):
        with contextlib.closing(sqlite3.connect(shop.file)) as connection, connection:
            fg.outbox(connection, node="shop").publish(Placed(number=1), delay=3600)
            connection.execute("update faregate_scheduled set due_at = 1")
        monkeypatch.setattr(type(store.transaction()), "take_due", take_due)
        assert await spooler.send() == 0
        assert asked


def test_a_node_with_a_schedule_is_refused() -> None:
    node = fg.Node("shop")

    @node.every(60)
    async def clean(tick: fg.Tick) -> None: ...

    with pytest.raises(fg.ConfigurationError, match="has the schedule 'clean', and on Spark nobody makes its ticks"):
        run._check(node, None, None, "json", 1)
