"""The broker: all or nothing at publishing, repeated publications, bindings, and dead letters."""

import pytest
from msgspec import structs

from faregate.broker import Broker
from faregate.broker.recent import RecentPublications
from faregate.errors import ConfigurationError, InvalidSelector, QueueNotFound, Unroutable
from faregate.message import Envelope
from faregate.ports.queue import Binding, check_command
from faregate.testing import FakeClock
from faregate.testing.clock import rest

NOTED = Binding(node="reader", type="Noted", kind="event", source="author")


def event(identity: str, **more: object) -> Envelope:
    return Envelope(publication_id=identity, type="Noted", source="author", body=identity.encode(), **more)  # type: ignore[arg-type]


def held_by(broker: Broker, queue: str) -> list[str]:
    return [entry.envelope.publication_id for entry in broker.browse(queue)]


async def test_a_batch_with_an_unroutable_command_leaves_no_trace() -> None:
    broker = Broker(FakeClock())
    broker.bind(NOTED)
    lost = Envelope(publication_id="c", type="Do", kind="command", destination="nobody")
    with pytest.raises(Unroutable, match="'nobody'"):
        broker.append([event("a"), lost])
    assert held_by(broker, NOTED.queue) == []
    broker.append([event("a")])
    assert held_by(broker, NOTED.queue) == ["a"], "the refused publication was remembered as seen"


def test_a_command_needs_its_destination_and_all_recipients_that_it_names_and_an_event_needs_nobody() -> None:
    check_command(event("a", recipients=("stranger",)), ())
    order = Envelope(publication_id="c", type="Do", kind="command", destination="desk")
    check_command(order, {"desk"})
    with pytest.raises(Unroutable, match=r"no node 'desk' handles the command Do c .*: subscribe to it there"):
        check_command(order, ())
    check_command(structs.replace(order, recipients=("desk",)), {"desk"})
    with pytest.raises(Unroutable, match="names recipients that do not handle it there: desk, stranger"):
        check_command(structs.replace(order, recipients=("desk", "stranger")), {"desk"})


async def test_a_message_whose_key_cannot_be_read_is_taken_without_one() -> None:
    def key_of(envelope: Envelope) -> str:
        return envelope.headers["key"]

    broker = Broker(FakeClock())
    queue = broker.bind(Binding(node="reader", type="Noted", kind="event", source="author", key_of=key_of))
    good, bad = event("a", headers={"key": "k"}), event("b")
    broker.append([good, bad])
    assert held_by(broker, NOTED.queue) == ["a", "b"]
    assert [entry.key for entry in queue.browse()] == ["k", None]
    assert len(queue) == broker.in_flight.count == 2


async def test_a_publication_is_recognised_within_the_window_and_by_its_replay() -> None:
    broker = Broker(FakeClock(), duplicate_window=3)
    broker.bind(NOTED)
    broker.append([event("a"), event("a"), event("a", replay=1), event("b")])
    assert held_by(broker, NOTED.queue) == ["a", "a", "b"]
    assert broker.recent.duplicates == 1
    broker.append([event("c"), event("a")])
    assert held_by(broker, NOTED.queue) == ["a", "a", "b", "c", "a"], "the oldest has left the window"
    assert len(broker.recent._known) == 3


@pytest.mark.parametrize(
    "batch",
    [
        ["a", "b", "c"],
        ["a", "a", "b"],
        ["b", "known", "c"],
        ["a", "", "", "b"],
        ["a", "b", "c", "d", "e"],
    ],
)
def test_many_publications_are_recognised_as_each_would_be(batch: list[str]) -> None:
    one_by_one, together = RecentPublications(4), RecentPublications(4)
    for recent in (one_by_one, together):
        assert recent.add(event("known"))
    assert together.add_all([event(each) for each in batch]) == [one_by_one.add(event(each)) for each in batch]
    assert together._known == one_by_one._known
    assert together.duplicates == one_by_one.duplicates


def test_a_replay_among_many_is_another_publication() -> None:
    recent = RecentPublications()
    assert recent.add_all([event("a"), event("a", replay=1), event("a", replay=1)]) == [True, True, False]


