"""Queues that messages wait in, for nodes without a store: a ladder of fixed times, so that none waits behind another.

Level L is an exchange and a queue whose messages live for 2**L ticks. The routing key says, bit by bit, which levels a
message waits at, and then which queue it is for: 24 levels of 100 ms make 19 days, exact to a tick. What has to wait
for longer goes up again when it arrives.
"""

import math
from typing import Any

from faregate.transports.rabbitmq.channels import BatchChannel
from faregate.transports.rabbitmq.topology import declare_exchange, declare_queue, quorum

LEVELS = 24
TICK = 0.1
LONGEST = (2**LEVELS - 1) * TICK
LAST = "faregate.delay"
"""Where messages are when their time has come."""
FIRST = f"{LAST}.{LEVELS - 1}"
"""Where they go in."""


def way_to(queue: str, seconds: float) -> str:
    """The routing key of a message that is to arrive at a queue after so many seconds, or after `LONGEST`."""
    ticks = min(max(0, math.ceil(seconds / TICK)), 2**LEVELS - 1)
    return f"{'.'.join(f'{ticks:0{LEVELS}b}')}.{queue}"


async def declare_ladder(channel: BatchChannel) -> None:
    await declare_exchange(channel, LAST)
    for level in range(LEVELS):
        name, below = f"{LAST}.{level}", LAST if level == 0 else f"{LAST}.{level - 1}"
        await declare_exchange(channel, name)
        await declare_queue(channel, name, _arguments(level, below))
        above = "*." * (LEVELS - 1 - level)
        await channel.queue_bind(name, name, routing_key=f"{above}1.#")
        await channel.exchange_bind(destination=below, source=name, routing_key=f"{above}0.#")


def arrival(queue: str) -> str:
    """What its binding to `LAST` takes."""
    return "*." * LEVELS + queue


async def lead_to(channel: BatchChannel, queue: str) -> None:
    """Let messages arrive at this queue."""
    await channel.queue_bind(queue, LAST, routing_key=arrival(queue))


def _arguments(level: int, below: str) -> dict[str, Any]:
    return quorum(
        **{
            "x-message-ttl": round(2**level * TICK * 1000),
            "x-dead-letter-exchange": below,
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
    )
