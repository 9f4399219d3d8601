"""Bytes on the disk for each message of 50 bytes: published alone while hot, and once its segment is sealed.

Hot is what a frame takes with all that belongs to it; sealed what the file has for each message, header and footer
included. Beside it the bodies alone.
"""

import asyncio
import shutil
from pathlib import Path

from _harness import Report, folder, options

import faregate as fg
from faregate.broker.journal import frame as frames
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.sealing import seal_all
from faregate.transports.journal import JournalTransport

HOT_TARGET, SEALED_TARGET = 500, 340
BODY = 50
SEGMENT = 1 << 20


class Order(fg.Event):
    text: str


shop, billing = fg.Node("shop"), fg.Node("billing")


@billing.on(Order, source="shop")
async def bill(order: Order) -> None: ...


async def publish(path: Path, messages: int) -> None:
    text = "x" * (BODY - len('{"text":""}'))
    transport = JournalTransport(str(path), segment_size=SEGMENT)
    async with fg.Bus(transport, nodes=[shop, billing]) as bus:
        await bus.pause("billing", Order)
        transport.journal.seal = lambda: None  # type: ignore[method-assign]  # hot ones are measured first
        for _ in range(messages):
            await bus.publish(Order(text=text), node="shop")


def hot_bytes(path: Path) -> float:
    reader = JournalReader(path)
    found = [frame for base in reader.layout.segment_bases(RealDisk()) for frame, _ in reader.segment_frames(base)]
    return sum(frames.FRAME_BYTES + frames.padded(frame.length) for frame in found) / sum(each.rows for each in found)


def sealed_bytes(path: Path) -> float:
    layout, disk = Layout(path), RealDisk()
    seal_all(layout, disk)
    bases = layout.segment_bases(disk)
    if len(bases) < 2:
        return float("inf")
    return sum(disk.size(layout.segment(base)) for base in bases[:-1]) / bases[-1]


def main() -> None:
    args = options(__doc__, rounds=1, messages=20_000)
    report = Report("journal-size", args.json)
    with folder() as root:
        asyncio.run(publish(root / "journal", max(args.messages, 4 * SEGMENT // 1000)))
        hot = hot_bytes(root / "journal")
        sealed = sealed_bytes(root / "journal")
        shutil.rmtree(root / "journal")
    report.table(
        ("bytes for each message of 50", "bytes"),
        [("hot, published alone", f"{hot:,.0f}"), ("sealed", f"{sealed:,.0f}"), ("the body", f"{BODY}")],
    )
    report.ours = {"hot": hot, "sealed": sealed}
    report.peers = {"body": float(BODY)}
    report.goal("hot", HOT_TARGET / hot, 1.0)
    report.goal("sealed", SEALED_TARGET / sealed, 1.0)
    report.finish()


if __name__ == "__main__":
    main()
