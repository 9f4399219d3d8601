"""Scheduled delivery and expiry (broker.md, Queue) on the bench's clock and on the real one."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import faregate as fg


class Reminder(fg.Event):
    text: str


class Noted(fg.Event):
    text: str


def reader(handled: list[str], **options: Any) -> fg.Node:
    node = fg.Node("reader")

    @node.on(Reminder, source="planner", **options)
    async def read(reminder: Reminder) -> None:
        handled.append(reminder.text)

    return node


async def test_a_delayed_message_comes_when_its_time_has_come_and_not_before() -> None:
    handled: list[str] = []
    async with fg.testing.bench(reader(handled)) as bench:
        await bench.publish(Reminder(text="later"), delay=30)
        await bench.settle()
        assert handled == []
        await bench.advance(29)
        assert handled == []
        await bench.advance(1)
        assert handled == ["later"]
        await bench.advance(1_000)
        assert handled == ["later"]


async def test_a_message_scheduled_for_a_wall_time_comes_then() -> None:
    handled: list[str] = []
    async with fg.testing.bench(reader(handled)) as bench:
        await bench.publish(Reminder(text="at"), at=bench.clock.time() + 60)
        await bench.advance(59)
        assert handled == []
        await bench.advance(2)
        assert handled == ["at"]


async def test_a_wall_time_in_the_past_means_now() -> None:
    handled: list[str] = []
    async with fg.testing.bench(reader(handled)) as bench:
        await bench.publish(Reminder(text="past"), at=bench.clock.time() - 60)
        await bench.settle()
        assert handled == ["past"]


async def test_scheduled_messages_come_in_the_order_of_their_times() -> None:
    handled: list[str] = []
    async with fg.testing.bench(reader(handled, order=fg.Serial())) as bench:
        for delay in (50, 10, 40, 20, 30):
            await bench.publish(Reminder(text=str(delay)), delay=delay)
        await bench.publish(Reminder(text="now"))
        await bench.advance(60)
    assert handled == ["now", "10", "20", "30", "40", "50"]


async def test_a_scheduled_message_does_not_hold_its_key() -> None:
    handled: list[str] = []

    class Keyed(fg.Event):
        key: str
        text: str

    node = fg.Node("reader")

    async def read(message: Any) -> None:
        handled.append(message.text)

    node.on(Keyed, source="planner", key="key")(read)
    async with fg.testing.bench(node) as bench:
        await bench.publish(Keyed(key="a", text="later"), delay=30)
        await bench.publish(Keyed(key="a", text="now"))
        await bench.settle()
        assert handled == ["now"]
        await bench.advance(30)
    assert handled == ["now", "later"]


async def test_scheduled_messages_do_not_count_as_in_flight() -> None:
    handled: list[str] = []
    async with fg.Bus("memory:", nodes=[fg.Node("planner"), reader(handled)]) as bus:
        await bus.publish(Reminder(text="next week"), node="planner", delay=7 * 86_400)
        await bus.publish(Reminder(text="now"), node="planner")
        await bus.idle(timeout=30)
        assert handled == ["now"]
        assert bus.outcomes()["handled"] == 1


async def test_a_short_delay_passes_on_the_real_clock() -> None:
    came = asyncio.Event()
    node = fg.Node("reader")

    @node.on(Reminder, source="planner")
    async def read(reminder: Reminder) -> None:
        came.set()

    async with asyncio.timeout(30):
        async with fg.Bus("memory:", nodes=[fg.Node("planner"), node]) as bus:
            await bus.publish(Reminder(text="soon"), node="planner", delay=0.02)
            await came.wait()
            await bus.idle()
            assert bus.outcomes()["handled"] == 1


async def test_a_message_that_nobody_takes_in_time_is_a_dead_letter_as_expired() -> None:
    handled: list[str] = []
    node = reader(handled, expires=0.02)
    async with asyncio.timeout(30):
        async with fg.Bus("memory:", nodes=[fg.Node("planner"), node]) as bus:
            await bus.pause("reader", Reminder)
            await bus.publish(Reminder(text="stale"), node="planner")
            await bus.idle()
            [dead] = await bus.dead_letters("reader")
            assert bus.outcomes()["dead"] == 1
    assert dead.reason == "expired"
    assert handled == []


async def test_a_foreign_message_that_is_already_expired_is_a_dead_letter_unhandled() -> None:
    handled: list[str] = []
    async with fg.testing.bench(reader(handled)) as bench:
        for text, left in (("stale", -1), ("fresh", 60)):
            await bench.deliver(
                fg.Envelope(
                    publication_id=fg.ids.root_id(),
                    type="Reminder",
                    kind="event",
                    source="planner",
                    body=b'{"text": "%s"}' % text.encode(),
                    expires_at=bench.clock.time() + left,
                )
            )
        await bench.settle()
        assert [dead.reason for dead in bench.dead_letters()] == ["expired"]
    assert handled == ["fresh"]


async def test_a_message_that_is_being_handled_does_not_expire() -> None:
    node = fg.Node("reader")
    clock: dict[str, Any] = {}
    seen: list[float] = []

    @node.on(
        Reminder,
        source="planner",
        expires=5,
        retry=fg.Retry(1, delay=60),
        redeliver=None,
    )
    async def read(reminder: Reminder) -> Any:
        seen.append(clock["now"]())
        if len(seen) == 1:
            raise ValueError("wait a minute")  # in memory: the entry stays acquired meanwhile
        return Noted(text="done")

    async with fg.testing.bench(node) as bench:
        clock["now"] = bench.clock.time
        await bench.publish(Reminder(text="slow"))
        await bench.settle()
        assert bench.sent() == [Noted(text="done")]
        assert bench.dead_letters() == []
    assert seen[1] - seen[0] >= 60


@pytest.mark.parametrize("store", [None, "memory:"])
@pytest.mark.parametrize("by", ["sender", "subscription"])
async def test_what_was_fetched_expires_when_its_turn_comes_too_late(store: str | None, by: str) -> None:
    """The first takes a minute; the others wait for it in the hands of the same worker."""
    node, clock = fg.Node("reader"), fg.testing.FakeClock()
    begun, underway = list[str](), asyncio.Event()
    told: list[tuple[str, str | None, BaseException | None]] = []

    @node.on(Reminder, source="planner", order=fg.Serial(), expires=30 if by == "subscription" else None)
    async def read(reminder: Reminder) -> None:
        begun.append(reminder.text)
        if reminder.text == "slow":
            underway.set()
            await clock.sleep(60)

    async def tell(ctx: fg.Context, call_next: Any) -> None:
        told.append((ctx.message.text, ctx.outcome, ctx.error))

    node.use(tell, after=True)
    options: dict[str, Any] = {"expires": 30} if by == "sender" else {}
    bus = fg.Bus("memory:", nodes=[fg.Node("planner"), node], store=store, clock=clock)
    async with asyncio.timeout(30), bus:
        await bus.publish_many(
            [fg.publish(Reminder(text=text), **options) for text in ("slow", "stale", "late")], node="planner"
        )
        await underway.wait()
        assert len(bus._workers[0]._held) == 3, "all of them are fetched"
        await clock.advance(61)
        await bus.idle()
        assert [(dead.reason, dead.tries) for dead in await bus.dead_letters("reader")] == [("expired", 0)] * 2
        assert (bus.outcomes()["handled"], bus.outcomes()["dead"], bus.alarms["dead-letter"]) == (1, 2, 2)
    assert begun == ["slow"]
    assert [(text, outcome) for text, outcome, _ in told] == [("slow", "handled"), ("stale", "dead"), ("late", "dead")]
    assert isinstance(told[1][2], fg.Expired)


async def test_a_message_waiting_for_redelivery_beyond_its_expiry_is_a_dead_letter() -> None:
    calls: list[str] = []
    node = fg.Node("reader")

    @node.on(Reminder, source="planner", expires=50, retry=None, redeliver=fg.Redeliver(100))
    async def read(reminder: Reminder) -> None:
        calls.append(reminder.text)
        raise ValueError("no")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Reminder(text="stale"))
        await bench.settle()
        [dead] = bench.dead_letters()
    assert dead.reason == "expired"
    assert calls == ["stale"]


# --- how long a publication may wait ------------------------------------------------------------------------


class Ask(fg.Command):
    text: str


WAYS: dict[str, Any] = {
    "returned": lambda ctx, expires: fg.publish(Noted(text="x"), expires=expires),
    "a returned command": lambda ctx, expires: fg.send(Ask(text="x"), to="taker", expires=expires),
    "ctx.publish": lambda ctx, expires: ctx.publish(Noted(text="x"), expires=expires) and None,
    "ctx.send": lambda ctx, expires: ctx.send(Ask(text="x"), to="taker", expires=expires) and None,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("left", [-1, 1])
async def test_what_a_handler_sends_expires_when_nobody_takes_it_in_time(way: str, left: int) -> None:
    teller, taker, taken = fg.Node("teller"), fg.Node("taker"), list[str]()

    @teller.on(Reminder, source="planner")
    async def tell(reminder: Reminder, ctx: fg.Context) -> Any:
        return WAYS[way](ctx, timedelta(seconds=30))

    @taker.on(Noted, source="teller")
    async def note(noted: Noted) -> None:
        taken.append(noted.text)

    @taker.on(Ask)
    async def answer(ask: Ask) -> None:
        taken.append(ask.text)

    async with fg.testing.bench(teller, taker) as bench:
        for message in (Noted, Ask):
            await bench.bus.pause("taker", message)
        await bench.publish(Reminder(text="go"))
        await bench.settle()
        await bench.advance(30 - left)
        for message in (Noted, Ask):
            await bench.bus.resume("taker", message)
        await bench.settle()
        assert [dead.reason for dead in bench.dead_letters()] == (["expired"] if left < 0 else [])
        assert bench.bus.outcomes()["dead"] == (left < 0)
    assert taken == (["x"] if left > 0 else [])


async def test_what_is_published_from_outside_expires_too(tmp_path: Path) -> None:
    handled: list[str] = []
    node = reader(handled)

    @node.on(Ask)
    async def answer(ask: Ask) -> None:
        handled.append(ask.text)

    async with asyncio.timeout(30):
        clock = fg.testing.FakeClock()
        bus = fg.Bus(f"journal:{tmp_path}/data", nodes=[fg.Node("planner"), node], clock=clock)
        await bus.prepare()
        await bus.spool(Reminder(text="1"), node="planner", expires=10)
        await bus.spool(Ask(text="2"), to="reader", node="planner", expires=10)
        await clock.advance(20)
        async with bus:
            await bus.pause("reader", Reminder)
            await bus.pause("reader", Ask)
            await bus.publish(Reminder(text="3"), node="planner", expires=10)
            await bus.send(Ask(text="4"), to="reader", node="planner", expires=10)
            await bus.publish_many([fg.publish(Reminder(text="5"), expires=10)], node="planner")
            await clock.advance(20)
            await bus.idle()
            assert [dead.reason for dead in await bus.dead_letters("reader")] == ["expired"] * 5
    assert handled == []


@pytest.mark.parametrize(("mine", "theirs"), [(10, 50), (50, 10), (10, None), (None, 10)])
async def test_of_what_sender_and_recipient_say_the_earlier_counts_from_when_a_message_set_out(
    mine: int | None, theirs: int | None
) -> None:
    handled: list[str] = []
    async with fg.testing.bench(reader(handled, expires=theirs)) as bench:
        await bench.bus.pause("reader", Reminder)
        await bench.publish(Reminder(text="now"), expires=mine)
        await bench.publish(Reminder(text="later"), expires=mine, delay=20)
        await bench.advance(9)
        assert bench.dead_letters() == []
        await bench.advance(2)
        assert [dead.reason for dead in bench.dead_letters()] == ["expired"], "the first, 10 s after it was sent"
        await bench.advance(18)
        assert len(bench.dead_letters()) == 1
        await bench.advance(2)
        assert len(bench.dead_letters()) == 2, "the second, 10 s after it was due"
    assert handled == []


async def test_a_replay_of_what_expired_is_handled() -> None:
    handled: list[str] = []
    async with fg.testing.bench(reader(handled, expires=10)) as bench:
        await bench.bus.pause("reader", Reminder)
        await bench.publish(Reminder(text="stale"), expires=5)
        await bench.advance(60)
        await bench.bus.resume("reader", Reminder)
        await bench.settle()
        [dead] = await bench.bus.dead_letters()
        await bench.bus.replay(dead.message_id)
        await bench.settle()
        assert await bench.bus.dead_letters() == []
    assert handled == ["stale"]


@pytest.mark.parametrize("bad", [0, -1, float("inf"), float("nan"), "30", True, timedelta(seconds=-1)])
async def test_a_life_that_is_no_time_is_refused(bad: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match="expires"):
        fg.publish(Noted(text="x"), expires=bad)
    with pytest.raises(fg.ConfigurationError, match="expires"):
        fg.send(Ask(text="x"), to="taker", expires=bad)
    with pytest.raises(fg.ConfigurationError, match="expires"):
        reader([], expires=bad)


async def test_a_delay_and_a_wall_time_together_are_refused() -> None:
    handled: list[str] = []
    async with fg.Bus("memory:", nodes=[fg.Node("planner"), reader(handled)]) as bus:
        with pytest.raises((fg.FaregateError, ValueError, TypeError)):
            await bus.publish(Reminder(text="both"), node="planner", delay=1, at=2)
        await bus.idle(timeout=30)
    assert handled == []


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_delays_and_redeliveries_are_durations_whatever_the_wall_clock_does(jump: float) -> None:
    tries: list[str] = []
    node = fg.Node("reader")

    @node.on(Reminder, source="planner", retry=None, redeliver=fg.Redeliver(50))
    async def read(reminder: Reminder) -> Any:
        tries.append(reminder.text)
        if reminder.text != "delayed" and tries.count(reminder.text) == 1:
            if reminder.text == "asks":
                raise fg.RetryAfter(50)
            raise RuntimeError("once")
        return fg.publish(Noted(text=reminder.text), delay=50)

    @node.on(Noted, source="reader")
    async def note(noted: Noted) -> None:
        tries.append(f"noted {noted.text}")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Reminder(text="fails"))
        await bench.publish(Reminder(text="asks"))
        await bench.advance(1)
        await bench.publish(Reminder(text="delayed"), delay=49)
        bench.clock.set_wall(jump)
        assert tries == ["fails", "asks"]
        await bench.advance(48)
        assert tries == ["fails", "asks"]
        await bench.advance(2)
        assert sorted(tries) == ["asks", "asks", "delayed", "fails", "fails"]
        bench.clock.set_wall(-jump)
        await bench.advance(48)
        assert len(tries) == 5
        await bench.advance(60)
        assert sorted(tries)[5:] == ["noted asks", "noted delayed", "noted fails"]


async def test_a_wall_clock_that_was_set_forward_for_a_while_makes_no_message_too_old_to_be_told_from_a_copy() -> None:
    handled: list[str] = []
    async with fg.testing.bench(reader(handled)) as bench:
        bench.clock.set_wall(400 * 86_400.0)
        await bench.advance(1_000)
        bench.clock.set_wall(-400 * 86_400.0)
        await bench.publish(Reminder(text="after"))
        await bench.settle()
        assert handled == ["after"] and bench.dead_letters() == []


async def test_what_was_published_with_something_scheduled_is_not_overtaken(tmp_path: Path) -> None:
    handled: list[str] = []
    nodes = [fg.Node("planner"), reader(handled, order=fg.Serial())]
    async with fg.Bus(f"journal:{tmp_path}/journal", nodes=nodes, store=f"sqlite:{tmp_path}/s.db") as bus:
        for number in range(0, 20, 2):
            both = [fg.publish(Reminder(text=f"{number}")), fg.publish(Reminder(text="later"), delay=600)]
            await bus.publish_many(both, node="planner")
            await bus.publish(Reminder(text=f"{number + 1}"), node="planner")
        await bus.idle(timeout=10)
    assert handled == [f"{number}" for number in range(20)]


async def test_who_publishes_with_something_scheduled_does_not_wait_for_a_bus_that_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[str] = []
    tried = asyncio.Event()

    async def refuse(_: Any) -> None:
        tried.set()
        raise fg.BrokerUnavailable("nobody answers")

    def bus() -> fg.Bus:
        nodes = [fg.Node("planner"), reader(handled)]
        return fg.Bus("memory:", nodes=nodes, store=f"sqlite:{tmp_path}/s.db", drain_seconds=0)

    async with asyncio.timeout(20):
        async with bus() as first:
            monkeypatch.setattr(first.transport, "publish", refuse)
            both = [fg.publish(Reminder(text="now")), fg.publish(Reminder(text="later"), delay=600)]
            publishing = asyncio.create_task(first.publish_many(both, node="planner"))
            await tried.wait()
            assert not publishing.done()
        assert len(await publishing) == 2  # they are in the outbox
        async with bus() as second:
            await second.idle()
    assert handled == ["now"]
