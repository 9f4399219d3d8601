"""A batch parts from a handler that takes its time, and settles together, while calls get lost and processes crash."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from faregate.core.unit import UnitOfWork
from tests.simulation.scenario import Scenario
from tests.simulation.tiers import explored, limits
from tests.simulation.world import World


def one_is_slow(world: World) -> None:
    async def before(name: str) -> None:
        if name == "y":
            await world.clock.sleep(1.0)

    world.runs.before = before
    for name in "xyz":
        world.order(name)


def one_is_slow_and_all_write_without_waiting(world: World) -> None:
    world.runs.writes = True
    one_is_slow(world)


def one_is_slow_in_its_transaction(world: World) -> None:
    async def habit(write: Callable[[], Coroutine[Any, Any, None]], error: BaseException | None) -> None:
        await write()
        if error is not None:
            await world.clock.sleep(1.0)
            raise error

    world.runs.habit = habit
    world.runs.script = lambda node, run, name: OSError("once") if (node, run, name) == ("a", 1, "y") else None
    for name in "xyz":
        world.order(name)


def one_of_another_key_is_slow(world: World) -> None:
    async def before(name: str) -> None:
        if name == "y":
            await world.clock.sleep(1.0)

    world.runs.before = before
    for name, key in {"x1": "x", "y": "y", "z1": "z", "x2": "x", "z2": "z", "x3": "x", "z3": "z"}.items():
        world.order(name, key=key)


def one_fails_among_three(world: World) -> None:
    world.runs.script = lambda node, run, name: OSError("once") if (node, run, name) == ("a", 1, "y") else None
    for name in "xyz":
        world.order(name)


SLOW = Scenario(one_is_slow, batch=3, lanes=2)
SLOW_IN_ITS_TRANSACTION = Scenario(one_is_slow_in_its_transaction, batch=3, lanes=2)
SLOW_AND_LOST = Scenario(one_is_slow, batch=3, lanes=2, faults=1, modes={"store.commit": ("fail", "lose")})
SLOW_BY_KEY = Scenario(one_of_another_key_is_slow, processes=1, batch=7, lanes=2)
TOGETHER = Scenario(one_fails_among_three, batch=3, lanes=2, together=True)


@pytest.fixture
def partings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were decided, each time that a batch parted."""
    seen: list[int] = []
    part = UnitOfWork.part

    def noted(unit: UnitOfWork, staying: Any, works: Any) -> UnitOfWork:
        seen.append(len(works))
        return part(unit, staying, works)

    monkeypatch.setattr(UnitOfWork, "part", noted)
    return seen


@limits
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(replace(SLOW, crashes=1), id="crashes"),
        pytest.param(replace(SLOW, savepoints=False, crashes=1), id="without savepoints"),
        pytest.param(replace(SLOW, mode="merged", crashes=1), id="tokens"),
        pytest.param(replace(SLOW, begin=one_is_slow_and_all_write_without_waiting, savepoints=False), id="writes"),
        pytest.param(SLOW_AND_LOST, id="lost commits"),
        pytest.param(replace(SLOW, faults=1, leases=True), id="leases"),
        pytest.param(replace(SLOW, together=True, faults=1, leases=True), id="together"),
        pytest.param(replace(SLOW_BY_KEY, crashes=1), id="keys"),
    ],
)
def test_a_batch_parts_from_a_slow_handler_and_everything_happens_once(
    limit: int, scenario: Scenario, partings: list[int]
) -> None:
    explored(scenario, limit, 60)
    assert any(partings), "some were decided when a batch parted"


@limits
def test_a_batch_does_not_part_from_one_that_has_used_the_transaction(limit: int, partings: list[int]) -> None:
    explored(SLOW_IN_ITS_TRANSACTION, limit, 10)
    assert not any(partings)


@limits
def test_many_settle_together_and_what_failed_comes_again(limit: int) -> None:
    explored(replace(TOGETHER, faults=1, leases=True), limit, 60)
