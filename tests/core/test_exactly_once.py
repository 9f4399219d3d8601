"""Exactly-once effects with the ledger: one commit per message id, outputs sent once.

The broker remembers recent publications by itself. It must not be what saves us here, so copies are put straight into
the queue (`bench.deliver`), or come over a new journal that has never seen them.
"""

import asyncio
import contextlib
import sqlite3
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import faregate as fg
from faregate.ports.faults import Crash
from tests.core.rig import committed

LONG = 30  # seconds until a test that hangs is failed
NOTES = "create table if not exists notes(number integer primary key autoincrement, text text)"


class Job(fg.Command):
    name: str


class Placed(fg.Event):
    name: str


class Noted(fg.Event):
    text: str


class Step(fg.Event):
    key: str
    number: int


class Moved(fg.Event):
    key: str
    number: int


class Look(fg.Command):
    """Asks a node what is in its store."""


def raw(name: str = "x", **changes: Any) -> fg.Envelope:
    """A command to `worker` as a foreign system sends it."""
    fields: dict[str, Any] = {
        "publication_id": fg.ids.root_id(),
        "type": "Job",
        "kind": "command",
        "source": "abroad",
        "destination": "worker",
        "body": msgspec.json.encode({"name": name}),
    }
    return fg.Envelope(**{**fields, **changes})


def worker(runs: list[str], found: list[str] | None = None, **options: Any) -> fg.Node:
    """Writes one note and publishes one event for each job; `found` has the notes after a `Look`."""
    node = fg.Node("worker", schema=NOTES)

    @node.on(Job, **options)
    async def work(job: Job, ctx: fg.Context) -> Any:
        runs.append(job.name)
        await ctx.db.execute("insert into notes(text) values (?)", (job.name,))
        return Noted(text=job.name)

    @node.on(Look)
    async def look(cmd: Look, ctx: fg.Context) -> None:
        if found is not None:
            found[:] = [row[0] for row in await ctx.db.fetchall("select text from notes order by number")]

    return node


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


# --- one effect per message id ----------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False], ids=["two copies at once", "the second after the first"])
async def test_a_message_that_comes_twice_has_its_effect_and_its_output_once(together: bool) -> None:
    runs: list[str] = []
    found: list[str] = []
    async with fg.testing.bench(worker(runs, found)) as bench:
        envelope = raw()
        await bench.deliver(envelope)
        if not together:
            await bench.settle()
        await bench.deliver(envelope)
        await bench.settle()
        assert bench.sent(Noted) == [Noted(text="x")]
        outcomes = bench.bus.outcomes()
        assert (outcomes["handled"], outcomes.get("duplicate", 0), outcomes["dead"]) == (1, 1, 0)
        await bench.send(Look())
        await bench.settle()
    assert found == ["x"]
    if not together:
        assert runs == ["x"], "the second copy finds the ledger row before the handler runs"


