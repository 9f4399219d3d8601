"""Goes through the schedules of a scenario, those with the fewest deviations first, and stops at the first violation.

Rules kept here:
- Stateless: a schedule is the list of its decisions, and is run from the beginning. From each run all schedules follow
  that take another option at one later decision and can be paid for.
- Within as many deviations the order is shuffled by a fixed seed, so that a bound on their number cuts off no certain
  corner. The same call explores the same schedules.
"""

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.simulation.guide import Guide
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import Step
from tests.simulation.spark import SparkWorld
from tests.simulation.world import World

Schedule = tuple[int, ...]


class Report(NamedTuple):
    schedules: int
    complete: bool
    """Whether these were all within the budgets."""
    seconds: float

    def __str__(self) -> str:
        rate = self.schedules / max(self.seconds, 1e-9)
        return f"{self.schedules} schedules{'' if self.complete else ' (not all)'}, {rate:.0f} per second"


class Broken(AssertionError):
    """A schedule that breaks something, with all that is needed to run it again."""

    def __init__(self, schedule: Schedule, steps: Sequence[Step], number: int, cause: BaseException) -> None:
        lines = "\n".join(f"  {step}" for step in steps)
        text = f"{type(cause).__name__}: {cause}\nafter {number} schedules; replay(scenario, {schedule}):\n{lines}"
        super().__init__(text)
        self.schedule = schedule


def explore(scenario: Scenario, limit: int | None = None, *, guide: Sequence[str] = (), seed: int = 1) -> Report:
    """Run the schedules of a scenario, at most `limit`. Raises `Broken`.

    With a guide, all of them begin with what it leads through, and deviate after that only.
    """
    world = _world(scenario)
    chance = random.Random(seed)
    began = time.perf_counter()
    count = 0
    level: list[Schedule] = [()]
    with world.opened():
        if guide:
            level, count = [_lead(world, guide)], 1
        led = len(level[0])
        while level:
            following: list[Schedule] = []
            for schedule in level:
                if count == limit:
                    return Report(count, False, time.perf_counter() - began)
                count += 1
                following += _branches(scenario, schedule, _run(world, schedule, count), led)
            chance.shuffle(following)
            level = following
    return Report(count, True, time.perf_counter() - began)


def replay(scenario: Scenario, schedule: Sequence[int]) -> list[Step]:
    """Run one schedule; its decisions. Raises `Broken`."""
    world = _world(scenario)
    with world.opened():
        return _run(world, tuple(schedule), 1)


def _world(scenario: Scenario) -> World:
    return World(scenario) if scenario.spark is None else SparkWorld(scenario)


def _run(world: World, schedule: Schedule, number: int) -> list[Step]:
    try:
        return world.run(schedule)
    except Exception as exc:
        raise Broken(schedule, world.steps, number, exc) from exc


def _lead(world: World, wanted: Sequence[str]) -> Schedule:
    """The schedule that a guide leads through; it holds to its end, too."""
    guide = Guide(wanted)
    try:
        steps = world.run((), guide)
    except Exception as exc:
        raise Broken(tuple(step.taken for step in world.steps), world.steps, 1, exc) from exc
    guide.check()
    return tuple(step.taken for step in steps[: guide.decisions])


def _branches(scenario: Scenario, schedule: Schedule, steps: Sequence[Step], led: int) -> list[Schedule]:
    budget = {"preemption": scenario.preemptions, "crash": scenario.crashes, "fault": scenario.faults}
    deviations = 0
    taken = [step.taken for step in steps]
    for step in steps[led : len(schedule)]:
        if step.taken:
            deviations += 1
            kind = step.kinds[step.taken]
            if kind in budget:
                budget[kind] -= 1
    if deviations >= scenario.deviations:
        return []
    return [
        (*taken[:place], other)
        for place in range(len(schedule), len(steps))
        for other in range(1, len(steps[place].kinds))
        if budget.get(steps[place].kinds[other], 1) > 0
    ]
