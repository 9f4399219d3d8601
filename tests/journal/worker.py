"""A process to be killed: publishes to a journal, says what is confirmed, and handles what it gets.

    python worker.py PATH ROUND

Each line on standard output is one fact: `confirmed ID` or `handled NUMBER`.
"""

import asyncio
import sys

import faregate as fg


class Job(fg.Event):
    round: int
    number: int
    lane: str


author, reader = fg.Node("author"), fg.Node("reader")


@reader.on(Job, source="author", key="lane", retry=None, redeliver=fg.Redeliver(0.01, 0.01))
async def work(job: Job, ctx: fg.Context) -> None:
    if job.number % 7 == 3 and ctx.redeliveries == 0:
        raise OSError("the first try of every seventh fails")
    print(f"handled {job.round}.{job.number}", flush=True)


async def main(path: str, round: int) -> None:
    async with fg.Bus(f"journal:{path}", nodes=[author, reader]) as bus:
        number = 0

        async def publish() -> None:
            nonlocal number
            while True:
                number += 1
                mine = number
                job = Job(round=round, number=mine, lane=f"{mine % 5}")
                if mine % 10:
                    await bus.publish(job, node="author", idempotency_key=f"{round}.{mine}")
                    print(f"confirmed {round}.{mine}", flush=True)
                else:
                    many = [Job(round=round, number=mine * 1000 + index, lane="many") for index in range(20)]
                    await bus.publish_many(many, node="author")
                    for each in many:
                        print(f"confirmed {round}.{each.number}", flush=True)

        await asyncio.gather(*(publish() for _ in range(8)))


async def finish(path: str) -> None:
    async with fg.Bus(f"journal:{path}", nodes=[author, reader]) as bus:
        await bus.idle(60)
        assert not await bus.poisoned()


if __name__ == "__main__":
    asyncio.run(finish(sys.argv[1]) if sys.argv[2] == "finish" else main(sys.argv[1], int(sys.argv[2])))
