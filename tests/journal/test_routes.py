"""Where a journal's publications go after a restart: restricted ones, unbound queues, identities, outcomes.

Each is looked at after an end in order (the snapshot is read) and after a kill (the side logs and the log are).
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from faregate.broker.journal import recovery, settled
from faregate.broker.journal.layout import Layout, read_json
from faregate.broker.journal.spool import spool
from faregate.errors import JournalFailed, JournalFull, QueueNotFound, Unroutable
from faregate.message import Envelope
from faregate.ports.log import DEAD, OUTCOME_NAMES
from faregate.ports.queue import Binding, Outcome
from faregate.ports.topology import TopicRecord, Topology
from faregate.transports.journal import JournalTransport
from tests.journal.disk import SimulatedDisk
from tests.journal.station import ROOT, Station, noted, station

NODES = ("one", "two", "three")
ONE, TWO, THREE = (Binding(node, "Noted", "event", "author") for node in NODES)
DO = Binding("one", "Do", "command")

Again = Callable[[Station], Awaitable[None]]
after_any_end = pytest.mark.parametrize("again", [Station.restart, Station.kill], ids=["closed", "killed"])


async def held(it: Station) -> list[list[str]]:
    """What is in the queues of one, two and three."""
    return [await it.drain(binding.queue) for binding in (ONE, TWO, THREE)]


def to(name: str, *recipients: str, **more: object) -> Envelope:
    return noted(name, recipients=recipients, **more)


# --- outcomes ---------------------------------------------------------------------------------------------


@after_any_end
@pytest.mark.parametrize("outcome", ["dead", "duplicate"])
async def test_what_was_settled_as_dead_or_duplicate_stays_settled(again: Again, outcome: Outcome) -> None:
    async with station(ONE) as it:
        await it.publish(noted("a"), noted("b"))
        it.consume()
        await (await it.take("a")).settle(outcome)
        await again(it)
        assert await it.drain() == ["b"]
        assert await it.drain("one-dead-letters") == []


async def test_each_outcome_has_its_code_in_the_side_log() -> None:
    async with station(ONE) as it:
        outcomes: tuple[Outcome, ...] = ("handled", "skipped", "dead", "duplicate", "filtered")
        await it.publish(*[noted(outcome) for outcome in outcomes])
        it.consume()
        for outcome in outcomes:
            await (await it.take(outcome)).settle(outcome)
        await it.settled()
        records = [*filter(None, settled.walk(it.disk.view(Layout(ROOT).settled_log(0))))]
        assert [(record.offset, record.outcome) for record in records] == [(0, 1), (1, 2), (2, 3), (3, 6), (4, 7)]
        assert [OUTCOME_NAMES[record.outcome] for record in records] == list(outcomes)


async def test_a_dead_message_is_marked_once_and_after_its_dead_letter() -> None:
    async with station(ONE) as it:
        await it.publish(noted("a"))
        it.consume()
        await (await it.take("a")).dead_letter("broken", "it broke")
        assert not [*it.journal._settlements], "it was marked before its dead letter is durable"
        await it.settled()
        await it.settled()
        records = [*filter(None, settled.walk(it.disk.view(Layout(ROOT).settled_log(0))))]
        assert [record.outcome for record in records] == [DEAD]


async def test_a_delivery_is_at_its_offset_in_the_journal_before_and_after_a_restart() -> None:
    async with station(ONE, TWO) as it:
        await it.publish(to("other", "two"), to("a", "one"), noted("b"))
        for _ in range(2):
            it.consume()
            await it.settled()
            assert [delivery.position for delivery in it.got] == [1, 2]
            await it.restart()


# --- recipients -------------------------------------------------------------------------------------------


@after_any_end
async def test_a_restricted_publication_comes_back_in_the_same_queues_and_in_order(again: Again) -> None:
    async with station(ONE, TWO, THREE) as it:
        await it.publish(noted("a"), to("b", "two"), noted("c"), to("d", "one", "two"), to("e", "two"), noted("f"))
        await it.publish(to("g", "three"))
        await again(it)
        await again(it)
        assert await held(it) == [["a", "c", "d", "f"], ["a", "b", "c", "d", "e", "f"], ["a", "c", "f", "g"]]


@after_any_end
async def test_restricted_publications_are_settled_each_in_its_queue(again: Again) -> None:
    async with station(ONE, TWO, THREE) as it:
        await it.publish(noted("a"), to("b", "one"), to("c", "one", "two"), noted("d"))
        it.consume()
        await it.handle("b", "c")
        await again(it)
        assert await held(it) == [["a", "d"], ["a", "c", "d"], ["a", "d"]]


@after_any_end
async def test_a_restricted_publication_can_wait_for_its_time_and_for_memory(again: Again) -> None:
    async with station(ONE, TWO, resident_bytes=2_000) as it:
        names = [f"{number}" for number in range(60)]
        await it.publish(*[to(name, "two") if int(name) % 3 else noted(name) for name in names])
        await it.publish(to("later", "two", deliver_at=it.clock.time() + 50))
        await again(it)
        assert await it.drain(ONE.queue) == names[::3]
        assert await it.drain(TWO.queue) == names
        await it.clock.advance(51, it.settled)
        assert await it.drain(ONE.queue) == []
        assert await it.drain(TWO.queue) == ["later"]


async def test_a_partial_topic_is_written_once_and_is_never_the_current_one() -> None:
    async with station(ONE, TWO, THREE) as it:
        for name in "abc":
            await it.publish(to(name, "two"), to(name * 2, "three", "one"), to(name * 3, "one", "three"))
        await it.restart()
        await it.publish(to("d", "two"), noted("all"))
        topology = it.journal.topology
        assert [sorted(topic.queues) for topic in topology.topics if topic.partial] == [[3], [1, 5]]
        current = topology.topic("event", "author", "Noted")
        assert current is not None and len(current.queues) == 3
        assert read_json(Layout(ROOT).topology, it.disk, Topology) == topology


async def test_a_topology_from_before_there_were_partial_topics_is_read() -> None:
    topic = TopicRecord(0, "event", "author", "Noted", [1])
    assert b"partial" not in msgspec.json.encode(topic), "its checksum would not fit any more"
    assert msgspec.json.decode(b'{"number":0,"kind":"event","address":"author","type":"Noted","queues":[1]}') == (
        msgspec.to_builtins(topic)
    )


class RefusesTopology(SimulatedDisk):
    refusal: OSError | None = None

    def replace(self, path: Path, data: bytes) -> None:
        if self.refusal is not None and path.name == "topology.json":
            raise self.refusal
        super().replace(path, data)


async def test_a_disk_without_room_for_the_topology_refuses_the_publication_and_remembers_nothing() -> None:
    disk = RefusesTopology()
    async with station(ONE, TWO, disk=disk) as it:
        disk.refusal = OSError(28, "No space left on device")
        sent = to("a", "two")
        with pytest.raises(JournalFull):
            await it.publish(sent)
        await it.publish(noted("b"))
        disk.refusal = None
        await it.publish(sent)
        await it.restart()
        assert [await it.drain(ONE.queue), await it.drain(TWO.queue)] == [["b"], ["b", "a"]]


async def test_a_disk_that_fails_at_the_topology_ends_the_journal() -> None:
    disk = RefusesTopology()
    async with station(ONE, TWO, disk=disk) as it:
        disk.refusal = OSError(5, "Input/output error")
        for _ in range(2):
            with pytest.raises(JournalFailed):
                await it.publish(to("a", "two"))


async def test_recovery_that_goes_topic_by_topic_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: rows of a queue that come by several topics of one frame are put one topic behind the other."""

    def apart(numbers: list[int], topics: dict[int, list[int]]) -> dict[frozenset[int], list[int]]:
        return {frozenset((number,)): topics.get(number, []) for number in numbers}

    monkeypatch.setattr(recovery, "_by_topics", apart)
    with pytest.raises(AssertionError):
        await test_a_restricted_publication_comes_back_in_the_same_queues_and_in_order(Station.kill)


