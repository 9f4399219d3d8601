"""aiormq's channel, working on batches: one write for many publications or acknowledgements, no task for each delivery.

aiormq's own `basic_publish` makes two futures and takes a lock for each message, and it starts a task for each
delivery. What is replaced here are the hooks of `aiormq.Channel` for single frames; connections, frames and their
encoding stay aiormq's.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from aiormq.abc import AbstractConnection, ChannelFrame, DeliveredMessage
from aiormq.channel import Channel
from pamqp.commands import Basic
from pamqp.header import ContentHeader

C = TypeVar("C", bound="BatchChannel")


class Publication(NamedTuple):
    """One message on its way to an exchange."""

    exchange: str
    routing_key: str
    properties: Basic.Properties
    body: bytes


class Returned(NamedTuple):
    """A publication that no queue takes: its place in its batch, and what the broker says."""

    place: int
    text: str


class Confirmation:
    """Publications that go out together: done when the broker has answered for each of them."""

    __slots__ = ("done", "first", "left", "publications", "refused", "returned")

    def __init__(self, publications: Sequence[Publication]) -> None:
        self.publications = publications
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = 0
        """The number of the first on its channel; 0: none is on its way."""

    def begin(self, first: int) -> None:
        """They are written, or written again."""
        self.first = first
        self.left = len(self.publications)
        self.refused = 0
        """How many of them the broker did not take; it says no reason."""
        self.returned: list[Returned] = []


class BatchChannel(Channel):
    """For publishing with confirms, for consuming, or for declaring."""

    def __init__(self, connector: AbstractConnection, number: int, **options: Any) -> None:
        super().__init__(connector, number, **options)
        self._unconfirmed: dict[int, Confirmation] = {}
        self.on_delivery: Callable[[DeliveredMessage], None] | None = None

    # --- publishing ------------------------------------------------------------------------------------------

    async def publish_all(self, batches: Sequence[Confirmation]) -> None:
        """Write them to the connection. Each is done when the broker has answered for all of it."""
        frames: list[Any] = []
        for batch in batches:
            batch.begin(self.delivery_tag + 1)
            for exchange, routing_key, properties, body in batch.publications:
                self.delivery_tag += 1
                self._unconfirmed[self.delivery_tag] = batch
                frames.append(Basic.Publish(exchange=exchange, routing_key=routing_key, mandatory=True))
                frames.append(ContentHeader(properties=properties, body_size=len(body)))
                frames += self._split_body(body)
        await self.write(ChannelFrame.marshall(self.number, frames))

    async def write(self, frame: ChannelFrame) -> None:
        """Raises `ConnectionError` when the channel is lost before the connection takes it."""
        try:
            self.write_queue.put_nowait(frame)
        except asyncio.QueueFull:
            putting, lost = asyncio.ensure_future(self.write_queue.put(frame)), self.closing
            await asyncio.wait((putting, lost), return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if not putting.done():
                putting.cancel()
                raise ConnectionError("the channel is lost") from None

    async def _on_confirm_frame(self, frame: Basic.Ack | Basic.Nack | Basic.Reject) -> None:
        tag = frame.delivery_tag or 0
        unconfirmed = self._unconfirmed
        if getattr(frame, "multiple", False):
            tags: Iterable[int] = _up_to(unconfirmed, tag)
        else:
            tags = (tag,)
        refused = not isinstance(frame, Basic.Ack)
        for each in tags:
            confirmation = unconfirmed.pop(each, None)
            if confirmation is None:
                continue
            if refused:
                confirmation.refused += 1
            confirmation.left -= 1
            if not confirmation.left and not confirmation.done.done():
                confirmation.done.set_result(None)

    async def _on_return_frame(self, frame: Basic.Return) -> None:
        """It is answered before it is confirmed, in the order of publishing."""
        message = await self._read_message(frame)
        wanted = message.header.properties.message_id
        text = f"{frame.reply_text} (exchange {frame.exchange!r}, routing key {frame.routing_key!r})"
        for confirmation in dict.fromkeys(self._unconfirmed.values()):
            known = {returned.place for returned in confirmation.returned}
            for place, publication in enumerate(confirmation.publications):
                if (
                    publication.properties.message_id == wanted
                    and place not in known
                    and confirmation.first + place in self._unconfirmed
                ):
                    confirmation.returned.append(Returned(place, text))
                    return

    # --- consuming -------------------------------------------------------------------------------------------

    async def _on_deliver_frame(self, frame: Basic.Deliver) -> None:
        message = await self._read_message(frame)
        if self.on_delivery is not None:
            self.on_delivery(message)

    async def _read_message(self, frame: Basic.Deliver | Basic.Return) -> DeliveredMessage:
        header = await self._get_frame()
        assert isinstance(header, ContentHeader), header
        return await self._read_content(frame, header)

    def acknowledgements(self, returned: Iterable[int], up_to: int, single: Iterable[int]) -> ChannelFrame:
        """Those that go back to the queue; then all up to a tag (0: none), and single ones."""
        frames: list[Any] = [Basic.Nack(delivery_tag=tag, requeue=True) for tag in returned]
        if up_to:
            frames.append(Basic.Ack(delivery_tag=up_to, multiple=True))
        frames += [Basic.Ack(delivery_tag=tag) for tag in single]
        return ChannelFrame.marshall(self.number, frames)


def _up_to(unconfirmed: dict[int, Confirmation], tag: int) -> list[int]:
    found: deque[int] = deque()
    for each in unconfirmed:
        if each > tag:
            break
        found.append(each)
    return list(found)


async def open_channel(connection: AbstractConnection, cls: type[C], *, confirms: bool = False) -> C:
    number = next(number for number in range(1, 65536) if number not in connection.channels)
    channel = cls(connection, number, publisher_confirms=confirms)
    connection.channels[number] = channel
    await channel.open(timeout=30)
    return channel
