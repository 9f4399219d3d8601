"""A message to be sent, and the options of its publication."""

from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypedDict, TypeVar, Unpack

import msgspec

from faregate.errors import BareCommand, ConfigurationError, UnknownMessage, check_delay, check_expires
from faregate.message import Kind, MessageType, check_name, describe, describe_either, known

if TYPE_CHECKING:
    from faregate.node.node import Node

T = TypeVar("T")


class Options(TypedDict, total=False):
    """The options of a publication: the same for handlers, the bus, `fg.outbox` and the bench.

    A new one is a line here, a field of `Outgoing`, and a check in `_CHECKS`.
    """

    id_key: str | None
    """In handlers: names this publication, where its place among the outputs may differ between two runs."""
    idempotency_key: str | None
    """Outside of handlers: the same key, for one node and type, is the same publication."""
    delay: float | timedelta | None
    """Seconds from now until it is delivered."""
    at: float | datetime | None
    """When it is delivered: an aware datetime, or seconds since the epoch."""
    headers: Mapping[str, str] | None
    expires: float | timedelta | None
    """How many seconds it may wait to be handled, from when it sets out: now, or when `delay` or `at` says."""


class Outgoing(msgspec.Struct, gc=False, eq=False, frozen=True):
    """A message on its way out, with its options. Made by `fg.publish`, `fg.send` and `fg.reply`, and taken wherever
    messages are.

    One is made for every message, so it is a struct without garbage-collector tracking: the cheapest object there is.
    """

    message: Any
    message_type: MessageType
    destination: str | None = None
    id_key: str | None = None
    idempotency_key: str | None = None
    delay: float | None = None
    at: float | None = None
    headers: dict[str, str] | None = None
    expires: float | None = None
    is_reply: bool = False
    """It goes to whoever asked by the message that the handler handles."""

    @property
    def kind(self) -> Kind:
        """Whether it is an event or a command."""
        return self.message_type.kind

    def is_scheduled(self, key: str) -> bool:
        """Whether it is to be delivered later, and can be cancelled by this key."""
        return (self.delay is not None or self.at is not None) and key in (self.id_key, self.idempotency_key)

    def __repr__(self) -> str:
        where = f" to {self.destination}" if self.destination else ""
        return f"<outgoing {'reply' if self.is_reply else self.kind} {self.message_type.wire}{where}>"


class Reply(Outgoing, Generic[T], gc=False, eq=False, frozen=True):
    """What `fg.reply` makes. As an annotation it says what a handler answers with: `-> fg.Reply[CardCharged]`."""


def publish(event: Any, **options: Unpack[Options]) -> Outgoing:
    """An event with its options (see `Options`): return it from a handler, or hand it to whatever publishes.

    A result of `fg.publish` or `fg.send` is taken as it is.
    """
    return as_event(event, options)


def as_event(event: Any, options: Options) -> Outgoing:
    """The same, for `publish` methods that take the options by name themselves."""
    if isinstance(event, Outgoing):
        return _as_it_is(event, options)
    message_type = describe(type(event), "event")
    return Outgoing(event, message_type, **_checked(options)) if options else Outgoing(event, message_type)


class Alike(NamedTuple):
    """Events of one class without options, as most are that are published together: nothing is made for each."""

    message_type: MessageType
    messages: list[Any]


def as_events(events: Iterable[Any]) -> list[Outgoing] | Alike:
    """The same for many, whose options they have with them."""
    messages = list(events)
    classes = set(map(type, messages))
    if len(classes) == 1 and not issubclass(cls := classes.pop(), Outgoing):
        return Alike(describe(cls, "event"), messages)
    return [as_event(message, {}) for message in messages]


def send(command: Any, *, to: "str | Node", **options: Unpack[Options]) -> Outgoing:
    """A command for the node `to`, with its options: return it from a handler, or hand it to whatever sends."""
    message_type = describe(type(command), "command")
    destination = node_name(to, "the destination node")
    if not options:
        return Outgoing(command, message_type, destination)
    return Outgoing(command, message_type, destination, **_checked(options))


def reply(message: T, *, headers: Mapping[str, str] | None = None) -> Reply[T]:
    """The answer to `bus.request`: return it from the handler of the message that was asked by. It goes to whoever
    asked; where nobody did (a plain send, an event), it goes nowhere, and is counted."""
    if isinstance(message, Outgoing):
        raise ConfigurationError(f"fg.reply takes the message itself, not {message!r}")
    message_type = describe_either(type(message))
    return Reply(message, message_type, headers=None if headers is None else check_headers(headers), is_reply=True)


def as_command(command: Any, to: "str | Node | None", options: Options) -> Outgoing:
    """What `send` methods take: a command and where it goes, or what `fg.send` made of them."""
    if not isinstance(command, Outgoing):
        if to is None:
            raise bare_command(type(command))
        return send(command, to=to, **options)
    if command.kind != "command":
        raise UnknownMessage(f"{command!r} is no command: publish it")
    return _as_it_is(command, options if to is None else {"to": to, **options})


def _as_it_is(out: Outgoing, more: Mapping[str, Any]) -> Outgoing:
    if more:
        raise ConfigurationError(
            f"{out!r} was made with its options: give {', '.join(more)} to fg.publish(…) or fg.send(…) as well"
        )
    return out


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


class NothingToAwait:
    """What `ctx.publish` and `ctx.send` give back: awaiting it is allowed and does nothing."""

    def __await__(self) -> Generator[Any, None, None]:
        return iter(())  # type: ignore[return-value]  # as good as a generator that ends at once, and cheaper


NOTHING_TO_AWAIT = NothingToAwait()


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name:
            raise ConfigurationError(f"headers are texts by name; got {name!r}: {value!r}")
    return dict(headers)


def _text(value: object, option: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{option} must be a non-empty text; got {value!r}")
    try:
        value.encode()  # ids are made of it
    except UnicodeEncodeError:
        raise ConfigurationError(f"{option} must be Unicode text; got {value!r}") from None
    return value


def _seconds(at: float | datetime) -> float:
    if not isinstance(at, datetime):
        return check_delay(at, "at (seconds since the epoch, or a datetime)")
    if at.tzinfo is None:
        raise ConfigurationError(f"at={at!r} has no time zone: use an aware datetime, for example in UTC")
    return at.timestamp()


def check_scheduled(publication_id: object, key: object) -> tuple[str | None, str | None]:
    """What is cancelled: one of the two."""
    if (publication_id is None) == (key is None):
        raise ConfigurationError("say what to cancel: a publication id, or key='the key that it was scheduled with'")
    if publication_id is not None:
        return _text(publication_id, "the publication id"), None
    return None, _text(key, "key")


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "id_key": lambda value: _text(value, "id_key"),
    "idempotency_key": lambda value: _text(value, "idempotency_key"),
    "delay": lambda value: check_delay(value, "delay"),
    "at": _seconds,
    "headers": check_headers,
    "expires": check_expires,
}


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, as `Outgoing` has them."""
    found = {}
    for name, value in options.items():
        check = _CHECKS.get(name)
        if check is None:
            raise ConfigurationError(f"a publication has no option {name}=: there are {', '.join(_CHECKS)}")
        if value is not None:
            found[name] = check(value)
    if "delay" in found and "at" in found:
        raise ConfigurationError("give delay= or at=, not both")
    return found


def node_name(node: "str | Node", what: str = "the node") -> str:
    return check_name(getattr(node, "name", node), what)
