"""Failure (recovery.md, Failure): retry in memory, redeliver later, then a dead letter with the reason."""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from typing import Any

import pytest

import faregate as fg
from faregate.broker.delivery import BrokerDelivery
from faregate.broker.entry import Entry
from faregate.broker.queue import Queue
from faregate.errors import CommitUnknown, StaleLock, StoreConflict
from faregate.ports import faults
from faregate.testing import FakeClock
from tests.core.rig import LONG, Asked, numbers


class Job(fg.Event):
    name: str


class Noted(fg.Event):
    text: str


async def test_the_default_policy_is_three_tries_in_each_of_four_deliveries() -> None:
    tries: list[tuple[float, int, int, bool]] = []
    node = fg.Node("worker")
    clock: dict[str, Any] = {}

    @node.on(Job, source="boss")
    async def work(job: Job, ctx: fg.Context) -> None:
        tries.append((clock["now"](), ctx.attempt, ctx.redeliveries, ctx.redelivered))
        raise ValueError(f"{job.name} fails")

    async with fg.testing.bench(node) as bench:
        clock["now"] = bench.clock.time
        await bench.publish(Job(name="hopeless"))
        await bench.settle()
        [dead] = bench.dead_letters()
        outcomes = bench.outcomes()

    assert [(attempt, redeliveries) for _, attempt, redeliveries, _ in tries] == [
        (attempt, redeliveries) for redeliveries in range(4) for attempt in (1, 2, 3)
    ]
    assert [redelivered for *_, redelivered in tries] == [False] * 3 + [True] * 9
    deliveries = [when for when, attempt, *_ in tries if attempt == 1]
    waits = [later - earlier for earlier, later in itertools.pairwise(deliveries)]
    for wait, designed in zip(waits, (10, 60, 600), strict=True):
        assert designed <= wait < designed + 5
    assert (dead.node, dead.reason) == ("worker", "failed")
    assert "ValueError" in dead.error
    assert "hopeless fails" in dead.error
    assert (outcomes["redelivered"], outcomes["dead"], outcomes["handled"]) == (3, 1, 0)


@pytest.mark.parametrize(
    ("retry", "redeliver", "tries"),
    [
        (None, None, 1),
        (fg.Retry(0), fg.Redeliver(), 1),
        (fg.Retry(4, delay=1), None, 5),
        (None, fg.Redeliver(1, 2), 3),
        (fg.Retry(1, delay=1), fg.Redeliver(5), 4),
    ],
)
async def test_the_policy_of_the_subscription_decides_how_often(retry: Any, redeliver: Any, tries: int) -> None:
    calls = 0
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=retry, redeliver=redeliver)
    async def work(job: Job) -> None:
        nonlocal calls
        calls += 1
        raise ValueError("no")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert len(bench.dead_letters()) == 1
    assert calls == tries


@pytest.mark.parametrize("succeeds_at", [1, 2, 3, 4, 6])
async def test_a_message_that_succeeds_in_time_is_handled_once(succeeds_at: int) -> None:
    calls = 0
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=fg.Retry(1, delay=1), redeliver=fg.Redeliver(5, 5))
    def work(job: Job) -> Any:
        nonlocal calls
        calls += 1
        if calls < succeeds_at:
            raise ValueError("not yet")
        return Noted(text=str(calls))

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert bench.sent() == [Noted(text=str(succeeds_at))]
        assert bench.dead_letters() == []
        assert bench.outcomes()["handled"] == 1
        assert bench.outcomes()["redelivered"] == (succeeds_at - 1) // 2


async def test_in_memory_retries_back_off_on_the_clock() -> None:
    times: list[float] = []
    node = fg.Node("worker")
    clock: dict[str, Any] = {}

    @node.on(Job, source="boss", retry=fg.Retry(3, delay=1, backoff=2, jitter=0), redeliver=None)
    async def work(job: Job) -> None:
        times.append(clock["now"]())
        raise ValueError("no")

    async with fg.testing.bench(node) as bench:
        clock["now"] = bench.clock.time
        await bench.publish(Job(name="x"))
        await bench.settle()

    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert waits == pytest.approx([1, 2, 4], abs=0.01)


