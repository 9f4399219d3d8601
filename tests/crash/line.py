"""The nodes that the crash tests run, and what must be there when they are at rest.

    shop --Ordered--> first --Passed--> second --Arrived--> first --Closed--> nobody
                            `--Tell---> second

Every handler keeps the message id in a table without a unique constraint, so that a second run is seen; two of them
through SQLAlchemy, where it is pending until the handler has returned. Every sixth Passed fails once in memory, every
sixth needs a redelivery, and some become dead letters: each after it has written and sent something, none of which may
stay. Ids are deterministic, so `expected` knows every one of them beforehand.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.orm import registry

import faregate as fg

KEYS = 3
SCHEMA = "create table if not exists {}_effects (message_id text, number integer, type text, place integer)"


class Ordered(fg.Event):
    number: int
    lane: str


class Passed(fg.Event):
    number: int
    lane: str


class Tell(fg.Command):
    number: int


class Arrived(fg.Event):
    number: int


class Closed(fg.Event):
    number: int


def mapped(node: str) -> type:
    """SQLAlchemy's view of a node's table. What it calls the primary key is none to the database."""
    columns = [sa.Column("message_id", sa.Text, primary_key=True), sa.Column("number", sa.Integer)]
    table = sa.Table(f"{node}_effects", sa.MetaData(), *columns, sa.Column("type", sa.Text))
    cls = type(f"EffectIn{node.title()}", (), {})
    registry().map_imperatively(cls, table)
    return cls


effect_in_first, effect_in_second = mapped("first"), mapped("second")


def is_bad(number: int) -> bool:
    return number % 9 == 3


def ordered(number: int) -> Ordered:
    return Ordered(number=number, lane=f"lane-{number % KEYS}")


def nodes(dedup: Literal["ledger", "tokens"]) -> list[fg.Node]:
    shop, first, second = (fg.Node(name, schema=SCHEMA.format(name)) for name in ("shop", "first", "second"))

    async def note(ctx: fg.Context, number: int) -> None:
        table = f"{ctx.node}_effects"
        place = f"(select coalesce(max(place), 0) + 1 from {table})"  # behind all that its key has there
        await ctx.db.execute(f"insert into {table} values (?, ?, ?, {place})", (ctx.message_id, number, ctx.type))

    @first.on(Ordered, source="shop", key="lane", dedup=dedup)
    async def pass_on(order: Ordered, ctx: fg.Context) -> None:
        await note(ctx, order.number)
        ctx.publish(Passed(number=order.number, lane=order.lane))
        ctx.send(Tell(number=order.number), to="second")

    @second.on(
        Passed,
        source="first",
        key="lane",
        dedup=dedup,
        retry=fg.Retry(1, delay=0.01),
        redeliver=fg.Redeliver(0.01, 0.01),
    )
    async def arrive(passed: Passed, ctx: fg.Context) -> None:
        await note(ctx, passed.number)
        ctx.publish(Arrived(number=passed.number))
        if is_bad(passed.number):
            raise fg.Permanent("bad, on purpose")
        if passed.number % 6 == 1 and ctx.attempt == 1:
            raise OSError("its first try fails")
        if passed.number % 6 == 2 and ctx.redeliveries == 0:
            raise OSError("its first delivery fails")

    @second.on(Tell, dedup=dedup)
    def listen(tell: Tell, ctx: fg.BlockingContext) -> None:
        ctx.session.add(effect_in_second(message_id=ctx.message_id, number=tell.number, type=ctx.type))

    @first.on(Arrived, source="second", dedup=dedup)
    async def finish(arrived: Arrived, ctx: fg.AsyncContext) -> None:
        ctx.session.add(effect_in_first(message_id=ctx.message_id, number=arrived.number, type=ctx.type))
        ctx.publish(Closed(number=arrived.number))

    return [shop, first, second]


@dataclass
class Records:
    """What is in the stores and in the journal; sorted lists, so that what is there twice is seen."""

    effects: list[tuple[str, str, int]] = field(default_factory=list)
    """(node, message id, number)"""
    ledger: list[tuple[str, str]] = field(default_factory=list)
    dead: list[tuple[str, str, str]] = field(default_factory=list)
    """(node, message id, status)"""
    log: list[str] = field(default_factory=list)
    """Publication ids in the journal."""
    arrived: dict[int, list[int]] = field(default_factory=dict)
    """The numbers of each key in the order in which they were committed after the second hop."""
    outbox: int = 0
    tokens: int = 0
    claims: int = 0

    def tidy(self) -> "Records":
        for rows in (self.effects, self.ledger, self.dead, self.log):
            rows.sort()
        return self


def expected(numbers: Iterable[int], dedup: str) -> Records:
    """What must be there, and nothing else, once these orders are through."""
    there = Records()
    for number in numbers:
        root = fg.ids.idempotent_id("shop", "Ordered", f"order-{number}")
        if dedup == "tokens":
            there.ledger.append(("shop", root))  # that is how a repetition of its idempotency key is told

        def effect(publication: str, node: str, number: int = number) -> str:
            message_id = fg.ids.message_id(publication, node)
            there.effects.append((node, message_id, number))
            if dedup == "ledger":
                there.ledger.append((node, message_id))
            return message_id

        def output(cause: str, node: str, handler: str, type: str, slot: int, root: str = root) -> str:
            publication = fg.ids.publication_id(
                correlation_id=root, node=node, causation_id=cause, handler=handler, type=type, slot=slot
            )
            there.log.append(publication)
            return publication

        there.log.append(root)
        cause = effect(root, "first")
        passed = output(cause, "first", "pass_on", "Passed", 0)
        effect(output(cause, "first", "pass_on", "Tell", 1), "second")
        if is_bad(number):
            there.dead.append(("second", fg.ids.message_id(passed, "second"), "open"))
        else:
            there.arrived.setdefault(number % KEYS, []).append(number)
            arrived = output(effect(passed, "second"), "second", "arrive", "Arrived", 0)
            output(effect(arrived, "first"), "first", "finish", "Closed", 0)
    return there.tidy()
