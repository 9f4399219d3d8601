"""Filters: which messages of a subscription its handler is for, `where="region = 'north' and total > 100"`.

The language is in `condition.py`. What its names mean here:

    total                   a field of the message
    address.city            a field of a field; NULL where address is None
    header.region           the header `region`, as text; compared with a number it is read as one
    "header.my region"      any name may stand in double quotes

Rules kept here:
- A name that is no field is refused where the filter is declared; who means a header says so. So is a comparison of a
  field with a literal of another type.
- Fields are numbers, texts (UUIDs by their text, enums by their values) or true and false; others have IS NULL alone.
- None, and what an optional field was not given, is NULL.
"""

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from msgspec import inspect

from faregate.condition import KINDS, Header, Headers, LiteralKind, Name, NoSuchName, Read, parse, to_number
from faregate.errors import ConfigurationError, InvalidFilter

_HEADER = "header."
_KIND_OF: dict[type[inspect.Type], LiteralKind] = {
    inspect.IntType: "number",
    inspect.FloatType: "number",
    inspect.DecimalType: "number",
    inspect.StrType: "text",
    inspect.UUIDType: "text",
    inspect.BoolType: "boolean",
}
_SHOWN = {"number": "a number", "text": "a text", "boolean": "true or false"}
_SAY: dict[LiteralKind, Callable[[str], str]] = {
    "number": lambda shown: "compare it with a number, without quotes",
    "text": lambda shown: f"write '{shown}' in single quotes",
    "boolean": lambda shown: "compare it with true or false, without quotes",
}


class Filter:
    """A parsed filter of the messages of one class."""

    def __init__(self, text: object, cls: type) -> None:
        """Raises `InvalidFilter`, which says what to change."""
        if not isinstance(text, str):
            raise InvalidFilter(f"where= is a text, such as \"region = 'north' and total > 100\"; got {text!r}")
        self.text = text
        names = _MessageNames(cls)
        self._test = parse(text, names)
        self.reads_headers = names.headers
        """Whether it names any; else it may be asked without."""

    def takes(self, message: Any, headers: Headers) -> bool:
        """Whether the handler is for this message: the filter is true for it, neither false nor unknown."""
        return self._test(message, headers) is True

    def __repr__(self) -> str:
        return f"Filter({self.text!r})"


class _MessageNames:
    what = "filter"
    a_name = "a field, or header.NAME"
    error: type[ConfigurationError] = InvalidFilter

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._type = inspect.type_info(cls)
        self.headers = False

    def find(self, name: str) -> Name:
        if not name.startswith(_HEADER):
            return _field(self._cls.__name__, self._type, name)
        if "header" in (_fields(self._type) or ()):
            raise NoSuchName(
                f"{name}: {self._cls.__name__} has a field named header, so nobody can tell which is meant; give the "
                "field another name"
            )
        if name == _HEADER:
            raise NoSuchName("header. is not followed by the name of a header")
        self.headers = True
        return Header(name.removeprefix(_HEADER))


class _Field(NamedTuple):
    """A field, or a field of a field."""

    name: str
    read: Read
    kinds: frozenset[LiteralKind]
    """What it may be; none: nothing that can be compared."""
    is_sure: bool
    """Whether all its values are of that kind, or None."""
    is_decimal: bool
    shown: str
    """What it is, for people."""

    def as_kind(self, kind: LiteralKind, shown: str) -> Read:
        if kind not in self.kinds:
            hint = "a filter compares numbers, texts, and true or false"
            if self.kinds:
                hint = " or ".join(_SAY[each](shown) for each in KINDS if each in self.kinds)
            raise NoSuchName(f"{self.name} is {self.shown} and {shown} is {_SHOWN[kind]}: {hint}")
        if self.is_sure:
            return self.read
        read, is_kind = self.read, _IS[kind]

        def checked(message: Any, headers: Headers) -> Any:
            value = read(message, headers)
            return value if is_kind(value) else None

        return checked

    def number(self, text: str) -> Any:
        return Decimal(text) if self.is_decimal else to_number(text)


_IS: dict[LiteralKind, Callable[[Any], bool]] = {
    "number": lambda value: isinstance(value, int | float | Decimal) and not isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
}


