"""The transport is away for a while, also right after commits: order per key holds across two hops, nothing is lost.

So it does when a commit happened and its confirmation was lost: what it left in the outbox is older than what follows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

import faregate as fg
from faregate.bus import dispatcher
from faregate.errors import CommitUnknown
from faregate.message import Envelope
from faregate.stores.sqlite.transaction import SqliteTransaction
from faregate.testing.clock import rest
from faregate.transports.memory import MemoryTransport
from tests.crash.sequence import EVERYTHING, STEPS, Line, Step, arrivals

LONG = 30


class Flickering(MemoryTransport):
    """Takes nothing of the first hop while it is down; otherwise every third time it takes it and does not say so."""

    def __init__(self) -> None:
        super().__init__("")
        self.down = False
        self.calls = 0

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        if not any(envelope.source == "first" for envelope in envelopes):
            await super().publish(envelopes)
            return
        self.calls += 1
        if self.down:
            raise fg.Unavailable("the transport is away")
        await super().publish(envelopes)
        if self.calls % 3 == 0:
            raise fg.Unavailable("the confirmation was lost")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses and the alarm in hundredths of seconds."""
    monkeypatch.setattr(dispatcher, "_FIRST_PAUSE", 0.005)
    monkeypatch.setattr(dispatcher, "_LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(dispatcher, "_ALARM_AFTER", 0.1)


async def published(bus: fg.Bus, steps: Sequence[Step]) -> None:
    for step in steps:
        await bus.publish(step, node="shop")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("dedup", ["ledger", "tokens"])
async def test_order_per_key_holds_while_the_transport_is_away(dedup: Any) -> None:
    transport, line = Flickering(), Line(dedup)
    stalled = asyncio.Event()
    async with asyncio.timeout(LONG), fg.Bus(transport, nodes=line.nodes, store="memory:") as bus:
        bus.on_alarm(lambda alarm: stalled.set() if alarm.kind == "dispatch-stalled" else None)
        half = len(STEPS) // 2
        await published(bus, STEPS[:half])
        transport.down = True
        others = asyncio.create_task(published(bus, STEPS[half:]))  # one may be in a batch with what cannot be sent
        await stalled.wait()
        assert await arrivals(bus) != EVERYTHING
        transport.down = False
        await others
        await bus.idle()
        assert await arrivals(bus) == EVERYTHING
        assert await bus.dead_letters() == []
        assert line.runs == len(STEPS), "a handler of the first hop ran again because of the second"
        assert bus.alarms["dispatch-stalled"] >= 1


async def repeated(work: Callable[[], Awaitable[Any]]) -> None:
    """As someone does it who repeats what was not confirmed."""
    while True:
        try:
            await work()
            return
        except fg.OutcomeUnknown:
            pass


@pytest.mark.parametrize("dedup", ["ledger", "tokens"])
async def test_order_per_key_holds_when_confirmations_of_commits_are_lost(
    dedup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, commits = SqliteTransaction.commit, 0

    async def unconfirmed(self: SqliteTransaction) -> None:
        nonlocal commits
        commits += 1
        await commit(self)
        if commits % 5 == 0:
            raise CommitUnknown("it happened, and nobody was told")

    line = Line(dedup, retry=None, redeliver=None)
    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=line.nodes, store="memory:") as bus:
        monkeypatch.setattr(SqliteTransaction, "commit", unconfirmed)
        monkeypatch.setattr("faregate.core.verdict._UNKNOWN_SECONDS", 0.01)
        for number, step in enumerate(STEPS):
            await repeated(partial(bus.publish, step, node="shop", idempotency_key=str(number)))
            await rest()  # or the first hop would take them all in one commit
        await repeated(bus.idle)
        monkeypatch.undo()
        assert await arrivals(bus) == EVERYTHING
        assert await bus.dead_letters() == []
    assert commits >= 10
