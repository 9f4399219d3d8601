"""Escalation: `@node.escalates` learns of each dead letter, and what it sends goes with its commit."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.journal import JournalReader
from faregate.core import escalation
from faregate.ports.faults import POINTS, Crash
from faregate.testing import FakeClock
from tests.core.rig import LONG


class Placed(fg.Event):
    name: str


class Escalated(fg.Event):
    message_id: str
    error: str


class Page(fg.Command):
    text: str


class Shop:
    """`billing` gives every order up; `support` hears of that."""

    def __init__(self, *, expires: float | None = None, schema: str | None = None) -> None:
        self.shop, self.billing, self.support = fg.Node("shop"), fg.Node("billing"), fg.Node("support", schema=schema)
        self.heard: list[Escalated] = []
        self.pages: list[str] = []
        self.letters: list[fg.DeadLetter] = []
        self.clock = FakeClock()
        self.fails = True

        @self.billing.on(Placed, source="shop", retry=None, redeliver=None, expires=expires)
        async def bill(placed: Placed, ctx: fg.Context) -> None:
            if self.fails:
                raise ValueError(f"{placed.name} cannot be billed")

        @self.support.on(Escalated, source="billing")
        async def hear(escalated: Escalated, ctx: fg.Context) -> None:
            self.heard.append(escalated)
            if schema is not None:
                await ctx.db.execute("insert into calls(message) values (?)", (escalated.message_id,))

        @self.support.on(Page)
        async def page(page: Page) -> None:
            self.pages.append(page.text)

    def escalate(self) -> None:
        @self.billing.escalates
        async def tell(letter: fg.DeadLetter) -> Any:
            self.letters.append(letter)
            told = Escalated(message_id=letter.message_id, error=letter.error.splitlines()[0])
            return [told, fg.send(Page(text=letter.reason), to="support")]

    def bus(self, transport: str = "memory:", **options: Any) -> fg.Bus:
        nodes = [self.shop, self.billing, self.support]
        return fg.Bus(transport, nodes=nodes, clock=self.clock, stall_seconds=None, **options)

    async def idle(self, bus: fg.Bus) -> None:
        """Let time pass until nothing is in flight."""
        async with asyncio.timeout(LONG):
            idle = asyncio.ensure_future(bus.idle())
            while not idle.done():
                await self.clock.advance(1)
            await idle


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_escalation_for_human_intervention_when_a_message_is_escalated(store: str | None) -> None:
    """Seed 004: there will always be a point at which you give up."""
    it = Shop()
    it.escalate()
    async with it.bus(store=store) as bus:
        await bus.publish(Placed(name="17"), node="shop")
        await it.idle(bus)
        [letter] = await bus.dead_letters()
        assert bus.alarms == {"dead-letter": 1}
    [told] = it.letters
    assert (told.node, told.reason, told.message_id) == ("billing", "failed", letter.message_id)
    assert it.heard == [Escalated(message_id=letter.message_id, error="ValueError: 17 cannot be billed")]
    assert it.pages == ["failed"]


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_what_expires_in_the_queue_is_escalated_too(store: str | None) -> None:
    it = Shop(expires=5)
    it.escalate()
    async with it.bus(store=store) as bus:
        await bus.pause("billing", Placed)
        await bus.publish(Placed(name="17"), node="shop")
        await it.clock.advance(6)
        await it.idle(bus)
        assert len(await bus.dead_letters()) == 1
    assert it.pages == ["expired"]


async def test_its_messages_are_about_the_dead_letter_and_no_output_of_a_handler() -> None:
    it = Shop()
    it.escalate()
    seen: list[fg.Context] = []

    async def see(ctx: fg.Context, call_next: Any) -> None:
        seen.append(ctx)
        await call_next()

    it.support.use(see)
    async with it.bus(store="memory:") as bus:
        root = await bus.publish(Placed(name="17"), node="shop")
        await it.idle(bus)
        [letter] = await bus.dead_letters()
    for ctx in seen:
        assert (ctx.correlation_id, ctx.causation_id, ctx.source) == (root, None, "billing")
        assert ctx.headers == {"faregate-escalates": letter.message_id}


@pytest.mark.parametrize("point", list(POINTS))
async def test_escalation_is_published_once_whatever_crashes(point: str, tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path}/shop.db"
    published: list[str] = []

    async def run() -> None:
        it = Shop(schema="create table if not exists calls(message text)")
        it.escalate()
        nodes = [it.shop, it.billing, it.support]
        async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=store) as bus:
            await bus.publish(Placed(name="1"), node="shop", idempotency_key="1")
            await bus.idle(timeout=LONG)
            published[:] = [letter.message_id for letter in await bus.dead_letters(status=None)]

    async with asyncio.timeout(5 * LONG):
        with fg.testing.crash_at(point):
            for _ in range(2):  # the second bus is the process that comes back
                with contextlib.suppress(Crash, fg.OutcomeUnknown):
                    await run()
        await run()
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert connection.execute("select message from calls").fetchall() == [(published[0],)]
        assert connection.execute("select count(*) from faregate_outbox").fetchall() == [(0,)]
    log = JournalReader(tmp_path / "data")
    ids = [envelope.publication_id for _, envelope in log.envelopes() if envelope.type == "Escalated"]
    assert len(ids) == 1


async def test_it_is_in_the_very_commit_of_the_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails that commit takes both with it; they come together the next time."""
    it = Shop()
    it.escalate()
    refused = 0

    async def hook(point: str) -> None:
        nonlocal refused
        if point == "unit.before-commit" and refused < 2 and it.letters:
            refused += 1
            raise fg.StoreUnavailable("the dead letter cannot be written now")

    async with it.bus(store="memory:") as bus:
        monkeypatch.setattr("faregate.ports.faults.hook", hook)
        await bus.publish(Placed(name="17"), node="shop")
        async with asyncio.timeout(LONG):
            while refused < 2:
                await it.clock.advance(1)
                assert it.heard == [] and await bus.dead_letters() == []
        await it.idle(bus)
        assert len(await bus.dead_letters()) == 1
    assert len(it.letters) == 3  # it was called again, and says the same
    assert len(it.heard) == len(it.pages) == 1


