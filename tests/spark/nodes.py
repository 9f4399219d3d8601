"""Nodes for `test_both_engines`: Spark's workers import them by name. What a handler shall do stands in the message or
in its headers, so a run needs nothing but its input; tables have no constraint, so a double shows."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faregate as fg

Next = Callable[[], Awaitable[None]]

NOTES = (
    "create table if not exists notes(handler text, key text, number integer, seq integer, redeliveries integer, "
    "message_id text, correlation_id text, causation_id text, depth integer)"
)

bus: fg.Bus | None = None
"""Set by a test for the command line, which takes `module:attribute`."""


class Step(fg.Event):
    key: str
    number: int
    fails: int = 0
    """So many deliveries fail, with all their tries."""
    tries: int = 0
    """So many tries fail within the delivery that succeeds."""
    permanent: bool = False


class Stepped(fg.Event):
    key: str
    number: int


class Loose(fg.Event):
    key: str
    number: int
    fails: int = 0


class Turn(fg.Event):
    number: int
    fails: int = 0


class Fact(fg.Event):
    order_no: str
    number: int


class Ping(fg.Event):
    key: str
    number: int


class Brief(fg.Event):
    number: int


class Order(fg.Command):
    number: int


class Lost(fg.Command):
    """Nobody handles it."""

    number: int


class Again(fg.Command):
    """Not before some seconds have passed."""

    number: int


@dataclass(frozen=True)
class WriteNote:
    """An effect."""

    handler: str
    key: str
    number: int


class Ink:
    """A resource of one message."""

    def __init__(self) -> None:
        self.used = 0


# Its failures are planned, by message: there is no outage that a kill switch would have to see.
desk = fg.Node("desk", schema=NOTES, kill_switch=False)


def tell(ctx: fg.Context, what: str) -> None:
    """Into the file that the message's header names: how else would a worker tell a test?"""
    path = ctx.headers.get("log")
    if path:
        with Path(path).open("a") as file:
            file.write(f"{what}\n")


@desk.use
async def gate(ctx: fg.Context, call_next: Next) -> None:
    if "skip" in ctx.headers:
        return
    tell(ctx, "before")
    await call_next()
    if "twice" in ctx.headers:
        await call_next()


async def report(ctx: fg.Context, call_next: Next) -> None:
    await call_next()
    tell(ctx, f"after {ctx.outcome}")


desk.use(report, after=True)


@desk.use_outgoing
async def stamp(out: Any, call_next: Next) -> None:
    out.headers["by"] = "desk"
    await call_next()


@desk.provides
async def open_ink() -> AsyncIterator[Ink]:
    yield Ink()


NEXT = "(select coalesce(max(seq), 0) + 1 from notes where handler = ? and key = ?)"
INSERT = f"insert into notes values (?, ?, ?, {NEXT}, ?, ?, ?, ?, ?)"


def note(ctx: fg.Context, handler: str, key: str, number: int) -> tuple[str, tuple[Any, ...]]:
    ids = (ctx.message_id, ctx.correlation_id, ctx.causation_id, ctx.depth)
    return INSERT, (handler, key, number, handler, key, ctx.redeliveries, *ids)


@desk.interprets(WriteNote)
async def write_note(effect: WriteNote, ctx: fg.Context, ink: Ink) -> None:
    ink.used += 1
    await ctx.db.execute(*note(ctx, effect.handler, effect.key, effect.number))


def fail(ctx: fg.Context, fails: int, tries: int = 0) -> None:
    if ctx.redeliveries < fails:
        raise RuntimeError(f"delivery {ctx.redeliveries} fails")
    if ctx.redeliveries == fails and ctx.attempt <= tries:
        raise RuntimeError(f"try {ctx.attempt} fails")


SOON = fg.Redeliver(0.4, 0.4)
RETRY = fg.Retry(1, delay=0.01)


@desk.on(Step, source="author", key="key", retry=RETRY, redeliver=SOON)
async def step(message: Step, ctx: fg.Context, ink: Ink) -> AsyncIterator[object]:
    assert ink.used == 0 or "twice" in ctx.headers, "one resource per message"
    await ctx.db.execute(*note(ctx, "try", message.key, message.number))  # a failed try leaves nothing
    await ctx.db.execute("delete from notes where handler = ? and message_id = ?", ("try", ctx.message_id))
    yield Stepped(key=message.key, number=message.number)
    if message.permanent and not Path(ctx.headers.get("mended", "/nowhere")).exists():
        raise fg.Permanent("never")
    fail(ctx, message.fails, message.tries)
    yield WriteNote("step", message.key, message.number)
    if "lost" in ctx.headers:
        yield fg.send(Lost(number=message.number), to="nowhere")


@desk.on(Loose, source="author", key="key", order=fg.ByKey(strict=False), retry=None, redeliver=SOON)
async def loose(message: Loose, ctx: fg.Context) -> None:
    fail(ctx, message.fails)
    await ctx.db.execute(*note(ctx, "loose", message.key, message.number))


@desk.on(Turn, source="author", order=fg.Serial(), retry=None, redeliver=SOON)
async def turn(message: Turn, ctx: fg.Context) -> None:
    fail(ctx, message.fails)
    await ctx.db.execute(*note(ctx, "turn", "-", message.number))