async def test_a_duplicate_inside_a_crowd_does_not_fail_its_neighbours() -> None:
    runs: list[str] = []
    found: list[str] = []
    async with fg.testing.bench(worker(runs, found, order=fg.Parallel(8))) as bench:
        envelopes = [raw(str(number)) for number in range(40)]
        for number, envelope in enumerate(envelopes):
            await bench.deliver(envelope)
            if number % 3 == 0:
                await bench.deliver(envelopes[number // 2])
                await bench.deliver(envelope)
        await bench.settle()
        outcomes = bench.bus.outcomes()
        assert bench.dead_letters() == []
        assert (outcomes["handled"], outcomes.get("duplicate", 0)) == (40, 28)
        assert Counter(note.text for note in bench.sent(Noted)) == Counter(str(number) for number in range(40))
        await bench.send(Look())
        await bench.settle()
    assert sorted(found) == sorted(str(number) for number in range(40))


@settings(max_examples=25, deadline=None)
@given(copies=st.lists(st.integers(0, 5), max_size=20), failures=st.dictionaries(st.integers(0, 5), st.integers(1, 4)))
def test_whatever_is_repeated_and_whatever_fails_each_message_has_one_effect(
    copies: list[int], failures: dict[int, int]
) -> None:
    async def scenario() -> None:
        found: list[str] = []
        tries: Counter[str] = Counter()
        node = fg.Node("worker", schema=NOTES)

        @node.on(Job, retry=fg.Retry(1, delay=1), redeliver=fg.Redeliver(5, 5))
        async def work(job: Job, ctx: fg.Context) -> Any:
            tries[job.name] += 1
            await ctx.db.execute("insert into notes(text) values (?)", (job.name,))
            ctx.publish(Noted(text=job.name))
            if tries[job.name] <= failures.get(int(job.name), 0):
                raise ValueError("not yet")

        @node.on(Look)
        async def look(cmd: Look, ctx: fg.Context) -> None:
            found[:] = [row[0] for row in await ctx.db.fetchall("select text from notes")]

        envelopes = [raw(str(number)) for number in range(6)]
        async with asyncio.timeout(LONG), fg.testing.bench(node) as bench:
            for number in copies:
                await bench.deliver(envelopes[number])
            await bench.settle()
            sent = [note.text for note in bench.sent(Noted)]
            assert bench.dead_letters() == []
            await bench.send(Look())
            await bench.settle()
        expected = sorted({str(number) for number in copies})
        assert sorted(found) == expected
        assert sorted(sent) == expected

    asyncio.run(scenario())


async def test_the_same_idempotency_key_has_one_effect_over_restarts(tmp_path: Path) -> None:
    runs: list[str] = []
    ids: set[str] = set()
    counted: list[tuple[int, int]] = []
    for journal in ("one", "two", "two"):  # a new journal has never seen the key; the store has
        nodes = [fg.Node("boss"), worker(runs)]
        async with fg.Bus(f"journal:{tmp_path}/{journal}", nodes=nodes, store=f"sqlite:{tmp_path}/s.db") as bus:
            await bus.send(Job(name="another"), to="worker", node="boss")
            ids.add(await bus.send(Job(name="x"), to="worker", node="boss", idempotency_key="job-x"))
            await bus.idle(timeout=LONG)
            assert await bus.dead_letters() == []
            counted.append((bus.outcomes()["handled"], bus.outcomes()["duplicate"]))
    assert counted[:2] == [(2, 0), (1, 1)]
    assert len(ids) == 1
    assert Counter(runs) == {"x": 1, "another": 3}
    assert rows(tmp_path / "s.db", "select count(*) from notes where text = 'x'") == [(1,)]


async def test_each_recipient_of_one_publication_has_its_own_effect_in_one_shared_store(tmp_path: Path) -> None:
    nodes = [fg.Node("boss")]
    for name in ("east", "west"):
        node = fg.Node(name, schema=NOTES)

        @node.on(Placed, source="boss")
        async def work(placed: Placed, ctx: fg.Context) -> None:
            await ctx.db.execute("insert into notes(text) values (?)", (ctx.message_id,))

        nodes.append(node)
    async with fg.Bus("memory:", nodes=nodes, store=f"sqlite:{tmp_path}/s.db") as bus:
        root = await bus.publish(Placed(name="x"), node="boss")
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == 2
    expected = {(fg.ids.message_id(root, name),) for name in ("east", "west")}
    assert set(rows(tmp_path / "s.db", "select text from notes")) == expected


async def test_a_skipped_message_is_remembered() -> None:
    runs: list[str] = []
    node = worker(runs)
    closed = True

    async def gate(ctx: fg.Context, call_next: Any) -> None:
        if not closed:
            await call_next()

    node.use(gate)
    async with fg.testing.bench(node) as bench:
        envelope = raw()
        await bench.deliver(envelope)
        await bench.settle()
        closed = False
        await bench.deliver(envelope)
        await bench.settle()
        outcomes = bench.bus.outcomes()
        assert bench.sent() == []
    assert runs == []
    assert (outcomes["skipped"], outcomes.get("duplicate", 0), outcomes["handled"]) == (1, 1, 0)


async def test_without_deduplication_a_copy_runs_again() -> None:
    runs: list[str] = []
    found: list[str] = []
    async with fg.testing.bench(worker(runs, found, dedup="off")) as bench:
        envelope = raw()
        for _ in range(2):
            await bench.deliver(envelope)
            await bench.settle()
        outcomes = bench.bus.outcomes()
        assert (outcomes["handled"], outcomes.get("duplicate", 0)) == (2, 0)
        await bench.send(Look())
        await bench.settle()
    assert runs == ["x", "x"]
    assert found == ["x", "x"]


# --- two executions that disagree -------------------------------------------------------------------------


def relay_and_sink(text: list[str], heard: list[str]) -> list[fg.Node]:
    """The relay's output depends on something outside the message, so two runs of it may disagree."""
    relay, sink = fg.Node("relay"), fg.Node("sink")

    @relay.on(Placed, source="shop")
    async def pass_on(placed: Placed) -> Any:
        return Noted(text=text[0])

    @sink.on(Noted, source="relay")
    async def hear(note: Noted) -> None:
        heard.append(note.text)

    return [relay, sink]


async def output_with(text: str) -> fg.Envelope:
    async with fg.testing.bench(*relay_and_sink([text], [])) as bench:
        await bench.publish(Placed(name="x"), idempotency_key="k")
        await bench.settle()
        [envelope] = bench.envelopes(Noted)
    return envelope


async def test_the_same_id_with_another_body_is_an_alarm_and_never_silence() -> None:
    heard: list[str] = []
    told: list[Any] = []
    other = await output_with("from another run")
    async with fg.testing.bench(*relay_and_sink(["from this run"], heard)) as bench:
        bench.bus.on_alarm(told.append)
        await bench.publish(Placed(name="x"), idempotency_key="k")
        await bench.settle()
        [mine] = bench.envelopes(Noted)
        assert mine.publication_id == other.publication_id
        await bench.deliver(other)
        await bench.settle()
        assert isinstance(bench.bus.alarms, Counter)
        assert bench.bus.alarms["disagreement"] == 1
    assert heard == ["from this run"], "the first one wins"
    [alarm] = told
    assert (alarm.kind, alarm.node) == ("disagreement", "sink")
    assert alarm.message_id == fg.ids.message_id(other.publication_id, "sink")
    assert alarm.text


async def test_the_same_id_with_the_same_body_is_no_alarm() -> None:
    told: list[Any] = []
    copy = await output_with("same")
    async with fg.testing.bench(*relay_and_sink(["same"], [])) as bench:
        bench.bus.on_alarm(told.append)
        await bench.publish(Placed(name="x"), idempotency_key="k")
        await bench.settle()
        await bench.deliver(copy)
        await bench.settle()
        assert bench.bus.outcomes().get("duplicate", 0) == 1
        assert bench.bus.alarms["disagreement"] == 0
    assert told == []


async def test_foreign_messages_that_disagree_are_an_alarm_too() -> None:
    # Reading: a foreign message carries no digest, so the recipient takes it from the body.
    first = raw("one")
    async with fg.testing.bench(worker([])) as bench:
        await bench.deliver(first)
        await bench.settle()
        await bench.deliver(raw("two", publication_id=first.publication_id))
        await bench.settle()
        assert bench.bus.alarms["disagreement"] == 1
        assert bench.sent(Noted) == [Noted(text="one")]


# --- the unit of work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["yielded", "recorded on the context"])
async def test_a_handler_that_fails_after_its_outputs_sends_nothing(kind: str) -> None:
    node = fg.Node("worker")

    if kind == "yielded":

        @node.on(Job, retry=fg.Retry(1, delay=1), redeliver=None)
        async def work(job: Job) -> AsyncIterator[Any]:
            yield Noted(text="too early")
            raise RuntimeError("after the yield")

    else:

        @node.on(Job, retry=fg.Retry(1, delay=1), redeliver=None)
        async def record(job: Job, ctx: fg.Context) -> None:
            ctx.publish(Noted(text="too early"))
            raise RuntimeError("after the publish")

    async with fg.testing.bench(node) as bench:
        await bench.send(Job(name="x"))
        await bench.settle()
        assert bench.sent() == []
        assert len(bench.dead_letters()) == 1


async def test_an_output_is_sent_only_when_what_caused_it_is_committed(tmp_path: Path) -> None:
    seen: list[int] = []
    path = tmp_path / "worker.db"
    node, sink = worker([]), fg.Node("sink")

    @sink.on(Noted, source="worker")
    async def hear(note: Noted) -> None:
        [(count,)] = rows(path, f"select count(*) from notes where text = '{note.text}'")
        seen.append(count)

    nodes = [fg.Node("boss"), node, sink]
    store = {"worker": f"sqlite:{path}", "sink": f"sqlite:{tmp_path}/sink.db"}
    async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=store) as bus:
        for number in range(20):
            await bus.send(Job(name=str(number)), to="worker", node="boss")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert seen == [1] * 20


async def test_stored_outputs_win_over_what_a_second_run_would_say() -> None:
    """The output is derived from state that changes; a crash after the commit must not send the other one."""
    state = ["first"]
    node = fg.Node("worker")

    @node.on(Job)
    async def work(job: Job) -> Any:
        said = Noted(text=state[0])
        state[0] = "second"
        return said

    async with fg.testing.bench(node) as bench:
        with fg.testing.crash_at("bus.before-settle"):
            await bench.send(Job(name="x"))
            await bench.settle()
        assert bench.sent(Noted) == [Noted(text="first")]


# --- outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [None, "memory:"])
async def test_an_unroutable_output_becomes_a_dead_letter_and_the_rest_is_sent(store: str | None) -> None:
    heard: list[str] = []
    node, sink = fg.Node("worker", schema=NOTES if store else None), fg.Node("sink")

    @node.on(Placed, source="boss")
    async def work(placed: Placed, ctx: fg.Context) -> AsyncIterator[Any]:
        if store:
            await ctx.db.execute("insert into notes(text) values (?)", (placed.name,))
        yield Noted(text="before")
        yield fg.send(Job(name="lost"), to="nowhere")
        yield Noted(text="after")

    @sink.on(Noted, source="worker", order=fg.Serial())
    async def hear(note: Noted) -> None:
        heard.append(note.text)

    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node, sink], store=store) as bus:
        await bus.publish(Placed(name="x"), node="boss")
        await bus.idle(timeout=LONG)
        [dead] = await bus.dead_letters()
        assert bus.outcomes()["handled"] == 3
        if store:
            assert await committed(bus, "select text from notes") == [("x",)]
    assert heard == ["before", "after"]
    assert (dead.node, dead.reason, dead.envelope.type) == ("worker", "unroutable", "Job")
    assert "nowhere" in dead.error


