"""A node goes from one engine to the other and back, mid-stream: nothing is lost, doubled, reordered or left behind."""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.recovery import recover
from faregate.errors import BelowFloor
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store
from faregate.spark.runs.handover import HandedOver, hand_over
from tests.spark import run_shop
from tests.spark.jobs_rig import shelf
from tests.spark.rig import Noted
from tests.spark.run_rig import Shop, the_shop

__all__ = ["the_shop"]

QUEUE = "billing.OrderPlaced.shop"


def to(shop: Shop, view: str, node: fg.Node = run_shop.billing) -> list[HandedOver]:
    return hand_over(node, shop.journal, open_store(shop.store, SystemClock()), view)  # type: ignore[arg-type]


def waiting(journal: Path, queue: str = QUEUE) -> int:
    reader = JournalReader(journal)
    topology = reader.topology()
    record = topology.queue(queue)
    assert record is not None
    found = recover(reader.layout, reader._disk, reader, topology).queues
    return found[record.number].count() if record.number in found else 0


@pytest.mark.services
def test_handover_between_the_engines_mid_stream(the_shop: Shop) -> None:
    shop = the_shop
    shop.run_bus("shop", "billing")
    shop.place(4)
    shop.run_bus("shop", "billing")  # 0 to 3 on asyncio
    shop.place(4)  # 4 to 7 wait in the queue
    assert waiting(shop.journal) == 4
    [done] = to(shop, "log")
    assert (done.queue, done.view, done.epoch, done.changed) == (QUEUE, "log", 1, True) and waiting(shop.journal) == 0
    assert not to(shop, "log")[0].changed
    shop.place(4)
    assert waiting(shop.journal) == 0, "while it reads the log, nothing goes into its queue"
    for more in ("", "-again"):
        shop.arm(9, more=more)
    run = shop.run_to_end()
    assert run.outcomes == {"handled": 7, "redelivered": 1}
    shop.place(4)  # 12 to 15: 13 follows 9, which is parked
    [done] = to(shop, "queue")
    assert (done.view, done.epoch) == ("queue", 2) and waiting(shop.journal) == 5
    with pytest.raises(fg.ViewTaken):
        shop.run()
    shop.place(4)
    shop.run_bus("shop", "billing")
    shop.check(20)
    assert waiting(shop.journal) == 0 and shop.rows("select count(*) from faregate_parked") == [(0,)]
    to(shop, "log")
    shop.place(4)
    assert shop.run_to_end().outcomes == {"handled": 4}
    shop.check(24)


@pytest.mark.services
def test_parked_messages_from_before_the_subscription_was_known_go_along(the_shop: Shop) -> None:
    """No queue has them in its part of the log, so they are published to it again."""
    the_shop.place(3)  # nobody knows billing yet
    for more in ("", "-again"):
        the_shop.arm(1, more=more)
    assert the_shop.run_to_end().outcomes == {"handled": 2, "redelivered": 1}
    to(the_shop, "queue")
    assert the_shop.rows("select count(*) from faregate_parked") == [(0,)]
    the_shop.place(1, nodes=(run_shop.shop,))
    the_shop.run_bus("shop", "billing")
    the_shop.check(4)


@pytest.mark.services
def test_what_a_serial_line_had_parked_survives_going_there_and_back(the_shop: Shop) -> None:
    """Positions of one time on the log say nothing in the next."""
    the_shop.place(0)
    the_shop.run_to_end("queueing")
    the_shop.place(5)
    the_shop.arm(1, "queue")
    assert the_shop.run_to_end("queueing").outcomes == {"handled": 1, "redelivered": 1, "parked": 3}
    to(the_shop, "queue", run_shop.queueing)
    to(the_shop, "log", run_shop.queueing)
    outcomes = the_shop.run_to_end("queueing").outcomes
    assert outcomes["handled"] == 4, outcomes
    assert [number for _, number, _ in the_shop.effects("tickets")] == [0, 1, 2, 3, 4]


@pytest.mark.services
def test_a_run_that_cannot_start_takes_no_view(the_shop: Shop, tmp_path: Path) -> None:
    the_shop.run_bus("shop", "billing")
    the_shop.place(2)  # they wait in the queue
    connect = Shop(the_shop.folder, SimpleNamespace(readStream=None))  # one of Spark Connect has no context
    with pytest.raises(fg.ConfigurationError, match="'billing' cannot run over Spark Connect"):
        connect.run(handover=True)
    with closing(sqlite3.connect(the_shop.folder / "shop.db")) as connection, connection:
        connection.execute("insert into faregate_floor values ('billing', ?)", (time.time() + 60,))
    with pytest.raises(BelowFloor, match="would begin at offset 0"):
        the_shop.run(handover=True)
    with pytest.raises(fg.ConfigurationError, match=r"deduplicates by tokens, and .* has no list that says so"):
        fg.spark.run(
            shelf, the_shop.spark, source=the_shop.journal, store=the_shop.store, checkpoint=tmp_path / "shelf"
        )
    topology = JournalReader(the_shop.journal).topology()
    assert topology.reading(QUEUE).view == "queue" and waiting(the_shop.journal) == 2
    assert [each.name for each in topology.queues if not each.is_dead_letter_queue] == [QUEUE]


def test_a_node_without_a_store_is_handed_over_only_with_an_empty_queue(tmp_path: Path) -> None:
    author, reader = fg.Node("author"), fg.Node("reader")
    paused = asyncio.Event()

    @reader.on(Noted, source="author")
    async def read(noted: Noted) -> None:
        await paused.wait()

    async def main(*nodes: fg.Node) -> None:
        async with fg.Bus(f"journal:{tmp_path}", nodes=list(nodes), drain_seconds=0) as bus:
            await bus.publish(Noted(text="1"), node="author")

    asyncio.run(main(author, reader))
    with pytest.raises(fg.ConfigurationError, match=r"messages wait in reader.Noted.author \(1\), and without a store"):
        hand_over(reader, tmp_path, None, "log")


def test_a_handover_needs_the_bus_to_stop(tmp_path: Path) -> None:
    author, reader = fg.Node("author"), fg.Node("reader")

    @reader.on(Noted, source="author")
    async def read(noted: Noted) -> None: ...

    async def main() -> None:
        async with fg.Bus(f"journal:{tmp_path}", nodes=[author, reader]) as bus:
            await bus.idle()
            with pytest.raises(fg.JournalLocked, match="Stop it for the handover"):
                hand_over(reader, tmp_path, None, "log")
        hand_over(reader, tmp_path, None, "log")

    asyncio.run(main())

    # A bus without the node still routes to it, and its messages stay in the log.
    async def publish() -> None:
        async with fg.Bus(f"journal:{tmp_path}", nodes=[author]) as bus:
            await bus.publish(Noted(text="1"), node="author")

    asyncio.run(publish())
    [(_, envelope)] = JournalReader(tmp_path).envelopes()
    assert envelope.recipients == ("reader",) and waiting(tmp_path, "reader.Noted.author") == 0
