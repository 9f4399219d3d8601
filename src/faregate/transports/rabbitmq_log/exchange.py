"""RabbitMQ's exchange and queues for who has no event loop: a run on Spark, a job, a command.

Each call has a connection of its own, on an event loop of its own in a thread of its own: the caller may have a loop,
and may live for months between two calls.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.transports.rabbitmq import RabbitmqQueue
from faregate.transports.rabbitmq_stream.connection import Connection
from faregate.transports.rabbitmq_stream.entries import decode

T = TypeVar("T")

_AT_ONCE = 2_000
"""Publications that wait for their confirmations together; all of them must come within `confirm=`."""


class Exchange:
    """What tasks made goes here: the outlet of a `Stage`. The broker recognises no repetition."""

    keeps_letters = True

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, work: Callable[[RabbitmqQueue], Awaitable[T]]) -> T:
        """Raises what it raises, and `BrokerUnavailable`, `ConfigurationError`."""

        async def connected() -> T:
            transport = RabbitmqQueue(self._url)
            await transport.open()
            try:
                return await work(transport)
            finally:
                await transport.close()

        with ThreadPoolExecutor(1, "faregate-rabbitmq") as thread:
            return thread.submit(lambda: asyncio.run(connected())).result()

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """In order. Raises `Unroutable` for a command that nobody handles; what stands before it may be sent."""

        async def publish(transport: RabbitmqQueue) -> None:
            for first in range(0, len(envelopes), _AT_ONCE):
                await transport.publish(envelopes[first : first + _AT_ONCE])

        if envelopes:
            self.run(publish)

    # --- an outlet ----------------------------------------------------------------------------------------------

    def published(self, connection: Connection, name: str) -> int:
        return 0

    def publish(self, connection: Connection, entries: Sequence[bytes], name: str, first: int, last: int) -> None:
        self.send([decode(entry) for entry in entries])

    def add_letters(self, letters: Sequence[DeadLetter]) -> None:
        """Into the queues NODE-dead, where those of all nodes without a store are."""
        self.run(lambda transport: transport.add_letters(letters))
