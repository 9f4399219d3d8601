"""The message classes of test_typed.py, in a module that Spark's workers import."""

import dataclasses
import enum
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import attrs
import msgspec
from pydantic import BaseModel

import faregate as fg


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Line(msgspec.Struct, frozen=True):
    sku: str
    count: int = 1
    price: Decimal | None = None


class Corner(NamedTuple):
    x: int
    y: float


class Extra(TypedDict, total=False):
    note: str


class Tree(msgspec.Struct):
    name: str
    below: list["Tree"] = []


class Everything(fg.Event):
    text: str
    whole: int
    real: float
    flag: bool
    raw: bytes
    moment: datetime
    local: Annotated[datetime, msgspec.Meta(tz=False)]
    day: date
    hour: time
    wait: timedelta
    id: UUID
    price: Decimal
    color: Color
    level: Level
    size: Literal["s", "m"]
    lines: list[Line]
    tags: frozenset[str]
    pair: tuple[int, str]
    many: tuple[int, ...]
    by_name: dict[str, Line]
    by_id: dict[UUID, int]
    corner: Corner
    extra: Extra
    first: Line
    number: int | float
    mixed: int | str
    anything: Any
    tree: Tree
    maybe: str | None
    maybe_line: Line | None
    unset: int | msgspec.UnsetType = msgspec.UNSET
    renamed: int = msgspec.field(default=0, name="otherName")


VALUES = Everything(
    text="naïve",
    whole=2**62,
    real=1.5,
    flag=True,
    raw=b"\x00\xff",
    moment=datetime.fromisoformat("2026-11-17T10:00:00.123456+02:00"),
    local=datetime(2026, 11, 17, 10),
    day=date(2026, 11, 17),
    hour=time(10, 30),
    wait=timedelta(days=1, microseconds=5),
    id=UUID(int=17),
    price=Decimal("12.340"),
    color=Color.BLUE,
    level=Level.HIGH,
    size="m",
    lines=[Line("a", 2, Decimal("0.5")), Line("b")],
    tags=frozenset({"new"}),
    pair=(1, "one"),
    many=(1, 2, 3),
    by_name={"a": Line("a")},
    by_id={UUID(int=1): 1},
    corner=Corner(1, 2.5),
    extra={"note": "hello"},
    first=Line("first"),
    number=3,
    mixed="text",
    anything={"a": [1, None]},
    tree=Tree("root", [Tree("leaf")]),
    maybe=None,
    maybe_line=Line("maybe"),
    renamed=5,
)


class Placed(fg.Event, wire="OrderPlaced"):
    """As it is today; orders of last year had an id and a total alone, and more of what nobody reads now."""

    order_id: str
    total: int
    currency: str = "EUR"
    lines: tuple[Line, ...] = ()
    placed_by: Line = Line("nobody")


class Model(BaseModel):
    order_id: str
    total: Decimal
    color: Color = Color.RED
    lines: "list[ModelLine]" = []
    rest: dict[str, Any] = {}


class ModelLine(BaseModel):
    sku: str


@fg.event
@dataclasses.dataclass
class Data:
    order_id: str
    color: Color = Color.RED


@fg.event
@attrs.define
class Attributes:
    order_id: str
    color: Color = Color.RED


class Reversed(fg.Event):
    text: str


class ReversedCodec:
    """A codec of somebody's own, which this module registers."""

    content_type = "application/x-reversed"

    def encoder(self, cls: type) -> Any:
        return lambda message: message.text[::-1].encode()

    def decoder(self, cls: type) -> Any:
        return lambda body: cls(body.decode()[::-1])


fg.register_codec(ReversedCodec())
