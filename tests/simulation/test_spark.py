"""Node `a` on Spark: what Spark may do to a batch, its tasks and its driver, scenario by scenario.

Left out, with the reason: handlers without a store. Their tasks have no port but files under names of their own, and
the driver's commit of those is one rename; tests/spark goes through every moment of it (docs/testing-internals.md).
"""

from dataclasses import replace
from typing import Any

import pytest

import faregate as fg
from faregate.errors import Permanent
from tests.simulation.scenario import Do, Mode, OnSpark, Scenario
from tests.simulation.spark import SparkWorld
from tests.simulation.test_operations import letters
from tests.simulation.tiers import explored, in_every_mode, limits_on_spark
from tests.simulation.world import World

KEYED = {"key": "key", "order": fg.ByKey(2)}
NOT_STRICT = {"key": "key", "order": fg.ByKey(2, strict=False)}
ONCE = OnSpark()
ZOMBIES = OnSpark(zombies=True)


def on_spark(begin: Do, mode: Mode = "ledger", *, spark: OnSpark = ONCE, **given: Any) -> Scenario:
    return Scenario(begin, mode, processes=1, spark=spark, **given)


def one(world: World) -> None:
    world.order()


def two_copies(world: World) -> None:
    world.order(copies=2)


def one_of_a_key(world: World) -> None:
    world.order(key="k")


def first_fails_once(world: World) -> None:
    """Two of one key: the first parks, and the second waits for it; beside them one of another key."""
    world.runs.script = lambda node, run, name: OSError("once") if (node, run, name) == ("a", 1, "x") else None
    world.order("x", key="k")
    world.order("y", key="k")
    world.order("z", key="other")


@limits_on_spark
@in_every_mode
def test_one_message(mode: Mode, limit: int) -> None:
    explored(on_spark(one, mode, crashes=2, deviations=2), limit, 60)


@limits_on_spark
@in_every_mode
def test_copies_in_the_log(mode: Mode, limit: int) -> None:
    explored(on_spark(two_copies, mode, crashes=1), limit, 30)
    explored(on_spark(two_copies, mode, crashes=1, spark=OnSpark(trigger=1)), limit, 30)


@limits_on_spark
@in_every_mode
@pytest.mark.parametrize("trigger", [1, 100])
def test_first_of_a_key_fails_once_and_the_second_waits(mode: Mode, trigger: int, limit: int) -> None:
    spark = OnSpark(partitions=2, trigger=trigger, zombies=True)
    explored(on_spark(first_fails_once, mode, spark=spark, crashes=1, faults=1, options=KEYED), limit, 120)


@limits_on_spark
@in_every_mode
@pytest.mark.parametrize("begin", [two_copies, first_fails_once])
def test_zombie_beside_its_retry(begin: Do, mode: Mode, limit: int) -> None:
    scenario = on_spark(begin, mode, spark=ZOMBIES, faults=2, every_point=True, options=KEYED)
    explored(scenario, limit, 120)


@limits_on_spark
@in_every_mode
@pytest.mark.parametrize("begin", [one, first_fails_once])
def test_commit_outcome_unknown(begin: Do, mode: Mode, limit: int) -> None:
    modes = {"store.commit": ("lose", "fail"), "store.undispatched": ("fail",)}
    scenario = on_spark(begin, mode, spark=ZOMBIES, faults=2, modes=modes, options=KEYED)
    explored(scenario, limit, 120)


@limits_on_spark
@in_every_mode
def test_two_drivers_on_one_checkpoint(mode: Mode, limit: int) -> None:
    scenario = on_spark(first_fails_once, mode, spark=OnSpark(drivers=2), crashes=1, options=KEYED)
    explored(scenario, limit, 120)


@limits_on_spark
def test_positions_alone_recognise_what_is_in_order(limit: int) -> None:
    """Without a ledger, as long as nothing parks."""
    scenario = on_spark(one_of_a_key, "off", spark=ZOMBIES, faults=1, crashes=1, options=KEYED)
    explored(scenario, limit, 60)


@limits_on_spark
def test_later_ones_pass_a_key_that_is_not_strict(limit: int) -> None:
    scenario = on_spark(first_fails_once, spark=ZOMBIES, faults=1, crashes=1, lax=True, options=NOT_STRICT)
    explored(scenario, limit, 120)


@limits_on_spark
def test_serial_subscription_waits_as_a_whole(limit: int) -> None:
    options = {"order": fg.Serial()}
    scenario = on_spark(first_fails_once, spark=ZOMBIES, faults=1, crashes=1, options=options)
    explored(scenario, limit, 120)


async def replay_and_start_again(world: World) -> None:
    """The run sends what its outbox has as it begins."""
    assert isinstance(world, SparkWorld)
    for letter in world.dead_letters():
        if letter.status == "open":
            await letters(world).decide([letter.message_id], "replayed", "ann")
    for driver in list(world.drivers):
        world.restart_driver(driver)


def parks_then_dies(world: World) -> None:
    """It fails, comes back, dies; its replay fails once, too."""
    errors = {1: OSError("once"), 2: Permanent("never"), 3: OSError("once more")}
    world.runs.script = lambda node, run, name: errors.get(run) if node == "a" else None
    world.order(key="k")


REPLAYED = on_spark(
    parks_then_dies,
    spark=ZOMBIES,
    faults=1,
    crashes=1,
    operator=(replay_and_start_again,),
    without_attempts=True,
    options=KEYED,
)


@limits_on_spark
@in_every_mode
def test_dead_letter_replayed_while_a_zombie_goes_on(mode: Mode, limit: int) -> None:
    explored(replace(REPLAYED, mode=mode), limit, 40)


@limits_on_spark
@in_every_mode
def test_zombie_that_gave_up_meets_the_replay_parked_again(mode: Mode, limit: int) -> None:
    scenario = replace(REPLAYED, mode=mode, crashes=0, every_point=True, deviations=1)
    guide = ["D0 done", "W0 done", "D0 done", "time passes", "D0 done", "W0@unit.before-commit", "W0@store.begin"]
    guide += ["a task is taken for lost", "W1 done", "D0 done", "operator 0", "D0' done", "W2 done", "D0' done"]
    explored(scenario, limit, 2, guide=[*guide, "W0 done"])
