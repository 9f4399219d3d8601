"""Consume a quorum queue of RabbitMQ: beside aiormq, aio-pika, FastStream, Dramatiq, Celery; and with effects, once.

All messages of about 250 bytes wait in the queue. The time runs from the first that arrives at a handler until the last
has; with effects until the last is committed. Afterwards our queue has to be empty. In a peer's as many as its prefetch
may be left, handled and not acknowledged: that was seen, and why is not known.

An empty handler, with a prefetch of 10 and of 100:

    faregate    no store, an `fg.Event` in the handler.
    aiormq      bare: counts deliveries, acknowledges all up to here whenever half of the prefetch has come.
    aio-pika    `queue.consume`, `message.ack()` for each, the body decoded with msgspec.
    faststream  a pydantic model in the handler's signature, its log switched off.
    dramatiq    a `Worker` with its default of 8 threads, and
    celery      a worker in a thread of its own (`solo`), `acks_late`: both for information.

The handler inserts one row:

    ledger                   on SQLite (`ctx.db.execute`) and on PostgreSQL (`ctx.db.write`), exactly once.
    faststream               as above, at least once and without a database, with a prefetch of 100: what it is beside.
    ledger, and an event     on PostgreSQL, the handler returning an event, which is dispatched to a queue.
    faststream, by hand      the same on PostgreSQL with SQLAlchemy's asyncio: in one transaction an inbox row that
                             refuses a second time, the business row and an outbox row; a relay publishes what the
                             outbox holds and removes it. Prefetch 10.

The addresses come from FAREGATE_TEST_RABBITMQ and FAREGATE_TEST_POSTGRES; without the latter only SQLite is measured.
Processor time is that of this process, without the servers'.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from _effects import INSERT, INVOICES, POSTGRES, place
from _effects_peers import AT_ONCE, RELAYED_TOGETHER, engine
from _harness import Contestant, Report, folder, interleave, note_processor, options, processor
from _orders import Billed, Order, bill_order
from _rabbitmq import (
    OURS,
    QUORUM,
    OrderModel,
    address,
    fill,
    make_celery,
    make_dramatiq,
    multiply,
    order,
    queues,
    wait_until_it_holds,
)
from pamqp.commands import Basic

import faregate as fg

QUEUE, OUT = "bench-consume", "bench-out"
BILLED = "archive.Billed.billing"
"""Where our event goes: the queue of a node that does not run."""
PREFETCHES = 10, 100
TARGETS = {"aiormq": 0.7, "aio-pika": 1.3, "faststream": 2.0}
EFFECTS = {
    "sqlite_to_faststream": ("ledger, SQLite", "faststream, prefetch 100", 1.2),
    "postgres_to_faststream": ("ledger, PostgreSQL", "faststream, prefetch 100", 0.7),
    "postgres_to_by_hand": ("ledger, and an event, PostgreSQL", "faststream, by hand, PostgreSQL", 1.5),
}
"""Who is compared with whom, and the least that the ratio has to be."""
PIKA_SHARE, SLOW_SHARE, BY_HAND_SHARE, EFFECTS_SHARE = 0.2, 0.06, 0.02, 0.2


class Counter:
    """Counts what arrives, and knows when the first and the last did. Handlers may run in threads."""

    def __init__(self, messages: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._left = messages
        self._messages = messages
        self._begin = self._used = 0.0
        self._done = asyncio.Event()

    def add(self) -> None:
        with self._lock:
            self._left -= 1
            left = self._left
        if left == self._messages - 1:
            self._begin, self._used = time.perf_counter(), time.process_time()
        if left == 0:
            self._loop.call_soon_threadsafe(self._done.set)

    async def last(self) -> None:
        await self._done.wait()

    def seconds(self, name: str) -> float:
        """Since the first one. Notes processor time, too."""
        took = time.perf_counter() - self._begin
        note_processor(name, (time.process_time() - self._used) / self._messages)
        if self._left:
            raise RuntimeError(f"{-self._left} messages too many were handled")
        return took


# --- an empty handler --------------------------------------------------------------------------------------------

Consuming = Callable[[Counter, int], AbstractAsyncContextManager[None]]
"""Consumes within the block, with a prefetch."""


def billing(handler: Any, *, schema: str | None = None, **options: Any) -> fg.Node:
    node = fg.Node("billing", schema=schema)
    node.on(Order, source="shop", name="bill", **options)(handler)
    return node


async def fill_ours(messages: int, channel: Any) -> None:
    """Declares the queue of `billing`, and publishes from `shop`."""
    async with fg.Bus(address(), nodes=[billing(lambda order: None)]):
        pass
    async with fg.Bus(address(), nodes=[fg.Node("shop")]) as bus:
        for first in range(0, messages, 1000):
            numbers = range(first, min(first + 1000, messages))
            await bus.publish_many([order(number) for number in numbers], node="shop")
    await wait_until_it_holds(channel, OURS[0], messages)


@asynccontextmanager
async def faregate(counter: Counter, prefetch: int) -> AsyncIterator[None]:
    async def bill(order: Order) -> None:
        counter.add()

    async with fg.Bus(address(), nodes=[billing(bill, prefetch=prefetch)]):
        yield


@asynccontextmanager
async def bare(counter: Counter, prefetch: int) -> AsyncIterator[None]:
    import aiormq

    connection = await aiormq.connect(address())
    channel = await connection.channel()
    unanswered = 0

    async def take(message: Any) -> None:
        nonlocal unanswered
        counter.add()
        unanswered += 1
        if unanswered >= prefetch // 2:
            unanswered = 0
            await channel.basic_ack(message.delivery_tag, multiple=True, wait=False)

    await channel.basic_qos(prefetch_count=prefetch)
    await channel.basic_consume(QUEUE, take)
    yield
    await channel.basic_ack(0, multiple=True)
    await connection.close()


@asynccontextmanager
async def aio_pika(counter: Counter, prefetch: int) -> AsyncIterator[None]:
    import aio_pika

    decode = msgspec.json.Decoder(Order).decode

    async def take(message: Any) -> None:
        decode(message.body)
        await message.ack()
        counter.add()

    connection = await aio_pika.connect_robust(address())
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=prefetch)
    queue = await channel.get_queue(QUEUE)
    await queue.consume(take)
    yield
    await connection.close()


@asynccontextmanager
async def faststream(counter: Counter, prefetch: int) -> AsyncIterator[None]:
    from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue

    broker = RabbitBroker(address(), logger=None)

    @broker.subscriber(RabbitQueue(QUEUE, QueueType.QUORUM, durable=True), channel=Channel(prefetch_count=prefetch))
    async def bill(order: OrderModel) -> None:
        counter.add()

    async with broker:
        await broker.start()
        yield


def fields() -> dict[str, Any]:
    return msgspec.structs.asdict(order(17))


@asynccontextmanager
async def dramatiq(counter: Counter, prefetch: int) -> AsyncIterator[None]:
    import dramatiq

    broker = make_dramatiq()

    @dramatiq.actor(broker=broker, actor_name="bill", queue_name=QUEUE)
    def bill(**fields: Any) -> None:
        counter.add()

    worker = dramatiq.Worker(broker, worker_timeout=50)
    worker.queue_prefetch = prefetch
    worker.start()
    yield
    await asyncio.to_thread(worker.stop)
    broker.close()


async def send_dramatiq() -> None:
    import dramatiq

    broker = make_dramatiq(confirm_delivery=True)
    bill = dramatiq.actor(lambda **fields: None, broker=broker, actor_name="bill", queue_name=QUEUE)
    bill.send(**fields())
    broker.close()


@asynccontextmanager
async def celery(counter: Counter, prefetch: int) -> AsyncIterator[None]:
    from celery.contrib.testing.worker import start_worker

    app = make_celery(QUEUE)

    @app.task(name="bill", shared=False)
    def bill(**fields: Any) -> None:
        counter.add()

    worker = start_worker(app, perform_ping_check=False, loglevel="ERROR", prefetch_multiplier=prefetch)
    await asyncio.to_thread(worker.__enter__)
    yield
    await asyncio.to_thread(worker.__exit__, None, None, None)
    app.close()


async def send_celery() -> None:
    app = make_celery(QUEUE)
    app.send_task("bill", kwargs=fields())
    app.close()


async def run(messages: int, *, name: str, consuming: Consuming, prefetch: int, send: Any = None) -> float:
    ours = consuming is faregate
    queue = OURS[0] if ours else QUEUE
    async with queues(QUEUE, *OURS, f"{QUEUE}.DQ", f"{QUEUE}.XQ", made=None if ours else QUEUE) as channel:
        if ours:
            await fill_ours(messages, channel)
        elif send is not None:
            await send()
            await multiply(channel, QUEUE, messages)
        else:
            await fill(channel, QUEUE, plain_messages(messages))
        counter = Counter(messages)
        async with consuming(counter, prefetch):
            await counter.last()
            took = counter.seconds(name)
        await wait_until_it_holds(channel, queue, 0, or_up_to=0 if ours else prefetch)
    return took


def plain_messages(messages: int) -> Any:
    for number in range(messages):
        properties = Basic.Properties(
            content_type="application/json", delivery_mode=2, message_id=f"message-{number}", correlation_id="c"
        )
        yield properties, msgspec.json.encode(order(number))


# --- effects -----------------------------------------------------------------------------------------------------


async def run_ledger(messages: int, *, name: str, kind: str, sends: bool = False) -> float:
    """Until the last is settled, which follows the commit; with an event until nothing waits to be sent."""

    async def bill(order: Order, ctx: fg.Context) -> Billed | None:
        counter.add()
        if kind == "postgres":
            ctx.db.write(INSERT, (order.order_id, ctx.message_id, order.total))
        else:
            await ctx.db.execute(INSERT, (order.order_id, ctx.message_id, order.total))
        return bill_order(order) if sends else None

    async with queues(*OURS, BILLED, "archive-dead") as channel:
        archive = fg.Node("archive")
        archive.on(Billed, source="billing", name="note")(lambda billed: None)
        async with fg.Bus(address(), nodes=[archive]):
            pass
        await fill_ours(messages, channel)
        counter = Counter(messages)
        with folder() as path:
            async with (
                place(kind, path) as url,
                fg.Bus(address(), nodes=[billing(bill, schema=INVOICES)], store=url) as bus,
            ):
                await counter.last()
                while bus.outcomes()["handled"] < messages:  # noqa: ASYNC110 - there is no signal for it
                    await asyncio.sleep(0.002)
                if sends:
                    await bus.idle()
                took = counter.seconds(name)
        await wait_until_it_holds(channel, OURS[0], 0)
        await wait_until_it_holds(channel, BILLED, messages if sends else 0)
    return took


async def run_by_hand(messages: int, *, name: str) -> float:
    from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue
    from faststream.rabbit.annotations import RabbitMessage
    from sqlalchemy import text
    from sqlalchemy.exc import IntegrityError
    from sqlalchemy.ext.asyncio import async_sessionmaker

    into_inbox = text("insert into inbox(message_id) values (:message_id)")
    into_invoices = text("insert into invoices(order_id, message_id, total) values (:order_id, :message_id, :total)")
    into_outbox = text("insert into outbox(body) values (:body)")
    from_outbox = text("select id, body from outbox order by id limit :count for update skip locked")
    out_of_outbox = text("delete from outbox where id = any(:ids)")
    broker = RabbitBroker(address(), logger=None)
    filled = asyncio.Event()

    async def relay(sessions: Any) -> None:
        sent = 0
        while sent < messages:
            await filled.wait()
            filled.clear()
            async with sessions() as session:
                rows = (await session.execute(from_outbox, {"count": RELAYED_TOGETHER})).all()
                await asyncio.gather(*(broker.publish(row.body, OUT, persist=True) for row in rows))
                await session.execute(out_of_outbox, {"ids": [row.id for row in rows]})
                await session.commit()
            sent += len(rows)
            if len(rows) == RELAYED_TOGETHER:
                filled.set()

    async with queues(QUEUE, OUT, made=QUEUE) as channel, engine("postgres") as made:
        sessions = async_sessionmaker(made)
        await channel.queue_declare(OUT, durable=True, arguments=QUORUM)
        await fill(channel, QUEUE, plain_messages(messages))
        counter = Counter(messages)

        @broker.subscriber(
            RabbitQueue(QUEUE, QueueType.QUORUM, durable=True), channel=Channel(prefetch_count=AT_ONCE["postgres"])
        )
        async def bill(order: OrderModel, message: RabbitMessage) -> None:
            counter.add()
            row = {"order_id": order.order_id, "message_id": message.message_id, "total": order.total}
            async with sessions() as session:
                try:
                    await session.execute(into_inbox, {"message_id": message.message_id})
                except IntegrityError:  # a second delivery
                    return
                await session.execute(into_invoices, row)
                await session.execute(into_outbox, {"body": order.model_dump_json()})
                await session.commit()
            filled.set()

        async with broker:
            await broker.start()
            await relay(sessions)
            took = counter.seconds(name)
        await wait_until_it_holds(channel, QUEUE, 0)
        await wait_until_it_holds(channel, OUT, messages)
    return took


# --- all of it ---------------------------------------------------------------------------------------------------


def with_empty_handler(report: Report) -> list[Contestant]:
    found = []
    peers: list[tuple[str, Consuming, float, Any]] = [("faregate", faregate, 1.0, None), ("aiormq", bare, 1.0, None)]
    if report.has_peer("aio_pika"):
        peers.append(("aio-pika", aio_pika, PIKA_SHARE, None))
    if report.has_peer("faststream"):
        peers.append(("faststream", faststream, SLOW_SHARE, None))
    if report.has_peer("dramatiq"):
        peers.append(("dramatiq", dramatiq, SLOW_SHARE, send_dramatiq))
    if report.has_peer("celery"):
        peers.append(("celery", celery, SLOW_SHARE, send_celery))
    for prefetch in PREFETCHES:
        for peer, consuming, share, send in peers:
            name = f"{peer}, prefetch {prefetch}"
            work = partial(run, name=name, consuming=consuming, prefetch=prefetch, send=send)
            found.append(Contestant(name, work, share))
    return found


def with_effects(report: Report) -> list[Contestant]:
    name = "ledger, SQLite"
    found = [Contestant(name, partial(run_ledger, name=name, kind="sqlite"), EFFECTS_SHARE)]
    if POSTGRES is None:
        report.say("PostgreSQL is not measured: FAREGATE_TEST_POSTGRES names none")
        return found
    for name, sends in (("ledger, PostgreSQL", False), ("ledger, and an event, PostgreSQL", True)):
        work = partial(run_ledger, name=name, kind="postgres", sends=sends)
        found.append(Contestant(name, work, EFFECTS_SHARE))
    if report.has_peer("faststream") and report.has_peer("asyncpg"):
        name = "faststream, by hand, PostgreSQL"
        found.append(Contestant(name, partial(run_by_hand, name=name), BY_HAND_SHARE))
    return found


def main() -> None:
    args = options(__doc__, rounds=2, messages=20_000)
    report = Report("rabbitmq-consume", args.json)
    contestants = with_empty_handler(report) + with_effects(report)
    samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    names = [each.name for each in contestants]
    report.table(
        ("consume", "messages/s", "µs each", "µs of processor"),
        [
            (
                name,
                f"{samples.rate(name):,.0f}",
                f"{samples.cost(name) * 1e6:,.1f}",
                f"{processor(name) * 1e6:,.1f}",
            )
            for name in names
        ],
    )
    for name in names:
        figures = report.ours if name.startswith(("faregate", "ledger")) else report.peers
        figures |= {name: samples.rate(name), f"{name}, processor us": processor(name) * 1e6}
    for prefetch in PREFETCHES:
        for peer, target in TARGETS.items():
            if (other := f"{peer}, prefetch {prefetch}") in names:
                report.goal(other, samples.ratio(f"faregate, prefetch {prefetch}", other), target)
    for goal, (ours, other, target) in EFFECTS.items():
        if ours in names and other in names:
            report.goal(goal, samples.ratio(ours, other), target)
    report.finish()


if __name__ == "__main__":
    main()
