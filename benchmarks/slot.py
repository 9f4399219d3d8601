"""Throughput with a prefetch of 10, alone and beside a message that waits for its later try.

A consumer that waits for a later try in memory keeps one of its ten slots for it: the SafeBunny thesis measured 10 %
less throughput for each. Here a message that waits is with the broker, so its slot should be free.

What is measured, with 10 lanes, `prefetch=10` and an `async def` handler that takes 1 ms, on `memory:`:
- all messages succeed;
- the same, and one message more, which fails first and waits for its redelivery until the others are handled.

A round runs both in slices, by turns, so that a slow spell of the machine hits both.
"""

import asyncio
import gc
import time

from _harness import Report, Samples, options

import faregate as fg

LANES = PREFETCH = 10
SECONDS = 0.001
SLICES = 5
TARGET = 0.98
LATER = 3600.0


class Job(fg.Event):
    number: int


class Line:
    """A bus whose subscription has ten slots; `waits`: one message waits for its later try."""

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._left = 0
        self._done = asyncio.Event()
        self._failed = asyncio.Event()
        worker = fg.Node("worker")

        @worker.on(
            Job, source="shop", order=fg.Parallel(LANES), prefetch=PREFETCH, retry=None, redeliver=fg.Redeliver(LATER)
        )
        async def work(job: Job) -> None:
            if job.number < 0:
                self._failed.set()
                raise ValueError("later")
            await asyncio.sleep(SECONDS)
            self._left -= 1
            if not self._left:
                self._done.set()

        self.bus = fg.Bus("memory:", nodes=[fg.Node("shop"), worker], drain_seconds=1)

    async def start(self) -> None:
        await self.bus.start()
        if self._waits:
            await self.bus.publish(Job(number=-1), node="shop")
            await self._failed.wait()
            await asyncio.sleep(0.1)  # until it is back, and waits there
            if not self.bus.outcomes()["redelivered"]:
                raise RuntimeError("it does not wait for a later try")

    async def run(self, messages: int) -> float:
        """The seconds that so many messages take."""
        self._left = messages
        self._done.clear()
        jobs = [Job(number=number) for number in range(messages)]
        begin = time.perf_counter()
        await self.bus.publish_many(jobs, node="shop")
        await self._done.wait()
        return time.perf_counter() - begin


async def compare(rounds: int, messages: int) -> Samples:
    lines = {"alone": Line(waits=False), "beside one that waits": Line(waits=True)}
    for line in lines.values():
        await line.start()
    samples = Samples({name: [] for name in lines})
    size = max(1, messages // SLICES)
    for number in range(rounds + 1):
        gc.collect()
        spent = dict.fromkeys(lines, 0.0)
        for turn in range(SLICES):
            for name in lines if (number + turn) % 2 else reversed(lines):
                spent[name] += await lines[name].run(size)
        if number or not rounds:
            for name, seconds in spent.items():
                samples.seconds[name].append(seconds / (SLICES * size))
    for line in lines.values():
        await line.bus.stop()
    return samples


def main() -> None:
    args = options(__doc__, rounds=15, messages=5_000)
    report = Report("slot", args.json)
    samples = asyncio.run(compare(args.rounds, args.messages))
    names = list(samples.seconds)
    report.table(
        (f"prefetch {PREFETCH}, {SECONDS * 1e3:g} ms each", "messages/s"),
        [(name, f"{samples.rate(name):,.0f}") for name in names],
    )
    alone, beside = names
    report.ours = {"messages_per_second_beside_one_that_waits": samples.rate(beside)}
    report.peers = {"messages_per_second_alone": samples.rate(alone)}
    report.goal("slot", samples.ratio(beside, alone), TARGET)
    report.finish()


if __name__ == "__main__":
    main()