async def test_a_replay_that_is_escalated_again_is_escalated_again() -> None:
    it = Shop()
    it.escalate()
    async with it.bus(store="memory:") as bus:
        await bus.publish(Placed(name="17"), node="shop")
        await it.idle(bus)
        [letter] = await bus.dead_letters()
        await bus.replay(letter.message_id)
        await it.idle(bus)
        assert len(await bus.dead_letters()) == 1
    assert len(it.heard) == len(it.pages) == 2


def raises(letter: fg.DeadLetter) -> None:
    raise RuntimeError("nobody is there")


async def raises_later(letter: fg.DeadLetter) -> None:
    raise RuntimeError("nobody is there")


def ends_the_process(letter: fg.DeadLetter) -> None:
    raise SystemExit(1)


async def returns_no_message(letter: fg.DeadLetter) -> int:
    return 17


async def returns_a_bare_command(letter: fg.DeadLetter) -> Any:
    return Page(text="x")


async def names_it(letter: fg.DeadLetter) -> Any:
    return fg.publish(Escalated(message_id="x", error="x"), idempotency_key="x")


async def answers(letter: fg.DeadLetter) -> Any:
    return fg.reply(Escalated(message_id="x", error="x"))


async def cancels_itself(letter: fg.DeadLetter) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def hangs(letter: fg.DeadLetter) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("store", [None, "memory:"])
@pytest.mark.parametrize(
    "function",
    [
        raises,
        raises_later,
        ends_the_process,
        returns_no_message,
        returns_a_bare_command,
        names_it,
        answers,
        cancels_itself,
        hangs,
    ],
)
async def test_an_error_in_it_never_loses_the_dead_letter(
    function: Any, store: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escalation, "_SECONDS", 0.05)
    it = Shop()
    it.billing.escalates(function)
    told: list[fg.Alarm] = []
    async with it.bus(store=store) as bus:
        bus.on_alarm(told.append)
        await bus.publish(Placed(name="17"), node="shop")
        await it.idle(bus)
        [letter] = await bus.dead_letters()
        assert letter.reason == "failed"
        assert bus.outcomes()["dead"] == 1
    [alarm] = [each for each in told if each.kind == "escalation"]
    assert (alarm.node, alarm.message_id) == ("billing", letter.message_id)
    assert alarm.text.endswith("The dead letter is kept")
    assert not it.heard, "nobody hears of what was refused"


async def test_without_a_store_a_message_that_cannot_be_sent_is_an_alarm_and_the_dead_letter_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Shop()
    it.escalate()
    async with it.bus() as bus:
        await bus.publish(Placed(name="17"), node="shop")

        async def publish(envelopes: Any) -> None:
            raise fg.BrokerUnavailable("away")

        monkeypatch.setattr(bus.transport, "publish", publish)
        await it.idle(bus)
        assert len(await bus.dead_letters()) == 1
        assert bus.alarms["escalation"] == 1


@pytest.mark.parametrize("shape", ["function", "generator", "async generator"])
async def test_it_may_be_any_kind_of_function(shape: str) -> None:
    it = Shop()

    def message(letter: fg.DeadLetter) -> Escalated:
        return Escalated(message_id=letter.message_id, error=shape)

    def plain(letter: fg.DeadLetter) -> Escalated:
        return message(letter)

    def generator(letter: fg.DeadLetter) -> Iterator[Escalated]:
        yield message(letter)

    async def async_generator(letter: fg.DeadLetter) -> AsyncIterator[Escalated]:
        yield message(letter)

    it.billing.escalates({"function": plain, "generator": generator, "async generator": async_generator}[shape])
    async with it.bus(store="memory:") as bus:
        await bus.publish(Placed(name="17"), node="shop")
        await it.idle(bus)
    assert [each.error for each in it.heard] == [shape]


