"""Escalation: a function of the node learns of each message that the node dead-letters, and may send messages about it.
Another learns of its kill switches that trip.

Rules kept here:
- What it returns goes with the dead letter: into the outbox in the very commit, where there is a store; published right
  before it, where there is none.
- It may be called again for one dead letter, after a crash or while the store is away. What it returns then has the
  same ids, and arrives once.
- Whatever it does, the dead letter is written: an error or a function that hangs is an alarm.
- A dead letter of a message that such a function sent is not escalated again: nobody would come out of that.
- A trip is no commit: what is sent about it is published at once, and an alarm tells if that fails.
"""

import asyncio
import contextvars
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from typing import Any

from faregate.core.alarms import Alarms
from faregate.core.sender import ESCALATES, Sender
from faregate.core.verdict import failure_of, first_line
from faregate.errors import UninterpretedEffect
from faregate.message import Envelope
from faregate.node.kill_switch import SwitchTripped
from faregate.node.node import Node
from faregate.node.outgoing import Outgoing, as_outgoing
from faregate.node.signature import Signature
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.store import FROM_OUTSIDE, OutboxRow

log = logging.getLogger("faregate.bus")

_SECONDS = 10.0
"""How long a dead letter waits for the function."""


Subject = DeadLetter | SwitchTripped


class Escalation:
    """What a node does about the messages that it dead-letters; nothing, where it declares nothing."""

    def __init__(self, node: Node, sender: Sender, alarms: Alarms, pool: Executor) -> None:
        self._functions = node.escalations
        self._node = node.name
        self._sender = sender
        self._alarms = alarms
        self._pool = pool

    async def rows(self, letter: DeadLetter) -> list[OutboxRow]:
        """What goes into the outbox in the commit of this dead letter."""
        return [self._sender.outbox_row(each, None, FROM_OUTSIDE) for each in await self._messages(letter)]

    async def publish(self, subject: Subject) -> None:
        """Without a store, or about a trip: publish what the function sends."""
        envelopes = await self._messages(subject)
        try:
            if envelopes:
                await self._sender.publish_escalation(envelopes)
        except Exception as exc:
            self._fail(subject, f"cannot be sent: {first_line(exc)}")

    async def _messages(self, subject: Subject) -> list[Envelope]:
        function = self._functions.get(type(subject))
        if function is None or (isinstance(subject, DeadLetter) and ESCALATES in subject.envelope.headers):
            return []
        called = asyncio.ensure_future(self._call(function, subject))
        try:
            done, _ = await asyncio.wait({called}, timeout=_SECONDS)
        finally:
            called.cancel()
        outgoing: list[Outgoing] | str
        if not done:
            outgoing = f"has not returned after {_SECONDS:g} s"
        else:
            outgoing = "cancelled the task that it runs in" if called.cancelled() else called.result()
        if isinstance(outgoing, str):
            self._fail(subject, outgoing)
            return []
        try:
            return self._sender.seal_escalation(outgoing, subject)
        except Exception as exc:
            self._fail(subject, f"returned what cannot be sent: {first_line(exc)}")
            return []

    async def _call(self, function: Signature, subject: Subject) -> list[Outgoing] | str:
        """What it sends; in words, what was wrong."""
        try:
            if function.in_thread:
                context = contextvars.copy_context()
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._pool, context.run, _collect, function, subject)
            elif function.shape == "async generator":
                result = [each async for each in function.function(subject)]
            else:
                result = await function.function(subject)
            return list(_outgoing(result))
        except BaseException as exc:
            failure = failure_of(exc)
            if failure is None:
                raise
            log.error("the function of node %s that escalates failed at %s", self._node, subject, exc_info=failure)
            return f"failed: {first_line(failure)}"

    def _fail(self, subject: Subject, what: str) -> None:
        kept = ". The dead letter is kept" if isinstance(subject, DeadLetter) else ""
        message_id = subject.message_id if isinstance(subject, DeadLetter) else ""
        text = f"the function of node {self._node!r} that escalates {subject} {what}{kept}"
        self._alarms.sound("escalation", self._node, message_id, text)


def _collect(function: Signature, subject: Subject) -> Any:
    """In a thread."""
    result = function.function(subject)
    return list(result) if function.shape == "generator" else result


def _outgoing(result: Any) -> Iterator[Outgoing]:
    if result is None:
        return
    outgoing = as_outgoing(result)
    if outgoing is not None:
        yield outgoing
    elif isinstance(result, list | tuple):
        yield from _every(result)
    else:
        raise UninterpretedEffect(
            f"it returned a {type(result).__name__}, which is no message: return messages, fg.publish(…), fg.send(…) "
            "or a list of them"
        )


def _every(results: Iterable[Any]) -> Iterator[Outgoing]:
    for each in results:
        yield from _outgoing(each)
