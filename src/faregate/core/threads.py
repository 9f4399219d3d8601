"""The threads of plain `def` handlers.

Rules kept here:
- Whatever is submitted starts at once, in an idle thread or a new one: a handler that waits for another one's
  transaction never keeps that other one from a thread. Lanes bound how many there are.
- They are daemonic: a handler that never returns keeps no process alive. (`concurrent.futures` joins the threads of its
  own pool when the interpreter exits.)
"""

# `asyncio.to_thread` loads this at its first use. A process that has dropped its privileges may not be able to then.
import concurrent.futures.thread  # noqa: F401
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

from faregate.core.forks import end_if_forked, generation

P = ParamSpec("P")
T = TypeVar("T")


class _Call(NamedTuple):
    future: Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class HandlerThreads(Executor):
    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._lock = Lock()
        self._idle = 0
        """How many threads wait, or are about to, with nothing meant for them."""
        self._threads: list[Thread] = []
        self._closed = False

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads of this bus' handlers are closed")
            if self._idle:
                self._idle -= 1
            else:
                name = f"faregate-handler-{len(self._threads)}"
                self._threads.append(Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
        self._calls.put(_Call(future, function, args, kwargs))
        return future

    def _run(self) -> None:
        began = generation()
        while (call := self._calls.get()) is not None:
            if call.future.set_running_or_notify_cancel():
                try:
                    try:
                        result = call.function(*call.args, **call.kwargs)
                    finally:
                        end_if_forked(began)  # a child has no event loop to give the result to
                except BaseException as exc:
                    call.future.set_exception(exc)
                else:
                    call.future.set_result(result)
                    del result
            del call  # an idle thread keeps nothing of what it did
            with self._lock:
                if self._closed:
                    return
                self._idle += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Start nothing more; threads end when their handlers do. `wait` waits for that."""
        with self._lock:
            self._closed = True
            for _ in range(self._idle):
                self._calls.put(None)
            self._idle = 0
        if wait:
            for thread in self._threads:
                thread.join()
