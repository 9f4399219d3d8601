"""The breaker on sending: while the broker takes nothing, nobody waits for it and nobody hammers it.

    closed --failures in a row--> open --seconds--> half-open (one trial) --it is taken--> closed
                                    ^------------------------- it fails -------'

Rules kept here:
- Only "the broker does not take it now" counts (`is_outage`). A refusal is an answer: it ends a row of failures, and
  closes a breaker that it was the trial of.
- While it is open nothing reaches the transport. Half-open, exactly one publish does.
- What comes to an end late, and began before the breaker opened, changes nothing any more.
- Closed and without a failure it costs a test of an attribute (see `Sender`).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from faregate.core.alarms import Alarms
from faregate.core.verdict import first_line
from faregate.errors import (
    BreakerOpen,
    CommitUnknown,
    ConfigurationError,
    JournalFailed,
    JournalFull,
    OutcomeUnknown,
    Permanent,
    StoreUnavailable,
    Unavailable,
    check_delay,
)
from faregate.message import Envelope
from faregate.node.policy import check_count
from faregate.ports.clock import Clock
from faregate.ports.queue import Publishing
from faregate.units import iso, seconds_text

log = logging.getLogger("faregate.bus")

_OUTAGES = (Unavailable, OutcomeUnknown, JournalFull, JournalFailed, OSError)
_OTHERS = (BreakerOpen, StoreUnavailable, CommitUnknown)
"""Of the store, or our own."""


@dataclass(frozen=True, slots=True)
class Breaker:
    """When sending stops for a while: after so many `failures` in a row, for so many `seconds`. Then one message is the
    trial."""

    failures: int = 5
    seconds: float = 5.0

    def __post_init__(self) -> None:
        check_count(self.failures, "Breaker(failures)")
        if not check_delay(self.seconds, "Breaker(seconds)"):
            raise ConfigurationError("Breaker(seconds) must be more than 0; breaker=None switches the breaker off")


class BreakerStatus(NamedTuple):
    """What the breaker of a bus does now."""

    state: Literal["closed", "open", "half-open"]
    failures: int
    """In a row."""
    since: float | None
    """Since when it is not closed, in seconds since the epoch."""
    why: str | None
    """The failure that opened it, or the last trial's."""
    trial_at: float | None
    """From when on the next publish is the trial, while it is open."""


def is_outage(exc: BaseException) -> bool:
    """Whether the broker does not take anything now, as opposed to this message."""
    return isinstance(exc, _OUTAGES) and not isinstance(exc, _OTHERS)


class Circuit:
    """The breaker of one bus, around its transport's publish."""

    def __init__(self, breaker: Breaker, clock: Clock, alarms: Alarms) -> None:
        self._breaker = breaker
        self.seconds = breaker.seconds
        """For how long it is open."""
        self._clock = clock
        self._alarms = alarms
        self.closed = True
        self.failures = 0
        """In a row, since the last success."""
        self._trying = False
        """Whether the trial is out."""
        self._until = 0.0
        """When the next one may begin, by the monotonic clock."""
        self._opened_at = self._since = 0.0
        """When it opened: by the monotonic clock, and by the wall clock."""
        self._why = ""
        self._changed = asyncio.Event()

    @property
    def status(self) -> BreakerStatus:
        if self.closed:
            return BreakerStatus("closed", self.failures, None, None, None)
        state: Literal["open", "half-open"] = "half-open" if self._trying else "open"
        trial_at = None if self._trying else self._clock.time() + self._left
        return BreakerStatus(state, self.failures, self._since, self._why, trial_at)

    # --- before a publish ------------------------------------------------------------------------------------

    def admit(self) -> bool:
        """Whether this publish is the trial. Raises `BreakerOpen` when it may not go to the transport."""
        if self.closed:
            return False
        if self._trying or self._left > 0:
            raise self._refusal()
        self._trying = True
        return True

    async def turn(self) -> bool:
        """The same, but it waits for its turn."""
        while not self.closed and (self._trying or self._left > 0):
            self._changed.clear()
            timer = None if self._trying else self._clock.call_later(self._left, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        return self.admit()

    @property
    def _left(self) -> float:
        return max(0.0, self._until - self._clock.monotonic())

    def _refusal(self) -> BreakerOpen:
        left = self.seconds if self._trying else self._left
        following = (
            "another message is being tried just now" if self._trying else f"one message is tried in {left:.1f} s"
        )
        return BreakerOpen(
            f"nothing was sent: publishing fails since {iso(self._since)}, {self.failures} times by now, the last time "
            f"with {self._why}; {following}. Publish again when the broker is back, or from a handler: its outbox "
            "waits by itself",
            retry_after=max(left, 0.1),
        )

    # --- after it --------------------------------------------------------------------------------------------

    def succeeded(self) -> None:
        """A publish that was no trial was taken, or refused for good."""
        if self.closed:
            self.failures = 0

    def failed(self, exc: BaseException) -> None:
        """A publish that was no trial failed."""
        if not self.closed:
            return
        if isinstance(exc, Permanent):
            self.failures = 0
        elif is_outage(exc):
            self.failures += 1
            if self.failures >= self._breaker.failures:
                self._open(exc)

    def trial_succeeded(self) -> None:
        lasted = self._clock.monotonic() - self._opened_at
        log.warning("the breaker is closed after %s: the broker takes messages again", seconds_text(lasted))
        self.closed, self.failures = True, 0
        self._end_trial()

    def trial_failed(self, exc: BaseException) -> None:
        if isinstance(exc, Permanent):
            self.trial_succeeded()
            return
        self.failures += 1
        self._why = first_line(exc)
        self._until = self._clock.monotonic() + self.seconds
        log.warning("the breaker stays open for %s: %s", seconds_text(self.seconds), self._why)
        self._end_trial()

    def _end_trial(self) -> None:
        self._trying = False
        self._changed.set()

    def _open(self, exc: BaseException) -> None:
        self.closed = False
        self._opened_at = self._clock.monotonic()
        self._since = self._clock.time()
        self._until = self._opened_at + self.seconds
        self._why = first_line(exc)
        text = (
            f"publishing failed {self.failures} times in a row, the last time with {self._why}. For "
            f"{seconds_text(self.seconds)} nothing is sent; then one message is tried. What handlers send "
            "waits in the outbox"
        )
        self._alarms.sound("breaker", "", "", text)


class GuardedPublishing:
    """A transport's publish within the breaker. `waits`: for its turn, instead of raising `BreakerOpen`."""

    def __init__(self, transport: Publishing, circuit: Circuit, *, waits: bool = False) -> None:
        self._transport = transport
        self._circuit = circuit
        self._waits = waits

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        circuit = self._circuit
        is_trial = False
        if not circuit.closed:
            try:
                is_trial = await circuit.turn() if self._waits else circuit.admit()
            except BreakerOpen:
                await asyncio.sleep(0)  # or whoever publishes again at once would keep the event loop from the others
                raise
        try:
            await self._transport.publish(envelopes)
        except BaseException as exc:  # a trial that is cancelled has ended, too
            circuit.trial_failed(exc) if is_trial else circuit.failed(exc)
            raise
        if is_trial:
            circuit.trial_succeeded()
        elif circuit.failures:
            circuit.succeeded()
