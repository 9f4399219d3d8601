"""Dead letters are listed, replayed or discarded, and never doubled."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from tests.dead_letters.rig import (
    LONG,
    Errand,
    Job,
    Place,
    Reminder,
    World,
    dead,
    die,
    listing,
    ok,
    raw,
    rows,
    status_of,
    worker,
)

# --- the table --------------------------------------------------------------------------------------------


async def test_a_dead_letter_is_listed_with_all_a_person_needs(place: Place) -> None:
    world = World()
    async with place.bus(world) as bus:
        root = await bus.send(Job(name="bad"), to="worker", node="boss", headers={"tenant": "acme"})
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert await bus.dead_letters("worker") == [letter]
        assert await bus.dead_letters("boss") == []
        assert bus.outcomes()["dead"] == 1
    assert (letter.node, letter.reason, letter.tries) == ("worker", "failed", 1)
    assert "RuntimeError" in letter.error
    assert "bad cannot be done" in letter.error
    assert letter.envelope.publication_id == root
    assert letter.envelope.headers["tenant"] == "acme"
    assert json.loads(bytes(letter.envelope.body)) == {"name": "bad"}


async def test_dead_letters_are_there_again_after_a_restart(place: Place) -> None:
    world = World()
    [message_id] = await die(place, world, "bad")
    async with place.bus(world) as bus:
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters("worker")
    assert fg.ids.message_id(letter.envelope.publication_id, "worker") == message_id
    assert world.names() == ["bad"]


async def test_a_dead_letter_writes_no_ledger_row(place: Place) -> None:
    world = World()
    await die(place, world, "bad", "good")
    # Reading: the table is called faregate_ledger and has one row per handled message.
    assert rows(place.path, "select count(*) from faregate_ledger") == [(1,)]
    assert place.notes() == ["good"]


async def test_a_later_copy_of_a_dead_message_folds_into_it_and_does_not_run() -> None:
    world = World()
    async with fg.testing.bench(worker(world)) as bench:
        envelope = raw("bad")
        for _ in range(3):
            await bench.deliver(envelope)
            await bench.settle()
        assert [letter.reason for letter in bench.dead_letters()] == ["failed"]
        assert [letter.reason for letter in await bench.bus.dead_letters()] == ["failed"]
        assert bench.sent() == []
    assert world.names() == ["bad"]


async def test_a_later_copy_does_not_run_even_when_the_cause_is_gone(place: Place) -> None:
    world = World()
    await die(place, world, "bad", key="k")
    world.broken = False
    async with place.bus(world, journal="a-new-one") as bus:
        await bus.send(Job(name="bad"), to="worker", node="boss", idempotency_key="k")
        await bus.idle(timeout=LONG)
        assert len(await bus.dead_letters()) == 1
    assert world.names() == ["bad"], "an operator decides about it, not the next copy"


async def test_what_nobody_took_in_time_is_drained_into_the_table(place: Place) -> None:
    reader = fg.Node("reader")

    @reader.on(Reminder, source="boss", expires=0.02)
    async def read(reminder: Reminder) -> None:
        raise AssertionError("it has expired")

    nodes = [fg.Node("boss"), reader]
    async with asyncio.timeout(LONG):
        async with fg.Bus(f"journal:{place.folder}/data", nodes=nodes, store=place.store) as bus:
            await bus.pause("reader", Reminder)
            root = await bus.publish(Reminder(text="stale"), node="boss")
            await bus.idle(timeout=LONG)
            [letter] = await bus.dead_letters("reader")
    assert letter.reason == "expired"
    [entry] = listing(place.store, "--reason", "expired")
    assert (entry["id"], entry["node"], entry["type"]) == (fg.ids.message_id(root, "reader"), "reader", "Reminder")


# --- listing and showing ----------------------------------------------------------------------------------


async def test_the_command_line_lists_and_filters(place: Place) -> None:
    world = World()
    ids = await die(place, world, "bad 1", "good", "bad 2")
    async with place.bus(world) as bus:
        root = await bus.send(Errand(name="errand"), to="worker", node="boss")
        await bus.idle(timeout=LONG)
    errand = fg.ids.message_id(root, "worker")

    everything = listing(place.store)
    assert {entry["id"] for entry in everything} == {ids[0], ids[2], errand}
    assert {entry["status"] for entry in everything} == {"open"}
    assert {entry["node"] for entry in everything} == {"worker"}
    assert [entry["id"] for entry in listing(place.store, "--type", "Errand")] == [errand]
    assert [entry["id"] for entry in listing(place.store, "--reason", "permanent")] == [errand]
    assert {entry["id"] for entry in listing(place.store, "--reason", "failed")} == {ids[0], ids[2]}
    assert len(listing(place.store, "--node", "worker")) == 3
    assert listing(place.store, "--node", "boss") == []
    assert len(listing(place.store, "--status", "open")) == 3
    assert listing(place.store, "--status", "resolved") == []
    assert [entry["id"] for entry in listing(place.store, "--type", "Job", "--status", "open")] != []


async def test_the_listing_for_people_names_id_type_node_and_reason(place: Place) -> None:
    [message_id] = await die(place, World(), "bad")
    shown = ok("list", place.store)
    for part in (message_id, "Job", "worker", "failed", "open"):
        assert part in shown


async def test_a_store_without_dead_letters_lists_none(place: Place) -> None:
    await die(place, World(), "good")
    assert listing(place.store) == []


async def test_one_dead_letter_is_shown_with_error_headers_and_body(place: Place) -> None:
    async with place.bus(World()) as bus:
        root = await bus.send(Job(name="bad"), to="worker", node="boss", headers={"tenant": "acme"})
        await bus.idle(timeout=LONG)
    message_id = fg.ids.message_id(root, "worker")
    shown = json.loads(ok("show", place.store, message_id, "--json"))
    assert (shown["id"], shown["node"], shown["type"], shown["status"]) == (message_id, "worker", "Job", "open")
    assert shown["reason"] == "failed"
    assert "bad cannot be done" in json.dumps(shown)
    assert "Traceback" in json.dumps(shown), "the error comes with its traceback"
    assert shown["headers"] == {"tenant": "acme"}
    # Reading: a JSON body is shown as JSON or as its text.
    assert shown["body"] in ({"name": "bad"}, '{"name":"bad"}')
    assert root in json.dumps(shown), "the correlation of a root is its own publication id"


@pytest.mark.parametrize("command", ["show", "replay", "discard"])
async def test_an_id_that_is_not_there_is_one_clear_sentence(command: str, place: Place) -> None:
    await die(place, World(), "bad")
    stranger = fg.ids.root_id()
    shown = dead(command, place.store, stranger)
    assert shown.returncode == 1
    assert stranger in shown.stderr
    assert "Traceback" not in shown.stderr
    assert {entry["status"] for entry in listing(place.store)} == {"open"}


@pytest.mark.parametrize("command", ["list", "show", "replay", "discard"])
def test_every_dead_command_explains_itself(command: str) -> None:
    shown = dead(command, "--help")
    assert shown.returncode == 0
    assert "--json" in shown.stdout


async def test_replaying_neither_ids_nor_all_is_refused(place: Place) -> None:
    await die(place, World(), "bad")
    shown = dead("replay", place.store)
    assert shown.returncode != 0
    assert "--all" in shown.stderr


# --- replaying --------------------------------------------------------------------------------------------


async def test_a_replay_while_nothing_runs_happens_at_the_next_start(place: Place) -> None:
    world = World()
    [message_id] = await die(place, world, "bad")
    ok("replay", place.store, message_id)
    assert status_of(place.store, message_id) == "replayed"
    world.broken = False
    # Reading: a replay that was asked for counts as in flight, so idle waits for it.
    async with place.bus(world) as bus:
        await bus.idle(timeout=LONG)
    assert world.runs == [("bad", message_id)] * 2
    assert status_of(place.store, message_id) == "resolved"
    assert place.notes() == ["bad"]


async def test_all_open_ones_are_replayed_at_once_and_only_those(place: Place) -> None:
    world = World()
    ids = await die(place, world, "bad 1", "bad 2", "bad 3")
    ok("discard", place.store, ids[1])
    ok("replay", place.store, "--all")
    world.broken = False
    async with place.bus(world) as bus:
        await bus.idle(timeout=LONG)
    assert sorted(place.notes()) == ["bad 1", "bad 3"]
    assert {entry["id"]: entry["status"] for entry in listing(place.store)} == {
        ids[0]: "resolved",
        ids[1]: "discarded",
        ids[2]: "resolved",
    }


async def test_several_ids_are_decided_about_together_and_the_others_stay_open(place: Place) -> None:
    world = World()
    ids = await die(place, world, "bad 1", "bad 2", "bad 3", "bad 4", "bad 5")
    ok("replay", place.store, ids[0], ids[2])
    ok("discard", place.store, ids[1], ids[3])
    world.broken = False
    async with place.bus(world) as bus:
        await bus.idle(timeout=LONG)
    assert sorted(place.notes()) == ["bad 1", "bad 3"]
    assert [status_of(place.store, each) for each in ids] == ["resolved", "discarded", "resolved", "discarded", "open"]
    assert [entry["id"] for entry in listing(place.store, "--status", "open")] == [ids[4]]


async def test_a_replay_that_fails_again_is_open_again_and_still_one_letter(place: Place) -> None:
    world = World()
    [message_id] = await die(place, world, "bad")
    ok("replay", place.store, message_id)
    async with place.bus(world) as bus:
        await bus.idle(timeout=LONG)
        assert len(await bus.dead_letters()) == 1
    assert world.names() == ["bad", "bad"]
    assert [(entry["id"], entry["status"]) for entry in listing(place.store)] == [(message_id, "open")]


async def test_asking_twice_for_one_replay_has_one_effect(place: Place) -> None:
    world = World()
    [message_id] = await die(place, world, "bad")
    ok("replay", place.store, message_id)
    dead("replay", place.store, message_id)  # refused or folded: both are fine
    world.broken = False
    async with place.bus(world) as bus:
        await bus.idle(timeout=LONG)
    assert place.notes() == ["bad"]


async def test_a_message_can_be_replayed_again_after_another_failure(place: Place) -> None:
    """The broker remembers publications; a replay must not be taken for a repetition of an earlier replay."""
    world = World()
    [message_id] = await die(place, world, "bad")
    for _ in range(2):
        ok("replay", place.store, message_id)
        async with place.bus(world) as bus:
            await bus.idle(timeout=LONG)
    world.broken = False
    ok("replay", place.store, message_id)
    async with place.bus(world) as bus:
        await bus.idle(timeout=LONG)
    assert world.names() == ["bad"] * 4
    assert place.notes() == ["bad"]


async def test_a_dead_letter_replayed_later_and_then_the_original_copy_arrives_too(place: Place) -> None:
    world = World()
    [message_id] = await die(place, world, "bad", key="k")
    world.broken = False
    ok("replay", place.store, message_id)
    async with place.bus(world) as bus:
        await bus.idle(timeout=LONG)
    async with place.bus(world, journal="a-new-one") as bus:
        await bus.send(Job(name="bad"), to="worker", node="boss", idempotency_key="k")
        await bus.idle(timeout=LONG)
        assert bus.outcomes().get("duplicate", 0) == 1
        assert await bus.dead_letters() == []
    assert place.notes() == ["bad"]
    assert status_of(place.store, message_id) == "resolved"


async def test_an_unroutable_output_can_be_replayed_when_its_recipient_is_there(place: Place) -> None:
    relay, late = fg.Node("relay"), fg.Node("late")
    heard: list[str] = []

    @relay.on(Reminder, source="boss")
    async def pass_on(reminder: Reminder) -> Any:
        return fg.send(Job(name=reminder.text), to="late")

    @late.on(Job)
    async def work(job: Job) -> None:
        heard.append(job.name)

    def bus(*nodes: fg.Node) -> fg.Bus:
        return fg.Bus(f"journal:{place.folder}/data", nodes=[fg.Node("boss"), relay, *nodes], store=place.store)

    async with bus() as first:
        await first.publish(Reminder(text="x"), node="boss")
        await first.idle(timeout=LONG)
    [entry] = listing(place.store)
    assert (entry["node"], entry["reason"], entry["type"]) == ("relay", "unroutable", "Job")
    ok("replay", place.store, entry["id"])
    async with bus(late) as second:
        await second.idle(timeout=LONG)
    assert heard == ["x"]


# --- discarding -------------------------------------------------------------------------------------------


async def test_a_discarded_message_is_no_dead_letter_again_and_its_copies_do_not_run(place: Place) -> None:
    world = World()
    [message_id] = await die(place, world, "bad", key="k")
    ok("discard", place.store, message_id)
    assert status_of(place.store, message_id) == "discarded"
    world.broken = False
    async with place.bus(world, journal="a-new-one") as bus:
        await bus.send(Job(name="bad"), to="worker", node="boss", idempotency_key="k")
        await bus.idle(timeout=LONG)
        # Reading: `bus.dead_letters()` lists what still waits for a decision.
        assert await bus.dead_letters() == []
    assert world.names() == ["bad"]
    assert place.notes() == []
    assert status_of(place.store, message_id) == "discarded"


async def test_a_letter_is_discarded_beside_a_running_bus(place: Place) -> None:
    world = World()
    async with asyncio.timeout(60), place.bus(world) as bus:
        root = await bus.send(Job(name="bad"), to="worker", node="boss")
        await bus.idle(timeout=LONG)
        message_id = fg.ids.message_id(root, "worker")
        await asyncio.to_thread(ok, "discard", place.store, message_id)
        assert await bus.dead_letters() == []
        world.broken = False
        await bus.send(Job(name="good"), to="worker", node="boss")
        await bus.idle(timeout=LONG)
    assert place.notes() == ["good"]


# --- module:bus as the target -----------------------------------------------------------------------------

APP = """
from pathlib import Path
import faregate as fg

