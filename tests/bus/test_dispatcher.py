"""The dispatcher: every committed row is sent, once, by the bus that has its node."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate import ids
from faregate.bus import dispatcher as dispatching
from faregate.bus.attempts import Attempts
from faregate.bus.dead_letters import DeadLetters
from faregate.bus.dispatcher import Dispatcher
from faregate.core.alarms import Alarms
from faregate.core.recipients import RecipientLists
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store, open_token_store
from faregate.ports.store import FROM_OUTSIDE, OutboxRow
from faregate.testing import FakeClock
from faregate.testing.clock import rest
from tests.core.rig import LONG, Answered, Asked, Told, count, numbers


def watch_publish(bus: fg.Bus, monkeypatch: pytest.MonkeyPatch, see: Callable[[Iterable[Envelope]], Any]) -> None:
    """Show `see` everything that goes to the bus' transport, before it does; wait where it wants to."""
    real = bus.transport.publish

    async def publish(envelopes: Any) -> None:
        waiting = see(envelopes)
        if waiting is not None:
            await waiting
        await real(envelopes)

    monkeypatch.setattr(bus.transport, "publish", publish)


def is_output(envelope: Envelope) -> bool:
    return envelope.causation_id is not None


async def test_waiting_for_a_row_that_is_sent_and_being_removed_comes_to_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatching, "_LOOK_SECONDS", 3600.0)  # it does not clean up by itself meanwhile

    sent = asyncio.Event()

    class Transport:
        async def publish(self, envelopes: Any) -> None:
            sent.set()

    clock = SystemClock()
    store = open_store("memory:", clock)
    await store.open()
    dispatcher = Dispatcher(store, Transport(), clock, Alarms())  # type: ignore[arg-type]
    await dispatcher.start()
    envelope = Envelope(publication_id=ids.root_id(2), type="t", kind="event", source="n", body=b"")
    message_id = ids.root_id(1)
    sending = store.transaction()
    await sending.begin()
    recorded = await dispatcher.record_rows(sending, [OutboxRow(0, "n", message_id, 0, "x", None, envelope)])
    await sending.commit()
    dispatcher.committed(recorded)
    await asyncio.wait_for(sent.wait(), LONG)
    await rest()
    assert not dispatcher.busy
    removing = store.transaction()
    await removing.begin()
    removed = await dispatcher.record_rows(removing, ())
    found = await store.outbox_rows_of("n", message_id)
    assert len(found) == 1  # a read of what is committed still sees it
    waiting = asyncio.create_task(dispatcher.dispatch(found))
    await rest()
    await removing.commit()
    dispatcher.committed(removed)
    await asyncio.wait_for(waiting, LONG)
    assert await store.undispatched(10) == []
    await dispatcher.stop(0)
    await store.close()


@pytest.mark.parametrize("how", ["one after the other", "without a pause"])
async def test_rows_of_others_are_sent_while_there_is_always_something_to_send(how: str) -> None:
    """Those that wait in the outbox, and those that are due: nobody tells the dispatcher of either."""
    clock, heard, sent = FakeClock(), list[str](), asyncio.Event()
    store = open_store("memory:", clock)
    await store.open()

    class Transport:
        async def publish(self, envelopes: Any) -> None:
            heard.extend(envelope.type for envelope in envelopes)
            if how == "without a pause" and len(heard) < 30:
                clock.jump(0.1)
                await send()
            sent.set()

    def row(name: str, deliver_at: float | None = None) -> OutboxRow:
        envelope = Envelope(ids.root_id(), name, "event", "n", b"", deliver_at=deliver_at)
        return OutboxRow(0, "n", None, FROM_OUTSIDE, "x", None, envelope)

    async def send() -> None:
        async with store.transaction() as transaction:
            recorded = await dispatcher.record_rows(transaction, [row("own")])
        dispatcher.committed(recorded)

    dispatcher = Dispatcher(store, Transport(), clock, Alarms())  # type: ignore[arg-type]
    await dispatcher.start()
    async with store.transaction() as transaction:
        await transaction.send([row("outbox")])
        await transaction.schedule([row("scheduled", clock.time() + 1)])
    for _ in range(30 if how == "one after the other" else 1):
        sent.clear()
        await send()
        await asyncio.wait_for(sent.wait(), LONG)
        clock.jump(0.1)
    await dispatcher.stop(LONG)
    await store.close()
    others = [place for place, name in enumerate(heard) if name != "own"]
    assert [heard[place] for place in others] == ["outbox", "scheduled"]
    assert others[0] < 10 < others[1] < 20, "soon, and when it is due"


async def test_rows_of_a_node_wait_for_its_own_bus_while_another_runs_on_the_same_database(tmp_path: Path) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")
    got: list[int] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> None:
        got.append(asked.n)

    url = f"sqlite:{tmp_path}/all.db"
    await fg.Bus("memory:", nodes=[asking, answering], store=url).prepare_stores()  # or the store knows no such node
    async with fg.Bus("memory:", nodes=[fg.Node("stranger")], store=url) as other:
        with closing(sqlite3.connect(tmp_path / "all.db", timeout=LONG)) as connection:
            for asked in numbers(50):
                with connection:
                    fg.outbox(connection, node="asking").publish(asked)
        await other.idle(timeout=LONG)  # it has looked for rows to send
        assert await count(other, "outbox") == 50
        async with fg.Bus("memory:", nodes=[asking, answering], store=url) as bus:
            await bus.idle(timeout=LONG)
            assert sorted(got) == list(range(50))
            assert await bus.dead_letters() == [] and not bus.alarms and not other.alarms
            assert await count(bus, "outbox") == 0


