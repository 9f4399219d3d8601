"""Which message is at hand where a line of code runs, for log records: in the handler, in tasks that it starts, and in
its thread.

Rules kept here:
- Nobody pays for it who does not want it: a batch asks once whether it is `wanted`.
- It goes with the context of the run. A task that a handler left behind still names the message that it was started
  for, and not the next one of that lane.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from faregate.core.unit import UnitOfWork
from faregate.core.work import Work

Run = Callable[[UnitOfWork, Work], Awaitable[bool]]

wanted = False
"""Whether somebody asks for it in this process."""
_at_hand: ContextVar[Work | None] = ContextVar("faregate_at_hand", default=None)


def message_at_hand() -> Work | None:
    return _at_hand.get()


def forget() -> None:
    """What runs here goes on after the message that it was started from."""
    _at_hand.set(None)


def noting(run: Run) -> Run:
    """Runs messages as `run` does, and notes which one is at hand meanwhile."""

    async def noted(unit: UnitOfWork, work: Work) -> bool:
        _at_hand.set(work)
        try:
            return await run(unit, work)
        finally:
            _at_hand.set(None)

    return noted