async def test_a_delayed_output_comes_once_and_when_its_time_has_come() -> None:
    heard: list[str] = []
    node = fg.Node("worker")

    @node.on(Job)
    async def work(job: Job) -> Any:
        return [fg.publish(Noted(text="later"), delay=100), Noted(text="now")]

    @node.on(Noted, source="worker")
    async def hear(note: Noted) -> None:
        heard.append(note.text)

    async with fg.testing.bench(node) as bench:
        envelope = raw()
        await bench.deliver(envelope)
        await bench.settle()
        assert heard == ["now"]
        await bench.deliver(envelope)
        await bench.advance(99)
        assert heard == ["now"]
        await bench.advance(1)
        assert heard == ["now", "later"]
        await bench.advance(1_000)
    assert heard == ["now", "later"]


async def test_idle_does_not_wait_for_a_delayed_output_and_a_restart_keeps_it(tmp_path: Path) -> None:
    heard = asyncio.Event()
    node = fg.Node("worker")

    @node.on(Job)
    async def work(job: Job) -> Any:
        return fg.publish(Noted(text="later"), delay=0.3 if job.name == "soon" else 86_400)

    @node.on(Noted, source="worker")
    async def hear(note: Noted) -> None:
        heard.set()

    def bus() -> fg.Bus:
        return fg.Bus(f"journal:{tmp_path}/data", nodes=[fg.Node("boss"), node], store=f"sqlite:{tmp_path}/s.db")

    async with asyncio.timeout(LONG):
        async with bus() as first:
            await first.send(Job(name="tomorrow"), to="worker", node="boss")
            await first.idle(timeout=LONG)
            assert first.outcomes()["handled"] == 1
            await first.send(Job(name="soon"), to="worker", node="boss")
            await first.idle(timeout=LONG)
        async with bus() as second:
            await heard.wait()
            await second.idle(timeout=LONG)
            assert await second.dead_letters() == []


