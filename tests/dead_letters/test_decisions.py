"""Deciding about dead letters on a running bus: replay, discard, edit, and what meets them on the way."""

import asyncio
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate.bus.dead_letters import EDITED_FROM, DeadLetters
from faregate.ports.store import DeadFilter

LONG = 30  # seconds until a test that hangs is failed


class Job(fg.Command):
    name: str


class Told(fg.Event):
    name: str


class Rig:
    """A worker that fails as long as it is broken, and a listener beside it."""

    def __init__(self) -> None:
        self.broken = True
        self.runs: list[str] = []
        self.heard: list[str] = []
        self.worker, self.listener = fg.Node("worker"), fg.Node("listener")

        @self.worker.on(Job, retry=None, redeliver=None)
        async def work(job: Job, ctx: fg.Context) -> None:
            self.runs.append(job.name)
            if self.broken:
                raise RuntimeError("broken")

        @self.worker.on(Told, source="boss", retry=None, redeliver=None)
        async def take(told: Told) -> None:
            self.runs.append(told.name)
            if self.broken:
                raise RuntimeError("broken")

        @self.listener.on(Told, source="boss")
        async def listen(told: Told) -> None:
            self.heard.append(told.name)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def letters(bench: Any) -> DeadLetters:
    return DeadLetters(bench.bus.stores.values(), bench.clock)


async def test_a_bus_lists_replays_and_resolves(rig: Rig) -> None:
    async with fg.testing.bench(rig.worker) as bench:
        root = await bench.send(Job(name="a"))
        await bench.settle()
        [letter] = await bench.bus.dead_letters("worker")
        assert letter.publication_id == root
        assert await bench.bus.dead_letters(status="resolved") == []
        rig.broken = False
        [replayed] = await bench.bus.replay(letter.message_id, by="ann")
        assert (replayed.status, replayed.replays, replayed.changed_by) == ("replayed", 1, "ann")
        await bench.settle()
        assert await bench.bus.dead_letters() == []
        [resolved] = await bench.bus.dead_letters(status=None)
        assert resolved.status == "resolved"
        with pytest.raises(fg.DeadLetterClosed, match="was handled after all"):
            await bench.bus.replay(letter.message_id)
    assert rig.runs == ["a", "a"]


async def test_only_the_node_of_the_dead_letter_gets_the_replay_of_an_event(rig: Rig) -> None:
    async with fg.testing.bench(rig.worker, rig.listener) as bench:
        await bench.publish(Told(name="a"))
        await bench.settle()
        rig.broken = False
        [letter] = await bench.bus.dead_letters()
        await bench.bus.replay(letter.message_id)
        await bench.settle()
        assert bench.outcomes()["duplicate"] == 0, "the listener got it, too"
    assert (rig.runs, rig.heard) == (["a", "a"], ["a"])


async def test_a_replay_that_is_discarded_before_it_runs_does_not_run(rig: Rig) -> None:
    async with fg.testing.bench(rig.worker) as bench:
        await bench.send(Job(name="a"))
        await bench.settle()
        [letter] = await bench.bus.dead_letters()
        await bench.bus.pause("worker", Job)
        await bench.bus.replay(letter.message_id)
        await bench.settle()  # it waits in the queue by now
        await bench.bus.discard(letter.message_id, by="ann")
        rig.broken = False
        await bench.bus.resume("worker", Job)
        await bench.settle()
        [discarded] = await bench.bus.dead_letters(status=None)
        assert (discarded.status, discarded.copies, discarded.changed_by) == ("discarded", 2, "ann")
        with pytest.raises(fg.DeadLetterClosed, match="discarded by ann"):
            await bench.bus.replay(letter.message_id)
    assert rig.runs == ["a"]


