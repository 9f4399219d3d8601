"""Cancelling scheduled messages: by id and by key, from outside and from handlers, on every transport, exactly once."""

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.journal import Journal
from faregate.testing import FakeClock
from faregate.transports.journal import JournalTransport
from tests.bus.core_only import CoreOnly


class Placed(fg.Event):
    order: str


class Paid(fg.Event):
    order: str


class PaymentDue(fg.Command):
    order: str


def saga(overdue: list[str], cancelled: list[bool]) -> fg.Node:
    node = fg.Node("orders")

    @node.on(Placed, source="shop")
    async def start(placed: Placed) -> fg.Outgoing:
        return fg.send(PaymentDue(order=placed.order), to="orders", delay=60, id_key=f"due-{placed.order}")

    @node.on(Paid, source="shop")
    async def finish(paid: Paid, ctx: fg.Context) -> None:
        cancelled.append(await ctx.cancel(key=f"due-{paid.order}"))

    @node.on(PaymentDue)
    async def remind(due: PaymentDue) -> None:
        overdue.append(due.order)

    return node


async def test_a_saga_cancels_the_timeout_that_it_scheduled_earlier() -> None:
    overdue: list[str] = []
    cancelled: list[bool] = []
    async with fg.testing.bench(saga(overdue, cancelled)) as bench:
        await bench.publish(Placed(order="17"))
        await bench.publish(Placed(order="18"))
        await bench.settle()
        assert bench.sent(PaymentDue) == [PaymentDue(order="17"), PaymentDue(order="18")]
        await bench.publish(Paid(order="17"))
        await bench.settle()
        assert bench.sent(PaymentDue) == [PaymentDue(order="18")]
        await bench.advance(61)
        await bench.publish(Paid(order="18"))
        await bench.settle()
    assert (overdue, cancelled) == (["18"], [True, False])


async def test_a_message_is_cancelled_by_the_id_that_publish_returned_and_by_its_key() -> None:
    overdue: list[str] = []
    async with fg.testing.bench(saga(overdue, [])) as bench:
        first = await bench.send(PaymentDue(order="1"), delay=10)
        await bench.send(PaymentDue(order="2"), delay=10, idempotency_key="two")
        await bench.send(PaymentDue(order="3"), at=bench.clock.time() + 10)
        assert await bench.cancel(first) and not await bench.cancel(first)
        assert await bench.cancel(key="two", node="orders")
        await bench.send(PaymentDue(order="2"), delay=10, idempotency_key="two")  # a repetition of what was cancelled
        await bench.advance(11)
        assert overdue == ["3"]
        assert not await bench.cancel(key="no such key")


async def test_what_a_failed_try_cancelled_goes_on_waiting() -> None:
    node, seen = fg.Node("orders"), []

    @node.on(Paid, source="shop", retry=None, redeliver=None)
    async def finish(paid: Paid, ctx: fg.Context) -> None:
        seen.append(await ctx.cancel(key="due"))
        raise fg.Permanent("after cancelling")

    @node.on(PaymentDue)
    async def remind(due: PaymentDue) -> None:
        seen.append(due.order)

    async with fg.testing.bench(node) as bench:
        await bench.send(PaymentDue(order="1"), delay=10, idempotency_key="due")
        await bench.publish(Paid(order="1"))
        await bench.settle()
        await bench.advance(11)
        assert seen == [True, "1"] and len(bench.dead_letters()) == 1


async def test_a_handler_cancels_what_another_message_of_its_batch_scheduled() -> None:
    """Each one puts off the timeout of the one before it, as a search box does."""
    node, due = fg.Node("orders"), []

    @node.on(Placed, source="shop", order=fg.Serial())
    async def start(placed: Placed, ctx: fg.Context) -> None:
        number = int(placed.order)
        if number:
            assert await ctx.cancel(key=f"due-{number - 1}")
        ctx.send(PaymentDue(order=placed.order), to="orders", delay=60, id_key=f"due-{number}")

    @node.on(PaymentDue)
    async def remind(late: PaymentDue) -> None:
        due.append(late.order)

    async with fg.testing.bench(node) as bench:
        await bench.bus.publish_many([Placed(order=f"{number}") for number in range(30)], node="shop")
        await bench.settle()
        assert not bench.dead_letters()
        await bench.advance(61)
    assert due == ["29"]


