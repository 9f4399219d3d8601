"""The breaker on sending: closed, open, half-open with one trial (seed 004, "Failures When Sending")."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.core.alarms import Alarms
from faregate.core.breaker import Circuit
from faregate.message import Envelope
from faregate.testing import FakeClock
from faregate.testing.clock import rest
from faregate.transports.journal import JournalTransport
from faregate.transports.memory import MemoryTransport
from tests.core.rig import INSERT, LONG, TABLE, Answered, Asked, Told, notes, numbers


class Outage:
    """The broker of a bus takes nothing while it is down; what would have reached it is noted."""

    def __init__(self, bus: fg.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_down = True
        self.error: Callable[[], BaseException] = lambda: fg.BrokerUnavailable("the broker is away")
        self.reached: list[Sequence[Envelope]] = []
        self.hold: asyncio.Event | None = None
        """What a publish waits for before it ends."""
        real = bus.transport.publish

        async def publish(envelopes: Sequence[Envelope]) -> None:
            self.reached.append(envelopes)
            if self.hold is not None:
                await self.hold.wait()
            if self.is_down:
                raise self.error()
            await real(envelopes)

        monkeypatch.setattr(bus.transport, "publish", publish)


def shop_bus(**options: Any) -> tuple[fg.Bus, FakeClock]:
    clock = FakeClock()
    asking, answering = fg.Node("asking"), fg.Node("answering")

    @answering.on(Told)
    async def hear(told: Told) -> None:
        pass

    return fg.Bus("memory:", nodes=[asking, answering], clock=clock, **options), clock


async def fail(bus: fg.Bus, times: int) -> None:
    for n in range(times):
        with pytest.raises(fg.BrokerUnavailable):
            await bus.publish(Asked(n=n), node="asking")


# --- the machine ------------------------------------------------------------------------------------------------


def machine(failures: int = 2, seconds: float = 5.0) -> tuple[Circuit, FakeClock, Alarms]:
    clock, alarms = FakeClock(), Alarms()
    return Circuit(fg.Breaker(failures, seconds), clock, alarms), clock, alarms


AWAY = fg.BrokerUnavailable("away")


def test_it_opens_after_failures_in_a_row_and_a_success_between_begins_anew() -> None:
    circuit, _, _ = machine(failures=3)
    circuit.failed(AWAY)
    circuit.failed(AWAY)
    circuit.succeeded()
    circuit.failed(AWAY)
    circuit.failed(AWAY)
    assert circuit.closed
    circuit.failed(AWAY)
    assert circuit.status.state == "open"


def test_open_refuses_until_its_seconds_are_over_and_then_admits_one_trial() -> None:
    circuit, clock, _ = machine()
    circuit.failed(AWAY)
    circuit.failed(AWAY)
    clock.jump(4.9)
    with pytest.raises(fg.BreakerOpen):
        circuit.admit()
    clock.jump(0.2)
    assert circuit.admit()
    assert circuit.status.state == "half-open"
    with pytest.raises(fg.BreakerOpen):
        circuit.admit()


def test_a_trial_that_fails_opens_it_again_for_as_long_and_one_that_succeeds_closes_it() -> None:
    circuit, clock, alarms = machine()
    circuit.failed(AWAY)
    circuit.failed(AWAY)
    clock.jump(5)
    assert circuit.admit()
    circuit.trial_failed(AWAY)
    assert circuit.status.state == "open"
    clock.jump(4.9)
    with pytest.raises(fg.BreakerOpen):
        circuit.admit()
    clock.jump(0.2)
    assert circuit.admit()
    circuit.trial_succeeded()
    assert circuit.status == ("closed", 0, None, None, None)
    assert not circuit.admit()
    assert alarms.counts == {"breaker": 1}  # an outage is told of once


def test_what_began_before_it_opened_and_ends_late_changes_nothing() -> None:
    circuit, clock, _ = machine()
    circuit.failed(AWAY)
    circuit.failed(AWAY)
    circuit.succeeded()
    assert circuit.status.state == "open"
    clock.jump(5)
    circuit.admit()
    circuit.failed(AWAY)
    assert circuit.status.state == "half-open"


@pytest.mark.parametrize(
    ("exc", "counts"),
    [
        (fg.BrokerUnavailable("away"), True),
        (fg.OutcomeUnknown("no confirm"), True),
        (fg.JournalFull("no room"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (fg.Unroutable("nobody"), False),
        (fg.MessageTooLarge("too large"), False),
        (fg.ConfigurationError("wrong"), False),
        (fg.StoreUnavailable("the store"), False),
        (fg.CommitUnknown("the store"), False),
        (fg.BreakerOpen("already"), False),
        (ValueError("a defect"), False),
    ],
)
def test_only_a_broker_that_takes_nothing_now_counts(exc: BaseException, counts: bool) -> None:
    circuit, _, _ = machine(failures=1)
    circuit.failed(exc)
    assert circuit.closed is not counts


def test_a_refused_trial_closes_it_since_the_broker_answered() -> None:
    circuit, clock, _ = machine(failures=1)
    circuit.failed(AWAY)
    clock.jump(5)
    assert circuit.admit()
    circuit.trial_failed(fg.Unroutable("nobody"))
    assert circuit.closed


@pytest.mark.parametrize("wrong", [{"failures": 0}, {"failures": True}, {"seconds": 0}, {"seconds": -1}])
def test_a_breaker_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(fg.ConfigurationError, match="Breaker"):
        fg.Breaker(**wrong)
    with pytest.raises(fg.ConfigurationError, match=r"breaker takes an fg\.Breaker"):
        fg.Bus("memory:", nodes=[fg.Node("n")], breaker=5)  # type: ignore[arg-type]


# --- publishing outside of handlers ------------------------------------------------------------------------------


async def test_circuit_breaker_while_it_is_open_publishing_fails_at_once_and_nothing_reaches_the_broker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bus, clock = shop_bus()
    told: list[fg.Alarm] = []
    bus.on_alarm(told.append)
    async with bus:
        outage = Outage(bus, monkeypatch)
        await fail(bus, 4)
        assert bus.breaker == ("closed", 4, None, None, None)
        await fail(bus, 1)
        opened_at = clock.time()
        assert len(outage.reached) == 5
        clock.jump(2)
        with pytest.raises(
            fg.BreakerOpen, match=r"publishing fails since 2023-.*BrokerUnavailable.*in 3\.0 s"
        ) as refused:
            await bus.publish(Asked(n=1), node="asking")
        assert refused.value.retry_after == pytest.approx(3)
        with pytest.raises(fg.BreakerOpen):
            await bus.send(Told(n=1), to="answering", node="asking")
        with pytest.raises(fg.BreakerOpen):
            await bus.publish_many(numbers(3), node="asking")
        assert len(outage.reached) == 5
        status = bus.breaker
        assert status is not None
        assert (status.state, status.since, status.trial_at) == ("open", opened_at, pytest.approx(opened_at + 5))
        assert [(each.kind, each.node, each.message_id) for each in told] == [("breaker", "", "")]

        outage.is_down = False
        clock.jump(3)
        with caplog.at_level(logging.WARNING, logger="faregate.bus"):
            await bus.publish(Asked(n=2), node="asking")
        assert "the breaker is closed after 5.0 s" in caplog.text
        assert bus.breaker == ("closed", 0, None, None, None)
        assert len(outage.reached) == 6


async def test_circuit_breaker_half_open_lets_exactly_one_of_many_publishers_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, clock = shop_bus()
    async with bus:
        outage = Outage(bus, monkeypatch)
        await fail(bus, 5)
        outage.reached.clear()
        clock.jump(5)

        async def round_of_publishers(*, is_down: bool) -> list[BaseException]:
            outage.is_down, outage.hold = is_down, asyncio.Event()
            ways: list[Any] = [bus.publish(Asked(n=n), node="asking") for n in range(100)]
            ways += [bus.send(Told(n=n), to="answering", node="asking") for n in range(100)]
            ways += [bus.publish_many(numbers(2), node="asking") for _ in range(100)]
            publishers = [asyncio.ensure_future(each) for each in ways]
            await rest()
            assert len(outage.reached) == 1
            assert bus.breaker is not None and bus.breaker.state == "half-open"
            assert sum(each.done() for each in publishers) == 299  # they did not wait for the trial
            outage.hold.set()
            ended = await asyncio.gather(*publishers, return_exceptions=True)
            return [each for each in ended if isinstance(each, BaseException)]

        errors = await round_of_publishers(is_down=True)
        assert sum(isinstance(each, fg.BreakerOpen) for each in errors) == 299
        assert len(errors) == 300
        assert bus.breaker is not None and bus.breaker.state == "open"
        outage.reached.clear()
        clock.jump(5)
        errors = await round_of_publishers(is_down=False)
        assert len(errors) == 299
        assert bus.breaker.state == "closed"
        await bus.publish_many(numbers(2), node="asking")


async def test_a_trial_that_is_cancelled_does_not_leave_it_half_open(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, clock = shop_bus(breaker=fg.Breaker(failures=1, seconds=2))
    async with bus:
        outage = Outage(bus, monkeypatch)
        await fail(bus, 1)
        clock.jump(2)
        outage.hold = asyncio.Event()
        trial = asyncio.ensure_future(bus.publish(Asked(n=1), node="asking"))
        await rest()
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        assert bus.breaker is not None and bus.breaker.state == "open"
        outage.hold, outage.is_down = None, False
        clock.jump(2)
        await bus.publish(Asked(n=1), node="asking")
        assert bus.breaker.state == "closed"


async def test_whoever_publishes_again_at_once_does_not_keep_the_others_from_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, clock = shop_bus(breaker=fg.Breaker(failures=1, seconds=2))
    async with bus:
        outage = Outage(bus, monkeypatch)
        await fail(bus, 1)

        async def comes_back() -> None:
            await asyncio.sleep(0)
            outage.is_down = False
            clock.jump(2)

        coming = asyncio.ensure_future(comes_back())
        refused = 0
        while True:
            try:
                await bus.publish(Asked(n=1), node="asking")
                break
            except fg.BreakerOpen:
                refused += 1
                assert refused < 1000, "nothing else ever runs"
        await coming
        assert refused and bus.breaker is not None and bus.breaker.state == "closed"


async def test_what_nobody_takes_never_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, _ = shop_bus(breaker=fg.Breaker(failures=1))
    async with bus:
        for _ in range(10):
            with pytest.raises(fg.Unroutable):
                await bus.send(Told(n=1), to="nobody", node="asking")
        assert bus.breaker is not None and bus.breaker.state == "closed"
        assert bus.alarms["breaker"] == 0


async def test_with_outgoing_middlewares_each_failure_counts_once_even_one_that_they_swallow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asking = FakeClock(), fg.Node("asking")
    swallows = False

    async def fall_back(out: Any, call_next: Any) -> None:
        try:
            await call_next()
        except fg.BrokerUnavailable:
            if not swallows:
                raise

    asking.use_outgoing(fall_back)
    async with fg.Bus("memory:", nodes=[asking], clock=clock, breaker=fg.Breaker(failures=3)) as bus:
        Outage(bus, monkeypatch)
        await fail(bus, 1)
        assert bus.breaker is not None and bus.breaker.failures == 1
        swallows = True
        await bus.publish(Asked(n=1))
        assert bus.breaker.failures == 2
        await bus.publish(Asked(n=1))
        assert bus.breaker.state == "open"


async def test_a_journal_that_refuses_when_it_is_called_opens_it_as_well(tmp_path: Path) -> None:
    asking = fg.Node("asking")
    async with fg.Bus(f"journal:{tmp_path}", nodes=[asking], breaker=fg.Breaker(failures=3)) as bus:
        await bus.publish(Asked(n=0))
        assert isinstance(bus.transport, JournalTransport)
        bus.transport.journal.fail(OSError("the disk is gone"))
        for n in range(3):
            assert bus.breaker is not None
            assert bus.breaker.failures == n
            with pytest.raises(fg.JournalFailed):
                await bus.publish(Asked(n=n))
        with pytest.raises(fg.BreakerOpen):
            await bus.publish(Asked(n=4))


async def test_without_a_breaker_every_publish_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, _ = shop_bus(breaker=None)
    async with bus:
        outage = Outage(bus, monkeypatch)
        await fail(bus, 20)
        assert len(outage.reached) == 20
        assert bus.breaker is None
        outage.is_down = False
        await bus.publish(Asked(n=1), node="asking")


# --- what handlers send ------------------------------------------------------------------------------------------


def answering_node(calls: list[int], **policy: Any) -> tuple[list[fg.Node], list[int]]:
    """`answering` writes a note for each question and answers it; what is heard of that."""
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", **policy), fg.Node("hearing")
    heard: list[int] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        calls.append(asked.n)
        if answering.schema is not None:
            await ctx.db.execute(INSERT, (asked.n,))
        return Answered(n=asked.n)

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard.append(answered.n)

    return [asking, answering, hearing], heard


async def test_while_it_is_open_the_outbox_fills_and_all_of_it_goes_out_once_when_it_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, calls = FakeClock(), []  # type: tuple[FakeClock, list[int]]
    nodes, heard = answering_node(calls, schema=TABLE)
    async with fg.Bus("memory:", nodes=nodes, store="memory:", clock=clock, stall_seconds=None) as bus:
        await bus.pause("answering", Asked)
        await bus.publish_many(numbers(50), node="asking")
        outage = Outage(bus, monkeypatch)
        await fail(bus, 5)
        outage.reached.clear()
        await bus.resume("answering", Asked)
        while len(calls) < 50:
            await clock.advance(0.001)
        assert await notes(bus) == list(range(50))
        await clock.advance(60)
        # The dispatcher makes the trials, one every five seconds, and does not hammer.
        assert 10 <= len(outage.reached) <= 13
        assert heard == []
        assert bus.breaker is not None and bus.breaker.state == "open"
        assert bus.alarms["breaker"] == 1

        outage.is_down = False
        await clock.advance(6)  # nobody publishes: it goes on by itself
        assert bus.breaker.state == "closed"
        await asyncio.wait_for(bus.idle(), LONG)
        assert sorted(heard) == list(range(50))
        assert sorted(calls) == list(range(50))
        assert bus.outcomes()["dead"] == 0


async def test_the_dispatcher_goes_on_at_once_when_the_trial_of_another_closes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, calls = FakeClock(), []  # type: tuple[FakeClock, list[int]]
    nodes, heard = answering_node(calls, schema=TABLE)
    breaker = fg.Breaker(failures=1, seconds=3600)
    async with fg.Bus("memory:", nodes=nodes, store="memory:", clock=clock, breaker=breaker, stall_seconds=None) as bus:
        await bus.pause("answering", Asked)
        await bus.publish(Asked(n=1), node="asking")
        outage = Outage(bus, monkeypatch)
        await fail(bus, 1)
        clock.jump(3600)
        outage.hold = asyncio.Event()
        trial = asyncio.ensure_future(bus.publish(Asked(n=2), node="asking"))
        await bus.resume("answering", Asked)
        await rest(200)
        assert calls == [1]
        assert len(outage.reached) == 2  # the dispatcher waits for the trial
        outage.is_down = False
        outage.hold.set()
        await trial
        await asyncio.wait_for(bus.idle(), LONG)
        assert sorted(heard) == [1, 2]


# --- replies -----------------------------------------------------------------------------------------------------


class Remote(MemoryTransport):
    """It is reached by a connection, which replies need, too."""

    is_connected = True
    is_down = False
    replied = 0

    async def reply(self, envelopes: Sequence[Envelope]) -> int:
        self.replied += 1
        if self.is_down:
            raise fg.BrokerUnavailable("the broker is away")
        return await super().reply(envelopes)


def replying_bus(transport: MemoryTransport, **options: Any) -> fg.Bus:
    nodes = [fg.Node("asking"), fg.Node("answering"), fg.Node("later")]

    async def answer(told: Told) -> fg.Reply[Answered]:
        return fg.reply(Answered(n=told.n))

    for node in nodes[1:]:
        node.on(Told)(answer)
    return fg.Bus(transport, nodes=nodes, stall_seconds=None, **options)


async def asks(bus: fg.Bus, *nodes: str) -> list[asyncio.Task[Any]]:
    asked = [bus.request(Told(n=n), to=node, node="asking", timeout=60) for n, node in enumerate(nodes)]
    tasks = [asyncio.ensure_future(each) for each in asked]
    await rest(200)
    return tasks


@pytest.mark.parametrize("store", ["memory:", None])
async def test_replies_are_dropped_while_it_is_open_and_one_may_be_the_trial(
    store: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    transport = Remote(clock=clock)
    async with replying_bus(transport, store=store, clock=clock) as bus:
        await bus.pause()
        *dropped, answered = await asks(bus, "answering", "answering", "later")
        Outage(bus, monkeypatch)
        await fail(bus, 5)
        await bus.resume("answering")
        async with asyncio.timeout(LONG):
            while bus.outcomes()["handled"] < 2 or (bus.outboxes() and bus.outboxes()[0].waiting):
                await clock.advance(0.001)
        assert transport.replied == 0
        assert bus.request_counts().unreached == 2
        assert sum("replies are dropped" in each.message for each in caplog.records) == 1
        assert bus.breaker is not None and bus.breaker.state == "open"

        clock.jump(6)
        await bus.resume("later")
        assert await asyncio.wait_for(answered, LONG) == Answered(n=2)
        assert transport.replied == 1
        assert bus.breaker.state == "closed"
        for each in dropped:
            each.cancel()


async def test_replies_that_fail_open_it() -> None:
    clock = FakeClock()
    transport = Remote(clock=clock)
    async with replying_bus(transport, store="memory:", clock=clock) as bus:
        transport.is_down = True
        [asked] = await asks(bus, "answering")
        await clock.advance(50)
        assert bus.breaker is not None and bus.breaker.state == "open"
        assert transport.replied == 5  # then it is dropped, and holds up nothing behind it
        assert bus.request_counts().unreached == 1
        asked.cancel()


async def test_within_a_process_replies_arrive_whatever_the_breaker_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    async with replying_bus(MemoryTransport(clock=clock), store="memory:", clock=clock) as bus:
        await bus.pause("answering", Told)
        [asked] = await asks(bus, "answering")
        Outage(bus, monkeypatch)
        await fail(bus, 5)
        await bus.resume("answering", Told)
        assert await asyncio.wait_for(asked, LONG) == Answered(n=0)
        assert bus.breaker is not None and bus.breaker.state == "open"


@pytest.mark.parametrize(
    "error",
    [lambda: fg.BrokerUnavailable("away"), lambda: fg.OutcomeUnknown("no confirm"), lambda: fg.JournalFull("full")],
)
@pytest.mark.parametrize("breaker", [fg.Breaker(), None])
async def test_a_handler_without_a_store_that_cannot_send_uses_up_no_try(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], breaker: fg.Breaker | None
) -> None:
    clock, calls = FakeClock(), []  # type: tuple[FakeClock, list[int]]
    nodes, heard = answering_node(calls)
    async with fg.Bus("memory:", nodes=nodes, clock=clock, breaker=breaker, stall_seconds=None) as bus:
        await bus.pause("answering", Asked)
        await bus.publish_many(numbers(10), node="asking")
        outage = Outage(bus, monkeypatch)
        outage.error = error
        await bus.resume("answering", Asked)
        await clock.advance(1000)  # longer than all its redeliveries would be
        assert heard == []
        outage.is_down = False
        idle = asyncio.ensure_future(bus.idle())
        async with asyncio.timeout(LONG):
            while not idle.done():  # the kill switch tries one, then goes on
                await clock.advance(1)
        assert sorted(heard) == list(range(10))
        assert bus.outcomes()["dead"] == 0
        assert await bus.dead_letters() == []
