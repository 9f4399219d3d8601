"""The fields of a message class as Spark columns: which type each has, and how a decoded value goes into it.

Rules kept here:
- A column is named as the field is in Python. Every column may be null: a message that cannot be decoded has no values.
- What Spark has no type for, but JSON has a text for (several types, `Any`, a class inside itself) is a text of JSON.
- What only Python can read is refused, with the name of the field, when the class is given: not in a task later.
"""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime, time
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, get_type_hints

import msgspec
from msgspec import UNSET, inspect
from pyspark.sql import types as spark_types
from pyspark.sql.types import DataType, StructField, StructType

from faregate.codec.formats import is_pydantic
from faregate.errors import ConfigurationError

Convert = Callable[[Any], Any]


class Column(NamedTuple):
    """How the values of one type are kept."""

    type: DataType
    convert: Convert | None = None
    """From a decoded value to one that Arrow takes; None: it is taken as it is. Never called with None."""


class Member(NamedTuple):
    """A field of a class, or a place of a tuple."""

    name: str
    get: Convert
    column: Column


def members_of(cls: type) -> list[Member]:
    """The fields of a message class, in their order. Raises `ConfigurationError`."""
    return _members(_fields(_info(cls, cls.__name__), cls.__name__), cls.__name__, (cls,))


def struct_of(members: Iterable[Member]) -> StructType:
    return StructType([StructField(each.name, each.column.type) for each in members])


def converted(column: Column, values: Iterable[Any]) -> list[Any]:
    """Values of a field as Arrow takes them."""
    convert = column.convert
    if convert is None:
        return [None if value is UNSET else value for value in values]
    return [None if value is None or value is UNSET else convert(value) for value in values]


def _one(convert: Convert | None, value: Any) -> Any:
    """The same for a single one."""
    if value is None or value is UNSET:
        return None
    return value if convert is None else convert(value)


# --- from msgspec's description of a type -----------------------------------------------------------------------

_LONGEST = 38
_SCALE = 18

_PLAIN: dict[type[inspect.Type], Column] = {
    inspect.StrType: Column(spark_types.StringType()),
    inspect.IntType: Column(spark_types.LongType()),
    inspect.FloatType: Column(spark_types.DoubleType()),
    inspect.BoolType: Column(spark_types.BooleanType()),
    inspect.BytesType: Column(spark_types.BinaryType()),
    inspect.ByteArrayType: Column(spark_types.BinaryType(), bytes),
    inspect.MemoryViewType: Column(spark_types.BinaryType(), bytes),
    inspect.DateType: Column(spark_types.DateType()),
    inspect.TimeType: Column(spark_types.StringType(), time.isoformat),
    inspect.TimeDeltaType: Column(spark_types.DayTimeIntervalType()),
    inspect.UUIDType: Column(spark_types.StringType(), str),
    inspect.DecimalType: Column(spark_types.DecimalType(_LONGEST, _SCALE)),
}


def _in_utc(moment: datetime) -> datetime:
    """Python could not show one outside of the years 1 to 9999, and Arrow could keep it. Raises `OverflowError`."""
    return moment if moment.tzinfo is None else moment.astimezone(UTC)


_MOMENT, _LOCAL = Column(spark_types.TimestampType(), _in_utc), Column(spark_types.TimestampNTZType())
_NUMBERS = {inspect.IntType, inspect.FloatType}
_WITH_FIELDS = (inspect.StructType, inspect.DataclassType, inspect.NamedTupleType, inspect.TypedDictType)
_LISTS = (inspect.ListType, inspect.VarTupleType, inspect.SetType, inspect.FrozenSetType)


def _json(value: Any) -> str:
    return _encode_json(value).decode()


_encode_json = msgspec.json.Encoder(enc_hook=lambda value: value.model_dump(mode="json")).encode
_JSON = Column(spark_types.StringType(), _json)


