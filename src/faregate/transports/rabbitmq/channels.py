"""aiormq's channel, working on batches: one write for many publications or acknowledgements, no task for each delivery.

aiormq's own `basic_publish` makes two futures and takes a lock for each message, and it wakes a task for each frame and
starts one for each delivery. Here the frames of deliveries, confirms and returns are taken as the connection reads them
(`Channel.frames`); all others go aiormq's way, and connections, frames and their encoding stay aiormq's.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from aiormq.abc import AbstractConnection, ChannelFrame, DeliveredMessage
from aiormq.channel import Channel
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

C = TypeVar("C", bound="BatchChannel")
log = logging.getLogger("faregate.rabbitmq")


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


class _Frames(asyncio.Queue[Any]):
    """What the connection reads for a channel."""

    def __init__(self, channel: "BatchChannel") -> None:
        super().__init__()
        self._take = channel.take

    async def put(self, item: Any) -> None:
        if not self._take(item[1]):
            self.put_nowait(item)


class BatchChannel(Channel):
    """For publishing with confirms, for consuming, or for declaring."""

    def __init__(self, connector: AbstractConnection, number: int, **options: Any) -> None:
        super().__init__(connector, number, **options)
        self.frames = _Frames(self)
        self._unconfirmed: dict[int, Confirmation] = {}
        self.on_delivery: Callable[[DeliveredMessage], None] | None = None
        self._begun: Basic.Deliver | Basic.Return | None = None
        """Of the message whose header or body comes next."""

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

    def _confirmed(self, frame: Basic.Ack | Basic.Nack) -> None:
        tag = frame.delivery_tag or 0
        unconfirmed = self._unconfirmed
        if frame.multiple:
            tags: Iterable[int] = _up_to(unconfirmed, tag)
        else:
            tags = (tag,)
        refused = type(frame) is not Basic.Ack
        for each in tags:
            confirmation = unconfirmed.pop(each, None)
            if confirmation is None:
                continue
            if refused:
                confirmation.refused += 1
            confirmation.left -= 1
            if not confirmation.left and not confirmation.done.done():
                confirmation.done.set_result(None)

    def _returned(self, message: DeliveredMessage) -> None:
        """It is answered before it is confirmed, in the order of publishing."""
        frame = message.delivery
        assert isinstance(frame, Basic.Return)
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

    # --- reading ---------------------------------------------------------------------------------------------

    def take(self, frame: object) -> bool:
        """Of a delivery, a return or a confirm; False: it is for aiormq."""
        kind = type(frame)
        if self._begun is not None and kind is ContentBody:
            self._body.append(cast(ContentBody, frame).value)
            self._left -= len(self._body[-1])
        elif self._begun is not None and kind is ContentHeader:
            self._header = cast(ContentHeader, frame)
            self._left = self._header.body_size or 0
        elif kind is Basic.Deliver and self.on_delivery is not None:
            self._begin(cast(Basic.Deliver, frame), self.on_delivery)
            return True
        elif kind is Basic.Return and self.publisher_confirms:
            self._begin(cast(Basic.Return, frame), self._returned)
            return True
        elif kind in (Basic.Ack, Basic.Nack) and self.publisher_confirms:
            self._confirmed(cast(Basic.Ack, frame))
            return True
        else:
            return False
        if self._left <= 0:
            self._complete()
        return True

    def _begin(self, frame: Basic.Deliver | Basic.Return, read: Callable[[DeliveredMessage], None]) -> None:
        self._begun, self._read = frame, read
        self._body: list[bytes] = []

    def _complete(self) -> None:
        frame, self._begun = self._begun, None
        assert frame is not None
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        try:
            self._read(DeliveredMessage(delivery=frame, header=self._header, body=body, channel=self))
        except Exception as exc:  # it costs this channel, and not the connection
            log.critical("an error that nobody foresaw while reading; the channel is made anew", exc_info=True)
            self._ending = asyncio.get_running_loop().create_task(self.close(exc))

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
