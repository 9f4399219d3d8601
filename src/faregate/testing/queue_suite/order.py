"""Cases for "place" and "order": back to the same place, and order by key."""

from faregate.message import Envelope
from faregate.ports.keys import Keys
from faregate.testing.queue_suite.cases import Inbox, QueueSubject, case, event, key_header, noted, open_inbox


@case("place")
async def a_released_message_returns_to_its_own_position(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc", prefetch=2)
    first = await inbox.delivery()
    assert not first.redelivered, "a first delivery says it is a redelivery"
    await inbox.delivery()
    await first.release()
    again = await inbox.delivery()
    assert again.envelope.body == b"a", f"{again.envelope.body!r} came before the released one"
    assert again.redelivered, "a second delivery does not say so"


@case("place")
async def a_message_that_nobody_began_returns_as_if_it_had_never_been_out(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"ab", prefetch=1)
    await (await inbox.delivery()).release(begun=False)
    delivery = await inbox.delivery()
    assert delivery.envelope.body == b"a", "it is not in its place"
    assert not delivery.redelivered, "it was handed out before, but nobody began"
    delivery.start()
    await delivery.release(begun=False)
    delivery = await inbox.delivery()
    assert (delivery.tries, delivery.redelivered) == (0, False), "the start counts, though nobody began"


@case("order")
async def a_busy_key_withholds_its_next_but_not_the_others(subject: QueueSubject) -> None:
    await subject.transport.bind(noted(key_of=key_header))
    inbox = await Inbox(subject).open()
    await subject.transport.publish([event(text, key=text[0]) for text in ("a1", "a2", "b1", "a3", "b2")])
    assert await inbox.texts() == ["a1", "b1"]
    await (await inbox.delivery()).settle("handled")
    assert await inbox.texts() == ["b1", "a2"]


def _each_letter(envelope: Envelope) -> str | None:
    return Keys.of(envelope.headers["key"])


@case("order")
async def a_message_with_several_keys_waits_for_all_of_them_and_is_waited_for(subject: QueueSubject) -> None:
    await subject.transport.bind(noted(key_of=_each_letter, several=True))
    inbox = await Inbox(subject).open()
    await subject.transport.publish([event(text, key=text) for text in ("a", "b", "ab", "bc", "c", "d")])
    assert await inbox.texts() == ["a", "b", "d"]
    await (await inbox.delivery()).settle("handled")
    assert await inbox.texts() == ["b", "d"], "one of its keys is still busy"
    await (await inbox.delivery()).settle("handled")
    assert await inbox.texts() == ["d", "ab"]
    await inbox.delivery()
    await (await inbox.delivery()).settle("handled")
    assert await inbox.texts() == ["bc"], "c waits for what has both"


@case("order", "delay")
async def a_key_waits_for_its_redelivery(subject: QueueSubject) -> None:
    await subject.transport.bind(noted(key_of=key_header))
    inbox = await Inbox(subject).open()
    await subject.transport.publish([event(text, key=text[0]) for text in ("a1", "a2", "b1")])
    await (await inbox.delivery()).redeliver(10)
    assert await inbox.texts() == ["b1"]
    await subject.advance(11)
    assert await inbox.texts() == ["b1", "a1"]


@case("order", "delay")
async def a_lenient_key_does_not_wait_for_its_redelivery(subject: QueueSubject) -> None:
    await subject.transport.bind(noted(key_of=key_header, strict=False))
    inbox = await Inbox(subject).open()
    await subject.transport.publish([event(text, key="a") for text in ("a1", "a2", "a3")])
    await (await inbox.delivery()).redeliver(10)
    assert await inbox.texts() == ["a2"]
    await subject.advance(11)
    assert await inbox.texts() == ["a2"], "two of one key are out at once"
    await (await inbox.delivery()).settle("handled")
    assert await inbox.texts() == ["a1"], "the redelivered one did not come back to its own position"


@case("order", "delay")
async def a_serial_subscription_waits_for_a_redelivery(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc", prefetch=1, serial=True)
    await (await inbox.delivery()).redeliver(10)
    await inbox.nothing("the first waits for its redelivery")
    await subject.advance(11)
    for text in (b"a", b"b", b"c"):
        delivery = await inbox.delivery()
        assert delivery.envelope.body == text, f"{delivery.envelope.body!r} came instead of {text!r}"
        await delivery.settle("handled")