async def test_def_handlers_cancel_without_await() -> None:
    node, seen = fg.Node("orders"), []

    @node.on(Paid, source="shop")
    def finish(paid: Paid, ctx: fg.Context) -> None:
        seen.append(ctx.cancel(key="due"))

    @node.on(PaymentDue)
    async def remind(due: PaymentDue) -> None:
        seen.append(due.order)

    async with fg.testing.bench(node) as bench:
        await bench.send(PaymentDue(order="1"), delay=10, idempotency_key="due")
        await bench.publish(Paid(order="1"))
        await bench.settle()
        await bench.advance(11)
    assert seen == [True]


@pytest.mark.parametrize("store", ["memory:", None])
async def test_a_handler_cancels_what_it_has_scheduled_itself(store: str | None) -> None:
    node, seen, clock = fg.Node("orders"), list[Any](), FakeClock()

    @node.use
    async def around(ctx: fg.Context, call_next: Any) -> None:
        if isinstance(ctx.message, Placed):
            ctx.send(PaymentDue(order="before"), to="orders", delay=10, id_key="before")
        await call_next()
        if isinstance(ctx.message, Placed):
            seen.append(await ctx.cancel(key="behind"))

    @node.on(Placed, source="shop", retry=fg.Retry(1, 0))
    async def start(placed: Placed, ctx: fg.Context) -> None:
        for key in ("one", "two", "behind", "last"):
            ctx.send(PaymentDue(order=key), to="orders", delay=10, id_key=key)
        ctx.send(PaymentDue(order="at once"), to="orders", id_key="at once")
        keys = ("before", "two") if ctx.attempt == 1 else ("one", "one", "at once")
        seen.extend([await ctx.cancel(key=key) for key in keys])
        if ctx.attempt == 1:
            raise RuntimeError("what this try cancelled does not count")

    @node.on(PaymentDue)
    async def remind(due: PaymentDue) -> None:
        seen.append(due.order)

    async with fg.Bus("memory:", nodes=[node, fg.Node("shop")], store=store, clock=clock) as bus:
        await bus.publish(Placed(order="1"), node="shop")
        await bus.idle(timeout=10)
        assert await bus.cancel(key="last")
        clock.jump(11)
        await bus.idle(timeout=10)
    assert seen == [True, True, True, False, False, True, "at once", "before", "two"]


@pytest.mark.parametrize("store", ["memory:", None])
async def test_a_middleware_that_sets_the_headers_does_not_lose_the_key(store: str | None) -> None:
    overdue, headers = list[str](), list[dict[str, str]]()
    node, clock = saga(overdue, []), FakeClock()

    @node.use_outgoing
    async def replace(out: Any, call_next: Any) -> None:
        headers.append(out.headers)
        out.headers = {"tenant": "acme"}
        await call_next()

    @node.use
    async def look(ctx: fg.Context, call_next: Any) -> None:
        headers.append(dict(ctx.headers))
        await call_next()

    async with fg.Bus("memory:", nodes=[node, fg.Node("shop")], store=store, clock=clock) as bus:
        await bus.publish(Placed(order="17"), node="shop")
        await bus.idle(timeout=10)
        await bus.send(PaymentDue(order="18"), to="orders", node="orders", delay=10, idempotency_key="18")
        assert await bus.cancel(key="due-17") and await bus.cancel(key="18")
        await bus.send(PaymentDue(order="19"), to="orders", node="orders", delay=10, idempotency_key="19")
        clock.jump(70)
        await bus.idle(timeout=10)
    assert overdue == ["19"]
    assert headers == [{}, {}, {}, {}, {"tenant": "acme"}]