@desk.on(Fact, source="author", identity="order_no")
async def fact(message: Fact, ctx: fg.Context) -> object:
    await ctx.db.execute(*note(ctx, "fact", message.order_no, message.number))
    return Stepped(key=message.order_no, number=message.number)


@desk.on(Fact, source="second", identity="order_no", claim="eager", name="eager_fact")
async def eager_fact(message: Fact, ctx: fg.Context) -> None:
    await ctx.db.execute(*note(ctx, "eager", message.order_no, message.number))


@desk.on(Fact, source="third", identity="order_no", claim="lazy", order=fg.Serial(), name="lazy_fact")
async def lazy_fact(message: Fact, ctx: fg.Context) -> None:
    await ctx.db.execute(*note(ctx, "lazy", message.order_no, message.number))


@desk.on(Ping, source="author", key="key", dedup="off")
async def ping(message: Ping, ctx: fg.Context) -> object:
    await ctx.db.execute(*note(ctx, "ping", message.key, message.number))
    return Stepped(key=message.key, number=message.number)


@desk.on(Brief, source="author", expires=0.5)
async def brief(message: Brief, ctx: fg.Context) -> None:
    await ctx.db.execute(*note(ctx, "brief", "-", message.number))


@desk.on(Order)
def order(message: Order, ctx: fg.Context) -> Iterator[object]:
    ctx.db.execute(*note(ctx, "order", f"{message.number}", message.number))
    yield fg.publish(Stepped(key="order", number=message.number), id_key="mine", delay=3600)


@desk.on(Again, retry=None, redeliver=None)
async def again(message: Again, ctx: fg.Context) -> None:
    until = Path(ctx.headers["until"])
    if not until.exists():
        raise fg.RetryAfter(0.3)
    await ctx.db.execute(*note(ctx, "again", f"{message.number}", message.number))


# --- without a store ------------------------------------------------------------------------------------------------


class Reflected(fg.Event):
    key: str
    number: int


mirror = fg.Node("mirror")


@mirror.use_outgoing
async def silver(out: Any, call_next: Next) -> None:
    out.headers["by"] = "mirror"
    await call_next()


@mirror.on(Step, source="author", key="key", retry=RETRY, redeliver=SOON)
async def reflect(message: Step, ctx: fg.Context) -> list[object]:
    if message.permanent:
        raise fg.Permanent("never")
    fail(ctx, message.fails, message.tries)
    outputs: list[object] = [Reflected(key=message.key, number=message.number)]
    if "lost" in ctx.headers:
        outputs.append(fg.send(Lost(number=message.number), to="nowhere"))
    return outputs


glance = fg.Node("glance")


@glance.on(Step, source="author")
def look(message: Step) -> object:
    if message.permanent:
        raise fg.Permanent("never")
    return Reflected(key=message.key, number=message.number)


# --- what a handler sees, with and without a store ------------------------------------------------------------------


class Probe(fg.Event):
    name: str
    group: int | None = None
    what: str = ""


class Probed(fg.Event):
    seen: dict[str, Any]


@dataclass(frozen=True)
class Think:
    """An effect without a store."""

    name: str


class Thought(fg.Event):
    name: str


probe = fg.Node("probe")


@probe.use
async def let_pass(ctx: fg.Context, call_next: Next) -> None:
    if "skip" not in ctx.headers:
        await call_next()


@probe.interprets(Think)
async def think(effect: Think, ctx: fg.Context) -> None:
    ctx.publish(Thought(name=effect.name))


@probe.on(Probe, source="author", key="group", retry=RETRY, redeliver=None, expires=3600)
async def look_around(message: Probe, ctx: fg.Context) -> AsyncIterator[object]:
    if message.what == "unavailable" and time.time() < float(ctx.headers["from"]):
        raise fg.Unavailable("not yet", retry_after=0.3)
    if message.what == "bare":
        yield Lost(number=1)  # a command must say where it goes
    if message.what == "odd":
        yield object()  # nobody interprets that
    seen = {
        "name": message.name[:20],
        "length": len(message.name),
        "message_id": ctx.message_id,
        "publication_id": ctx.publication_id,
        "correlation_id": ctx.correlation_id,
        "causation_id": ctx.causation_id,
        "depth": ctx.depth,
        "type": ctx.type,
        "source": ctx.source,
        "key": ctx.key,
        "headers": {key: value for key, value in ctx.headers.items() if key != "from"},
        "attempt": ctx.attempt,
        "redeliveries": ctx.redeliveries if message.what != "unavailable" else 0,
        "sent_at": 1_700_000_000 < ctx.sent_at <= time.time(),
    }
    yield Probed(seen=seen)
    yield Think(message.name[:20])
    if message.what == "twins":
        yield fg.publish(Thought(name="a"), id_key="same")
        yield fg.publish(Thought(name="b"), id_key="same")
    if message.what == "later":
        yield fg.publish(Reflected(key="later", number=1), delay=3600, headers={"x": "y"})
    if message.what == "loop":
        yield fg.publish(Thought(name="loop"), id_key="k")


@probe.on(Thought, source="probe")
async def think_again(message: Thought, ctx: fg.Context) -> object:
    """Its own outputs: a conversation of a node with itself."""
    if ctx.depth < 2:
        return Thought(name=message.name)
    return None
