"""A message class as a plan of its fields, and a struct made from it that reads the same bodies.

For classes that a worker cannot import. What only the class itself can do (`__post_init__`, the validation of a
pydantic model) is not in a plan: such a class is refused, and has to be in a module.
"""

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Union
from uuid import UUID

import msgspec
from msgspec import NODEFAULT, UNSET, Meta, inspect, structs

from faregate.errors import ConfigurationError


class FieldPlan(NamedTuple):
    name: str
    wire: str
    info: Any
    """msgspec's description of its type, with plans in place of classes."""
    default: Any
    """NODEFAULT, where there must be a value; a plain value, `Packed` or `Called`."""


class Plan(NamedTuple):
    name: str
    fields: tuple[FieldPlan, ...]
    options: dict[str, Any]


class Packed(NamedTuple):
    """A default that is no plain value, encoded."""

    data: bytes


class Called(NamedTuple):
    """A default that a function of a module makes."""

    function: Any


_PLAIN_VALUES = {type(None), bool, int, float, str, bytes}
_ONE, _SEVERAL = ("type", "item_type", "key_type", "value_type"), ("types", "item_types")
_OPTIONS = ("tag", "tag_field", "forbid_unknown_fields", "array_like")


def plan_of(cls: type) -> Plan:
    """Raises `ConfigurationError` for a class that has to be in a module."""
    plan: Plan = _planned(inspect.type_info(cls), cls.__name__, ())
    return plan


def _planned(info: Any, path: str, inside: tuple[type, ...]) -> Any:
    if hasattr(info, "fields"):
        return _class_plan(info, path, inside)
    if isinstance(info, inspect.EnumType) and "_missing_" not in info.cls.__dict__:
        return inspect.LiteralType(tuple(each.value for each in info.cls))
    if hasattr(info, "cls"):
        raise _refusal(path, f"{info.cls.__name__} is read by code of its own")
    inner = partial(_planned, path=path, inside=inside)
    changed: dict[str, Any] = {name: inner(getattr(info, name)) for name in _ONE if hasattr(info, name)}
    changed |= {name: tuple(map(inner, getattr(info, name))) for name in _SEVERAL if hasattr(info, name)}
    return structs.replace(info, **changed)


def _class_plan(info: Any, path: str, inside: tuple[type, ...]) -> Plan:
    cls = info.cls
    if cls in inside:
        raise _refusal(path, f"{cls.__name__} has a field of its own kind")
    if hasattr(cls, "__post_init__") or hasattr(cls, "__attrs_attrs__"):
        raise _refusal(path, f"{cls.__name__} runs code of its own when it is made")
    options = {name: getattr(info, name) for name in _OPTIONS if getattr(info, name, None) is not None}
    if isinstance(info, inspect.NamedTupleType):
        options["array_like"] = True
    fields = tuple(
        FieldPlan(
            each.name, each.encode_name, _planned(each.type, f"{path}.{each.name}", (*inside, cls)), _default(each)
        )
        for each in info.fields
    )
    return Plan(cls.__name__, fields, options)


def _default(field: inspect.Field) -> Any:
    if field.required:
        return NODEFAULT
    value = field.default
    if value is NODEFAULT and field.default_factory is NODEFAULT:
        return UNSET  # a typed dictionary may leave it out
    if value is NODEFAULT:
        if getattr(field.default_factory, "__module__", "__main__") != "__main__":
            return Called(field.default_factory)
        value = field.default_factory()
    return value if value is UNSET or type(value) in _PLAIN_VALUES else Packed(msgspec.msgpack.encode(value))


def _refusal(path: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path}: no module holds this class, so Spark's workers cannot import it, and a description of its fields is "
        f"not enough: {why}. Put it into a module of its own (not the main program, not a notebook cell), at its top "
        "level"
    )


# --- and back ---------------------------------------------------------------------------------------------------

_TYPES: dict[Any, Any] = {
    inspect.AnyType: Any,
    inspect.NoneType: None,
    inspect.BoolType: bool,
    inspect.IntType: int,
    inspect.FloatType: float,
    inspect.StrType: str,
    inspect.BytesType: bytes,
    inspect.ByteArrayType: bytearray,
    inspect.MemoryViewType: memoryview,
    inspect.DateTimeType: datetime,
    inspect.DateType: date,
    inspect.TimeType: time,
    inspect.TimeDeltaType: timedelta,
    inspect.UUIDType: UUID,
    inspect.DecimalType: Decimal,
}
_COLLECTIONS: dict[Any, Any] = {inspect.ListType: list, inspect.SetType: set, inspect.FrozenSetType: frozenset}
_LIMITS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern", "tz")


def make_class(plan: Plan) -> type:
    # All by keyword: so those with a default may stand first, as in any class.
    fields = [(each.name, _type(each.info), _field(each)) for each in plan.fields]
    return msgspec.defstruct(plan.name, fields, kw_only=True, **plan.options)


def _field(plan: FieldPlan) -> Any:
    if isinstance(plan.default, Called):
        return msgspec.field(name=plan.wire, default_factory=plan.default.function)
    if isinstance(plan.default, Packed):
        unpack = partial(msgspec.msgpack.decode, plan.default.data, type=_type(plan.info))
        return msgspec.field(name=plan.wire, default_factory=unpack)
    return msgspec.field(name=plan.wire, default=plan.default)


def _type(info: Any) -> Any:
    limits = {name: getattr(info, name) for name in _LIMITS if getattr(info, name, None) is not None}
    found = _bare_type(info)
    return Annotated[found, Meta(**limits)] if limits else found


def _bare_type(info: Any) -> Any:
    if isinstance(info, Plan):
        return make_class(info)
    if isinstance(info, inspect.Metadata):
        return _type(info.type)
    if isinstance(info, inspect.LiteralType):
        return Literal[info.values]
    if isinstance(info, inspect.UnionType):
        return Union[tuple(map(_type, info.types))]  # noqa: UP007
    if isinstance(info, inspect.DictType):
        return dict[_type(info.key_type), _type(info.value_type)]  # type: ignore[misc]
    if isinstance(info, inspect.TupleType):
        return tuple[tuple(map(_type, info.item_types))]  # type: ignore[misc]
    if isinstance(info, inspect.VarTupleType):
        return tuple[_type(info.item_type), ...]  # type: ignore[misc]
    if type(info) in _COLLECTIONS:
        return _COLLECTIONS[type(info)][_type(info.item_type)]
    return _TYPES[type(info)]
