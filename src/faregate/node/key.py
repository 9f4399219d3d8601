"""How the text that a message is ordered by (`key=`) or recognised by (`identity=`) is read from it.

    "order_id"                      a field: the text of its value
    ("timestamp", "account_id")     several: a JSON array of their texts, such as ["2026-11-16 10:00:00+00:00","17"]
    account_of                      a function of the message, importable by its name: what it returns, in the same way

Rules kept here:
- Different values have different texts. None is no key: such a message waits for no other, and never counts as a
  repetition. Of several fields, all have to be None for that.
- The text is the same in every process and on both engines, so all of them must be able to import a function.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec

from faregate.codec import BodyReader
from faregate.core.verdict import first_line
from faregate.errors import Undecodable, UnknownKey, UnreadableKey
from faregate.message import Envelope, MessageType, check_fields, known

KeySource = str | tuple[str, ...] | Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Key:
    fields: tuple[str, ...]
    function: str | None
    """module.name of a function; then there are no fields."""
    value: Callable[[Any], object] = field(compare=False)

    def of(self, message: Any) -> str | None:
        """The text; None when there is none. Raises whatever a function raises."""
        return _text(self.value(message))

    def hint(self, message: Any) -> str | None:
        """The same for a message of any class; None where it cannot be read."""
        try:
            return _text(self.value(message))
        except Exception:
            return None

    def check(self, message: Any) -> None:
        """Raises `UnreadableKey` when the function fails."""
        try:
            self.of(message)
        except Exception as exc:
            raise UnreadableKey(
                f"{self.function} cannot tell the key of this {type(message).__name__}: {first_line(exc)}"
            ) from exc

    def reader(self, cls: type, limit: int) -> Callable[[Envelope], str | None]:
        """Reads the text out of an encoded body.

        A body that cannot be read has no key: it becomes a dead letter when it is delivered, and no other message waits
        for it before that.
        """
        read, hint = BodyReader(cls, limit=limit, part=_part(cls, self.fields)).read, self.hint

        def key_of(envelope: Envelope) -> str | None:
            try:
                return hint(read(envelope))
            except Undecodable:
                return None

        return key_of


def read_key(source: object, message_type: MessageType, option: str) -> Key:
    """What `key=` or `identity=` says. Raises `UnknownKey`."""
    if callable(source):
        return Key((), _name(source, option), source)
    return _by_fields(check_fields(source, message_type, option))


@lru_cache(1024)
def type_key(cls: type) -> Key | None:
    """The key that a message class was declared with."""
    found = known(cls)
    return None if found is None or not found.key else _by_fields(found.key)


def _by_fields(fields: tuple[str, ...]) -> Key:
    return Key(fields, None, attrgetter(*fields))


def _name(function: Callable[..., object], option: str) -> str:
    """The name that a function is imported by. Raises `UnknownKey` for one that has none."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    found: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is not function:
        raise UnknownKey(
            f"{option}={function!r}: every process that handles the message, Spark's workers too, finds a function by "
            "its name. Put it at the top level of a module: no lambda, no function within another, no object"
        )
    if not inspect.isfunction(function) or _is_unfit(function):
        raise UnknownKey(f"{option}={name}: it must be a plain 'def' function that takes the message, and nothing else")
    return f"{module}.{name}"


def _is_unfit(function: Callable[..., object]) -> bool:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return True
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return True
    return False


def _part(cls: type, fields: tuple[str, ...]) -> type:
    """The class to decode for these fields: of a struct, one that has only them."""
    if not fields or not issubclass(cls, msgspec.Struct) or cls.__struct_config__.array_like:
        return cls
    infos = [info for info in msgspec.structs.fields(cls) if info.name in fields]
    return msgspec.defstruct(
        "Key",
        [(info.name, info.type, _default(info)) for info in infos],
        rename={info.name: info.encode_name for info in infos},
        kw_only=True,
    )


def _default(info: msgspec.structs.FieldInfo) -> Any:
    """The default of a field, as a field of another struct declares it."""
    if info.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=info.default_factory)
    return msgspec.field(default=info.default)


def _text(value: object) -> str | None:
    if isinstance(value, tuple):
        texts = [None if each is None else str(each) for each in value]
        return None if texts == [None] * len(texts) else msgspec.json.encode(texts).decode()
    if value is None:
        return None
    text = str(value)
    # PostgreSQL keeps no zero characters in texts.
    return msgspec.json.encode(text).decode() if "\0" in text else text
