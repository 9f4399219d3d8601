"""A consistent copy of a journal, also beside a running writer, and back.

Rules kept here:
- Every message that was confirmed before the copy began is in it. Settlements may be missing: that only delivers again.
- The order of copying sees to it that nothing in the copy speaks of what the copy does not have: the spool before the
  log (a batch is in one of them, and in both it still counts once); positions of readers, the snapshot, then the side
  logs before the high-water mark; segments up to that mark; the topology last, since messages refer to it.
- journal.json comes at the very end, after everything is synced and checked: a copy that was interrupted is no journal.
- What a writer's retention removes meanwhile is not in the copy either.
"""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from faregate.broker.journal import frame as frames
from faregate.broker.journal import settled
from faregate.broker.journal.disk import PRIVATE_FILE, RealDisk, size_of, sync_path
from faregate.broker.journal.findings import Inspection, Progress
from faregate.broker.journal.high_water import HighWater, pack
from faregate.broker.journal.layout import Layout, check_meta
from faregate.broker.journal.lock import lock_holder
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.scan import sound_mark
from faregate.broker.journal.spool import parts_of, waiting
from faregate.broker.journal.verify import inspect
from faregate.errors import ConfigurationError, JournalCorrupt, Transient

_CHUNK = 1 << 20
_TRIES = 20


def copy_journal(
    source: Path,
    target: Path,
    *,
    copying: Progress | None = None,
    checking: Progress | None = None,
    between: Callable[[str], None] | None = None,
) -> Inspection:
    """Copy the journal at `source` into the folder `target`, which is empty or not there; what checking it found.

    `between` is called with the name of each stage before it begins. Raises `JournalNotFound`, `ConfigurationError`
    when there is something at `target`, `JournalCorrupt` when the copy is not sound, which is then taken away again.
    """
    layout = Layout(source)
    check_meta(layout, RealDisk())
    was_there = _check_target(source, target)
    copy = Copy(layout, Layout(target), copying or (lambda done, total: None), between or (lambda stage: None))
    try:
        copy.run()
        found = inspect(target, progress=checking, unfinished_copy=True)
        unsound = [each for each in found.problems if not each.is_content]
        if unsound:
            first = unsound[0]
            where = f"{first.path.relative_to(target)}" + (f" at {first.at_byte}" if first.at_byte is not None else "")
            raise JournalCorrupt(
                f"the copy of {source} is not sound ({where} {first.what}), so it was taken away again: run 'faregate "
                f"journal verify {source}'"
            )
        copy.finish()
    except BaseException:
        _take_away(Layout(target), was_there)
        raise
    found.id = check_meta(Layout(target), RealDisk()).id
    return found


def _check_target(source: Path, target: Path) -> bool:
    if target.exists() and not target.is_dir():
        raise ConfigurationError(f"{target} is a file: name a folder that is empty or does not exist yet")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigurationError(f"{target} is not empty: name a folder that is empty or does not exist yet")
    if source.resolve() in target.resolve().parents:
        raise ConfigurationError(f"{target} lies within the journal {source}: name a folder outside")
    return target.is_dir()


def _take_away(layout: Layout, was_there: bool) -> None:
    """Remove what the copy has made, and nothing else."""
    for folder in (*layout.folders, layout.sinks):
        shutil.rmtree(folder, ignore_errors=True)
    for path in (layout.meta, layout.high_water, layout.snapshot, layout.topology):
        path.unlink(missing_ok=True)
    if not was_there:
        with contextlib.suppress(OSError):
            layout.root.rmdir()


class Copy:
    def __init__(self, source: Layout, target: Layout, progress: Progress, between: Callable[[str], None]) -> None:
        self._from = source
        self._to = target
        self._disk = RealDisk()
        self._progress = progress
        self._between = between
        self._done = 0
        self._total = 0

    def run(self) -> None:
        for folder in (self._to.root, *self._to.folders):
            self._disk.make_folder(folder)
        self._total = self._from.bytes(self._disk)
        self._between("sinks")  # first: of each batch that they speak of, the copy has what follows
        for name in self._disk.list(self._from.sinks):
            self._disk.make_folder(self._to.sinks)
            self._file(self._from.sinks / name, self._to.sinks / name)
        self._between("spool")
        for batch in waiting(self._from, self._disk):
            for path in (*parts_of(batch, self._disk), batch):
                self._file(path, self._to.spool / path.name)
        self._between("readers")
        for path in self._from.files(self._from.readers, self._disk):
            self._file(path, self._to.readers / path.name)
        self._between("snapshot")
        self._file(self._from.snapshot, self._to.snapshot)
        self._between("settled")
        for path in self._from.files(self._from.settled, self._disk):
            self._file(path, self._to.settled / path.name, settled.whole(size_of(path, self._disk)))
        self._between("segments")
        mark = self._segments()
        self._between("topology")
        self._file(self._from.topology, self._to.topology)
        self._disk.replace(self._to.high_water, pack(mark))
        for folder in (*self._to.folders, self._to.sinks, self._to.root):
            if folder.is_dir():
                sync_path(folder)

    def finish(self) -> None:
        """From now on it is a journal."""
        self._disk.replace(self._to.meta, self._disk.read(self._from.meta))

    def _segments(self) -> HighWater:
        """Copy the segments up to the mark. When retention takes one away meanwhile, look again what there is."""
        copied: set[int] = set()
        for _ in range(_TRIES):
            mark, sealed = self._mark()
            bases = [base for base in self._from.segment_bases(self._disk) if base <= mark.segment]
            for base in copied - set(bases):
                self._to.segment(base).unlink()
            copied &= set(bases)
            if self._copy_all(bases, copied, mark, sealed):
                return mark
        raise Transient(f"retention removed segments of {self._from.root} faster than they could be copied: try again")

    def _copy_all(self, bases: list[int], copied: set[int], mark: HighWater, sealed: bool) -> bool:
        for base in bases:
            whole = base != mark.segment or sealed
            path, target = self._from.segment(base), self._to.segment(base)
            if base not in copied and not self._file(path, target, None if whole else mark.at_byte):
                return False
            if not whole and self._was_sealed(target):  # meanwhile: the mark is not of what was copied
                return False
            if whole:
                copied.add(base)
        return True

    def _was_sealed(self, copy: Path) -> bool:
        header = frames.read_segment_header(self._disk.read(copy, 0, frames.SEGMENT_BYTES))
        return header is not None and header.form == frames.SEALED

    def _mark(self) -> tuple[HighWater, bool]:
        """What is confirmed, and whether the segment there is sealed.

        The mark of a journal that nobody writes to may be older than its frames: then these are asked.
        """
        if lock_holder(self._from.root) is None:
            return sound_mark(self._from, self._disk)
        return JournalReader(self._from.root).high_water(), False

    def _file(self, path: Path, target: Path, size: int | None = None) -> bool:
        """Copy a file, or its first bytes, synced; False when it is not there (any more), or is no plain file."""
        try:
            if not self._disk.is_file(path):
                return False
            source = path.open("rb")
        except FileNotFoundError:
            return False
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        with source, os.fdopen(os.open(target, flags, PRIVATE_FILE), "wb") as copy:
            left = os.fstat(source.fileno()).st_size if size is None else size
            while left > 0:
                chunk = source.read(min(_CHUNK, left))
                if not chunk:
                    break
                copy.write(chunk)
                left -= len(chunk)
                self._done += len(chunk)
                self._progress(self._done, max(self._total, self._done))
            copy.flush()
            os.fsync(copy.fileno())
        return True
