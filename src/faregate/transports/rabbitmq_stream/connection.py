"""RabbitMQ's stream protocol on a blocking socket. Frames are encoded and decoded by rstream.

Those who read and write a log wait for it, in a thread or a task of their own. So nothing here needs an event loop, a
thread, or heartbeats (they are negotiated away; the system's keepalive finds a peer that is gone).

Rules kept here:
- Frames of a connection are answered in order. What a subscription has to deliver now comes before the answer to a
  later request: so the end of what there is is known without waiting for a time.
- A connection that failed is closed, and never used again.
- rstream's errors and the system's do not leave this file. What no waiting mends is a `ConfigurationError`.
"""

import socket
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, TypeVar

from rstream import encoding, schema
from rstream.constants import OffsetType

from faregate.errors import BrokerUnavailable, ConfigurationError, FaregateError, OutcomeUnknown, StreamNotFound
from faregate.transports.rabbitmq_stream.address import Address
from faregate.transports.rabbitmq_stream.chunks import batch_frame, behind, cut

F = TypeVar("F", bound=schema.Frame)
A = TypeVar("A", schema.SubscribeResponse, schema.DeclarePublisherResponse, schema.QueryPublisherSequenceResponse)

SECONDS = 30.0
"""That a broker may take for an answer."""
_CONNECT_SECONDS = 10.0
_LEADER_SECONDS, _PAUSE_SECONDS = 5.0, 0.05
_OK, _NO_STREAM, _EXISTS, _NOT_AVAILABLE = 1, 2, 5, 6
_LOGIN = {8, 9, 10, 11}
_CREDIT = 8
"""Chunks that are under way, at most."""
_IN_FLIGHT = 32
"""Batches that wait for their confirmation, at most."""
_SUBSCRIPTION, _PUBLISHER = 1, 1
_FRAME_MAX = 1 << 20
FIRST, LAST = schema.OffsetSpec(OffsetType.FIRST), schema.OffsetSpec(OffsetType.LAST)
COMPLETE = 1 << 62
"""The number of the last batch under a name: whatever comes under it later is a repetition."""


def at_offset(offset: int) -> schema.OffsetSpec:
    return schema.OffsetSpecOffset(OffsetType.OFFSET, offset)


def at_time(milliseconds: int) -> schema.OffsetSpec:
    return schema.OffsetSpecTimestamp(OffsetType.TIMESTAMP, milliseconds)