async def test_a_permanent_error_is_a_dead_letter_at_once_and_the_next_goes_on() -> None:
    calls: list[str] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", order=fg.Serial())
    async def work(job: Job) -> None:
        calls.append(job.name)
        if job.name == "bad":
            raise fg.Permanent("the account is closed")

    async with fg.testing.bench(node) as bench:
        start = bench.clock.time()
        await bench.publish(Job(name="bad"))
        await bench.publish(Job(name="good"))
        await bench.settle()
        [dead] = bench.dead_letters()
        assert bench.clock.time() - start < 1
        assert bench.outcomes() == {
            "handled": 1,
            "skipped": 0,
            "filtered": 0,
            "duplicate": 0,
            "redelivered": 0,
            "dead": 1,
        }

    assert calls == ["bad", "good"]
    assert (dead.node, dead.reason, dead.tries) == ("worker", "permanent", 1)
    assert "the account is closed" in dead.error


async def test_a_dead_message_keeps_its_envelope() -> None:
    node = fg.Node("worker")

    @node.on(Job, source="boss")
    async def work(job: Job) -> None:
        raise fg.Permanent("no")

    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node]) as bus:
        root = await bus.publish(Job(name="keep me"), node="boss", headers={"tenant": "acme"})
        await bus.idle(timeout=30)
        [dead] = await bus.dead_letters("worker")

    envelope = dead.envelope
    assert (envelope.publication_id, envelope.type, envelope.source) == (root, "Job", "boss")
    assert b"keep me" in bytes(envelope.body)
    assert envelope.headers["tenant"] == "acme"


async def test_retry_after_waits_as_long_as_asked_and_uses_up_no_try() -> None:
    calls: list[float] = []
    node = fg.Node("worker")
    clock: dict[str, Any] = {}

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job) -> None:
        calls.append(clock["now"]())
        if len(calls) <= 15:
            raise fg.RetryAfter(40)

    async with fg.testing.bench(node) as bench:
        clock["now"] = bench.clock.time
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert bench.dead_letters() == []
        assert bench.outcomes()["handled"] == 1
    waits = [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert len(waits) == 15
    assert min(waits) >= 40
    assert max(waits) < 45


async def test_retry_after_is_not_retried_in_memory_and_keeps_the_tries_for_later() -> None:
    attempts: list[tuple[str, int]] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=fg.Retry(1, delay=1), redeliver=fg.Redeliver(5))
    async def work(job: Job, ctx: fg.Context) -> None:
        if len(attempts) < 3:
            attempts.append(("later", ctx.attempt))
            raise fg.RetryAfter(7)
        attempts.append(("fails", ctx.attempt))
        raise ValueError("no")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert len(bench.dead_letters()) == 1
    assert attempts == [("later", 1)] * 3 + [("fails", 1), ("fails", 2)] * 2


async def test_an_error_that_carries_a_retry_after_is_treated_alike() -> None:
    class Throttled(Exception):
        retry_after = 40

    calls: list[float] = []
    node = fg.Node("worker")
    clock: dict[str, Any] = {}

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job) -> None:
        calls.append(clock["now"]())
        if len(calls) == 1:
            raise Throttled

    async with fg.testing.bench(node) as bench:
        clock["now"] = bench.clock.time
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert bench.outcomes()["handled"] == 1
    assert 40 <= calls[1] - calls[0] < 45


@pytest.mark.parametrize("odd", ["1", None, float("nan"), 10**400, 1.8e9], ids=lambda each: f"{each!r:.9}")
async def test_an_error_with_an_odd_retry_after_is_one_like_any_other(odd: Any) -> None:
    class Throttled(Exception):
        retry_after = odd

    attempts: list[int] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=fg.Retry(1), redeliver=fg.Redeliver(5))
    async def work(job: Job, ctx: fg.Context) -> None:
        attempts.append(ctx.attempt)
        raise Throttled

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert len(bench.dead_letters()) == 1
    assert attempts == [1, 2] * 2


