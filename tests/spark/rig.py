"""Small journals for the Spark tests: written without a bus, read back as envelopes, and run by a bus at the end."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faregate as fg
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.spool import read_spooled, waiting
from faregate.message import Envelope
from faregate.spark.options import Options, parse_options
from faregate.spark.schema import row_schema

SMALL_SEGMENT = 16 * 1024


def note(number: int, **more: Any) -> Envelope:
    fields: dict[str, Any] = {"type": "Noted", "source": "author", "body": f'{{"text":"{number}"}}'.encode(), **more}
    return Envelope(publication_id=f"note-{number}", **fields)


def empty_journal(path: Path) -> Path:
    prepare(Layout(path), RealDisk())
    return path


def append(path: Path, envelopes: Iterable[Envelope], *, per_frame: int = 10) -> None:
    """Write to a journal, making it if need be: small segments, `per_frame` messages a frame."""
    empty_journal(path)
    log = Log(Layout(path), RealDisk(), segment_size=SMALL_SEGMENT)
    rows = list(envelopes)
    for start in range(0, len(rows), per_frame):
        piece = rows[start : start + per_frame]
        log.append(piece, [-1] * len(piece))
    log.sync()
    log.close()


def journal(path: Path, count: int, **more: Any) -> Path:
    """A journal of that many notes, numbered like their offsets."""
    append(path, (note(number) for number in range(count)), **more)
    return path


def truncate(path: Path) -> int:
    """Remove the oldest segment, as retention does; returns where the log begins now."""
    layout, disk = Layout(path), RealDisk()
    first, second, *_ = layout.segment_bases(disk)
    disk.remove(layout.segment(first))
    return second


def options(path: Path, **given: object) -> Options:
    return parse_options({"path": str(path), **{name: str(value) for name, value in given.items()}})


SCHEMA = row_schema()


def spooled(path: Path) -> list[list[Envelope]]:
    """The batches that wait in the spool, each as its envelopes."""
    layout, disk = Layout(path), RealDisk()
    return [read_spooled(file, disk).envelopes for file in waiting(layout, disk)]


class Noted(fg.Event):
    text: str


class Do(fg.Command):
    text: str


def run_bus(path: Path) -> list[str]:
    """Run the nodes of a journal until nothing is left to do; returns what was handled."""
    author, reader = fg.Node("author"), fg.Node("reader")
    seen: list[str] = []

    @reader.on(Noted, source="author")
    async def read(noted: Noted) -> None:
        seen.append(noted.text)

    @reader.on(Do)
    async def do(command: Do) -> None:
        seen.append(command.text)

    async def main() -> None:
        async with fg.Bus(f"journal:{path}", nodes=[author, reader]) as bus:
            await bus.idle()

    asyncio.run(main())
    return seen
