"""An archive as it can be read: which segments it has, and their messages in the order of the log.

Rules kept here:
- Only what a manifest names is read. Pages and footers have checksums, and those are checked: the journal has these
  messages no more. (Files of an older version have none.)
- What is archived stays archived, so it is listed again only when something is asked for that was not there before.
- A segment is read at a time, and of that the files and row groups in which there may be something that is wanted.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from faregate.archive.layout import META, SEGMENTS, VERSION, File, Manifest, Meta, Span, footer_at, span_of
from faregate.archive.target import Target, open_target
from faregate.columns import SCHEMA
from faregate.errors import ArchiveUnavailable, ConfigurationError, NotAnArchive, OffsetGone
from faregate.ports.log import Stretch

_TIME = pa.timestamp("us", tz="UTC")


def open_archive(given: str) -> "Archive":
    """Raises `NotAnArchive`, `ConfigurationError`, `ArchiveUnavailable`."""
    target = open_target(given)
    meta = find_meta(target)
    if meta is None:
        raise NotAnArchive(
            f"there is no archive in {target.shown}: 'faregate journal archive JOURNAL TARGET' makes one of a journal"
        )
    return Archive(target, meta)


def find_meta(target: Target) -> Meta | None:
    """Whose archive it is, once it is clear that this version can read it; None where there is none."""
    data = target.read(META)
    if data is None:
        return None
    try:
        meta = msgspec.json.decode(data, type=Meta)
    except msgspec.MsgspecError as exc:
        raise NotAnArchive(f"{META} in {target.shown} cannot be read: {exc}") from exc
    if meta.format != "faregate-archive":
        raise NotAnArchive(f"{META} in {target.shown} is of something else: its format is {meta.format!r}")
    if meta.version > VERSION:
        raise ConfigurationError(
            f"the archive {target.shown} is written in version {meta.version} of its format and this Faregate reads up "
            f"to {VERSION}: update Faregate"
        )
    return meta


class Archive:
    def __init__(self, target: Target, meta: Meta) -> None:
        self.target = target
        self.meta = meta
        self._spans: list[Span] | None = None
        self._manifests: dict[Span, Manifest] = {}

    # --- where ---------------------------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """What is archived, in order, as it was listed last."""
        return self._spans or self.look()

    def look(self) -> list[Span]:
        """The same, as it is now."""
        found = map(span_of, self.target.names(SEGMENTS))
        self._spans = sorted(span for span in found if span is not None)
        return self._spans

    def at(self, offset: int) -> Span | None:
        """The segment with that offset."""
        return self._at(offset, self.spans()) or self._at(offset, self.look())

    def _at(self, offset: int, spans: Sequence[Span]) -> Span | None:
        found = bisect_right(spans, offset, key=lambda span: span.base) - 1
        return spans[found] if found >= 0 and offset < spans[found].end else None

    def manifest(self, span: Span) -> Manifest:
        if span not in self._manifests:
            data = self.target.read(span.manifest)
            if data is None:
                raise self._gone(span.manifest, span)
            try:
                self._manifests[span] = msgspec.json.decode(data, type=Manifest)
            except msgspec.MsgspecError as exc:
                raise ArchiveUnavailable(f"{span.manifest} in {self.target.shown} cannot be read: {exc}") from exc
        return self._manifests[span]

    def offset_at(self, time: float, before: int) -> int | None:
        """The first offset below `before` that was appended at that time or later; None when there is none."""
        wanted = round(time * 1_000_000)
        spans = self.look()
        first = bisect_left(spans, wanted, key=lambda span: self.manifest(span).last_time)
        for span in spans[first:]:
            if span.base >= before:
                return None
            moment = pc.field("time") >= pa.scalar(wanted, _TIME)
            tables = [self._table(span, file, moment, ["offset"]) for file in self.manifest(span).files]
            offsets = [pc.min(table.column("offset")).as_py() for table in tables if table.num_rows]
            if offsets:
                return min(offsets) if min(offsets) < before else None
        return None

    def stretch(self, span: Span, start: int, end: int) -> Stretch:
        """What is known of these offsets of a segment; nothing, if its manifest is gone: who reads them is told."""
        try:
            found = self.manifest(span)
        except OffsetGone:
            return Stretch(start, end)
        types = sorted({file.type for file in found.files})
        return Stretch(start, end, (found.first_time, found.last_time), types)

    # --- messages ------------------------------------------------------------------------------------------------

    def batches(
        self,
        span: Span,
        start: int,
        end: int,
        *,
        rows: int | None = None,
        types: Sequence[str] = (),
        sources: Sequence[str] = (),
    ) -> Iterator[Any]:
        """Record batches of the messages of a segment from `start` up to, not including, `end`; of these types and
        sources, or of all. Raises `OffsetGone` when files are not there any more."""
        wanted = (pc.field("offset") >= start) & (pc.field("offset") < end)
        if sources:
            wanted &= pc.field("source").isin(list(sources))
        files = [
            file
            for file in self.manifest(span).files
            if file.first < end and file.last >= start and (not types or file.type in types)
        ]
        tables = [self._whole(span, file, wanted) for file in files]
        found = [table for table in tables if table.num_rows]
        if not found:
            return
        table = found[0] if len(found) == 1 else pa.concat_tables(found).sort_by("offset")
        yield from (batch for batch in table.combine_chunks().to_batches(max_chunksize=rows) if batch.num_rows)

    def _whole(self, span: Span, file: File, wanted: Any) -> Any:
        """With the columns of a log: the type stands in the path, and an older version had fewer."""
        table = self._table(span, file, wanted)
        own = {name: table.column(name) for name in table.column_names}
        own["type"] = pa.repeat(pa.scalar(file.type, pa.string()), table.num_rows)
        columns = [own.get(field.name, pa.nulls(table.num_rows, field.type)) for field in SCHEMA]
        return pa.Table.from_arrays(columns, names=SCHEMA.names).cast(SCHEMA)

    def _table(self, span: Span, file: File, wanted: Any, columns: list[str] | None = None) -> Any:
        import pyarrow.parquet as parquet

        place, files = self.target.place(file.path), self.target.files
        try:
            with self.target.available(file.path):
                self._check_footer(file, place)
                return parquet.read_table(
                    place,
                    columns=columns,
                    filesystem=files,
                    filters=wanted,
                    partitioning=None,
                    page_checksum_verification=True,
                )
        except FileNotFoundError as exc:
            raise self._gone(file.path, span) from exc
        except pa.ArrowException as exc:
            raise ArchiveUnavailable(f"{file.path} in {self.target.shown} cannot be read: {exc}") from exc

    def _check_footer(self, file: File, place: str) -> None:
        """What is in a file is found, and passed over, by what its footer says."""
        if file.footer_crc is None:
            return
        with self.target.files.open_input_file(place) as opened:
            size = opened.size()
            begin = footer_at(opened.read_at(8, max(0, size - 8)), size)
            if size != file.bytes or crc32(opened.read_at(size - begin, begin)) != file.footer_crc:
                raise ArchiveUnavailable(
                    f"{file.path} in {self.target.shown} cannot be read: its footer is not the one that was written"
                )

    def _gone(self, what: str, span: Span) -> OffsetGone:
        return OffsetGone(
            f"the messages {span.base} to {span.end - 1} are not in the archive {self.target.shown} any more: somebody "
            f"removed files ({what})"
        )
