"""Decides who goes on: every task waits at every point until it is let go, one at a time.

    point       a task is about to do something that others can see, or has done so: `faults.hook`, a call of a port
    step        when nothing is ready any more, one of the options is taken; what it sets going runs to its next point
    option 0    the default: who ran last goes on; else who waits longest; else a delivery, else the clock

Rules kept here:
- Between two points of a task there is at most one thing that others can see. A point that follows another without
  such a thing in between is none.
- Everything that is not option 0 is a deviation, and paid for: preemptions, crashes and faults have budgets.
- The list of the indices taken is the schedule: the same list gives the same run.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from tests.simulation.loop import PROCESS, VirtualLoop

Kind = Literal["go", "switch", "preemption", "crash", "fault"]
LONGEST = 400
"""Steps after which a schedule is cut short and brought to rest."""


class Option(NamedTuple):
    label: str
    kind: Kind
    action: Callable[[], None]


class Step(NamedTuple):
    """A decision that was taken."""

    labels: list[str]
    kinds: list[Kind]
    taken: int

    def __str__(self) -> str:
        return f"{self.taken}: {self.labels[self.taken]}" + (
            "" if self.taken == 0 else f"   ({self.kinds[self.taken]}, instead of {self.labels[0]})"
        )


class Actor:
    """What the scheduler knows of a task."""

    __slots__ = ("acted", "task")

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self.task = task
        self.acted = False
        """Whether it did something that others can see since it was let go."""


class Waiter:
    __slots__ = ("actor", "fresh", "future", "modes", "point", "process")

    def __init__(self, actor: Actor, process: Any, point: str, modes: tuple[str, ...], future: Any) -> None:
        self.actor, self.process, self.point, self.modes, self.future = actor, process, point, modes, future
        self.fresh = True

    def __str__(self) -> str:
        return f"{self.process}.{self.process.tasks[self.actor.task]}@{self.point}"

    def release(self, outcome: str) -> None:
        self.actor.acted = False
        if not self.future.done():
            self.future.set_result(outcome)


class Scheduler:
    def __init__(self, loop: VirtualLoop, *, every_point: bool) -> None:
        self._loop = loop
        self._every_point = every_point
        self.active = False
        self.waiting: list[Waiter] = []
        self.reached: dict[str, int] = {}
        """How often each point was reached."""
        self.answers: dict[tuple[Any, ...], Any] = {}
        """The first answer to each call that may be answered by an old one."""
        self._actors: dict[asyncio.Task[Any], Actor] = {}
        self._last: Actor | None = None

    def actor(self) -> Actor:
        task = asyncio.current_task()
        assert task is not None
        found = self._actors.get(task)
        if found is None:
            found = self._actors[task] = Actor(task)
        return found

    async def hook(self, point: str) -> None:
        await self.point(point)

    async def point(self, point: str, modes: tuple[str, ...] = ()) -> str:
        """Wait here until it is one's turn; how the call that follows goes: "go", or one of the modes."""
        process = PROCESS.get()
        if process is None:
            return "go"
        if not process.alive:
            raise asyncio.CancelledError
        self.reached[point] = self.reached.get(point, 0) + 1
        if not self.active:
            return "go"
        actor = self.actor()
        if not actor.acted and not modes and not self._every_point:
            return "go"
        waiter = Waiter(actor, process, point, modes, self._loop.create_future())
        self.waiting.append(waiter)
        try:
            return str(await waiter.future)
        finally:
            if waiter in self.waiting:
                self.waiting.remove(waiter)

    def acted(self) -> None:
        """The running task did something that others can see."""
        if self.active and PROCESS.get() is not None:
            self.actor().acted = True

    # --- options ---

    def current(self) -> Waiter | None:
        return next((waiter for waiter in self.waiting if waiter.actor is self._last), None)

    def going(self) -> list[Option]:
        """Who may go on; first who ran last."""
        current = self.current()
        ordered = sorted(self.waiting, key=lambda waiter: waiter is not current)
        kind: Kind = "preemption" if current is not None else "switch"
        return [
            Option(f"go {waiter}", "go" if place == 0 else kind, self._go(waiter, "go"))
            for place, waiter in enumerate(ordered)
        ]

    def failing(self) -> list[Option]:
        """How the calls may fail whose turn has just come."""
        return [
            Option(f"{mode} {waiter}", "fault", self._go(waiter, mode))
            for waiter in self.waiting
            if waiter.fresh
            for mode in waiter.modes
        ]

    def _go(self, waiter: Waiter, outcome: str) -> Callable[[], None]:
        def action() -> None:
            self._last = waiter.actor
            self.waiting.remove(waiter)
            waiter.release(outcome)

        return action

    def run_as_last(self, task: "asyncio.Task[Any]") -> None:
        """A task was started by a decision: it is the one that runs."""
        self._last = self._actors[task] = Actor(task)

    def last_process(self) -> Any:
        """Whose task ran last, if it is at a point now."""
        current = self.current()
        return None if current is None else current.process

    def grow_old(self) -> None:
        for waiter in self.waiting:
            waiter.fresh = False

    def release_all(self) -> None:
        """From now on points let everybody through."""
        self.active = False
        waiting, self.waiting = self.waiting, []
        for waiter in waiting:
            waiter.release("go")
