"""The log transport port: messages by offset, replayable, read by any number of readers at their own pace.

    LogTransport   reading: offsets, moments, batches of columns, named readers, parts for tasks that share the work
    Outlined       what is known of stretches of it that nobody has read: which of them to pass over
    Appendable     appending a batch, once by its name
    Staging        appending what many tasks made, once by (origin, batch): they stage, one commits
    Subscribed     who subscribed to what
    TwoViews       handing subscriptions over between their queues and the log
    Settled        what became of messages, and the dead letters that were given to the log

All but the first are capabilities: protocols of their own, which a log has or lacks. Spark knows logs by these alone,
and opens them with `faregate.ports.schemes.open_log`, which refuses one that lacks what is needed. A log of several
partitions is several of these.

Rules every adapter keeps (and `faregate.testing.log_suite` checks):
- Offsets grow; a message keeps its offset for ever. Gaps may appear, order never changes.
- Nobody reads what is not durable yet. What was read once is read again the same.
- Reading from where messages were removed is an error, never a silent skip. (Offsets that a repair found lost, and said
  so, are passed over.)
- What is appended under a name is there as a whole, once, or not at all, however often it is appended.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard

import msgspec

from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.ports.queue import Binding
from faregate.ports.topology import Reading, Topology

ArrowBatch = Any
"""A `pyarrow.RecordBatch` with the columns of `faregate.columns`; ports do not import pyarrow."""

HANDLED, SKIPPED, DEAD, REDELIVER, STARTED, DUPLICATE, FILTERED, REQUEUE = 1, 2, 3, 4, 5, 6, 7, 8
"""What became of a message. Numbers are only ever added; a reader passes over those that it does not know."""
OUTCOMES = {"handled": HANDLED, "skipped": SKIPPED, "dead": DEAD, "duplicate": DUPLICATE, "filtered": FILTERED}
_UNENDED = {REDELIVER: "redeliver", STARTED: "started", REQUEUE: "requeue"}
OUTCOME_NAMES = {**{code: name for name, code in OUTCOMES.items()}, **_UNENDED}


class ReaderOffset(msgspec.Struct):
    """How far a named reader has come: the next offset that it wants."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class LogPart:
    """A part of a log, for one task. Plain values, which another process can be sent."""

    base: int
    """Where the stretch begins whose settlements are kept together."""
    start: int
    """The first offset that is wanted."""
    end: int
    """Behind the last."""
    settled: int = 0
    """How much was settled when the part was made, as the log counts it. What is settled later is left out."""


class LogTransport(Protocol):
    """The read side of a log. Blocking, for use from any thread; `follow` is for the event loop."""

    name: str
    """For people."""
    log_id: str
    """The same as long as its offsets mean the same; a log that was emptied and filled anew has another."""

    def earliest(self) -> int:
        """The first offset that can be read."""

    def latest(self) -> int:
        """The offset behind the last durable message."""

    def offset_at(self, time: float) -> int:
        """The first offset appended at that time (seconds since the epoch) or later; `latest` when there is none."""

    def batches(self, start: int = 0, end: int | None = None, *, rows: int | None = None) -> Iterator[ArrowBatch]:
        """The messages from `start` up to, not including, `end` (default: what is durable now), in order.

        `rows` bounds the size of a batch. Raises `OffsetGone` when `start` was removed or is not there yet.
        """

    def envelopes(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, Envelope]]:
        """The same as (offset, envelope)."""

    def load(self, offsets: list[int]) -> list[Envelope]:
        """The envelopes at these offsets, which are in order."""

    def parts(self, start: int | None = None, end: int | None = None) -> list[LogPart]:
        """What there is now, from `start` up to `end`, in parts that can be read side by side; in order."""

    def follow(self, start: int) -> AsyncIterator[tuple[int, Envelope]]:
        """(offset, envelope) from `start` on, waiting for what is not there yet, for ever."""

    def reader_offsets(self) -> list[ReaderOffset]:
        """The named readers. Retention keeps what they have not read, where it is the log's own; a broker's does not
        wait, and its log then raises `OffsetGone`."""

    def save_reader_offset(self, name: str, offset: int) -> None:
        """Keep how far a named reader has come; never moves it back. Durable when it returns."""

    def forget_reader(self, name: str) -> None:
        """Retention need not wait for it any more. Unknown names are fine."""


class Stretch(NamedTuple):
    """Some of a log, and what is in it. None: that is not known without reading it."""

    start: int
    end: int
    """Behind the last offset."""
    times: tuple[int, int] | None = None
    """When the first and the last of its messages were appended, in microseconds since the epoch."""
    types: Sequence[str] | None = None
    sources: Sequence[str] | None = None
    """Each that one of its messages has, and no other."""
    stored: int | None = None
    """About how many bytes it takes in the log."""
    keys: Callable[[str], bool] | None = None
    correlations: Callable[[str], bool] | None = None
    """Whether one of its messages may have that key, that correlation: a no is sure."""


