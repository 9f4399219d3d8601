"""A connection that waits for an answer in place, for a moment, before it lets the event loop go on.

An answer of a server nearby is there within a tenth of a millisecond; handing the wait to the event loop and back costs
as much again. In a process that does nothing else meanwhile (a worker of Spark) waiting in place is the faster way.

Only for a moment: the answer may wait for a lock that another transaction of this process holds, and that one needs the
event loop to get on.
"""

import select
from collections.abc import Generator
from typing import Any

import psycopg
from psycopg.waiting import READY_R, READY_W, WAIT_R, WAIT_W

_MOMENT = 2
"""Milliseconds."""


class PollingConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    async def wait(self, gen: Any, *rest: Any, **named: Any) -> Any:
        poll, state = select.poll(), None
        try:
            wanted = next(gen)
            while True:
                if wanted != state:
                    events = (select.POLLIN if wanted & WAIT_R else 0) | (select.POLLOUT if wanted & WAIT_W else 0)
                    poll.register(self.pgconn.socket, events)
                    state = wanted
                found = poll.poll(_MOMENT)
                if not found:
                    break
                wanted = gen.send(_ready(found[0][1], wanted))
        except StopIteration as end:
            return end.value
        return await super().wait(_resumed(gen, wanted), *rest, **named)


def _ready(events: int, wanted: int) -> int:
    """A failed socket is ready for everything: reading it tells what is wrong."""
    if events & ~(select.POLLIN | select.POLLOUT):
        return wanted
    return (READY_R if events & select.POLLIN else 0) | (READY_W if events & select.POLLOUT else 0)


def _resumed(gen: Any, wanted: int) -> Generator[Any, Any, Any]:
    """The rest of a generator that was begun."""
    try:
        while True:
            wanted = gen.send((yield wanted))
    except StopIteration as end:
        return end.value
