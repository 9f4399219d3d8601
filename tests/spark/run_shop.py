"""A shop of four nodes whose effects are rows, for both engines. Tables keep the message id without a constraint, so
that a double shows. Handlers misbehave when a file says so: workers are other processes."""

import asyncio
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import faregate as fg
from faregate.ports import faults


class OrderPlaced(fg.Event):
    order_id: str
    number: int
    total: int


class ChargeCard(fg.Command):
    order_id: str
    number: int
    amount: int


class CardCharged(fg.Event):
    order_id: str
    number: int


class OrderShipped(fg.Event):
    order_id: str
    number: int


_TABLE = "create table if not exists {}(seq {}, order_id text, number integer, message_id text)"


def _schema(table: str) -> str:
    serial = "bigserial" if os.environ.get("RUN_SHOP_POSTGRES") else "integer primary key autoincrement"
    return _TABLE.format(table, serial)


shop = fg.Node("shop")
billing = fg.Node("billing", schema=_schema("invoices"))
payments = fg.Node("payments", schema=_schema("charges"))
shipping = fg.Node("shipping", schema=_schema("parcels"))


WORDS = Path(tempfile.gettempdir()) / f"faregate-run-shop-{os.getuid()}"
"""Workers are processes with the environment of the JVM, so what they look at has a fixed place; names are unique."""


def misbehave(what: str) -> bool:
    """Whether a test left word to, once: `arm(what)`."""
    try:
        (WORDS / what).unlink()
        return True
    except FileNotFoundError:
        return False


KILL_PLACES = ("before-the-insert", "after-the-insert", "before-the-commit", "within-the-commit", "after-the-commit")
"""Where a worker can die that handles an order. The word of the order says which, and behind that, for a death within
the commit, how many seconds after its beginning. A word that says nothing means the second."""
_dying: dict[Path, list[str]] = {}
"""What these words say, of orders whose transaction is to be the last one of this process."""


def _die_when_told(order: OrderPlaced, place: str) -> None:
    """The handler is at this place. Of a death at the commit it only takes note."""
    name = f"kill-{order.order_id}-{order.number}"
    try:
        told = (WORDS / name).read_text().split() or [KILL_PLACES[1]]
    except FileNotFoundError:
        return
    if told[0] in KILL_PLACES[2:]:
        _dying[WORDS / name] = told
        faults.hook = _die_at_the_commit
    elif told[0] == place and misbehave(name):
        os.kill(os.getpid(), signal.SIGKILL)


async def _die_at_the_commit(point: str) -> None:
    """The word goes at this moment and not before, so that each that is gone is a death. Of several, those before the
    commit are first: after it their orders are done, and do not come again."""
    if point not in ("unit.before-commit", "unit.after-commit"):
        return
    for word, (place, *seconds) in sorted(_dying.items(), key=lambda each: KILL_PLACES.index(each[1][0])):
        if (place == "after-the-commit") == (point == "unit.after-commit") and misbehave(word.name):
            if not seconds:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Timer(float(seconds[0]), os.kill, (os.getpid(), signal.SIGKILL)).start()
            faults.hook = _wait_for_the_end
            return


async def _wait_for_the_end(point: str) -> None:
    """Nobody learns that the commit has ended."""
    if point == "unit.after-commit":
        threading.Event().wait()


@billing.on(OrderPlaced, source="shop", key="order_id", retry=fg.Retry(1, delay=0.01), redeliver=fg.Redeliver(0.2, 0.2))
async def bill(order: OrderPlaced, ctx: fg.Context) -> object:
    return await _take(order, ctx, "invoices")


async def _take(order: OrderPlaced, ctx: fg.Context, table: str) -> object:
    """A row, and a command; or what a test left word of."""
    if misbehave(f"slow-{order.order_id}-{order.number}"):
        (WORDS / f"pid-{order.order_id}-{order.number}").write_text(str(os.getpid()))
        await asyncio.sleep(8)
    await _meet_twin(f"twin-{order.order_id}-{order.number}")
    if order.total < 0:
        raise fg.Permanent(f"order {order.order_id} has the impossible total {order.total}")
    if misbehave(f"bill-{order.order_id}-{order.number}"):
        raise RuntimeError("the first try fails")
    if misbehave(f"bill-{order.order_id}-{order.number}-again"):
        raise RuntimeError("the second try fails")
    _die_when_told(order, "before-the-insert")
    await ctx.db.execute(
        f"insert into {table}(order_id, number, message_id) values (?, ?, ?)",
        (order.order_id, order.number, ctx.message_id),
    )
    _die_when_told(order, "after-the-insert")
    return fg.send(ChargeCard(order_id=order.order_id, number=order.number, amount=order.total), to="payments")


