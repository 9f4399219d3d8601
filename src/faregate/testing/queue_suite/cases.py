"""What the cases of the queue suite are written with: the subject, the list of cases, an inbox, messages."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec

from faregate import ids
from faregate.errors import StaleLock, Unroutable
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import (
    Binding,
    Browsing,
    Capability,
    Consumer,
    Counting,
    DeadLettering,
    Delivery,
    Held,
    QueueTransport,
    Recognising,
    Replying,
    Selecting,
    dead_letter_queue,
)
from faregate.testing.cases import Case, Cases, refused


class WholeTransport(Selecting, QueueTransport, Recognising, DeadLettering, Browsing, Counting, Replying, Protocol):
    """One that has every capability."""


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

    @property
    def whole(self) -> WholeTransport:
        """The transport, for cases of its capabilities."""
        return cast(WholeTransport, self.transport)


MakeSubject = Callable[[], AbstractAsyncContextManager[QueueSubject]]
QUEUE_CASES = Cases[QueueSubject]()
NEEDS: dict[str, frozenset[Capability]] = {}


def case(*needs: Capability) -> Callable[[Case[QueueSubject]], Case[QueueSubject]]:
    """A case for transports with these capabilities."""

    def note(function: Case[QueueSubject]) -> Case[QueueSubject]:
        NEEDS[function.__name__] = frozenset(needs)
        return QUEUE_CASES.add(function)

    return note


def event(text: str = "x", *, type: str = "Noted", key: str | None = None, **more: object) -> Envelope:
    more["headers"] = {"text": text} if key is None else {"text": text, "key": key}
    return Envelope(publication_id=ids.root_id(), type=type, source="author", body=text.encode(), **more)  # type: ignore[arg-type]


def command(to: str, *recipients: str) -> Envelope:
    return again(event(type="Do"), kind="command", destination=to, recipients=recipients)


def again(envelope: Envelope, **changes: object) -> Envelope:
    """A publication under the same id."""
    return msgspec.structs.replace(envelope, **changes)


def key_header(envelope: Envelope) -> str | None:
    return envelope.headers.get("key")


def noted(node: str = "reader", **more: object) -> Binding:
    return Binding(node=node, type="Noted", kind="event", source="author", **more)  # type: ignore[arg-type]


def done(node: str) -> Binding:
    """For `command`."""
    return Binding(node=node, type="Do", kind="command")


QUEUE = noted().queue


class Inbox:
    """A consumer that keeps what it gets."""

    def __init__(self, subject: QueueSubject) -> None:
        self._subject = subject
        self.got: list[Held] = []
        self.consumer: Consumer | None = None

    async def open(self, queue: str = QUEUE, *, prefetch: int = 10) -> "Inbox":
        self.consumer = await self._subject.transport.consume(queue, self.got.append, prefetch=prefetch)
        return self

    async def close(self) -> None:
        assert self.consumer is not None
        await self.consumer.close()

    async def texts(self) -> list[str]:
        """The texts of all that was delivered so far."""
        await self._subject.rest()
        return [delivery.envelope.body.decode() for delivery in self.got]

    async def take(self) -> Held:
        """The first delivery, removed from the inbox."""
        await self._subject.rest()
        assert self.got, "nothing was delivered"
        return self.got.pop(0)

    async def delivery(self) -> Delivery:
        """The same, where the transport has what the core does not ask for."""
        return cast(Delivery, await self.take())

    async def nothing(self, why: str) -> None:
        await self._subject.rest()
        assert not self.got, f"{why}: {[str(delivery.envelope) for delivery in self.got]} was delivered"


async def open_inbox(subject: QueueSubject, *texts: str, prefetch: int = 10, **binding: object) -> Inbox:
    """A bound queue with these messages in it, and a consumer."""
    await subject.transport.bind(noted("reader", **binding))
    await subject.transport.publish([event(text) for text in texts])
    return await Inbox(subject).open(prefetch=prefetch)


async def inboxes(subject: QueueSubject, *nodes: str, of: Callable[[str], Binding] = noted) -> list[Inbox]:
    """A bound and consumed queue for each of these nodes."""
    for node in nodes:
        await subject.transport.bind(of(node))
    return [await Inbox(subject).open(of(node).queue) for node in nodes]


async def dead_letters(subject: QueueSubject) -> list[DeadLetter]:
    """What is in the reader's dead-letter queue; it stays there."""
    await subject.rest()
    inbox = await Inbox(subject).open(dead_letter_queue("reader"))
    await subject.rest()
    found = [cast(Delivery, held).letter for held in inbox.got]
    await inbox.close()
    assert None not in found, "a delivery from a dead-letter queue does not say why it is there"
    return [letter for letter in found if letter is not None]


async def only_dead_letter(subject: QueueSubject) -> DeadLetter:
    letters = await dead_letters(subject)
    assert len(letters) == 1, f"{len(letters)} dead letters, not one"
    return letters[0]


async def expect_unroutable(subject: QueueSubject, envelope: Envelope, what: str) -> None:
    with refused(Unroutable, f"{what} was confirmed"):
        await subject.transport.publish([envelope])


async def expect_stale(ending: Awaitable[None], what: str) -> None:
    with refused(StaleLock, f"{what} was accepted with a stale lock"):
        await ending


def set_wall(subject: QueueSubject, seconds: float) -> None:
    if subject.set_wall is not None:
        subject.set_wall(seconds)
