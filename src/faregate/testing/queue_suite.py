"""What every queue transport promises, as named cases. A backend is a factory and one line per test runner:

    @pytest.mark.parametrize("name", QUEUE_CASES)
    async def test_memory(name):
        await run_queue_case(name, memory_subject)

A case raises AssertionError when the promise is broken. Capability flags on the subject may relax order by key and
expiry; redelivery, atomicity and settlement have no flag.

Longer than most files because it is a list: what a transport promises is to be read, and imported, in one place.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from faregate import ids
from faregate.errors import ConsumerRefused, QueueNotFound, StaleLock, Unroutable
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding, Consumer, Delivery, Outcome, QueueTransport, dead_letter_queue
from faregate.testing.clock import FakeClock, rest
from faregate.transports.journal import JournalTransport
from faregate.transports.memory import MemoryTransport


@dataclass
class QueueSubject:
    """A transport under test, and how time passes for it."""

    transport: QueueTransport
    advance: Callable[[float], Awaitable[None]]
    """Let that many seconds pass: a fake clock is moved, a real one slept through."""
    rest: Callable[[], Awaitable[None]]
    """Return when everything deliverable has been delivered."""
    now: Callable[[], float]
    set_wall: Callable[[float], None] | None = None
    """Set the wall clock forward by that many seconds, or back; None where a test cannot."""
    keeps_key_order: bool = True
    expires_messages: bool = True


HOUR = 3600.0

MakeSubject = Callable[[], AbstractAsyncContextManager[QueueSubject]]
QueueCase = Callable[[QueueSubject], Awaitable[None]]
QUEUE_CASES: dict[str, QueueCase] = {}


def case(function: QueueCase) -> QueueCase:
    QUEUE_CASES[function.__name__] = function
    return function


async def run_queue_case(name: str, make: MakeSubject) -> None:
    """Run one case against a fresh subject."""
    async with make() as subject:
        await asyncio.wait_for(QUEUE_CASES[name](subject), timeout=30)


@asynccontextmanager
async def memory_subject(transport: QueueTransport | None = None) -> AsyncIterator[QueueSubject]:
    """The `memory:` transport on a fake clock."""
    clock = FakeClock()
    tested = transport if transport is not None else MemoryTransport(clock=clock)
    clock = getattr(tested, "_clock", clock)
    await tested.open()
    try:
        yield QueueSubject(tested, clock.advance, rest, clock.time, clock.set_wall)
    finally:
        await tested.close()


@asynccontextmanager
async def journal_subject(path: Path) -> AsyncIterator[QueueSubject]:
    """The `journal:` transport in an empty folder, on a fake clock."""
    clock = FakeClock()
    tested = JournalTransport(str(path), clock=clock)
    await tested.open()

    async def committed() -> None:
        """What was published is durable, and what that made deliverable is delivered."""
        for _ in range(3):
            await tested.journal.barrier()
            await rest()

    async def advance(seconds: float) -> None:
        await clock.advance(seconds, committed)

    try:
        yield QueueSubject(tested, advance, committed, clock.time, clock.set_wall)
    finally:
        await tested.close()


# --- what the cases are written with ----------------------------------------------------------------------


def event(text: str = "x", *, type: str = "Noted", key: str | None = None, **more: object) -> Envelope:
    headers = {"text": text} if key is None else {"text": text, "key": key}
    return Envelope(
        publication_id=ids.root_id(),
        type=type,
        source="author",
        body=text.encode(),
        headers=headers,
        **more,  # type: ignore[arg-type]
    )


def command(to: str, *recipients: str) -> Envelope:
    return Envelope(
        publication_id=ids.root_id(),
        type="Do",
        kind="command",
        source="author",
        destination=to,
        recipients=recipients,
    )


def again(envelope: Envelope, **changes: object) -> Envelope:
    """A publication under the same id."""
    return msgspec.structs.replace(envelope, **changes)


def key_header(envelope: Envelope) -> str | None:
    return envelope.headers.get("key")


def noted(node: str = "reader", **more: object) -> Binding:
    return Binding(node=node, type="Noted", kind="event", source="author", **more)  # type: ignore[arg-type]


QUEUE = noted().queue


class Inbox:
    """A consumer that keeps what it gets."""

    def __init__(self, subject: QueueSubject) -> None:
        self._subject = subject
        self.got: list[Delivery] = []
        self.consumer: Consumer | None = None

    async def open(
        self,
        queue: str = QUEUE,
        *,
        prefetch: int = 10,
        selector: str | None = None,
        exclusive: bool = False,
    ) -> "Inbox":
        self.consumer = await self._subject.transport.consume(
            queue, self.got.append, prefetch=prefetch, selector=selector, exclusive=exclusive
        )
        return self

    async def texts(self) -> list[str]:
        """The texts of all that was delivered so far."""
        await self._subject.rest()
        return [delivery.envelope.body.decode() for delivery in self.got]

    async def take(self) -> Delivery:
        """The first delivery, removed from the inbox."""
        await self._subject.rest()
        assert self.got, "nothing was delivered"
        return self.got.pop(0)

    async def nothing(self, why: str) -> None:
        await self._subject.rest()
        assert not self.got, f"{why}: {[str(delivery.envelope) for delivery in self.got]} was delivered"


async def open_inbox(subject: QueueSubject, *texts: str, prefetch: int = 10, **binding: object) -> Inbox:
    """A bound queue with these messages in it, and a consumer."""
    await subject.transport.bind(noted("reader", **binding))
    await subject.transport.publish([event(text) for text in texts])
    return await Inbox(subject).open(prefetch=prefetch)


async def inboxes(subject: QueueSubject, *nodes: str) -> list[Inbox]:
    """A bound and consumed queue for each of these nodes."""
    for node in nodes:
        await subject.transport.bind(noted(node))
    return [await Inbox(subject).open(noted(node).queue) for node in nodes]


async def only_dead_letter(subject: QueueSubject) -> DeadLetter:
    await subject.rest()
    records = await subject.transport.dead_letters("reader")
    assert len(records) == 1, f"{len(records)} dead letters, not one"
    return records[0]


async def expect_unroutable(subject: QueueSubject, envelope: Envelope, what: str) -> None:
    try:
        await subject.transport.publish([envelope])
    except Unroutable:
        return
    raise AssertionError(f"{what} was confirmed")


async def expect_stale(ending: Awaitable[None], what: str) -> None:
    try:
        await ending
    except StaleLock:
        return
    raise AssertionError(f"{what} was accepted with a stale lock")


# --- publish and route ------------------------------------------------------------------------------------


@case
async def a_published_message_is_delivered_as_it_was(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    sent = event("hello", marker=3, correlation_id="c", causation_id="m", sent_at=5.0)
    await subject.transport.publish([sent])
    got = (await (await Inbox(subject).open()).take()).envelope
    assert (got.publication_id, got.body, got.headers) == (sent.publication_id, b"hello", {"text": "hello"})
    assert (got.marker, got.correlation_id, got.causation_id, got.sent_at) == (3, "c", "m", 5.0)
    assert got.recipients == ("reader",), f"recipients are {got.recipients}"


@case
async def messages_come_in_the_order_they_were_published(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abcdef")
    assert await inbox.texts() == list("abcdef")


@case
async def an_event_goes_to_every_subscriber_once(subject: QueueSubject) -> None:
    for node in ("one", "two"):
        await subject.transport.bind(noted(node))
    await subject.transport.publish([event()])
    for node in ("one", "two"):
        inbox = await Inbox(subject).open(noted(node).queue)
        assert await inbox.texts() == ["x"], f"node {node} got {await inbox.texts()}"


@case
async def an_event_of_another_source_or_type_is_not_delivered(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    other = msgspec.structs.replace(event(), source="stranger")
    await subject.transport.publish([other, event(type="Other")])
    await inbox.nothing("neither source nor type fit")


@case
async def an_event_nobody_wants_is_confirmed(subject: QueueSubject) -> None:
    await subject.transport.publish([event(type="Unwanted")])
    inbox = await open_inbox(subject, "wanted")
    assert await inbox.texts() == ["wanted"]


@case
async def a_command_goes_to_its_destination_only(subject: QueueSubject) -> None:
    doers = {node: Binding(node=node, type="Do", kind="command") for node in ("one", "two")}
    for binding in doers.values():
        await subject.transport.bind(binding)
    await subject.transport.publish([command("two")])
    await (await Inbox(subject).open(doers["one"].queue)).nothing("the command was for another node")
    assert len(await (await Inbox(subject).open(doers["two"].queue)).texts()) == 1


@case
async def a_command_nobody_handles_is_refused_and_the_batch_with_it(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    try:
        await subject.transport.publish([event(), command("nobody")])
    except Unroutable as exc:
        assert "nobody" in str(exc), f"the error does not name the destination: {exc}"
    else:
        raise AssertionError("an unroutable command was confirmed")
    await inbox.nothing("the batch was refused")


@case
async def a_repeated_publication_is_delivered_once(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    sent = event()
    for _ in range(3):
        await subject.transport.publish([sent])
    assert await inbox.texts() == ["x"]


@case
async def a_replay_of_a_publication_is_delivered_again(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    first = event()
    await subject.transport.publish([first])
    await subject.transport.publish([msgspec.structs.replace(event(replay=1), publication_id=first.publication_id)])
    assert await inbox.texts() == ["x", "x"]


@case
async def a_repetition_with_another_body_is_told_and_the_first_counts(subject: QueueSubject) -> None:
    told: list[Envelope] = []
    inbox = await open_inbox(subject)
    first = event("first", body_digest=b"1" * 16)
    other = again(first, body=b"other", body_digest=b"2" * 16)
    await subject.transport.publish([first])
    await subject.transport.publish([other])  # nobody has asked to be told
    subject.transport.on_disagreement = told.append
    await subject.transport.publish([again(first)])
    assert not told, "a plain repetition was taken for a disagreement"
    await subject.transport.publish([other])
    assert [envelope.body for envelope in told] == [b"other"], f"told of {told}"
    assert await inbox.texts() == ["first"]


@case
async def whoever_fails_at_being_told_of_a_disagreement_spoils_no_batch(subject: QueueSubject) -> None:
    def fail(envelope: Envelope) -> None:
        raise RuntimeError("the alarm is broken")

    inbox = await open_inbox(subject)
    subject.transport.on_disagreement = fail
    first = event("first", body_digest=b"1" * 16)
    await subject.transport.publish([first])
    try:
        await subject.transport.publish([again(first, body_digest=b"2" * 16), event("next")])
    except RuntimeError as exc:
        raise AssertionError("the batch was refused because of the alarm") from exc
    assert await inbox.texts() == ["first", "next"]


# --- recipients -------------------------------------------------------------------------------------------


@case
async def a_publication_that_names_recipients_goes_to_these_only(subject: QueueSubject) -> None:
    one, two, three = await inboxes(subject, "one", "two", "three")
    await subject.transport.publish(
        [event("a"), event("b", recipients=("two",)), event("c", recipients=("two", "one"))]
    )
    await subject.transport.publish([event("d")])
    texts = [await inbox.texts() for inbox in (one, two, three)]
    assert texts == [["a", "c", "d"], ["a", "b", "c", "d"], ["a", "d"]], f"one, two and three got {texts}"


@case
async def a_publication_that_is_published_again_goes_where_it_went_before(subject: QueueSubject) -> None:
    await subject.transport.bind(noted("early"))
    sent = event()
    await subject.transport.publish([sent])
    await subject.transport.bind(noted("late"))
    await subject.transport.publish([again(sent, replay=1)])
    await (await Inbox(subject).open(noted("late").queue)).nothing("its recipients were resolved before")
    assert await (await Inbox(subject).open(noted("early").queue)).texts() == ["x", "x"]


@case
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


@case
async def a_command_that_names_another_recipient_is_refused(subject: QueueSubject) -> None:
    doers = {node: Binding(node=node, type="Do", kind="command") for node in ("one", "two")}
    for binding in doers.values():
        await subject.transport.bind(binding)
    await subject.transport.publish([command("one", "one")])
    await expect_unroutable(subject, command("one", "two"), "a command to one for two")
    await expect_unroutable(subject, command("one", "one", "stranger"), "a command to one for a stranger, too")
    assert len(await (await Inbox(subject).open(doers["one"].queue)).texts()) == 1
    await (await Inbox(subject).open(doers["two"].queue)).nothing("no command was for it")


@case
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


@case
async def another_attempt_at_a_publication_is_no_repetition(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    whole = event()
    for attempt in ("first", "second", "first"):
        await subject.transport.publish([again(whole, attempt_id=attempt)])
    assert await inbox.texts() == ["x", "x"]
    assert [delivery.envelope.attempt_id for delivery in inbox.got] == ["first", "second"]


# --- unbind -----------------------------------------------------------------------------------------------


@case
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


@case
async def a_queue_that_is_bound_again_collects_again(subject: QueueSubject) -> None:
    one, two = await inboxes(subject, "one", "two")
    await subject.transport.unbind(noted("one").queue)
    await subject.transport.publish([event("between")])
    await subject.transport.bind(noted("one"))
    await subject.transport.publish([event("again"), event("part", recipients=("one",))])
    texts = [await one.texts(), await two.texts()]
    assert texts == [["again", "part"], ["between", "again"]], f"one and two got {texts}"


@case
async def a_command_to_an_unbound_queue_is_refused(subject: QueueSubject) -> None:
    binding = Binding(node="one", type="Do", kind="command")
    await subject.transport.bind(binding)
    await subject.transport.unbind(binding.queue)
    await expect_unroutable(subject, command("one"), "a command to an unbound queue")


@case
async def an_unbound_queue_is_not_waited_for(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"ab")
    await (await inbox.take()).redeliver(10)
    waiting = asyncio.ensure_future(subject.transport.idle())
    await subject.rest()
    assert not waiting.done(), "idle although messages wait"
    await subject.transport.unbind(QUEUE)
    await subject.rest()
    assert waiting.done(), "waits for a queue that is not bound"
    await waiting


@case
async def unbinding_an_unknown_queue_is_an_error(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    for name in ("no.such.queue", dead_letter_queue("reader")):
        try:
            await subject.transport.unbind(name)
        except QueueNotFound as exc:
            assert name in str(exc), f"the error does not name the queue: {exc}"
        else:
            raise AssertionError(f"{name} was unbound, which nobody bound")


# --- hold and end -----------------------------------------------------------------------------------------


@case
async def a_settled_message_never_comes_back(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x", lock_seconds=5)
    await (await inbox.take()).settle("handled")
    await subject.advance(20)
    assert inbox.consumer is not None
    await inbox.consumer.close()
    await (await Inbox(subject).open()).nothing("it was settled")


@case
async def a_message_settled_as_dead_or_as_a_duplicate_is_gone(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc", lock_seconds=5)
    endings: tuple[Outcome, ...] = ("dead", "duplicate", "skipped")
    for outcome in endings:
        await (await inbox.take()).settle(outcome)
    await subject.advance(20)
    await inbox.nothing("all were settled")
    await subject.transport.idle()
    assert not await subject.transport.dead_letters("reader"), "a settled message has two dead letters"


@case
async def a_delivery_knows_its_position_and_its_tries(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc")
    first, second, third = [await inbox.take() for _ in range(3)]
    places = [delivery.position for delivery in (first, second, third)]
    if None not in places:
        assert places[0] < places[1] < places[2], f"positions are {places}"  # type: ignore[operator]
    assert (first.tries, first.letter) == (0, None), f"{first.tries} tries before the first"
    first.start()
    assert first.tries == 1, f"{first.tries} tries after the first start"
    await first.redeliver(0)
    back = await inbox.take()
    assert (back.position, back.tries) == (places[0], 1), f"came back at {back.position} after {back.tries} tries"


@case
async def a_delivery_from_a_dead_letter_queue_carries_the_reason(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "bad")
    delivery = await inbox.take()
    delivery.start()
    await delivery.dead_letter("broken", "ValueError: no")
    await subject.rest()
    delivered = await (await Inbox(subject).open(dead_letter_queue("reader"))).take()
    record = delivered.letter
    assert record is not None, "it does not say why it is there"
    assert (record.reason, record.error, record.tries, record.queue) == ("broken", "ValueError: no", 1, QUEUE)
    assert record.envelope.publication_id == delivered.envelope.publication_id
    await delivered.settle("handled")
    assert not await subject.transport.dead_letters("reader"), "settled, and still a dead letter"


@case
async def a_released_message_returns_to_its_own_position(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc", prefetch=2)
    first = await inbox.take()
    assert not first.redelivered, "a first delivery says it is a redelivery"
    await inbox.take()
    await first.release()
    again = await inbox.take()
    assert again.envelope.body == b"a", f"{again.envelope.body!r} came before the released one"
    assert again.redelivered, "a second delivery does not say so"


@case
async def a_message_that_nobody_began_returns_as_if_it_had_never_been_out(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"ab", prefetch=1)
    await (await inbox.take()).release(begun=False)
    delivery = await inbox.take()
    assert delivery.envelope.body == b"a", "it is not in its place"
    assert not delivery.redelivered, "it was handed out before, but nobody began"
    delivery.start()
    await delivery.release(begun=False)
    delivery = await inbox.take()
    assert (delivery.tries, delivery.redelivered) == (0, False), "the start counts, though nobody began"


@case
async def a_serial_subscription_waits_for_a_redelivery(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc", prefetch=1, serial=True)
    await (await inbox.take()).redeliver(10)
    await inbox.nothing("the first waits for its redelivery")
    await subject.advance(11)
    for text in (b"a", b"b", b"c"):
        delivery = await inbox.take()
        assert delivery.envelope.body == text, f"{delivery.envelope.body!r} came instead of {text!r}"
        await delivery.settle("handled")


@case
async def a_consumer_that_goes_away_gives_everything_back_in_order(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abc")
    assert await inbox.texts() == list("abc")
    assert inbox.consumer is not None
    await inbox.consumer.close()
    await expect_stale(inbox.got[0].settle("handled"), "settling by a consumer that went away")
    assert await (await Inbox(subject).open()).texts() == list("abc")


@case
async def ending_a_delivery_twice_is_refused(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x")
    delivery = await inbox.take()
    await delivery.settle("handled")
    await expect_stale(delivery.release(), "releasing a settled message")
    await expect_stale(delivery.settle("handled"), "settling twice")
    await inbox.nothing("it was settled")


@case
async def a_lock_that_is_not_renewed_expires(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x", lock_seconds=5)
    late = await inbox.take()
    await subject.advance(6)
    again = await inbox.take()
    assert again.redelivered, "the second delivery does not say so"
    await expect_stale(late.settle("handled"), "settling after the lock expired")
    await again.settle("handled")


@case
async def a_lock_that_is_renewed_holds(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x", lock_seconds=6)
    delivery = await inbox.take()
    for _ in range(3):
        await subject.advance(4)
        delivery.renew()
    await inbox.nothing("its lock was renewed")
    await delivery.settle("handled")


@case
async def a_redelivery_waits_for_its_time_and_is_counted(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x")
    await (await inbox.take()).redeliver(10)
    await subject.advance(8)
    await inbox.nothing("its delay has not passed")
    await subject.advance(3)
    delivery = await inbox.take()
    assert delivery.redeliveries == 1, f"redeliveries are {delivery.redeliveries}"
    await delivery.redeliver(1, counted=False)
    await subject.advance(2)
    assert (await inbox.take()).redeliveries == 1, "an uncounted redelivery was counted"


@case
async def a_message_waiting_for_redelivery_does_not_hold_the_others(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"ab", prefetch=1)
    await (await inbox.take()).redeliver(10)
    assert await inbox.texts() == ["b"]


# --- flow -------------------------------------------------------------------------------------------------


@case
async def no_more_than_prefetch_are_out(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, *"abcde", prefetch=2)
    assert await inbox.texts() == ["a", "b"]
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["b", "c"]


@case
async def consumers_of_one_queue_share_it(subject: QueueSubject) -> None:
    first = await open_inbox(subject, prefetch=2)
    second = await Inbox(subject).open(prefetch=2)
    await subject.transport.publish([event(text) for text in "abcd"])
    texts = [await first.texts(), await second.texts()]
    assert sorted(texts[0] + texts[1]) == list("abcd"), f"shared as {texts}"
    assert len(texts[0]) == len(texts[1]) == 2, f"not fair: {texts}"


@case
async def a_paused_consumer_gets_nothing_until_it_resumes(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    assert inbox.consumer is not None
    inbox.consumer.pause()
    await subject.transport.publish([event()])
    await inbox.nothing("it is paused")
    inbox.consumer.resume()
    assert await inbox.texts() == ["x"]


@case
async def an_exclusive_consumer_is_alone(subject: QueueSubject) -> None:
    await open_inbox(subject)
    try:
        await Inbox(subject).open(exclusive=True)
    except ConsumerRefused:
        return
    raise AssertionError("a consumer got a queue exclusively that another one consumes")


@case
async def a_selector_leaves_the_others_for_others(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    await subject.transport.publish([event(text) for text in "abab"])
    picky = await Inbox(subject).open(selector="text = 'b'")
    assert await picky.texts() == ["b", "b"]
    assert await (await Inbox(subject).open()).texts() == ["a", "a"]


@case
async def consuming_an_unknown_queue_is_an_error(subject: QueueSubject) -> None:
    try:
        await Inbox(subject).open("no.such.queue")
    except QueueNotFound as exc:
        assert "no.such.queue" in str(exc), f"the error does not name the queue: {exc}"
    else:
        raise AssertionError("a queue that nobody declared was consumed")


@case
async def idle_returns_once_everything_is_done(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x")
    await subject.transport.publish([event("later", deliver_at=subject.now() + 1000)])
    waiting = asyncio.ensure_future(subject.transport.idle())
    delivery = await inbox.take()
    assert not waiting.done(), "idle although a message is out"
    await delivery.settle("handled")
    await waiting


# --- order by key -----------------------------------------------------------------------------------------


@case
async def a_busy_key_withholds_its_next_but_not_the_others(subject: QueueSubject) -> None:
    if not subject.keeps_key_order:
        return
    await subject.transport.bind(noted(key_of=key_header))
    inbox = await Inbox(subject).open()
    await subject.transport.publish([event(text, key=text[0]) for text in ("a1", "a2", "b1", "a3", "b2")])
    assert await inbox.texts() == ["a1", "b1"]
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["b1", "a2"]


@case
async def a_key_waits_for_its_redelivery(subject: QueueSubject) -> None:
    if not subject.keeps_key_order:
        return
    await subject.transport.bind(noted(key_of=key_header))
    inbox = await Inbox(subject).open()
    await subject.transport.publish([event(text, key=text[0]) for text in ("a1", "a2", "b1")])
    await (await inbox.take()).redeliver(10)
    assert await inbox.texts() == ["b1"]
    await subject.advance(11)
    assert await inbox.texts() == ["b1", "a1"]


@case
async def a_lenient_key_does_not_wait_for_its_redelivery(subject: QueueSubject) -> None:
    if not subject.keeps_key_order:
        return
    await subject.transport.bind(noted(key_of=key_header, strict=False))
    inbox = await Inbox(subject).open()
    await subject.transport.publish([event(text, key="a") for text in ("a1", "a2", "a3")])
    await (await inbox.take()).redeliver(10)
    assert await inbox.texts() == ["a2"]
    await subject.advance(11)
    assert await inbox.texts() == ["a2"], "two of one key are out at once"
    await (await inbox.take()).settle("handled")
    assert await inbox.texts() == ["a1"], "the redelivered one did not come back to its own position"


# --- time and dead letters --------------------------------------------------------------------------------


@case
async def a_scheduled_message_waits_for_its_time(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    await subject.transport.publish([event("later", deliver_at=subject.now() + 10), event("now")])
    assert await inbox.texts() == ["now"]
    await subject.advance(11)
    assert await inbox.texts() == ["now", "later"]


@case
async def a_redelivery_comes_after_its_delay_whatever_the_wall_clock_does(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "again")
    for jump in (-HOUR, HOUR):
        await (await inbox.take()).redeliver(10)
        _set_wall(subject, jump)
        await subject.advance(9)
        await inbox.nothing("its delay has not passed")
        await subject.advance(2)


@case
async def a_delay_is_a_duration(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject)
    await subject.transport.publish([event("delayed", deliver_at=subject.now() + 10, delay=10.0)])
    await subject.rest()
    _set_wall(subject, -HOUR)
    await subject.advance(11)
    assert await inbox.texts() == ["delayed"]


@case
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


@case
async def a_message_does_not_expire_because_the_wall_clock_is_set(subject: QueueSubject) -> None:
    if not subject.expires_messages:
        return
    await subject.transport.bind(noted())
    await subject.transport.publish([event("kept", expires_at=subject.now() + 100)])
    await subject.rest()
    _set_wall(subject, HOUR)
    await subject.advance(70)
    inbox = await Inbox(subject).open()
    await (await inbox.take()).release()
    assert inbox.consumer is not None
    await inbox.consumer.close()
    _set_wall(subject, -HOUR)
    await subject.advance(31)
    assert (await only_dead_letter(subject)).reason == "expired"


def _set_wall(subject: QueueSubject, seconds: float) -> None:
    if subject.set_wall is not None:
        subject.set_wall(seconds)


@case
async def an_expired_message_is_a_dead_letter_with_the_reason(subject: QueueSubject) -> None:
    if not subject.expires_messages:
        return
    await subject.transport.bind(noted())
    await subject.transport.publish([event("old", expires_at=subject.now() + 5)])
    await subject.advance(6)
    await (await Inbox(subject).open()).nothing("it has expired")
    record = await only_dead_letter(subject)
    assert (record.reason, record.envelope.body) == ("expired", b"old"), f"dead as {record}"


@case
async def a_held_message_does_not_expire(subject: QueueSubject) -> None:
    if not subject.expires_messages:
        return
    inbox = await open_inbox(subject, "held", expires=5)
    delivery = await inbox.take()
    await subject.advance(6)
    assert not await subject.transport.dead_letters("reader"), "expired while a consumer held it"
    await delivery.settle("handled")
    assert not await subject.transport.dead_letters("reader"), "expired after it was settled"


@case
async def a_dead_letter_keeps_its_reason_and_identity(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "bad", "good", prefetch=1)
    delivery = await inbox.take()
    delivery.start()
    await delivery.dead_letter("broken", "ValueError: no")
    assert await inbox.texts() == ["good"], "the next message does not go on"
    record = await only_dead_letter(subject)
    assert (record.reason, record.error, record.tries, record.node) == (
        "broken",
        "ValueError: no",
        1,
        "reader",
    )
    assert record.envelope.publication_id == delivery.envelope.publication_id


@case
async def a_message_that_keeps_coming_back_becomes_a_dead_letter(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "killer", max_deliveries=3, lock_seconds=5)
    for _ in range(3):
        (await inbox.take()).start()
        await subject.advance(6)
    await inbox.nothing("its deliveries are used up")
    record = await only_dead_letter(subject)
    assert (record.reason, record.tries) == ("max-deliveries", 3), f"dead as {record}"


@case
async def a_delivery_whose_handler_never_started_is_no_try(subject: QueueSubject) -> None:
    inbox = await open_inbox(subject, "x", max_deliveries=2, lock_seconds=10)
    for _ in range(5):
        await inbox.take()
        await subject.advance(11)
    assert len(await inbox.texts()) == 1, "it is a dead letter although no handler ever saw it"


@case
async def a_message_that_could_not_be_sent_is_a_dead_letter_of_its_own(subject: QueueSubject) -> None:
    await subject.transport.bind(noted())
    lost = command("nobody")
    await subject.transport.dead_letter("reader", lost, "unroutable", "Unroutable: nobody")
    record = await only_dead_letter(subject)
    assert (record.reason, record.envelope.publication_id) == ("unroutable", lost.publication_id)