class Outlined(Protocol):
    """A log that knows of its messages without reading them."""

    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        """What is between two offsets, in order: every message is in one of them. What was removed, or is not there
        yet, is in one of which nothing is known: who reads it is told."""


def is_outlined(log: LogTransport) -> TypeGuard[Outlined]:
    return hasattr(log, "stretches")


class Appendable(Protocol):
    """A log that other processes append to."""

    def append(self, envelopes: Sequence[Envelope], name: str | None = None) -> None:
        """Durable when it returns, and readable once it was taken in. The same name is the same batch, appended once;
        without a name it is new. Raises `MessageTooLarge`, `Unwritable`."""

    def waiting(self) -> Iterator[Envelope]:
        """What was appended and is not taken in yet."""

    async def take_in(self) -> bool:
        """Make what was appended readable. False: another process does that."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What one attempt of a task left for the commit. Plain values, which another process can be sent."""

    name: str | None
    """By which the log finds it; None when there was nothing."""
    pieces: int = 0
    rows: int = 0
    bytes: int = 0
    """Of the bodies."""


Piece = ArrowBatch | list[DeadLetter]
"""Of what is staged: a batch of messages, or dead letters, which the log keeps for nodes without a store."""


class Staging(Protocol):
    """A log that takes what many tasks made as one batch, known by a query's id (`origin`) and the batch's number."""

    def stage(self, origin: str, batch: int, attempt: str, pieces: Iterable[Piece]) -> Staged:
        """In a task. Each call stages for itself, whatever other attempts do. Leaves nothing behind when it fails."""

    def commit(self, origin: str, batch: int, staged: Sequence[Staged], *, once: bool) -> None:
        """Append these, in this order, as one batch, and nothing else that was staged; durable when it returns.

        `once`: the same (origin, batch) again does nothing. Raises `BatchDiffers` when it was something else before.
        """

    def discard(self, origin: str, batch: int, staged: Iterable[Staged]) -> None:
        """Nobody will commit these."""


Outcomes = Callable[[Sequence[tuple[int, Envelope]]], dict[int, str]]
"""Given messages of a subscription with their offsets: which of them are done, and how (`handled`, `dead`, …)."""


class Waits(NamedTuple):
    """A message that a log engine tries again later."""

    offset: int
    redeliveries: int
    due: float


class Handover(Protocol):
    """A log whose subscriptions nobody consumes through their queues, as long as this is held."""

    def reading(self, queue: str) -> Reading:
        """Through which view a subscription is consumed."""

    def waiting(self, binding: Binding) -> list[int]:
        """The offsets that wait in its queue; for one that was never bound, none."""

    def count(self, binding: Binding, start: int) -> int:
        """How many messages of the log are for its queue, from `start` on, or from where its view began."""

    def log_reading(self, binding: Binding) -> Reading:
        """How this subscription would read the log if it were taken now."""

    def take_log(self, binding: Binding) -> Reading:
        """Let this subscription read the log from now on: from the lowest offset that waits in its queue, or, when
        nobody ever bound it, from the beginning."""

    def take_queue(self, binding: Binding, start: int, done: Outcomes, parked: Iterable[Waits] = ()) -> Reading:
        """Let this subscription read its queue again, which then holds what is not done from `start` on."""

    def bind(self, binding: Binding) -> None:
        """Add the subscription, or what is new of it."""


class Subscribed(Protocol):
    """A log that knows who subscribed to what: the column `topic` is a number in its topology."""

    def topology(self) -> Topology: ...


class TwoViews(Subscribed, Protocol):
    """A log whose subscriptions read it, or queues that are filled from it, and can be handed over."""

    def handover(self) -> AbstractContextManager[Handover]:
        """Raises `JournalLocked` while a bus runs, here or when a subscription is taken; where only the consumers of a
        queue can be seen, `ConfigurationError` while there are any."""

    def tidy(self, binding: Binding) -> None:
        """Do what a handover that was interrupted has left to do; which view the subscription has stays as it is."""


class Settled(Protocol):
    """A log that keeps, beside its messages, what became of them."""

    def settlements(self, part: LogPart) -> ArrowBatch:
        """Columns offset (int64), queue, outcome, tries, redeliveries (int32), time (float64): when it happened; for
        `REDELIVER` and `REQUEUE`, when it is due. In the order in which it happened."""

    def dead_letters(self, start: int) -> Iterator[list[DeadLetter]]:
        """Those that were given to the log, from an offset on."""
