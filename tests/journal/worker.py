"""A process to be killed: publishes to a journal, says what is confirmed, and handles what it gets.

    python worker.py PATH ROUND [SEGMENT]

SEGMENT is how many bytes a segment has: with small ones something is always being sealed.
Each line on standard output is one fact: `confirmed ID` or `handled NUMBER`.
"""

import asyncio
import sys

import faregate as fg
from faregate.broker.journal.log import SEGMENT_SIZE
from faregate.transports.journal import JournalTransport


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


def on_journal(path: str, segment: int) -> fg.Bus:
    return fg.Bus(JournalTransport(f"journal:{path}", segment_size=segment), nodes=[author, reader])


async def main(path: str, round: int, segment: int) -> None:
    async with on_journal(path, segment) as bus:
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


async def finish(path: str, segment: int) -> None:
    async with on_journal(path, segment) as bus:
        await bus.idle(60)
        assert not await bus.dead_letters()


if __name__ == "__main__":
    size = int(sys.argv[3]) if len(sys.argv) > 3 else SEGMENT_SIZE
    asyncio.run(finish(sys.argv[1], size) if sys.argv[2] == "finish" else main(sys.argv[1], int(sys.argv[2]), size))
