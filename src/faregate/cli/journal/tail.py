"""`faregate journal tail`: the last messages of a journal, a line or two each, and those that come."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from rich.text import Text

from faregate.broker.journal.export import of_types
from faregate.broker.journal.reader import JournalReader
from faregate.cli.output import console, print_json, say
from faregate.plain import plain
from faregate.units import iso

_POLL_SECONDS = 0.1
_PREVIEW_BYTES = 4096
_PIPED_PREVIEW = 200
_MOST_ROWS = 1000


class TailLine(msgspec.Struct):
    """One message as tail shows it."""

    offset: int
    time: str
    type: str
    kind: str
    source: str
    destination: str | None
    key: str | None
    publication_id: str
    correlation_id: str | None
    content_type: str | None
    content_encoding: str | None
    payload_bytes: int
    payload: str | None
    """The beginning of it, when it is text."""
    payload_cut: bool


_COLUMNS = TailLine.__struct_fields__[: TailLine.__struct_fields__.index("payload_bytes")]
"""What stands in the journal under the same name."""


def last_lines(reader: JournalReader, count: int, types: Sequence[str], end: int) -> list[TailLine]:
    """The last messages before an offset: searched from the end, in growing windows."""
    found: deque[TailLine] = deque()
    earliest = min(reader.earliest(), end)
    width = max(count, 100)
    while end > earliest and len(found) < count:
        start = max(earliest, end - width)
        newest: deque[TailLine] = deque(maxlen=count - len(found))
        for line in lines(reader, start, end, types):
            newest.append(line)
        found.extendleft(reversed(newest))
        end, width = start, width * 2
    return list(found)


def lines(reader: JournalReader, start: int, end: int, types: Sequence[str]) -> Iterator[TailLine]:
    for batch in reader.batches(start, end, rows=_MOST_ROWS):
        batch = of_types(batch, types)
        columns = [batch.column(name) for name in _COLUMNS]
        columns[1] = columns[1].cast(pa.int64())
        payload = batch.column("payload")
        sizes = pc.fill_null(pc.binary_length(payload), 0).to_pylist()
        previews = pc.binary_slice(payload, 0, _PREVIEW_BYTES).to_pylist()
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        for (offset, moment, *rest), size, preview in zip(rows, sizes, previews, strict=True):
            text = None if rest[-1] else _text(preview or b"", cut=size > _PREVIEW_BYTES)
            fields = (offset, iso(moment / 1_000_000), *rest, size, text, size > _PREVIEW_BYTES)
            yield TailLine(*fields)


def _text(data: bytes, *, cut: bool) -> str | None:
    for dropped in range(4 if cut else 1):  # a cut may go through a character
        try:
            return data[: len(data) - dropped].decode()
        except UnicodeDecodeError:
            continue
    return None


def tail_journal(reader: JournalReader, count: int, types: Sequence[str], *, follow: bool, as_json: bool) -> None:
    """Print the last messages and, when asked to follow, those that come, until interrupted."""
    shown = reader.latest()
    for line in last_lines(reader, count, types, shown):
        print_line(line, as_json=as_json)
    sys.stdout.flush()
    while follow:
        latest = reader.latest()
        if latest > shown:
            for line in lines(reader, shown, latest, types):
                print_line(line, as_json=as_json)
            sys.stdout.flush()
            shown = latest
        time.sleep(_POLL_SECONDS)


def print_line(line: TailLine, *, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.to_builtins(line))
        return
    head = Text.assemble(
        (f"{line.offset}", "cyan"),
        "  ",
        line.time.replace("T", " "),
        "  ",
        (plain(line.type), "bold"),
        f"  {plain(line.source)}",
        f" to {plain(line.destination)}" if line.destination else "",
        (f"  key {plain(line.key)}" if line.key is not None else "", "green"),
        (f"  {plain(line.publication_id)}", "dim"),
    )
    room = max(20, console.width - 4) if console.is_terminal else _PIPED_PREVIEW
    preview = _preview(line, room)
    if console.is_terminal:
        say(head)
        say(f"    {preview}", "dim")
    else:
        say(head + Text(f"  {preview}"))


def _preview(line: TailLine, room: int) -> str:
    if line.payload is None:
        kind = " ".join(filter(None, (line.content_encoding, line.content_type or "bytes")))
        return f"<{line.payload_bytes:,} bytes of {kind}>"
    text = plain(line.payload[: room + 1])
    return text if len(text) <= room and not line.payload_cut else text[: room - 1] + "…"