@pytest.mark.parametrize("failing", [False, True], ids=["all goes well", "some tries fail"])
async def test_the_order_within_a_key_holds_over_two_hops(failing: bool, tmp_path: Path) -> None:
    arrived: dict[str, list[int]] = defaultdict(list)
    tries: Counter[tuple[str, str, int]] = Counter()
    relay, sink = fg.Node("relay"), fg.Node("sink")
    options: dict[str, Any] = {"key": "key", "retry": None, "redeliver": fg.Redeliver(0.001, 0.001)}

    def fail_sometimes(where: str, key: str, number: int) -> None:
        tries[where, key, number] += 1
        if failing and number % 4 == 1 and tries[where, key, number] == 1:
            raise RuntimeError("first time")

    @relay.on(Step, source="feeder", **options)
    async def pass_on(step: Step) -> Any:
        fail_sometimes("relay", step.key, step.number)
        return [Moved(key=step.key, number=2 * step.number), Moved(key=step.key, number=2 * step.number + 1)]

    @sink.on(Moved, source="relay", **options)
    async def arrive(moved: Moved) -> None:
        fail_sometimes("sink", moved.key, moved.number)
        arrived[moved.key].append(moved.number)

    nodes = [fg.Node("feeder"), relay, sink]
    async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=f"sqlite:{tmp_path}/s.db") as bus:
        await bus.publish_many([Step(key=key, number=n) for n in range(15) for key in "abc"], node="feeder")
        await bus.idle(timeout=60)
        assert await bus.dead_letters() == []
    assert arrived == {key: list(range(30)) for key in "abc"}


