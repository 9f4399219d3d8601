"""What would fail in silence is said: a source that nobody runs, and outgoing messages that nobody sends."""

import asyncio
import logging
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

import faregate as fg
from faregate.node.sources import did_you_mean
from faregate.ports.presence import Heartbeat
from faregate.testing import FakeClock
from faregate.transports.memory import MemoryTransport


class Placed(fg.Event):
    order: str


def nodes(source: str = "shpo") -> list[fg.Node]:
    billing = fg.Node("billing")

    @billing.on(Placed, source=source)
    async def bill(placed: Placed) -> None: ...

    return [fg.Node("shop"), billing]


def notices(bus: fg.Bus) -> list[str]:
    return [notice for node in bus.status().nodes for notice in node.notices]


@pytest.mark.parametrize(
    ("name", "hint"), [("shpo", " (did you mean 'shop'?)"), ("billng", " (did you mean 'billing'?)"), ("audit", "")]
)
def test_the_nearest_name_is_offered(name: str, hint: str) -> None:
    assert did_you_mean(name, ["shop", "billing", "payments", name]) == hint


async def test_a_source_that_is_on_no_bus_is_warned_of_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with fg.Bus("memory:", nodes=nodes()) as bus:
            [notice] = notices(bus)
    expected = "bill at billing (Placed from shpo) waits for events of node 'shpo', and nobody is known to run that"
    assert notice == f"{expected} (did you mean 'shop'?)"
    assert notice in caplog.messages


async def test_a_source_that_is_there_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with fg.Bus("memory:", nodes=nodes("shop")) as bus:
            assert notices(bus) == []
    assert not caplog.messages


class Overheard(MemoryTransport):
    """The memory transport, with other processes beside it."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock=clock)
        self.heard: Callable[[Heartbeat], None] = lambda beat: None
        self.listens = asyncio.Event()

    async def overhear(self, heard: Callable[[Heartbeat], None]) -> None:
        self.heard = heard
        self.listens.set()
        await asyncio.Event().wait()


def beat(node: str, *, leaving: bool = False) -> Heartbeat:
    return Heartbeat(node, "elsewhere", "", 0.0, 0.0, [], {}, leaving=leaving)


async def test_a_source_in_another_process_is_missed_after_a_while_and_until_it_is_heard() -> None:
    clock = FakeClock()
    transport = Overheard(clock)
    async with fg.Bus(transport, nodes=nodes("warehouse"), clock=clock) as bus:
        await transport.listens.wait()
        transport.heard(beat("warehose"))
        await clock.advance(14)
        assert notices(bus) == [] and not bus.alarms
        await clock.advance(2)
        [notice] = notices(bus)
        assert "'warehouse'" in notice and notice.endswith("(did you mean 'warehose'?)")
        assert bus.alarms == {"unknown-source": 1}
        transport.heard(beat("warehouse", leaving=True))
        assert notices(bus) == [notice]
        transport.heard(beat("warehouse"))
        assert notices(bus) == []


async def test_a_source_that_is_heard_in_time_is_never_missed() -> None:
    clock = FakeClock()
    transport = Overheard(clock)
    async with fg.Bus(transport, nodes=nodes("warehouse"), clock=clock) as bus:
        await transport.listens.wait()
        transport.heard(beat("warehouse"))
        await clock.advance(100)
        assert notices(bus) == [] and not bus.alarms


async def test_outgoing_messages_of_a_node_that_nobody_runs_are_told_of(tmp_path: Path) -> None:
    clock, path = FakeClock(), tmp_path / "s.db"
    told = asyncio.Event()
    async with fg.Bus("memory:", nodes=[fg.Node("shpo")], store=f"sqlite:{path}", clock=clock):
        pass  # so that the store knows that name
    bus = fg.Bus("memory:", nodes=nodes("shop"), store=f"sqlite:{path}", clock=clock, stall_seconds=None)
    bus.on_alarm(lambda alarm: told.set() if alarm.kind == "nobody-sends" else None)
    async with bus:
        with closing(sqlite3.connect(path)) as connection, connection:
            for order in "12":
                fg.outbox(connection, node="shpo").publish(Placed(order=order))
        async with asyncio.timeout(10):
            while not told.is_set():
                clock.jump(30)
                await bus.idle()
        [notice] = notices(bus)
        assert notice == (
            f"2 messages of node 'shpo' in the outbox of sqlite:{path} are sent by nobody: no bus that has this store "
            "runs that node (did you mean 'shop'?)"
        )
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("delete from faregate_outbox")
        async with asyncio.timeout(10):
            while notices(bus):
                clock.jump(30)
                await bus.idle()
        assert bus.alarms["nobody-sends"] == 1


class Bill(fg.Command):
    order: str


def billing() -> fg.Node:
    node = fg.Node("billing")

    @node.on(Bill)
    async def bill(command: Bill, ctx: fg.AsyncContext) -> None:
        ctx.session.add(command)

    @node.on(Placed, source="billing")
    async def note(placed: Placed, ctx: fg.AsyncContext) -> None:
        await ctx.db.execute("insert into orders values (?)", (placed.order,))

    return node


async def test_a_session_without_sqlalchemy_is_warned_of_at_the_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fg.Bus("memory:", nodes=[billing()], store="memory:"):
        assert not caplog.messages
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    async with fg.Bus("memory:", nodes=[billing()], store="memory:"):
        [text] = caplog.messages
    assert text == (
        "bill at billing (Bill) seems to use ctx.session, and that needs sqlalchemy, which is not installed: pip "
        "install 'faregate[sqlalchemy]'"
    )
