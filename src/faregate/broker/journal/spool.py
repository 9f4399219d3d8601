"""The spool: how other processes publish to a journal that one process writes, or leave their dead letters.

Rules kept here:
- A batch is a file of frames, synced and moved in atomically; it is confirmed then. The writer appends it as one atomic
  unit that carries the batch's mark, and removes the file; a file whose mark is in the log already is only removed.
- What many made together lies in files beside the batch, which names them: they are there before it, and go behind it.
- What cannot be taken in holds up none of the others, and is never deleted. A file that is no batch (damaged, too
  large) is set aside in quarantine/. What cannot be read now (also a folder, a link, a pipe) stays, and is tried again
  after a pause that grows up to a minute. Either is told once.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from faregate.broker.journal import frame as frames
from faregate.broker.journal.content import READ_ERRORS, write_rows
from faregate.broker.journal.disk import Disk
from faregate.broker.journal.frame import LARGEST_BATCH
from faregate.broker.journal.layout import BATCH_SUFFIX, Layout, check_meta, is_part
from faregate.broker.journal.scan import NotWhole, sound_frame, walk_batch
from faregate.broker.journal.segment import batch_frames
from faregate.columns import body_bytes, write_envelopes
from faregate.errors import JournalCorrupt, MessageTooLarge, Permanent
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter

_ROWS_PER_FRAME = 10_000
MOST_UNPACKED = 4 << 30
"""Bytes of the bodies in a batch, where they are compressed."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class Spooled(NamedTuple):
    """What is in a batch."""

    envelopes: list[Envelope]
    dead_letters: list[DeadLetter]


