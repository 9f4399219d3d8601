"""A queue with a journal behind it: what waits there for room in memory keeps its place in its key."""

from collections.abc import Sequence

import pytest

from faregate.broker.entry import Entry
from faregate.broker.queue import Queue
from faregate.message import Envelope
from faregate.ports.queue import Outcome
from tests.broker.rig import Rig


class NoRoom:
    """A recorder whose memory is always full: every plain entry waits in the journal."""

    def __init__(self) -> None:
        self.journal: list[Envelope] = []

    def has_room(self) -> bool:
        return False

    def load(self, offsets: list[int]) -> list[Envelope]:
        return [self.journal[offset] for offset in offsets]

    def started(self, queue: Queue, entries: Sequence[Entry]) -> None: ...
    def ended(self, queue: Queue, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None: ...
    def waits(self, queue: Queue, entry: Entry, due: float) -> None: ...
    def holds(self, envelope: Envelope) -> None: ...
    def leave(self, entries: Sequence[Entry]) -> None: ...


def write(rig: Rig, recorder: NoRoom, text: str, **times: float) -> None:
    envelope = Envelope(publication_id=text, body=text.encode(), headers={"key": text[0]}, **times)  # type: ignore[arg-type]
    recorder.journal.append(envelope)
    rig.queue.enqueue(envelope, offset=len(recorder.journal) - 1)


@pytest.mark.parametrize("last", ["plain", "mortal", "due already"])
async def test_a_message_does_not_overtake_earlier_ones_of_its_key_that_wait_in_the_journal(last: str) -> None:
    recorder = NoRoom()
    rig = Rig(recorder=recorder)
    now = rig.clock.time()
    write(rig, recorder, "a1")
    write(rig, recorder, "a2")
    write(rig, recorder, "a3", **{"plain": {}, "mortal": {"expires_at": now + 3600}}.get(last, {"deliver_at": now - 1}))
    inbox = rig.inbox(credit=1)
    order = []
    for _ in range(3):
        delivery = await inbox.take()
        order.append(delivery.envelope.publication_id)
        await delivery.settle("handled")
    assert order == ["a1", "a2", "a3"]


async def test_what_expires_while_it_waits_for_earlier_ones_in_the_journal_does_not_come_back() -> None:
    recorder = NoRoom()
    rig = Rig(recorder=recorder)
    now = rig.clock.time()
    write(rig, recorder, "a1")
    write(rig, recorder, "b2", deliver_at=now + 1, expires_at=now + 2)
    await rig.clock.advance(5)
    assert rig.dead == [("b2", "expired")]
    inbox = rig.inbox()
    assert await inbox.texts() == ["a1"], "an expired message was delivered after all"
