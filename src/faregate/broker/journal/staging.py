"""Between `write` in the tasks and `commit` on the driver: staged files, the spool file made of them, and garbage.

    JOURNAL/staging/ORIGIN/BATCH/PARTITION-ATTEMPT-RANDOM.frames     what one attempt of one task wrote
    JOURNAL/spool/spark-ORIGIN-BATCH.batch                           the whole batch, atomically

Rules kept here:
- Every attempt writes under a name of its own: speculation, retries and zombies never touch each other's files.
- Only what the commit names goes into the batch; it is one file, synced, then moved into the spool. Its name is the
  batch's identity: the journal appends a name once, however often it comes.
- Messages are compressed: each is copied and synced, and read once.
- Staged files need not survive a crash, so they are not synced. What nobody commits is collected: with a later commit
  of the same origin, or by any sink once it is a day old.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from faregate.broker.journal import dead_letters
from faregate.broker.journal import frame as frames
from faregate.broker.journal.disk import PRIVATE_FOLDER, RealDisk
from faregate.broker.journal.layout import BATCH_SUFFIX, Layout
from faregate.broker.journal.segment import batch_frames
from faregate.broker.journal.spool import LARGEST_BATCH, MOST_UNPACKED
from faregate.columns import body_bytes, pack_batch
from faregate.errors import JournalCorrupt, MessageTooLarge
from faregate.ports.log import Piece, Staged

T = TypeVar("T")
_FOLDER = "staging"
_FRAME_ROWS = 10_000
_MOST_PARTS = 0xFFFF
"""A frame counts its batch's parts in two bytes."""
_OLD_SECONDS = 24 * 3600.0
_FILE = re.compile(r"[0-9]{6}-[0-9]+-[0-9a-f]{12}\.frames")
_SAFE = re.compile(r"[A-Za-z0-9-]{1,100}")


def batch_folder(layout: Layout, origin: str, batch: int) -> Path:
    """Where the attempts of one batch stage. `origin` is a query's id, or a write's."""
    if not _SAFE.fullmatch(origin):
        raise ValueError(f"{origin!r} is not the id of a query or a write")
    return layout.root / _FOLDER / origin / f"{batch:020d}"


def staged_path(folder: Path, name: str) -> Path:
    """A file of another folder is none: the name comes through Spark."""
    if not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a staged file")
    return folder / name


def stage(folder: Path, stem: str, pieces: Iterable[Piece]) -> Staged:
    """Write what is sealed under a name that no other attempt has. Leaves nothing behind when it fails."""
    path = folder / f"{stem}-{os.urandom(6).hex()}.frames"
    count = rows = size = 0
    try:
        for piece in _small(pieces):
            if not count:
                folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            kind, body, own_rows, own_size = _described(piece)
            with path.open("ab") as file:
                file.writelines(*batch_frames([(kind, body, own_rows)], 1))
            count, rows, size = count + 1, rows + own_rows, size + own_size
    except BaseException:
        remove([path])
        raise
    return Staged(path.name if count else None, count, rows, size)


def _small(pieces: Iterable[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        if isinstance(piece, list):
            yield piece
        else:
            for start in range(0, piece.num_rows, _FRAME_ROWS):
                yield piece.slice(start, _FRAME_ROWS)


def _described(piece: Piece) -> tuple[int, Any, int, int]:
    """Which kind of frame, its body, how many rows, and the bytes of the messages' bodies."""
    if isinstance(piece, list):
        size = sum(len(each.envelope.body) for each in piece)
        return frames.DEAD_LETTERS, dead_letters.encode(piece), len(piece), size
    return frames.COLUMNS, pack_batch(piece), piece.num_rows, body_bytes(piece)


def spool_path(layout: Layout, origin: str, batch: int) -> Path:
    """Names of one origin sort by batch, which is the order the journal takes them in."""
    return layout.spool / f"spark-{origin}-{batch:020d}{BATCH_SUFFIX}"


def move_into_spool(layout: Layout, origin: str, batch: int, staged: Sequence[Staged]) -> None:
    """Make one spool file of what the commit names; durable when this returns. Raises `FileNotFoundError` when another
    driver committed the batch and collected its files."""
    parts = sum(each.pieces for each in staged)
    if not parts:
        return
    if parts > _MOST_PARTS:
        raise MessageTooLarge(
            f"a batch of {sum(each.rows for each in staged)} messages in {parts} pieces is more than the journal takes "
            "as one; limit the trigger (maxMessagesPerTrigger), or use fewer partitions"
        )
    disk = RealDisk()
    folder = batch_folder(layout, origin, batch)
    files = [(staged_path(folder, each.name), each.pieces) for each in staged if each.name is not None]
    whole = folder / f"commit-{os.urandom(6).hex()}{BATCH_SUFFIX}"
    file = disk.create(whole, 0)
    try:
        at_byte = 0
        bodies = (body for path, pieces in files for body in _staged_frames(disk, path, pieces))
        for frame in batch_frames(_ahead(bodies), parts):
            at_byte += file.write(at_byte, frame)
        unpacked = sum(each.bytes for each in staged)
        if at_byte > LARGEST_BATCH or unpacked > MOST_UNPACKED:
            raise MessageTooLarge(
                f"a batch of {at_byte} bytes, {unpacked} unpacked, is more than the journal takes as one, "
                f"{LARGEST_BATCH} and {MOST_UNPACKED}: limit the trigger (maxMessagesPerTrigger)"
            )
        file.sync()
    except BaseException:
        file.close()
        remove([whole])
        raise
    file.close()
    disk.rename(whole, spool_path(layout, origin, batch))


def _ahead(bodies: Iterator[T]) -> Iterator[T]:
    """The same; the next one is checked while one is written. A checksum and a write let other threads run."""
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, bodies, None)
        while (body := following.result()) is not None:
            following = thread.submit(next, bodies, None)
            yield body


def _staged_frames(disk: RealDisk, path: Path, pieces: int) -> Iterator[tuple[int, memoryview, int]]:
    data = disk.view(path)
    at_byte = 0
    for _ in range(pieces):
        frame = frames.read_header(data, at_byte, 0)
        if frame is None or not frames.is_sound(data, frame):
            raise JournalCorrupt(f"the staged file {path} is damaged at byte {at_byte}; the batch is not committed")
        yield frame.kind, frames.body_of(data, frame), frame.rows
        at_byte = frame.end


# --- garbage ----------------------------------------------------------------------------------------------


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def collect_garbage(layout: Layout, origin: str, batch: int) -> None:
    """Drop what was staged for this batch and those before it, and what any dead sink left a day ago. Never raises:
    garbage is no reason to fail what is committed."""
    with contextlib.suppress(OSError):
        own = batch_folder(layout, origin, batch)
        for folder in own.parent.iterdir():
            if folder.name <= own.name:
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            own.parent.rmdir()
        for other in (layout.root / _FOLDER).iterdir():
            if _last_touched(other) < time.time() - _OLD_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def _last_touched(folder: Path) -> float:
    """Now, should it vanish while it is looked at."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return time.time()