HERE = Path(__file__).parent

class Job(fg.Command):
    name: str

boss = fg.Node("boss")
worker = fg.Node("worker", schema="create table if not exists notes(number integer primary key, text text)")
runs = []

@worker.on(Job, retry=None, redeliver=None)
async def work(job: Job, ctx: fg.Context):
    runs.append(ctx.message_id)
    await ctx.db.execute("insert into notes(text) values (?)", (job.name,))
    if not (HERE / "repaired").exists():
        raise RuntimeError("broken")

def make():
    return fg.Bus(f"journal:{HERE}/data", nodes=[boss, worker], store=f"sqlite:{HERE}/store.db")

bus = make()
"""


def load_app(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = folder / "deadapp.py"
    file.write_text(APP)
    spec = importlib.util.spec_from_file_location("deadapp", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "deadapp", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("target", ["deadapp:bus", "store url"])
async def test_a_bus_or_its_store_may_be_the_target(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = load_app(tmp_path, monkeypatch)
    where = target if target == "deadapp:bus" else f"sqlite:{tmp_path}/store.db"
    async with app.make() as bus:
        roots = [await bus.send(app.Job(name=name), to="worker", node="boss") for name in ("a", "b")]
        await bus.idle(timeout=LONG)
    ids = [fg.ids.message_id(root, "worker") for root in roots]
    assert {entry["id"] for entry in listing(where, cwd=tmp_path)} == set(ids)
    assert json.loads(ok("show", where, ids[0], "--json", cwd=tmp_path))["id"] == ids[0]
    ok("replay", where, ids[0], cwd=tmp_path)
    ok("discard", where, ids[1], cwd=tmp_path)
    (tmp_path / "repaired").touch()
    async with app.make() as bus:
        await bus.idle(timeout=LONG)
    assert {entry["id"]: entry["status"] for entry in listing(where, cwd=tmp_path)} == {
        ids[0]: "resolved",
        ids[1]: "discarded",
    }
    assert rows(tmp_path / "store.db", "select text from notes") == [("a",)]


async def test_a_bus_as_the_target_is_replayed_beside_the_process_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = load_app(tmp_path, monkeypatch)
    came = asyncio.Event()

    async def tell(ctx: Any, call_next: Any) -> None:
        await call_next()
        if ctx.outcome == "handled":
            came.set()

    app.worker.use(tell, after=True)
    async with asyncio.timeout(60), app.make() as bus:
        root = await bus.send(app.Job(name="a"), to="worker", node="boss")
        await bus.idle(timeout=LONG)
        message_id = fg.ids.message_id(root, "worker")
        (tmp_path / "repaired").touch()
        await asyncio.to_thread(ok, "replay", "deadapp:bus", message_id, cwd=tmp_path)
        await came.wait()
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert app.runs == [message_id, message_id]
    assert rows(tmp_path / "store.db", "select text from notes") == [("a",)]


# --- the retention floor ----------------------------------------------------------------------------------


async def test_old_ledger_rows_are_evicted_and_young_ones_are_kept(place: Place) -> None:
    world = World()
    await die(place, world, "one", "two")
    async with place.bus(world, retain_ledger=3_600) as bus:
        await bus.idle(timeout=LONG)
    assert rows(place.path, "select count(*) from faregate_ledger") == [(2,)]
    async with place.bus(world, retain_ledger=0.001) as bus:
        await bus.idle(timeout=LONG)
    assert rows(place.path, "select count(*) from faregate_ledger") == [(0,)]


class Old(fg.Command):
    name: str


async def test_a_message_older_than_the_floor_becomes_a_dead_letter_that_says_so(place: Place) -> None:
    ran: list[str] = []
    settled: list[str] = []
    all_settled = asyncio.Event()

    async def count(ctx: fg.Context, call_next: Any) -> None:
        await call_next()
        settled.append(ctx.outcome)
        if len(settled) == 30:
            all_settled.set()

    def bus(**options: Any) -> fg.Bus:
        node = worker(World())
        node.use(count, after=True)

        @node.on(Old, retry=None, redeliver=None)
        async def late(old: Old, ctx: fg.Context) -> None:
            ran.append(ctx.message_id)

        nodes = [fg.Node("boss"), node]
        return fg.Bus(f"journal:{place.folder}/data", nodes=nodes, store=place.store, **options)

    async with asyncio.timeout(LONG), bus() as first:
        await first.pause("worker", Old)
        root = await first.send(Old(name="waits"), to="worker", node="boss")
        for number in range(30):  # appended later, handled and forgotten earlier
            await first.send(Job(name=str(number)), to="worker", node="boss")
        await all_settled.wait()  # idle would wait for the paused one
        assert first.outcomes()["handled"] == 30
    message_id = fg.ids.message_id(root, "worker")
    # Reading: a bus evicts when it starts, before it consumes.
    async with bus(retain_ledger=0.001) as second:
        await second.idle(timeout=LONG)
        assert ran == [], "it cannot be told from a repetition, so it does not run"
        [letter] = await second.dead_letters("worker")
    assert letter.reason == "below-floor"
    assert [(entry["id"], entry["reason"]) for entry in listing(place.store)] == [(message_id, "below-floor")]

    ok("replay", place.store, message_id)
    async with bus(retain_ledger=0.001) as third:
        await third.idle(timeout=LONG)
        assert await third.dead_letters() == []
    assert ran == [message_id], "the replay of an open dead letter may pass the floor"
    assert status_of(place.store, message_id) == "resolved"


@pytest.mark.parametrize("seconds", [-1, "a week", float("nan")])
def test_a_retention_that_is_no_time_is_refused(seconds: Any) -> None:
    with pytest.raises(fg.ConfigurationError, match="retain_ledger"):
        fg.Bus("memory:", nodes=[fg.Node("worker")], store="memory:", retain_ledger=seconds)
