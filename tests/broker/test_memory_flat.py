"""Memory follows what really waits: references that went stale and cancelled alarms do not pile up, whatever stands
at the head of the queue; and nothing outlives a broker that is closed."""

import gc
import weakref

from faregate.broker import Broker
from faregate.broker.entry import EntryLine
from faregate.message import Envelope
from faregate.ports.queue import Binding
from faregate.testing import FakeClock
from faregate.testing.clock import rest
from tests.broker.rig import Inbox, Rig

MANY = 50_000
BOUND = 1_000
"""Far above what the code allows itself, far below what a leak would give."""


async def pass_through(rig: Rig, inbox: Inbox, many: int = MANY, **how: object) -> int:
    """Enqueue and settle many entries in small groups; returns the most references that waited at any time."""
    most = 0
    for start in range(0, many, 100):
        rig.put(*(str(number) for number in range(start, start + 100)), **how)  # type: ignore[arg-type]
        await rest(2)
        got, inbox.got[:] = list(inbox.got), []
        assert len(got) == 100, "not everything passed"
        most = max(most, references(rig))
        for delivery in got:
            await delivery.settle("handled")
    return max(most, references(rig))


def lines(rig: Rig) -> list[EntryLine]:
    own = [consumer.line for consumer in rig.queue._consumers if consumer.line is not None]
    return [rig.queue._available, *own, *rig.queue._behind.values()]


def references(rig: Rig) -> int:
    return sum(len(line) for line in lines(rig))


async def test_entries_pass_a_held_head_without_a_trace() -> None:
    rig = Rig()
    rig.put("stuck")
    await rig.inbox(credit=1, window=False).take()
    assert await pass_through(rig, rig.inbox(credit=100)) < BOUND
    assert rig.states() == {"stuck": "acquired"}
    assert len(rig.queue._acquired) == 1


async def test_entries_pass_a_head_that_nobody_wants_without_a_trace() -> None:
    rig = Rig()
    rig.put("unwanted", colour="blue")
    inbox = rig.inbox(credit=100, selector="colour = 'red'")
    assert await pass_through(rig, inbox, colour="red") < BOUND
    assert rig.states() == {"unwanted": "available"}


async def test_entries_that_others_took_leave_the_line_of_a_selector_without_credit() -> None:
    rig = Rig()
    rig.put("unwanted", colour="blue")
    await rig.inbox(credit=1, window=False).take()
    rig.put("second", colour="blue")
    idle = rig.inbox(credit=0, selector="colour = 'blue'")
    assert idle.consumer.line is not None
    picky = rig.inbox(credit=100, selector="colour = 'red'")
    assert await pass_through(rig, picky, colour="red") < BOUND


async def test_an_entry_that_is_released_again_and_again_leaves_no_trace() -> None:
    rig = Rig()
    rig.put("x", "y", colour="blue")
    rig.inbox(credit=0, selector="colour = 'blue'")
    inbox = rig.inbox(credit=1)
    for _ in range(5_000):
        await rest(1)
        await inbox.got.pop().release()
    assert references(rig) < BOUND


async def test_entries_of_other_keys_pass_a_held_key_without_a_trace() -> None:
    rig = Rig()
    rig.put("stuck", key="stuck")
    await rig.inbox(credit=1, window=False).take()
    inbox = rig.inbox(credit=100)
    for start in range(0, MANY, 100):
        for number in range(start, start + 100):
            rig.put(str(number), key=f"k{number}")
        await rest(2)
        got, inbox.got[:] = list(inbox.got), []
        for delivery in got:
            await delivery.settle("handled")
    assert references(rig) < BOUND
    assert list(rig.queue._holders) == ["stuck"]
    assert rig.queue._behind == {}


async def test_entries_that_expire_behind_a_held_key_leave_no_trace() -> None:
    rig = Rig()
    rig.put("stuck", key="k")
    delivery = await rig.inbox(credit=1).take()
    for _ in range(MANY // 500):
        rig.put(*["short"] * 500, key="k", ttl=1)
        await rig.clock.advance(1)
        delivery.renew()
    assert len(rig.queue) == 1
    assert len(rig.dead) == MANY
    assert references(rig) < BOUND, "a held key keeps every entry that expired behind it"


async def test_entries_that_are_redelivered_behind_a_lenient_key_leave_no_trace() -> None:
    rig = Rig(strict=False)
    rig.put("a", "b", "c", key="k")
    inbox = rig.inbox(credit=1)
    for _ in range(3_000):
        await rest(1)
        await inbox.got.pop().redeliver(1)
        rig.clock.jump(0.5)
    assert references(rig) < BOUND
    assert len(rig.schedule._calls) < BOUND


async def test_the_alarms_of_settled_entries_are_forgotten() -> None:
    rig = Rig()
    assert await pass_through(rig, rig.inbox(credit=100), ttl=3600) < BOUND
    assert len(rig.schedule) == 0
    assert len(rig.schedule._calls) < BOUND


async def test_cancelled_alarms_are_forgotten_behind_one_that_stays() -> None:
    rig = Rig()
    rig.put("later", after=1)
    assert await pass_through(rig, rig.inbox(credit=100), ttl=3600) < BOUND
    assert len(rig.schedule) == 1
    assert len(rig.schedule._calls) < BOUND


class Tracked(str):
    """A text that can be asked whether it is still alive."""


async def test_nothing_outlives_a_broker_that_is_closed() -> None:
    """Entries are not tracked by the garbage collector, so a cycle through one is never collected."""
    clock = FakeClock()
    broker = Broker(clock)
    broker.bind(Binding(node="reader", type="Noted", kind="event", source="author"))
    alive = {}
    for name, more in {
        "plain": {},
        "mortal": {"expires_at": clock.time() + 3600},
        "scheduled": {"deliver_at": clock.time() + 3600},
        "held": {"expires_at": clock.time() + 3600},
    }.items():
        mark = Tracked(name)
        alive[name] = weakref.ref(mark)
        broker.append([Envelope(publication_id=name, type="Noted", source="author", headers={"mark": mark}, **more)])  # type: ignore[arg-type]
    got: list[object] = []
    broker.consume("reader.Noted.author", got.append, prefetch=1)
    await rest()
    assert len(got) == 1
    broker.close()
    got.clear()
    del broker, mark, clock
    gc.collect()
    assert [name for name, ref in alive.items() if ref() is not None] == []
