"""Every shape of a handler, an interpreter, a provider and a middleware that is legal: type checkers take them all
(`test_typing.py` has mypy and pyright read this file, both strict), and so does the declaration itself."""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pydantic
from sqlalchemy import select, text

import faregate as fg


class Placed(fg.Event):
    order_id: str


class Charge(fg.Command):
    order_id: str


@fg.event
@dataclasses.dataclass(frozen=True)
class Parted:
    order_id: str


@fg.event
class Refined(pydantic.BaseModel):
    order_id: str


class Written:
    pass


class Book:
    def __init__(self) -> None:
        self.lines: list[str] = []


CallNext = Callable[[], Awaitable[None]]
node = fg.Node("typed")


@node.provides
async def book() -> AsyncIterator[Book]:
    yield Book()


@node.on(Placed, source="a")
async def awaited(placed: Placed) -> None:
    print(placed.order_id)


@node.on(Placed, source="b")
def plain(placed: Placed) -> Parted:
    return Parted(placed.order_id)


@node.on(Placed, source="c")
async def with_context(placed: Placed, ctx: fg.Context) -> list[fg.Outgoing]:
    await ctx.db.execute("select 1")
    ctx.session.add(placed)
    return [fg.publish(placed), fg.send(Charge(order_id=ctx.message_id), to="typed")]


@node.on(Placed, source="d")
def generating(placed: Placed, ctx: fg.BlockingContext) -> Iterator[Parted]:
    changed: int = ctx.db.execute("update a set b = ?", (placed.order_id,))
    row = ctx.db.fetchone("select b from a limit ?", [changed])
    ctx.session.execute(text("select 1")).all()
    ctx.session.scalars(select(1)).all()
    yield Parted(placed.order_id if row is None else row[0])


@node.on(Placed, source="e")
async def async_generating(placed: Placed, ctx: fg.AsyncContext, book: Book) -> AsyncIterator[Written | fg.Outgoing]:
    changed: int = await ctx.db.execute("update a set b = ?", (placed.order_id,))
    for row in await ctx.db.fetchall("select b from a limit ?", [changed]):
        book.lines.append(row[0])
    (await ctx.session.execute(text("select 1"))).all()
    async with ctx.session.begin_nested():
        ctx.session.add(placed)
    yield Written()
    yield fg.publish(placed)


@node.on(Charge)
async def with_resource(charge: Charge, book: Book) -> fg.Reply[Placed]:
    book.lines.append(charge.order_id)
    return fg.reply(Placed(order_id=charge.order_id))


@node.on(Parted, source="a")
def of_a_dataclass(parted: Parted, book: Book, ctx: fg.BlockingContext) -> None:
    book.lines.append(parted.order_id + ctx.type)


@node.on(Refined, source="a", key="order_id", order=fg.ByKey(lanes=2))
async def of_a_model(refined: Refined) -> None:
    print(refined.order_id)


@node.on(Parted, source="b")
@node.on(Refined, source="b")
async def of_two(message: Parted | Refined) -> None:
    print(message.order_id)


@node.on(Placed, source="f")
@node.on(Placed, source="g")
async def of_two_sources(placed: Placed) -> None:
    print(placed.order_id)


@node.on(Placed, source="h")
async def of_any_event(event: fg.Event, ctx: fg.Context) -> None:
    print(event, ctx)


@node.on(Placed, source="i")
async def of_anything(message: Any) -> Any:
    return message


class Handler:
    async def handle(self, placed: Placed, ctx: fg.AsyncContext) -> Parted | None:
        return Parted(placed.order_id) if ctx.attempt else None

    async def __call__(self, placed: Placed) -> None:
        print(placed.order_id)


node.on(Placed, source="j")(Handler().handle)
node.on(Placed, source="k")(Handler())


@node.interprets(Written)
async def interpret(written: Written, ctx: fg.AsyncContext, book: Book) -> Placed:
    await ctx.session.scalars(select(1))
    book.lines.append(ctx.message_id)
    return Placed(order_id="1")


@node.use
async def around(ctx: fg.Context, call_next: CallNext) -> None:
    await call_next()


async def told(ctx: fg.Context, call_next: CallNext) -> None:
    await call_next()
    print(ctx.outcome)


node.use(told, after=True)


@node.use_outgoing
async def stamp(out: fg.Outgoing, call_next: CallNext, book: Book) -> None:
    await call_next()


@node.escalates
async def escalate(letter: fg.DeadLetter) -> fg.Outgoing:
    return fg.send(Charge(order_id=letter.message_id), to="typed")


async def called_directly() -> None:
    """A handler stays the function that it is."""
    await awaited(Placed(order_id="1"))
    parted: Parted = plain(Placed(order_id="1"))
    reply: fg.Reply[Placed] = await with_resource(Charge(order_id=parted.order_id), Book())
    print(reply)