FORKING = """
import asyncio, os, signal, sys
import faregate as fg
from tests.bus.test_cancel import Paid

node = fg.Node("orders")

@node.on(Paid, source="shop")
def fork(paid: Paid, ctx: fg.Context):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        ctx.cancel(key="due")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

async def main(store):
    async with fg.Bus("memory:", nodes=[node, fg.Node("shop")], store=store or None) as bus:
        await bus.publish(Paid(order="1"), node="shop")
        await bus.idle(timeout=30)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("store", ["memory:", ""])
async def test_a_process_that_a_def_handler_forked_ends_when_it_cancels(store: str) -> None:
    """As with everything else that belongs to the bus."""
    command = [sys.executable, "-c", FORKING, store]
    ran = await asyncio.to_thread(subprocess.run, command, cwd=Path(__file__).parents[2], capture_output=True)
    assert ran.stdout == b"70\n" and b"was forked in a handler" in ran.stderr, ran.stderr.decode()


async def test_a_node_that_cannot_cancel_does_not_keep_others_from_saying_that_nothing_waits() -> None:
    clock = FakeClock()
    nodes = [saga([], []), fg.Node("shop")]
    async with fg.Bus(CoreOnly(clock), nodes=nodes, store={"orders": "memory:"}, clock=clock) as bus:
        assert not await bus.cancel(key="no such key")
        await bus.send(PaymentDue(order="1"), to="orders", node="orders", delay=10, idempotency_key="one")
        assert await bus.cancel(key="one")
        with pytest.raises(fg.ConfigurationError, match="node 'shop' cannot cancel"):
            await bus.cancel(key="one", node="shop")
    async with fg.Bus(CoreOnly(clock), nodes=[fg.Node("shop"), fg.Node("web")], clock=clock) as bus:
        with pytest.raises(fg.ConfigurationError, match="cannot cancel"):
            await bus.cancel(key="one")


@pytest.mark.parametrize("url", ["memory:", "journal:{}"])
async def test_without_a_store_the_transport_takes_it_back(tmp_path: Path, url: str) -> None:
    overdue: list[str] = []
    cancelled: list[bool] = []
    clock = FakeClock()
    nodes = [saga(overdue, cancelled), fg.Node("shop")]
    async with fg.Bus(url.format(tmp_path / "journal"), nodes=nodes, clock=clock) as bus:
        first = await bus.send(PaymentDue(order="1"), to="orders", node="shop", delay=10)
        await bus.send(PaymentDue(order="2"), to="orders", node="shop", delay=10)
        await bus.publish(Placed(order="17"), node="shop")
        await bus.idle(timeout=10)
        await bus.publish(Paid(order="17"), node="shop")
        await bus.idle(timeout=10)
        assert cancelled == [True]
        assert await bus.cancel(first) and not await bus.cancel(first, node="shop")
        clock.jump(70)
        await bus.idle(timeout=10)
    assert overdue == ["2"]


@pytest.mark.parametrize("with_store", [True, False])
async def test_what_was_cancelled_stays_so_after_a_restart(tmp_path: Path, with_store: bool) -> None:
    overdue: list[str] = []
    clock = FakeClock()
    store = f"sqlite:{tmp_path}/s.db" if with_store else None

    def bus() -> fg.Bus:
        return fg.Bus(f"journal:{tmp_path}/journal", nodes=[saga(overdue, [])], store=store, clock=clock)

    async with bus() as first:
        kept = await first.send(PaymentDue(order="1"), to="orders", delay=10)
        gone = await first.send(PaymentDue(order="2"), to="orders", delay=10)
        assert await first.cancel(gone)
    async with bus() as second:
        assert not await second.cancel(gone)
        clock.jump(20)
        await second.idle(timeout=10)
        assert overdue == ["1"]
        assert not await second.cancel(kept)


async def test_many_cancels_at_once_write_one_snapshot_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overdue: list[str] = []
    clock, write = FakeClock(), Journal._write_snapshot
    under_way, most, written = 0, 0, 0

    def count(*args: Any) -> None:
        nonlocal under_way, most, written
        under_way += 1
        most, written = max(most, under_way), written + 1
        write(*args)
        under_way -= 1

    monkeypatch.setattr(Journal, "_write_snapshot", count)
    async with fg.Bus(f"journal:{tmp_path}/journal", nodes=[saga(overdue, [])], clock=clock) as bus:
        many = [fg.send(PaymentDue(order=f"{number}"), to="orders", delay=10) for number in range(200)]
        ids = await bus.publish_many(many, node="orders")
        assert isinstance(bus.transport, JournalTransport)
        for first in range(0, 180, 60):
            bus.transport.broker.keep()  # the broker's own snapshot is one of them
            assert all(await asyncio.gather(*(bus.cancel(each) for each in ids[first : first + 60])))
        shutil.copytree(tmp_path / "journal", tmp_path / "copy")  # as a crash would leave it
        (tmp_path / "copy" / "lock").unlink(missing_ok=True)
        assert most == 1 and written < 60
    async with fg.Bus(f"journal:{tmp_path}/copy", nodes=[saga(overdue, [])], clock=clock) as bus:
        clock.jump(20)
        await bus.idle(timeout=10)
    assert sorted(overdue) == [f"{number}" for number in range(180, 200)]


async def test_one_who_no_longer_waits_for_his_cancel_does_not_disturb_the_others(tmp_path: Path) -> None:
    async with fg.Bus(f"journal:{tmp_path}/journal", nodes=[saga([], [])]) as bus:
        many = [fg.send(PaymentDue(order=f"{number}"), to="orders", delay=60) for number in range(3)]
        ids = await bus.publish_many(many, node="orders")
        assert isinstance(bus.transport, JournalTransport)
        broker = bus.transport.broker
        async with broker._writing:
            tasks = [asyncio.create_task(bus.cancel(each)) for each in ids]
            async with asyncio.timeout(10):
                while await bus.transport.waiting("orders.PaymentDue") or broker._next_write is None:
                    await broker._journal.barrier()
            tasks[0].cancel()
        assert (await asyncio.gather(*tasks, return_exceptions=True))[1:] == [True, True]


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, fg.JournalFull), (errno.EIO, fg.JournalFailed)], ids=["full", "failed"]
)
@pytest.mark.parametrize("refused", ["the snapshot", "the side logs"])
async def test_a_cancel_that_is_in_no_snapshot_is_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception], refused: str
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    cls, method = (RealDisk, "replace") if refused == "the snapshot" else (Journal, "_side_log")
    async with fg.Bus(f"journal:{tmp_path}/journal", nodes=[saga([], [])]) as bus:
        scheduled = await bus.send(PaymentDue(order="1"), to="orders", delay=60)
        with monkeypatch.context() as patch, pytest.raises(error, match=f"{scheduled} of node 'orders' is cancelled"):
            patch.setattr(cls, method, refuse)
            await bus.cancel(scheduled)
        assert not await bus.cancel(scheduled)
        other = await bus.send(PaymentDue(order="2"), to="orders", delay=60)
        assert await bus.cancel(other)


KILLED = """
import asyncio, os, signal, sys
import faregate as fg
from tests.bus.test_cancel import PaymentDue, saga