async def test_a_discard_takes_a_replay_back_that_was_not_sent_yet(tmp_path: Any) -> None:
    """It matters for an output that nobody took: its recipients know nothing of the letter."""
    relay, late, heard = fg.Node("relay"), fg.Node("late"), []

    @relay.on(Told, source="boss")
    async def pass_on(told: Told) -> Any:
        return fg.send(Job(name=told.name), to="late")

    @late.on(Job)
    async def work(job: Job) -> None:
        heard.append(job.name)

    def bus(*nodes: fg.Node) -> fg.Bus:
        nodes = (fg.Node("boss"), relay, *nodes)
        return fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=f"sqlite:{tmp_path}/store.db")

    async with asyncio.timeout(30):
        async with bus() as first:
            await first.publish(Told(name="a"), node="boss")
            await first.idle()
            [letter] = await first.dead_letters()
        second = bus(late)
        [store] = second.stores.values()
        await store.open()
        found = DeadLetters([store], second.clock)
        await found.decide([letter.message_id], "replayed", "ann")
        assert [row.envelope.recipients for row in await store.undispatched(9)] == [()]
        await found.decide([letter.message_id], "discarded", "ann")
        assert await store.undispatched(9) == []
        await store.close()
        async with second:
            await second.idle()
    assert heard == []


async def test_several_are_replayed_together_or_none_of_them(rig: Rig) -> None:
    async with fg.testing.bench(rig.worker) as bench:
        for name in ("a", "b"):
            await bench.send(Job(name=name))
        await bench.settle()
        first, second = await bench.bus.dead_letters()
        await bench.bus.discard(second.message_id)
        with pytest.raises(fg.DeadLetterClosed):
            await bench.bus.replay(first.message_id, second.message_id)
        with pytest.raises(fg.DeadLetterNotFound):
            await bench.bus.replay(first.message_id, fg.ids.root_id())
        assert [letter.status for letter in await bench.bus.dead_letters(status=None)] == ["open", "discarded"]
        found = await letters(bench).find(DeadFilter())
        assert [each.status for each in await letters(bench).decide_all(found, "replayed", "ann")] == ["replayed"]


async def test_an_edited_message_is_a_new_one_that_names_the_original(rig: Rig) -> None:
    async with fg.testing.bench(rig.worker) as bench:
        root = await bench.send(Job(name="bad"), headers={"tenant": "acme"})
        await bench.settle()
        [letter] = await bench.bus.dead_letters()
        rig.broken = False
        sent = await letters(bench).edit(letter.message_id, '{"name": "good"}', "ann")
        again = await letters(bench).edit(letter.message_id, '{ "name":"good" }', "ann")
        other = await letters(bench).edit(letter.message_id, '{"name": "better"}', "ann")
        await bench.settle()
        assert sent.publication_id == again.publication_id, "the same edit is the same publication"
        assert len({root, sent.publication_id, other.publication_id}) == 3
        assert (sent.correlation_id, sent.causation_id) == (root, letter.message_id)
        assert (sent.headers["tenant"], sent.headers[EDITED_FROM]) == ("acme", letter.message_id)
        assert [each.status for each in await bench.bus.dead_letters(status=None)] == ["open"]
    assert rig.runs == ["bad", "good", "better"]


async def test_the_beginning_of_an_id_is_enough_while_it_is_the_only_one(rig: Rig) -> None:
    async with fg.testing.bench(rig.worker) as bench:
        for key in ("a", "b"):  # roots by key have nothing in common
            await bench.send(Job(name=key), idempotency_key=key)
        await bench.settle()
        found = await bench.bus.dead_letters()
        for letter in found:
            assert (await letters(bench).one(letter.message_id[:8].upper())).letter == letter
            assert (await letters(bench).one(letter.publication_id)).letter == letter
            assert letter.publication_id != letter.message_id
        with pytest.raises(fg.ConfigurationError, match="too short"):
            await letters(bench).one(found[0].message_id[:7])
        with pytest.raises(fg.DeadLetterNotFound):
            await letters(bench).one("00000000")


async def test_the_beginning_of_several_ids_is_refused_with_some_of_them(rig: Rig) -> None:
    async with fg.testing.bench(rig.worker) as bench:
        for name in "abcde":
            await bench.send(Job(name=name))  # all of one moment of the bench's clock
        await bench.settle()
        first, *_ = await bench.bus.dead_letters()
        with pytest.raises(fg.ConfigurationError, match=f"stands for 5 dead letters.*{first.message_id}.*…"):
            await letters(bench).one(first.message_id[:8])


