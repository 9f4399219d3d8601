"""Messages and the envelope they travel in.

Rules kept here:
- A message class has one wire name and one kind: an event (0..n recipients) or a command (one destination).
- `Event` and `Command` subclasses are frozen msgspec structs. Dataclasses, attrs and pydantic classes join
  through `@event`, `@command`, or by being named in a subscription.
- A class may name its key, by which brokers partition: whoever publishes knows it, without knowing who subscribes.
- Contracts are tolerant: a class may declare fewer fields than the publisher sent under the same wire name.
- An envelope does not change: what differs on the way is a new one, by `msgspec.structs.replace`. Until it is on its
  way some fields are filled in, by `force_setattr`: the headers that outgoing middlewares add, the trace context of
  whoever publishes it, and, when the transport takes it, its recipients, so that who publishes it again (the outbox
  does) publishes it to the same ones.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar, dataclass_transform, overload

import msgspec

from faregate.errors import InvalidName, UnknownKey, UnknownMessage
from faregate.plain import plain

Kind = Literal["event", "command", "reply"]
"""A class is an event or a command. An envelope may be a reply, too: to whoever asked, at its `destination`."""
KeyFields = str | tuple[str, ...]
C = TypeVar("C", bound=type)

REPLY_TO = "x-faregate-reply-to"
"""The header of a request: the address for its reply."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_named: dict[str, dict[tuple[str, str], type]] = {}
"""By wire name: the message classes of this process, each by module and name, so that one made anew replaces itself."""


