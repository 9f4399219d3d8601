"""Archiving a journal: full segments as Parquet, by day and type, before retention removes them.

Rules kept here:
- The archive is a named reader of the journal. It is registered before anything is archived, and moved on when a
  segment's manifest is durable: retention never removes what is not archived.
- Files first, the manifest last. Every file is there as a whole or not at all: in a folder it is written aside, synced
  and renamed; an object of S3 appears with its last byte.
- A run begins behind the last manifest. What a run that was killed has left is written again, under the same names.
- Segments that are archived follow each other without a hole, unless the caller allows one.
- The archive has what the log view has: messages. Dead letters are not part of it; retention keeps those that wait.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from faregate.archive.layout import META, OWN, File, Manifest, Meta, Span, file_path, footer_at
from faregate.archive.reading import Archive, find_meta
from faregate.archive.target import Target, open_target
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.frame import Footer
from faregate.broker.journal.reader import JournalReader
from faregate.columns import SCHEMA
from faregate.errors import ArchiveUnavailable, JournalCorrupt, JournalLocked, NotAnArchive, OffsetGone

_ROWS = 20_000
_BYTES = 32 * 1024 * 1024
"""What a row group holds at the most, roughly."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = 24 * 3600 * 1_000_000
_STORED = SCHEMA.remove(SCHEMA.get_field_index("type"))


class Archived(NamedTuple):
    """What a run did, and what the archive has now."""

    reader: str
    segments: int
    messages: int
    files: int
    bytes: int
    start: int
    end: int
    """The offsets in the archive: the first, and the one behind the last."""
    left: int
    """How many offsets of the journal follow: its segment is still written to."""


def archive_journal(
    root: Path, given: str, *, allow_gap: bool = False, progress: Callable[[int, int], None] | None = None
) -> Archived:
    """Archive every full segment that is not archived yet.

    Raises `NotAnArchive` when something else is at the target, `OffsetGone` when messages were removed before they were
    archived, `JournalLocked` while another run is at work, `ArchiveUnavailable`, and what reading a journal raises.
    """
    reader = JournalReader(root)
    target = open_target(given)
    with _alone(reader):
        archive = Archive(target, _prepare(target, reader))
        return Archiver(reader, archive).run(allow_gap, progress or (lambda done, total: None))


class Archiver:
    def __init__(self, reader: JournalReader, archive: Archive) -> None:
        self._reader = reader
        self._archive = archive
        self._target = archive.target
        self._name = archive.meta.reader_name

    def run(self, allow_gap: bool, progress: Callable[[int, int], None]) -> Archived:
        spans = self._archive.look()
        begin = spans[-1].end if spans else self._reader.earliest()
        # Registered first: from then on, what there is stays.
        self._reader.save_reader_offset(self._name, min(begin, self._reader.earliest()))
        begin = spans[-1].end if spans else self._reader.earliest()
        todo = self._todo(begin, allow_gap)
        self._reader.save_reader_offset(self._name, begin)  # which a run that was killed may have left to do
        done: list[Manifest] = []
        for footer in todo:
            done.append(self._archive_segment(footer))
            self._reader.save_reader_offset(self._name, footer.end)
            progress(footer.end - begin, todo[-1].end - begin)
        spans = self._archive.look()
        end = spans[-1].end if spans else begin
        files = [file for manifest in done for file in manifest.files]
        return Archived(
            reader=self._name,
            segments=len(done),
            messages=sum(manifest.messages for manifest in done),
            files=len(files),
            bytes=sum(file.bytes for file in files),
            start=spans[0].base if spans else begin,
            end=end,
            left=max(0, self._reader.latest() - end),
        )

    def _footers(self) -> list[Footer]:
        """Of the full segments of the log view, in order."""
        found = []
        for base in self._reader.layout.segment_bases(RealDisk()):
            footer = self._reader.footer(base)
            if footer is None:
                break
            if not footer.compacted:
                found.append(footer)
        return found

    def _todo(self, begin: int, allow_gap: bool) -> list[Footer]:
        """Those behind what is archived. Raises when they do not follow it."""
        footers, earliest = self._footers(), self._reader.earliest()
        if begin > earliest:
            self._check_same(next((footer for footer in footers if footer.end == begin), None), begin)
        if begin < earliest and not allow_gap:
            raise OffsetGone(
                f"the messages from {begin} to {earliest - 1} were removed from {self._reader.layout.root} before they "
                f"were archived in {self._target.shown}: the reader {self._name} was forgotten, or the archive is an "
                "older copy. --allow-gap goes on behind them; who reads them from the archive is told that they are "
                "lost"
            )
        return [footer for footer in footers if footer.base >= begin]

    def _check_same(self, last: Footer | None, begin: int) -> None:
        """The segment that was archived last is the same on both sides; but a repair may have changed it since."""
        if last is None:
            raise self._another_history(f"it goes up to offset {begin}, where no segment of the journal ends")
        span = self._archive.at(last.base)
        if not last.lost and (span is None or _facts(self._archive.manifest(span)) != _facts(last)):
            raise self._another_history(f"its messages from {last.base} to {begin - 1} are not those of the journal")

    def _another_history(self, why: str) -> NotAnArchive:
        return NotAnArchive(
            f"{self._target.shown} does not fit {self._reader.layout.root}: {why}. The journal was restored from an "
            "older state and has gone on since: archive it to another place"
        )

    def _archive_segment(self, footer: Footer) -> Manifest:
        parts: dict[tuple[int, str], _Part] = {}
        for batch in self._reader.batches(footer.base, footer.end):
            for key, piece in _by_day_and_type(batch):
                parts.setdefault(key, _Part()).add(piece)
        rows = sum(part.rows for part in parts.values())
        if rows != footer.messages:
            raise JournalCorrupt(
                f"{self._reader.layout.segment(footer.base)} has {rows} messages, and its footer says "
                f"{footer.messages}: run 'faregate journal verify'"
            )
        files = [self._write(footer.base, *key, part) for key, part in sorted(parts.items())]
        manifest = Manifest(*_facts(footer), files)
        self._commit(manifest)
        return manifest

    def _write(self, base: int, day: int, type: str, part: "_Part") -> File:
        date = (_EPOCH + timedelta(days=day)).date().isoformat()
        path = file_path(self._archive.meta.log, base, date, type)
        data = part.end()
        put(self._target, path, data)
        footer = data[footer_at(data[-8:], len(data)) :]
        return File(path, type, part.first, part.last, part.rows, len(data), crc32(footer))

    def _commit(self, manifest: Manifest) -> None:
        """From here on the segment is archived."""
        put(self._target, Span(manifest.base, manifest.end).manifest, msgspec.json.encode(manifest))