async def test_dead_letters_of_stores_and_of_the_transport_are_listed_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper, plain = fg.Node("keeper"), fg.Node("plain")

    @keeper.on(Job)
    @plain.on(Job)
    async def fail(job: Job) -> None:
        raise fg.Permanent(job.name)

    nodes = [fg.Node("boss"), keeper, plain]
    async with fg.Bus("memory:", nodes=nodes, store={"keeper": "memory:"}) as bus:
        for name in ("keeper", "plain", "plain"):
            await bus.send(Job(name="bad"), to=name, node="boss")
            await bus.idle(timeout=LONG)
        every = await bus.dead_letters()
        assert [letter.node for letter in every] == ["keeper", "plain", "plain"]
        assert [letter.node for letter in await bus.dead_letters(keeper)] == ["keeper"]
        assert [letter.node for letter in await bus.dead_letters("plain", limit=1)] == ["plain"]
        assert await bus.dead_letters(limit=2) == every[:2]

        async def on_its_way(node: str, limit: int = 1000) -> list[fg.DeadLetter]:
            return [letter for letter in every if letter.node == node]

        monkeypatch.setattr(bus.transport, "dead_letters", on_its_way)
        assert await bus.dead_letters() == every, "one that is in the store, and not yet settled, is listed once"
        monkeypatch.undo()

        await bus.discard(every[0].message_id)
        assert await bus.dead_letters() == every[1:]
        assert [letter.node for letter in await bus.dead_letters(status="discarded")] == ["keeper"]
        assert len(await bus.dead_letters(status=None)) == 3


async def test_a_bus_without_a_store_says_so() -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("boss")]) as bus:
        assert await bus.dead_letters() == []
        with pytest.raises(fg.ConfigurationError, match="store"):
            await bus.replay("1")


async def test_a_replay_carries_nothing_of_the_first_journey(rig: Rig) -> None:
    async with fg.testing.bench(rig.worker) as bench:
        await bench.send(Job(name="a"), delay=5)
        await bench.advance(6)
        await bench.settle()
        [letter] = await bench.bus.dead_letters()
        [store] = bench.bus.stores.values()
        await letters(bench).decide([letter.message_id], "replayed", "ann")
        [row] = await store.undispatched(9)
    assert row.envelope == msgspec.structs.replace(
        letter.envelope, recipients=("worker",), replay=1, deliver_at=None, expires_at=None, redeliveries=0
    )


async def test_without_deduplication_a_replay_resolves_its_letter_and_a_discard_stops_the_copy_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    working = fg.Node("working")
    broken, runs = True, list[str]()
    arrived = asyncio.Event()

    @working.on(Job, dedup="off", retry=None, redeliver=None)
    async def work(job: Job) -> None:
        runs.append(job.name)
        if broken:
            raise RuntimeError("broken")

    async with fg.Bus("memory:", nodes=[working], store="memory:") as bus:
        for name in ("a", "b"):
            await bus.send(Job(name=name), to="working")
        await bus.idle(timeout=LONG)
        letters = {
            msgspec.json.decode(each.envelope.body)["name"]: each.message_id for each in await bus.dead_letters()
        }
        broken = False
        runs.clear()

        async def statuses() -> dict[str, str]:
            found = {each.message_id: each.status for each in await bus.dead_letters(status=None)}
            return {name: found[message_id] for name, message_id in letters.items()}

        await bus.replay(letters["a"])
        await bus.idle(timeout=LONG)
        assert runs == ["a"] and await statuses() == {"a": "resolved", "b": "open"}

        await bus.pause("working", Job)
        real = bus.transport.publish

        async def publish(envelopes: Any) -> None:
            await real(envelopes)
            arrived.set()

        monkeypatch.setattr(bus.transport, "publish", publish)
        await bus.replay(letters["b"])
        await asyncio.wait_for(arrived.wait(), LONG)
        await bus.discard(letters["b"])
        await bus.resume("working", Job)
        await bus.idle(timeout=LONG)
        assert runs == ["a"] and await statuses() == {"a": "resolved", "b": "discarded"}