def _field(cls: str, root: inspect.Type, name: str) -> _Field:
    """Follow a name with dots. Raises `NoSuchName`."""
    path = name.split(".")
    at, types = cls, [root]
    is_plain = len(path) == 1
    for part in path:
        fields: dict[str, list[inspect.Type]] = {}
        for each in types:
            for known, type_ in (_fields(each) or {}).items():
                fields.setdefault(known, []).extend(_alternatives(type_))
        if part not in fields:
            raise _no_field(cls, at, part, name, fields)
        at, types = part if at == cls else f"{at}.{part}", fields[part]
    kinds = frozenset(kind for each in types for kind in _kinds(each))
    others = [each for each in types if not _kinds(each) and not isinstance(each, inspect.NoneType)]
    is_any = any(isinstance(each, inspect.AnyType) for each in types)
    shown = " or ".join(_SHOWN[kind] for kind in KINDS if kind in kinds) or _called(others)
    read = _reader(path, is_plain=is_plain, converts=any(_is_converted(each) for each in types))
    is_decimal = any(isinstance(each, inspect.DecimalType) for each in types)
    return _Field(name, read, kinds, len(kinds) == 1 and not others and not is_any, is_decimal, shown)


def _no_field(cls: str, at: str, part: str, name: str, fields: Mapping[str, object]) -> NoSuchName:
    if not fields:
        return NoSuchName(f"{at} has no fields of its own, so there is no {name}")
    near = get_close_matches(part, fields, 1)
    meant = f"; did you mean {near[0]}?" if near else ";"
    header = f"; a header is written {_HEADER}{name}" if at == cls else ""
    return NoSuchName(f"{part!r} is not a field of {at}{meant} its fields are {', '.join(sorted(fields))}{header}")


def _reader(path: list[str], *, is_plain: bool, converts: bool) -> Read:
    [first, *_] = path

    def plain(message: Any, headers: Headers) -> Any:
        value = getattr(message, first)
        return None if value is msgspec.UNSET else value

    def nested(message: Any, headers: Headers) -> Any:
        for part in path:
            message = message.get(part) if isinstance(message, dict) else getattr(message, part, None)
            if message is None or message is msgspec.UNSET:
                return None
        return message

    read = plain if is_plain else nested
    if not converts:
        return read

    def converted(message: Any, headers: Headers) -> Any:
        value = read(message, headers)
        return value.value if isinstance(value, Enum) else str(value) if isinstance(value, UUID) else value

    return converted


# --- what a class declares -----------------------------------------------------------------------------------


def _alternatives(type_: inspect.Type) -> list[inspect.Type]:
    if isinstance(type_, inspect.Metadata):
        return _alternatives(type_.type)
    if isinstance(type_, inspect.UnionType):
        return [each for part in type_.types for each in _alternatives(part)]
    return [type_]


def _fields(type_: inspect.Type) -> dict[str, inspect.Type] | None:
    """The fields of a class by any of the ways to declare them; None for what has none."""
    declared = getattr(type_, "fields", None)
    if declared is not None:
        return {field.name: field.type for field in declared}
    model = getattr(getattr(type_, "cls", None), "model_fields", None)  # of a pydantic model
    if not isinstance(model, Mapping):
        return None
    return {name: inspect.type_info(info.annotation) for name, info in model.items()}


def _kinds(type_: inspect.Type) -> Iterable[LiteralKind]:
    if isinstance(type_, inspect.AnyType):
        return KINDS
    if isinstance(type_, inspect.LiteralType):
        return _kinds_of(type_.values)
    if isinstance(type_, inspect.EnumType):
        return _kinds_of([member.value for member in type_.cls])
    found = _KIND_OF.get(type(type_))
    return () if found is None else (found,)


def _kinds_of(values: Iterable[Any]) -> list[LiteralKind]:
    return [kind for kind in KINDS if any(_IS[kind](value) for value in values)]


def _is_converted(type_: inspect.Type) -> bool:
    return isinstance(type_, inspect.EnumType | inspect.UUIDType | inspect.AnyType)


def _called(types: list[inspect.Type]) -> str:
    names = [type(each).__name__.removesuffix("Type").lower() for each in types]
    return "a " + " or ".join(dict.fromkeys(names)) if names else "always NULL"