@pytest.mark.parametrize(("error", "dead"), [(StoreConflict("locked"), 1), (CommitUnknown("the line broke"), 0)])
async def test_an_error_of_a_store_in_a_node_without_one_follows_the_policy(
    error: Exception, dead: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another node's store, through `fg.outbox`. What may have happened is repeated, and never dead-lettered."""
    attempts: list[int] = []
    node, clock = fg.Node("worker"), FakeClock()

    @node.on(Job, source="boss", retry=fg.Retry(1), redeliver=fg.Redeliver(10, 10))
    async def work(job: Job, ctx: fg.Context) -> None:
        attempts.append(ctx.attempt)
        if len(attempts) < 9:
            raise copy(error)

    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node], clock=clock) as bus:
        await bus.publish(Job(name="x"), node="boss")
        await clock.advance(120)
        assert (bus.outcomes()["dead"], bus.outcomes()["handled"]) == (dead, 1 - dead)
    assert attempts == ([1, 2] * 3 if dead else [1, 2] * 4 + [1])
    assert "unexpected error" not in caplog.text


async def test_a_message_that_finds_its_dependency_unavailable_is_not_lost() -> None:
    calls = 0
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise fg.Unavailable(retry_after=3)
        return Noted(text="done")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert bench.sent() == [Noted(text="done")]
        assert bench.dead_letters() == []


async def test_a_handler_whose_own_task_was_cancelled_has_failed_like_any_other() -> None:
    calls: list[str] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", order=fg.Serial(), retry=None, redeliver=None)
    async def work(job: Job) -> None:
        calls.append(job.name)
        if job.name == "bad":
            inner = asyncio.create_task(asyncio.Event().wait())
            inner.cancel()
            await inner

    async with asyncio.timeout(30), fg.testing.bench(node) as bench:
        await bench.publish(Job(name="bad"))
        await bench.publish(Job(name="good"))
        await bench.settle()
        [dead] = bench.dead_letters()
        assert bench.outcomes()["handled"] == 1
    assert calls == ["bad", "good"]
    assert "CancelledError" in dead.error


def own_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task


async def cancel_and_wait() -> None:
    own_task().cancel()
    await asyncio.Event().wait()


async def cancel_and_return() -> None:
    own_task().cancel()


async def have_a_task_cancel() -> None:
    async def cancel(other: "asyncio.Task[Any]") -> None:
        other.cancel()

    helper = asyncio.create_task(cancel(own_task()))
    await asyncio.Event().wait()
    await helper


async def have_a_callback_cancel() -> None:
    asyncio.get_running_loop().call_soon(own_task().cancel)
    await asyncio.Event().wait()


@pytest.mark.parametrize("cancel", [cancel_and_wait, cancel_and_return, have_a_task_cancel, have_a_callback_cancel])
@pytest.mark.parametrize("store", [None, "memory:"])
async def test_a_handler_that_cancels_the_task_it_runs_in_uses_up_its_tries_and_is_a_dead_letter(
    cancel: Callable[[], Awaitable[None]], store: str | None
) -> None:
    calls: list[str] = []
    node, clock = fg.Node("worker"), fg.testing.FakeClock()

    @node.on(Job, source="boss", order=fg.Serial(), retry=fg.Retry(1), redeliver=fg.Redeliver(60))
    async def work(job: Job) -> None:
        calls.append(job.name)
        if job.name == "bad":
            await cancel()

    nodes = [fg.Node("boss"), node]
    async with asyncio.timeout(30), fg.Bus("memory:", nodes=nodes, store=store, clock=clock) as bus:
        await bus.publish_many([Job(name=name) for name in ("a", "bad", "b", "c")], node="boss")
        while not await bus.dead_letters():
            await clock.advance(1)
        await bus.idle()
        [dead] = await bus.dead_letters()
        assert (bus.outcomes()["handled"], bus.outcomes()["redelivered"], bus.outcomes()["dead"]) == (3, 1, 1)
    assert calls == ["a", *["bad"] * 4, "b", "c"]
    assert dead.reason == "failed"
    assert dead.error.startswith("RuntimeError: the handler cancelled the task that it runs in")


