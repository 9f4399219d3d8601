"""Dead letters do not stay for ever: they are exported, and then removed.

Rules kept here:
- Before a letter is removed it is on the disk, whole, as one line of JSON in a file that only its owner can read.
- A letter that changed since it was exported (another copy, a decision) stays, and is exported again next time.
- The letter of a message that was not handled stays until the ledger refuses copies as too old: a discarded message
  must not run because its letter is gone.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from faregate.errors import ConfigurationError, check_delay
from faregate.message import set_out_at
from faregate.ports.dead_letter import DeadLetter, DeadStatus
from faregate.ports.store import DeadFilter, Store

DECIDED: tuple[DeadStatus, ...] = ("resolved", "discarded")
_AT_ONCE = 200


@dataclass(frozen=True, slots=True, init=False)
class RetainDead:
    """For how many seconds a bus keeps dead letters, and the folder that they are exported to before they are removed.

    The time counts from the last failure or decision. Only letters with one of these statuses are
    removed; by default those that nobody has to decide about any more.
    """

    seconds: float
    export: Path
    status: tuple[DeadStatus, ...]

    def __init__(
        self, seconds: float | timedelta, *, export: str | Path, status: Sequence[DeadStatus] = DECIDED
    ) -> None:
        object.__setattr__(self, "seconds", check_delay(seconds, "RetainDead(seconds)"))
        object.__setattr__(self, "export", Path(export))
        object.__setattr__(self, "status", check_statuses(status))


def check_statuses(given: Sequence[str]) -> tuple[DeadStatus, ...]:
    known = get_args(DeadStatus)
    if isinstance(given, str) or not given or any(each not in known for each in given):
        raise ConfigurationError(f"status takes some of {', '.join(known)}; got {given!r}")
    return tuple(status for status in known if status in given)


class Pruned(NamedTuple):
    removed: int
    kept: int
    """Old enough, but a copy of the message could still come, or they changed meanwhile."""


async def pages(store: Store, which: DeadFilter) -> AsyncIterator[list[DeadLetter]]:
    """All dead letters that fit, some at a time, oldest last failure first."""
    seen: set[tuple[str, str]] = set()
    limit = _AT_ONCE
    while True:
        found = await store.dead(which, limit)
        fresh = [letter for letter in found if (letter.node, letter.message_id) not in seen]
        if fresh:
            yield fresh
        if len(found) < limit:
            return
        last = found[-1].last_failed_at
        seen = {(letter.node, letter.message_id) for letter in found if letter.last_failed_at == last}
        limit = _AT_ONCE + len(seen)  # or many letters of one moment would fill the page
        which = msgspec.structs.replace(which, since=last)


async def export(stores: Sequence[Store], which: DeadFilter, file: Path) -> int:
    """Write the dead letters that fit to a new file; how many. Raises `ConfigurationError` for one that is there."""
    count = 0
    await asyncio.to_thread(append, file, (), new=True)
    for store in stores:
        async for letters in pages(store, which):
            await asyncio.to_thread(append, file, letters)
            count += len(letters)
    return count


async def prune(store: Store, which: DeadFilter, file: Path) -> Pruned:
    """Export the dead letters that fit to the end of a file, then remove them."""
    floors: dict[str, float | None] = {}
    removed = kept = 0
    async for letters in pages(store, which):
        for node in {letter.node for letter in letters} - floors.keys():
            floors[node] = await store.floor(node)
        going = [letter for letter in letters if _is_over(letter, floors[letter.node])]
        if going:
            await asyncio.to_thread(append, file, going)
            gone = await _remove(store, going)
            removed += gone
            kept += len(going) - gone
        kept += len(letters) - len(going)
    return Pruned(removed, kept)


def _is_over(letter: DeadLetter, floor: float | None) -> bool:
    return letter.status == "resolved" or (floor is not None and set_out_at(letter.envelope) < floor)


async def _remove(store: Store, letters: Sequence[DeadLetter]) -> int:
    async with store.transaction() as transaction:
        return await transaction.remove_dead(letters)


def append(file: Path, letters: Sequence[DeadLetter], *, new: bool = False) -> None:
    """Put dead letters at the end of a file; they are on the disk when it returns. Blocks."""
    _make_folder(file.parent)
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0), 0o600)
    except FileExistsError:
        raise ConfigurationError(f"{file} is there already: name a new file") from None
    with os.fdopen(descriptor, "rb+") as opened:
        end = opened.seek(0, os.SEEK_END)
        lines = [msgspec.json.encode(letter) + b"\n" for letter in letters]
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            lines.insert(0, b"\n")  # a process died while it wrote the line before
        opened.write(b"".join(lines))
        opened.flush()
        os.fsync(descriptor)
    _sync(file.parent)


def _make_folder(folder: Path) -> None:
    """With its parents; durable when it returns."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
