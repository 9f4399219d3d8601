"""What effects mean, scenario by scenario (exactly-once.md, "Scenarios to replay, by name")."""

from msgspec.structs import force_setattr

from faregate.errors import Permanent
from tests.simulation.explorer import replay
from tests.simulation.scenario import Mode, Scenario
from tests.simulation.tiers import explored, in_every_mode, limits
from tests.simulation.world import World


def one(world: World) -> None:
    world.order()


def fails_once(world: World) -> None:
    world.runs.script = lambda node, run, name: OSError("on purpose") if (node, run) == ("a", 1) else None
    world.order(copies=2)


@limits
@in_every_mode
def test_ghost_message(mode: Mode, limit: int) -> None:
    """Sent, not committed: the first run fails after it has sent."""
    explored(Scenario(fails_once, mode, crashes=1, deviations=2), limit, 50)


@limits
@in_every_mode
def test_zombie_record(mode: Mode, limit: int) -> None:
    """Committed, not sent: the process dies in between."""
    scenario = Scenario(one, mode, crashes=2, deviations=2, every_point=True)
    explored(scenario, limit, 20, guide=["deliver a#0", "P0@unit.after-commit", "crash P0"])


@limits
@in_every_mode
def test_reordered_duplicate(mode: Mode, limit: int) -> None:
    """Two messages of one key, and the first one again behind the second."""

    def begin(world: World) -> None:
        world.order("x", key="k")
        world.order("y", key="k")
        envelope = world.broker.copies[0].envelope
        world.broker.put(envelope, "a", key="k")

    explored(Scenario(begin, mode, faults=1, leases=True, deviations=2), limit, 30)


@limits
@in_every_mode
def test_state_derived_event_differs_on_retry(mode: Mode, limit: int) -> None:
    """The outputs carry the number of the run; what is sent is what was committed, whatever a commit said."""
    modes = {"store.commit": ("lose", "fail")}
    explored(Scenario(one, mode, faults=3, modes=modes), limit, 8)


@limits
@in_every_mode
def test_two_copies_and_commits_of_unknown_outcome(mode: Mode, limit: int) -> None:
    def begin(world: World) -> None:
        world.order(copies=2)

    explored(Scenario(begin, mode, faults=1, modes={"store.commit": ("lose", "fail")}), limit, 100)


@limits
@in_every_mode
def test_handled_is_not_remembered_before_a_commit_that_fails(mode: Mode, limit: int) -> None:
    scenario = Scenario(one, mode, faults=2, preemptions=1, modes={"store.commit": ("fail",)})
    explored(scenario, limit, 3)


@in_every_mode
def test_non_transactional_effect_repeats(mode: Mode) -> None:
    """Documented, not hidden: what a handler does outside of the store happens again when it runs again."""
    repeated = []

    def check(world: World) -> None:
        repeated.append(len(world.runs.outside))

    scenario = Scenario(one, mode, crashes=1, deviations=1, check=check, every_point=True)
    explored(scenario, 1000, 5)
    assert max(repeated) == 2, "a crash between handler and commit repeats the effect"
    assert repeated[0] == 1, "without a crash it happens once"
    replay(scenario, ())


@limits
@in_every_mode
def test_undecodable_message_leaves_nothing(mode: Mode, limit: int) -> None:
    def begin(world: World) -> None:
        world.order(copies=2)
        for copy in world.broker.copies:
            force_setattr(copy.envelope, "body", b"no JSON")

    explored(Scenario(begin, mode, crashes=1), limit, 30)


@limits
@in_every_mode
def test_flaky_message_is_either_handled_or_dead(mode: Mode, limit: int) -> None:
    """One copy becomes a dead letter while another one succeeds."""

    def begin(world: World) -> None:
        world.runs.script = lambda node, run, name: Permanent("never") if (node, run) == ("a", 1) else None
        world.order(copies=2)

    explored(Scenario(begin, mode, crashes=1), limit, 60)
