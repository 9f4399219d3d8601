"""Cases for "delay": what is scheduled, and what is tried again later."""

from faregate.testing.queue_suite.cases import QueueSubject, case, event, open_inbox, set_wall

HOUR = 3600.0


@case("delay")
async def a_redelivery_waits_for_its_time_and_is_counted(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x")
    await (await inbox.delivery()).redeliver(10)
    await subject.advance(8)
    await inbox.nothing("its delay has not passed")
    await subject.advance(3)
    delivery = await inbox.delivery()
    assert delivery.redeliveries == 1, f"redeliveries are {delivery.redeliveries}"
    await delivery.redeliver(1, counted=False)
    await subject.advance(2)
    assert (await inbox.delivery()).redeliveries == 1, "an uncounted redelivery was counted"


@case("delay")
async def a_message_waiting_for_redelivery_does_not_hold_the_others(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"ab", prefetch=1)
    await (await inbox.delivery()).redeliver(10)
    assert await inbox.texts() == ["b"]


@case("delay")
async def a_scheduled_message_waits_for_its_time(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    await subject.transport.publish([event("later", deliver_at=subject.now() + 10), event("now")])
    assert await inbox.texts() == ["now"]
    await subject.advance(11)
    assert await inbox.texts() == ["now", "later"]


@case("delay")
async def a_redelivery_comes_after_its_delay_whatever_the_wall_clock_does(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "again")
    for jump in (-HOUR, HOUR):
        await (await inbox.delivery()).redeliver(10)
        set_wall(subject, jump)
        await subject.advance(9)
        await inbox.nothing("its delay has not passed")
        await subject.advance(2)


@case("delay")
async def a_delay_is_a_duration(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    await subject.transport.publish([event("delayed", deliver_at=subject.now() + 10, delay=10.0)])
    await subject.rest()
    set_wall(subject, -HOUR)
    await subject.advance(11)
    assert await inbox.texts() == ["delayed"]


@case("delay")
async def a_wall_time_is_waited_for_by_the_wall_clock(subject: QueueSubject) -> None:
    if subject.set_wall is None:
        return
    inbox = await open_inbox(subject)
    await subject.transport.publish([event("at", deliver_at=subject.now() + HOUR)])
    await subject.rest()
    subject.set_wall(HOUR - 10)
    subject.set_wall(-5)
    await subject.advance(14)
    await inbox.nothing("the wall clock does not show its time yet")
    await subject.advance(60)
    assert await inbox.texts() == ["at"], "a wall clock that was set forward is noticed within a minute"


@case("delay")
async def a_redelivered_message_keeps_its_position_and_its_tries(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"ab")
    delivery = await inbox.delivery()
    delivery.start()
    await delivery.redeliver(0)
    await inbox.take()
    back = await inbox.delivery()
    assert (back.position, back.tries) == (delivery.position, 1), f"came back at {back.position}, {back.tries} tries"


@case("delay")
async def a_redelivery_behind_all_others_goes_to_the_end_of_the_queue(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc", prefetch=1)
    first = await inbox.delivery()
    first.start()
    await first.redeliver(1, behind=True)
    second = await inbox.delivery()  # held, so that the others wait when the first is due
    await subject.advance(2)
    await subject.transport.publish([event("d")])
    await second.settle("handled")
    assert await inbox.texts() == ["c"]
    await (await inbox.delivery()).settle("handled")
    back = await inbox.delivery()
    assert back.envelope.body == first.envelope.body, (
        f"{back.envelope.body!r} came before what was there when it was due"
    )
    assert (back.redeliveries, back.tries) == (1, 1), f"came back with {back.redeliveries} and {back.tries} tries"
