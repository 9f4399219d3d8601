"""A node whose handlers order and recognise messages by several fields, and by functions. Spark's workers import it."""

from datetime import datetime

import faregate as fg


class Booked(fg.Event):
    timestamp: datetime
    account_id: int
    number: int
    bank: str | None = None


class Transferred(fg.Event):
    accounts: list[str]
    number: int


def pair_of(message: Transferred) -> tuple[str, ...]:
    """Both directions between two accounts are one line."""
    if "nobody" in message.accounts:
        raise ValueError("there is no such account")
    return tuple(sorted(message.accounts))


def day_of(message: Booked) -> str | None:
    return None if message.bank is None else f"{message.bank} {message.timestamp:%Y-%m-%d}"


def two_of(first: object, second: object) -> str:
    return f"{first} {second}"


async def later(message: object) -> str:
    return str(message)


world = fg.Node("world")
bank = fg.Node("bank", schema="create table if not exists book(kind text, key text, number integer)")


@bank.on(
    Booked,
    source="world",
    key=("timestamp", "account_id"),
    identity=("timestamp", "account_id", "bank"),
)
async def book(message: Booked, ctx: fg.Context) -> None:
    await ctx.db.execute("insert into book values ('booked', ?, ?)", (ctx.key, message.number))


@bank.on(Transferred, source="world", key=pair_of)
async def transfer(message: Transferred, ctx: fg.Context) -> None:
    await ctx.db.execute("insert into book values ('transferred', ?, ?)", (ctx.key, message.number))
