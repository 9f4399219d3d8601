"""Connections that look at the socket themselves before they wait through the event loop.

psycopg goes through the event loop each time, also when the socket is ready. `ReadyConnection` does so only when it is
not ready.

A server nearby answers within a tenth of a millisecond, and the event loop costs as much again. In a process with
nothing else to do (a worker of Spark) it is faster to wait in place: `PollingConnection`. Only for a moment: the answer
may wait for a lock of another transaction of this process, which needs the event loop to go on.
"""

import select
from collections.abc import Coroutine, Generator
from typing import Any

import psycopg
from psycopg.waiting import READY_R, READY_W, WAIT_R, WAIT_W

from faregate.errors import TransactionMisused


class ReadyConnection(psycopg.AsyncConnection[tuple[Any, ...]]):
    moment: int | None = 0
    """How many milliseconds to wait in place; None: as long as it takes."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.prepared: dict[tuple[bytes, tuple[int, ...] | None], bytes] = {}
        """The names of the statements that `pipeline.py` prepared, by their text and the types of their parameters."""
        self.lent = False
        """Whether a handler has it."""

    async def wait(self, gen: Any, *rest: Any, **named: Any) -> Any:
        return await super().wait(_in_place(gen, self.pgconn.socket, self.moment), *rest, **named)

    def run_in_place(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run it to its end while the event loop stands still. It may wait for this connection alone."""
        before, self.moment = self.moment, None
        try:
            work.send(None)
        except StopIteration:
            return
        finally:
            self.moment = before
            work.close()
        raise TransactionMisused("a statement of this transaction is still under way: await it before ctx.db.raw")


class PollingConnection(ReadyConnection):
    moment = 2


def _in_place(gen: Any, socket: int, moment: int | None) -> Generator[Any, Any, Any]:
    """The driver's own steps; it waits through the event loop only for what is not ready within a moment."""
    poll, state = select.poll(), None
    try:
        wanted = next(gen)
        while True:
            if wanted != state:
                events = (select.POLLIN if wanted & WAIT_R else 0) | (select.POLLOUT if wanted & WAIT_W else 0)
                poll.register(socket, events)
                state = wanted
            found = poll.poll(moment)
            wanted = gen.send(_ready(found[0][1], wanted) if found else (yield wanted))
    except StopIteration as end:
        return end.value


def _ready(events: int, wanted: int) -> int:
    """A failed socket is ready for everything: reading it tells what is wrong."""
    if events & ~(select.POLLIN | select.POLLOUT):
        return wanted
    return (READY_R if events & select.POLLIN else 0) | (READY_W if events & select.POLLOUT else 0)
