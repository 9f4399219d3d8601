"""The task that handlers run in. It knows whether a cancellation is the handler's own doing.

A handler that cancels the task it runs in (`asyncio.current_task().cancel()`, itself or by a task or a callback that it
started) has failed, as with any error. A cancellation from elsewhere is none of its doing: the bus closes, or the event
loop ends. The two are told apart by the context in which `cancel` is called: tasks and callbacks inherit theirs.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_lane: ContextVar["LaneTask[Any] | None"] = ContextVar("faregate_lane", default=None)


class LaneTask(asyncio.Task[T]):
    own = 0
    """How many cancellations from within are not taken back; a time limit takes back its own (`uncancel`)."""

    def __init__(
        self, work: Coroutine[Any, Any, T], *, loop: asyncio.AbstractEventLoop, name: str | None = None
    ) -> None:
        context = copy_context()
        context.run(_lane.set, self)
        super().__init__(work, loop=loop, name=name, context=context)

    def cancel(self, msg: Any | None = None) -> bool:
        if _lane.get() is self:
            self.own += 1
        return super().cancel(msg)

    def uncancel(self) -> int:
        self.own = max(self.own - 1, 0)
        return super().uncancel()


def take_back_own() -> bool:
    """Whether only what runs in this task has cancelled it; then that is taken back."""
    task = asyncio.current_task()
    if not isinstance(task, LaneTask) or not 0 < task.cancelling() == task.own:
        return False
    while task.uncancel():
        pass
    return True


def lane_name() -> str | None:
    """The lane that whoever asks runs in, or was started from."""
    lane = _lane.get()
    return None if lane is None else lane.get_name()


async def meet_cancellation() -> None:
    """What was asked for and not waited for comes now, and not into what follows. What a handler caught is over."""
    await asyncio.sleep(0)
    take_back_own()