async def main(url, store):
    async with fg.Bus(url, nodes=[saga([], [])], store=store or None) as bus:
        for number in range(20):
            await bus.send(PaymentDue(order=f"{number}"), to="orders", delay=0.5, idempotency_key=f"{number}")
        for number in range(0, 20, 2):
            assert await bus.cancel(key=f"{number}")
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("with_store", [True, False])
async def test_what_was_confirmed_as_cancelled_survives_a_kill(tmp_path: Path, with_store: bool) -> None:
    overdue: list[str] = []
    url, store = f"journal:{tmp_path}/journal", f"sqlite:{tmp_path}/s.db" if with_store else ""
    command = [sys.executable, "-c", KILLED, url, store]
    killed = await asyncio.to_thread(subprocess.run, command, cwd=Path(__file__).parents[2], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    last = asyncio.Event()
    node = saga(overdue, [])
    node.use(_tells(last))
    async with asyncio.timeout(30), fg.Bus(url, nodes=[node], store=store or None) as bus:
        await bus.send(PaymentDue(order="last"), to="orders", at=time.time() + 1)
        await last.wait()
        await bus.idle()
    assert overdue == [*(f"{number}" for number in range(1, 20, 2)), "last"]


def _tells(last: asyncio.Event) -> Any:
    async def tell(ctx: fg.Context, call_next: Any) -> Any:
        if ctx.message == PaymentDue(order="last"):
            last.set()
        return await call_next()

    return tell


async def test_what_is_due_while_nobody_runs_comes_at_the_next_start(tmp_path: Path) -> None:
    overdue: list[str] = []
    clock = FakeClock()
    for seconds in (0, 20):
        clock.jump(seconds)
        node = saga(overdue, [])
        async with fg.Bus("memory:", nodes=[node], store=f"sqlite:{tmp_path}/s.db", clock=clock) as bus:
            if not seconds:
                await bus.send(PaymentDue(order="1"), to="orders", delay=10)
            await bus.idle(timeout=10)
    assert overdue == ["1"]


async def test_a_scheduled_command_that_nobody_handles_is_a_dead_letter_when_it_is_due() -> None:
    async with fg.testing.bench(saga([], [])) as bench:
        await bench.bus.send(PaymentDue(order="1"), to="nobody", node="orders", delay=10)
        await bench.advance(11)
        [letter] = bench.dead_letters()
        assert (letter.reason, letter.node) == ("unroutable", "orders")


async def test_publishing_together_is_all_or_none_with_a_delay_too() -> None:
    overdue: list[str] = []
    async with fg.testing.bench(saga(overdue, [])) as bench:
        both = [fg.send(PaymentDue(order="now"), to="orders"), fg.send(PaymentDue(order="later"), to="orders", delay=5)]
        _, later = await bench.bus.publish_many(both, node="orders")
        await bench.settle()
        assert overdue == ["now"]
        assert await bench.cancel(later)


@pytest.mark.parametrize("given", [{}, {"publication_id": "x", "key": "y"}, {"key": ""}, {"publication_id": 7}])
async def test_what_to_cancel_is_said_in_one_way(given: dict[str, Any]) -> None:
    async with fg.testing.bench(saga([], [])) as bench:
        with pytest.raises(fg.ConfigurationError):
            await bench.bus.cancel(**given)


async def test_many_messages_that_are_due_at_once_come_in_order() -> None:
    node, seen = fg.Node("orders"), []

    @node.on(PaymentDue, order=fg.Serial())
    async def remind(due: PaymentDue) -> None:
        seen.append(int(due.order))

    async with fg.testing.bench(node) as bench:
        await bench.bus.publish_many(
            [fg.send(PaymentDue(order=f"{number}"), to="orders", delay=5) for number in range(1_200)], node="orders"
        )
        await bench.advance(6)
        await bench.settle()
    assert seen == list(range(1_200))


@pytest.mark.services
async def test_on_postgresql_batches_schedule_and_cancel_as_elsewhere(postgres_url: str) -> None:
    """There a batch has no savepoints, and its rows go out together with the commit."""
    node, due = fg.Node("orders"), asyncio.Queue[str]()

    @node.on(Placed, source="shop", order=fg.Serial())
    async def start(placed: Placed, ctx: fg.Context) -> None:
        number = int(placed.order)
        if number:
            assert await ctx.cancel(key=f"due-{number - 1}")
        ctx.send(PaymentDue(order=placed.order), to="orders", delay=5, id_key=f"due-{number}")

    @node.on(PaymentDue)
    async def remind(late: PaymentDue) -> None:
        due.put_nowait(late.order)

    nodes = [node, fg.Node("shop")]
    async with asyncio.timeout(60), fg.Bus("memory:", nodes=nodes, store=postgres_url) as bus:
        await bus.pause(node, PaymentDue)
        await bus.publish_many([Placed(order=f"{number}") for number in range(30)], node="shop")
        while bus.outcomes()["handled"] < 30:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await bus.resume(node, PaymentDue)
        assert await due.get() == "29"
        await bus.idle()
        assert due.empty() and await bus.dead_letters() == []
