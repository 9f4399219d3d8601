"""Filters: fields of every type, headers, what is refused at declaration, and the same truth as a naive reader."""

import dataclasses
import operator
import re
import typing
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import faregate as fg
from faregate.node.where import Filter


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Place(msgspec.Struct):
    city: str
    floor: int | None = None


class Card(msgspec.Struct, tag=True):
    digits: str


class Cash(msgspec.Struct, tag=True):
    coins: int


class Labels(typing.TypedDict):
    team: str


class OrderPlaced(fg.Event, rename="camel"):
    order_id: str
    total: int
    rate: float
    price: Decimal
    paid: bool
    size: Size
    token: UUID
    kind: Literal["new", "old"]
    either: int | str
    anything: Any
    placed_at: datetime
    lines: list[str]
    labels: Labels
    payment: Card | Cash
    note: str | None = None
    later: int | msgspec.UnsetType = msgspec.UNSET
    address: Place | None = None
    bounded: typing.Annotated[int, msgspec.Meta(ge=0)] = 1


ORDER = OrderPlaced(
    order_id="it's",
    total=40,
    rate=-2.5,
    price=Decimal("0.1"),
    paid=True,
    size=Size.LARGE,
    token=UUID(int=1),
    kind="new",
    either="7",
    anything=5,
    placed_at=datetime(2026, 1, 1),
    lines=["a"],
    labels={"team": "blue"},
    payment=Cash(coins=3),
    address=Place(city="Ulm"),
)
HEADERS = {"region": "north", "x-weight": "2.5", "my region": "south"}


@pytest.mark.parametrize(
    "text",
    [
        "order_id = 'it''s'",
        "total > 39.5 and total <= 40",
        "rate < -2",
        "price = 0.1",
        "price in (0.2, 0.1)",
        "paid = true",
        "paid <> FALSE",
        "size = 'large'",
        "token = '00000000-0000-0000-0000-000000000001'",
        "kind in ('new', 'other')",
        "either = '7'",
        "anything = 5",
        "anything not in (6, 7)",
        "labels.team like 'b%'",
        "address.city = 'Ulm'",
        "address.floor is null",
        "payment.coins = 3",
        "payment.digits is null",
        "note is null and later is null",
        "total is not null",
        "placed_at is not null and lines is not null and address is not null",
        '"total" = 40',
        "bounded between 0 and 1",
        "header.region = 'north'",
        "header.x-weight > 2",
        "\"header.my region\" = 'south'",
        "header.missing is null",
        "total = 40 or header.total = 41",
    ],
)
def test_a_filter_takes_what_it_is_true_for(text: str) -> None:
    assert Filter(text, OrderPlaced).takes(ORDER, HEADERS)


@pytest.mark.parametrize(
    "text",
    [
        "total = 41",
        "either = 7",
        "not either = 7",
        "anything = '5'",
        "anything = true",
        "note = 'x'",
        "note <> 'x'",
        "not note = 'x'",
        "later = 5 or later <> 5",
        "address.floor > 0 or not address.floor > 0",
        "header.missing = 'x' or not header.missing = 'x'",
        "header.region > 5",
        "price = 0.10000001",
    ],
)
def test_what_is_false_or_unknown_is_not_taken(text: str) -> None:
    assert not Filter(text, OrderPlaced).takes(ORDER, HEADERS)


def test_a_field_of_what_is_none_is_null() -> None:
    nowhere = msgspec.structs.replace(ORDER, address=None)
    assert Filter("address.city is null", OrderPlaced).takes(nowhere, {})
    assert not Filter("address.city <> 'Ulm'", OrderPlaced).takes(nowhere, {})


@dataclasses.dataclass
class Inner:
    city: str


@dataclasses.dataclass
class AsDataclass:
    total: int
    address: Inner | None = None


@attrs.define
class AsAttrs:
    total: int
    address: Inner | None = None


class Model(pydantic.BaseModel):
    city: str


class AsModel(pydantic.BaseModel):
    total: int
    address: Model | None = None


@pytest.mark.parametrize("cls", [AsDataclass, AsAttrs, AsModel])
def test_fields_of_every_way_to_declare_a_message_are_known(cls: Callable[..., Any]) -> None:
    address = Model(city="Ulm") if cls is AsModel else Inner("Ulm")
    both = Filter("total > 5 and address.city = 'Ulm'", typing.cast(type, cls))
    assert both.takes(cls(total=6, address=address), {})
    assert not both.takes(cls(total=6), {})
    for text in ("totl > 5", "total > 'x'", "address.town = 'Ulm'"):
        with pytest.raises(fg.InvalidFilter):
            Filter(text, typing.cast(type, cls))