def check_name(name: object, what: str) -> str:
    """Names go into queue names and routing keys, so they are letters, digits, `_` and `-` only."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidName(
            f"{what} {name!r} is not a valid name: use 1 to 100 letters, digits, '_' or '-', for example 'billing'"
        )
    return name


@dataclasses.dataclass(frozen=True, slots=True)
class MessageType:
    """What is known of a message class."""

    cls: type
    wire: str
    kind: Kind
    fields: frozenset[str]
    declared: bool = True
    """False when the class was never declared but only used as a message."""
    key: tuple[str, ...] = ()
    """The fields whose values are the key of its messages."""

    def __str__(self) -> str:
        return self.wire


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class MessageMeta(msgspec.StructMeta):
    """Takes `wire="name"` and `key="field"` as class keywords and registers the class as a message."""

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        wire: str | None = None,
        key: KeyFields | None = None,
        **config: Any,
    ) -> "MessageMeta":
        cls = super().__new__(mcls, name, bases, namespace, **config)
        kind = next((base.__dict__["__kind__"] for base in cls.__mro__ if "__kind__" in base.__dict__), None)
        if kind is not None and "__kind__" not in namespace:
            _register(cls, kind, wire, key)
        return cls


class Event(msgspec.Struct, frozen=True, metaclass=MessageMeta):
    """Base of events: something happened; anyone may subscribe, the publisher does not care."""

    __kind__ = "event"


class Command(msgspec.Struct, frozen=True, metaclass=MessageMeta):
    """Base of commands: one destination node shall do something."""

    __kind__ = "command"


@overload
def event(cls: C) -> C: ...
@overload
def event(*, wire: str | None = None, key: KeyFields | None = None) -> Callable[[C], C]: ...
def event(cls: C | None = None, *, wire: str | None = None, key: KeyFields | None = None) -> C | Callable[[C], C]:
    """Declare a dataclass, attrs class or pydantic model as an event."""
    return _declare("event", cls, wire, key)


@overload
def command(cls: C) -> C: ...
@overload
def command(*, wire: str | None = None, key: KeyFields | None = None) -> Callable[[C], C]: ...
def command(cls: C | None = None, *, wire: str | None = None, key: KeyFields | None = None) -> C | Callable[[C], C]:
    """Declare a dataclass, attrs class or pydantic model as a command."""
    return _declare("command", cls, wire, key)


def _declare(kind: Kind, cls: C | None, wire: str | None, key: KeyFields | None) -> C | Callable[[C], C]:
    def declare(cls: C) -> C:
        _register(cls, kind, wire, key)
        return cls

    return declare if cls is None else declare(cls)


def known(cls: type) -> MessageType | None:
    """What was declared for exactly this class; a subclass of a declared class is a class of its own."""
    found: MessageType | None = cls.__dict__.get("__faregate__")
    return found


def _implied(cls: type, kind: Kind) -> MessageType:
    """A class that nobody declared is what it is used as; what it was used as first is what it is known as."""
    found = dataclasses.replace(_message_type(cls, kind, None), declared=False)
    if known(cls) is None:
        type.__setattr__(cls, "__faregate__", found)
        _note(found)
    return found


def describe(cls: object, kind: Kind) -> MessageType:
    """The message type of `cls` when it is used as `kind`.

    Raises `UnknownMessage` when the class cannot be a message or was declared as the other kind.
    """
    if not isinstance(cls, type):
        raise UnknownMessage(
            f"{cls!r} is not a message class: pass the class itself, for example OrderPlaced, "
            "declared as a subclass of fg.Event or fg.Command"
        )
    found: MessageType | None = cls.__dict__.get("__faregate__")  # as `known` does, without a call
    if found is not None and found.kind == kind:
        return found
    if found is None or not found.declared:
        return _implied(cls, kind)
    raise UnknownMessage(f"{cls.__name__} is {_ARTICLE[found.kind]}, not {_ARTICLE[kind]}: {_HINT[found.kind]}")


def describe_either(cls: object) -> MessageType:
    """The same where both kinds will do: it is what it was declared as, or an event."""
    found = known(cls) if isinstance(cls, type) else None
    return describe(cls, "event" if found is None else found.kind)


_ARTICLE = {"event": "an event", "command": "a command"}
_HINT = {
    "event": "publish it, and subscribe to it with on(…, source='the publishing node')",
    "command": "send it with fg.send(…, to='the node that handles it'), and subscribe to it without source=",
}


def _register(cls: type, kind: Kind, wire: str | None, key: KeyFields | None) -> None:
    found = _message_type(cls, kind, wire, key)
    type.__setattr__(cls, "__faregate__", found)
    _note(found)


def _note(found: MessageType) -> None:
    _named.setdefault(found.wire, {})[found.cls.__module__, found.cls.__qualname__] = found.cls


def classes_named(wire: str) -> list[type]:
    """The message classes of this process that have this wire name."""
    return list(_named.get(wire, {}).values())


def _message_type(cls: type, kind: Kind, wire: str | None, key: KeyFields | None = None) -> MessageType:
    fields = None if "__kind__" in cls.__dict__ else _field_names(cls)
    if fields is None:
        raise UnknownMessage(
            f"{cls.__name__} is not a message class: make it a subclass of fg.Event or fg.Command, "
            "or a dataclass, an attrs class or a pydantic model"
        )
    name = check_name(wire or cls.__name__, f"the wire name of {cls.__name__}")
    found = MessageType(cls, name, kind, fields)
    return found if key is None else dataclasses.replace(found, key=check_fields(key, found, "key"))


def check_fields(source: object, message_type: MessageType, option: str) -> tuple[str, ...]:
    """The fields that `option` names. Raises `UnknownKey`."""
    fields = (source,) if isinstance(source, str) else source
    if not isinstance(fields, tuple) or not fields or not all(isinstance(each, str) for each in fields):
        raise UnknownKey(f"{option}= takes a field, a tuple of fields, or a function of the message; got {source!r}")
    unknown = next((each for each in fields if each not in message_type.fields), None)
    if unknown is not None:
        names = ", ".join(sorted(message_type.fields)) or "none"
        raise UnknownKey(
            f"{option}={source!r}: {unknown!r} is not a field of {message_type.cls.__name__}; its fields are: {names}"
        )
    return fields


def _field_names(cls: type) -> frozenset[str] | None:
    """The fields of a class by any of the supported ways to declare them, or None if it is none of these."""
    if issubclass(cls, msgspec.Struct):
        return frozenset(cls.__struct_fields__)
    if dataclasses.is_dataclass(cls):
        return frozenset(field.name for field in dataclasses.fields(cls))
    attributes = getattr(cls, "__attrs_attrs__", None) or getattr(cls, "model_fields", None)
    if attributes is None:
        return None
    return frozenset(getattr(attribute, "name", attribute) for attribute in attributes)


class Envelope(msgspec.Struct, gc=False, omit_defaults=True, frozen=True):
    """A publication's metadata and its encoded body as they travel.

    `key_id` and `algorithm` are reserved for encryption, `attempt_id` for token deduplication. Times are
    seconds since the epoch. A reader tolerates fields that it does not know.
    """

    publication_id: str = ""
    type: str = ""
    kind: Kind = "event"
    source: str = ""
    body: bytes = b""
    recipients: tuple[str, ...] = ()
    destination: str | None = None
    correlation_id: str = ""
    causation_id: str | None = None
    depth: int = msgspec.field(default=0, name="marker")  # the name in journals and stores
    """How many messages precede it in its conversation, 0 for a root."""
    key: str | None = None
    attempt_id: str | None = None
    sent_at: float = 0.0
    deliver_at: float | None = None
    expires_at: float | None = None
    redeliveries: int = 0
    replay: int = 0
    content_type: str = "application/json"
    content_encoding: str | None = None
    key_id: str | None = None
    algorithm: str | None = None
    payload_ref: str | None = None
    body_digest: bytes | None = None
    traceparent: str | None = None
    headers: dict[str, str] = {}
    delay: float | None = None
    """`deliver_at` was asked for as a delay of so many seconds. For the process that published it; no log keeps it."""

    def __str__(self) -> str:
        """How errors and logs name a message."""
        named = f"{self.type or 'untyped'} {self.publication_id or '(no id)'} from {self.source or '(no source)'}"
        return plain(named)


def set_out_at(envelope: Envelope) -> float:
    """When a message set out; the same for all its copies."""
    due = envelope.deliver_at
    return envelope.sent_at if due is None else max(envelope.sent_at, due)


def too_late_at(envelope: Envelope, expires: float | None, arrived_at: float) -> float | None:
    """From when on a message is not handled any more: the earlier of what its sender says, and of the seconds that its
    recipient lets it wait; None: never.

    These seconds count from when it set out, so that neither a restart nor a wait in a log begins them anew; for one
    that does not say when it was sent, from its arrival. A replay is a person's decision, and waits as long as it must.
    """
    if expires is None or envelope.replay:
        return envelope.expires_at
    start = set_out_at(envelope) if envelope.sent_at else max(arrived_at, envelope.deliver_at or 0.0)
    return start + expires if envelope.expires_at is None else min(envelope.expires_at, start + expires)
