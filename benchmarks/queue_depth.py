"""Acquire and settle with 1,000,000 messages waiting beside 1,000 waiting, and the CPU that an idle bus uses.

What is measured:
- One broker per depth, filled with that many publications of their own and consumed through `Broker.consume`, so
  every message goes through pump, acquire, delivery and settle as on `memory:`. A slice of 256 is taken and settled
  (timed), then as many are published again (not timed), so the depth stays. Both brokers live at the same time and
  take turns slice by slice.
- The same at 1,000,000 with 100,000 keys whose order is kept, for information, beside 1,000 with 100 keys.
- The CPU time of the process over 2 seconds in which a bus with eight connected subscriptions has nothing to do,
  while 1,000 messages wait at a ninth that is paused.
"""

import asyncio
import gc
import time
from statistics import median

from _harness import Report, Samples, options

import faregate as fg
from faregate.broker import Broker
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.queue import Binding, Delivery

SMALL, TIMES_A_ROUND = 1_000, 100
"""The deep queue holds so many times what a round takes: 1,000,000 by default."""
MESSAGES_PER_KEY = 10
PREFETCH = 32
SLICE = 8 * PREFETCH
"""Whole windows of credit, so that nothing is fetched ahead when a slice ends."""
DEPTH_TARGET = 1 / 1.5
IDLE_SECONDS, IDLE_LIMIT = 2.0, 0.005
SUBSCRIPTIONS = 8
BODY = b'{"order_id":"0197a3c2-7d0b-7c55-8a51-1f2e3d4c5b6a","total":129900}'


class DeepQueue:
    """A queue of constant depth, and a consumer that takes slices of it."""

    def __init__(self, depth: int, *, keyed: bool) -> None:
        self._broker = Broker(SystemClock())
        key_of = (lambda envelope: envelope.key) if keyed else None
        binding = Binding(node="billing", type="Order", kind="event", source="shop", key_of=key_of)
        self._queue = self._broker.bind(binding)
        self._keys = depth // MESSAGES_PER_KEY if keyed else 0
        self._depth = depth
        self._published = 0
        self._taken: list[Delivery] = []
        self.publish(depth)
        self._consumer = self._broker.consume(self._queue.name, self._deliver, prefetch=PREFETCH)
        self._consumer.pause()

    def _deliver(self, delivery: Delivery) -> None:
        self._taken.append(delivery)

    def publish(self, count: int) -> None:
        for number in range(self._published, self._published + count):
            key = f"customer-{number % self._keys}" if self._keys else None
            envelope = Envelope(publication_id=f"id-{number}", type="Order", source="shop", body=BODY, key=key)
            self._broker.append([envelope])
        self._published += count

    async def take_slice(self) -> float:
        """The seconds that it takes to acquire and settle a slice."""
        left = SLICE
        begin = time.perf_counter()
        self._consumer.resume()
        while left > 0:
            await asyncio.sleep(0)
            batch, self._taken = self._taken, []
            left -= len(batch)
            for delivery in batch:
                await delivery.settle("handled")
        seconds = time.perf_counter() - begin
        self._consumer.pause()
        return seconds

    def refill(self) -> None:
        self.publish(self._depth - len(self._queue))

    def close(self) -> None:
        self._broker.close()


async def compare(large: int, *, keyed: bool, rounds: int, messages: int) -> Samples:
    """Seconds per message at both depths, in turns; a round is as many slices as make up `messages`."""
    queues = {"small": DeepQueue(SMALL, keyed=keyed), "large": DeepQueue(large, keyed=keyed)}
    samples = Samples({name: [] for name in queues})
    slices = max(1, messages // SLICE)
    for number in range(rounds + 1):
        gc.collect()
        spent = dict.fromkeys(queues, 0.0)
        for turn in range(slices):
            for name in queues if turn % 2 else reversed(queues):
                spent[name] += await queues[name].take_slice()
                queues[name].refill()
        if number or not rounds:
            for name, seconds in spent.items():
                samples.seconds[name].append(seconds / (slices * SLICE))
    for queue in queues.values():
        queue.close()
    return samples


class Order(fg.Command):
    order_id: str


async def idle_cpu(rounds: int) -> float:
    """The median CPU seconds of this process while nothing happens."""
    node = fg.Node("billing")
    shop = fg.Node("shop")

    async def handle(message: Order) -> None:
        pass

    node.on(Order)(handle)
    for number in range(SUBSCRIPTIONS):

        class Other(fg.Event, wire=f"Other{number}"):
            order_id: str

        @node.on(Other, source="shop")
        async def other(message: Other) -> None:
            pass

    async with fg.Bus("memory:", nodes=[shop, node]) as bus:
        await bus.pause("billing", Order)
        for number in range(1000):
            await bus.send(Order(order_id=str(number)), to="billing", node="shop")
        gc.collect()
        await asyncio.sleep(0.1)
        spent = []
        for _ in range(rounds):
            begin = time.process_time()
            await asyncio.sleep(IDLE_SECONDS)
            spent.append(time.process_time() - begin)
    return median(spent)


def main() -> None:
    args = options(__doc__, rounds=9, messages=10_000)
    report = Report("queue-depth", args.json)
    large = max(2 * SMALL, TIMES_A_ROUND * args.messages)
    idle = asyncio.run(idle_cpu(rounds=min(3, args.rounds or 1)))
    plain = asyncio.run(compare(large, keyed=False, rounds=args.rounds, messages=args.messages))
    keyed = asyncio.run(compare(large, keyed=True, rounds=args.rounds, messages=args.messages))

    def row(label: str, samples: Samples) -> tuple[str, str, str, str]:
        small, large = samples.cost("small") * 1e6, samples.cost("large") * 1e6
        return label, f"{small:.3f}", f"{large:.3f}", f"{samples.ratio('small', 'large'):.2f}"

    report.table(
        ("acquire + settle, µs each", f"{SMALL:,} wait", f"{large:,} wait", "times the cost"),
        [row("no keys", plain), row(f"{MESSAGES_PER_KEY} messages to a key", keyed)],
    )
    report.table(
        (f"CPU of an idle bus in {IDLE_SECONDS:g} s", "ms", "at most"),
        [
            (
                f"{SUBSCRIPTIONS} subscriptions, 1,000 waiting at a paused one",
                f"{idle * 1e3:.2f}",
                f"{IDLE_LIMIT * 1e3:g}",
            )
        ],
    )
    report.ours = {
        f"us_with_{large}_waiting": plain.cost("large") * 1e6,
        f"us_with_{large}_waiting_keyed": keyed.cost("large") * 1e6,
        "idle_cpu_ms": idle * 1e3,
    }
    report.peers = {
        "us_with_1000_waiting": plain.cost("small") * 1e6,
        "us_with_1000_waiting_keyed": keyed.cost("small") * 1e6,
        "keyed_depth_ratio": keyed.ratio("large", "small"),
        "idle_cpu_limit_ms": IDLE_LIMIT * 1e3,
    }
    report.goal("depth", plain.ratio("large", "small"), DEPTH_TARGET)
    report.goal("idle_cpu", IDLE_LIMIT / max(idle, 1e-6), 1.0)
    report.finish()


if __name__ == "__main__":
    main()
