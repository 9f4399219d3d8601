"""What is handed to the commit thread of a journal."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter

Done = Callable[[Sequence[int], BaseException | None], None]
"""Called in the event loop with the offsets, or with what went wrong."""


def resolve(waiter: "asyncio.Future[None] | None", error: BaseException | None) -> None:
    """Tell whoever waits, if anybody still does."""
    if waiter is None or waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)


class Append(msgspec.Struct, gc=False, eq=False):
    """Messages to be appended as one. Not tracked by the garbage collector: there is one for every publish."""

    envelopes: Sequence[Envelope]
    routes: Sequence[Any]
    """Where the broker will put them once they are committed."""
    topics: Sequence[int]
    waiter: Any = None
    """The future of whoever waits for the commit."""
    batch: Path | None = None
    """The file in the spool that they come from."""
    size: int = 0
    """Of the bodies, in bytes."""

    def __post_init__(self) -> None:
        envelopes = self.envelopes
        self.size = len(envelopes[0].body) if len(envelopes) == 1 else sum([len(each.body) for each in envelopes])


class AppendDeadLetter(msgspec.Struct, eq=False):
    letter: DeadLetter
    done: Done

    @property
    def size(self) -> int:
        return len(self.letter.envelope.body)


class SnapshotPoint(msgspec.Struct, eq=False):
    """Stands between settlements."""

    sizes: dict[int, int] | None = None
    """How far the side logs were written when it was passed."""
    errno: int = 0
    """Why there are no sizes: the disk's error."""


class Call(msgspec.Struct, eq=False):
    """Something else to be done in the commit thread."""

    function: Callable[[], object]
    done: Done
    size: int = 0
    told_in_thread: bool = False
    """Whether `done` is called in the commit thread, for who waits in another one."""


Item = Append | AppendDeadLetter | Call
"""Each has a `size`: how many bytes it adds to a group, roughly."""
