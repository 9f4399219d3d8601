"""Cases for "reply": answers to a process that waits."""

from faregate.message import Envelope
from faregate.testing.queue_suite.cases import QueueSubject, again, case, event, open_inbox

NOWHERE = "nobody-has-this-address"


def answer(text: str, address: str, **more: object) -> Envelope:
    return again(event(text), kind="reply", destination=address, causation_id="the request", **more)


@case("reply")
async def a_reply_comes_to_the_address_as_it_was(subject: QueueSubject) -> None:
    got: list[Envelope] = []
    sent = answer("yes", await subject.whole.open_replies(got.append), correlation_id="the conversation", depth=3)
    assert not await subject.whole.reply([sent]), "it was said to have found nobody"
    await subject.rest()
    assert len(got) == 1, f"{len(got)} came, not one"
    kept = ("publication_id", "type", "kind", "source", "body", "causation_id", "correlation_id", "depth", "headers")
    for name in kept:
        assert getattr(got[0], name) == getattr(sent, name), f"{name} was {getattr(sent, name)!r}"


@case("reply")
async def replies_come_to_the_address_they_name_in_order(subject: QueueSubject) -> None:
    one: list[Envelope] = []
    two: list[Envelope] = []
    first, second = await subject.whole.open_replies(one.append), await subject.whole.open_replies(two.append)
    assert first != second, "two addresses are alike"
    await subject.whole.reply([answer("a", first), answer("x", second), answer("b", first)])
    await subject.whole.reply([answer("c", first)])
    await subject.rest()
    assert [each.body for each in one] == [b"a", b"b", b"c"], f"the first got {one}"
    assert [each.body for each in two] == [b"x"], f"the second got {two}"


@case("reply")
async def a_reply_that_finds_nobody_is_dropped_and_counted(subject: QueueSubject) -> None:
    got: list[Envelope] = []
    address = await subject.whole.open_replies(got.append)
    lost = [answer("a", NOWHERE), answer("b", address), answer("c", address + "x")]
    dropped = await subject.whole.reply(lost)
    await subject.rest()
    assert dropped == 2, f"{dropped} found nobody, not 2"
    assert [each.body for each in got] == [b"b"], "one that finds nobody takes others with it, or finds somebody"


@case("reply")
async def a_reply_is_no_publication(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    got: list[Envelope] = []
    address = await subject.whole.open_replies(got.append)
    await subject.whole.reply([answer("yes", address), answer("no", NOWHERE)])
    await inbox.nothing("a reply goes to whoever asked, not to those who subscribed to its type")
    assert len(got) == 1
