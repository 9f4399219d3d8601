"""Reading a journal as Arrow batches, beside a bare pyarrow read of the same bytes with their CRC.

Both map the files, check every frame's CRC and sum up the length of all payloads, so that the columns are touched. Of
sealed journals: one that was published 1,000 messages at a time, and one that was published message by message; the
bare one reads both. A hot segment of single messages is shown beside them.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from _harness import Contestant, Report, folder, interleave, options

from faregate import ids
from faregate.broker.journal import JournalReader
from faregate.broker.journal import frame as frames
from faregate.broker.journal.checksum import crc32
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.log import Log
from faregate.broker.journal.sealing import seal_all
from faregate.columns import SCHEMA
from faregate.message import Envelope

BATCH = 1000
TARGET = 0.8


def fill(path: Path, messages: int, per_frame: int = BATCH, *, seals: bool = True, correlated: bool = False) -> None:
    """A journal of so many messages, all of it sealed, or as it was written. `correlated`: no two messages of it have
    the same correlation."""
    disk, layout = RealDisk(), Layout(path)
    prepare(layout, disk)
    log = Log(layout, disk)
    rows = [
        Envelope(
            publication_id=ids.root_id(),
            type="Order",
            source="shop",
            body=b"x" * 200,
            recipients=("billing",),
            correlation_id=ids.root_id(),
            body_digest=b"d" * 16,
        )
        for _ in range(per_frame)
    ]
    for _ in range(messages // per_frame):
        if correlated:
            rows = [msgspec.structs.replace(row, correlation_id=ids.root_id()) for row in rows]
        log.append(rows, [0] * per_frame)
    log.sync()
    if seals:
        log.roll()
        log.close()
        Log(layout, disk).close()
        seal_all(layout, disk)
    else:
        log.close()


def bare(path: Path) -> int:
    """Walk the frames by hand: map, CRC, read the record batch."""
    total = 0
    for file in sorted((path / "segments").iterdir()):
        data: Any = memoryview(pa.memory_map(str(file)).read_buffer())
        position = frames.SEGMENT_BYTES
        while position + frames.FRAME_BYTES <= len(data) and data[position : position + 4] == frames.FRAME_MAGIC:
            kind = int.from_bytes(data[position + 6 : position + 8], "little")
            length = int.from_bytes(data[position + 8 : position + 12], "little")
            crc = int.from_bytes(data[position + 12 : position + 16], "little")
            header = bytearray(data[position : position + frames.FRAME_BYTES])
            header[12:16] = bytes(4)
            body = data[position + frames.FRAME_BYTES : position + frames.FRAME_BYTES + length]
            assert crc32(body, crc32(bytes(header))) == crc
            if kind == frames.COLUMNS:
                batch = pa.ipc.read_record_batch(pa.py_buffer(body), SCHEMA)
                total += pc.sum(pc.binary_length(batch.column("payload"))).as_py()
            position += frames.FRAME_BYTES + frames.padded(length)
    return total


def ours(path: Path) -> int:
    return sum(pc.sum(pc.binary_length(batch.column("payload"))).as_py() for batch in JournalReader(path).batches())


def main() -> None:
    args = options(__doc__, rounds=9, messages=1_000_000)
    report = Report("journal-read", args.json)
    messages = max(BATCH, args.messages // BATCH * BATCH)
    hot = max(BATCH, messages // 10)
    with folder() as root:
        path = root / "batches"
        fill(path, messages)
        fill(root / "singles", messages, 1)
        fill(root / "hot", hot, 1, seals=False)

        async def run_bare(_: int) -> float:
            begin = time.perf_counter()
            assert bare(path) == messages * 200
            return time.perf_counter() - begin

        async def run_bare_singles(_: int) -> float:
            begin = time.perf_counter()
            assert bare(root / "singles") == messages * 200
            return time.perf_counter() - begin

        async def run_ours(_: int) -> float:
            begin = time.perf_counter()
            assert ours(path) == messages * 200
            return time.perf_counter() - begin

        async def run_singles(_: int) -> float:
            begin = time.perf_counter()
            assert ours(root / "singles") == messages * 200
            return time.perf_counter() - begin

        async def run_hot(_: int) -> float:
            begin = time.perf_counter()
            assert ours(root / "hot") == hot * 200
            return time.perf_counter() - begin

        samples = interleave(
            [
                Contestant("bare", run_bare),
                Contestant("bare singles", run_bare_singles),
                Contestant("journal", run_ours),
                Contestant("singles", run_singles),
                Contestant("hot", run_hot, share=hot / messages),
            ],
            rounds=args.rounds,
            messages=messages,
        )
    report.table(
        (f"{messages:,} messages of 200 bytes", "per second"),
        [
            ("bare pyarrow with the same CRC", f"{samples.rate('bare'):,.0f}"),
            ("the same, published one by one", f"{samples.rate('bare singles'):,.0f}"),
            ("JournalReader.batches, published in batches", f"{samples.rate('journal'):,.0f}"),
            ("JournalReader.batches, published one by one", f"{samples.rate('singles'):,.0f}"),
            ("JournalReader.batches, one by one and hot", f"{samples.rate('hot'):,.0f}"),
        ],
    )
    report.ours = {name: samples.rate(name) for name in ("journal", "singles", "hot")}
    report.peers = {name: samples.rate(name) for name in ("bare", "bare singles")}
    report.goal("journal_to_bare", samples.ratio("journal", "bare"), TARGET)
    report.goal("singles_to_bare", samples.ratio("singles", "bare singles"), TARGET)
    report.finish()


if __name__ == "__main__":
    main()
