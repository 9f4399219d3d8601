"""Cases for every queue transport: publish and route, hold and end, share and pause."""

import msgspec

from faregate.errors import QueueNotFound, Unroutable
from faregate.ports.queue import Outcome, dead_letter_queue
from faregate.testing.cases import refused
from faregate.testing.queue_suite.cases import (
    Inbox,
    QueueSubject,
    again,
    case,
    command,
    done,
    event,
    expect_stale,
    expect_unroutable,
    inboxes,
    noted,
    open_inbox,
)


@case()
async def a_published_message_is_delivered_as_it_was(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    sent = event("hello", depth=3, correlation_id="c", causation_id="m", sent_at=5.0)
    await subject.transport.publish([sent])
    got = (await (await Inbox(subject).open()).take()).envelope
    assert (got.publication_id, got.body, got.headers) == (sent.publication_id, b"hello", {"text": "hello"})
    assert (got.depth, got.correlation_id, got.causation_id, got.sent_at) == (3, "c", "m", 5.0)
    assert got.recipients == ("reader",), f"recipients are {got.recipients}"


@case()
async def messages_come_in_the_order_they_were_published(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abcdef")
    assert await inbox.texts() == list("abcdef")


@case()
async def an_event_goes_to_every_subscriber_once(subject: QueueSubject) -> None:
    one, two = await inboxes(subject, "one", "two")
    await subject.transport.publish([event()])
    texts = [await one.texts(), await two.texts()]
    assert texts == [["x"], ["x"]], f"one and two got {texts}"


@case()
async def an_event_of_another_source_or_type_is_not_delivered(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    other = msgspec.structs.replace(event(), source="stranger")
    await subject.transport.publish([other, event(type="Other")])
    await inbox.nothing("neither source nor type fit")


@case()
async def an_event_nobody_wants_is_confirmed(subject: QueueSubject) -> None:
    await subject.transport.publish([event(type="Unwanted")])
    inbox = await open_inbox(subject, "wanted")
    assert await inbox.texts() == ["wanted"]


@case()
async def a_command_goes_to_its_destination_only(subject: QueueSubject) -> None:
    one, two = await inboxes(subject, "one", "two", of=done)
    await subject.transport.publish([command("two")])
    await one.nothing("the command was for another node")
    assert len(await two.texts()) == 1


@case()
async def a_command_nobody_handles_is_refused_and_the_batch_with_it(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    with refused(Unroutable, "an unroutable command was confirmed", naming="nobody"):
        await subject.transport.publish([event(), command("nobody")])
    await inbox.nothing("the batch was refused")


@case()
async def a_replay_of_a_publication_is_delivered_again(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    first = event()
    await subject.transport.publish([first])
    await subject.transport.publish([msgspec.structs.replace(event(replay=1), publication_id=first.publication_id)])
    assert await inbox.texts() == ["x", "x"]


@case()
async def a_publication_that_names_recipients_goes_to_these_only(subject: QueueSubject) -> None:
    one, two, three = await inboxes(subject, "one", "two", "three")
    await subject.transport.publish(
        [event("a"), event("b", recipients=("two",)), event("c", recipients=("two", "one"))]
    )
    await subject.transport.publish([event("d")])
    texts = [await inbox.texts() for inbox in (one, two, three)]
    assert texts == [["a", "c", "d"], ["a", "b", "c", "d"], ["a", "d"]], f"one, two and three got {texts}"


@case()
async def a_recipient_that_does_not_want_an_event_is_left_out(subject: QueueSubject) -> None:
    one, two = await inboxes(subject, "one", "two")
    nobody = event("nobody", recipients=("stranger",))
    for _ in range(2):  # what went to nobody must not go to everybody when the same object comes again
        await subject.transport.publish([nobody])
    await subject.transport.publish([again(nobody)])
    await two.nothing("it was for somebody else")
    await subject.transport.publish([event("rest", recipients=("stranger", "one"))])
    await two.nothing("it was for somebody else")
    assert await one.texts() == ["rest"]
    assert one.got[0].envelope.recipients == ("one",), f"recipients are {one.got[0].envelope.recipients}"


@case()
async def a_command_that_names_another_recipient_is_refused(subject: QueueSubject) -> None:
    one, two = await inboxes(subject, "one", "two", of=done)
    await subject.transport.publish([command("one", "one")])
    await expect_unroutable(subject, command("one", "two"), "a command to one for two")
    await expect_unroutable(subject, command("one", "one", "stranger"), "a command to one for a stranger, too")
    assert len(await one.texts()) == 1
    await two.nothing("no command was for it")


@case()
async def an_unbound_queue_collects_no_more_and_gives_what_it_has(subject: QueueSubject) -> None:
    for node in ("one", "two"):
        await subject.transport.bind(noted(node))
    await subject.transport.publish([event("before"), event("part", recipients=("one",))])
    for _ in range(2):
        await subject.transport.unbind(noted("one").queue)
    await subject.transport.publish([event("after"), event("named", recipients=("one",))])
    one = await Inbox(subject).open(noted("one").queue)
    assert await one.texts() == ["before", "part"]
    await (await one.take()).settle("handled")
    assert await (await Inbox(subject).open(noted("two").queue)).texts() == ["before", "after"]


@case()
async def a_queue_that_is_bound_again_collects_again(subject: QueueSubject) -> None:
    one, two = await inboxes(subject, "one", "two")
    await subject.transport.unbind(noted("one").queue)
    await subject.transport.publish([event("between")])
    await subject.transport.bind(noted("one"))
    await subject.transport.publish([event("again"), event("part", recipients=("one",))])
    texts = [await one.texts(), await two.texts()]
    assert texts == [["again", "part"], ["between", "again"]], f"one and two got {texts}"


@case()
async def a_command_to_an_unbound_queue_is_refused(subject: QueueSubject) -> None:
    await subject.transport.bind(done("one"))
    await subject.transport.unbind(done("one").queue)
    await expect_unroutable(subject, command("one"), "a command to an unbound queue")


@case()
async def unbinding_an_unknown_queue_is_an_error(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    for name in ("no.such.queue", dead_letter_queue("reader")):
        with refused(QueueNotFound, f"{name} was unbound, which nobody bound", naming=name):
            await subject.transport.unbind(name)


@case()
async def a_settled_message_never_comes_back(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x", lock_seconds=5)
    await (await inbox.take()).settle("handled")
    await subject.advance(20)
    await inbox.close()
    await (await Inbox(subject).open()).nothing("it was settled")


@case()
async def a_message_settled_as_dead_or_as_a_duplicate_is_gone(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abcd", lock_seconds=5)
    endings: tuple[Outcome, ...] = ("dead", "duplicate", "filtered", "skipped")
    for outcome in endings:
        await (await inbox.take()).settle(outcome)
    await subject.advance(20)
    await inbox.nothing("all were settled")


@case()
async def a_delivery_knows_its_position_and_its_tries(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc")
    first, second, third = [await inbox.take() for _ in range(3)]
    places = [delivery.position for delivery in (first, second, third)]
    if None not in places:
        assert places[0] < places[1] < places[2], f"positions are {places}"  # type: ignore[operator]
    assert first.tries == 0, f"{first.tries} tries before the first"
    first.start()
    assert first.tries == 1, f"{first.tries} tries after the first start"


@case()
async def a_consumer_that_goes_away_gives_everything_back_in_order(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc")
    assert await inbox.texts() == list("abc")
    await inbox.close()
    await expect_stale(inbox.got[0].settle("handled"), "settling by a consumer that went away")
    assert await (await Inbox(subject).open()).texts() == list("abc")


@case()
async def ending_a_delivery_twice_is_refused(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x")
    delivery = await inbox.take()
    await delivery.settle("handled")
    await expect_stale(delivery.release(), "releasing a settled message")
    await expect_stale(delivery.settle("handled"), "settling twice")
    await inbox.nothing("it was settled")


@case()
async def no_more_than_prefetch_are_out(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abcde", prefetch=2)
    assert await inbox.texts() == ["a", "b"]
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["b", "c"]


@case()
async def consumers_of_one_queue_share_it(subject: QueueSubject) -> None:
    first = await open_inbox(subject, prefetch=2)
    second = await Inbox(subject).open(prefetch=2)
    await subject.transport.publish([event(text) for text in "abcd"])
    texts = [await first.texts(), await second.texts()]
    assert sorted(texts[0] + texts[1]) == list("abcd"), f"shared as {texts}"
    assert len(texts[0]) == len(texts[1]) == 2, f"not fair: {texts}"


@case()
async def a_paused_consumer_gets_nothing_until_it_resumes(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    assert inbox.consumer is not None
    inbox.consumer.pause()
    await subject.transport.publish([event()])
    await inbox.nothing("it is paused")
    inbox.consumer.resume()
    assert await inbox.texts() == ["x"]


@case()
async def consuming_an_unknown_queue_is_an_error(subject: QueueSubject) -> None:
    with refused(QueueNotFound, "a queue that nobody declared was consumed", naming="no.such.queue"):
        await Inbox(subject).open("no.such.queue")


@case()
async def a_released_message_comes_back(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x")
    held = await inbox.take()
    assert not held.redelivered, "a first delivery says it is a redelivery"
    await held.release()
    back = await inbox.take()
    assert (back.envelope.publication_id, back.redelivered) == (held.envelope.publication_id, True), f"came as {back}"
    await back.settle("handled")
    await inbox.nothing("it was settled")
