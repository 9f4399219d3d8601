"""A bus with messages of every kind of class, for the tests of documents and of made-up messages."""

import dataclasses
import datetime
import decimal
import enum
import uuid
from typing import Annotated, Literal

import attrs
import msgspec
import pydantic

import faregate as fg


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(msgspec.Struct):
    street: str
    since: datetime.datetime
    zip: Annotated[str, msgspec.Meta(min_length=5, max_length=5)] = "12345"


class Cash(msgspec.Struct, tag="cash"):
    amount: decimal.Decimal


class Card(msgspec.Struct, tag="card"):
    number: str
    until: datetime.date


class Tree(msgspec.Struct):
    name: str
    children: list["Tree"] = []


class Everything(fg.Event, key=("number", "colour")):
    """All there is, <b>even</b> this.

    And more.
    """

    number: Annotated[int, msgspec.Meta(ge=3, lt=10)]
    colour: Colour
    address: Address | None
    pay: Cash | Card
    pair: tuple[int, str]
    many: tuple[int, ...]
    tree: Tree
    when: datetime.datetime
    at: datetime.time
    maybe: datetime.datetime | None
    id: uuid.UUID
    data: bytes
    by: dict[str, float]
    word: Literal["a", "b"]
    took: datetime.timedelta
    some: str | None = None
    names: set[str] = msgspec.field(default_factory=set)


class Fewer(fg.Event, wire="Everything"):
    number: int


@fg.event(key="id")
@dataclasses.dataclass
class Made:
    id: int
    when: datetime.date


@fg.event
@attrs.define
class Seen:
    name: str
    tags: list[str]


class Tag(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(min_length=3)]


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


@fg.command(wire="do-it")
class DoIt(pydantic.BaseModel):
    """Do it."""

    pair: tuple[int, str]
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    tags: list[Tag]
    count: int = pydantic.Field(gt=0, le=3)


@fg.event
class Grown(pydantic.BaseModel):
    more: list["Grown"] = []


hub, worker, other = fg.Node("hub", publishes=[Everything, Made]), fg.Node("worker"), fg.Node("other")


@worker.on(Everything, source="hub", order=fg.Serial(), expires=60)
async def take_all(event: Everything) -> Seen:
    """Takes all."""
    return Seen(name="", tags=[])


class Done(fg.Event):
    count: int


@worker.on(DoIt, dedup="off", redeliver=None)
async def do(command: DoIt) -> fg.Reply[Done | Seen] | None: ...


@other.on(Fewer, source="hub", key="number")
async def take_less(event: Fewer) -> None: ...


@other.on(Seen, source="worker", key=fg.Each("name", "tags"), where="name <> 'nobody'")
def see(event: Seen) -> None: ...


@other.on(Grown, source="elsewhere")
def grow(event: Grown) -> None: ...


URL = "amqps://zoe7:s3cret@one.example,two.example:5673/shop?confirm=5s&cafile=/keys/ca.pem"
bus = fg.Bus(URL, nodes=[hub, worker, other], store="memory:")
