"""An event loop without time and without I/O: callbacks run in the order in which they were made ready.

Rules kept here:
- `run_ready` returns once nothing is ready: everybody has ended, or waits for somebody who does.
- Timers of the loop itself (`asyncio.timeout`) never fire by themselves, unless they are due at once; the world fires
  those of one process.
- Every task belongs to the process in whose context it was made, so that a crash can end all of them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

from faregate.core.lane_task import LaneTask

PROCESS: ContextVar[Any] = ContextVar("PROCESS", default=None)
"""The simulated process that the running code belongs to; None for the world itself."""


def _enlist(task: "asyncio.Task[Any]", process: Any) -> None:
    if process is not None:
        process.tasks[task] = len(process.tasks) + 1


class SimLane(LaneTask[None]):
    """A lane is a task of its process, too."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _enlist(self, PROCESS.get())


class VirtualLoop(asyncio.AbstractEventLoop):
    def __init__(self) -> None:
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self.errors: list[dict[str, Any]] = []
        """What nobody caught."""

    # --- what asyncio asks of a loop ---

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        (self._timers if when > 0 else self._ready).append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(delay, callback, *args, context=context)

    def time(self) -> float:
        return 0.0

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        if handle in self._timers:
            self._timers.remove(handle)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """At once: what others can see of it is one thing."""
        done = self.create_future()
        done.set_result(func(*args))
        return done

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        _enlist(task, PROCESS.get() if context is None else context.get(PROCESS))
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    # --- for the world ---

    def run_ready(self) -> None:
        ready = self._ready
        while ready:
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of something that needs no scheduling."""
        task = asyncio.Task(coroutine, loop=self)
        self.run_ready()
        if not task.done():
            task.cancel()
            self.run_ready()
            raise RuntimeError(f"{coroutine} waits for something that nothing brings about")
        return task.result()

    def has_timers(self, process: object) -> bool:
        return any(_belongs(handle, process) for handle in self._timers)

    def fire_timers(self, process: object, callback: str | None = None) -> bool:
        """Let the loop's own timers of a process be due, or those that call this; whether there were any."""
        due = [handle for handle in self._timers if _belongs(handle, process)]
        if callback is not None:
            due = [handle for handle in due if getattr(handle._callback, "__name__", None) == callback]  # type: ignore[attr-defined]
        for handle in due:
            self._timers.remove(handle)
            self._ready.append(handle)
        return bool(due)

    def forget(self) -> None:
        """Between two schedules."""
        self._ready.clear()
        self._timers.clear()
        self.errors.clear()


def _belongs(handle: Any, process: object) -> bool:
    return handle._context.get(PROCESS) is process


@contextmanager
def running(loop: VirtualLoop) -> Iterator[None]:
    before = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(before)
