"""The queue of a subscription that reads the log instead: a topic leads here, and nothing stays."""

from collections.abc import Sequence

from faregate.broker.queue import Queue
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter


class LogView(Queue):
    def enqueue(self, envelope: Envelope, letter: DeadLetter | None = None, offset: int = -1) -> None:
        """It is in the log."""

    def enqueue_stored(self, envelopes: Sequence[Envelope], offsets: Sequence[int]) -> None:
        """They are in the log."""
