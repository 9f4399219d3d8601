"""Opening a journal with 1,000,000 messages, half of them settled, beside reading the same bytes once with their CRC.

    plain       1,000,000 messages, the first 500,000 settled
    history     the same 500,000 waiting, behind three times as much settled history
    scattered   1,000,000 messages, every second one settled
    crashed     `plain`, but without the snapshot that closing writes: every settlement is read from the side logs
    killed      30,000 messages published one by one and handled, then SIGKILL (its syncs are left out: it is the
                process that dies, not the machine). From `Bus.__aenter__` on, beside a new journal
    ten times   the same with 300,000

Opening is recovery and filling the queues until messages could be delivered. Memory is what 1,000,000 waiting
messages of 200 bytes add to a process of their own (its peak resident size above an empty journal's).
"""

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from _harness import Report, Samples, folder, options

import faregate as fg
from faregate import ids
from faregate.broker.journal import frame as frames
from faregate.broker.journal.checksum import crc32
from faregate.broker.journal.settled import Record
from faregate.message import Envelope
from faregate.ports.log import HANDLED
from faregate.ports.queue import Binding
from faregate.transports.journal import JournalTransport

TIMES, MEMORY_MB = 4.0, 400.0
SCATTERED_TIMES, KILLED_SECONDS, TEN_TIMES = 2.0, 0.5, 1.3
BATCH = 10_000


def envelopes(count: int) -> list[Envelope]:
    return [
        Envelope(
            publication_id=ids.root_id(),
            type="Order",
            source="shop",
            body=b'{"text":"' + b"x" * 189 + b'"}',
            correlation_id=ids.root_id(),
            body_digest=b"d" * 16,
        )
        for _ in range(count)
    ]


async def opened(path: Path) -> JournalTransport:
    """A journal with the queue of one subscription, which nobody consumes."""
    transport = JournalTransport(str(path))
    await transport.open()
    await transport.bind(Binding(node="billing", type="Order", kind="event", source="shop"))
    return transport


async def publish(transport: JournalTransport, messages: int) -> None:
    for first in range(0, messages, BATCH):
        await transport.publish(envelopes(min(BATCH, messages - first)))


async def make(path: Path, messages: int, is_settled: range, *, snapshot: bool = True) -> None:
    """A journal with that many messages, of which those at some offsets are settled."""
    transport = await opened(path)
    await publish(transport, messages)
    [number] = [queue.number for queue in transport.journal.topology.queues if not queue.is_dead_letter_queue]
    transport.journal.settle([Record(offset, number, HANDLED, 1, 0, 0.0) for offset in is_settled])
    await transport.journal.barrier()
    await transport.journal.close(None)
    if snapshot:
        # Opening once finds what waits from the side logs; closing then writes the snapshot of it.
        transport = await opened(path)
        transport.begin()
        await transport.close()


async def open_once(path: Path) -> tuple[float, int]:
    """Seconds until the queues are filled, and how many wait."""
    gc.collect()
    begin = time.perf_counter()
    transport = await opened(path)
    transport.broker.begin()
    seconds = time.perf_counter() - begin
    waiting = transport.broker.in_flight.count
    await transport.journal.close(None)
    return seconds, waiting


def read_bytes(path: Path) -> float:
    """Read every frame of every segment once, with its CRC."""
    begin = time.perf_counter()
    for file in sorted((path / "segments").iterdir()):
        data = file.read_bytes()
        position = frames.SEGMENT_BYTES
        while (frame := frames.read_header(data, position)) is not None:
            crc32(frames.body_of(data, frame))
            position = frame.end
    return time.perf_counter() - begin


PROBE = """
import asyncio, pathlib, resource, sys
sys.path.insert(0, {here!r})
import journal_open as bench
async def main():
    transport = await bench.opened(pathlib.Path({path!r}))
    await bench.publish(transport, {messages})
    await transport.close()
asyncio.run(main())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def memory_mb(folder: Path, messages: int) -> float:
    """The peak resident megabytes of a process that publishes so many and consumes none."""
    code = PROBE.format(here=str(Path(__file__).parent), path=str(folder / f"memory-{messages}"), messages=messages)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    return float(done.stdout.split()[-1])


KILLED = """
import asyncio, os, sys
sys.path.insert(0, {here!r})
import faregate as fg
import journal_open as bench
from faregate.broker.journal.disk import RealFile
RealFile.sync = lambda self: None
async def main():
    async with bench.make_bus({path!r}) as bus:
        for number in range({messages}):
            await bus.publish(bench.Order(text="x" * 40), node="shop")
        await bus.idle()
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""