# --- the spool --------------------------------------------------------------------------------------------


@after_any_end
async def test_a_spooled_publication_keeps_its_recipients(again: Again) -> None:
    async with station(ONE, TWO, THREE) as it:
        spool(Layout(ROOT), it.disk, [to("a", "two"), noted("b"), to("c", "stranger"), to("d", "two", "one")])
        it.broker.take_in_spool()
        await it.settled()
        await again(it)
        assert await held(it) == [["b", "d"], ["a", "b", "d"], ["b"]]


async def test_what_no_recipient_takes_is_refused_before_it_is_spooled(tmp_path: Path) -> None:
    transport = JournalTransport(f"{tmp_path}/journal")
    await transport.open()
    await transport.bind(DO)
    fine = Envelope("1", "Do", "command", "author", destination="one")
    await transport.spool([fine, msgspec.structs.replace(fine, recipients=("one",))])
    with pytest.raises(Unroutable):
        await transport.spool([msgspec.structs.replace(fine, recipients=("two",))])
    await transport.unbind(DO.queue)
    with pytest.raises(Unroutable):
        await transport.spool([fine])
    await transport.close()


# --- identities -------------------------------------------------------------------------------------------


@after_any_end
async def test_repetitions_are_recognised_by_the_same_identity_after_a_restart(again: Again) -> None:
    sent = [
        noted("a"),
        to("a", "one"),
        to("a", "two"),
        to("a", "two", "three"),
        noted("a", replay=1),
        to("a", "one", replay=1),
        noted("a", attempt_id="x"),
        to("a", "one", attempt_id="x"),
        to("a", "stranger"),
        noted("unwanted", type="Unwanted"),
        noted("b"),
    ]
    async with station(ONE, TWO, THREE) as it:
        await it.publish(*[msgspec.structs.replace(each) for each in sent])
        known = {*it.broker.recent._known}
        assert len(known) == len(sent), "two different publications were taken for one"
        await again(it)
        assert {*it.broker.recent._known} == known
        await it.publish(*[msgspec.structs.replace(each) for each in sent], to("a", "three", "two"))
        assert it.broker.recent.duplicates == len(sent) + 1
        await it.publish(to("a", "three"), noted("a", attempt_id="y"), noted("a", replay=2))
        assert it.broker.recent.duplicates == len(sent) + 1


