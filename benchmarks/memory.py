"""Publish, typed handler, settle through the full pipeline in memory, beside Taskiq, Dramatiq and FastStream.

Everybody gets the same 200-byte order, the same handler (count it), and is timed from the first publish until the
last message is handled and settled; starting and stopping is not timed. Each peer is set up as its own documentation
does it, with its defaults:

    faregate    `bus.publish` one by one on `memory:`, an `fg.Event` in the handler, all defaults.
    taskiq      `InMemoryBroker`, `kiq` one by one, a pydantic model in the task's signature, which Taskiq validates.
    dramatiq    `StubBroker` with its default middlewares and a `Worker`. It has no typed messages: the fields are
                keyword arguments and nothing is validated. Its default of 8 threads was its fastest when tried.
    faststream  `TestRabbitBroker`, which handles within `publish`, a pydantic model in the handler's signature.

"taskiq, tuned" is for information: the fastest set-up found, which awaits the task within `kiq`, serializes with
orjson, passes a plain dict and validates nothing.
"""

import itertools
from typing import Any

import msgspec
from _harness import Contestant, Report, interleave, options, processor, timed
from pydantic import BaseModel

import faregate as fg

FIELDS: dict[str, Any] = {
    "order_id": "0197a3c2-7d0b-7c55-8a51-1f2e3d4c5b6a",
    "customer": "customer-000042",
    "currency": "EUR",
    "total": 129_900,
    "express": True,
    "note": "leave it with the neighbour when there is nobody at home today",
}
TARGETS = {"taskiq": 5.0, "dramatiq": 4.0, "faststream": 20.0}


class OrderPlaced(fg.Event):
    order_id: str
    customer: str
    currency: str
    total: int
    express: bool
    note: str


class OrderModel(BaseModel):
    order_id: str
    customer: str
    currency: str
    total: int
    express: bool
    note: str


class Counter:
    """What the handlers do: count. Counting is one atomic step, because Dramatiq's handlers run in threads."""

    def __init__(self) -> None:
        self.add = itertools.count(1).__next__

    def check(self, expected: int) -> None:
        counted = self.add() - 1
        if counted != expected:
            raise RuntimeError(f"{counted} messages were handled and {expected} were published")


async def run_faregate(messages: int) -> float:
    counter = Counter()
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(OrderPlaced, source="shop")
    async def handle(order: OrderPlaced) -> None:
        counter.add()

    order = OrderPlaced(**FIELDS)
    async with fg.Bus("memory:", nodes=[shop, billing]) as bus:
        with timed("faregate", messages) as took:
            for _ in range(messages):
                await bus.publish(order, node="shop")
            await bus.idle()
    counter.check(messages)
    return took[0]


async def run_taskiq(messages: int) -> float:
    from taskiq import InMemoryBroker

    counter = Counter()
    broker = InMemoryBroker()

    @broker.task
    async def handle(order: OrderModel) -> None:
        counter.add()

    order = OrderModel(**FIELDS)
    await broker.startup()
    with timed("taskiq", messages) as took:
        for _ in range(messages):
            await handle.kiq(order)
        await broker.wait_all()
    await broker.shutdown()
    counter.check(messages)
    return took[0]


async def run_taskiq_tuned(messages: int) -> float:
    from taskiq import InMemoryBroker
    from taskiq.serializers import ORJSONSerializer

    counter = Counter()
    broker = InMemoryBroker(await_inplace=True, cast_types=False).with_serializer(ORJSONSerializer())

    @broker.task
    async def handle(order: dict[str, Any]) -> None:
        counter.add()

    await broker.startup()
    with timed("taskiq, tuned", messages) as took:
        for _ in range(messages):
            await handle.kiq(FIELDS)
        await broker.wait_all()
    await broker.shutdown()
    counter.check(messages)
    return took[0]


async def run_dramatiq(messages: int) -> float:
    """Blocks the event loop, which has nothing else to do here: Dramatiq works in threads."""
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    counter = Counter()
    broker = StubBroker()

    @dramatiq.actor(broker=broker, actor_name="handle")
    def handle(**fields: Any) -> None:
        counter.add()

    worker = dramatiq.Worker(broker, worker_timeout=50)
    worker.start()
    with timed("dramatiq", messages) as took:
        for _ in range(messages):
            handle.send(**FIELDS)
        broker.join(handle.queue_name)
    worker.stop()
    broker.close()
    counter.check(messages)
    return took[0]


async def run_faststream(messages: int) -> float:
    from faststream.rabbit import RabbitBroker, TestRabbitBroker

    counter = Counter()
    broker = RabbitBroker()

    @broker.subscriber("orders")
    async def handle(order: OrderModel) -> None:
        counter.add()

    order = OrderModel(**FIELDS)
    async with TestRabbitBroker(broker) as running:
        with timed("faststream", messages) as took:
            for _ in range(messages):
                await running.publish(order, "orders")
    counter.check(messages)
    return took[0]


def main() -> None:
    args = options(__doc__, rounds=7, messages=20_000)
    report = Report("memory", args.json)
    contestants = [Contestant("faregate", run_faregate)]
    if report.has_peer("taskiq"):
        contestants.append(Contestant("taskiq", run_taskiq, share=0.3))
        contestants.append(Contestant("taskiq, tuned", run_taskiq_tuned, share=0.3))
    if report.has_peer("dramatiq"):
        contestants.append(Contestant("dramatiq", run_dramatiq, share=0.2))
    if report.has_peer("faststream"):
        contestants.append(Contestant("faststream", run_faststream, share=0.025))
    samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    size = len(msgspec.json.encode(OrderPlaced(**FIELDS)))
    report.say(f"a message is {size} bytes of JSON")
    rows = []
    for contestant in contestants:
        name = contestant.name
        rows.append(
            (
                name,
                f"{samples.rate(name):,.0f}",
                f"{samples.cost(name) * 1e6:.1f}",
                f"{processor(name) * 1e6:.1f}",
                "" if name == "faregate" else f"{samples.ratio('faregate', name):.2f}",
            )
        )
    report.table(("in memory", "messages/s", "µs each", "µs of processor", "faregate is x faster"), rows)
    report.ours = {"messages_per_second": samples.rate("faregate"), "processor us": processor("faregate") * 1e6}
    for name in (each.name for each in contestants[1:]):
        report.peers |= {name: samples.rate(name), f"{name}, processor us": processor(name) * 1e6}
        if name in TARGETS:
            report.goal(name, samples.ratio("faregate", name), TARGETS[name])
    report.finish()


if __name__ == "__main__":
    main()