async def test_of_two_buses_on_one_database_each_sends_the_rows_of_its_own_nodes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering"), fg.Node("hearing")
    got: list[str] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> Any:
        yield Answered(n=asked.n)
        yield fg.send(Told(n=asked.n), to="hearing")

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        got.append(f"event {answered.n}")

    @hearing.on(Told)
    async def do(told: Told) -> None:
        got.append(f"command {told.n}")

    reached, gate = asyncio.Event(), asyncio.Event()
    strange: list[Envelope] = []

    def hold(envelopes: Iterable[Envelope]) -> Any:
        if not any(map(is_output, envelopes)):
            return None
        reached.set()
        return gate.wait()

    url = f"sqlite:{tmp_path}/all.db"
    async with (
        fg.Bus("memory:", nodes=[asking, answering, hearing], store=url) as bus,
        fg.Bus("memory:", nodes=[fg.Node("stranger")], store=url) as other,
    ):
        watch_publish(bus, monkeypatch, hold)
        watch_publish(other, monkeypatch, strange.extend)
        await bus.publish_many(numbers(10), node="asking")
        await asyncio.wait_for(reached.wait(), LONG)
        await other.idle(timeout=LONG)  # while rows are in the table, it has looked
        gate.set()
        await bus.idle(timeout=LONG)
        assert Counter(got) == Counter(f"{kind} {n}" for kind in ("event", "command") for n in range(10))
        assert strange == [] and await bus.dead_letters() == []
        assert not bus.alarms and not other.alarms


async def test_one_database_written_in_two_ways_is_one_store_and_sends_each_output_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> Any:
        return fg.send(Told(n=asked.n), to="nobody") if asked.n == 100 else Answered(n=asked.n)

    monkeypatch.chdir(tmp_path)
    sent: Counter[str] = Counter()

    def count(envelopes: Iterable[Envelope]) -> None:
        sent.update(envelope.publication_id for envelope in envelopes if envelope.type == "Answered")

    urls = {"asking": "sqlite:all.db", "answering": f"sqlite:{tmp_path}/../{tmp_path.name}/./all.db"}
    async with fg.Bus("memory:", nodes=[asking, answering], store=urls) as bus:
        assert bus.store_of("asking") is bus.store_of("answering") and len(bus.stores) == 1
        watch_publish(bus, monkeypatch, count)
        for asked in numbers(40):
            await bus.publish(asked, node="asking")
        await bus.idle(timeout=LONG)
        assert len(sent) == 40 and set(sent.values()) == {1}
        await bus.publish(Asked(n=100), node="asking")
        await bus.idle(timeout=LONG)
        assert [letter.copies for letter in await bus.dead_letters()] == [1]


async def test_a_signal_with_a_token_that_one_recipient_did_not_take_is_replayed_to_that_one_alone() -> None:
    clock, gone, sent = SystemClock(), {"gone"}, list[Envelope]()

    class Transport:
        async def publish(self, envelopes: Any) -> None:
            if any(gone.intersection(envelope.recipients) for envelope in envelopes):
                raise fg.Unroutable("it has unsubscribed since")
            sent.extend(envelopes)

    store, tokens = open_store("memory:", clock), open_token_store("memory:", clock)
    await store.open()
    await tokens.open()
    recipient_lists = RecipientLists(tokens)
    for node, mode in (("here", "tokens"), ("gone", "tokens"), ("ledger", "ledger")):
        await recipient_lists.subscribe("event:n.t", node, mode)  # type: ignore[arg-type]
    envelope = Envelope(publication_id=ids.root_id(2), type="t", kind="event", source="n", body=b"")
    sending = store.transaction()
    await sending.begin()
    await sending.send([OutboxRow(0, "n", None, 0, "n.t", None, envelope)])
    await sending.commit()
    attempts = Attempts(store, recipient_lists, clock)
    dispatcher = Dispatcher(store, Transport(), clock, Alarms(), attempts)  # type: ignore[arg-type]
    await asyncio.wait_for(dispatcher.start(), LONG)
    assert sorted(each.recipients for each in sent) == [("here",), ("ledger",)]
    assert await tokens.count() == 1, "the token of the one that did not take it is gone"
    letters = DeadLetters([store], clock)
    [letter] = await letters.letters()
    gone.clear()
    sent.clear()
    await letters.decide([letter.message_id], "replayed", by="me")
    await asyncio.wait_for(dispatcher.idle(), LONG)
    [again] = sent
    assert again.recipients == ("gone",) and again.attempt_id is not None
    assert await tokens.read(again.attempt_id) is not None
    await dispatcher.stop(0)
    await store.close()
    await tokens.close()
