"""What a filter does not take, among copies, crashes and lost calls, on both engines: it has no effect, and nothing of
it is left."""

from typing import Any

import pytest

import faregate as fg
from tests.simulation.scenario import Mode, OnSpark, Scenario
from tests.simulation.test_spark import KEYED, on_spark
from tests.simulation.tiers import explored, in_every_mode, limits, limits_on_spark
from tests.simulation.world import World

WHERE: dict[str, Any] = {"where": "name <> 'y'"}
KEYED_WHERE = {**KEYED, **WHERE}


def unwanted(world: World, **more: Any) -> None:
    """One that the filter does not take: were it handled, or a dead letter, nobody would have published it."""
    world.published.discard(("a", world.order("y", **more)))


def one_of_three(world: World) -> None:
    world.order("x")
    unwanted(world)
    world.order("z")


def copies_of_it(world: World) -> None:
    unwanted(world, copies=2)
    world.order("x", copies=2)


def behind_one_that_fails_once(world: World) -> None:
    """All of one key: the first waits for a later try."""
    world.runs.script = lambda node, run, name: OSError("once") if (node, run, name) == ("a", 1, "x") else None
    world.order("x", key="k")
    unwanted(world, key="k")
    world.order("z", key="k")


TOGETHER = Scenario(one_of_three, batch=3, together=True, options=WHERE)
WITH_TOKENS = Scenario(copies_of_it, "separate", crashes=1, options=WHERE)
BEHIND_ON_SPARK = on_spark(behind_one_that_fails_once, options=KEYED_WHERE)


@limits
@in_every_mode
def test_copies_and_a_crash(mode: Mode, limit: int) -> None:
    explored(Scenario(copies_of_it, mode, crashes=1, options=WHERE), limit, 30)


@limits
@in_every_mode
def test_lost_calls(mode: Mode, limit: int) -> None:
    modes = {"store.commit": ("lose", "fail"), "tokens.discard": ("fail",)}
    explored(Scenario(copies_of_it, mode, faults=2, modes=modes, options=WHERE), limit, 30)


@limits
@pytest.mark.parametrize("together", [False, True])
def test_one_of_a_batch(together: bool, limit: int) -> None:
    explored(Scenario(one_of_three, batch=3, together=together, crashes=1, options=WHERE), limit, 3)


@limits
def test_behind_one_of_its_key_that_waits(limit: int) -> None:
    explored(Scenario(behind_one_that_fails_once, crashes=1, options={**KEYED_WHERE, "order": fg.ByKey(2)}), limit, 10)


@limits_on_spark
@in_every_mode
def test_on_spark(mode: Mode, limit: int) -> None:
    spark = OnSpark(partitions=2, zombies=True)
    explored(on_spark(copies_of_it, mode, spark=spark, crashes=1, faults=1, options=WHERE), limit, 30)
    modes = {"store.commit": ("lose", "fail")}
    scenario = on_spark(
        behind_one_that_fails_once, mode, spark=spark, crashes=1, faults=1, modes=modes, options=KEYED_WHERE
    )
    explored(scenario, limit, 30)
