"""Alarms: what must never pass in silence. Each is logged as an error, counted by kind, and told to whoever asked."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from faregate.core.about import about
from faregate.message import Envelope

log = logging.getLogger("faregate.bus")

AlarmKind = Literal[
    "breaker",
    "dead-letter",
    "disagreement",
    "dispatch-stalled",
    "escalation",
    "foreign-claim",
    "kill-switch",
    "left-behind",
    "nobody-sends",
    "slow-resource",
    "stalled",
    "unknown-source",
    "unreadable-batch",
    "unroutable",
]


class Alarm(NamedTuple):
    """What sounded, where, and about which message ("" where it is about none).

    `breaker`: the broker accepts nothing, so nothing is sent for a while.
    `dead-letter`: a message became one.
    `disagreement`: one id came with two bodies.
    `dispatch-stalled`: outgoing messages cannot be sent for a while.
    `escalation`: the function of a node that learns of its dead letters, or of its kill switches, failed.
    `foreign-claim`: a token is claimed by a record that is not ours.
    `kill-switch`: a subscription stopped, because something that it depends on is down.
    `left-behind`: a task or thread of a handler goes on after its try has ended; sounds once for each handler.
    `nobody-sends`: the outbox of a store has messages of a node that nobody runs.
    `slow-resource`: a resource is made for each message, and making it takes longer than using it.
    `stalled`: a lane, a dispatcher, a pump or the intake has work and makes no progress.
    `unknown-source`: a subscription waits for events of a node that nobody is known to run.
    `unreadable-batch`: a file that another process left in the spool cannot be read.
    `unroutable`: no node handles a message that a handler sent.
    """

    kind: AlarmKind
    node: str
    message_id: str
    text: str


class Alarms:
    loop: asyncio.AbstractEventLoop | None = None
    """Where callbacks are called, whichever thread an alarm comes from; None: where it comes from."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._callbacks: list[Callable[[Alarm], None]] = []

    def listen(self, callback: Callable[[Alarm], None]) -> None:
        self._callbacks.append(callback)

    def sound(
        self,
        kind: AlarmKind,
        node: str,
        message_id: str,
        text: str,
        *,
        envelope: Envelope | None = None,
        key: str | None = None,
    ) -> None:
        """`envelope`, `key`: of the message, where they are at hand."""
        self.counts[kind] += 1
        where = f" at {node}" if node else ""
        what = f", message {message_id}" if message_id else ""
        log.error("alarm %s%s%s: %s", kind, where, what, text, extra=about(node, message_id, envelope, key))
        alarm = Alarm(kind, node, message_id, text)
        if self.loop is None or asyncio._get_running_loop() is self.loop:
            self._tell(alarm)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._tell, alarm)

    def _tell(self, alarm: Alarm) -> None:
        for callback in self._callbacks:
            try:
                callback(alarm)
            except Exception:
                log.exception("a callback for alarms failed")
