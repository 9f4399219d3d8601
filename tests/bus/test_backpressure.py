"""Handlers that send faster than the transport takes: what lies between commit and dispatch stays bounded, in order."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import faregate as fg
from faregate.bus import dispatcher as dispatching
from faregate.bus.dispatcher import Dispatcher, Recorded
from faregate.core import handling as handling
from faregate.core.handling import Handling
from faregate.core.pace import BATCH_LIMIT
from faregate.message import Envelope
from faregate.ports.store import OutboxRow, Transaction
from faregate.transports.memory import MemoryTransport

LONG = 60  # seconds until a test that hangs is failed
CAUSES, FAN, MOST, LANES = 40, 10, 100, 5
BODY = b'{"n":100,"part":1}'


class Asked(fg.Event):
    n: int


class Answered(fg.Event):
    n: int
    part: int


class SlowTransport(MemoryTransport):
    """Takes what handlers send once `open_gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.open_gate = asyncio.Event()

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        if any(envelope.causation_id for envelope in envelopes):
            await self.open_gate.wait()
        await super().publish(envelopes)


@pytest.fixture
def all_wait(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once every lane waits for room."""
    waiting, all_of_them = 0, asyncio.Event()
    room = Dispatcher.room

    async def counted(self: Dispatcher, *unless: Any) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == LANES:
            all_of_them.set()
        await room(self, *unless)
        waiting -= 1

    monkeypatch.setattr(Dispatcher, "room", counted)
    return all_of_them


@pytest.mark.parametrize(("bound", "value"), [("_MOST_WAITING", MOST), ("_MOST_WAITING_BYTES", MOST * len(BODY))])
async def test_handlers_wait_while_what_they_sent_is_not_taken(
    bound: str, value: int, store_url: str, all_wait: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the bound waits only by what each lane had begun; then everything goes out, in order."""
    monkeypatch.setattr(dispatching, bound, value)
    monkeypatch.setattr(Handling, "batch", 1)
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering"), fg.Node("hearing")
    heard: list[tuple[int, int]] = []

    @answering.on(Asked, source="asking", order=fg.Parallel(LANES))
    async def answer(asked: Asked) -> Any:
        return [Answered(n=asked.n, part=part) for part in range(FAN)]

    @hearing.on(Answered, source="answering", key="n")
    async def hear(answered: Answered) -> None:
        heard.append((answered.n, answered.part))

    transport = SlowTransport()
    async with fg.Bus(transport, nodes=[asking, answering, hearing], store=store_url) as bus:
        await bus.publish_many([Asked(n=n) for n in range(100, 100 + CAUSES)], node="asking")
        [dispatcher] = bus._stores.dispatchers.values()
        await asyncio.wait_for(all_wait.wait(), LONG)
        assert MOST <= len(dispatcher._queue) < MOST + LANES * FAN
        transport.open_gate.set()
        await bus.idle(timeout=LONG)
    for n in range(100, 100 + CAUSES):
        assert [part for of, part in heard if of == n] == list(range(FAN))


async def test_who_sends_nothing_does_not_wait_for_others_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatching, "_MOST_WAITING", 1)
    asking, answering, quiet = fg.Node("asking"), fg.Node("answering"), fg.Node("quiet")
    noted = asyncio.Event()

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> Any:
        return [Answered(n=asked.n, part=part) for part in range(FAN)]

    @quiet.on(Asked, source="asking", order=fg.Serial())
    async def note(asked: Asked) -> None:
        if asked.n == CAUSES - 1:
            noted.set()

    transport = SlowTransport()
    async with fg.Bus(transport, nodes=[asking, answering, quiet], store="memory:", drain_seconds=0) as bus:
        await bus.publish_many([Asked(n=n) for n in range(CAUSES)], node="asking")
        await asyncio.wait_for(noted.wait(), LONG)
        transport.open_gate.set()


async def test_a_transaction_takes_no_further_message_when_enough_is_sent_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handling, "_MOST_OUTPUTS", 25)
    monkeypatch.setattr(Handling, "batch", BATCH_LIMIT)
    sizes: list[int] = []
    record = Dispatcher.record_rows

    async def noted(self: Dispatcher, transaction: Transaction, rows: Sequence[OutboxRow]) -> Recorded:
        sizes.append(len(rows))
        return await record(self, transaction, rows)

    monkeypatch.setattr(Dispatcher, "record_rows", noted)
    asking, answering = fg.Node("asking"), fg.Node("answering")

    @answering.on(Asked, source="asking", order=fg.Parallel(1))
    async def answer(asked: Asked) -> Any:
        return [Answered(n=asked.n, part=part) for part in range(FAN)]

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:") as bus:
        await bus.publish_many([Asked(n=n) for n in range(CAUSES)], node="asking")
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == CAUSES
    assert sum(sizes) == CAUSES * FAN
    assert max(sizes) == 30


@pytest.mark.parametrize("how", ["pause", "stop"])
async def test_who_waits_for_room_is_given_back_at_once_when_nothing_more_may_begin(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "_MOST_WAITING", 1)
    monkeypatch.setattr(Handling, "batch", 1)
    asking, answering = fg.Node("asking"), fg.Node("answering")
    begun: list[int] = []
    waits, waited = asyncio.Event(), asyncio.Event()
    room = Dispatcher.room

    async def seen(self: Dispatcher, *unless: Any) -> None:
        waits.set()
        await room(self, *unless)
        waited.set()

    monkeypatch.setattr(Dispatcher, "room", seen)

    @answering.on(Asked, source="asking", order=fg.Serial())
    async def answer(asked: Asked) -> Any:
        begun.append(asked.n)
        return Answered(n=asked.n, part=0)

    transport = SlowTransport()
    async with fg.Bus(transport, nodes=[asking, answering], store="memory:", drain_seconds=3600) as bus:
        await bus.publish_many([Asked(n=n) for n in range(3)], node="asking")
        await asyncio.wait_for(waits.wait(), LONG)
        stopping = asyncio.create_task(bus.pause("answering", Asked) if how == "pause" else bus.stop())
        await asyncio.wait_for(waited.wait(), LONG)
        transport.open_gate.set()
        await asyncio.wait_for(stopping, LONG)
        assert begun == [0]
        if how == "pause":
            await bus.resume("answering", Asked)
            await bus.idle(timeout=LONG)
            assert begun == [0, 1, 2]
