"""Reads deliveries, confirms and returns straight out of what a connection receives.

aiormq reads a frame in three steps, makes objects of it that say all that AMQP can say, and hands these to a task of
their channel through a queue; a delivery is three frames. These frames are read here instead, for channels that ask for
it, and all others are passed on to aiormq as they are.

Rules kept here:
- Nothing is passed on but whole frames, in their order. What is no frame at all is passed on as it comes: aiormq says
  what is wrong with it.
- aiormq watches that something comes. When frames are taken it gets a heartbeat now and then in their place.
- An error while a frame is taken costs its channel, and not the connection. Nothing more comes from that channel.
- What a broker would never say costs the channel, too: a delivery that comes again under its tag, a confirmation of
  what was not published. Then bytes came twice, or were changed on the way.
"""

import asyncio
import hashlib
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from struct import Struct
from typing import Any, NamedTuple

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from pamqp.commands import Basic
from pamqp.decode import field_table
from yarl import URL

log = logging.getLogger("faregate.rabbitmq")

_FRAME, _METHOD, _SIZE, _TAG = Struct(">BHI"), Struct(">I"), Struct(">Q"), Struct(">QB")
_METHODS, _HEADER, _BODY = 1, 2, 3
_END = 0xCE
_MOST = 1 << 24
"""Bytes of a frame; RabbitMQ's have 128 KiB at most."""
_RETURN, _DELIVER, _ACK, _NACK = 60 << 16 | 50, 60 << 16 | 60, 60 << 16 | 80, 60 << 16 | 120
_OURS = frozenset({_RETURN, _DELIVER, _ACK, _NACK})
_HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
_HEARTBEAT_SECONDS = 1.0
_LONGEST_TEXT = 255


class Nonsense(Exception):
    """What came is no answer to what was said."""


class Arrived(NamedTuple):
    """A message that was delivered to a channel."""

    delivery_tag: int
    redelivered: bool
    routing_key: str
    properties: Basic.Properties
    body: bytes


class Returned(NamedTuple):
    """A message that no queue takes, and what the broker says."""

    text: str
    properties: Basic.Properties


class Incoming:
    """What one channel takes of what comes for it."""

    def __init__(
        self,
        failed: Callable[[Exception], None],
        confirmed: Callable[[int, bool, bool], None] | None = None,
        returned: Callable[[Returned], None] | None = None,
    ) -> None:
        """`confirmed` is told a tag, whether all before it are meant, too, and whether the broker took them."""
        self.delivered: Callable[[Arrived], None] | None = None
        self._failed = failed
        self._confirmed = confirmed
        self._returned = returned
        self._message: Callable[[Basic.Properties, bytes], None] | None = None
        """Of the message whose header or body comes next."""
        self._broken = False
        """Something went wrong: nothing more is handed out before the channel is closed, so that the order holds."""
        self._last_tag = 0
        self._properties = Basic.Properties()
        self._body: list[bytes] = []
        self._left = 0

    def take(self, kind: int, data: bytes, at: int, end: int) -> bool:
        """A frame from `at` to `end`; False: it is for aiormq."""
        if self._broken:
            return kind != _METHODS or _METHOD.unpack_from(data, at)[0] in _OURS
        try:
            if kind == _METHODS:
                return self._take_method(data, at)
            if self._message is None:
                return False
            if kind == _HEADER:
                (self._left,) = _SIZE.unpack_from(data, at + 4)
                self._properties = read_properties(data, at + 12)
            elif kind == _BODY:
                self._body.append(data[at:end])
                self._left -= end - at
            else:
                return False
            if self._left <= 0:
                message, self._message = self._message, None
                body = self._body
                self._body = []
                message(self._properties, body[0] if len(body) == 1 else b"".join(body))
        except Nonsense as exc:
            log.warning("RabbitMQ, or what lies between, talks nonsense; the channel is made anew: %s", exc)
            self._broken = True
            self._failed(exc)
        except Exception as exc:
            log.critical("an unexpected error while reading; the channel is made anew", exc_info=True)
            self._broken = True
            self._failed(exc)
        return True

    def _take_method(self, data: bytes, at: int) -> bool:
        (method,) = _METHOD.unpack_from(data, at)
        at += 4
        if method == _DELIVER and self.delivered is not None:
            at += 1 + data[at]  # the consumer's tag: a channel has one consumer
            tag, redelivered = _TAG.unpack_from(data, at)
            if tag <= self._last_tag:
                raise Nonsense(f"delivery {tag} came after {self._last_tag}")
            self._last_tag = tag
            at += 9
            at += 1 + data[at]  # the exchange
            self._begin_delivery(self.delivered, tag, bool(redelivered & 1), _text(data, at))
        elif method in (_ACK, _NACK) and self._confirmed is not None:
            tag, multiple = _TAG.unpack_from(data, at)
            self._confirmed(tag, bool(multiple & 1), method == _ACK)
        elif method == _RETURN and self._returned is not None:
            reason = _text(data, at + 2)
            at += 3 + data[at + 2]
            exchange = _text(data, at)
            at += 1 + data[at]
            text, returned = f"{reason} (exchange {exchange!r}, routing key {_text(data, at)!r})", self._returned
            self._message = lambda properties, body: returned(Returned(text, properties))
        else:
            return False
        return True

    def _begin_delivery(
        self, delivered: Callable[[Arrived], None], tag: int, redelivered: bool, routing_key: str
    ) -> None:
        self._message = lambda properties, body: delivered(Arrived(tag, redelivered, routing_key, properties, body))


