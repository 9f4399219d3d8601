"""The log transport port: messages by offset, replayable, read by any number of readers at their own pace.

Rules every adapter keeps (and `faregate.testing.log_suite` checks):
- Offsets grow; a message keeps its offset for ever. Gaps may appear, order never changes.
- Nobody reads what is not durable yet. What was read once is read again the same.
- Reading from where messages were removed is an error, never a silent skip. (Offsets that a repair found lost, and said
  so, are passed over.)
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol

import msgspec

from faregate.message import Envelope

ArrowBatch = Any
"""A `pyarrow.RecordBatch` with the columns of docs/journal.md; ports do not import pyarrow."""


class ReaderOffset(msgspec.Struct):
    """How far a named reader has come: the next offset that it wants."""

    name: str
    offset: int


class LogTransport(Protocol):
    """The read side of a log. Blocking, for use from any thread; `follow` is for the event loop."""

    def earliest(self) -> int:
        """The first offset that can be read."""
        ...

    def latest(self) -> int:
        """The offset behind the last durable message."""
        ...

    def offset_at(self, time: float) -> int:
        """The first offset appended at that time (seconds since the epoch) or later; `latest` when there is none."""
        ...

    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[ArrowBatch]:
        """The messages from `start` up to, not including, `end` (default: what is durable now), in order.

        `rows` bounds the size of a batch. Raises `OffsetGone` when `start` was removed or is not there yet.
        """
        ...

    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        """The same as (offset, envelope)."""
        ...

    def follow(self, start: int) -> AsyncIterator[tuple[int, Envelope]]:
        """(offset, envelope) from `start` on, waiting for what is not there yet, for ever."""
        ...

    def reader_offsets(self) -> list[ReaderOffset]:
        """The named readers. Retention keeps what they have not read."""
        ...

    def save_reader_offset(self, name: str, offset: int) -> None:
        """Remember how far a named reader has come; never moves it back. Durable when it returns."""
        ...

    def forget_reader(self, name: str) -> None:
        """Retention need not wait for it any more. Unknown names are fine."""
        ...
