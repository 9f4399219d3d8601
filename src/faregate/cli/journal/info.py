"""`faregate journal info`: what a journal holds, without changing anything and beside a running writer."""

import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from faregate.broker.journal import frame as frames
from faregate.broker.journal.content import read_messages
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.frame import Footer
from faregate.broker.journal.high_water import HighWater
from faregate.broker.journal.lock import lock_holder
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.recovery import Found, Single, recover
from faregate.broker.journal.segment import Memory, Segment
from faregate.broker.journal.spool import waiting
from faregate.cli.output import console, say
from faregate.cli.table import Cell, Column, numbers, show_table
from faregate.errors import JournalCorrupt, OffsetGone
from faregate.plain import plain
from faregate.units import bytes_text, counted, iso


def describe(path: Path) -> dict[str, Any]:
    """Everything that `info` says. `trouble` lists what damage makes unknown."""
    reader = JournalReader(path)
    layout, disk = reader.layout, RealDisk()
    mark = reader.high_water()
    trouble: list[str] = []
    segments = _segments(reader, mark, trouble)
    told = [each.told for each in segments if each.told is not None]
    types: Counter[str] = sum((Counter(each.types) for each in told), Counter())
    times = [at for each in told if each.messages or each.dead_letters for at in (each.first_time, each.last_time)]
    compacted = [each.messages for each in told if each.compacted]
    found: dict[int, Found] = {}
    topology = reader.topology()
    earliest: int | None = None
    readers: list[dict[str, Any]] = []
    try:
        earliest = reader.earliest()
        readers = [
            {"name": each.name, "offset": each.offset, "lag": max(0, mark.offset - each.offset)}
            for each in reader.reader_offsets()
        ]
        found = recover(layout, disk, reader, topology).queues
    except (JournalCorrupt, OffsetGone) as exc:
        trouble.append(f"what waits cannot be told: {exc}")
    queues = [
        {
            "queue": queue.name,
            "node": queue.node,
            **_waiting(found.get(queue.number, Found()), time.time()),
            "dead_letters": queue.is_dead_letter_queue,
        }
        for queue in topology.queues
    ]
    return {
        "path": str(layout.root),
        "id": reader.meta.id,
        "version": reader.meta.version,
        "writer": _process(lock_holder(layout.root)),
        "earliest": earliest,
        "latest": mark.offset,
        "first_time": iso(min(times) / 1_000_000) if times else None,
        "last_time": iso(max(times) / 1_000_000) if times else None,
        "segments": {
            "count": len(segments),
            "bytes": sum(each.size for each in segments),
            "sealed": sum(each.form == "sealed" for each in segments),
            "rolled": sum(each.form == "rolled" for each in segments),
            "compacted": len(compacted),
            "compacted_messages": sum(compacted),
        },
        "types": dict(sorted(types.items(), key=lambda item: (-item[1], item[0]))),
        "queues": queues,
        "readers": readers,
        "spool": len(waiting(layout, disk)),
        "foreign": [str(path.relative_to(layout.root)) for path in layout.foreign_files(disk)],
        "quarantine": len(disk.list(layout.quarantine)),
        "trouble": trouble,
    }


def _waiting(found: Found, now: float) -> dict[str, int]:
    due = [piece.entry.due for piece in found.pieces if isinstance(piece, Single)]
    return {"waiting": found.count(), "later": sum(moment is not None and moment > now for moment in due)}


def _process(holder: str | None) -> int | str | None:
    return int(holder) if holder is not None and holder.isdecimal() else holder


class _Segment(NamedTuple):
    size: int
    form: str
    """hot (written to), rolled, or sealed"""
    told: Footer | None
    """What its footer says, or would say now; None for one that is damaged."""


def _segments(reader: JournalReader, mark: HighWater, trouble: list[str]) -> list[_Segment]:
    layout, disk = reader.layout, RealDisk()
    found: list[_Segment] = []
    for base in layout.segment_bases(disk):
        if base > mark.segment:
            break
        try:
            size = disk.size(layout.segment(base))
            footer = reader.footer(base)
            form = "hot" if footer is None else "sealed" if reader.is_sealed(base) else "rolled"
            found.append(_Segment(size, form, footer or _count(reader, base)))
        except (FileNotFoundError, OffsetGone):
            continue  # retention has taken it
        except JournalCorrupt as exc:
            trouble.append(str(exc))
            found.append(_Segment(size, "damaged", None))
    return found


def _count(reader: JournalReader, base: int) -> Footer:
    """What the footer of the segment that is written to would say now."""
    segment = Segment(frames.SegmentHeader(frames.VERSION, frames.HOT, 0, base, 0, 0), Memory())
    for frame, body in reader.segment_frames(base):
        segment.count(frame, read_messages(frame, body).types() if frame.kind in frames.MESSAGES else {})
    return segment.footer(0, 0)


# --- for people --------------------------------------------------------------------------------------------------


def show(told: dict[str, Any]) -> None:
    say(Text.assemble((told["path"], "bold"), f"   journal {told['id']}, format {told['version']}"))
    facts = Table.grid(padding=(0, 3))
    facts.add_column(style="dim")
    facts.add_column()
    writer = told["writer"]
    facts.add_row("writer", Text(f"process {writer}", style="green") if writer is not None else "nobody")
    facts.add_row("offsets", _offsets(told))
    if told["first_time"] is not None:
        facts.add_row("times", f"{told['first_time']} to {told['last_time']}")
    segments = told["segments"]
    kinds = ", ".join(
        f"{segments[form]:,} {form}" for form in ("sealed", "rolled", "compacted") if segments[form] or form == "sealed"
    )
    facts.add_row("segments", f"{segments['count']:,} ({kinds}), {bytes_text(segments['bytes'])}")
    if told["spool"]:
        facts.add_row("spool", f"{counted(told['spool'], 'batch', 'batches')} waiting")
    if told["quarantine"]:
        facts.add_row("quarantine", counted(told["quarantine"], "file"))
    console.print(facts)
    _show_table(("TYPE", "MESSAGES"), [(plain(name), f"{count:,}") for name, count in told["types"].items()])
    if segments["compacted_messages"]:
        say(f"and {counted(segments['compacted_messages'], 'message')} in compacted segments", "dim")
    _show_table(
        ("QUEUE", "WAITING", "DUE LATER"),
        [
            (q["queue"], f"{q['waiting']:,}", f"{q['later']:,}" if q["later"] else "")
            for q in told["queues"]
            if not q["dead_letters"]
        ],
    )
    _show_table(
        ("DEAD LETTERS AT", "MESSAGES"),
        [
            (q["node"], Text(f"{q['waiting']:,}", style="red"))
            for q in told["queues"]
            if q["dead_letters"] and q["waiting"]
        ],
    )
    _show_table(
        ("READER", "NEXT OFFSET", "BEHIND"),
        [(reader["name"], f"{reader['offset']:,}", f"{reader['lag']:,}") for reader in told["readers"]],
    )
    for name in told["foreign"]:
        say(f"{name} does not belong to the journal and is left alone", "yellow")
    for text in told["trouble"]:
        say(plain(text), "red")


def _offsets(told: dict[str, Any]) -> str:
    if told["earliest"] is None or told["earliest"] >= told["latest"]:
        return (
            f"none yet; the next is {told['latest']:,}" if told["earliest"] is not None else f"up to {told['latest']:,}"
        )
    return f"{told['earliest']:,} to {told['latest'] - 1:,}"


def _show_table(headings: tuple[str, ...], rows: list[tuple[Cell, ...]]) -> None:
    if rows:
        say("")
        show_table([Column(headings[0]), *numbers(*headings[1:])], rows)