async def test_an_id_is_not_taken_for_the_replay_of_another() -> None:
    broker = Broker(FakeClock())
    broker.bind(NOTED)
    broker.append([event("a", replay=1), event("a/1"), event("b/1"), event("b", replay=1)])
    assert held_by(broker, NOTED.queue) == ["a", "a/1", "b/1", "b"], "a confirmed publication was dropped"


async def test_publications_without_an_id_are_never_taken_for_each_other() -> None:
    broker = Broker(FakeClock())
    broker.bind(NOTED)
    broker.append([event(""), event("")])
    assert len(held_by(broker, NOTED.queue)) == 2


async def test_binding_again_changes_nothing_and_binding_otherwise_is_an_error() -> None:
    broker = Broker(FakeClock())
    queue = broker.bind(NOTED)
    route = broker.topics.route(event("1"))
    assert broker.bind(Binding(node="reader", type="Noted", kind="event", source="author")) is queue
    assert broker.topics.route(event("1")) is route
    with pytest.raises(ConfigurationError, match="bound already"):
        broker.bind(Binding(node="reader", type="Noted", kind="event", source="author", strict=False))


async def test_every_subscriber_gets_its_own_entry_and_the_envelope_names_them() -> None:
    broker = Broker(FakeClock())
    for node in ("one", "two"):
        broker.bind(Binding(node=node, type="Noted", kind="event", source="author"))
    sent = event("a")
    broker.append([sent])
    assert sent.recipients == ("one", "two")
    assert broker.in_flight.count == 2
    assert {queue.name for queue in broker.queues() if len(queue)} == {"one.Noted.author", "two.Noted.author"}


async def test_an_unknown_queue_is_named_with_those_there_are() -> None:
    broker = Broker(FakeClock())
    broker.bind(NOTED)
    with pytest.raises(QueueNotFound, match=r"'other'.*reader-dead-letters, reader\.Noted\.author"):
        broker.consume("other", lambda delivery: None, prefetch=1)
    assert list(broker.browse("other")) == []


async def test_a_wrong_selector_is_refused_before_the_consumer_is_attached() -> None:
    broker = Broker(FakeClock())
    queue = broker.bind(NOTED)
    with pytest.raises(InvalidSelector):
        broker.consume(NOTED.queue, lambda delivery: None, prefetch=1, selector="no selector")
    assert not queue._consumers


async def test_a_dead_letter_keeps_everything_a_person_needs_and_no_time_applies_to_it() -> None:
    clock = FakeClock()
    broker = Broker(clock)
    broker.bind(NOTED)
    broker.append([event("a", expires_at=clock.time() + 5)])
    await clock.advance(5)
    [entry] = broker.browse("reader-dead-letters")
    assert entry.letter is not None
    assert (entry.letter.reason, entry.letter.queue, entry.letter.at) == (
        "expired",
        NOTED.queue,
        clock.time(),
    )
    assert broker.in_flight.count == 0
    await clock.advance(1000)
    assert len(list(broker.browse("reader-dead-letters"))) == 1


async def test_a_message_in_the_dead_letter_queue_is_not_lost_when_its_consumer_makes_it_one_again() -> None:
    broker = Broker(FakeClock())
    broker.bind(NOTED)
    broker.append([event("a")])
    got: list[object] = []
    broker.consume(NOTED.queue, got.append, prefetch=1)
    await rest()
    await got[0].dead_letter("bad", "it is bad")  # type: ignore[attr-defined]
    consumer = broker.consume("reader-dead-letters", got.append, prefetch=1)
    await rest()
    await got[1].dead_letter("worse", "still bad")  # type: ignore[attr-defined]
    await consumer.close()
    again: list[object] = []
    broker.consume("reader-dead-letters", again.append, prefetch=1)
    await rest()
    assert len(again) == 1, "the dead letter is stuck: nobody holds it and nobody gets it"
    [entry] = broker.browse("reader-dead-letters")
    assert entry.letter is not None
    assert (entry.letter.node, entry.letter.reason) == ("reader", "worse")
