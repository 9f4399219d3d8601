"""Who runs which nodes, and how they fare: for people, never for correctness.

There is one meaning of status: `bus.status()`, the control socket and heartbeats are made of the same values. A bus
tells a transport that has `announce` about each of its nodes, every few seconds and when it leaves; who stopped without
that word is silent. What people ask of a running bus is a `Instruction`, whichever way it comes.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

HEARTBEAT_SECONDS = 5.0

State = Literal["new", "running", "stopping", "stopped"]


class Consumed(msgspec.Struct, frozen=True):
    """One subscription at one instance."""

    type: str
    source: str | None
    queues: list[str]
    """Those that this instance consumes now."""
    per_second: float
    """How many it handled, between the last two heartbeats, or the last two times that somebody looked."""
    handled: int
    """Since it started, as all that follow."""
    redelivered: int
    dead: int
    busy: int
    """Lanes at work now."""
    paused: bool
    why: str | None = None
    """Why it is paused, in words."""
    skipped: int = 0
    duplicate: int = 0
    filtered: int = 0


class OutboxStatus(msgspec.Struct, frozen=True):
    """What one process has yet to send from the outbox of a store."""

    store: str
    """Without a password."""
    waiting: int
    oldest_seconds: float | None = None
    """For how long the first of them has waited; None: nothing waits."""


class ScheduleStatus(msgspec.Struct, frozen=True):
    """A recurring function of a node."""

    name: str
    when: str
    zone: str
    next: float | None
    """When it is due next, in seconds since the epoch; None: never again."""
    last: float | None = None
    """The last tick that this instance has seen to; None: none yet."""


class Heartbeat(msgspec.Struct, frozen=True):
    """One node at one instance."""

    node: str
    instance: str
    version: str
    """Of Faregate."""
    since: float
    """When the instance started, in seconds since the epoch; 0: it has not."""
    at: float
    consumes: list[Consumed]
    alarms: dict[str, int]
    """How often each kind sounded at this instance."""
    leaving: bool = False
    state: State = "running"
    outbox: OutboxStatus | None = None
    """Of its store, which other nodes may share; None: it has none."""
    breaker: str | None = None
    """The state of what guards sending; None: nothing does."""
    schedules: list[ScheduleStatus] = []
    notices: list[str] = []
    """What looks like a mistake, in words, while it lasts."""


class BusStatus(msgspec.Struct, frozen=True):
    """A whole bus in one process. `msgspec.json.encode` writes it."""

    instance: str
    version: str
    url: str
    """Without a password."""
    since: float
    at: float
    state: State
    nodes: list[Heartbeat]
    outboxes: list[OutboxStatus]
    """One for each store."""
    alarms: dict[str, int]
    breaker: str | None = None


class Instruction(msgspec.Struct, frozen=True, omit_defaults=True):
    """What somebody asks of a running bus: `status`, `pause`, `resume` or `cancel`."""

    command: str
    node: str | None = None
    """None: every node."""
    type: str | None = None
    """By its wire name; None: every type."""
    seconds: float | None = None
    """For how long it is paused; None: until `resume`."""
    id: str | None = None
    """The publication to cancel."""
    key: str | None = None
    """Or the key that it was scheduled with."""


@runtime_checkable
class Announcing(Protocol):
    """Optional: a transport that brings heartbeats to whoever listens, and drops them where nobody does."""

    async def announce(self, heartbeats: Sequence[Heartbeat]) -> None:
        """Waits at most for a few seconds. Raises `FaregateError`."""


@runtime_checkable
class Overhearing(Protocol):
    """Optional: a transport that brings the heartbeats of all instances to a bus, too."""

    async def overhear(self, heard: Callable[[Heartbeat], None]) -> None:
        """Hand on heartbeats, until it is cancelled. Raises `FaregateError` when the connection is lost, or the broker
        refuses it."""


@runtime_checkable
class Heeding(Protocol):
    """Optional: a transport that brings instructions of people to every instance of a node that runs now."""

    async def heed(self, nodes: Sequence[str], asked: Callable[[Instruction], None]) -> None:
        """Hand on what is asked of these nodes, until it is cancelled. What cannot be read is passed over. Raises
        `FaregateError` when the connection is lost, or the broker refuses it."""
