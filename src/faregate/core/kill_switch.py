"""The kill switch of one subscription: whether what its handler depends on is down. Pure; time is handed in.

    closed --trip--> open --close--> closed

Rules kept here:
- It trips by the share of messages that failed within a window, once there are enough of them. A message has failed
  when its tries in memory are used up: a handler whose second try succeeds has no outage. Its redeliveries are not used
  up by then, and the one that is due is not counted.
- Messages are counted from the first failure in the window on. So an outage trips it after a sample, however many
  succeeded just before; and while nothing fails nothing is counted at all.
- As many failed calls in a row as make a sample, of several messages, trip it, too, however long they took. Once
  several have failed and none has succeeded only one of them is tried (`doubt.py`), so it takes few calls and nobody's
  redeliveries.
- A message on trial has its tries at the pace of probes.
- It trips at once by `Unavailable`, which a handler raises who knows, and by `StoreUnavailable`.
- Few messages make no sample. So its probe is asked before one of them becomes a dead letter.
- A failure that is the message's own (`Permanent`, a mistake in the code, a constraint of the database) never counts.
- A store that is away comes before any other reason: nothing can be tried without it.

What a trip does to a subscription is up to whoever set `on_trip` (`bus/switching.py`). Spark has no switch.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from faregate.core.doubt import Doubt
from faregate.core.verdict import asked_seconds, first_line
from faregate.core.work import Work
from faregate.errors import (
    CommitUnknown,
    ConfigurationError,
    Permanent,
    RetryAfter,
    StaleLock,
    StoreConflict,
    StoreUnavailable,
    Unavailable,
)
from faregate.node.kill_switch import KillSwitch
from faregate.ports.clock import Clock

log = logging.getLogger("faregate.bus")

_NEVER = (Permanent, ConfigurationError, RetryAfter, StaleLock, StoreConflict, CommitUnknown)
"""They have a way of their own, whatever is counted."""
_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError,
    RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""What Python raises where the code does not fit the message."""
_STATEMENTS = frozenset({"DataError", "IntegrityError", "NotSupportedError", "ProgrammingError"})
"""What drivers call errors of a statement (PEP 249); `OperationalError` and `InterfaceError` are the database's."""
_SLICES = 10
_SEVERAL = 5
"""So many messages have to fail before it may be an outage; fewer, if the sample is smaller."""


def is_local(exc: BaseException) -> bool:
    """Whether an error is taken for the message's own, unless the subscription says otherwise."""
    return isinstance(exc, _MISTAKES) or any(cls.__name__ in _STATEMENTS for cls in type(exc).__mro__)


class Trip(NamedTuple):
    why: str
    seconds: float | None = None
    """After which it is first asked whether all is well; None: as always."""
    store: bool = False
    """Whether it is the node's store that is away."""
    told: bool = False
    """Whether other subscriptions of that store know it."""


class Slice:
    """A part of the window."""

    __slots__ = ("at", "failures", "successes")

    def __init__(self, at: float, successes: int) -> None:
        self.at = at
        self.successes = successes
        """All there were when it began."""
        self.failures = 0