async def test_a_handler_that_catches_its_own_cancellation_or_a_time_limit_has_not_failed() -> None:
    node = fg.Node("worker")

    @node.on(Job, source="boss", order=fg.Serial(), retry=None, redeliver=None)
    async def work(job: Job) -> Any:
        if job.name == "catches":
            with contextlib.suppress(asyncio.CancelledError):
                await cancel_and_wait()
        if job.name == "limits":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
        await asyncio.sleep(0)
        lane = own_task()
        return Noted(text=f"{job.name} {lane.cancelling() if job.name == 'last' else ''}".strip())

    async with asyncio.timeout(30), fg.testing.bench(node) as bench:
        for name in ("catches", "limits", "last"):
            await bench.publish(Job(name=name))
        await bench.settle()
        assert bench.sent() == [Noted(text="catches"), Noted(text="limits"), Noted(text="last 0")]
        assert bench.dead_letters() == []


@pytest.mark.parametrize("end", ["the bus closes", "the loop ends"])
def test_a_handler_that_is_cancelled_from_outside_has_used_up_nothing(end: str) -> None:
    """Also when it had cancelled itself before, with a time limit that was over."""
    calls: list[str] = []
    node = fg.Node("worker")
    begun = asyncio.Event()

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job) -> None:
        calls.append(job.name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        begun.set()
        await asyncio.Event().wait()

    bus = fg.Bus("memory:", nodes=[fg.Node("boss"), node])

    async def main() -> None:
        await bus.start()
        await bus.publish(Job(name="x"), node="boss")
        await begun.wait()
        if end == "the bus closes":
            await bus.stop(0)

    asyncio.run(main())  # it cancels what is left, as every program does at its end
    assert calls == ["x"]
    assert {outcome: count for outcome, count in bus.outcomes().items() if count} == {}


async def test_an_error_that_cannot_describe_itself_is_still_a_dead_letter() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("cannot say")

    handled: list[str] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", order=fg.Serial(), retry=None, redeliver=None)
    async def work(job: Job) -> None:
        if job.name == "bad":
            raise Unspeakable
        handled.append(job.name)

    async with asyncio.timeout(30), fg.testing.bench(node) as bench:
        await bench.publish(Job(name="bad"))
        await bench.publish(Job(name="good"))
        await bench.settle()
        [dead] = bench.dead_letters()
    assert "Unspeakable" in dead.error
    assert handled == ["good"]


async def test_redelivery_works_on_the_real_clock_and_idle_waits_for_it() -> None:
    attempts: list[int] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=None, redeliver=fg.Redeliver(0.01, 0.01))
    async def work(job: Job, ctx: fg.Context) -> None:
        attempts.append(ctx.redeliveries)
        if ctx.redeliveries < 2:
            raise ValueError("not yet")

    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node]) as bus:
        await bus.publish(Job(name="x"), node="boss")
        await bus.idle(timeout=30)
        assert bus.outcomes() == {
            "handled": 1,
            "skipped": 0,
            "filtered": 0,
            "duplicate": 0,
            "redelivered": 2,
            "dead": 0,
        }
    assert attempts == [0, 1, 2]


async def test_nothing_is_lost_when_many_messages_fail_at_once() -> None:
    handled: list[str] = []
    failed: set[str] = set()
    node = fg.Node("worker")

    @node.on(Job, source="boss", order=fg.Parallel(8), retry=None, redeliver=fg.Redeliver(0.001))
    async def work(job: Job) -> None:
        await asyncio.sleep(0)
        if job.name not in failed:
            failed.add(job.name)
            raise ValueError("first time")
        handled.append(job.name)

    names = [str(number) for number in range(300)]
    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node]) as bus:
        await bus.publish_many([Job(name=name) for name in names], node="boss")
        await bus.idle(timeout=60)
    assert sorted(handled) == sorted(names)


