"""Publish to a quorum queue of RabbitMQ, confirmed, beside aiormq, aio-pika, FastStream, Dramatiq and Celery.

Everybody publishes the same order of about 250 bytes, persistent and mandatory, and is timed from the first publish
until the last is confirmed. Connecting and declaring is not timed. Afterwards the queue has to hold every message.

    faregate    `bus.publish`, all defaults: an id, a digest, headers, a topic exchange.
    aiormq      what ours is built on, bare: `basic_publish` of encoded bytes on one channel, not waiting for the socket
                to drain.
    aio-pika    `default_exchange.publish` of encoded bytes.
    faststream  `broker.publish` of a pydantic model.
    dramatiq    `actor.send` with `confirm_delivery=True`, and
    celery      `apply_async` with `confirm_publish`: both for information, one by one alone. They wait for each
                confirmation within the call, so a thread has one message on its way.

"100 in flight" is 100 tasks, each of which publishes one message after another. The address of RabbitMQ comes from
FAREGATE_TEST_RABBITMQ. Processor time is ours alone, without the broker's.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from _harness import Contestant, Report, interleave, options, processor, timed
from _orders import Order
from _rabbitmq import OURS, OrderModel, address, make_celery, make_dramatiq, order, queues, wait_until_it_holds

import faregate as fg

QUEUE = "bench-publish"
IN_FLIGHT = 100
TARGETS = {
    "aiormq, 100 in flight": 0.7,
    "aio-pika, 100 in flight": 1.1,
    "faststream, 100 in flight": 1.5,
    "aio-pika, one by one": 0.9,
}
PEERS_SHARE, SINGLE_SHARE, SLOW_SHARE = 0.4, 0.1, 0.05

Publish = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def faregate() -> AsyncIterator[Publish]:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(Order, source="shop")
    async def bill(order: Order) -> None: ...

    async with fg.Bus(address(), nodes=[billing]):
        pass  # its queue is there now, and nobody consumes it
    message = order(17)
    async with fg.Bus(address(), nodes=[shop]) as bus:
        yield lambda: bus.publish(message, node="shop")


@asynccontextmanager
async def bare() -> AsyncIterator[Publish]:
    import aiormq
    from pamqp.commands import Basic

    message, encode = order(17), msgspec.json.Encoder().encode
    connection = await aiormq.connect(address())
    channel = await connection.channel(publisher_confirms=True)
    yield lambda: channel.basic_publish(
        encode(message),
        routing_key=QUEUE,
        properties=Basic.Properties(delivery_mode=2),
        mandatory=True,
        wait=False,
    )
    await connection.close()


@asynccontextmanager
async def aio_pika() -> AsyncIterator[Publish]:
    import aio_pika

    message, encode = order(17), msgspec.json.Encoder().encode
    connection = await aio_pika.connect_robust(address())
    channel = await connection.channel()
    exchange, persistent = channel.default_exchange, aio_pika.DeliveryMode.PERSISTENT
    yield lambda: exchange.publish(
        aio_pika.Message(encode(message), delivery_mode=persistent), routing_key=QUEUE, mandatory=True
    )
    await connection.close()


@asynccontextmanager
async def faststream() -> AsyncIterator[Publish]:
    from faststream.rabbit import RabbitBroker

    message = OrderModel(**msgspec.structs.asdict(order(17)))
    async with RabbitBroker(address(), logger=None) as broker:
        yield lambda: broker.publish(message, QUEUE, persist=True, mandatory=True)


@asynccontextmanager
async def dramatiq() -> AsyncIterator[Publish]:
    import dramatiq

    broker = make_dramatiq(confirm_delivery=True)

    @dramatiq.actor(broker=broker, actor_name="bill", queue_name=QUEUE)
    def bill(**fields: Any) -> None: ...

    fields = msgspec.structs.asdict(order(17))

    async def publish() -> None:
        bill.send(**fields)

    broker.declare_queue(QUEUE, ensure=True)
    yield publish
    broker.close()


@asynccontextmanager
async def celery() -> AsyncIterator[Publish]:
    app = make_celery(QUEUE)

    @app.task(name="bill", shared=False)
    def bill(**fields: Any) -> None: ...

    fields = msgspec.structs.asdict(order(17))

    async def publish() -> None:
        bill.apply_async(kwargs=fields, mandatory=True)

    yield publish
    app.close()


async def run(messages: int, *, name: str, queue: str, connect: Any, in_flight: int) -> float:
    made = QUEUE if queue == QUEUE else None
    async with queues(queue, *OURS, f"{QUEUE}.DQ", f"{QUEUE}.XQ", made=made) as channel, connect() as publish:
        left = iter(range(messages))

        async def work() -> None:
            for _ in left:
                await publish()

        with timed(name, messages) as took:
            if in_flight == 1:
                await work()
            else:
                await asyncio.gather(*(work() for _ in range(in_flight)))
        await wait_until_it_holds(channel, queue, messages)
    return took[0]


def contestant(name: str, connect: Any, in_flight: int, share: float, queue: str = QUEUE) -> Contestant:
    name = f"{name}, {in_flight} in flight" if in_flight > 1 else f"{name}, one by one"
    return Contestant(name, partial(run, name=name, queue=queue, connect=connect, in_flight=in_flight), share)


def contestants(report: Report) -> list[Contestant]:
    asynchronous: dict[str, Any] = {"aiormq": bare}
    if report.has_peer("aio_pika"):
        asynchronous["aio-pika"] = aio_pika
    if report.has_peer("faststream"):
        asynchronous["faststream"] = faststream
    found = []
    for in_flight, share in ((IN_FLIGHT, 1.0), (1, SINGLE_SHARE)):
        found.append(contestant("faregate", faregate, in_flight, share, OURS[0]))
        found += [
            contestant(name, connect, in_flight, min(share, PEERS_SHARE)) for name, connect in asynchronous.items()
        ]
    if report.has_peer("dramatiq"):
        found.append(contestant("dramatiq", dramatiq, 1, SLOW_SHARE))
    if report.has_peer("celery"):
        found.append(contestant("celery", celery, 1, SLOW_SHARE))
    return found


def main() -> None:
    args = options(__doc__, rounds=5, messages=10_000)
    report = Report("rabbitmq-publish", args.json)
    found = contestants(report)
    samples = interleave(found, rounds=args.rounds, messages=args.messages)
    report.say(f"a message is {len(msgspec.json.encode(order(17)))} bytes of JSON")
    rows = []
    for name in (each.name for each in found):
        ours = f"faregate,{name.partition(',')[2]}"
        ratio = samples.ratio(ours, name)
        rows.append(
            (
                name,
                f"{samples.rate(name):,.0f}",
                f"{samples.cost(name) * 1e6:,.1f}",
                f"{processor(name) * 1e6:,.1f}",
                "" if name == ours else f"{ratio:.2f}",
            )
        )
        figures = report.ours if name == ours else report.peers
        figures |= {name: samples.rate(name), f"{name}, processor us": processor(name) * 1e6}
        if name in TARGETS:
            report.goal(name, ratio, TARGETS[name])
    report.table(("publish, confirmed", "messages/s", "µs each", "µs of processor", "faregate is x faster"), rows)
    report.finish()


if __name__ == "__main__":
    main()
