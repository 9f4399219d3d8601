"""The bench itself, and the bus' life: pause and resume, idle, shutdown."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.testing.clock import rest

LONG = 30  # seconds until a test that hangs is failed


class Placed(fg.Event):
    name: str


class Other(fg.Event):
    name: str


class Charge(fg.Command):
    name: str


class Noted(fg.Event):
    text: str


def relay() -> fg.Node:
    node = fg.Node("relay")

    @node.on(Placed, source="shop", order=fg.Serial())
    async def pass_on(placed: Placed) -> Any:
        return [
            fg.send(Charge(name=placed.name), to="payments"),
            Noted(text=placed.name),
        ]

    return node


async def test_a_bench_records_what_goes_to_nodes_that_are_not_on_it() -> None:
    async with fg.testing.bench(relay()) as bench:
        await bench.publish(Placed(name="1"))
        await bench.publish(Placed(name="2"))
        await bench.settle()
        assert bench.sent(Charge) == [Charge(name="1"), Charge(name="2")]
        assert bench.sent(Noted) == [Noted(text="1"), Noted(text="2")]
        assert bench.sent() == [
            Charge(name="1"),
            Noted(text="1"),
            Charge(name="2"),
            Noted(text="2"),
        ]
        assert bench.sent(Placed) == [], "what the test itself published is not an output"
        assert bench.dead_letters() == []
        assert bench.outcomes() == {
            "handled": 2,
            "skipped": 0,
            "filtered": 0,
            "duplicate": 0,
            "redelivered": 0,
            "dead": 0,
        }
        assert [envelope.destination for envelope in bench.envelopes(Charge)] == ["payments"] * 2


async def test_a_bench_sends_a_command_to_the_one_node_that_handles_it() -> None:
    got: list[str] = []
    payments = fg.Node("payments")

    @payments.on(Charge)
    async def charge(cmd: Charge) -> None:
        got.append(cmd.name)

    async with fg.testing.bench(relay(), payments) as bench:
        await bench.send(Charge(name="by default"))
        await bench.settle()
        await bench.send(Charge(name="by name"), to="payments")
        await bench.settle()
        await bench.publish(Placed(name="through the relay"))
        await bench.settle()
    assert got == ["by default", "by name", "through the relay"]


async def test_two_benches_of_one_node_share_nothing() -> None:
    node = relay()
    async with fg.testing.bench(node) as first, fg.testing.bench(node) as second:
        await first.publish(Placed(name="1"), idempotency_key="same")
        await first.settle()
        await second.publish(Placed(name="1"), idempotency_key="same")
        await second.settle()
        assert len(first.sent(Noted)) == len(second.sent(Noted)) == 1
    async with fg.testing.bench(node) as third:
        await third.settle()
        assert third.sent() == []


async def test_in_memory_one_key_for_two_bodies_is_an_alarm_and_the_same_body_is_none() -> None:
    # No digest of a body is made there, where nothing but this process would read it.
    async with fg.Bus("memory:", nodes=[fg.Node("shop")]) as bus:
        for name in ("1", "1"):
            await bus.publish(Placed(name=name), idempotency_key="same")
        assert bus.alarms["disagreement"] == 0
        await bus.publish(Placed(name="2"), idempotency_key="same")
        assert bus.alarms["disagreement"] == 1


async def test_the_bench_clock_moves_only_when_told_or_when_settling() -> None:
    async with fg.testing.bench(relay()) as bench:
        start = bench.clock.time()
        await bench.publish(Placed(name="1"))
        await bench.settle()
        assert bench.clock.time() == start
        await bench.advance(12.5)
        assert bench.clock.time() == pytest.approx(start + 12.5)


async def test_settling_does_not_take_the_time_it_pretends_to_take() -> None:
    calls = 0
    node = fg.Node("slow")

    @node.on(Placed, source="shop", retry=None, redeliver=fg.Redeliver(*[86_400] * 7))
    async def fail(placed: Placed) -> None:
        nonlocal calls
        calls += 1
        raise ValueError("for a week")

    async with asyncio.timeout(LONG), fg.testing.bench(node) as bench:
        start = bench.clock.time()
        await bench.publish(Placed(name="1"))
        await bench.settle()
        assert bench.clock.time() - start >= 7 * 86_400
        assert len(bench.dead_letters()) == 1
    assert calls == 8


async def test_a_paused_subscription_waits_and_the_others_go_on() -> None:
    got: list[str] = []
    others = asyncio.Event()
    node = fg.Node("worker")

    @node.on(Placed, source="shop", order=fg.Serial())
    async def work(placed: Placed) -> None:
        got.append(placed.name)

    @node.on(Other, source="shop")
    async def other(message: Other) -> None:
        got.append(message.name)
        others.set()

    async with asyncio.timeout(LONG):
        async with fg.Bus("memory:", nodes=[fg.Node("shop"), node]) as bus:
            await bus.pause("worker", Placed)
            await bus.publish(Placed(name="waits"), node="shop")
            await bus.publish(Other(name="goes on"), node="shop")
            await others.wait()
            assert got == ["goes on"]
            await bus.resume("worker", Placed)
            await bus.idle()
    assert got == ["goes on", "waits"]


@pytest.mark.parametrize("order", [fg.Serial(), fg.Parallel(3), fg.ByKey(lanes=3)])
@pytest.mark.parametrize("store", [None, "memory:"])
@pytest.mark.parametrize("url", ["memory:", "journal:"])
async def test_when_pausing_returns_nothing_begins_and_what_was_fetched_is_back_in_its_place(
    url: str, store: str | None, order: Any, tmp_path: Path
) -> None:
    begun: list[str] = []
    seen: list[tuple[int, bool]] = []
    running, go_on = asyncio.Event(), asyncio.Event()
    worker, source = fg.Node("worker"), fg.Node("source")
    key = {"key": "name"} if isinstance(order, fg.ByKey) else {}

    @worker.on(Placed, source="source", order=order, **key)
    async def work(placed: Placed, ctx: fg.Context) -> None:
        begun.append(placed.name)
        seen.append((ctx.attempt, ctx.redelivered))
        if len(begun) >= 20:
            running.set()
            await go_on.wait()

    where = f"journal:{tmp_path}/journal" if url == "journal:" else url
    async with fg.Bus(where, nodes=[worker, source], **({} if store is None else {"store": store})) as bus:
        orders = [f"{number}" for number in range(1_000)]
        await bus.publish_many([Placed(name=each) for each in orders], node="source")
        async with asyncio.timeout(LONG):
            await running.wait()
            await bus.pause("worker", Placed)
            before = list(begun)
            go_on.set()
            while any(count.busy for count in bus.counts()):
                await rest()
            await rest()
            assert begun == before, "a handler began although the subscription was paused"
            await bus.resume("worker", Placed)
            await bus.idle()
    assert sorted(begun, key=int) == orders, "one ran twice, or never"
    assert set(seen) == {(1, False)}, "going back counted as a try, or as a redelivery"
    if isinstance(order, fg.Serial):
        assert begun == orders


async def test_a_message_that_failed_among_others_goes_back_when_its_subscription_is_paused() -> None:
    tries: list[str] = []
    worker, source, clock = fg.Node("worker"), fg.Node("source"), fg.testing.FakeClock()

    @worker.on(Placed, source="source", order=fg.Parallel(1), retry=fg.Retry(5, delay=10))
    async def work(placed: Placed) -> None:
        tries.append(placed.name)
        if placed.name == "500" and tries.count("500") == 1:
            raise RuntimeError("once")

    async with fg.Bus("memory:", nodes=[worker, source], store="memory:", clock=clock) as bus:
        await bus.publish_many([Placed(name=f"{number}") for number in range(600)], node="source")
        while clock.sleepers == 0:
            await clock.advance(0.1)
        await bus.pause("worker", Placed)
        before = list(tries)
        await clock.advance(100)
        assert tries == before
        await bus.resume("worker", Placed)
        await clock.advance(100)
        assert sorted(tries, key=int) == sorted(["500", *(f"{number}" for number in range(600))], key=int)


async def test_a_pause_with_a_length_ends_by_itself() -> None:
    got: list[str] = []
    node = fg.Node("worker")

    @node.on(Placed, source="shop")
    async def work(placed: Placed) -> None:
        got.append(placed.name)

    async with asyncio.timeout(LONG):
        async with fg.Bus("memory:", nodes=[fg.Node("shop"), node]) as bus:
            await bus.pause("worker", Placed, seconds=0.02)
            await bus.publish(Placed(name="waits"), node="shop")
            await bus.idle()
    assert got == ["waits"]


async def test_pausing_what_is_not_there_is_refused() -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("shop")]) as bus:
        with pytest.raises(fg.FaregateError, match="stranger"):
            await bus.pause("stranger", Placed)


async def test_idle_gives_up_after_its_timeout() -> None:
    release = asyncio.Event()
    node = fg.Node("worker")

    @node.on(Placed, source="shop")
    async def work(placed: Placed) -> None:
        await release.wait()

    async with asyncio.timeout(LONG):
        async with fg.Bus("memory:", nodes=[fg.Node("shop"), node]) as bus:
            await bus.publish(Placed(name="1"), node="shop")
            with pytest.raises(TimeoutError):
                await bus.idle(timeout=0.01)
            release.set()
            await bus.idle()
            assert bus.outcomes()["handled"] == 1


async def test_idle_on_a_quiet_bus_returns_at_once() -> None:
    async with asyncio.timeout(LONG):
        async with fg.Bus("memory:", nodes=[relay()]) as bus:
            await bus.idle()
            assert bus.outcomes() == {
                "handled": 0,
                "skipped": 0,
                "filtered": 0,
                "duplicate": 0,
                "redelivered": 0,
                "dead": 0,
            }


async def test_idle_waits_for_what_the_handlers_send_on() -> None:
    hops: list[str] = []
    node = fg.Node("shop")

    @node.on(Placed, source="shop")
    async def hop(placed: Placed) -> Any:
        hops.append(placed.name)
        await asyncio.sleep(0)
        return Placed(name="x") if len(hops) < 50 else None

    async with fg.Bus("memory:", nodes=[node]) as bus:
        await bus.publish(Placed(name="x"), node="shop")
        await bus.idle(timeout=LONG)
        assert len(hops) == 50


async def test_leaving_the_bus_lets_a_running_handler_finish() -> None:
    started, release = asyncio.Event(), asyncio.Event()
    finished: list[str] = []
    node = fg.Node("worker")

    @node.on(Placed, source="shop")
    async def work(placed: Placed) -> None:
        started.set()
        await release.wait()
        finished.append(placed.name)

    async def live() -> None:
        async with fg.Bus("memory:", nodes=[fg.Node("shop"), node]) as bus:
            await bus.publish(Placed(name="1"), node="shop")
            await started.wait()

    async with asyncio.timeout(LONG):
        life = asyncio.create_task(live())
        await started.wait()
        for _ in range(20):  # give the bus every chance to leave too early
            await asyncio.sleep(0)
        assert not life.done()
        release.set()
        await life
    assert finished == ["1"]


async def test_leaving_the_bus_does_not_wait_for_what_is_scheduled_or_redelivered_later() -> None:
    failed = asyncio.Event()
    node = fg.Node("worker")

    @node.on(Placed, source="shop", retry=None, redeliver=fg.Redeliver(3_600))
    async def work(placed: Placed) -> None:
        failed.set()
        raise ValueError("in an hour")

    async with asyncio.timeout(LONG):
        async with fg.Bus("memory:", nodes=[fg.Node("shop"), node]) as bus:
            await bus.publish(Placed(name="1"), node="shop")
            await bus.publish(Placed(name="2"), node="shop", delay=3_600)
            await failed.wait()
    assert failed.is_set()


async def test_leaving_the_bus_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with fg.Bus("memory:", nodes=[fg.Node("shop"), relay()]) as bus:
        await bus.publish(Placed(name="1"), node="shop")
        await bus.publish(Placed(name="2"), node="shop", delay=3_600)
    assert asyncio.all_tasks() == before


async def test_an_error_in_the_body_closes_the_bus_and_comes_out() -> None:
    before = asyncio.all_tasks()
    with pytest.raises(ZeroDivisionError):
        async with fg.Bus("memory:", nodes=[fg.Node("shop"), relay()]):
            raise ZeroDivisionError
    assert asyncio.all_tasks() == before


async def test_a_closed_bus_refuses_to_publish() -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("shop")]) as bus:
        await bus.publish(Placed(name="1"), node="shop")
    with pytest.raises(fg.FaregateError):
        await bus.publish(Placed(name="2"), node="shop")


async def test_nodes_may_run_again_on_another_bus() -> None:
    got: list[str] = []
    shop, node = fg.Node("shop"), fg.Node("worker")

    @node.on(Placed, source="shop")
    async def work(placed: Placed) -> None:
        got.append(placed.name)

    for name in ("first", "second"):
        async with fg.Bus("memory:", nodes=[shop, node]) as bus:
            await bus.publish(Placed(name=name), node="shop")
            await bus.idle(timeout=LONG)
            assert bus.outcomes()["handled"] == 1
    assert got == ["first", "second"]


@pytest.mark.parametrize("url", ["memory:", "journal:{}/j"])
async def test_publishing_from_another_thread_is_refused_with_the_way_to_do_it(url: str, tmp_path: Path) -> None:
    handled: list[str] = []
    node = fg.Node("shop")

    @node.on(Placed, source="shop")
    async def note(placed: Placed) -> None:
        handled.append(placed.name)

    async with fg.Bus(url.format(tmp_path), nodes=[node]) as bus:
        loop = asyncio.get_running_loop()

        def publish_elsewhere() -> None:
            calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
                lambda: bus.publish(Placed(name="1")),
                lambda: bus.publish_many([Placed(name="1")]),
                lambda: bus.pause(node, Placed),
                bus.idle,
                bus.stop,
            ]
            for call in calls:
                with pytest.raises(fg.WrongEventLoop, match="run_coroutine_threadsafe"):
                    asyncio.run(call())

        def publish_as_told() -> None:
            asyncio.run_coroutine_threadsafe(bus.publish(Placed(name="2")), loop).result(LONG)

        await asyncio.to_thread(publish_elsewhere)
        await asyncio.to_thread(publish_as_told)
        await bus.idle(timeout=LONG)
    assert handled == ["2"]
