"""The log view of a journal as a Parquet file, row group by row group: memory stays flat however long the log.

The file is there as a whole or not at all: it is written beside its place, synced, and renamed.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from faregate.broker.journal.disk import replacing
from faregate.broker.journal.reader import JournalReader
from faregate.columns import SCHEMA
from faregate.errors import ConfigurationError

_ROWS = 100_000
_BYTES = 32 * 1024 * 1024
"""What a row group holds at the most, roughly."""


class Exported(NamedTuple):
    rows: int
    row_groups: int
    bytes: int
    start: int
    end: int


def export_parquet(
    reader: JournalReader,
    target: Path,
    *,
    start: int | None = None,
    end: int | None = None,
    types: Sequence[str] = (),
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the messages from offset `start` up to, not including, `end`; of these types, or of all.

    Raises `ConfigurationError` when the file is there already, `OffsetGone`, `JournalCorrupt`.
    """
    import pyarrow.parquet as parquet

    if target.is_dir() or (target.exists() and not overwrite):
        raise ConfigurationError(
            f"{target} is a folder: name a file" if target.is_dir() else f"{target} is there already: use --force"
        )
    if not target.parent.is_dir():
        raise ConfigurationError(f"there is no folder {target.parent} to write {target.name} to: make it first")
    latest = reader.latest()
    first = reader.earliest() if start is None else start
    last = latest if end is None else min(end, latest)
    schema = SCHEMA.with_metadata(
        {"faregate.journal": reader.meta.id, "faregate.start": str(first), "faregate.end": str(max(first, last))}
    )
    rows = groups = 0
    batches = _progressing(reader.batches(first, max(first, last), rows=_ROWS), first, last, progress)
    with replacing(target) as file, parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for group in _groups(batches, types):
            writer.write_table(group.replace_schema_metadata(schema.metadata), row_group_size=group.num_rows)
            rows += group.num_rows
            groups += 1
    return Exported(rows, groups, target.stat().st_size, first, max(first, last))


def of_types(batch: Any, types: Sequence[str]) -> Any:
    """The rows of these types; all when none are named."""
    if not types:
        return batch
    return batch.filter(pc.is_in(batch.column("type"), pa.array(types, pa.string())))


def _progressing(
    batches: Iterator[Any], first: int, last: int, progress: Callable[[int, int], None] | None
) -> Iterator[Any]:
    for batch in batches:
        yield batch
        if progress is not None and batch.num_rows:
            progress(batch.column("offset")[-1].as_py() + 1 - first, last - first)


def _groups(batches: Iterator[Any], types: Sequence[str]) -> Iterator[Any]:
    """Batches joined to row groups."""
    kept: list[Any] = []
    rows = size = 0
    for batch in batches:
        batch = of_types(batch, types)
        if not batch.num_rows:
            continue
        if kept and (rows + batch.num_rows > _ROWS or size + batch.nbytes > _BYTES):
            yield pa.Table.from_batches(kept)
            kept, rows, size = [], 0, 0
        kept.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
    if kept:
        yield pa.Table.from_batches(kept)
