"""Replies on RabbitMQ: a queue of each process that asks, which ends with its connection.

Rules kept here:
- The queue is exclusive and in the memory of one broker: replies are for a process that waits, and nobody else. Whoever
  answers publishes to it through the default exchange, and the broker returns what no queue takes.
- After a lost connection it is declared again under its name, so that those who wait go on waiting. What came for it
  meanwhile is lost; they run into their timeouts.
- Nobody is answered outside of such queues: an address is what some other process wrote into a header.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from aiormq.exceptions import ChannelAccessRefused

from faregate.errors import BrokerUnavailable, ConfigurationError
from faregate.message import Envelope
from faregate.ports.cancellation import end
from faregate.transports.rabbitmq.channels import BatchChannel, Publication
from faregate.transports.rabbitmq.frames import Arrived
from faregate.transports.rabbitmq.link import LOST, Link, not_cancelled
from faregate.transports.rabbitmq.names import is_reply_queue
from faregate.transports.rabbitmq.publisher import Publisher
from faregate.transports.rabbitmq.wire import check_headers, envelope_of, properties_of

log = logging.getLogger("faregate.rabbitmq")

_PAUSE_SECONDS = 0.5
"""Before it is declared again. Until the broker notices that the former connection is gone, it refuses the name."""


class ReplyQueue:
    def __init__(self, link: Link, name: str, on_reply: Callable[[Envelope], None]) -> None:
        self.name = name
        self._link = link
        self._on_reply = on_reply
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        """Raises `ConfigurationError` when this user may not have such a queue."""
        self._task = asyncio.create_task(self._run())
        await self._ready

    async def close(self) -> None:
        await end(self._task)
        if not self._ready.done():
            self._ready.set_exception(BrokerUnavailable("the transport was closed before replies could come"))

    async def _run(self) -> None:
        while True:
            try:
                with not_cancelled():
                    await self._listen()
                continue  # as soon as there is a connection
            except ChannelAccessRefused as exc:
                refused = ConfigurationError(
                    f"RabbitMQ does not let this user have the queue {self.name} for replies: {exc}. Give it the right "
                    "to configure and read faregate.reply.… (rabbitmqctl set_permissions)"
                )
                if not self._ready.done():
                    self._ready.set_exception(refused)
                    return
                log.error("%s", refused)
            except LOST as exc:
                log.debug("the queue %s is lost and declared anew: %s", self.name, exc)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _listen(self) -> None:
        """Until the channel, or the queue, is lost."""
        channel = await self._link.channel(BatchChannel)
        over = asyncio.Event()
        lost = channel.closing
        lost.add_done_callback(lambda _: over.set())
        channel.on_consumer_cancel_callbacks.add(lambda _: over.set())
        channel.incoming.delivered = self._arrived
        try:
            await channel.queue_declare(
                self.name, exclusive=True, auto_delete=True, arguments={"x-queue-type": "classic"}
            )
            await channel.basic_consume(self.name, _unused, no_ack=True)
            if not self._ready.done():
                self._ready.set_result(None)
            await over.wait()
            if not lost.done():
                raise ConnectionError("somebody deleted the queue")
        finally:
            with suppress(*LOST):
                await channel.close()

    def _arrived(self, message: Arrived) -> None:
        envelope = envelope_of(message.properties, message.body, "", "")
        self._on_reply(msgspec.structs.replace(envelope, kind="reply", recipients=()))


async def send_replies(publisher: Publisher, envelopes: Sequence[Envelope]) -> int:
    """How many found no queue."""
    publications: list[Publication] = []
    for envelope in envelopes:
        address = envelope.destination or ""
        if is_reply_queue(address):
            check_headers(envelope)
            publications.append(Publication("", address, properties_of(envelope), envelope.body))
    returned = await publisher.publish(publications) if publications else {}
    return len(envelopes) - len(publications) + len(returned)


async def _unused(message: object) -> None:
    """Deliveries do not come this way (`frames.py`)."""
    raise AssertionError(message)