# --- at declaration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a field, or header.NAME, found 'the end' at character 1 of the filter ''"),
        ("total >", "expected a number, true, false or a text in single quotes"),
        ("total > 5 and", "expected a field"),
        ("total = = 5", "at character 9"),
        ("__import__('os')", "'__import__' is not a field of OrderPlaced"),
        (
            "totl > 5",
            r"'totl' is not a field of OrderPlaced; did you mean total\? its fields are address, .*header.totl",
        ),
        ("region = 'north'", "a header is written header.region"),
        ("Total > 5", "did you mean total"),
        ("orderId = '5'", "did you mean order_id"),
        ("address.town = 'Ulm'", "'town' is not a field of address; its fields are city, floor"),
        ("total.cents = 5", "total has no fields of its own, so there is no total.cents"),
        ("total = 'x'", "total is a number and 'x' is a text: compare it with a number, without quotes"),
        ("order_id = 5", "order_id is a text and 5 is a number: write '5' in single quotes .character 12 "),
        ("total in (5, '6')", "total is a number and '6' is a text"),
        ("either in (5, '6')", "IN takes values of one kind at character 15"),
        ("total between 1 and 'x'", "total is a number"),
        ("total like '4%'", "total is a number and '4%' is a text"),
        ("paid = 'true'", "paid is true or false and 'true' is a text: compare it with true or false, without quotes"),
        ("paid = 1", "paid is true or false"),
        ("paid < true", "true and false are compared with = and <> alone"),
        ("size = 5", "size is a text"),
        ("placed_at > '2026-01-01'", "placed_at is a datetime .*: a filter compares numbers, texts, and true or false"),
        ("lines = 'a'", "lines is a list"),
        ("address = 'Ulm'", "address is a struct"),
        ("header.paid = true", "the header 'paid' is text: write 'true' in single quotes"),
        ('"header." = 5', "not followed by the name of a header"),
        ("(" * 51 + "total = 5" + ")" * 51, "a filter nests at most 50 parentheses"),
        ("total = 5" + " " * 4096, "a filter has at most 4096 characters"),
    ],
)
def test_what_is_wrong_with_a_filter_is_said_where_it_is_declared(text: str, says: str) -> None:
    node = fg.Node("billing")
    with pytest.raises(fg.InvalidFilter, match=says):
        node.on(OrderPlaced, source="shop", where=text)
    assert not node.subscriptions


@pytest.mark.parametrize("given", [5, b"total = 5", lambda order: True, ["total = 5"]])
def test_a_filter_is_a_text(given: Any) -> None:
    with pytest.raises(fg.InvalidFilter, match="where= is a text, such as"):
        fg.Node("billing").on(OrderPlaced, source="shop", where=given)


class Odd(fg.Event):
    header: Place


def test_a_field_named_header_is_never_taken_for_headers() -> None:
    with pytest.raises(fg.InvalidFilter, match="has a field named header, so nobody can tell"):
        Filter("header.city = 'Ulm'", Odd)


def test_the_error_is_one_of_the_configuration() -> None:
    assert issubclass(fg.InvalidFilter, fg.ConfigurationError)


# --- the same truth as a naive reader -------------------------------------------------------------------------


class Probe(fg.Event):
    n: int
    t: str
    b: bool
    maybe: int | None = None
    mixed: int | str = 0


Truth = bool | None
Naive = Callable[[dict[str, Any], dict[str, str]], Truth]
SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
NUMBERS = st.integers(-2, 2)
TEXTS = st.text(st.sampled_from("ab'%_1"), max_size=2)


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


def of_kind(value: Any, like: Any) -> Any:
    """The value, if it can be compared with such a literal."""
    if isinstance(like, bool) or isinstance(value, bool):
        return value if isinstance(like, bool) and isinstance(value, bool) else None
    return value if isinstance(value, int) == isinstance(like, int) else None


def look(name: str, like: Any) -> Naive:
    def value(fields: dict[str, Any], headers: dict[str, str]) -> Any:
        if not name.startswith("header."):
            found = fields[name]
            return None if found is None else of_kind(found, like)
        text = headers.get(name.removeprefix("header."))
        if text is None or isinstance(like, str):
            return text
        return int(text) if re.fullmatch("-?[0-9]+", text) else None

    return value