async def test_a_message_about_a_dead_letter_that_is_escalated_itself_is_not_escalated_again() -> None:
    """Or two dead letters would go on making each other."""
    it = Shop()

    @it.billing.on(Escalated, source="billing", retry=None, redeliver=None)
    async def fail_too(escalated: Escalated) -> None:
        raise ValueError("this, too")

    it.escalate()
    async with it.bus(store="memory:") as bus:
        await bus.publish(Placed(name="17"), node="shop")
        await it.idle(bus)
        assert {letter.type for letter in await bus.dead_letters()} == {"Placed", "Escalated"}
        assert bus.alarms["dead-letter"] == 2
    assert len(it.letters) == 1


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_outgoing_middlewares_see_what_it_sends(store: str | None) -> None:
    it = Shop()
    it.escalate()
    seen: list[str] = []

    async def see(out: Any, call_next: Any) -> None:
        seen.append(out.type)
        await call_next()

    it.billing.use_outgoing(see)
    async with it.bus(store=store) as bus:
        await bus.publish(Placed(name="17"), node="shop")
        await it.idle(bus)
    assert sorted(seen) == ["Escalated", "Page"]
    assert len(it.heard) == 1


def test_a_function_that_cannot_escalate_is_refused_where_it_is_declared() -> None:
    node = fg.Node("n")
    with pytest.raises(fg.WrongSignature, match=r"takes one parameter, an fg\.DeadLetter"):

        @node.escalates
        async def two(letter: fg.DeadLetter, ctx: fg.Context) -> None: ...

    with pytest.raises(fg.WrongSignature, match=r"takes one parameter, an fg\.DeadLetter"):

        @node.escalates
        async def wrong(placed: Placed) -> None: ...

    node.escalates(raises)
    with pytest.raises(fg.HandlerConflict, match="escalates a DeadLetter already"):
        node.escalates(raises_later)


class Down(fg.Event):
    handler: str
    reason: str


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_escalation_for_human_intervention_when_a_switch_trips(store: str | None) -> None:
    shop, billing, support, clock = fg.Node("shop"), fg.Node("billing"), fg.Node("support"), FakeClock()
    told: list[fg.SwitchTripped] = []
    heard: list[tuple[str, str, str]] = []

    @billing.on(Placed, source="shop")
    async def bill(placed: Placed) -> None:
        raise fg.Unavailable("the bank is closed", retry_after=100)

    @billing.escalates
    def tell(trip: fg.SwitchTripped) -> Any:
        told.append(trip)
        yield Down(handler=trip.handler, reason=trip.reason)

    @support.on(Down, source="billing")
    async def hear(down: Down, ctx: fg.Context) -> None:
        heard.append((down.handler, down.reason, ctx.headers["faregate-escalates"]))

    async with fg.Bus("memory:", nodes=[shop, billing, support], clock=clock, store=store, stall_seconds=None) as bus:
        await bus.publish_many([Placed(name=str(number)) for number in range(3)], node="shop")
        async with asyncio.timeout(LONG):
            while not heard:
                await clock.advance(0.1)
                await asyncio.sleep(0.002)
        assert bus.alarms["kill-switch"] == 1 and bus.outcomes()["dead"] == 0
        assert bus.status()
    [trip] = told
    assert (trip.node, trip.type, trip.handler) == ("billing", "Placed", "bill")
    assert "the bank is closed" in trip.reason
    assert heard == [("bill", trip.reason, f"bill@{trip.since}")]


async def test_a_function_for_trips_that_fails_is_an_alarm_and_the_switch_goes_on_asking() -> None:
    shop, billing, clock = fg.Node("shop"), fg.Node("billing"), FakeClock()
    is_down = True

    @billing.on(Placed, source="shop")
    async def bill(placed: Placed) -> None:
        if is_down:
            raise fg.Unavailable("the bank is closed")

    @billing.escalates
    async def tell(trip: fg.SwitchTripped) -> None:
        raise RuntimeError("no pager")

    async with fg.Bus("memory:", nodes=[shop, billing], clock=clock, stall_seconds=None) as bus:
        await bus.publish(Placed(name="a"), node="shop")
        async with asyncio.timeout(LONG):
            while not bus.alarms["escalation"]:
                await clock.advance(0.1)
                await asyncio.sleep(0.002)
        is_down = False
        async with asyncio.timeout(LONG):
            while bus.outcomes()["handled"] == 0:
                await clock.advance(5)
                await asyncio.sleep(0.002)
    assert bus.alarms == {"kill-switch": 1, "escalation": 1}


def test_a_node_may_escalate_both_and_each_once() -> None:
    node = fg.Node("billing")

    @node.escalates
    async def tell(letter: fg.DeadLetter) -> None: ...

    @node.escalates
    async def tell_of_trips(trip: fg.SwitchTripped) -> None: ...

    for function in (tell, tell_of_trips):
        with pytest.raises(fg.HandlerConflict, match="already"):
            node.escalates(function)

    async def wrong(order: Placed) -> None: ...

    with pytest.raises(fg.WrongSignature, match=r"fg\.DeadLetter or an fg\.SwitchTripped"):
        node.escalates(wrong)