class Order(fg.Event):
    text: str


def make_bus(path: Path) -> fg.Bus:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(Order, source="shop")
    async def bill(order: Order) -> None: ...

    return fg.Bus(f"journal:{path}", nodes=[shop, billing])


def make_killed(path: Path, messages: int) -> None:
    code = KILLED.format(here=str(Path(__file__).parent), path=str(path), messages=messages)
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ})
    assert done.returncode == -9, f"it ended with {done.returncode}"


async def enter(path: Path) -> float:
    """Seconds until a bus runs on it."""
    gc.collect()
    bus = make_bus(path)
    begin = time.perf_counter()
    async with bus:
        return time.perf_counter() - begin


def measure_killed(root: Path, messages: int, rounds: int) -> Samples:
    make_killed(root / "killed", messages)
    make_killed(root / "killed-ten", 10 * messages)
    samples = Samples({name: [] for name in ("new", "killed", "ten")})
    for number in range(rounds + 1):
        for name, origin in (("new", None), ("killed", "killed"), ("ten", "killed-ten")):
            copy = root / f"copy-{name}"
            shutil.rmtree(copy, ignore_errors=True)
            if origin is not None:
                shutil.copytree(root / origin, copy)
            seconds = asyncio.run(enter(copy))
            if number or not rounds:
                samples.seconds[name].append(seconds)
    return samples


def main() -> None:
    args = options(__doc__, rounds=5, messages=1_000_000)
    report = Report("journal-open", args.json)
    count = max(2, args.messages // 2 * 2)
    half = count // 2
    with folder() as root:
        asyncio.run(make(root / "plain", count, range(half)))
        asyncio.run(make(root / "history", 4 * half, range(3 * half)))
        asyncio.run(make(root / "scattered", count, range(0, count, 2)))
        asyncio.run(make(root / "crashed", count, range(half), snapshot=False))
        names = ("plain", "history", "scattered", "crashed")
        samples = Samples({name: [] for name in (*names, "read")})
        for number in range(args.rounds + 1):
            found = {name: asyncio.run(open_once(root / name)) for name in names}
            read = read_bytes(root / "plain")
            assert {waiting for _, waiting in found.values()} == {half}, found
            if number or not args.rounds:
                samples.seconds["read"].append(read)
                for name in names:
                    samples.seconds[name].append(found[name][0])
        killed = measure_killed(root, max(100, 30_000 * count // 1_000_000), args.rounds)
        empty, full = memory_mb(root, min(BATCH, count // 2)), memory_mb(root, count)
    labels = {
        "plain": f"{count:,} messages, half settled",
        "history": f"the same {half:,} waiting, three times the history",
        "scattered": "every second one settled",
        "crashed": "without a snapshot",
        "read": "reading the bytes once with CRC",
    }
    rows = [
        (label, f"{samples.cost(name) * 1e3:,.0f}", f"{1 / samples.ratio(name, 'read'):.2f}")
        for name, label in labels.items()
    ]
    report.table(("opening", "ms", "times reading"), rows)
    names_killed = {"new": "a new journal", "killed": "30,000 one by one, killed", "ten": "300,000 one by one, killed"}
    report.table(("entering a bus", "ms"), [(text, f"{killed.cost(k) * 1e3:,.0f}") for k, text in names_killed.items()])
    report.table(("memory", "MB"), [(f"{count:,} waiting messages of 200 bytes", f"{full - empty:,.0f}")])
    report.ours = {name: samples.cost(name) * 1e3 for name in names} | {"memory_mb": full - empty}
    report.ours |= {name: killed.cost(name) * 1e3 for name in ("killed", "ten")}
    report.peers = {"read_ms": samples.cost("read") * 1e3, "new_ms": killed.cost("new") * 1e3}
    report.goal("open_to_read", samples.ratio("plain", "read"), 1 / TIMES)
    report.goal("history_to_plain", samples.ratio("history", "plain"), 0.67)
    report.goal("scattered_to_read", samples.ratio("scattered", "read"), 1 / SCATTERED_TIMES)
    report.goal("killed", KILLED_SECONDS / max(0.001, killed.cost("killed") - killed.cost("new")), 1.0)
    report.goal("ten_times", killed.ratio("ten", "killed"), 1 / TEN_TIMES)
    report.goal("memory", MEMORY_MB / max(1.0, full - empty), 1.0)
    report.finish()


if __name__ == "__main__":
    main()
