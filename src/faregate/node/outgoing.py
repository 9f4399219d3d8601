"""What a handler returns to have something sent, and how it says more than the message itself."""

from collections.abc import Generator, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec

from faregate.errors import BareCommand, ConfigurationError, check_delay, check_expires
from faregate.message import Kind, MessageType, check_name, describe, known


class Outgoing(msgspec.Struct, gc=False, eq=False):
    """A message on its way out, with its options. Made by `fg.publish` and `fg.send`.

    One is made for every message: a struct without garbage-collector tracking is the cheapest object there is.
    """

    message: Any
    message_type: MessageType
    destination: str | None = None
    id_key: str | None = None
    delay: float | None = None
    at: float | None = None
    headers: dict[str, str] | None = None
    expires: float | None = None

    def choose(
        self,
        id_key: str | None,
        delay: float | timedelta | None,
        at: float | datetime | None,
        headers: Mapping[str, str] | None,
        expires: float | timedelta | None,
    ) -> None:
        """Set the options that were given."""
        if delay is not None and at is not None:
            raise ConfigurationError("give delay= or at=, not both")
        if id_key is not None and (not isinstance(id_key, str) or not id_key):
            raise ConfigurationError(f"id_key must be a non-empty text; got {id_key!r}")
        self.id_key = id_key
        self.delay = None if delay is None else check_delay(delay, "delay")
        self.at = None if at is None else _epoch(at)
        self.headers = check_headers(headers) if headers else None
        self.expires = None if expires is None else check_expires(expires)

    @property
    def kind(self) -> Kind:
        return self.message_type.kind

    def __repr__(self) -> str:
        where = f" to {self.destination}" if self.destination else ""
        return f"<outgoing {self.kind} {self.message_type.wire}{where}>"


def publish(
    event: Any,
    *,
    id_key: str | None = None,
    delay: float | timedelta | None = None,
    at: float | datetime | None = None,
    headers: Mapping[str, str] | None = None,
    expires: float | timedelta | None = None,
) -> Outgoing:
    """Return this from a handler to publish an event with options.

    `id_key` names this publication within the handler's run, where its position may vary between two runs. `expires`
    is how many seconds it may wait to be handled, from when it sets out: now, or when `delay` or `at` says.
    """
    outgoing = Outgoing(event, describe(type(event), "event"))
    if id_key is not None or delay is not None or at is not None or headers is not None or expires is not None:
        outgoing.choose(id_key, delay, at, headers, expires)
    return outgoing


def send(
    command: Any,
    *,
    to: str,
    id_key: str | None = None,
    delay: float | timedelta | None = None,
    at: float | datetime | None = None,
    headers: Mapping[str, str] | None = None,
    expires: float | timedelta | None = None,
) -> Outgoing:
    """Return this from a handler to send a command to the node that handles it."""
    outgoing = Outgoing(command, describe(type(command), "command"))
    outgoing.destination = check_name(to, "the destination node")
    outgoing.choose(id_key, delay, at, headers, expires)
    return outgoing


def as_outgoing(value: Any) -> Outgoing | None:
    """What `value`, returned by a handler, sends; None when it is no message. A bare command raises."""
    if isinstance(value, Outgoing):
        return value
    message_type = known(type(value))
    if message_type is None:
        return None
    if message_type.kind == "command":
        raise bare_command(message_type.cls)
    return Outgoing(value, message_type)


def bare_command(cls: type) -> BareCommand:
    return BareCommand(
        f"{cls.__name__} is a command and needs a destination: return fg.send({cls.__name__}(…), to='a node')"
    )


class Recorded:
    """What `ctx.publish` and `ctx.send` give back: awaiting it is allowed and does nothing."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


RECORDED = Recorded()


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name:
            raise ConfigurationError(f"headers are texts by name; got {name!r}: {value!r}")
    return dict(headers)


def _epoch(at: float | datetime) -> float:
    if not isinstance(at, datetime):
        return check_delay(at, "at (seconds since the epoch, or a datetime)")
    if at.tzinfo is None:
        raise ConfigurationError(f"at={at!r} has no time zone: use an aware datetime, for example in UTC")
    return at.timestamp()
