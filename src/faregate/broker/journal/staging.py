"""Between `write` in the tasks and `commit` on the driver: staged files, the batch that names them, and garbage.

    JOURNAL/staging/ORIGIN/BATCH/PARTITION-ATTEMPT-RANDOM.frames        what one attempt of one task wrote
    JOURNAL/spool/spark-ORIGIN-BATCH.PARTITION-ATTEMPT-RANDOM.frames    the same, once it is to be committed
    JOURNAL/spool/spark-ORIGIN-BATCH.batch                              the whole batch: it names them

Rules kept here:
- Every attempt writes under a name of its own: speculation, retries and zombies never touch each other's files.
- A task syncs what it stages, so a commit copies nothing: it moves the files that it names, and then puts the batch
  beside them, at once. Its name is the batch's identity: the journal appends a name once, however often it comes.
- Messages are compressed: each is synced, and read once.
- What nobody commits is collected: with a later commit of the same origin, or by any sink once it is a day old. So are
  files in the spool without a batch of their name. While there is one they stay: another driver may be about to commit
  the same batch. When the journal has appended it, or sets it aside, all of them go with it.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from faregate.broker.journal import dead_letters
from faregate.broker.journal import frame as frames
from faregate.broker.journal.disk import PRIVATE_FOLDER, UNFINISHED, RealDisk, RealFile, give_to_owner, sync_path
from faregate.broker.journal.frame import LARGEST_BATCH, Part
from faregate.broker.journal.layout import BATCH_SUFFIX, PART_SUFFIX, Layout
from faregate.broker.journal.segment import batch_frames
from faregate.broker.journal.spool import MOST_UNPACKED, parts_of
from faregate.columns import body_bytes, pack_batch
from faregate.errors import JournalCorrupt, MessageTooLarge
from faregate.ports.log import Piece, Staged

_FOLDER = "staging"
_FRAME_ROWS = 10_000
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
    """Write what is sealed under a name that no other attempt has; synced when this returns. Leaves nothing behind when
    it fails."""
    path = folder / f"{stem}-{os.urandom(6).hex()}{PART_SUFFIX}"
    file: RealFile | None = None
    count = rows = size = at_byte = 0
    try:
        for piece in _small(pieces):
            kind, body, own_rows, own_size = _described(piece)
            if file is None:
                folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
                file = RealDisk().open(path)
            [frame] = batch_frames([(kind, body, own_rows)], 1)
            at_byte += file.write(at_byte, frame)
            count, rows, size = count + 1, rows + own_rows, size + own_size
        if file is not None:
            file.sync()
    except BaseException:
        remove([path])
        raise
    finally:
        if file is not None:
            file.close()
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
    """Make one batch of what the commit names; durable when this returns. Raises `FileNotFoundError` when another
    driver committed it and collected these files."""
    folder, target = batch_folder(layout, origin, batch), spool_path(layout, origin, batch)
    parts: list[tuple[Path, Part]] = []
    for each in staged:
        if each.name is not None:
            path = staged_path(folder, each.name)
            parts.append((path, Part(f"{target.stem}.{each.name}", each.pieces, _size_of_whole(path, each.pieces))))
    if not parts:
        return
    packed, unpacked = sum(part.bytes for _, part in parts), sum(each.bytes for each in staged)
    if packed > LARGEST_BATCH or unpacked > MOST_UNPACKED:
        raise MessageTooLarge(
            f"a batch of {packed} bytes, {unpacked} unpacked, is more than the journal takes as one, {LARGEST_BATCH} "
            f"and {MOST_UNPACKED}: limit the trigger (maxMessagesPerTrigger)"
        )
    for path, part in parts:
        give_to_owner(path, layout.spool)
        os.utime(path)  # by its age others tell garbage from what is just being committed
        path.rename(layout.spool / part.name)
    sync_path(layout.spool)
    body = msgspec.json.encode([part for _, part in parts])
    [frame] = batch_frames([(frames.PARTS, body, len(parts))], 1)
    RealDisk().replace(target, b"".join(frame))


def discard(layout: Layout, origin: str, batch: int, staged: Iterable[Staged]) -> None:
    """Nobody will commit these; a commit that failed may have moved them."""
    folder, target = batch_folder(layout, origin, batch), spool_path(layout, origin, batch)
    committed = parts_of(target, RealDisk())
    for each in staged:
        if each.name is not None:
            moved = layout.spool / f"{target.stem}.{each.name}"
            remove([staged_path(folder, each.name), *([moved] if moved not in committed else [])])


def _size_of_whole(path: Path, pieces: int) -> int:
    """Of a staged file, after a look at its headers. Its frames have checksums for who reads them."""
    data = RealDisk().view(path)
    at_byte = 0
    for _ in range(pieces):
        frame = frames.read_header(data, at_byte, frames.NO_SEGMENT)
        if frame is None:
            raise JournalCorrupt(f"the staged file {path} is damaged at byte {at_byte}; the batch is not committed")
        at_byte = frame.end
    if at_byte != len(data):
        raise JournalCorrupt(f"the staged file {path} goes on behind byte {at_byte}; the batch is not committed")
    return at_byte


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
    with contextlib.suppress(OSError):
        remove(_nobodys_parts(layout, origin, batch))


def _nobodys_parts(layout: Layout, origin: str, batch: int) -> Iterator[Path]:
    """Files in the spool whose batch was appended, or never came to be; and batches that were never finished."""
    found = list(layout.spool.iterdir())
    batches = {path.stem for path in found if path.suffix == BATCH_SUFFIX}
    # An older program that sets a batch aside leaves these where they are.
    batches |= {name.partition(".")[0] for name in RealDisk().list(layout.quarantine)}
    first, last = spool_path(layout, origin, 0).stem, spool_path(layout, origin, batch).stem
    for path in found:
        stem = path.name.partition(".")[0]
        is_old = path.suffix in (PART_SUFFIX, UNFINISHED) and _last_touched(path) < time.time() - _OLD_SECONDS
        if stem not in batches and (is_old or (path.suffix == PART_SUFFIX and first <= stem <= last)):
            yield path


def _last_touched(path: Path) -> float:
    """Of a file, or of a folder with all that is in it. Now, should it vanish while it is looked at."""
    try:
        return max(each.stat().st_mtime for each in (path, *path.rglob("*")))
    except OSError:
        return time.time()
