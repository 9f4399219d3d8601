"""Measures what one message costs here: processor time where it can be had, the clock where it is waiting that counts.

Rules kept here:
- Nothing real is touched: journals and SQLite in a temporary folder, a schema of its own in PostgreSQL, and queues and
  streams of RabbitMQ under names that nobody else has; all are removed.
- What cannot be measured (no server was named, it runs on another machine) keeps its value, and is called assumed.
- A figure is the median of several rounds, behind one that does not count.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.sealing import seal_all
from faregate.bus.bus import Bus
from faregate.cli.bench.tidy import remove_queues
from faregate.cli.capacity.nodes import HANDLERS, Measured, Work, handling, make_message
from faregate.cli.capacity.processor import processor_of, server_at
from faregate.node.node import Node
from faregate.node.policy import Parallel
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_log, open_store
from faregate.stores.sizes import sizes_of
from faregate.testing.store_subjects import postgres_schema
from faregate.transports.journal import JournalTransport

TOGETHER = 1_000
_SEGMENT = 1 << 20
_COMMITTERS = 8

Say = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    messages: int
    rounds: int


@dataclass
class Spent:
    """Seconds for all messages: of this process and of the server, to publish and to handle; and by the clock."""

    publish: float = 0.0
    handle: float = 0.0
    server_publish: float = 0.0
    server_handle: float = 0.0
    waited: float = 0.0
    noted: dict[str, float] = field(default_factory=dict)


class Server:
    """A server's processor time; none where it runs elsewhere, or nobody says."""

    def __init__(self, url: str | None, port: int) -> None:
        parts = urlsplit(url or "")
        self.pid = None if url is None else server_at(parts.hostname, parts.port or port)

    def seconds(self) -> float:
        return 0.0 if self.pid is None else processor_of(self.pid)


# --- through a bus -----------------------------------------------------------------------------------------------


async def _run(bus: Bus, names: tuple[str, str], size: int, server: Server, customers: int) -> Spent:
    """Publish all while the handler is paused, then let it handle all."""
    sender, taker = names
    spent = Spent()
    messages = [make_message(number, customers) for number in range(size)]
    await bus.pause(taker, Measured)
    await bus.publish_many(messages[:1], node=sender)
    used, theirs = time.process_time(), server.seconds()
    for first in range(1, size, TOGETHER):
        await bus.publish_many(messages[first : first + TOGETHER], node=sender)
    spent.publish, spent.server_publish = time.process_time() - used, server.seconds() - theirs
    used, theirs, begin = time.process_time(), server.seconds(), time.perf_counter()
    await bus.resume(taker, Measured)
    await bus.idle()
    spent.handle, spent.server_handle = time.process_time() - used, server.seconds() - theirs
    spent.waited = time.perf_counter() - begin
    return spent


async def _on_journal(
    folder: Path, store: str | None, work: Work, size: int, *, server: Server | None = None, customers: int = 5_000
) -> Spent:
    name = token_hex(4)
    sender = Node(f"measured-{name}")
    taker = handling(
        f"measuring-{name}", sender.name, HANDLERS[work], schema=store is not None and work != "nothing", key="customer"
    )
    bus = Bus(f"journal:{folder / name}", nodes=[sender, taker], store=store)
    async with bus:
        opened = next(iter(bus.stores.values()), None)
        before = await sizes_of(opened)
        spent = await _run(bus, (sender.name, taker.name), size, server or Server(None, 0), customers)
        after = await sizes_of(opened)
        spent.noted = {each: after[each] - before[each] for each in after}
    return spent


async def _median(size: Size, run: Callable[[], Any]) -> dict[str, float]:
    """For one message, in seconds; what was noted, for all."""
    found = [await run() for _ in range(size.rounds + 1)][1:]
    names = ("publish", "handle", "server_publish", "server_handle", "waited")
    result = {name: median(getattr(each, name) for each in found) for name in names}
    return result | {name: median(each.noted[name] for each in found) for name in found[0].noted}


