"""The node of `test_session`: Spark's workers import it by name. Its table has no constraint, so a double shows."""

from sqlalchemy import select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import faregate as fg


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"
    number: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]


class Asked(fg.Event):
    number: int


class Told(fg.Event):
    number: int


class Noted(fg.Event):
    number: int


book = fg.Node("book", schema="create table if not exists notes(number integer, kind text)")


@book.on(Asked, source="author", retry=fg.Retry(1, delay=0.001), redeliver=None)
async def ask(asked: Asked, ctx: fg.AsyncContext) -> Noted:
    ctx.session.add(Note(number=asked.number, kind="async def"))
    found = await ctx.session.scalars(select(Note).where(Note.number == asked.number))
    if asked.number % 4 == 1 or (asked.number % 4 == 2 and ctx.attempt == 1):
        raise RuntimeError("behind the flush")
    return Noted(number=found.one().number)


@book.on(Told, source="author", retry=fg.Retry(1, delay=0.001), redeliver=None)
def tell(told: Told, ctx: fg.BlockingContext) -> Noted:
    ctx.session.add(Note(number=100 + told.number, kind="def"))
    if told.number % 4 == 1:
        ctx.session.commit()
    return Noted(number=100 + told.number)