class Connection:
    """Of one thread at a time. Raises `BrokerUnavailable`, `ConfigurationError` from all that it does."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._numbers = count(1)
        self.frame_max = _FRAME_MAX
        self.is_open = False
        with self._told():
            self._socket = _connected(address)
            self._incoming = self._socket.makefile("rb")
        self.is_open = True
        try:
            with self._told():
                self._socket.settimeout(SECONDS)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._log_in()
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        """Says so, and waits for nothing."""
        if self.is_open:
            with suppress(OSError):
                self._send(schema.Close(next(self._numbers), code=_OK, reason="OK"))
        self._drop()

    # --- what a log needs ---------------------------------------------------------------------------------------

    def probe(self, stream: str, where: schema.OffsetSpec) -> schema.Deliver | None:
        """The chunk that a reader from there gets first; None when there is none yet."""
        with self._told(stream):
            self._subscribe(stream, where, 1)
            self._send(schema.Unsubscribe(next(self._numbers), _SUBSCRIPTION))
            found = None
            while not isinstance(frame := self._read(), schema.UnsubscribeResponse):
                if isinstance(frame, schema.Deliver) and found is None:
                    found = frame
            return found

    def chunks(self, stream: str, start: int, end: int) -> Generator[schema.Deliver, None, None]:
        """From the one that has the offset `start` up to the one that has `end - 1`, which must be there. Closes the
        connection when it is left before that, as what is under way cannot be stopped."""
        with self._told(stream):
            self._subscribe(stream, at_offset(start), _CREDIT)
            try:
                while True:
                    frame = self._read()
                    if isinstance(frame, schema.Deliver):
                        yield frame
                        if behind(frame) >= end:
                            break
                        self._send(schema.Credit(_SUBSCRIPTION, 1))
            except GeneratorExit:
                self.close()
                raise
            self._ask(schema.Unsubscribe(next(self._numbers), _SUBSCRIPTION), schema.UnsubscribeResponse)

    def publish(self, stream: str, entries: Iterable[bytes], name: str, first: int = 1, last: int = COMPLETE) -> None:
        """Under a name what has a number is published once; an empty name is none. What does not fit into one frame is
        numbered from `first` on, and its end is `last`. Raises `MessageTooLarge`, `OutcomeUnknown`."""
        batches = list(cut(entries, self.frame_max))
        with self._told(stream):
            self._ask_of(
                stream,
                lambda number: schema.DeclarePublisher(number, _PUBLISHER, name, stream),
                schema.DeclarePublisherResponse,
            )
            try:
                self._publish(batches, [*range(first, first + len(batches) - 1), last])
            except (OSError, ValueError, EOFError, FaregateError) as exc:
                self._drop()
                raise OutcomeUnknown(
                    f"{sum(map(len, batches))} messages for the stream {stream} of {self._address.url} were not "
                    f"confirmed: {exc}. Append them again, under the same name"
                ) from exc
            gone = schema.DeletePublisher(next(self._numbers), _PUBLISHER)
            self._check(self._ask(gone, schema.DeletePublisherResponse), stream)

    def published(self, stream: str, name: str) -> int:
        """The last number under a name; 0 when there is none."""
        with self._told(stream):
            return self._ask_of(
                stream,
                lambda number: schema.QueryPublisherSequence(number, name, stream),
                schema.QueryPublisherSequenceResponse,
            ).sequence

    def end(self, stream: str) -> int:
        """The offset behind the last record."""
        last = self.probe(stream, LAST)
        return 0 if last is None else behind(last)

    def create(self, stream: str, arguments: dict[str, str]) -> bool:
        """False: it is there already."""
        with self._told(stream):
            given = [schema.Property(name, value) for name, value in arguments.items()]
            answer = self._ask(schema.Create(next(self._numbers), stream, given), schema.CreateResponse)
            if answer.response_code == _EXISTS:
                return False
            self._check(answer, stream)
            return True

    def delete(self, stream: str) -> None:
        with self._told(stream):
            answer = self._ask(schema.Delete(next(self._numbers), stream), schema.DeleteResponse)
            self._check(answer, stream)

    def leader(self, stream: str) -> tuple[str, int]:
        """Where what was confirmed can be read at once: host and port."""
        with self._told(stream):
            answer = self._ask(schema.Metadata(next(self._numbers), [stream]), schema.MetadataResponse)
            [found] = answer.metadata
            self._check(found, stream)
            by_number = {broker.reference: broker for broker in answer.brokers}
            if found.leader_ref not in by_number:
                raise BrokerUnavailable(f"the stream {stream} of {self._address.url} has no leader now")
            leader = by_number[found.leader_ref]
            return leader.host, leader.port

    # --- frames -------------------------------------------------------------------------------------------------

    def _subscribe(self, stream: str, where: schema.OffsetSpec, credit: int) -> None:
        self._ask_of(
            stream,
            lambda number: schema.Subscribe(number, _SUBSCRIPTION, stream, where, credit, []),
            schema.SubscribeResponse,
        )

    def _publish(self, batches: list[list[bytes]], numbers: list[int]) -> None:
        waiting: set[int] = set()
        for number, entries in zip(numbers, batches, strict=True):
            self._send(batch_frame(_PUBLISHER, number, entries))
            waiting.add(number)
            while len(waiting) >= (_IN_FLIGHT if number != numbers[-1] else 1):
                frame = self._read()
                if isinstance(frame, schema.PublishConfirm):
                    waiting.difference_update(frame.publishing_ids)
                elif isinstance(frame, schema.PublishError):
                    raise BrokerUnavailable(f"the broker refused it with code {frame.errors[0].response_code}")

    def _ask_of(self, stream: str, make: Callable[[int], schema.Frame], answer: type[A]) -> A:
        """Of a stream, and again while it has no leader. That is so for a moment after another client has made it."""
        until = time.monotonic() + _LEADER_SECONDS
        while True:
            found = self._ask(make(next(self._numbers)), answer)
            if found.response_code != _NOT_AVAILABLE or time.monotonic() >= until:
                self._check(found, stream)
                return found
            time.sleep(_PAUSE_SECONDS)

    def _ask(self, frame: schema.Frame, answer: type[F]) -> F:
        self._send(frame)
        while not isinstance(found := self._read(), answer):
            pass  # a late confirmation, news of the stream's members
        return found

    def _send(self, frame: schema.Frame) -> None:
        self._socket.sendall(encoding.encode_frame(frame))

    def _read(self) -> schema.Frame:
        size = int.from_bytes(self._exactly(4), "big")
        if size == int.from_bytes(b"AMQP", "big"):
            raise ConfigurationError(
                f"{self._address.host}:{self._address.port} speaks AMQP: give the port of the streams, 5552 unless "
                "configured otherwise"
            )
        frame = encoding.decode_frame(self._exactly(size))
        if isinstance(frame, schema.Close | schema.MetadataUpdate):
            self._drop()
            why = frame.reason if isinstance(frame, schema.Close) else "the stream was deleted, or moved"
            raise BrokerUnavailable(f"RabbitMQ at {self._address.url} ended the connection: {why}")
        return frame

    def _exactly(self, size: int) -> bytes:
        data = self._incoming.read(size)
        if len(data) < size:
            raise EOFError("the broker closed the connection")
        return data

    def _log_in(self) -> None:
        address = self._address
        about = [schema.Property("product", "faregate"), schema.Property("connection_name", "faregate log")]
        self._ask(schema.PeerProperties(next(self._numbers), about), schema.PeerPropertiesResponse)
        self._ask(schema.SaslHandshake(next(self._numbers)), schema.SaslHandshakeResponse)
        login = f"\0{address.user}\0{address.password}".encode()
        asked = schema.SaslAuthenticate(next(self._numbers), "PLAIN", login)
        answer = self._ask(asked, schema.SaslAuthenticateResponse)
        if answer.response_code in _LOGIN:
            raise ConfigurationError(
                f"RabbitMQ refuses the user or the password in {address.url}. Mend the URL, or add the user "
                "(rabbitmqctl add_user)"
            )
        tune = self._read()
        assert isinstance(tune, schema.Tune)
        self.frame_max = tune.frame_max or _FRAME_MAX
        self._send(schema.Tune(self.frame_max, 0))
        opened = self._ask(schema.Open(next(self._numbers), address.vhost), schema.OpenResponse)
        if opened.response_code != _OK:
            raise ConfigurationError(
                f"RabbitMQ at {address.url} does not let this user into the virtual host {address.vhost!r}: name one "
                "that is there (rabbitmqctl add_vhost), in which the user has rights (rabbitmqctl set_permissions)"
            )

    def _check(self, answer: Any, stream: str) -> None:
        code = answer.response_code
        if code == _OK:
            return
        url = self._address.url
        if code == _NO_STREAM:
            raise StreamNotFound(
                f"there is no stream {stream} at {url}: declare it, as a queue with x-queue-type=stream, or with "
                "faregate.transports.rabbitmq_stream.create_stream"
            )
        if code == _NOT_AVAILABLE:
            raise BrokerUnavailable(f"the stream {stream} of {url} is not available now")
        if code == 16:
            raise ConfigurationError(
                f"the user in {url} may not do this to the stream {stream}: rabbitmqctl set_permissions gives rights"
            )
        raise ConfigurationError(f"the broker at {url} refuses what was asked of the stream {stream}: code {code}")

    @contextmanager
    def _told(self, stream: str = "") -> Iterator[None]:
        """Our errors for the system's."""
        address = self._address
        try:
            yield
        except ConnectionRefusedError as exc:
            self._drop()
            if _answers(address.host, address.amqp_port):
                raise ConfigurationError(
                    f"RabbitMQ answers at {address.host}:{address.amqp_port}, and nobody at the port of its streams, "
                    f"{address.port}: run rabbitmq-plugins enable rabbitmq_stream there, or mend the port in "
                    f"{address.url}"
                ) from exc
            raise BrokerUnavailable(f"no RabbitMQ answers at {address.url}: {exc}. Start it, or mend the URL") from exc
        except (OSError, EOFError, ValueError) as exc:
            self._drop()
            of = f"the stream {stream} of " if stream else ""
            raise BrokerUnavailable(f"{of}RabbitMQ at {address.url} cannot be reached: {exc}") from exc

    def _drop(self) -> None:
        if self.is_open:
            self.is_open = False
            self._incoming.close()
            self._socket.close()


def _connected(address: Address) -> socket.socket:
    plain = socket.create_connection((address.host, address.port), _CONNECT_SECONDS)
    if address.tls is None:
        return plain
    tls = address.tls
    try:
        context = ssl.create_default_context(cafile=tls.cafile)
        if tls.certfile is not None:
            context.load_cert_chain(tls.certfile, tls.keyfile)
        return context.wrap_socket(plain, server_hostname=address.host)
    except BaseException as exc:
        plain.close()
        if not isinstance(exc, ssl.SSLError | FileNotFoundError) or isinstance(exc, ssl.SSLEOFError):
            raise  # the broker went away
        raise ConfigurationError(
            f"no TLS with {address.host}:{address.port}: {exc}. Mend cafile=, certfile= and keyfile=, or the port in "
            f"{address.url}"
        ) from exc


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
