"""`faregate journal tail`: the last messages of a journal, a line or two each, and those that come."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.text import Text

from faregate.broker.journal.export import of_types
from faregate.broker.journal.reader import JournalReader
from faregate.cli.output import console, print_json, say
from faregate.cli.table import room
from faregate.plain import plain
from faregate.units import iso

_POLL_SECONDS = 0.1
_PREVIEW_BYTES = 4096
_PIPED_PREVIEW = 200
_MOST_ROWS = 1000
_COLUMNS = (
    *("offset", "time", "type", "kind", "source", "destination", "key"),
    *("publication_id", "correlation_id", "content_type", "content_encoding"),
)


Line = dict[str, Any]
"""One message as tail shows it: `_COLUMNS`, then the size of its payload and, when that is text, how it begins."""


def last_lines(reader: JournalReader, count: int, types: Sequence[str], end: int) -> list[Line]:
    """The last messages before an offset: searched from the end, in growing windows."""
    found: deque[Line] = deque()
    earliest = min(reader.earliest(), end)
    width = max(count, 100)
    while end > earliest and len(found) < count:
        start = max(earliest, end - width)
        newest: deque[Line] = deque(maxlen=count - len(found))
        for line in lines(reader, start, end, types):
            newest.append(line)
        found.extendleft(reversed(newest))
        end, width = start, width * 2
    return list(found)


def lines(reader: JournalReader, start: int, end: int, types: Sequence[str]) -> Iterator[Line]:
    for batch in reader.batches(start, end, rows=_MOST_ROWS):
        batch = of_types(batch, types)
        columns = [batch.column(name) for name in _COLUMNS]
        columns[1] = columns[1].cast(pa.int64())
        payload = batch.column("payload")
        sizes = pc.fill_null(pc.binary_length(payload), 0).to_pylist()
        previews = pc.binary_slice(payload, 0, _PREVIEW_BYTES).to_pylist()
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        for row, size, preview in zip(rows, sizes, previews, strict=True):
            line, cut = dict(zip(_COLUMNS, row, strict=True)), size > _PREVIEW_BYTES
            text = None if line["content_encoding"] else _text(preview or b"", cut=cut)
            told = {"payload_bytes": size, "payload": text, "payload_cut": cut}
            yield {**line, "time": iso(line["time"] / 1_000_000), **told}


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


def print_line(line: Line, *, as_json: bool) -> None:
    if as_json:
        print_json(line)
        return
    head = Text.assemble(
        (f"{line['offset']}", "cyan"),
        "  ",
        line["time"].replace("T", " "),
        "  ",
        (plain(line["type"]), "bold"),
        f"  {plain(line['source'])}",
        f" to {plain(line['destination'])}" if line["destination"] else "",
        (f"  key {plain(line['key'])}" if line["key"] is not None else "", "green"),
    )
    publication = Text(plain(line["publication_id"]), "dim")
    width = room()
    if width is None:
        say(head + Text("  ") + publication + Text(f"  {_preview(line, _PIPED_PREVIEW)}"))
        return
    whole = head + Text("  ") + publication
    if whole.cell_len > width:
        whole = Text("\n").join([*head.wrap(console, width, overflow="fold"), Text("    ") + publication])
    say(whole)
    say(f"    {_preview(line, max(20, width - 4))}", "dim")


def _preview(line: Line, most: int) -> str:
    if line["payload"] is None:
        kind = " ".join(filter(None, (line["content_encoding"], line["content_type"] or "bytes")))
        return f"<{line['payload_bytes']:,} bytes of {kind}>"
    text = plain(line["payload"][: most + 1])
    return text if len(text) <= most and not line["payload_cut"] else text[: most - 1] + "…"
