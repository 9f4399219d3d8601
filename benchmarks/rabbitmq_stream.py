"""Typed messages through a RabbitMQ stream, appended and read, beside FastStream on a queue of the same broker.

Both encode and decode each order as JSON into a class, with confirms and on disk. FastStream has five hundred
publications under way, and prefetches a hundred; the stream takes batches of a thousand.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from _harness import Contestant, Report, interleave, loop, options
from _orders import Order, make_order

from faregate import ids
from faregate.message import Envelope
from faregate.ports.schemes import open_log
from faregate.transports.rabbitmq_stream import create_stream
from faregate.transports.rabbitmq_stream.address import parse_address
from faregate.transports.rabbitmq_stream.connection import Connection

BATCH, IN_FLIGHT, PREFETCH = 1000, 500, 100
TARGET = 10.0
PEERS_SHARE = 0.1
"""Of the messages: it takes its time."""


def envelope(number: int) -> Envelope:
    body = msgspec.json.encode(make_order(number))
    publication = ids.root_id()
    return Envelope(publication, "Order", "event", "shop", body, correlation_id=publication, sent_at=time.time())


class Stream:
    def __init__(self, server: str) -> None:
        self.url = f"{server}?stream=bench-{ids.root_id()}"
        create_stream(self.url, max_length_bytes="2000000000")
        self.log = open_log(self.url)

    def delete(self) -> None:
        address = parse_address(self.url)
        connection = Connection(address)
        connection.delete(address.stream)
        connection.close()

    async def append(self, messages: int) -> float:
        begin = time.perf_counter()
        for first in range(0, messages, BATCH):
            self.log.append([envelope(number) for number in range(first, min(first + BATCH, messages))])
        return time.perf_counter() - begin

    async def consume(self, messages: int) -> float:
        """The last that were appended."""
        decode = msgspec.json.Decoder(Order).decode
        end = self.log.latest()
        begin = time.perf_counter()
        total = sum(decode(found.body).total for _, found in self.log.envelopes(end - messages, end))
        seconds = time.perf_counter() - begin
        assert total > 0 or messages == 1
        return seconds


def faststream(url: str) -> dict[str, Callable[[int], Awaitable[float]]]:
    from faststream.rabbit import Channel, RabbitBroker, RabbitQueue
    from pydantic import BaseModel

    class PydanticOrder(BaseModel):
        order_id: str
        customer: str
        total: int
        note: str

    name = f"bench-{ids.root_id()}"
    queue = RabbitQueue(name, durable=True, arguments={"x-expires": 600_000})  # it goes by itself

    async def publish_all(broker: Any, messages: int) -> None:
        def one(number: int) -> Any:
            order = PydanticOrder(**msgspec.structs.asdict(make_order(number)))
            return broker.publish(order, name, persist=True)

        for first in range(0, messages, IN_FLIGHT):
            await asyncio.gather(*(one(number) for number in range(first, min(first + IN_FLIGHT, messages))))

    async def publish(messages: int) -> float:
        async with RabbitBroker(url, logger=None) as broker:
            declared = await broker.declare_queue(queue)
            begin = time.perf_counter()
            await publish_all(broker, messages)
            seconds = time.perf_counter() - begin
            await declared.purge()
            return seconds

    async def consume(messages: int) -> float:
        async with RabbitBroker(url, logger=None) as broker:
            await broker.declare_queue(queue)
            await publish_all(broker, messages)
        broker = RabbitBroker(url, logger=None, default_channel=Channel(prefetch_count=PREFETCH))
        done, seen = asyncio.Event(), 0

        @broker.subscriber(queue)
        async def handle(order: PydanticOrder) -> None:
            nonlocal seen
            seen += 1
            if seen == messages:
                done.set()

        async with broker:
            begin = time.perf_counter()
            await broker.start()
            await done.wait()
            return time.perf_counter() - begin

    return {"faststream publish": publish, "faststream consume": consume}


def main() -> None:
    args = options(__doc__, rounds=5, messages=50_000)
    report = Report("rabbitmq-stream", args.json)
    stream = Stream(os.environ["FAREGATE_TEST_RABBITMQ_STREAM"])
    try:
        measure(stream, args, report)
    finally:
        stream.delete()
    report.finish()


def measure(stream: Stream, args: argparse.Namespace, report: Report) -> None:
    contestants = [Contestant("append", stream.append), Contestant("consume", stream.consume)]
    if report.has_peer("faststream"):
        peers = faststream(os.environ["FAREGATE_TEST_RABBITMQ"])
        contestants += [Contestant(name, run, PEERS_SHARE) for name, run in peers.items()]
    loop(stream.append(args.messages))  # the first to read needs something to read
    samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    report.table(
        (f"{args.messages:,} orders of 200 bytes", "per second"),
        [(contestant.name, f"{samples.rate(contestant.name):,.0f}") for contestant in contestants],
    )
    for ours, theirs in (("append", "faststream publish"), ("consume", "faststream consume")):
        report.ours[f"stream_{ours}_per_second"] = samples.rate(ours)
        if theirs in samples.seconds:
            report.peers[f"{theirs.replace(' ', '_')}_per_second"] = samples.rate(theirs)
            report.goal(f"{ours}_vs_faststream", samples.ratio(ours, theirs), TARGET)


if __name__ == "__main__":
    main()
