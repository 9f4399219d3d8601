"""Streams of a real broker for the tests: each test has its own, which is deleted afterwards."""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rstream import encoding, schema

from faregate import ids
from faregate.errors import StreamNotFound
from faregate.message import Envelope
from faregate.testing.log_suite import LogSubject
from faregate.transports.rabbitmq_stream import RabbitmqStreamLog
from faregate.transports.rabbitmq_stream.address import parse_address
from faregate.transports.rabbitmq_stream.chunks import batch_frame
from faregate.transports.rabbitmq_stream.connection import Connection
from faregate.transports.rabbitmq_stream.entries import encode

SCALE = 20
"""Seconds of a case in one second of the broker's clock, which nobody can move."""


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    connection = Connection(parse_address(url))
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def new_stream(server: str, **arguments: str) -> Iterator[str]:
    """The URL of an empty stream."""
    url = f"{server}?stream=test-{ids.root_id()}"
    name = parse_address(url).stream
    with connected(url) as connection:
        connection.create(name, {key.replace("_", "-"): value for key, value in arguments.items()})
        try:
            yield url
        finally:
            for each in (
                name,
                *(f"{name}.{beside}" for beside in ("readers", "bindings", "staged", "commits", "identity")),
            ):
                try:
                    connection.delete(each)
                except StreamNotFound:
                    pass


@asynccontextmanager
async def stream_subject(
    server: str, log: Callable[[str], Any] = RabbitmqStreamLog, **arguments: str
) -> AsyncIterator[LogSubject]:
    with new_stream(server, **arguments) as url, connected(url) as half:
        reader = log(url)
        began = int(time.time() * 1000) / 1000
        passed = 0.0

        def write(envelopes: Sequence[Envelope]) -> None:
            """All but the last byte of it."""
            half._send(schema.DeclarePublisher(1, 1, "", parse_address(url).stream))
            frame = encoding.encode_frame(batch_frame(1, 1, [encode(envelope) for envelope in envelopes]))
            half._socket.sendall(frame[:-1])

        def pass_time(seconds: float) -> None:
            nonlocal passed
            passed = max(passed, passed + seconds / SCALE)
            time.sleep(max(0.0, began + passed - time.time()))

        def dropped() -> None:
            """The broker does it by itself, a little later."""
            seen = -1
            while seen <= 0 or seen != reader.earliest():
                seen = reader.earliest()
                time.sleep(0.2)

        scaled_at = reader.offset_at
        reader.offset_at = lambda moment: scaled_at(began + (moment - began) / SCALE)
        yield LogSubject(reader, reader.append, write, pass_time, lambda: began, dropped)
