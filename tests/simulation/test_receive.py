"""Receiving, scenario by scenario (exactly-once.md, "Scenarios to replay, by name")."""

import pytest

import faregate as fg
from tests.simulation.nodes import HABITS, Habit
from tests.simulation.scenario import Mode, Scenario
from tests.simulation.tiers import explored, in_every_mode, limits, with_tokens
from tests.simulation.world import World


def two_copies(world: World) -> None:
    world.order(copies=2)


def three_copies(world: World) -> None:
    world.order(copies=3)


def one(world: World) -> None:
    world.order()


@limits
@in_every_mode
def test_two_copies_at_once(mode: Mode, limit: int) -> None:
    explored(Scenario(two_copies, mode), limit, 30)


@limits
@in_every_mode
def test_two_copies_at_once_in_one_process(mode: Mode, limit: int) -> None:
    explored(Scenario(two_copies, mode, processes=1), limit, 30)


@limits
@in_every_mode
def test_two_copies_and_a_crash(mode: Mode, limit: int) -> None:
    explored(Scenario(two_copies, mode, crashes=1), limit, 120)


@limits
def test_second_copy_checks_the_token_before_the_first_deletes_it(limit: int) -> None:
    scenario = Scenario(two_copies, "separate", deviations=2, every_point=True)
    guide = ["deliver a#0", "P0@store.insert_claim", "deliver a#1", "P1@tokens.deleted", "P0@tokens.claim-recorded"]
    explored(scenario, limit, 50, guide=guide)


@limits
def test_third_inserts_its_claim_after_the_first_finished(limit: int) -> None:
    scenario = Scenario(three_copies, "separate", processes=3, deviations=2, every_point=True)
    guide = [
        "deliver a#0",
        "P0@store.insert_claim",
        "deliver a#1",
        "P1@store.insert_claim",
        "deliver a#2",
        "P2@tokens.claimed",
    ]
    explored(scenario, limit, 60, guide=guide)


@limits
@in_every_mode
def test_zombie_commits_after_a_newer_run(mode: Mode, limit: int) -> None:
    scenario = Scenario(one, mode, faults=1, leases=True, deviations=2, every_point=True)
    guide = ["deliver a#0", "P0@bus.before-handler", "lease of a#0 ends", "deliver a#0", "P1 done", "P0 done"]
    explored(scenario, limit, 2, guide=guide)


@limits
def test_lost_cas_response(limit: int) -> None:
    calls = ("tokens.claim", "store.register_attempts", "store.choose_attempts", "store.insert_claim")
    modes = dict.fromkeys(calls, ("lose", "fail"))
    explored(Scenario(two_copies, "separate", faults=1, modes=modes), limit, 120)


@limits
def test_late_claim_packet(limit: int) -> None:
    modes = {"tokens.claim": ("late",), "store.insert_claim": ("late",)}
    explored(Scenario(two_copies, "separate", faults=1, modes=modes), limit, 120)


@limits
def test_late_and_lost_deletions(limit: int) -> None:
    modes = dict.fromkeys(("tokens.delete", "store.delete_claim"), ("late", "lose", "fail"))
    explored(Scenario(two_copies, "separate", faults=1, modes=modes), limit, 120)


@limits
@in_every_mode
def test_lease_expires_mid_handler(mode: Mode, limit: int) -> None:
    explored(Scenario(one, mode, faults=1, leases=True), limit, 20)


@limits
@in_every_mode
def test_lost_settle(mode: Mode, limit: int) -> None:
    scenario = Scenario(one, mode, faults=2, modes={"delivery.settle": ("lose",)}, preemptions=1)
    explored(scenario, limit, 3)


@limits
@in_every_mode
def test_crash_after_each_step(mode: Mode, limit: int) -> None:
    """Twice in a schedule, with everything up to the second node's own settling in the exploration."""
    scenario = Scenario(
        one, mode, processes=1, crashes=2, preemptions=0, every_point=True, in_exploration=("a", "b"), deviations=2
    )
    explored(scenario, limit, 100)


@limits
@with_tokens
def test_stale_token_read(mode: Mode, limit: int) -> None:
    modes = {"tokens.read": ("stale",)}
    explored(Scenario(two_copies, mode, faults=1, modes=modes), limit, 100)


@limits
def test_sweeper_meets_the_receivers(limit: int) -> None:
    explored(Scenario(two_copies, "separate", sweeps=1, crashes=1), limit, 120)


@limits
@with_tokens
def test_signal_without_a_token_takes_the_ledger(mode: Mode, limit: int) -> None:
    explored(Scenario(two_copies, mode, foreign=True, crashes=1, deviations=2), limit, 60)


@limits
@in_every_mode
@pytest.mark.parametrize("habit", HABITS)
def test_handlers_that_gather_cancel_shield_swallow_and_linger(mode: Mode, habit: Habit, limit: int) -> None:
    """The first run fails, with a write of it under way; there is a second copy, and a crash."""

    def begin(world: World) -> None:
        world.runs.habit = habit
        world.runs.script = lambda node, run, name: OSError("once") if (node, run) == ("a", 1) else None
        world.order(copies=2)

    explored(Scenario(begin, mode, crashes=1, deviations=2, options={"retry": fg.Retry(1, 0)}), limit, 30)
