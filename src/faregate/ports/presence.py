"""Who runs which nodes, and how they fare: for people, never for correctness.

A bus tells a transport that has `announce` about each of its nodes, every few seconds and when it leaves. Who stopped
without that word is silent.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

HEARTBEAT_SECONDS = 5.0


class Consumed(msgspec.Struct, frozen=True):
    """One subscription at one instance."""

    type: str
    source: str | None
    queues: list[str]
    """Those that this instance consumes now."""
    per_second: float
    """How many it handled, since the last heartbeat."""
    handled: int
    """Since it started, as all that follow."""
    redelivered: int
    dead: int
    busy: int
    """Lanes at work now."""
    paused: bool


class Heartbeat(msgspec.Struct, frozen=True):
    """One node at one instance."""

    node: str
    instance: str
    version: str
    """Of Faregate."""
    since: float
    """When the instance started, in seconds since the epoch."""
    at: float
    consumes: list[Consumed]
    alarms: dict[str, int]
    """How often each kind sounded at this instance."""
    leaving: bool = False


@runtime_checkable
class Announcing(Protocol):
    """Optional: a transport that brings heartbeats to whoever listens, and drops them where nobody does."""

    async def announce(self, heartbeats: Sequence[Heartbeat]) -> None:
        """Waits at most for a few seconds. Raises `FaregateError`."""
