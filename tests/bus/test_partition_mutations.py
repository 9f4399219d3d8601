"""Break it on purpose: with any rule of partitions, leases, parking or shared outboxes gone, its test fails."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from faregate.bus.dispatcher import Dispatcher
from faregate.bus.leases import LeasedConsumer, LeasedFeed, Partition
from faregate.bus.supplied import Supplied, Waiting
from faregate.ports.store import REPARTITION, Lease
from faregate.stores.sqlite import SqliteStore
from faregate.stores.sqlite.transaction import SqliteTransaction
from tests.bus import test_outbox_of_several as outbox
from tests.bus import test_partitions as partitions
from tests.bus.parted import Parted

Patch = pytest.MonkeyPatch


async def _nothing(*given: Any, **named: Any) -> None:
    """What a rule would do is not done."""


def commits_without_the_lease(patch: Patch) -> None:
    patch.setattr(LeasedFeed, "record", _nothing)


def does_not_wait_for_what_runs(patch: Patch) -> None:
    leave = LeasedConsumer._leave
    patch.setattr(LeasedConsumer, "_leave", lambda self, partition, wait: leave(self, partition, wait=False))


def trusts_a_lease_that_has_run_out(patch: Patch) -> None:
    patch.setattr(Partition, "is_held", lambda self, now: not self.ended)


def lets_later_ones_pass(patch: Patch) -> None:
    patch.setattr(Supplied, "is_behind", False)


def hands_in_all_of_a_key(patch: Patch) -> None:
    row = Waiting._row
    patch.setattr(Waiting, "_row", lambda self, delivery, now, due: row(self, delivery, now, min(due, now + 10)))


def forgets_the_next_of_a_key(patch: Patch) -> None:
    async def mutant(self: Any, *given: Any) -> None:
        return None

    patch.setattr(SqliteTransaction, "next_of_key", mutant)


def does_not_learn_which_keys_wait(patch: Patch) -> None:
    async def mutant(self: Any, *given: Any) -> dict[str, int]:
        return {}

    patch.setattr(SqliteTransaction, "parked_keys", mutant)


def counts_no_starts(patch: Patch) -> None:
    async def mutant(self: Any, node: str, message_ids: list[str], step: int = 1) -> dict[str, int]:
        return dict.fromkeys(message_ids, 1)

    patch.setattr(SqliteTransaction, "count_starts", mutant)


def takes_no_start_back(patch: Patch) -> None:
    count = SqliteTransaction.count_starts
    patch.setattr(
        SqliteTransaction, "count_starts", lambda self, node, given, step=1: count(self, node, given, abs(step))
    )


def does_not_count_what_is_redelivered(patch: Patch) -> None:
    patch.setattr(Supplied, "has_unknown_starts", False)


def goes_on_while_the_store_is_away(patch: Patch) -> None:
    patch.setattr(Waiting, "_come_again", lambda self, partition, group, delay: None)


def stays_with_its_generation(patch: Patch) -> None:
    patch.setattr(LeasedConsumer, "_follow", _nothing)


def consumes_a_generation_before_it_may(patch: Patch) -> None:
    leases, claim = SqliteStore.leases, SqliteStore.claim_lease

    async def not_kept(self: Any, node: str, queues: Any) -> list[Lease]:
        return [each for each in await leases(self, node, queues) if each.owner != REPARTITION]

    async def taken(self: Any, node: str, queue: str, owner: str, seconds: float) -> int | None:
        await self.release_lease(node, queue, REPARTITION, 1, 0)
        return await claim(self, node, queue, owner, seconds)

    patch.setattr(SqliteStore, "leases", not_kept)
    patch.setattr(SqliteStore, "claim_lease", taken)


def leaves_the_former_generation_bound(patch: Patch) -> None:
    patch.setattr(Parted, "abandon", _nothing)


def sends_over_older_rows_of_others(patch: Patch) -> None:
    async def mutant(self: Any, rows: Any) -> Any:
        return rows

    patch.setattr(Dispatcher, "_not_behind_others", mutant)


def sends_what_others_just_committed(patch: Patch) -> None:
    patch.setattr(Dispatcher, "_left_by_others", lambda self, rows, is_lowest: rows)


def leaves_what_a_dead_process_left(patch: Patch) -> None:
    patch.setattr(Dispatcher, "_left_by_others", lambda self, rows, is_lowest: [])


FOUND: list[tuple[Callable[[Patch], None], Callable[..., Awaitable[None]], dict[str, Any]]] = [
    (commits_without_the_lease, partitions.test_a_deposed_owner_commits_nothing, {}),
    (
        does_not_wait_for_what_runs,
        partitions.test_letting_go_waits_for_what_runs_and_what_has_not_begun_goes_to_the_next_owner,
        {},
    ),
    (trusts_a_lease_that_has_run_out, partitions.test_a_lease_that_cannot_be_renewed_in_time_is_as_good_as_lost, {}),
    (lets_later_ones_pass, partitions.test_later_ones_of_a_key_park_behind_one_that_waits_and_follow_in_order, {}),
    (lets_later_ones_pass, partitions.test_a_serial_subscription_waits_as_a_whole, {}),
    (hands_in_all_of_a_key, partitions.test_later_ones_of_a_key_park_behind_one_that_waits_and_follow_in_order, {}),
    (forgets_the_next_of_a_key, partitions.test_a_serial_subscription_waits_as_a_whole, {}),
    (does_not_learn_which_keys_wait, partitions.test_what_waits_goes_with_its_partition_to_the_next_owner, {}),
    (
        counts_no_starts,
        partitions.test_what_kills_its_process_is_a_dead_letter_in_the_end_and_holds_up_nobody,
        {"order": "key"},
    ),
    (
        does_not_count_what_is_redelivered,
        partitions.test_what_kills_its_process_is_a_dead_letter_in_the_end_and_holds_up_nobody,
        {"order": "none"},
    ),
    (takes_no_start_back, partitions.test_a_handler_that_asks_for_later_again_and_again_uses_up_no_starts, {}),
    (
        goes_on_while_the_store_is_away,
        partitions.test_while_the_store_is_away_a_partition_is_let_go_and_everything_keeps_its_place,
        {},
    ),
    *(
        (mutation, partitions.test_instances_follow_a_new_generation_and_consume_it_when_whoever_noted_it_lets_them, {})
        for mutation in (
            stays_with_its_generation,
            does_not_wait_for_what_runs,
            consumes_a_generation_before_it_may,
            leaves_the_former_generation_bound,
        )
    ),
    (
        sends_over_older_rows_of_others,
        outbox.test_no_row_of_a_key_is_sent_before_an_older_one_that_another_committed,
        {},
    ),
    (
        sends_what_others_just_committed,
        outbox.test_what_a_dead_process_left_is_sent_after_a_moment_and_before_newer_ones_of_its_key,
        {},
    ),
    (
        leaves_what_a_dead_process_left,
        outbox.test_what_a_dead_process_left_is_sent_after_a_moment_and_before_newer_ones_of_its_key,
        {},
    ),
]


@pytest.mark.parametrize(("mutation", "test", "given"), FOUND, ids=[f"{m.__name__}-{t.__name__}" for m, t, _ in FOUND])
async def test_the_rule_is_missed(
    mutation: Callable[[Patch], None],
    test: Callable[..., Awaitable[None]],
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (partitions, outbox):
        monkeypatch.setattr(module, "LONG", 4.0)
    mutation(monkeypatch)
    named = {"tmp_path": tmp_path, "monkeypatch": monkeypatch, **given}
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount]  # type: ignore[attr-defined]
    with pytest.raises((AssertionError, TimeoutError)):
        await test(**{name: named[name] for name in wanted})