@payments.on(ChargeCard, key="order_id")
def charge(command: ChargeCard, ctx: fg.Context) -> object:
    ctx.db.execute(
        "insert into charges(order_id, number, message_id) values (?, ?, ?)",
        (command.order_id, command.number, ctx.message_id),
    )
    return CardCharged(order_id=command.order_id, number=command.number)


@shipping.on(CardCharged, source="payments", key="order_id")
async def ship(charged: CardCharged, ctx: fg.Context) -> object:
    await ctx.db.execute(
        "insert into parcels(order_id, number, message_id) values (?, ?, ?)",
        (charged.order_id, charged.number, ctx.message_id),
    )
    return OrderShipped(order_id=charged.order_id, number=charged.number)


async def _meet_twin(word: str) -> None:
    """The first who finds the word waits until another attempt comes as far as this."""
    if misbehave(word):
        (WORDS / f"{word}-waits").touch()
        until = time.monotonic() + 200
        while (WORDS / f"{word}-waits").exists() and time.monotonic() < until:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    else:
        misbehave(f"{word}-waits")


class Stamped(fg.Event):
    order_id: str
    number: int


stamping = fg.Node("stamping", schema=_schema("stamps"))
filing = fg.Node("filing", schema=_schema("files"))


@stamping.on(
    OrderPlaced,
    source="shop",
    key="order_id",
    dedup="tokens",
    retry=fg.Retry(1, delay=0.01),
    redeliver=fg.Redeliver(0.2, 0.2),
)
async def stamp(order: OrderPlaced, ctx: fg.Context) -> object:
    """As billing does, by tokens; one recipient of what it sends has a ledger, and one wants tokens."""
    return [await _take(order, ctx, "stamps"), Stamped(order_id=order.order_id, number=order.number)]


@filing.on(Stamped, source="stamping", key="order_id", dedup="tokens")
async def file(stamped: Stamped, ctx: fg.Context) -> None:
    await ctx.db.execute(
        "insert into files(order_id, number, message_id) values (?, ?, ?)",
        (stamped.order_id, stamped.number, ctx.message_id),
    )


queueing = fg.Node("queueing", schema=_schema("tickets"))


@queueing.on(OrderPlaced, source="shop", order=fg.Serial(), retry=None, redeliver=fg.Redeliver(0.2, 0.2, 0.2))
async def queue_up(order: OrderPlaced, ctx: fg.Context) -> None:
    if misbehave(f"queue-{order.order_id}-{order.number}"):
        raise RuntimeError("the first try fails")
    await ctx.db.execute(
        "insert into tickets(order_id, number, message_id) values (?, ?, ?)",
        (order.order_id, order.number, ctx.message_id),
    )


class Summed(fg.Event):
    order_id: str
    number: int


BUSY = 503

counting = fg.Node("counting")


@counting.on(OrderPlaced, source="shop", key="order_id")
async def count_in(order: OrderPlaced) -> object:
    if order.total < 0:
        raise fg.Permanent("a negative total")
    if order.total == BUSY:
        raise fg.RetryAfter(60)
    return Summed(order_id=order.order_id, number=order.number)


class Seen(fg.Event):
    order_id: str
    number: int


looking = fg.Node("looking")


@looking.on(OrderPlaced, source="shop")
def look_at(order: OrderPlaced) -> object:
    if order.total < 0:
        raise fg.Permanent("a negative total")
    return Seen(order_id=order.order_id, number=order.number)


class Tally:
    count = 0


tallying = fg.Node("tallying")


@tallying.provides(scope="bus")
def make_tally() -> Tally:
    return Tally()


@tallying.on_start
async def begin_at_hundred(tally: Tally) -> None:
    tally.count = 100


@tallying.on(OrderPlaced, source="shop", key="order_id", order=fg.Serial())
async def tally_up(order: OrderPlaced, tally: Tally) -> object:
    tally.count += 1
    return Seen(order_id=order.order_id, number=tally.count)


asking = fg.Node("asking")


@asking.on(OrderPlaced, source="shop")
async def ask_nobody(order: OrderPlaced) -> object:
    return fg.send(ChargeCard(order_id=order.order_id, number=order.number, amount=1), to="nobody")


sifting = fg.Node("sifting", schema=_schema("sifted"))
peeking = fg.Node("peeking")
FEW = "number not in (1, 4) and header.region is null"


@sifting.on(OrderPlaced, source="shop", key="order_id", where=FEW)
async def sift(order: OrderPlaced, ctx: fg.Context) -> None:
    await ctx.db.execute(
        "insert into sifted(order_id, number, message_id) values (?, ?, ?)",
        (order.order_id, order.number, ctx.message_id),
    )


@peeking.on(OrderPlaced, source="shop", where="number < 2")
async def peek(order: OrderPlaced) -> object:
    return Seen(order_id=order.order_id, number=order.number)