async def test_at_rest_no_output_is_left_undispatched(tmp_path: Path) -> None:
    runs: list[str] = []
    async with fg.Bus("memory:", nodes=[fg.Node("boss"), worker(runs)], store=f"sqlite:{tmp_path}/s.db") as bus:
        for number in range(10):
            await bus.send(Job(name=str(number)), to="worker", node="boss")
        await bus.idle(timeout=LONG)
    # Reading: a dispatched row is either gone or has its dispatched_at.
    assert rows(tmp_path / "s.db", "select count(*) from faregate_outbox where dispatched_at is null") == [(0,)]
    assert len(runs) == 10


async def test_a_restart_before_the_dispatch_sends_what_was_committed(tmp_path: Path) -> None:
    """The zombie record: committed, not sent. Whatever dies behind the commit, the next start sends it."""
    heard: list[str] = []
    node, sink = worker([]), fg.Node("sink")

    @sink.on(Noted, source="worker")
    async def hear(note: Noted) -> None:
        heard.append(note.text)

    def bus() -> fg.Bus:
        nodes = [fg.Node("boss"), node, sink]
        return fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=f"sqlite:{tmp_path}/s.db")

    async with asyncio.timeout(60):
        with contextlib.suppress(Crash, fg.IdleTimeout), fg.testing.crash_at("bus.before-publish", times=1_000):
            async with bus() as first:
                with contextlib.suppress(Crash):
                    await first.send(Job(name="x"), to="worker", node="boss", idempotency_key="x")
                await first.idle(timeout=0.2)
        async with bus() as second:
            await second.send(Job(name="x"), to="worker", node="boss", idempotency_key="x")
            await second.idle(timeout=LONG)
    assert heard == ["x"]
    assert rows(tmp_path / "s.db", "select text from notes") == [("x",)]
