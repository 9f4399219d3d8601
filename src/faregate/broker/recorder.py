"""What a durable broker is told about entries, and how it gives back what it keeps for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from faregate.message import Envelope
from faregate.ports.queue import Outcome

if TYPE_CHECKING:
    from faregate.broker.entry import Entry
    from faregate.broker.queue import Queue


class Recorder(Protocol):
    """Called by queues, in the order in which things happen. Nothing here waits."""

    def started(self, queue: Queue, entries: Sequence[Entry]) -> None:
        """Handlers start on these: their `tries` count this one already."""

    def ended(self, queue: Queue, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
        """These are settled, each with its outcome."""

    def waits(self, queue: Queue, entry: Entry, due: float) -> None:
        """It comes back at this time, with the counts it has now."""

    def load(self, offsets: list[int]) -> list[Envelope]:
        """The envelopes at these offsets, in order. Nothing when they cannot be read: the recorder says so."""

    def has_room(self) -> bool:
        """Whether memory has room for another waiting envelope."""

    def holds(self, envelope: Envelope) -> None:
        """An envelope is held in memory from now on."""

    def leave(self, entries: Sequence[Entry]) -> None:
        """These are no longer held."""