async def measure_journal(size: Size, say: Say) -> dict[str, float]:
    """The journal without a store, and with SQLite."""
    count = size.messages
    with TemporaryDirectory(prefix="faregate-capacity-") as made:
        folder = Path(made)

        async def run(work: Work, store: bool, customers: int = 5_000, part: int = 1) -> dict[str, float]:
            say(f"journal, {'SQLite' if store else 'no store'}: {work}")

            async def once() -> Spent:
                url = f"sqlite:{folder / token_hex(4)}.db" if store else None
                return await _on_journal(folder, url, work, count // part, customers=customers)

            return await _median(size, once)

        bare = await run("nothing", False)
        ledger = await run("nothing", True)
        insert, send = await run("insert", True), await run("send", True)
        one_key = await run("insert", True, 1, 10)
        say("journal: bytes")
        journal_bytes, stream_bytes = await _bytes(folder / "sealed", max(count, 5_000))
    micro = 1e6 / count
    return {
        "publish": bare["publish"] * micro,
        "handle_none": bare["handle"] * micro,
        "handle_sqlite": insert["handle"] * micro,
        "send_sqlite": (send["handle"] - insert["handle"]) * micro,
        "key_sqlite": one_key["waited"] * 1e3 / (count // 10),
        "ledger_sqlite": ledger["ledger"] / count,
        "journal_bytes": journal_bytes,
        "stream_bytes": stream_bytes,
    }


async def _bytes(path: Path, count: int) -> tuple[float, float]:
    """What a sealed journal, and a stream, have for a message besides its body."""
    sender = Node("measured")
    transport = JournalTransport(str(path), segment_size=_SEGMENT)
    taker = handling("measuring", sender.name, HANDLERS["nothing"], schema=False, key="customer")
    async with Bus(transport, nodes=[sender, taker]) as bus:
        await bus.pause(taker, Measured)
        for first in range(0, count, TOGETHER):
            await bus.publish_many([make_message(number) for number in range(first, first + TOGETHER)], node="measured")
    layout, disk = Layout(path), RealDisk()
    seal_all(layout, disk)
    bases = layout.segment_bases(disk)
    sealed = sum(disk.size(layout.segment(base)) for base in bases[:-1]) / bases[-1]
    _, envelope = next(iter(open_log(f"journal:{path}").envelopes(0, 1)))
    from faregate.transports.rabbitmq_stream.entries import encode

    return sealed - len(envelope.body), float(len(encode(envelope)) - len(envelope.body))


async def measure_postgres(url: str, size: Size, say: Say) -> dict[str, float]:
    count, server = size.messages, Server(url, 5432)
    with TemporaryDirectory(prefix="faregate-capacity-") as made:
        folder = Path(made)

        async def run(work: Work, customers: int = 5_000, part: int = 1) -> dict[str, float]:
            say(f"journal, PostgreSQL: {work}")

            async def once() -> Spent:
                async with postgres_schema(url) as inside:
                    return await _on_journal(folder, inside, work, count // part, server=server, customers=customers)

            return await _median(size, once)

        ledger = await run("nothing")
        insert, send = await run("insert"), await run("send")
        one_key = await run("insert", 1, 20)
    micro = 1e6 / count
    found = {
        "handle_postgresql": insert["handle"] * micro,
        "send_postgresql": (send["handle"] - insert["handle"]) * micro,
        "key_postgresql": one_key["waited"] * 1e3 / (count // 20),
        "ledger_postgresql": ledger["ledger"] / count,
        "wal": insert["wal"] / count,
        "wal_send": (send["wal"] - insert["wal"]) / count,
        "messages_per_commit": count / insert["commits"],
        "commits": await _commits(url, say),
    }
    if server.pid is not None:
        found["database"] = insert["server_handle"] * micro
        found["database_send"] = (send["server_handle"] - insert["server_handle"]) * micro
    return found


async def _commits(url: str, say: Say, each: int = 50) -> float:
    """Commits a second, several connections at once."""
    say("PostgreSQL: commits")
    async with postgres_schema(url) as inside:
        store = open_store(inside, SystemClock())
        await store.open()
        try:
            await store.apply_schema("create table faregate_measured(number integer)")

            async def commit() -> None:
                for number in range(each):
                    transaction = store.transaction()
                    await transaction.begin()
                    await transaction.execute("insert into faregate_measured values (?)", (number,))
                    await transaction.commit()

            begin = time.perf_counter()
            await asyncio.gather(*(commit() for _ in range(_COMMITTERS)))
            return _COMMITTERS * each / (time.perf_counter() - begin)
        finally:
            await store.close()


# --- RabbitMQ ----------------------------------------------------------------------------------------------------


async def measure_rabbitmq(url: str, size: Size, say: Say) -> dict[str, float]:
    count, server = size.messages, Server(url, 5672)
    micro = 1e6 / count

    async def queue() -> Spent:
        name = token_hex(4)
        sender = Node(f"measured-{name}")
        taker = handling(f"measuring-{name}", sender.name, HANDLERS["nothing"], schema=False, order=Parallel(10))
        async with _private(Bus(url, nodes=[sender, taker]), []) as bus:
            return await _run(bus, (sender.name, taker.name), count, server, 5_000)

    async def stream() -> Spent:
        name = f"measured-{token_hex(4)}"
        there = f"{url}{'&' if '?' in url else '?'}stream={name}"
        streams = [name, *(f"{name}.{more}" for more in ("bindings", "identity", "readers", "staged", "commits"))]
        spent = Spent()
        async with _private(Bus(there, nodes=[Node(name)]), streams) as bus:
            messages = [make_message(number) for number in range(count)]
            theirs = server.seconds()
            for first in range(0, count, TOGETHER):
                await bus.publish_many(messages[first : first + TOGETHER], node=name)
            spent.server_publish = server.seconds() - theirs
            log = open_log(there)
            used, theirs = time.process_time(), server.seconds()
            read = await asyncio.to_thread(lambda: sum(1 for _ in log.envelopes(log.earliest())))
            assert read == count, f"{read} of {count} messages were read from the stream"
            spent.handle, spent.server_handle = time.process_time() - used, server.seconds() - theirs
        return spent

    say("RabbitMQ: a quorum queue")
    queued = await _median(size, queue)
    say("RabbitMQ: a stream")
    streamed = await _median(size, stream)
    found = {
        "amqp_publish": queued["publish"] * micro,
        "amqp_handle": queued["handle"] * micro,
        "stream_read": streamed["handle"] * micro,
    }
    if server.pid is not None:
        found |= {
            "queue_in": queued["server_publish"] * micro,
            "queue_out": queued["server_handle"] * micro,
            "stream_in": streamed["server_publish"] * micro,
            "stream_out": streamed["server_handle"] * micro,
        }
    return found


@asynccontextmanager
async def _private(bus: Bus, more: list[str]) -> AsyncIterator[Bus]:
    """A bus whose queues are removed when it has ended."""
    queues = [*(binding.queue for binding in bus.bindings), *(f"{name}-dead" for name in bus.nodes), *more]
    try:
        async with bus:
            yield bus
    finally:
        await asyncio.shield(remove_queues(bus, queues))
