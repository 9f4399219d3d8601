"""An office that has run, with everything that an honest run may have: repetitions, dead letters and their replay,
skipped messages, commands that nobody takes, handlers that remember by the ledger, by tokens and not at all, a node
without a store; and a body in its log that may be altered.

60 orders go to `accounts` (ledger, ordered by customer, sends 0 to 3 messages each), `desk` (dedup="off"), `tags`
(tokens) and `glance` (no store). Four came twice. One is replayed from the dead letters, one is skipped.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import faregate as fg
from faregate.broker.journal import frame as frames
from faregate.broker.journal.content import read_messages
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.reader import JournalReader
from faregate.bus.dispatcher import Dispatcher
from faregate.ids import message_id
from faregate.ports.store import OutboxRow
from faregate.transports.journal import SEGMENT_SIZE, JournalTransport
from tests.spark.jobs_rig import OrderPlaced, World

ORDERS = 60
REPLAYED, SKIPPED, TO_NOBODY, TWICE = 9, 7, 5, range(20, 24)


class Billed(fg.Event):
    order_id: str


class Forward(fg.Command):
    order_id: str


class Office(World):
    def __init__(self, folder: Path, store: str | None = None) -> None:
        super().__init__(folder, store)
        self.effects = [
            "accounts:select message_id from invoices",
            "desk:select message_id from notes",
            "tags:select message_id from tags",
        ]
        self.stores = dict.fromkeys(("shop", "accounts", "desk", "tags"), self.store)
        self.segment_size = SEGMENT_SIZE
        self.is_open = False
        """Whether the order that became a dead letter may pass."""

    def bus(self) -> fg.Bus:
        shop, glance = fg.Node("shop"), fg.Node("glance")
        accounts = fg.Node("accounts", schema="create table if not exists invoices(message_id text, order_id text)")
        desk = fg.Node("desk", schema="create table if not exists notes(message_id text)")
        tags = fg.Node("tags", schema="create table if not exists tags(message_id text)")

        @accounts.on(OrderPlaced, source="shop", key="customer", retry=None)
        async def bill(order: OrderPlaced, ctx: fg.Context) -> list[Any]:
            number = int(order.order_id)
            if number == REPLAYED and not self.is_open:
                raise fg.Permanent("closed")
            await ctx.db.execute("insert into invoices values (?, ?)", (ctx.message_id, order.order_id))
            if number == TO_NOBODY:
                return [fg.send(Forward(order_id=order.order_id), to="nowhere")]
            return [Billed(order_id=order.order_id) for _ in range(number % 4)]

        async def skip(ctx: fg.Context, call_next: Callable[[], Awaitable[None]]) -> None:
            if int(ctx.message.order_id) != SKIPPED:
                await call_next()

        accounts.use(skip)

        @desk.on(OrderPlaced, source="shop", dedup="off")
        async def note(order: OrderPlaced, ctx: fg.Context) -> Billed:
            await ctx.db.execute("insert into notes values (?)", (ctx.message_id,))
            return Billed(order_id=order.order_id)

        @tags.on(OrderPlaced, source="shop", dedup="tokens")
        async def tag(order: OrderPlaced, ctx: fg.Context) -> Billed:
            await ctx.db.execute("insert into tags values (?)", (ctx.message_id,))
            return Billed(order_id=order.order_id)

        @glance.on(Billed, source="accounts")
        async def look(billed: Billed) -> None: ...

        return fg.Bus(
            JournalTransport(f"{self.journal}", segment_size=self.segment_size),
            nodes=[shop, accounts, desk, tags, glance],
            store=self.stores,
            tokens=self.store,
        )

    def replay(self) -> None:
        async def main() -> None:
            async with self.bus() as bus:
                [letter] = [each for each in await bus.dead_letters("accounts") if each.reason == "permanent"]
                await bus.replay(letter.message_id)
                await bus.idle()

        self.is_open = True
        asyncio.run(main())

    def without_dispatch(self, *orders: OrderPlaced) -> None:
        """Handle orders, and end before anything that `accounts` sends leaves the outbox."""
        taken = Dispatcher.take_up

        def leave(self: Dispatcher, rows: Sequence[OutboxRow]) -> None:
            taken(self, [row for row in rows if row.node != "accounts"])

        Dispatcher.take_up = leave  # type: ignore[method-assign]

        async def main() -> None:
            async with self.bus() as bus:
                await bus.publish_many(list(orders), node="shop")
                while bus.outcomes()["handled"] < 3 * len(orders):  # noqa: ASYNC110 - the bus is never idle
                    await asyncio.sleep(0.01)

        try:
            asyncio.run(main())
        finally:
            Dispatcher.take_up = taken  # type: ignore[method-assign]

    def ids(self, node: str) -> dict[int, str]:
        """By order, its message id at a node."""
        found = {}
        for _, envelope in JournalReader(self.journal).envelopes():
            if envelope.type == "OrderPlaced":
                number = int(envelope.body.split(b'"')[3])
                found[number] = message_id(envelope.publication_id, node)
        return found


def run_office(folder: Path, store: str | None = None) -> Office:
    office = Office(folder, store)
    office.run(*(OrderPlaced(order_id=f"{n}", customer=f"c{n % 2}") for n in range(ORDERS)))
    copies = [offset for offset, each in JournalReader(office.journal).envelopes() if each.type == "OrderPlaced"]
    office.repeat([copies[n] for n in TWICE])
    office.replay()
    return office


def alter_body(path: Path, old: bytes, new: bytes) -> int:
    """Change a body in the journal's only segment, with all its checksums: as somebody would who knows the format.
    Returns its offset."""
    segment = Layout(path).segment(0)
    data = segment.read_bytes()
    header = frames.read_segment_header(data)
    assert header is not None
    made = [data[: frames.SEGMENT_BYTES]]
    changed, previous = None, 0
    for frame in frames.scan(data, header):
        body = bytes(frames.body_of(data, frame))
        if frame.kind in frames.MESSAGES and old in body and changed is None:
            messages = read_messages(frame, body)
            place = next(place for place, each in enumerate(messages.all_envelopes()) if old in each.body)
            changed = messages.offsets[place]
            body = body.replace(old, new, 1)
            assert len(body) == frame.length
        fields = {name: getattr(frame, name) for name in frame._fields if name not in _PLACES}
        head, padding, previous = frames.pack_frame(body, previous=previous, **fields)
        made += [head, body, padding]
    assert changed is not None
    whole = b"".join(made)
    segment.write_bytes(whole + data[len(whole) :])
    return int(changed)


_PLACES = {"at_byte", "length", "crc", "previous"}
