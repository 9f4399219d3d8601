"""`bus.request`: commands whose sender waits for an answer.

    ask      opens this process's address for replies, once; notes who waits; publishes the command with that address
    answer   a reply comes in, and names the request by its message id: whoever waits for that has it
    late     nobody waits for it any more (a timeout, a cancelled caller), or it is a second reply: dropped and counted

Rules kept here:
- Each request has a future of its own, found by its id. Nothing is locked, and none waits for another.
- Whatever becomes of a caller, nothing of its request stays here. The command is a message as any other: it may be
  handled when nobody waits any more.
- `timeout` counts for all of it, publishing included.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from faregate.codec import BodyReader
from faregate.core.replies import ERROR, FAILED, FILTERED, REASON, Replies
from faregate.core.sender import Sender
from faregate.errors import (
    ConfigurationError,
    FaregateError,
    OutcomeUnknown,
    RequestFailed,
    RequestTimeout,
    UnknownMessage,
    UnknownType,
    check_delay,
)
from faregate.ids import message_id
from faregate.message import REPLY_TO, Envelope, Kind, classes_named, describe_either, known
from faregate.node.outgoing import Outgoing
from faregate.plain import plain
from faregate.ports.clock import Clock
from faregate.ports.queue import QueueTransport, Replying

log = logging.getLogger("faregate.bus")

REQUEST_SECONDS = 30.0
"""How long a request waits for its answer, unless told otherwise."""
Answer = Envelope | FaregateError


class RequestCounts(NamedTuple):
    """What became of the requests of a bus, and of the replies of its nodes."""

    waiting: int
    answered: int
    failed: int
    """Whose request became a dead letter, or was filtered."""
    timed_out: int
    late: int
    """Replies that came when nobody waited for them any more, second ones included."""
    unasked: int
    """Answers of handlers here to messages that nobody asked by."""
    unreached: int
    """Replies of handlers here whose requester was not there any more, or that could not be sent."""


class Requests:
    def __init__(
        self,
        transport: QueueTransport,
        url: str,
        clock: Clock,
        replies: Replies,
        classes: Mapping[tuple[Kind, str], type],
        limit: int,
    ) -> None:
        """`classes`: of the messages that this bus handles."""
        self._transport = transport
        self._url = url
        self._clock = clock
        self._replies = replies
        self._classes = {wire: cls for (_, wire), cls in classes.items()}
        self._limit = limit
        self._readers: dict[type, BodyReader] = {}
        self._address: asyncio.Future[str] | None = None
        self._waiting: dict[str, list[asyncio.Future[Answer]]] = {}
        """By the message id of the request at its recipient. Two may wait for one, under one idempotency key."""
        self._answered = self._failed = self._timed_out = self._late = 0

    def counts(self) -> RequestCounts:
        return RequestCounts(
            sum(map(len, self._waiting.values())),
            self._answered,
            self._failed,
            self._timed_out,
            self._late,
            self._replies.unasked,
            self._replies.unreached,
        )

    async def ask(self, sender: Sender, command: Outgoing, timeout: float, classes: Sequence[type]) -> Any:
        """Send it and wait for the answer. `classes` are those that it may be; none: whichever this process knows."""
        transport = self._transport
        if not isinstance(transport, Replying):
            raise ConfigurationError(
                f'the transport {self._url} brings no replies (it lacks "reply"): send the command, and let its '
                "handler send a message back"
            )
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        request_id, awaited = "", ""
        try:
            async with asyncio.timeout(None) as limit:
                timer = self._clock.call_later(timeout, lambda: limit.reschedule(loop.time()))
                try:
                    headers = {**(command.headers or {}), REPLY_TO: await self._open(transport)}
                    command = msgspec.structs.replace(command, headers=headers)
                    request_id, published = sender.publish(command)
                    awaited = message_id(request_id, str(command.destination))
                    self._waiting.setdefault(awaited, []).append(answer)
                    try:
                        await published
                    except Exception as exc:
                        sender.failed(exc)
                        raise
                    sender.sent()
                    found = await answer
                finally:
                    timer.cancel()
        except TimeoutError:
            if not limit.expired():
                raise
            self._timed_out += 1
            raise RequestTimeout(
                f"nobody answered the request {command.message_type.wire} {request_id} to {command.destination!r} "
                f"within {timeout:g} s. It may still be handled, or have been: replies are not kept. Ask for its "
                "outcome, and look at the dead letters and at what waits there"
            ) from None
        finally:
            self._forget(awaited, answer)
        if isinstance(found, FaregateError):
            raise found
        return self._read(found, command, request_id, classes)

    async def _open(self, transport: Replying) -> str:
        """The address, opened by the first who asks."""
        if self._address is None:
            self._address = asyncio.ensure_future(transport.open_replies(self._arrived))
            self._address.add_done_callback(lambda opened: opened.cancelled() or opened.exception())
        opening = self._address
        try:
            return await asyncio.shield(opening)
        finally:
            failed = opening.done() and (opening.cancelled() or opening.exception() is not None)
            if failed and self._address is opening:  # the next one tries again
                self._address = None

    def _forget(self, awaited: str, answer: asyncio.Future[Answer]) -> None:
        waiting = self._waiting.get(awaited)
        if waiting is not None and answer in waiting:
            waiting.remove(answer)
            if not waiting:
                del self._waiting[awaited]

    def _arrived(self, reply: Envelope) -> None:
        waiting = self._waiting.pop(reply.causation_id or "", None)
        if waiting is None:
            self._late += 1
            log.debug("a late reply, dropped: %s", reply)
            return
        for answer in waiting:
            if not answer.done():
                answer.set_result(reply)

    def _read(self, reply: Envelope, command: Outgoing, request_id: str, classes: Sequence[type]) -> Any:
        asked = f"the request {command.message_type.wire} {request_id} to {command.destination!r}"
        if reply.type == FAILED:
            self._failed += 1
            reason, error = reply.headers.get(REASON, "failed"), plain(reply.headers.get(ERROR, ""))
            what = "was handled by nobody" if reason == FILTERED else f"is a dead letter there ({plain(reason)})"
            raise RequestFailed(f"{asked} {what}: {error}", reason=reason)
        cls = self._class_of(reply, command.message_type.cls, asked, classes)
        if cls not in self._readers:
            self._readers[cls] = BodyReader(cls, limit=self._limit)
        message = self._readers[cls].read(reply)
        self._answered += 1
        return message

    def _class_of(self, reply: Envelope, command: type, asked: str, classes: Sequence[type]) -> type:
        if classes:
            named = [cls for cls in classes if wire_of(cls) == reply.type]
        else:
            own = self._classes.get(reply.type)
            named = _beside(command, classes_named(reply.type)) if own is None else [own]
        if len(named) == 1:
            return named[0]
        if named:
            those = ", ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in named)
            why = f"which several classes here are called: {those}. Say which with reply=…"
        elif classes:
            why = f"and reply= names only {', '.join(map(wire_of, classes))}"
        else:
            why = "which no message class here is called: declare one, or give reply=…"
        raise UnknownType(f"{asked} was answered with a {plain(reply.type)}, {why}")

    def stop(self) -> None:
        """Nobody will answer any more."""
        waiting, self._waiting = self._waiting, {}
        for answers in waiting.values():
            for answer in answers:
                if not answer.done():
                    answer.set_result(
                        OutcomeUnknown(
                            "the bus stopped while a request waited for its answer: the command may be handled all "
                            "the same. Ask for its outcome when the bus runs again"
                        )
                    )


def _beside(command: type, named: list[type]) -> list[type]:
    """Of several classes with one wire name, those that were declared where the command was: in the same function, or
    else in the same module. All of them, if none was."""
    scope = command.__qualname__.rpartition(".")[0]
    module = [cls for cls in named if cls.__module__ == command.__module__]
    return [cls for cls in module if cls.__qualname__.rpartition(".")[0] == scope] or module or named


def wire_of(cls: type) -> str:
    declared = known(cls)
    return cls.__name__ if declared is None else declared.wire


def check_timeout(timeout: float | timedelta) -> float:
    seconds = check_delay(timeout, "timeout")
    if seconds == 0:
        raise ConfigurationError("timeout must be more than 0 seconds: nobody can answer at once")
    return seconds


def check_reply(reply: type | Sequence[type] | None) -> Sequence[type]:
    """The classes that an answer may be. Raises `UnknownMessage`."""
    if reply is None:
        return ()
    try:
        classes = (reply,) if isinstance(reply, type) else tuple(reply)
    except TypeError:
        raise UnknownMessage(f"reply takes the class of the answer, or several in a list; got {reply!r}") from None
    for cls in classes:
        describe_either(cls)
    return classes