@st.composite
def simple(draw: st.DrawFn) -> tuple[str, Naive]:
    name = draw(st.sampled_from(["n", "t", "b", "maybe", "mixed", "header.h"]))
    literals = {"n": NUMBERS, "t": TEXTS, "b": st.booleans(), "maybe": NUMBERS}.get(name, NUMBERS | TEXTS)
    form = draw(st.sampled_from(["compare", "in", "between", "like", "null"]))
    if form == "null":
        return (
            f"{name} is null",
            lambda fields, headers: (headers.get("h") if name == "header.h" else fields[name]) is None,
        )
    if form == "like" and name in ("t", "mixed", "header.h"):
        pattern = draw(TEXTS)
        wanted = re.compile("".join({"%": ".*", "_": "."}.get(each, re.escape(each)) for each in pattern), re.DOTALL)
        read = look(name, "")

        def is_like(fields: dict[str, Any], headers: dict[str, str]) -> Truth:
            value = read(fields, headers)
            return None if value is None else wanted.fullmatch(value) is not None

        return f"{name} like {shown(pattern)}", is_like
    if form == "in":
        first = draw(literals)
        values = [first, *draw(st.lists(literals.filter(lambda each: type(each) is type(first)), max_size=3))]
        read = look(name, first)

        def is_in(fields: dict[str, Any], headers: dict[str, str]) -> Truth:
            value = read(fields, headers)
            return None if value is None else value in values

        return f"{name} in ({', '.join(map(shown, values))})", is_in
    if form == "between" and name != "b":
        low = draw(literals)
        high = draw(literals.filter(lambda each: type(each) is type(low)))
        read = look(name, low)

        def is_between(fields: dict[str, Any], headers: dict[str, str]) -> Truth:
            value = read(fields, headers)
            return None if value is None else low <= value <= high

        return f"{name} between {shown(low)} and {shown(high)}", is_between
    sign = draw(st.sampled_from(["=", "<>"] if name == "b" else sorted(SIGNS)))
    literal = draw(literals)
    read = look(name, literal)

    def compared(fields: dict[str, Any], headers: dict[str, str]) -> Truth:
        value = read(fields, headers)
        return None if value is None else SIGNS[sign](value, literal)

    return f"{name} {sign} {shown(literal)}", compared


def joined(parts: list[tuple[str, Naive]], word: str) -> tuple[str, Naive]:
    def naive(fields: dict[str, Any], headers: dict[str, str]) -> Truth:
        found = [each(fields, headers) for _, each in parts]
        decisive = word == "or"
        return decisive if decisive in found else None if None in found else not decisive

    return "(" + f" {word} ".join(text for text, _ in parts) + ")", naive


def negated(part: tuple[str, Naive]) -> tuple[str, Naive]:
    def naive(fields: dict[str, Any], headers: dict[str, str]) -> Truth:
        found = part[1](fields, headers)
        return None if found is None else not found

    return f"not {part[0]}", naive


CONDITIONS = st.recursive(
    simple(),
    lambda inner: (
        st.tuples(st.lists(inner, min_size=2, max_size=3), st.sampled_from(["and", "or"])).map(
            lambda each: joined(*each)
        )
        | inner.map(negated)
    ),
    max_leaves=8,
)


@settings(max_examples=500, deadline=None)
@given(
    CONDITIONS,
    st.fixed_dictionaries(
        {"n": NUMBERS, "t": TEXTS, "b": st.booleans(), "maybe": NUMBERS | st.none(), "mixed": NUMBERS | TEXTS}
    ),
    st.dictionaries(st.just("h"), TEXTS | NUMBERS.map(str)),
)
def test_a_filter_takes_what_a_naive_reader_takes(
    condition: tuple[str, Naive], fields: dict[str, Any], headers: dict[str, str]
) -> None:
    text, naive = condition
    found = Filter(text, Probe)
    message = msgspec.json.decode(msgspec.json.encode(Probe(**fields)), type=Probe)
    assert found.takes(message, headers) is (naive(fields, headers) is True)
    assert found.reads_headers or found.takes(message, headers) is found.takes(message, {})
    assert Filter(f"not ({text})", Probe).takes(message, headers) is (naive(fields, headers) is False)
