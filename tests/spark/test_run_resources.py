"""Resources that live as long as a bus, on Spark: with a store as long as the engine of a worker process, without one
as long as a task."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.ports.clock import SystemClock
from faregate.spark.runs.outbox import OutboxSpooler
from faregate.stores.sqlite import SqliteStore
from tests.spark import run_shop
from tests.spark.run_rig import Shop, the_shop
from tests.spark.test_run_engine import Rig

__all__ = ["the_shop"]


class Client: ...


def living(rig: Rig) -> list[str]:
    """Give the node of the rig a resource, which its middleware takes, and tell its life."""
    log: list[str] = []

    @rig.node.provides(scope="bus")
    async def client() -> AsyncIterator[Client]:
        log.append("make")
        yield Client()
        log.append("release")

    async def with_client(ctx: fg.Context, call_next: Callable[[], Awaitable[None]], client: Client) -> None:
        log.append("use")
        await call_next()

    rig.node.use(with_client)
    rig.node.on_start(lambda: log.append("start"))
    rig.node.on_stop(lambda: log.append("stop"))
    return log


async def test_a_worker_process_keeps_them_from_task_to_task(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    log = living(rig)
    async with rig.engine() as engine:
        assert await engine.run(rig.rows(range(2))) == {"handled": 2, "last": 1}
        assert await engine.run(rig.rows(range(2, 3))) == {"handled": 1, "last": 2}
    assert log == ["make", "start", "use", "use", "use", "stop", "release"]


async def test_the_driver_has_its_own_for_outgoing_middlewares(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    log = living(rig)
    async with rig.engine():
        log.clear()
    store = SqliteStore(rig.url)
    journal = tmp_path / "journal"
    async with fg.Bus(f"journal:{journal}", nodes=[fg.Node("author")]):
        pass
    await store.open()
    spooler = OutboxSpooler(store, rig.node, journal, SystemClock(), None, 1 << 20)
    log.clear()
    await spooler.open()  # its node sends nothing through middlewares: there is nothing to make
    await spooler.close()
    assert log == []

    async def outgoing(out: Any, call_next: Callable[[], Awaitable[None]], client: Client) -> None:
        await call_next()

    rig.node.use_outgoing(outgoing)
    spooler = OutboxSpooler(store, rig.node, journal, SystemClock(), None, 1 << 20)
    await spooler.open()
    assert log == ["make"]
    await spooler.close()
    await store.close()
    assert log == ["make", "release"]


@pytest.mark.services
def test_without_a_store_each_task_has_its_own(the_shop: Shop) -> None:
    the_shop.place(4)
    place = {"source": the_shop.journal, "checkpoint": the_shop.folder / "tallying"}
    run = fg.spark.run(run_shop.tallying, the_shop.spark, **place, max_messages_per_trigger=2)
    run.await_termination()
    assert run.outcomes == {"handled": 4}
    numbers = [int(each.body.rpartition(b":")[2].rstrip(b"}")) for each in the_shop.log("Seen")]
    assert numbers == [101, 102, 101, 102]