@pytest.mark.usefixtures("one_batch")
@pytest.mark.parametrize("count", [1, 6], ids=["alone", "among others"])
async def test_a_lock_lost_before_the_start_is_counted_as_lost_and_its_message_comes_again(
    count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")
    runs: Counter[int] = Counter()
    plain, lost = Queue.start_all, list[Entry]()

    def start_all(queue: Queue, held: Sequence[BrokerDelivery]) -> list[StaleLock | None]:
        for each in held:
            if each.entry.position == count // 2 and not lost:
                lost.append(each.entry)
                queue.release(each.entry, each.lock)  # as when the lock expires
        return plain(queue, held)

    monkeypatch.setattr(Queue, "start_all", start_all)

    @answering.on(Asked, source="asking", order=fg.Parallel(1))
    async def answer(asked: Asked) -> None:
        runs[asked.n] += 1

    async with fg.Bus("memory:", nodes=[asking, answering]) as bus:
        await bus.publish_many(numbers(count), node="asking")
        await bus.idle(timeout=LONG)
        [worker] = bus._workers
        assert len(lost) == worker.outcomes["lost"] == 1 and bus.outcomes()["handled"] == count
    assert runs == Counter(range(count))
    assert {each.levelno for each in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize(("why", "counted_as"), [("refused", "redelivered"), ("lost", "lost")])
async def test_a_message_that_cannot_be_put_off_at_once_comes_again_and_the_lane_goes_on(
    why: str,
    counted_as: str,
    store_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A feed may put messages off by a commit of its own, and that may be refused like any other."""
    asking, answering = fg.Node("asking"), fg.Node("answering")
    plain, refused = BrokerDelivery.redeliver, 0
    runs: Counter[int] = Counter()

    async def redeliver(delivery: BrokerDelivery, delay: float, *, counted: bool = True) -> None:
        nonlocal refused
        if not refused:
            refused += 1
            if why == "refused":
                raise fg.StoreConflict("two parked at once")
            delivery.queue.release(delivery.entry, delivery.lock)  # as when the lock expires
        await plain(delivery, 0.01, counted=counted)

    monkeypatch.setattr(BrokerDelivery, "redeliver", redeliver)

    async def hook(point: str) -> None:
        if point == "unit.before-commit" and not refused:
            raise fg.StoreUnavailable("the dead letter is not written now")

    @answering.on(Asked, source="asking", retry=None, redeliver=None)
    async def answer(asked: Asked) -> None:
        runs[asked.n] += 1
        if runs[asked.n] == 1:
            raise OSError("once")

    async with fg.Bus("memory:", nodes=[asking, answering], store={"answering": store_url}) as bus:
        monkeypatch.setattr(faults, "hook", hook)
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        [worker] = bus._workers
        outcomes = {name: n for name, n in worker.outcomes.items() if n}
        assert outcomes == {"handled": 1, counted_as: 1} and await bus.dead_letters() == []
    assert refused and runs == Counter([1, 1])
    assert not [each for each in caplog.records if each.levelno == logging.CRITICAL]


# --- rules for some errors ----------------------------------------------------------------------------------------


class RateLimited(Exception):
    pass


def ruled(raises: Callable[[int], BaseException | None], **options: Any) -> tuple[fg.Node, list[tuple[int, int]]]:
    """Its handler raises what it is told for its n-th run; (redeliveries, attempt) of each run."""
    runs: list[tuple[int, int]] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", **options)
    async def work(job: Job, ctx: fg.Context) -> None:
        runs.append((ctx.redeliveries, ctx.attempt))
        error = raises(len(runs))
        if error is not None:
            raise error

    return node, runs


class Rejected(ExceptionGroup[Exception], fg.Permanent):
    """A group that says itself what becomes of its message."""


class Partly(ExceptionGroup[Exception]):
    """One that a rule is about."""


RULES = [
    fg.When(TimeoutError, ConnectionError, retry=fg.Retry(4, delay=0.5), redeliver=None),
    fg.When(OSError, redeliver=fg.Redeliver(1)),
    fg.When(KeyError, dead=True),
    fg.When(RateLimited, Partly, retry=None, redeliver=None, requeue=fg.Requeue(2)),
]


@pytest.mark.parametrize(
    ("error", "runs", "reason"),
    [
        (TimeoutError("slow"), [(0, attempt) for attempt in range(1, 6)], "failed"),
        (ConnectionResetError("gone"), [(0, attempt) for attempt in range(1, 6)], "failed"),
        (PermissionError("no"), [(0, 1), (0, 2), (1, 1), (1, 2)], "failed"),  # retry= stays the subscription's
        (KeyError("id"), [(0, 1)], "permanent"),
        (RateLimited("later"), [(0, 1), (1, 1), (2, 1)], "failed"),
        (ValueError("other"), [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2)], "failed"),
        (fg.Permanent("never"), [(0, 1)], "permanent"),
        (ExceptionGroup("tasks", [fg.Permanent("never")]), [(0, 1)], "permanent"),
        (ExceptionGroup("tasks", [OSError(), ExceptionGroup("", [KeyError(), fg.Undecodable("never")])]), [(0, 1)],
         "undecodable"),
        (ExceptionGroup("tasks", [KeyError("id")]), [(0, 1)], "permanent"),
        (ExceptionGroup("tasks", [ValueError("other"), RateLimited("later")]), [(0, 1), (1, 1), (2, 1)], "failed"),
        (Rejected("parts", [ValueError("other")]), [(0, 1)], "permanent"),
        (Partly("parts", [ValueError("other")]), [(0, 1), (1, 1), (2, 1)], "failed"),
        (ExceptionGroup("tasks", [Partly("parts", [ValueError()]), OSError()]), [(0, 1), (0, 2), (1, 1), (1, 2)],
         "failed"),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
@pytest.mark.parametrize("store", [None, "memory:"])
async def test_the_first_rule_that_fits_an_error_says_what_is_done(
    error: Exception, runs: list[tuple[int, int]], reason: str, store: str | None
) -> None:
    node, seen = ruled(
        lambda run: error, order=fg.Parallel(1), retry=fg.Retry(1), redeliver=fg.Redeliver(1, 1), rules=RULES
    )
    clock = fg.testing.FakeClock()
    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node], clock=clock, store=store) as bus:
        await bus.publish(Job(name="x"), node="boss")
        async with asyncio.timeout(LONG):
            while not bus.outcomes()["dead"]:
                await clock.advance(0.1)
        [dead] = await bus.dead_letters()
    assert seen == runs
    assert dead.reason == reason


async def test_each_failure_is_judged_by_the_rule_of_its_own_error() -> None:
    errors = {1: TimeoutError(), 2: TimeoutError(), 3: TimeoutError(), 4: ValueError(), 5: KeyError()}
    node, runs = ruled(errors.get, retry=None, redeliver=fg.Redeliver(1), rules=RULES)
    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        [dead] = bench.dead_letters()
    assert runs == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1)]
    assert dead.reason == "permanent"


async def test_a_retry_waits_as_its_rule_says_alone_and_among_others() -> None:
    times: dict[str, list[float]] = {}
    node = fg.Node("worker")
    clock: dict[str, Any] = {}

    @node.on(Job, source="boss", redeliver=None, rules=[fg.When(OSError, retry=fg.Retry(1, delay=7))])
    async def work(job: Job) -> None:
        times.setdefault(job.name, []).append(clock["now"]())
        if job.name in ("0", "5"):
            raise OSError("slow")

    async with fg.testing.bench(node) as bench:
        clock["now"] = bench.clock.time
        await bench.bus.publish_many([Job(name=str(n)) for n in range(10)], node="boss")
        await bench.settle()
        assert len(bench.dead_letters()) == 2
    for name in ("0", "5"):
        first, second = times[name]
        assert second - first == pytest.approx(7, abs=0.01)


async def test_an_error_that_says_itself_what_to_do_is_asked_before_any_rule() -> None:
    class Throttled(Exception):
        retry_after = 3.0

    several = ExceptionGroup("tasks", [fg.Permanent("another day"), OSError(), fg.RetryAfter(1)])
    errors = {1: several, 2: fg.RetryAfter(1), 3: fg.Unavailable(retry_after=2), 4: Throttled()}
    node, runs = ruled(errors.get, retry=None, redeliver=None, rules=[fg.When(Exception, dead=True)])
    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert bench.dead_letters() == []
        assert bench.outcomes()["handled"] == 1
    assert runs == [(0, 1)] * 5


async def test_middlewares_see_all_errors_that_were_raised_together() -> None:
    together = ExceptionGroup("tasks", [KeyError("a"), fg.Permanent("b")])
    node, _ = ruled(lambda run: together)
    seen: list[BaseException] = []

    @node.use
    async def look(ctx: fg.Context, call_next: Callable[[], Awaitable[None]]) -> None:
        try:
            await call_next()
        except Exception as exc:
            seen.append(exc)
            raise

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        [dead] = bench.dead_letters()
    assert seen == [together] and dead.error.startswith("Permanent: b")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fg.When(dead=True), "needs the errors"),
        (lambda: fg.When(KeyError), "needs what to do"),
        (lambda: fg.When(KeyError("x"), dead=True), "takes classes of exceptions"),
        (lambda: fg.When(SystemExit, dead=True), "takes classes of exceptions"),
        (lambda: fg.When(KeyError, dead=True, retry=None), "takes nothing else"),
        (lambda: fg.When(KeyError, retry=3), "retry must be an fg.Retry or None"),
        (lambda: fg.When(KeyError, requeue=fg.Retry(1)), "requeue must be an fg.Requeue or None"),
        (lambda: fg.When(fg.Permanent, retry=None), "says itself what becomes of its message"),
        (lambda: fg.When(fg.BrokerUnavailable, dead=True), "says itself what becomes of its message"),
        (lambda: fg.Node("n").on(Job, source="b", rules=fg.When(KeyError, dead=True)), "takes a list of fg.When"),
        (lambda: fg.Node("n").on(Job, source="b", rules=[KeyError]), "takes a list of fg.When"),
        (lambda: fg.Node("n").on(Job, source="b", requeue=True), "requeue must be an fg.Requeue or None"),
        (lambda: fg.Redeliver(1, jitter=-1), "jitter"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_where_it_is_declared(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=text):
        make()


def test_jitter_lengthens_a_wait_and_never_shortens_it() -> None:
    for policy, least in ((fg.Retry(1, delay=10, jitter=0.5), 10.0), (fg.Redeliver(10, 20, jitter=0.5), 20.0)):
        waits = {policy.wait(1) for _ in range(200)}
        assert len(waits) > 100
        assert all(least <= wait <= 1.5 * least for wait in waits)


async def test_redeliveries_that_failed_together_do_not_come_together() -> None:
    times: list[float] = []
    node = fg.Node("worker")
    clock: dict[str, Any] = {}

    @node.on(Job, source="boss", retry=None, redeliver=fg.Redeliver(100, jitter=0.5), kill_switch=False)
    async def work(job: Job, ctx: fg.Context) -> None:
        if not ctx.redeliveries:
            raise ValueError("all at once")
        times.append(clock["now"]())

    async with fg.testing.bench(node) as bench:
        clock["now"] = bench.clock.time
        start = bench.clock.time()
        await bench.bus.publish_many([Job(name=str(n)) for n in range(50)], node="boss")
        await bench.settle()
    assert len(times) == 50
    assert len({round(time, 3) for time in times}) > 25
    assert all(100 <= time - start <= 151 for time in times)


async def test_local_failure_retries_within_the_consumer_until_the_situation_corrects_itself() -> None:
    """Seed 004: a record that is locked holds up its own message, and no other."""
    locked, done = True, []  # type: tuple[bool, list[str]]
    node = fg.Node("worker")

    @node.on(Job, source="boss", rules=[fg.When(BlockingIOError, retry=fg.Retry(5, delay=1))])
    async def work(job: Job) -> None:
        if job.name == "locked" and locked:
            raise BlockingIOError("the row is locked")
        done.append(job.name)

    async with fg.testing.bench(node) as bench:
        await bench.bus.publish_many([Job(name=name) for name in ("a", "locked", "b", "c")], node="boss")
        await bench.clock.advance(2.5)
        assert sorted(done) == ["a", "b", "c"]
        locked = False
        await bench.settle()
        assert sorted(done) == ["a", "b", "c", "locked"]
        assert bench.outcomes()["redelivered"] == 0
        assert bench.dead_letters() == []


async def test_permanent_failure_goes_to_the_dead_letters_without_another_try() -> None:
    """Seed 004: an illegal state of what the message is about, named by a rule instead of in every handler."""

    class AccountClosed(Exception):
        pass

    node, runs = ruled(lambda run: AccountClosed("17"), rules=[fg.When(AccountClosed, dead=True)])
    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        [dead] = bench.dead_letters()
    assert runs == [(0, 1)]
    assert "AccountClosed: 17" in dead.error
