"""Replies: what a handler answers to whoever asked.

    request   a command with the header `REPLY_TO`: the address of the process that waits
    reply     an envelope of kind "reply": `destination` is that address, `causation_id` the message id of the request.
              It is sealed and recorded as all that a handler sends, and then handed to the transport's `reply`

Rules kept here:
- A reply is for a process that waits now. What cannot reach it is dropped and counted, and is never a dead letter: the
  effects of the handler are committed, and whoever asked runs into its timeout.
- A connection that is lost is one for replies, too: they are within the breaker. While it is open they are dropped.
- A reply to a message that nobody asked by is dropped as well, so that one handler serves `bus.send` and `bus.request`.
- Whoever asked learns from a reply of the type `FAILED` that its request is a dead letter, or was filtered.
"""

import logging
from collections.abc import Sequence

import msgspec

from faregate.core.breaker import Circuit, GuardedPublishing
from faregate.core.verdict import describe_error
from faregate.errors import BreakerOpen, Permanent
from faregate.message import REPLY_TO, Envelope
from faregate.ports.queue import Connected, Publishing, Replying

log = logging.getLogger("faregate.bus")

FAILED = "(failed)"
"""No message can have this name."""
FILTERED = "filtered"
"""The reason of a request that is no dead letter."""
REASON, ERROR = "reason", "error"
"""The headers of a reply that says so: it has no body, since a codec of somebody else might not take ours."""
_LONGEST_ERROR = 2_000


class Replies:
    def __init__(self, transport: object, circuit: Circuit | None = None) -> None:
        self._transport = transport if isinstance(transport, Replying) else None
        self._guarded: Publishing = self
        if circuit is not None and isinstance(transport, Connected):  # others arrive whatever the broker does
            self._guarded = GuardedPublishing(self, circuit)
        self._is_told = False
        """Whether the log says that the breaker is open."""
        self.unasked = 0
        """Answers to messages that nobody asked by."""
        self.unreached = 0
        """Replies whose requester was not there any more, or that could not be sent."""

    def addressed(self, sealed: Envelope, request: Envelope) -> Envelope | None:
        """A sealed answer as the reply to this request; None where it goes nowhere."""
        address = self._address(request)
        if address is None:
            return None
        return msgspec.structs.replace(sealed, kind="reply", destination=address, key=None)

    def failure(
        self, request: Envelope, message_id: str, publication_id: str, node: str, reason: str, exc: BaseException
    ) -> Envelope | None:
        """The reply to a request that is dead-lettered; None where nobody asked."""
        if REPLY_TO not in request.headers or (address := self._address(request)) is None:
            return None
        error = describe_error(exc).partition("\n")[0][:_LONGEST_ERROR]
        return Envelope(
            publication_id,
            FAILED,
            "reply",
            node,
            destination=address,
            correlation_id=request.correlation_id or request.publication_id,
            causation_id=message_id,
            depth=request.depth + 1,
            headers={REASON: reason, ERROR: error},
        )

    def _address(self, request: Envelope) -> str | None:
        address = request.headers.get(REPLY_TO)
        if address is None:
            self.unasked += 1
            log.debug("a reply to nobody: no one asked by %s", request)
        elif self._transport is None:
            self.unreached += 1
            log.debug("the reply to %s is dropped: what this engine sends to brings no replies", request)
            return None
        return address

    async def hand_over(self, replies: Sequence[Envelope]) -> None:
        """Bring them to whoever waits. Raises what may be mended: then they can be handed over again."""
        if self._transport is None:
            self.unreached += len(replies)
            return
        try:
            await self._guarded.publish(replies)
            self._is_told = False
        except BreakerOpen as exc:
            self.unreached += len(replies)
            log.log(logging.DEBUG if self._is_told else logging.WARNING, "replies are dropped: %s", exc)
            self._is_told = True
        except Permanent as exc:
            if len(replies) > 1:
                for reply in replies:
                    await self.hand_over([reply])
                return
            self.unreached += 1
            log.warning("the reply %s cannot be sent, and is dropped: %s", replies[0], exc)

    async def publish(self, replies: Sequence[Envelope]) -> None:
        """What the breaker is around."""
        assert self._transport is not None
        self.unreached += await self._transport.reply(replies)
