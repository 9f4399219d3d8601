"""Break it on purpose: with any rule of the protocol gone, the exploration finds a violated invariant."""

from collections.abc import Callable

import pytest

import faregate as fg
from faregate.errors import Permanent
from tests.simulation import mutations
from tests.simulation.audit import Violation
from tests.simulation.explorer import Broken, explore, replay
from tests.simulation.nodes import lingering, swallowing
from tests.simulation.scenario import Scenario
from tests.simulation.test_operations import replay_all
from tests.simulation.test_parting import SLOW, SLOW_AND_LOST, SLOW_BY_KEY, SLOW_IN_ITS_TRANSACTION, TOGETHER
from tests.simulation.test_send import left_behind, of_one_key
from tests.simulation.test_spark import KEYED, NOT_STRICT, REPLAYED, first_fails_once, on_spark, one_of_a_key
from tests.simulation.test_where import BEHIND_ON_SPARK, WITH_TOKENS
from tests.simulation.test_where import TOGETHER as TOGETHER_WHERE
from tests.simulation.world import World

MOST = 3000
Mutation = Callable[[pytest.MonkeyPatch], None]


def one(world: World) -> None:
    world.order()


def two_copies(world: World) -> None:
    world.order(copies=2)


def fails_once(world: World) -> None:
    world.runs.script = lambda node, run, name: OSError("once") if (node, run) == ("a", 1) else None
    world.order()


def fails_and_leaves_a_task(world: World) -> None:
    world.runs.habit = lingering
    fails_once(world)


def swallowed_copies(world: World) -> None:
    world.runs.habit = swallowing
    two_copies(world)


def one_fails_among_three(world: World) -> None:
    world.runs.script = lambda node, run, name: OSError("once") if (node, run, name) == ("a", 1, "y") else None
    for name in "xyz":
        world.order(name)


def written_copies(world: World) -> None:
    world.runs.writes = True
    for name in "xy":
        world.order(name)
    for copy in [*world.broker.copies]:
        world.broker.put(copy.envelope, "a")


def one_fails_before_it_is_sent(world: World) -> None:
    world.runs.writes = True
    one_fails_among_three(world)


def dies_once(world: World) -> None:
    world.runs.script = lambda node, run, name: Permanent("never") if (node, run) == ("a", 1) else None
    world.order()


def old(world: World) -> None:
    world.runs.outputs = 0  # what has outputs in the outbox is not evicted
    world.order(copies=2)
    world.clock.jump(1000.0)


def age(world: World) -> None:
    world.clock.jump(200.0)


