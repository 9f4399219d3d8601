"""A handler without a store, one message in and one out, on the journal, beside the same on `memory:`.

All messages were published before, with the subscription paused; the time runs from `resume` until `bus.idle()`. Nobody
subscribes to the event that goes out, so that no second handler is measured. On the journal it is written and synced
before the message that caused it is settled; `memory:` keeps nothing, and shows what the way through the bus costs by
itself.

Processor time is shown beside, since it suffers less from others on the machine.
"""

from functools import partial

from _harness import Contestant, Report, folder, interleave, options, processor, timed
from _orders import Billed, Order, make_order

import faregate as fg

TARGET = 0.4
PUBLISHED_TOGETHER = 1000


def make_nodes() -> list[fg.Node]:
    shop, billing = fg.Node("shop"), fg.Node("billing")

    @billing.on(Order, source="shop")
    async def bill(order: Order) -> Billed:
        return Billed(order_id=order.order_id, customer=order.customer, total=order.total, note=order.note)

    return [shop, billing]


async def run(messages: int, *, name: str) -> float:
    orders = [make_order(number) for number in range(messages)]
    with folder() as path:
        url = "memory:" if name == "memory" else f"journal:{path}/journal"
        async with fg.Bus(url, nodes=make_nodes()) as bus:
            await bus.pause("billing", Order)
            for first in range(0, messages, PUBLISHED_TOGETHER):
                await bus.publish_many(orders[first : first + PUBLISHED_TOGETHER], node="shop")
            with timed(name, messages) as took:
                await bus.resume("billing", Order)
                await bus.idle()
            if bus.outcomes()["handled"] != messages:
                raise RuntimeError(f"{messages} messages were published, and this became of them: {bus.outcomes()}")
    return took[0]


def main() -> None:
    args = options(__doc__, rounds=7, messages=20_000)
    report = Report("stateless", args.json)
    names = ("journal", "memory")
    samples = interleave(
        [Contestant(name, partial(run, name=name)) for name in names], rounds=args.rounds, messages=args.messages
    )
    used = {name: processor(name) * 1e6 for name in names}
    report.table(
        ("one in, one out, no store", "messages/s", "µs each", "µs of processor"),
        [
            (f"{name}:", f"{samples.rate(name):,.0f}", f"{samples.cost(name) * 1e6:,.1f}", f"{used[name]:,.1f}")
            for name in names
        ],
    )
    report.say(f"by processor time alone, the journal is {used['memory'] / used['journal']:.2f} of memory:")
    report.ours = {"journal": samples.rate("journal"), "journal, processor us": used["journal"]}
    report.peers = {"memory": samples.rate("memory"), "memory, processor us": used["memory"]}
    report.goal("journal_to_memory", samples.ratio("journal", "memory"), TARGET)
    report.finish()


if __name__ == "__main__":
    main()
