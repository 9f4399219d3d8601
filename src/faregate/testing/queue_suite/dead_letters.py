"""Cases for "dead letters", "browse" and "expire": what nobody handles."""

from faregate.ports.queue import dead_letter_queue
from faregate.testing.queue_suite.cases import (
    QUEUE,
    Inbox,
    QueueSubject,
    case,
    command,
    dead_letters,
    event,
    noted,
    only_dead_letter,
    open_inbox,
    set_wall,
)

HOUR = 3600.0


@case("dead letters")
async def a_dead_letter_keeps_its_reason_and_identity(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "bad", "good", prefetch=1)
    delivery = await inbox.delivery()
    delivery.start()
    await delivery.dead_letter("broken", "ValueError: no")
    assert await inbox.texts() == ["good"], "the next message does not go on"
    record = await only_dead_letter(subject)
    assert (record.reason, record.error, record.tries) == ("broken", "ValueError: no", 1)
    assert (record.node, record.queue) == ("reader", QUEUE)
    assert record.envelope.publication_id == delivery.envelope.publication_id


@case("dead letters")
async def a_dead_letter_that_is_settled_is_gone(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "bad")
    await (await inbox.delivery()).dead_letter("broken", "ValueError: no")
    await subject.rest()
    people = await Inbox(subject).open(dead_letter_queue("reader"))
    await (await people.take()).settle("handled")
    await people.close()
    assert not await dead_letters(subject), "settled, and still a dead letter"


@case("dead letters")
async def a_message_that_could_not_be_sent_is_a_dead_letter_of_its_own(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    lost = command("nobody")
    await subject.whole.dead_letter("reader", lost, "unroutable", "Unroutable: nobody")
    record = await only_dead_letter(subject)
    assert (record.reason, record.envelope.publication_id) == ("unroutable", lost.publication_id)


@case("dead letters", "lock")
async def a_message_that_keeps_coming_back_becomes_a_dead_letter(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "killer", max_deliveries=3, lock_seconds=5)
    for _ in range(3):
        (await inbox.delivery()).start()
        await subject.advance(6)
    await inbox.nothing("its deliveries are used up")
    record = await only_dead_letter(subject)
    assert (record.reason, record.tries) == ("max-deliveries", 3), f"dead as {record}"


@case("dead letters", "expire")
async def an_expired_message_is_a_dead_letter_with_the_reason(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    await subject.transport.publish([event("old", expires_at=subject.now() + 5)])
    await subject.advance(6)
    await (await Inbox(subject).open()).nothing("it has expired")
    record = await only_dead_letter(subject)
    assert (record.reason, record.envelope.body) == ("expired", b"old"), f"dead as {record}"


@case("dead letters", "expire")
async def a_held_message_does_not_expire(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "held", expires=5)
    delivery = await inbox.delivery()
    assert not delivery.expired, "its time is not over yet"
    await subject.advance(6)
    assert delivery.expired, "its holder is not told that its time is over"
    assert not await dead_letters(subject), "expired while a consumer held it"
    await delivery.settle("handled")
    assert not await dead_letters(subject), "expired after it was settled"


@case("dead letters", "expire")
async def a_message_does_not_expire_because_the_wall_clock_is_set(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    await subject.transport.publish([event("kept", expires_at=subject.now() + 100)])
    await subject.rest()
    set_wall(subject, HOUR)
    await subject.advance(70)
    inbox = await Inbox(subject).open()
    await (await inbox.delivery()).release()
    await inbox.close()
    set_wall(subject, -HOUR)
    await subject.advance(31)
    assert (await only_dead_letter(subject)).reason == "expired"


@case("dead letters")
async def a_message_settled_as_dead_has_no_second_dead_letter(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x")
    await (await inbox.take()).settle("dead")
    assert not await dead_letters(subject), "whoever settles a message as dead keeps the dead letter"


@case("dead letters", "browse")
async def browsing_takes_nothing(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc")
    for reason in ("first", "second", "third"):
        await (await inbox.delivery()).dead_letter(reason, "ValueError: no")
    await subject.rest()
    for limit, reasons in ((2, ["first", "second"]), (1000, ["first", "second", "third"])):
        found = [letter.reason for letter in await subject.whole.dead_letters("reader", limit)]
        assert found == reasons, f"{found} where at most {limit} were asked for"
    assert len(await dead_letters(subject)) == 3, "looking at dead letters took some"