class Switch:
    def __init__(self, policy: KillSwitch, clock: Clock, successes: Callable[[], int]) -> None:
        """`successes`: how many messages its handler was done with so far."""
        self.policy = policy
        self.reason: str | None = None
        """Why it is open."""
        self.since: float | None = None
        """When it tripped, in seconds since the epoch; None while it is closed."""
        self.trips = 0
        self.on_trip: Callable[[Trip], None] = lambda trip: None
        self.ask: Callable[[], Awaitable[bool]] | None = None
        """Whether its probe says that all is well, if it has one."""
        self._by_store = False
        self._clock = clock
        self._successes = successes
        self._window: deque[Slice] = deque()
        self.doubt = Doubt(min(policy.sample, _SEVERAL), policy.sample, clock, policy.timeout)
        self._successes_then = 0
        """How many had succeeded when the last call failed."""
        self._hurry = asyncio.Event()
        """The message on trial waits no longer for its next try."""
        self._trial_waits = False

    @property
    def is_open(self) -> bool:
        return self.reason is not None

    @property
    def waiting(self) -> int:
        """How many lanes wait for what others show, or for the next try of a trial."""
        return self.doubt.waiting + self._trial_waits

    def blames(self, exc: BaseException | None) -> bool:
        """Whether other messages would fail with that, too, and it is none of this one's own."""
        if not isinstance(exc, Exception) or isinstance(exc, _NEVER):
            return False
        if isinstance(exc, ExceptionGroup):
            return any(map(self.blames, exc.exceptions))
        counts = self.policy.counts
        if isinstance(exc, Unavailable):
            return True
        if counts is None:
            return not is_local(exc)
        return isinstance(exc, counts) if isinstance(counts, type | tuple) else _ask(counts, exc)

    def tried(self, work: Work, exc: BaseException) -> None:
        """A try of a message failed."""
        if self.is_open or self.policy.failures is None:
            return
        successes = self._successes()
        if successes != self._successes_then:
            self._successes_then = successes
            self.doubt.over()
        if self.blames(exc):
            self.doubt.failed(work.envelope.publication_id)
        elif self.doubt.witness is work.delivery:
            self.doubt.over()

    async def next_try(self, work: Work, seconds: float) -> None:
        """Wait for the next try of a message that failed: so long, and until it is its turn."""
        if work.on_trial:
            self._hurry.clear()
            self._trial_waits = True
            timer = self._clock.call_later(max(seconds, self.policy.every), self._hurry.set)
            try:
                await self._hurry.wait()
            finally:
                timer.cancel()
                self._trial_waits = False
        else:
            self.doubt.rest(work.delivery)
            try:
                await self._clock.sleep(seconds)
            except BaseException:
                self.doubt.leave(work.delivery)
                raise
        await self.doubt.turn(work.delivery)

    def hurry(self) -> None:
        """Nothing more begins: nobody waits any longer for what others show."""
        self.doubt.over()
        self._hurry.set()

    def note(self, work: Work, exc: BaseException) -> None:
        """Its tries in memory are used up. Counted once, whoever says so."""
        if not work.counted:
            work.counted = True
            if not work.handler_failed:
                self.tried(work, exc)
            work.goes_back = self.failed(exc)

    async def sure(self, work: Work, *, last: bool) -> None:
        """A message whose tries are used up waits until it is known whether it is the only one. `last`: it is given up
        then."""
        if not self.blames(work.error) or work.goes_back:
            return
        await self.doubt.wait(work.delivery)
        if last and self.ask is not None and not self.is_open and not await self.ask():
            assert work.error is not None
            self.trip(Trip(f"its probe failed after a message did: {first_line(work.error)}"))

    def sends_back(self, work: Work, exc: BaseException) -> bool:
        """Whether a message that has tries left goes back instead, since others tripped the switch."""
        work.goes_back = self.is_open and not work.on_trial and self.blames(exc)
        return work.goes_back

    def failed(self, exc: BaseException) -> bool:
        """A message failed. Whether it goes back, for the switch is open and this is why."""
        if not self.blames(exc):
            return False
        if isinstance(exc, StoreUnavailable):
            self.trip(Trip(first_line(exc), store=True))
        elif isinstance(exc, Unavailable):
            self.trip(Trip(first_line(exc), asked_seconds(exc)))
        elif not self.is_open and self.policy.failures is not None:
            self._count(exc, self.policy.failures)
        return self.is_open

    def _count(self, exc: BaseException, share: float) -> None:
        now, successes, window = self._clock.monotonic(), self._successes(), self._window
        while window and window[0].at <= now - self.policy.window:
            window.popleft()
        if not window or window[-1].at <= now - self.policy.window / _SLICES:
            window.append(Slice(now, successes))
        window[-1].failures += 1
        failures = sum(each.failures for each in window)
        ended = failures + max(0, successes - window[0].successes)
        if ended >= self.policy.sample and failures >= share * ended:
            within = f"within {self.policy.window:g} s; the last: {first_line(exc)}"
            self.trip(Trip(f"{failures} of {ended} messages failed {within}"))
        elif self.doubt.is_there and self.doubt.failures >= self.policy.sample:
            self.trip(Trip(f"{self.doubt.failures} calls failed in a row; the last: {first_line(exc)}"))

    def trip(self, trip: Trip) -> None:
        if self.is_open and (self._by_store or not trip.store):
            return
        self.trips += not self.is_open
        self.reason, self._by_store = trip.why, trip.store
        if self.since is None:
            self.since = self._clock.time()
        self.doubt.over()
        self.on_trip(trip)

    def close(self) -> None:
        """All is well; what was counted is forgotten."""
        self.reason = self.since = None
        self._by_store = False
        self._window.clear()
        self.hurry()


class Trial:
    """The one message that is tried while the switch is open."""

    def __init__(self, put_off: float | None) -> None:
        self.delivery: Any = None
        self.put_off = put_off
        """How long it waits if it fails, so that the next trial is of another; None: it goes back to its place."""
        self.ran = False
        """Whether its handler had a try."""
        self.ended = False
        """Whether it is over with it, however that went."""
        self.error: BaseException | None = None
        """What it failed with, if that is what the switch is open for."""


def _ask(counts: Callable[[Exception], bool], exc: Exception) -> bool:
    try:
        return bool(counts(exc))
    except Exception:
        log.exception("the function given as KillSwitch(counts) failed at %s, which does not count", type(exc).__name__)
        return False