def put(target: Target, name: str, data: bytes) -> None:
    """Durable when it returns; after a crash the file is there as a whole or not at all, or is the one before."""
    with target.available():
        if target.folder is not None:
            path, disk = target.folder / name, RealDisk()
            for folder in reversed([path.parent, *path.parent.parents]):
                disk.make_folder(folder)  # one by one: each new entry is synced
            disk.replace(path, data)
            return
        with target.files.open_output_stream(target.place(name)) as stream:
            stream.write(data)
        size = target.files.get_file_info(target.place(name)).size
        if size != len(data):
            raise ArchiveUnavailable(f"{name} in {target.shown} has {size} bytes instead of {len(data)}: run it again")


def _facts(of: Footer | Manifest) -> tuple[int, int, int, int, int]:
    return of.base, of.end, of.first_time, of.last_time, of.messages


def _prepare(target: Target, reader: JournalReader) -> Meta:
    """Begin an archive, or check that what is there is this journal's."""
    root, log = reader.layout.root.absolute(), reader.meta.id
    if target.folder is not None and target.folder.resolve().is_relative_to(root.resolve()):
        raise NotAnArchive(f"{target.shown} lies within the journal {root}: choose a place outside")
    meta = find_meta(target)
    if meta is None:
        if set(target.names()) - {OWN}:
            raise NotAnArchive(f"{target.shown} has files but no {META}, so it is no archive: choose an empty place")
        put(target, META, msgspec.json.encode(Meta(log=log, id=os.urandom(4).hex())))
        meta = find_meta(target)
        assert meta is not None
    if meta.log != log:
        raise NotAnArchive(
            f"{target.shown} is the archive of the journal {meta.log}, and {root} is the journal {log}: each journal "
            "needs an archive of its own"
        )
    return meta


@contextmanager
def _alone(reader: JournalReader) -> Iterator[None]:
    """One run at a time: the lock is on the folder of the readers, of which the archive is one."""
    descriptor = os.open(reader.layout.readers, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalLocked(f"another process archives {reader.layout.root}: wait until it is done") from None
        yield
    finally:
        os.close(descriptor)


class _Part:
    """The messages of one day and type, on their way into a Parquet file in memory."""

    def __init__(self) -> None:
        import pyarrow.parquet as parquet

        self._file = pa.BufferOutputStream()
        self._writer = parquet.ParquetWriter(self._file, _STORED, compression="zstd", write_page_checksum=True)
        self._waiting: list[Any] = []
        self._waiting_rows = self._waiting_bytes = 0
        self.rows = 0
        self.first = self.last = -1

    def add(self, batch: Any) -> None:
        offsets = batch.column("offset")
        self.first = self.first if self.rows else offsets[0].as_py()
        self.last = offsets[-1].as_py()
        self.rows += batch.num_rows
        self._waiting.append(batch.drop_columns(["type"]))
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        if self._waiting_rows >= _ROWS or self._waiting_bytes >= _BYTES:
            self._flush()

    def end(self) -> bytes:
        self._flush()
        self._writer.close()
        data: bytes = self._file.getvalue().to_pybytes()
        return data

    def _flush(self) -> None:
        if self._waiting:
            group = pa.Table.from_batches(self._waiting, _STORED)
            self._writer.write_table(group, row_group_size=group.num_rows)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0


def _by_day_and_type(batch: Any) -> Iterator[tuple[tuple[int, str], Any]]:
    for day, of_day in _by(batch, pc.divide(batch.column("time").view(pa.int64()), _DAY)):
        for type, piece in _by(of_day, of_day.column("type")):
            yield (day, type), piece


def _by(batch: Any, values: Any) -> Iterator[tuple[Any, Any]]:
    """The rows of each value, in their order."""
    found = pc.unique(values).to_pylist()
    for value in found:
        yield value, batch if len(found) == 1 else batch.filter(pc.equal(values, value))