def spool(layout: Layout, disk: Disk, envelopes: Sequence[Envelope], name: str | None = None) -> Path:
    """Put a batch where the writer finds it. Returns once it is durable.

    `name` identifies the batch: the same name is the same batch, appended once. Without one it is new.
    """
    count = max(1, -(-len(envelopes) // _ROWS_PER_FRAME))
    stretches = [envelopes[part * _ROWS_PER_FRAME : (part + 1) * _ROWS_PER_FRAME] for part in range(count)]
    bodies = map(_columns if check_meta(layout, disk).version < frames.VERSION else _rows, stretches)
    stem = name or f"{time.time_ns():020d}-{os.getpid()}-{os.urandom(4).hex()}"
    path = layout.spool / f"{stem}{BATCH_SUFFIX}"
    data = b"".join(piece for frame in batch_frames(bodies, count) for piece in frame)
    if len(data) > LARGEST_BATCH:
        raise MessageTooLarge(
            f"{len(envelopes)} messages of {len(data)} bytes are more than the spool takes as one batch, "
            f"{LARGEST_BATCH} bytes: publish them in several"
        )
    disk.replace(path, data)
    return path


def _rows(envelopes: Sequence[Envelope]) -> tuple[int, bytes, int]:
    return frames.ROWS, write_rows(envelopes, [-1] * len(envelopes), by_hand=True), len(envelopes)


def _columns(envelopes: Sequence[Envelope]) -> tuple[int, bytes, int]:
    """For a journal that may be run by a program which knows no rows."""
    topics = [-1] * len(envelopes)
    return frames.COLUMNS, write_envelopes(envelopes, topics, range(len(envelopes)), 0), len(envelopes)


def waiting(layout: Layout, disk: Disk) -> list[Path]:
    """The batches to be appended, oldest first."""
    return layout.files(layout.spool, disk)


def batch_id(path: Path) -> bytes:
    """What identifies a batch in the log."""
    return sha256(path.name.encode()).digest()[:16]


def parts_of(path: Path, disk: Disk) -> list[Path]:
    """The files beside a batch that it names; none when it is not there (any more)."""
    try:
        data = disk.view(path) if disk.is_file(path) else b""
    except OSError:
        return []
    frame = frames.read_header(data, 0, frames.NO_SEGMENT)
    if frame is None or frame.kind != frames.PARTS:  # a batch that holds its messages is not read for this
        return []
    found = sound_frame(data, 0, frames.NO_SEGMENT, len(data))
    return [] if found is None else [path.with_name(each.name) for each in found[1] if is_part(each.name, path.name)]


def remove_batch(path: Path, layout: Layout, disk: Disk) -> None:
    """It is in the log."""
    disk.remove(path, *(layout.parts(path, disk) if parts_of(path, disk) else ()))


def read_spooled(path: Path, disk: Disk) -> Spooled:
    """Raises `JournalCorrupt` for what is not a whole batch, `OSError` for what cannot be read."""
    if not disk.is_file(path):
        raise OSError(errno.EINVAL, "it is no plain file, but a folder, a link or a pipe")
    if disk.size(path) > LARGEST_BATCH:
        raise JournalCorrupt(f"{path} is not a batch: it has more than {LARGEST_BATCH} bytes")
    spooled, unpacked = Spooled([], []), 0
    try:
        for found in walk_batch(path, disk, disk.read):
            if isinstance(found, NotWhole):
                where = "it" if found.path == path else f"{found.path.name} is missing, or"
                raise JournalCorrupt(f"{path} is not a whole batch: {where} is damaged at byte {found.at_byte}")
            frame, content = found
            if frame.kind == frames.DEAD_LETTERS:
                spooled.dead_letters.extend(content)
            else:
                unpacked += body_bytes(content.batch()) if frame.kind == frames.COLUMNS else 0
                if unpacked > MOST_UNPACKED:
                    raise JournalCorrupt(f"{path} is not a batch: its bodies have more than {MOST_UNPACKED} bytes")
                spooled.envelopes.extend(content.all_envelopes())
    except (*READ_ERRORS, ValueError, TypeError, LookupError) as exc:
        raise JournalCorrupt(f"{path} is not a batch: what is in it cannot be read: {exc!r}") from exc
    return spooled


class Intake:
    """The spool as the writer of the journal sees it. `tell` is told, with the file's name, what somebody must know."""

    def __init__(
        self,
        layout: Layout,
        disk: Disk,
        is_appended: Callable[[bytes], bool],
        tell: Callable[[str, str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._disk = disk
        self._is_appended = is_appended
        self._tell = tell
        self._now = now
        self._on_the_way: set[Path] = set()
        self._put_off: dict[Path, tuple[float, float]] = {}
        """What could not be read: when it is tried again, and the pause before that."""

    def oldest(self) -> Path | None:
        """The first batch that waits, but for those that could not be read: of them somebody was told."""
        try:
            return next((path for path in waiting(self._layout, self._disk) if path not in self._put_off), None)
        except OSError:
            return None

    def is_put_off(self, path: Path) -> bool:
        return path in self._put_off

    def look(self) -> list[Path]:
        """The batches that wait, oldest first; each is given out once, until it is `returned`."""
        found = [path for path in self._here() if path not in self._on_the_way and self._is_due(path)]
        self._on_the_way.update(found)
        return found

    def _here(self) -> list[Path]:
        if not self._is_due(self._layout.spool):
            return []
        try:
            here = waiting(self._layout, self._disk)
        except OSError as exc:
            self.put_off(self._layout.spool, exc)
            return []
        if self._put_off:
            self._put_off = {path: pause for path, pause in self._put_off.items() if path in here}
        return here

    def _is_due(self, path: Path) -> bool:
        return path not in self._put_off or self._put_off[path][0] <= self._now()

    def read(self, path: Path) -> Spooled | None:
        """What is in a batch that was given out; None if it is in the log already, or cannot be read: then it has
        returned."""
        try:
            if not self._is_appended(batch_id(path)):
                return read_spooled(path, self._disk)
            remove_batch(path, self._layout, self._disk)
            self.returned(path)
        except FileNotFoundError:
            self.returned(path)
        except JournalCorrupt as exc:
            self._on_the_way.discard(path)
            self.set_aside(path, exc)
        except (OSError, MemoryError) as exc:
            self._on_the_way.discard(path)
            self.put_off(path, exc)
        return None

    def returned(self, path: Path, error: BaseException | None = None) -> None:
        """It is in the log; or it was refused, and is given out again unless it would always be."""
        self._on_the_way.discard(path)
        self._put_off.pop(path, None)
        if isinstance(error, Permanent):
            self.set_aside(path, error)

    def set_aside(self, path: Path, why: BaseException) -> None:
        try:
            place = self._layout.set_aside(path, self._disk)
        except OSError as exc:
            self.put_off(path, exc)
            return
        self._put_off.pop(path, None)
        self._tell(
            path.name,
            f"{why}. Nothing of it was published; it is set aside as {place}. Look who put it there; a batch that was "
            "damaged has to be published again",
        )

    def put_off(self, path: Path, why: BaseException) -> None:
        pause = min(_LONGEST_PAUSE, self._put_off[path][1] * 2) if path in self._put_off else _FIRST_PAUSE
        if path not in self._put_off:
            reason = why.strerror if isinstance(why, OSError) else "there is not enough memory"
            beside = isinstance(why, OSError) and why.filename is not None and Path(why.filename) != path
            where = f" ({why.filename})" if beside else ""  # type: ignore[attr-defined]
            self._tell(
                path.name,
                f"{path} cannot be taken in: {reason}{where}. It stays where it is and is tried again, every "
                f"{_LONGEST_PAUSE:.0f} seconds at last; others go on. Let the user who runs the bus read and move it "
                "(chown), or take it away",
            )
        self._put_off[path] = (self._now() + pause, pause)
