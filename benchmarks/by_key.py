"""Order per key beside no order: 1,000 keys, a handler that awaits 1 ms, 100 lanes; and what a slow key costs the rest.

All messages were published before, on `memory:`, with the subscription paused; the time runs from `resume` until every
message is handled that is not of the first key. Of that key the handler awaits 1 ms as of the others, or, where it is
slow, 100 ms: then the rest must not notice. Messages with two keys each (`fg.Each`) are shown for information: there
fewer can run together.

With far fewer messages a run is over before the last batch with a slow message in it has parted from that, which takes
up to 50 ms, and the share of these shows.

Processor time is shown beside, since it suffers less from others on the machine.
"""

import asyncio
from functools import partial

from _harness import Contestant, Report, interleave, options, processor, timed

import faregate as fg

KEYS, LANES = 1_000, 100
SECONDS, SLOW_SECONDS = 0.001, 0.1
PARALLEL_TARGET, SLOW_TARGET = 0.9, 0.95
PUBLISHED_TOGETHER = 1000
NAMES = ("parallel", "by_key", "slow_key", "two_keys")


class Step(fg.Event):
    key: str
    other: str
    number: int


class Work:
    """The handler, and how much of the rest is left."""

    def __init__(self, slow: float, others: int) -> None:
        self._slow = slow
        self._left = others
        self.done = asyncio.Event()
        if not others:
            self.done.set()

    async def handle(self, step: Step) -> None:
        if step.key == "0":
            await asyncio.sleep(self._slow if not self.done.is_set() else 0)
            return
        await asyncio.sleep(SECONDS)
        self._left -= 1
        if not self._left:
            self.done.set()


def options_of(name: str) -> dict[str, object]:
    if name == "parallel":
        return {"order": fg.Parallel(LANES)}
    return {"key": fg.Each("key", "other") if name == "two_keys" else "key", "order": fg.ByKey(lanes=LANES)}


async def run(messages: int, *, name: str) -> float:
    steps = [Step(key=f"{n % KEYS}", other=f"{(7 * n + 500) % KEYS}", number=n) for n in range(messages)]
    others = sum(step.key != "0" for step in steps)
    work = Work(SLOW_SECONDS if name == "slow_key" else SECONDS, others)
    source, worker = fg.Node("source"), fg.Node("worker")
    worker.on(Step, source="source", **options_of(name))(work.handle)  # type: ignore[arg-type]
    async with fg.Bus("memory:", nodes=[source, worker]) as bus:
        await bus.pause("worker", Step)
        for first in range(0, messages, PUBLISHED_TOGETHER):
            await bus.publish_many(steps[first : first + PUBLISHED_TOGETHER], node="source")
        with timed(name, messages) as took:
            await bus.resume("worker", Step)
            await work.done.wait()
        await bus.idle()
        if bus.outcomes()["handled"] != messages:
            raise RuntimeError(f"{messages} messages were published, and this became of them: {bus.outcomes()}")
    return took[0]


def main() -> None:
    args = options(__doc__, rounds=7, messages=60_000)
    report = Report("by-key", args.json)
    contestants = [Contestant(name, partial(run, name=name)) for name in NAMES]
    samples = interleave(contestants, rounds=args.rounds, messages=args.messages)
    labels = {
        "parallel": f"Parallel({LANES})",
        "by_key": f"ByKey({LANES}), {KEYS:,} keys",
        "slow_key": "the same, one key with 100 ms",
        "two_keys": "two keys each",
    }
    report.table(
        ("1 ms each", "messages/s", "µs each", "µs of processor"),
        [
            (
                labels[name],
                f"{samples.rate(name):,.0f}",
                f"{samples.cost(name) * 1e6:,.1f}",
                f"{processor(name) * 1e6:,.1f}",
            )
            for name in NAMES
        ],
    )
    report.ours = {"by_key": samples.rate("by_key"), "slow_key": samples.rate("slow_key")}
    report.ours["two_keys"] = samples.rate("two_keys")
    report.peers = {"parallel": samples.rate("parallel")}
    report.goal("by_key_to_parallel", samples.ratio("by_key", "parallel"), PARALLEL_TARGET)
    report.goal("beside_a_slow_key", samples.ratio("slow_key", "by_key"), SLOW_TARGET)
    report.finish()


if __name__ == "__main__":
    main()
