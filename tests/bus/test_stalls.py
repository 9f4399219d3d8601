"""Whatever has work and makes no progress for a while is named in an alarm (guarantees.md, Alarms)."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.durable import DurableBroker
from faregate.broker.queue import Queue
from faregate.bus.stalls import StallDetector
from faregate.core.alarms import Alarms
from faregate.core.handling import Handling
from faregate.core.pace import BATCH_LIMIT
from faregate.ids import message_id
from faregate.message import Envelope
from faregate.testing.clock import FakeClock
from faregate.transports.memory import MemoryTransport

LONG = 30  # seconds until a test that hangs is failed


class Placed(fg.Event):
    number: int


class Noted(fg.Event):
    number: int


class Rig:
    """A shop, a node that handles what it places, and a clock that stands still."""

    def __init__(self, store: str | None, **options: Any) -> None:
        self.clock = FakeClock()
        self.transport = MemoryTransport(clock=self.clock)
        self.billing = fg.Node("billing")
        self.go_on = asyncio.Event()
        self.alarms: list[fg.Alarm] = []
        nodes = [self.billing, fg.Node("shop")]

        @self.billing.on(Placed, source="shop", order=fg.Serial())
        async def bill(placed: Placed) -> Any:
            if placed.number == 3:
                await self.go_on.wait()
            return Noted(number=placed.number)

        self.bus = fg.Bus(self.transport, nodes=nodes, store=store, clock=self.clock, drain_seconds=0, **options)
        self.bus.on_alarm(self.alarms.append)


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_a_slow_handler_is_named_with_its_message_and_again_when_that_has_doubled(
    store: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a batch, whose other messages are not what it waits for."""
    if store is not None:
        monkeypatch.setattr(Handling, "batch", BATCH_LIMIT)
    rig = Rig(store)
    async with rig.bus as bus:
        published = await bus.publish_many([Placed(number=number) for number in range(6)], node="shop")
        await rig.clock.advance(59)
        assert rig.alarms == []
        await rig.clock.advance(16)
        [alarm] = rig.alarms
        assert (alarm.kind, alarm.node, alarm.message_id) == ("stalled", "billing", message_id(published[3], "billing"))
        assert alarm.text.startswith(f"a lane of bill at billing (Placed from shop) works on Placed {published[3]}")
        assert alarm.text.endswith("without progress for 60 s")
        await rig.clock.advance(45)
        assert len(rig.alarms) == 1
        await rig.clock.advance(30)
        assert rig.alarms[1].text.endswith("without progress for 120 s")
        rig.go_on.set()
        await bus.idle(timeout=LONG)
        await rig.clock.advance(600)
        assert bus.alarms == {"stalled": 2}


async def test_a_lane_that_goes_on_is_no_stall() -> None:
    rig = Rig("memory:", stall_seconds=8)
    async with rig.bus as bus:
        for number in (10, 11, 12, 13, 14, 15):
            await bus.publish(Placed(number=number), node="shop")
            await rig.clock.advance(5)
        assert rig.alarms == []


async def test_a_dispatcher_that_is_not_answered_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("memory:")
    answer = asyncio.Event()
    publish = rig.transport.publish

    async def hang(envelopes: Sequence[Envelope]) -> None:
        if any(envelope.causation_id for envelope in envelopes):
            await answer.wait()
        await publish(envelopes)

    monkeypatch.setattr(rig.transport, "publish", hang)
    async with rig.bus as bus:
        await bus.publish(Placed(number=1), node="shop")
        await rig.clock.advance(80)
        [alarm] = rig.alarms
        assert alarm.kind == "stalled" and alarm.node == "billing"
        assert alarm.text.startswith("the dispatcher of memory:")
        answer.set()


async def test_a_pump_that_hands_nothing_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_pump", lambda self: None)
    rig = Rig(None)
    async with rig.bus as bus:
        published = await bus.publish(Placed(number=1), node="shop")
        await rig.clock.advance(80)
        [alarm] = rig.alarms
        assert (alarm.kind, alarm.node, alarm.message_id) == ("stalled", "billing", published)
        assert alarm.text.startswith("the pump of billing.Placed.shop hands out Placed")


async def test_a_serial_subscription_that_waits_for_a_later_try_is_no_stall() -> None:
    clock, billing, shop = FakeClock(), fg.Node("billing"), fg.Node("shop")

    @billing.on(Placed, source="shop", order=fg.Serial(), retry=None, redeliver=fg.Redeliver(600.0))
    async def bill(placed: Placed, ctx: fg.Context) -> None:
        if not ctx.redeliveries:
            raise LookupError("not now")

    async with fg.Bus(MemoryTransport(clock=clock), nodes=[billing, shop], clock=clock) as bus:
        await bus.publish_many([Placed(number=number) for number in range(3)], node="shop")
        await clock.advance(500)
        assert not bus.alarms


async def test_an_intake_that_takes_nothing_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DurableBroker, "take_in_spool", lambda self: None)
    clock, shop = FakeClock(), fg.Node("shop")
    alarms: list[fg.Alarm] = []
    async with fg.Bus(f"journal:{tmp_path}/data", nodes=[shop], clock=clock) as bus:
        bus.on_alarm(alarms.append)
        await fg.Bus(f"journal:{tmp_path}/data", nodes=[shop]).spool(Placed(number=1))
        await clock.advance(80)
    [alarm] = alarms
    assert alarm.kind == "stalled" and alarm.text.startswith("the intake takes in ")


async def test_an_event_loop_that_was_held_is_told_of() -> None:
    class Held(FakeClock):
        behind = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.behind

    clock, alarms = Held(), Alarms()
    detector = StallDetector([], 60, clock, alarms)
    detector.start()
    clock.jump(100)
    assert not alarms.counts
    clock.behind = 70
    clock.jump(15)
    assert alarms.counts == {"stalled": 1}
    detector.stop()


async def test_nobody_looks_when_it_is_switched_off() -> None:
    rig = Rig(None, stall_seconds=None)
    async with rig.bus as bus:
        await bus.publish(Placed(number=3), node="shop")
        await rig.clock.advance(3600)
        assert rig.alarms == []


@pytest.mark.parametrize("seconds", [0, -1, float("inf")])
def test_a_limit_that_means_nothing_is_refused(seconds: float) -> None:
    with pytest.raises(fg.ConfigurationError, match="stall_seconds"):
        fg.Bus("memory:", nodes=[fg.Node("shop")], stall_seconds=seconds)