COPIES = Scenario(two_copies, "separate", crashes=1)
LATE_CREATE = Scenario(
    left_behind,
    "separate",
    processes=1,
    starting=True,
    in_exploration=("a", "b"),
    faults=1,
    modes={"tokens.create": ("late", "lose")},
)
LATE_CLAIM = Scenario(two_copies, "separate", faults=1, modes={"store.insert_claim": ("late",)})
CASES: list[tuple[Mutation, Scenario, set[int]]] = [
    (mutations.settle_before_commit, Scenario(one, crashes=1), {7}),
    (mutations.dispatch_before_commit, Scenario(one, crashes=1), {5}),
    (mutations.ledger_insert_in_its_own_transaction, Scenario(one, crashes=1), {7}),
    (
        mutations.outputs_of_a_failed_try_kept,
        Scenario(fails_once, options={"retry": fg.Retry(1, delay=0.0)}),
        {5, 7},
    ),
    (
        mutations.context_outlives_its_try,
        Scenario(fails_and_leaves_a_task, options={"retry": fg.Retry(1, delay=0.0)}),
        {1, 5, 6, 7},
    ),
    (mutations.interrupt_left_to_the_handler, Scenario(swallowed_copies), {1, 5, 7}),
    (
        mutations.writes_of_a_failed_try_kept_in_its_batch,
        Scenario(one_fails_among_three, batch=3, savepoints=False, options={"retry": fg.Retry(1, delay=0.0)}),
        {1},
    ),
    (mutations.writes_of_a_duplicate_sent, Scenario(written_copies, batch=2, savepoints=False), {1}),
    (
        mutations.writes_of_a_failed_try_sent,
        Scenario(one_fails_before_it_is_sent, batch=3, savepoints=False, options={"retry": fg.Retry(1, delay=0.0)}),
        {1},
    ),
    (
        mutations.eviction_without_floor,
        Scenario(old, retain_ledger=100.0, operator=(age,), sweeps=1, below_floor=True),
        {1},
    ),
    (mutations.dead_letter_writes_a_ledger_row, Scenario(dies_once, operator=(replay_all,)), {7}),
    (mutations.a_known_message_runs, Scenario(two_copies), {1, 5, 7}),
    (mutations.what_was_lost_counts, Scenario(one, faults=1, modes={"store.commit": ("fail",)}), {7}),
    (
        mutations.what_was_rolled_back_counts,
        Scenario(one_fails_among_three, batch=3, savepoints=False, options={"retry": fg.Retry(1, delay=0.0)}),
        {7},
    ),
    (mutations.what_an_earlier_run_committed_runs_again, COPIES, {1, 3, 6}),
    (mutations.no_claim, COPIES, {1, 3}),
    (mutations.commit_not_conditional_on_the_claim, COPIES, {1, 3}),
    (mutations.claim_regenerated_on_retry, COPIES, {1, 3, 6}),
    (mutations.token_deleted_before_the_sends, COPIES, {4}),
    (mutations.claim_deleted_before_the_token, COPIES, {1, 3, 6}),
    (mutations.no_sweeper, LATE_CLAIM, {6}),
    (mutations.no_sweeper, LATE_CREATE, {6}),
    (mutations.attempts_not_persisted_before_sending, COPIES, {2, 3}),
    (mutations.token_keyed_by_message_id, LATE_CREATE, {1}),
    (mutations.create_retried_with_the_same_attempt, LATE_CREATE, {1}),
    (mutations.no_fence, LATE_CREATE, {6}),
    (mutations.resolved_rows_go_to_the_end, Scenario(of_one_key, "merged", processes=1, crashes=1, foreign=True), {8}),
    (
        mutations.resolved_rows_go_to_the_end,
        Scenario(of_one_key, "separate", processes=1, crashes=1, foreign=True),
        {8},
    ),
    # --- parting ---
    (mutations.what_is_decided_is_not_committed_when_a_batch_parts, SLOW, {7}),
    (mutations.what_is_decided_is_not_settled_when_a_batch_parts, SLOW, {6}),
    (mutations.what_has_not_begun_is_not_put_back, SLOW, {6}),
    (mutations.marks_of_the_others_are_committed_when_a_batch_parts, SLOW, {7}),
    (mutations.a_batch_parts_from_one_that_has_used_the_transaction, SLOW_IN_ITS_TRANSACTION, {1, 5, 7}),
    (mutations.what_was_lost_counts_when_a_batch_parts, SLOW_AND_LOST, {7}),
    (mutations.one_that_has_ended_stays_in_its_lane, SLOW_BY_KEY, {8}),
    (mutations.what_is_behind_overtakes_what_is_put_back, SLOW_BY_KEY, {8}),
    (mutations.undecided_ones_are_settled_together, TOGETHER, {7}),
    (mutations.some_are_forgotten_when_they_are_settled_together, TOGETHER, {6}),
    # --- filters ---
    (mutations.what_is_filtered_is_new, TOGETHER_WHERE, {6}),
    (mutations.a_filter_takes_everything, TOGETHER_WHERE, {7}),
    (mutations.a_filter_takes_nothing, TOGETHER_WHERE, {7}),
    (mutations.the_token_of_what_is_filtered_stays, WITH_TOKENS, {6}),
    (mutations.what_is_filtered_stays_parked, BEHIND_ON_SPARK, {6}),
    # --- Spark ---
    (mutations.positions_advanced_before_the_handlers, on_spark(one_of_a_key, crashes=1, options=KEYED), {7}),
    (mutations.positions_advanced_after_the_commit, on_spark(one_of_a_key, "off", crashes=1, options=KEYED), {1}),
    (mutations.no_lock_of_the_bucket, on_spark(one_of_a_key, options=KEYED), {9}),
    (
        mutations.a_parked_message_stays_parked_when_it_is_handled,
        on_spark(first_fails_once, "off", options=KEYED),
        {6},
    ),
    (
        mutations.a_parked_message_is_behind_like_any_other,
        on_spark(first_fails_once, lax=True, options=NOT_STRICT),
        {7},
    ),
    (mutations.nothing_is_behind, on_spark(one_of_a_key, "off", crashes=1, options=KEYED), {1}),
    (mutations.a_dead_letter_stays_parked_until_it_is_settled, REPLAYED, {6, 7}),
    (mutations.nobody_waits_for_what_is_parked, on_spark(first_fails_once, options=KEYED), {8}),
    (mutations.outbox_of_spark_sent_before_the_commit, on_spark(one, crashes=1), {5}),
    (mutations.outbox_rows_forgotten_before_they_are_spooled, on_spark(one, crashes=1), {7}),
    (mutations.tokens_of_spark_gone_before_the_sends, on_spark(one, "separate"), {4}),
    (mutations.done_claims_of_spark_read_behind_the_sends, on_spark(one, "separate", crashes=1), {4}),
    (mutations.tokens_of_spark_stay, on_spark(one, "separate"), {6}),
    (mutations.claims_of_spark_deleted_before_the_tokens, on_spark(one, "separate", crashes=1), {1, 3, 6}),
]


@pytest.mark.parametrize(("mutate", "scenario", "invariants"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_broken_rule_is_found(
    mutate: Mutation, scenario: Scenario, invariants: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Broken) as found:
        print(explore(scenario, MOST))
    cause = found.value.__cause__
    print(found.value)
    assert isinstance(cause, Violation), f"another error than a violation: {cause!r}"
    assert cause.invariant in invariants, f"{cause}"
    with pytest.raises(Broken, match="invariant"):
        replay(scenario, found.value.schedule)
    monkeypatch.undo()
    replay(scenario, found.value.schedule)
