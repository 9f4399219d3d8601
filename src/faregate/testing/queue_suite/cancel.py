"""Cases for "cancel": what is scheduled can be taken back until it is due."""

from typing import cast

from faregate.message import Envelope
from faregate.ports.queue import Cancelling
from faregate.ports.store import SCHEDULE_KEY
from faregate.testing.queue_suite.cases import QueueSubject, again, case, event, inboxes, open_inbox


def _later(subject: QueueSubject, text: str, key: str | None = None, seconds: float = 10) -> Envelope:
    made = event(text, deliver_at=subject.now() + seconds)
    return made if key is None else again(made, headers={**made.headers, SCHEDULE_KEY: key})


async def _cancel(
    subject: QueueSubject, publication_id: str | None, key: str | None = None, of: str = "author"
) -> bool:
    return await cast(Cancelling, subject.transport).cancel(of, publication_id, key)


@case("cancel", "delay")
async def what_is_cancelled_is_never_delivered(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    first, second = _later(subject, "first"), _later(subject, "second")
    await subject.transport.publish([first, second])
    assert await _cancel(subject, first.publication_id), "it was not waiting"
    await subject.advance(11)
    assert await inbox.texts() == ["second"]


@case("cancel", "delay")
async def cancelling_twice_or_too_late_is_no_error_and_says_so(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "now")
    later, soon = _later(subject, "later"), _later(subject, "soon", seconds=5)
    await subject.transport.publish([later, soon])
    assert await _cancel(subject, later.publication_id)
    assert not await _cancel(subject, later.publication_id), "it was cancelled twice"
    await subject.advance(6)
    assert await inbox.texts() == ["now", "soon"]
    assert not await _cancel(subject, soon.publication_id), "what was delivered was cancelled"
    assert not await _cancel(subject, "no-such-id")


@case("cancel", "delay")
async def an_event_is_cancelled_for_all_its_recipients(subject: QueueSubject) -> None:
    one, two = await inboxes(subject, "reader", "other")
    later = _later(subject, "later")
    await subject.transport.publish([later])
    assert await _cancel(subject, later.publication_id)
    await subject.advance(11)
    await one.nothing("it was cancelled")
    await two.nothing("it was cancelled")


@case("cancel", "delay")
async def a_key_cancels_what_its_own_node_has_scheduled_with_it(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    await subject.transport.publish([_later(subject, "17", "order-17"), _later(subject, "18", "order-18")])
    assert not await _cancel(subject, None, "order-17", of="stranger"), "a stranger's key cancelled it"
    assert await _cancel(subject, None, "order-17")
    await subject.advance(11)
    assert await inbox.texts() == ["18"]


@case("cancel", "delay")
async def what_waits_for_another_try_is_not_cancelled(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "again")
    delivery = await inbox.delivery()
    await delivery.redeliver(10)
    assert not await _cancel(subject, delivery.envelope.publication_id), "it was delivered, and failed"
    await subject.advance(11)
    assert await inbox.texts() == ["again"]
