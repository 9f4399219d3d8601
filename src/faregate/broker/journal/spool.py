"""The spool: how other processes publish to a journal that one process writes, or bury what they give up on.

A batch is a file of frames, synced and moved in atomically; it is confirmed then. The writer appends it as one atomic
unit that carries the batch's mark, and removes the file; a file whose mark is in the log already is only removed.
"""

import os
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import msgspec

from faregate.broker.journal import frame as frames
from faregate.broker.journal.columns import read_batch, to_batch, to_envelopes, write_batch
from faregate.broker.journal.disk import Disk
from faregate.broker.journal.errors import JournalCorrupt
from faregate.broker.journal.frame import FRAME_BYTES
from faregate.broker.journal.layout import BATCH_SUFFIX, Layout
from faregate.message import Envelope
from faregate.ports.queue import Poisoned

_ROWS_PER_FRAME = 10_000


class Spooled(NamedTuple):
    """What is in a batch."""

    envelopes: list[Envelope]
    poison: list[Poisoned]


def spool(layout: Layout, disk: Disk, envelopes: Sequence[Envelope], name: str | None = None) -> Path:
    """Put a batch where the writer finds it. Returns once it is durable.

    `name` identifies the batch: the same name is the same batch, appended once. Without one it is new.
    """
    pieces: list[bytes] = []
    previous = 0
    count = max(1, -(-len(envelopes) // _ROWS_PER_FRAME))
    for part in range(count):
        rows = envelopes[part * _ROWS_PER_FRAME : (part + 1) * _ROWS_PER_FRAME]
        body = write_batch(to_batch(rows, [-1] * len(rows), range(len(rows)), 0))
        header, padding, previous = frames.pack_frame(
            body,
            kind=frames.MESSAGES,
            previous=previous,
            rows=len(rows),
            commit=0,
            base=0,
            time=0,
            epoch=0,
            part=part,
            parts=count,
        )
        pieces += [header, bytes(body), padding]
    stem = name or f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(4).hex()}"
    path = layout.spool / f"{stem}{BATCH_SUFFIX}"
    disk.replace(path, b"".join(pieces))
    return path


def waiting(layout: Layout, disk: Disk) -> list[Path]:
    """The batches to be appended, oldest first."""
    names = disk.list(layout.spool)
    return [layout.spool / name for name in names if name.endswith(BATCH_SUFFIX) and not name.startswith(".")]


def mark_of(path: Path) -> bytes:
    """What identifies a batch in the log."""
    return sha256(path.name.encode()).digest()[:16]


def read_spooled(path: Path, disk: Disk) -> Spooled:
    """Raises `JournalCorrupt` when the batch is not whole."""
    data = disk.read(path)
    found = Spooled([], [])
    position = previous = part = 0
    parts = 1
    while part < parts:
        frame = frames.read_header(data, position, 0) if len(data) >= position + FRAME_BYTES else None
        if frame is None or frame.part != part or frame.previous != previous or not frames.is_sound(data, frame):
            raise JournalCorrupt(f"{path} is not a whole batch: it is damaged at position {position}")
        body = frames.body_of(data, frame)
        if frame.kind == frames.POISON:
            found.poison.extend(msgspec.msgpack.decode(body, type=list[Poisoned]))
        else:
            found.envelopes.extend(to_envelopes(read_batch(body)))
        position, previous, parts, part = frame.end, frame.crc, frame.parts, part + 1
    return found
