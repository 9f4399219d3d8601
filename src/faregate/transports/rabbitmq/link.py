"""A connection to RabbitMQ that comes back.

Rules kept here:
- Whoever needs the connection waits for it. When it is lost it is made anew, with growing pauses at random, at each
  host of the cluster in turn. The pauses go on growing while connections are lost as soon as they are made.
- What no waiting mends is a `ConfigurationError` at once: wrong credentials, no such virtual host, missing rights.
- aiormq's errors do not leave this folder.
"""

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from typing import Any, TypeVar

import aiormq
from aiormq.abc import AbstractConnection
from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ConnectionClosed,
    ConnectionNotAllowed,
    InvalidFrameError,
    ProbableAuthenticationError,
)

from faregate.errors import BrokerUnavailable, ConfigurationError
from faregate.ports.cancellation import end
from faregate.transports.rabbitmq.address import Address
from faregate.transports.rabbitmq.channels import BatchChannel, open_channel
from faregate.transports.rabbitmq.frames import Receivers

log = logging.getLogger("faregate.rabbitmq")
if not (_drivers := logging.getLogger(aiormq.__name__)).level:
    _drivers.setLevel(logging.CRITICAL)  # what it would log is raised or logged here, with the message and the queue

C = TypeVar("C", bound=BatchChannel)

LOST = (AMQPError, ConnectionError, ChannelInvalidStateError, RuntimeError, OSError, asyncio.TimeoutError)
"""What aiormq raises when a channel or a connection is gone, in whichever moment."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0

_ATTEMPT_SECONDS = 10.0
_LASTING_SECONDS = 0.5
"""A connection that lasted for so long was a good one."""


def how_lost(lost: "asyncio.Future[None]") -> BaseException:
    """What to raise when the channel or connection is gone whose `closing` this is. Somebody who closes it may give any
    reason."""
    error = lost.exception() if lost.done() and not lost.cancelled() else None
    if isinstance(error, LOST):
        return error
    gone = ConnectionError("the channel is closed")
    gone.__cause__ = error
    return gone


class Link:
    def __init__(self, address: Address, name: str) -> None:
        """`name`: what the broker's people see: node, instance and purpose."""
        self._address = address
        self._name = name
        self._brokers = cycle(address.brokers)
        self._connection: AbstractConnection | None = None
        self._connected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self) -> None:
        """Raises `BrokerUnavailable` when nobody answers in time, and `ConfigurationError`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._address.connect_seconds
        pauses = _pauses()
        told = False
        while True:
            try:
                await self._connect()
                break
            except BrokerUnavailable as exc:
                if loop.time() >= until:
                    raise BrokerUnavailable(
                        f"no RabbitMQ answered at {self._address.url} within {self._address.connect_seconds:g} s: "
                        f"{exc}. Start it, or mend the address"
                    ) from exc
                if not told:
                    log.warning("waiting for RabbitMQ at %s: %s", self._address.url, exc)
                    told = True
                await asyncio.sleep(min(next(pauses), until - loop.time()))
        self._task = asyncio.create_task(self._keep())

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    async def close(self) -> None:
        self._closing = True
        await end(self._task)
        if self._connection is not None:
            with suppress(*LOST):
                await self._connection.close()

    async def channel(self, cls: type[C], **options: Any) -> C:
        """A new channel, as soon as there is a connection. Raises what aiormq raises when it is lost meanwhile."""
        await self._connected.wait()
        assert self._connection is not None
        with not_cancelled():
            return await open_channel(self._connection, self._receiver, cls, **options)

    async def unblocked(self) -> None:
        """Return once the broker takes publications: it stops doing so while it lacks memory or disk."""
        await self._connected.wait()
        assert self._connection is not None
        await self._connection.ready()

    @property
    def version(self) -> tuple[int, ...]:
        """Of the broker."""
        assert self._connection is not None
        text = str(self._connection.server_properties.get("version", "0"))
        return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())

    async def _connect(self) -> None:
        broker = next(self._brokers)
        with said_by(self._address.url):
            async with asyncio.timeout(_ATTEMPT_SECONDS):
                receivers = Receivers()
                connection = aiormq.Connection(
                    broker, transport_factory=receivers, client_properties={"connection_name": self._name}
                )
                await connection.connect()
        self._connection, self._receiver = connection, receivers.receiver
        self._connected.set()

    async def _keep(self) -> None:
        """Make it anew whenever it is lost."""
        loop = asyncio.get_running_loop()
        pauses, pause, made_at = _pauses(), 0.0, loop.time()
        while True:
            assert self._connection is not None
            with suppress(BaseException):  # how it ended is said below, or nobody's concern when we close it
                await asyncio.shield(self._connection.closing)
            if self._closing:
                return
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise asyncio.CancelledError
            self._connected.clear()
            log.warning("the connection to RabbitMQ at %s is lost; it is made anew", self._address.url)
            if loop.time() >= made_at + _LASTING_SECONDS:
                pauses, pause = _pauses(), 0.0
            while True:
                await asyncio.sleep(pause)
                pause = next(pauses)
                try:
                    await self._connect()
                    break
                except BrokerUnavailable as exc:
                    log.debug("RabbitMQ at %s: %s", self._address.url, exc)
                except ConfigurationError as exc:
                    log.error("%s", exc)
            made_at = loop.time()
            log.warning("RabbitMQ at %s answers again", self._address.url)


@contextmanager
def not_cancelled() -> Iterator[None]:
    """aiormq ends what waits for a lost connection with a cancellation that nobody asked for: make it an error."""
    try:
        yield
    except asyncio.CancelledError as exc:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionError("the connection is lost") from exc


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE)


@contextmanager
def said_by(url: str) -> Iterator[None]:
    """Turn what aiormq says of a connection into our errors."""
    try:
        with not_cancelled():
            yield
    except (AuthenticationError, ProbableAuthenticationError) as exc:
        raise ConfigurationError(
            f"RabbitMQ refuses the user or the password in {url}: {_words(exc)}. Mend the URL, or add the user "
            "(rabbitmqctl add_user)"
        ) from exc
    except (ConnectionNotAllowed, ChannelAccessRefused, InvalidFrameError) as exc:
        # aiormq takes the refusal of a virtual host for a frame that it did not expect, and drops the reason.
        why = "" if isinstance(exc, InvalidFrameError) else f" It says: {_words(exc)}"
        raise ConfigurationError(
            f"RabbitMQ at {url} does not let this user in. Name a virtual host that is there (rabbitmqctl add_vhost), "
            f"in which the user may configure, write and read (rabbitmqctl set_permissions).{why}"
        ) from exc
    except ConnectionClosed as exc:
        raise BrokerUnavailable(f"RabbitMQ closed the connection: {_words(exc)}") from exc
    except (*LOST, TimeoutError) as exc:
        raise BrokerUnavailable(_words(exc) or f"no answer within {_ATTEMPT_SECONDS:g} s") from exc


def _words(exc: BaseException) -> str:
    return " ".join(str(part) for part in exc.args).rstrip(".") or type(exc).__name__