class Receiver(asyncio.StreamReader):
    """What a connection reads from. Channels that take frames are in `channels`, by number."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._clock = loop.time
        self.channels: dict[int, Incoming] = {}
        self._rest = b""
        """The first part of a frame."""
        self._is_amqp: bool | None = None
        self._beat_at = 0.0

    def feed_data(self, data: Any) -> None:
        if self._is_amqp is None:  # a server of another version says so with four letters
            self._is_amqp = not bytes(data[:4]).startswith(b"A")
        if not self._is_amqp:
            super().feed_data(data)
            return
        data = self._rest + data
        begin = at = 0
        took = False
        passed = []
        while len(data) - at >= 8:
            kind, number, size = _FRAME.unpack_from(data, at)
            following = at + size + 8
            if following > len(data) and size <= _MOST:
                break
            if size > _MOST or data[following - 1] != _END:
                self._is_amqp = False
                at = len(data)
                break
            incoming = self.channels.get(number)
            if incoming is not None and incoming.take(kind, data, at + 7, following - 1):
                took = True
                passed.append(data[begin:at])
                begin = following
            at = following
        passed.append(data[begin:at])
        self._rest = data[at:]
        if took and (now := self._clock()) >= self._beat_at:
            self._beat_at = now + _HEARTBEAT_SECONDS
            passed.append(_HEARTBEAT)
        if whole := b"".join(passed):
            super().feed_data(whole)

    def feed_eof(self) -> None:
        if self._rest:
            super().feed_data(self._rest)
        super().feed_eof()


class Receivers(TransportFactory):
    """Connects through a receiver."""

    receiver: Receiver

    async def create(self, url: URL, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        provider = options.pop("ssl_context_provider")
        context: ssl.SSLContext | None = await provider.get_context() if url.scheme == "amqps" else None
        self.receiver = Receiver(loop)
        protocol = asyncio.StreamReaderProtocol(self.receiver, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, str(url.host), url.port or 5672, ssl=context, **options
            )
        except OSError as exc:
            raise AMQPConnectionError(*exc.args) from exc
        return self.receiver, asyncio.StreamWriter(transport, protocol, self.receiver, loop)


def read_properties(data: bytes, at: int) -> Basic.Properties:
    """Of a message: two bytes of flags, and what they say is there. Headers that nobody can read are left out: another
    program may send anything, and that costs its own message at most."""
    flags, found = data[at] << 8 | data[at + 1], Basic.Properties()
    at += 2
    at = _read_texts(found, _TEXTS_BEFORE, flags, data, at)
    if flags & 0x2000:
        end = at + 4 + _METHOD.unpack_from(data, at)[0]
        with suppress(Exception):  # no table, no time, or nested deeper than Python goes
            _, found.headers = field_table(data[at:end])
        at = end
    if flags & 0x1000:
        found.delivery_mode = data[at]
        at += 1
    if flags & 0x0800:
        found.priority = data[at]
        at += 1
    at = _read_texts(found, _TEXTS, flags, data, at)
    if flags & 0x0040:
        found.timestamp = _time(_SIZE.unpack_from(data, at)[0])
        at += 8
    at = _read_texts(found, _TEXTS_BEHIND, flags, data, at)
    return found


_TEXTS_BEFORE = (0x8000, "content_type"), (0x4000, "content_encoding")
_TEXTS = (0x0400, "correlation_id"), (0x0200, "reply_to"), (0x0100, "expiration"), (0x0080, "message_id")
_TEXTS_BEHIND = (0x0020, "message_type"), (0x0010, "user_id"), (0x0008, "app_id"), (0x0004, "cluster_id")


def _read_texts(found: Basic.Properties, texts: tuple[tuple[int, str], ...], flags: int, data: bytes, at: int) -> int:
    """Where they end."""
    for flag, name in texts:
        if flags & flag:
            setattr(found, name, _text(data, at))
            at += 1 + data[at]
    return at


def _text(data: bytes, at: int) -> str:
    raw = data[at + 1 : at + 1 + data[at]]
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return _escaped(raw)
    return _escaped(raw) if "\0" in text else text


def _escaped(raw: bytes) -> str:
    """Of what is no UTF-8, or what PostgreSQL does not keep. Two of them that differ stay different, since the id of a
    message may be such a text, and none is too long to be sent on."""
    text = raw.decode(errors="backslashreplace").replace("\0", "\\x00")
    return text if len(text.encode()) <= _LONGEST_TEXT else hashlib.sha256(raw).hexdigest()


def _time(seconds: int) -> datetime | None:
    """None for what is no time; some programs send milliseconds."""
    try:
        return datetime.fromtimestamp(seconds / 1000 if seconds > 0xFFFFFFFF else seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None
