"""How the text that a message is ordered by (`key=`) or recognised by (`identity=`) is read from it.

    "order_id"                      a field: the text of its value
    ("timestamp", "account_id")     several: a JSON array of their texts, such as ["2026-11-16 10:00:00+00:00","17"]
    account_of                      a function of the message, importable by its name: what it returns, in the same way
    Each("debit", "credit")         each of them is a key of its own (`key=` only): the message has both

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
from typing import Any, get_origin, get_type_hints

import msgspec

from faregate.codec import BodyReader
from faregate.core.verdict import first_line
from faregate.errors import Undecodable, UnknownKey, UnreadableKey
from faregate.message import Envelope, MessageType, check_fields, known
from faregate.ports.keys import MOST_KEYS, Keys

OneKey = str | tuple[str, ...] | Callable[[Any], object]
_SEVERAL = (list, set, frozenset)


@dataclass(frozen=True, slots=True, init=False)
class Each:
    """Several keys of one message: it runs when all of them are free, in the order of each of them.

    Takes fields, tuples of fields (one key together) and functions. A field or a function whose value is a list or a
    set has a key in each of its elements. What is None is no key; what is there twice is one.
    """

    sources: tuple[OneKey, ...]

    def __init__(self, *sources: OneKey) -> None:
        object.__setattr__(self, "sources", sources)


KeySource = OneKey | Each


@dataclass(frozen=True, slots=True)
class Key:
    fields: tuple[str, ...]
    """All that it reads; none where a function reads the message."""
    function: str | None
    """module.name of a function; then there are no fields."""
    value: Callable[[Any], object] = field(compare=False)
    each: "tuple[Key, ...]" = ()
    """Of several keys, where each comes from."""

    def of(self, message: Any) -> str | None:
        """The text; None when there is none, and `Keys` when there are several. Raises whatever a function raises."""
        if self.each:
            return self._several(message)
        return _text(self.value(message))

    def hint(self, message: Any) -> str | None:
        """The same for a message of any class; None where it cannot be read."""
        try:
            return self.of(message)
        except Exception:
            return None

    @property
    def may_fail(self) -> bool:
        """Whether it may not be readable in a message that is."""
        return self.function is not None or bool(self.each)

    def check(self, message: Any) -> None:
        """Raises `UnreadableKey` when the function fails."""
        try:
            self.of(message)
        except Exception as exc:
            raise UnreadableKey(
                f"{self.function or 'key=fg.Each(…)'} cannot tell the key of this {type(message).__name__}: "
                f"{first_line(exc)}"
            ) from exc

    @property
    def when_sent(self) -> "Key":
        """What messages are sent in order by: of several keys one text for all, as an outbox row has one key."""
        return _TOGETHER if self.each else self

    def _several(self, message: Any) -> str | None:
        texts: set[str] = set()
        for source in self.each:
            value = source.value(message)
            for each in value if isinstance(value, _SEVERAL) else (value,):
                if isinstance(each, (*_SEVERAL, dict)) or hasattr(each, "__next__"):
                    raise TypeError(f"a {type(each).__name__} is no key")
                text = _text(each)
                if text is not None:
                    texts.add(text)
        if len(texts) > MOST_KEYS:
            raise ValueError(f"it has {len(texts)} keys, and a message can wait for {MOST_KEYS} at most")
        return Keys.of(texts)

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


_TOGETHER = Key((), None, lambda message: "*")


def read_key(source: object, message_type: MessageType, option: str) -> Key:
    """What `key=` or `identity=` says. Raises `UnknownKey`."""
    if isinstance(source, Each):
        return _by_each(source, message_type, option)
    key = _read_one(source, message_type, option)
    if option == "key" and key.function is not None:
        name = key.function.rpartition(".")[2]
        if _returned(key.value) in _SEVERAL:
            raise UnknownKey(f"key={name} returns several keys: write key=fg.Each({name})")
        return Key((), key.function, _one_value(key.value, name))
    return key


def _read_one(source: object, message_type: MessageType, option: str) -> Key:
    if callable(source):
        return Key((), _name(source, option), source)
    return _by_fields(check_fields(source, message_type, option))


def _by_each(source: Each, message_type: MessageType, option: str) -> Key:
    if option != "key":
        raise UnknownKey(f"{option}={source!r}: a message has one identity. A tuple of fields is one: ('a', 'b')")
    if not 1 <= len(source.sources) <= MOST_KEYS:
        raise UnknownKey(f"key=fg.Each(…) takes 1 to {MOST_KEYS} fields or functions; got {len(source.sources)}")
    each = tuple(_read_one(one, message_type, option) for one in source.sources)
    functions = [key.function for key in each if key.function is not None]
    fields = () if functions else tuple(dict.fromkeys(name for key in each for name in key.fields))
    return Key(fields, functions[0] if functions else None, _no_single_value, each)


def _no_single_value(message: Any) -> object:
    raise AssertionError("several keys have no single value")


def _one_value(function: Callable[[Any], object], name: str) -> Callable[[Any], object]:
    """The function, unless it returns several: as one text they would keep no order with others that share one."""

    def value(message: Any) -> object:
        found = function(message)
        if isinstance(found, _SEVERAL):
            raise TypeError(f"it returned a {type(found).__name__}: for several keys write key=fg.Each({name})")
        return found

    return value


def _returned(function: Callable[..., object]) -> object:
    """The class that a function says it returns; None where it does not say so plainly."""
    try:
        hint = get_type_hints(function).get("return")
    except Exception:  # a name that is not there yet
        return None
    return get_origin(hint) or hint


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