async def test_a_disagreement_with_what_was_published_before_a_restart_is_told() -> None:
    async with station(ONE, TWO) as it:
        await it.publish(to("a", "one", body_digest=b"1" * 16))
        await it.kill()
        told: list[Envelope] = []
        it.broker.recent.on_disagreement = told.append
        await it.publish(to("a", "one", body_digest=b"1" * 16), to("a", "two", body_digest=b"2" * 16))
        assert not told
        await it.publish(to("a", "one", body_digest=b"2" * 16))
        assert [envelope.recipients for envelope in told] == [("one",)]


# --- unbind -----------------------------------------------------------------------------------------------


@after_any_end
async def test_an_unbound_queue_stays_unbound_and_keeps_what_it_has(again: Again) -> None:
    async with station(ONE, TWO, THREE) as it:
        await it.publish(noted("before"), to("part", "one"))
        it.broker.unbind(ONE.queue)
        await it.publish(noted("after"), to("named", "one"))
        it.bindings = (TWO, THREE)
        await again(it)
        await it.publish(noted("later"), to("named later", "one"))
        await again(it)
        rest = ["before", "after", "later"]
        assert await held(it) == [["before", "part"], rest, rest]


@after_any_end
async def test_a_queue_bound_again_has_what_came_before_and_after_but_not_between(again: Again) -> None:
    async with station(ONE, TWO, THREE) as it:
        await it.publish(noted("before"))
        it.broker.unbind(ONE.queue)
        await it.publish(noted("between"), to("part", "one", "two"))
        await again(it)  # which binds it again
        await it.publish(to("mine", "one"), noted("after"))
        await again(it)
        assert await held(it) == [
            ["before", "mine", "after"],
            ["before", "between", "part", "after"],
            ["before", "between", "after"],
        ]


async def test_a_queue_that_this_process_never_bound_can_be_unbound_before_others_are_bound(tmp_path: Path) -> None:
    async def opened() -> JournalTransport:
        transport = JournalTransport(f"{tmp_path}/journal")
        await transport.open()
        return transport

    first = await opened()
    for binding in (ONE, TWO):
        await first.bind(binding)
    await first.close()
    second = await opened()
    await second.unbind(ONE.queue)
    await second.bind(Binding("two", "Noted", "event", "author", lock_seconds=5))
    await second.publish([noted("a")])
    assert (len(second.broker.queue(ONE.queue)), len(second.broker.queue(TWO.queue))) == (0, 1)
    with pytest.raises(QueueNotFound, match=r"no\.such\.queue"):
        await second.unbind("no.such.queue")
    await second.close()


async def test_a_route_found_before_an_unbind_is_written_as_it_was_found() -> None:
    async with station(ONE, TWO) as it:
        early = noted("early")
        route = it.broker.route(early)
        it.broker.unbind(ONE.queue)
        await it.broker._commit([early], [route])
        await it.publish(noted("late"))
        it.bindings = (TWO,)
        await it.kill()
        assert [await it.drain(ONE.queue), await it.drain(TWO.queue)] == [["early"], ["early", "late"]]
