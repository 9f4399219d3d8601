"""aiormq's channel, working on batches: one write for many publications or acknowledgements.

aiormq's own `basic_publish` makes two futures and takes a lock for each message. What comes for a channel is read in
`frames.py`; connections, commands and their encoding stay aiormq's.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from aiormq.abc import AbstractConnection, ChannelFrame
from aiormq.channel import Channel
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from faregate.transports.rabbitmq.frames import Incoming, Nonsense, Receiver, Returned

C = TypeVar("C", bound="BatchChannel")


class Publication(NamedTuple):
    """One message on its way to an exchange."""

    exchange: str
    routing_key: str
    properties: Basic.Properties
    body: bytes


class Confirmation:
    """Publications that go out together: done when the broker has answered for each of them."""

    __slots__ = ("done", "first", "left", "number", "publications", "refused", "returned")

    def __init__(self, publications: Sequence[Publication], number: int) -> None:
        """`number`: those with a lower one go out before it."""
        self.publications = publications
        self.number = number
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = 0
        """The number of the first on its channel; 0: none is on its way."""

    def begin(self, first: int) -> None:
        """They are written, or written again."""
        self.first = first
        self.left = len(self.publications)
        self.refused: list[int] = []
        """The places of those that the broker did not take; it says no reason."""
        self.returned: dict[int, str] = {}
        """The places of those that no queue takes, and what the broker says."""


class BatchChannel(Channel):
    """For publishing with confirms, for consuming, or for declaring."""

    def __init__(self, connector: AbstractConnection, number: int, *, confirms: bool) -> None:
        super().__init__(connector, number, publisher_confirms=confirms)
        self._unconfirmed: dict[int, Confirmation] = {}
        self.incoming = Incoming(self._failed)
        if confirms:
            self.incoming = Incoming(self._failed, self._confirmed, self._returned)

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

    def _confirmed(self, tag: int, multiple: bool, taken: bool) -> None:
        if tag > self.delivery_tag:
            raise Nonsense(f"publication {tag} is confirmed, and there were {self.delivery_tag}")
        unconfirmed = self._unconfirmed
        for each in _up_to(unconfirmed, tag) if multiple else (tag,):
            confirmation = unconfirmed.pop(each, None)
            if confirmation is None:
                continue
            if not taken:
                confirmation.refused.append(each - confirmation.first)
            confirmation.left -= 1
            if not confirmation.left and not confirmation.done.done():
                confirmation.done.set_result(None)

    def _returned(self, returned: Returned) -> None:
        """It is answered before it is confirmed, in the order of publishing."""
        wanted = returned.properties.message_id
        for confirmation in dict.fromkeys(self._unconfirmed.values()):
            for place, publication in enumerate(confirmation.publications):
                if (
                    publication.properties.message_id == wanted
                    and place not in confirmation.returned
                    and confirmation.first + place in self._unconfirmed
                ):
                    confirmation.returned[place] = returned.text
                    return

    # --- consuming -------------------------------------------------------------------------------------------

    def _failed(self, exc: Exception) -> None:
        lost = ConnectionError(f"{type(exc).__name__}: {exc}")
        self._ending = asyncio.get_running_loop().create_task(self.close(lost))

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


async def open_channel(
    connection: AbstractConnection, receiver: Receiver, cls: type[C], *, confirms: bool = False
) -> C:
    number = next(number for number in range(1, 65536) if number not in connection.channels)
    channel = cls(connection, number, confirms=confirms)
    connection.channels[number] = channel
    receiver.channels[number] = channel.incoming
    channel.closing.add_done_callback(lambda _: _forget(receiver, number, channel.incoming))
    await channel.open(timeout=30)
    return channel


def _forget(receiver: Receiver, number: int, incoming: Incoming) -> None:
    if receiver.channels.get(number) is incoming:
        del receiver.channels[number]