def _column(info: Any, path: str, inside: tuple[type, ...]) -> Column:
    """`path` names the field for people; `inside`: the classes that the field lies in."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if type(info) in _PLAIN:
        return _PLAIN[type(info)]
    if isinstance(info, inspect.DateTimeType):
        return _LOCAL if info.tz is False else _MOMENT
    if isinstance(info, inspect.AnyType | inspect.NoneType):
        return _JSON
    if isinstance(info, inspect.EnumType):
        return _choice([each.value for each in info.cls], _value)
    if isinstance(info, inspect.LiteralType):
        return _choice([each for each in info.values if each is not None], None)
    if isinstance(info, inspect.UnionType):
        return _union(info, path, inside)
    if isinstance(info, _LISTS):
        return _list(_column(info.item_type, f"{path}[]", inside))
    if isinstance(info, inspect.DictType):
        return _map(_column(info.key_type, f"{path} (key)", inside), _column(info.value_type, f"{path}[]", inside))
    if isinstance(info, inspect.TupleType):
        places = [
            Member(f"_{number}", itemgetter(number - 1), _column(each, f"{path}[{number - 1}]", inside))
            for number, each in enumerate(info.item_types, 1)
        ]
        return _struct(places)
    fields = _fields(info, path)
    if info.cls in inside:
        return _JSON
    return _struct(_members(fields, path, (*inside, info.cls)))


class _Field(NamedTuple):
    name: str
    get: Convert
    info: Any


def _fields(info: Any, path: str) -> list[_Field]:
    """Raises `ConfigurationError` for what has none, and no other column either."""
    if isinstance(info, inspect.CustomType) and is_pydantic(info.cls):
        info.cls.model_rebuild()  # type: ignore[attr-defined]  # fields may name classes that came after it
        declared: dict[str, Any] = info.cls.model_fields  # type: ignore[attr-defined]
        return [
            _Field(name, attrgetter(name), _info(each.annotation, f"{path}.{name}")) for name, each in declared.items()
        ]
    if not isinstance(info, _WITH_FIELDS):
        what = getattr(info, "cls", type(info)).__name__.removesuffix("Type")
        raise ConfigurationError(
            f"{path} is a {what}, which Spark has no column for: read with a class that has only the fields you need, "
            'under the same wire name, for example class Orders(fg.Event, wire="OrderPlaced")'
        )
    getter = _item if isinstance(info, inspect.TypedDictType) else attrgetter
    return [_Field(each.name, getter(each.name), each.type) for each in info.fields]


def _info(annotation: Any, path: str) -> Any:
    try:
        return inspect.type_info(annotation)
    except (TypeError, NameError) as exc:
        raise ConfigurationError(f"{_at_fault(annotation, path)} cannot be read as Spark columns: {exc}") from exc


def _at_fault(cls: Any, path: str) -> str:
    """The field that has no type of its own, where that can be told."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except (TypeError, NameError):
        return path
    for name, annotation in hints.items():
        try:
            inspect.type_info(annotation)
        except (TypeError, NameError):
            return f"{path}.{name}"
    return path


def _members(fields: Iterable[_Field], path: str, inside: tuple[type, ...]) -> list[Member]:
    fields = list(fields)
    names: dict[str, str] = {}
    for each in fields:
        other = names.setdefault(each.name.lower(), each.name)
        if other != each.name:
            raise ConfigurationError(
                f"{path}.{other} and {path}.{each.name} differ only in case, and Spark takes them for one column: read "
                "with a class that has one of them, under the same wire name"
            )
    return [Member(each.name, each.get, _column(each.info, f"{path}.{each.name}", inside)) for each in fields]


def _choice(values: list[Any], convert: Convert | None) -> Column:
    """One of these values."""
    kinds = {type(each) for each in values}
    for kind, info in ((str, inspect.StrType), (bool, inspect.BoolType), (int, inspect.IntType)):
        if kinds == {kind}:
            return Column(_PLAIN[info].type, convert)
    return _JSON


def _union(info: inspect.UnionType, path: str, inside: tuple[type, ...]) -> Column:
    """One type, or None: its column. Whole numbers and others: double. Other mixtures are JSON."""
    types = [each for each in info.types if not isinstance(each, inspect.NoneType)]
    if {type(each) for each in types} == _NUMBERS:
        return _PLAIN[inspect.FloatType]
    columns = {_column(each, path, inside) for each in types}
    return columns.pop() if len(columns) == 1 else _JSON


def _list(item: Column) -> Column:
    return Column(spark_types.ArrayType(item.type), lambda values: converted(item, values))


def _map(key: Column, value: Column) -> Column:
    def pairs(values: dict[Any, Any]) -> list[tuple[Any, Any]]:
        return list(zip(converted(key, values), converted(value, values.values()), strict=True))

    return Column(spark_types.MapType(key.type, value.type), pairs)


def _struct(members: list[Member]) -> Column:
    if not members:
        return _JSON

    def fields(value: Any) -> dict[str, Any]:
        return {name: _one(column.convert, get(value)) for name, get, column in members}

    return Column(struct_of(members), fields)


def _value(member: Any) -> Any:
    """Of an enumeration; a pydantic model may have put the value there itself."""
    return getattr(member, "value", member)


def _item(name: str) -> Convert:
    return lambda value: value.get(name)
