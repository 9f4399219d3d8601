"""Cases for "recognise" and "recipients": what is published again."""

from faregate.message import Envelope
from faregate.testing.queue_suite.cases import Inbox, QueueSubject, again, case, event, inboxes, noted, open_inbox


@case("recognise")
async def a_repeated_publication_is_delivered_once(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    sent = event()
    for _ in range(3):
        await subject.transport.publish([sent])
    assert await inbox.texts() == ["x"]


@case("recognise")
async def a_repetition_with_another_body_is_told_and_the_first_counts(subject: QueueSubject) -> None:
    told: list[Envelope] = []
    inbox = await open_inbox(subject)
    first = event("first", body_digest=b"1" * 16)
    other = again(first, body=b"other", body_digest=b"2" * 16)
    await subject.transport.publish([first])
    await subject.transport.publish([other])  # nobody has asked to be told
    subject.whole.on_disagreement = told.append
    await subject.transport.publish([again(first)])
    assert not told, "a plain repetition was taken for a disagreement"
    await subject.transport.publish([other])
    assert [envelope.body for envelope in told] == [b"other"], f"told of {told}"
    assert await inbox.texts() == ["first"]


@case("recognise")
async def whoever_fails_at_being_told_of_a_disagreement_spoils_no_batch(subject: QueueSubject) -> None:
    def fail(envelope: Envelope) -> None:
        raise RuntimeError("the alarm is broken")

    inbox = await open_inbox(subject)
    subject.whole.on_disagreement = fail
    first = event("first", body_digest=b"1" * 16)
    await subject.transport.publish([first])
    try:
        await subject.transport.publish([again(first, body_digest=b"2" * 16), event("next")])
    except RuntimeError as exc:
        raise AssertionError("the batch was refused because of the alarm") from exc
    assert await inbox.texts() == ["first", "next"]


@case("recognise")
async def parts_of_one_publication_are_not_taken_for_repetitions_of_each_other(subject: QueueSubject) -> None:
    one, two, _ = await inboxes(subject, "one", "two", "three")
    whole = event()
    for node in ("one", "two", "one"):
        await subject.transport.publish([again(whole, recipients=(node,))])
    texts = [await one.texts(), await two.texts()]
    assert texts == [["x"], ["x"]], f"one and two got {texts}"
    for recipients in (("one", "two"), ("two", "one")):
        await subject.transport.publish([again(whole, recipients=recipients, replay=1)])
    assert len(await one.texts()) == 2, "the order of recipients made a repetition something else"


@case("recognise")
async def another_attempt_at_a_publication_is_no_repetition(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    whole = event()
    for attempt in ("first", "second", "first"):
        await subject.transport.publish([again(whole, attempt_id=attempt)])
    assert await inbox.texts() == ["x", "x"]
    assert [delivery.envelope.attempt_id for delivery in inbox.got] == ["first", "second"]


@case("recipients")
async def a_publication_that_is_published_again_goes_where_it_went_before(subject: QueueSubject) -> None:
    await subject.transport.bind(noted("early"))
    sent = event()
    await subject.transport.publish([sent])
    await subject.transport.bind(noted("late"))
    await subject.transport.publish([again(sent, replay=1)])
    await (await Inbox(subject).open(noted("late").queue)).nothing("its recipients were resolved before")
    assert await (await Inbox(subject).open(noted("early").queue)).texts() == ["x", "x"]
