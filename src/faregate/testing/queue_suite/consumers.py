"""Cases for "lock", "select" and "count": who has what, and what is left."""

import asyncio

from faregate.errors import ConsumerRefused
from faregate.testing.cases import refused
from faregate.testing.queue_suite.cases import QUEUE, Inbox, QueueSubject, case, event, expect_stale, noted, open_inbox


@case("lock")
async def a_lock_that_is_not_renewed_expires(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x", lock_seconds=5)
    late = await inbox.take()
    await subject.advance(6)
    again = await inbox.take()
    assert again.redelivered, "the second delivery does not say so"
    await expect_stale(late.settle("handled"), "settling after the lock expired")
    await again.settle("handled")


@case("lock")
async def a_lock_that_is_renewed_holds(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x", lock_seconds=6)
    delivery = await inbox.take()
    for _ in range(3):
        await subject.advance(4)
        delivery.renew()
    await inbox.nothing("its lock was renewed")
    await delivery.settle("handled")


@case("lock")
async def a_delivery_whose_handler_never_started_is_no_try(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x", max_deliveries=2, lock_seconds=10)
    for _ in range(5):
        await inbox.take()
        await subject.advance(11)
    assert len(await inbox.texts()) == 1, "it is a dead letter although no handler ever saw it"


@case("select")
async def a_selector_leaves_the_others_for_others(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    await subject.transport.publish([event(text) for text in "abab"])
    picky = Inbox(subject)
    await subject.whole.consume(QUEUE, picky.got.append, prefetch=10, selector="text = 'b'")
    assert await picky.texts() == ["b", "b"]
    assert await (await Inbox(subject).open()).texts() == ["a", "a"]


@case("select")
async def an_exclusive_consumer_is_alone(subject: QueueSubject) -> None:
    await open_inbox(subject)
    with refused(ConsumerRefused, "a consumer got a queue exclusively that another one consumes"):
        await subject.whole.consume(QUEUE, lambda delivery: None, prefetch=1, exclusive=True)


@case("count", "delay")
async def idle_returns_once_everything_is_done(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x")
    await subject.transport.publish([event("later", deliver_at=subject.now() + 1000)])
    waiting = asyncio.ensure_future(subject.whole.idle())
    delivery = await inbox.take()
    assert not waiting.done(), "idle although a message is out"
    await delivery.settle("handled")
    await waiting


@case("count")
async def an_unbound_queue_is_not_waited_for(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"ab")
    await inbox.take()
    waiting = asyncio.ensure_future(subject.whole.idle())
    await subject.rest()
    assert not waiting.done(), "idle although messages wait"
    await subject.transport.unbind(QUEUE)
    await subject.rest()
    assert waiting.done(), "waits for a queue that is not bound"
    await waiting
