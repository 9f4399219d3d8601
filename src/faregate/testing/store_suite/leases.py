"""Cases of the store suite: leases, and parked messages that several instances share. The seconds are so many that no
suite lasts them, or none at all: a database's clock cannot be told to go on."""

import asyncio

from faregate.errors import LeaseLost
from faregate.ports.store import BEHIND, NEXT, Lease
from faregate.testing.cases import refused
from faregate.testing.clock import rest
from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.parked import all_parked, parked
from faregate.testing.store_suite.rows import aborted, case, ids

LONG = 1_000.0


def plain(leases: list[Lease]) -> list[tuple[str, str | None, int, bool, str | None]]:
    return [(each.queue, each.owner, each.epoch, each.is_held, each.wanted_by) for each in leases]


@case
async def a_lease_is_one_instances_until_it_runs_out_and_each_owner_has_a_higher_epoch(subject: StoreSubject) -> None:
    store = subject.store
    assert await store.claim_lease("billing", "q-0", "a", LONG) == 1
    assert await store.claim_lease("billing", "q-0", "b", LONG) is None, "taken while it was another's"
    assert await store.claim_lease("shipping", "q-0", "b", 0) == 1, "another node's lease is another one"
    assert await store.claim_lease("billing", "q-1", "b", 0) == 1
    assert await store.claim_lease("billing", "q-1", "c", LONG) == 2, "it had run out"
    found = await store.leases("billing", ["q-1", "q-0", "q-2"])
    assert plain(found) == [("q-0", "a", 1, True, None), ("q-1", "c", 2, True, None)]
    assert LONG - 100 < found[0].left <= LONG
    assert plain(await store.leases("shipping", ["q-0"])) == [("q-0", "b", 1, False, None)]


@case
async def only_its_owner_under_its_epoch_renews_a_lease(subject: StoreSubject) -> None:
    store = subject.store
    for queue in ("q-0", "q-1", "q-2"):
        assert await store.claim_lease("billing", queue, "a", 0) == 1
    assert await store.claim_lease("billing", "q-1", "b", LONG) == 2
    assert await store.renew_leases("billing", "b", {"q-0": 1}, LONG) == set(), "renewed by another"
    assert await store.renew_leases("billing", "a", {"q-0": 1, "q-1": 1, "q-2": 3}, LONG) == {"q-0"}
    assert await store.renew_leases("billing", "a", {}, LONG) == set()
    held = [each.is_held for each in await store.leases("billing", ["q-0", "q-1", "q-2"])]
    assert held == [True, True, False]


@case
async def a_released_lease_is_kept_for_who_asked_for_it_and_else_for_anybody(subject: StoreSubject) -> None:
    store = subject.store
    for queue in ("q-0", "q-1", "q-2"):
        assert await store.claim_lease("billing", queue, "a", LONG) == 1
    assert not await store.ask_for_lease("billing", "q-0", 2, "b"), "asked the owner of another epoch"
    assert await store.ask_for_lease("billing", "q-0", 1, "b")
    assert not await store.ask_for_lease("billing", "q-0", 1, "c"), "two asked for one"
    assert await store.ask_for_lease("billing", "q-2", 1, "b")
    await store.release_lease("billing", "q-0", "b", 1, LONG)
    await store.release_lease("billing", "q-0", "a", 2, LONG)
    assert plain(await store.leases("billing", ["q-0"])) == [("q-0", "a", 1, True, "b")], "released by another"
    for queue, seconds in (("q-0", LONG), ("q-1", LONG), ("q-2", 0.0)):
        await store.release_lease("billing", queue, "a", 1, seconds)
    assert await store.claim_lease("billing", "q-0", "c", LONG) is None, "it was kept for another"
    assert await store.claim_lease("billing", "q-0", "b", LONG) == 2
    assert await store.claim_lease("billing", "q-1", "c", LONG) == 2, "nobody had asked for it"
    assert await store.claim_lease("billing", "q-2", "c", LONG) == 2, "who asked for it did not come"
    assert {each[4] for each in plain(await store.leases("billing", ["q-0", "q-2"]))} == {None}


@case
async def a_commit_under_a_lease_that_is_anothers_is_refused(subject: StoreSubject) -> None:
    store = subject.store
    assert await store.claim_lease("billing", "q-0", "a", LONG) == 1
    async with store.transaction() as tx:
        await tx.hold_lease("billing", "q-0", 1)
    for node, queue, epoch in (("billing", "q-0", 2), ("billing", "q-1", 1), ("shipping", "q-0", 1)):
        async with aborted(store) as tx:
            with refused(LeaseLost, f"{queue} of {node} was held under the epoch {epoch}"):
                await tx.hold_lease(node, queue, epoch)
    await store.release_lease("billing", "q-0", "a", 1, 0)
    async with aborted(store) as tx:
        with refused(LeaseLost, "a lease that was let go was held"):
            await tx.hold_lease("billing", "q-0", 1)


@case
async def a_takeover_waits_for_a_commit_under_the_lease_and_a_renewal_does_not(subject: StoreSubject) -> None:
    store = subject.store
    assert await store.claim_lease("billing", "q-0", "a", 0) == 1
    async with store.transaction() as tx:
        await tx.hold_lease("billing", "q-0", 1)
        takeover = asyncio.ensure_future(store.claim_lease("billing", "q-0", "b", LONG))
        await rest()
        assert not takeover.done(), "taken over under a commit"
    assert await takeover == 2
    async with aborted(store) as tx:
        with refused(LeaseLost, "a deposed owner could commit"):
            await tx.hold_lease("billing", "q-0", 1)
    if not store.one_writer:
        async with store.transaction() as tx:
            await tx.hold_lease("billing", "q-0", 2)
            async with asyncio.timeout(20):
                assert await store.renew_leases("billing", "b", {"q-0": 2}, LONG) == {"q-0"}


@case
async def a_generation_is_noted_once_and_followed_once(subject: StoreSubject) -> None:
    store = subject.store
    assert await store.generation("billing", "q") is None
    assert await store.note_generation("billing", "q", 8) == (1, 8)
    assert await store.note_generation("billing", "q", 12) == (1, 8), "the number changed without a new generation"
    assert await store.note_generation("shipping", "q", 4) == (1, 4)
    assert await store.next_generation("billing", "q", 1, 12)
    assert not await store.next_generation("billing", "q", 1, 16), "two followed one generation"
    assert not await store.next_generation("billing", "other", 1, 16)
    assert await store.generation("billing", "q") == (2, 12)
    assert await store.generation("shipping", "q") == (1, 4)


@case
async def what_no_transport_numbers_is_parked_in_the_order_in_which_it_comes(subject: StoreSubject) -> None:
    store, given = subject.store, ids(6)
    rows = [parked(each, NEXT)._replace(queue="q-0", starts=place) for place, each in enumerate(reversed(given))]
    async with store.transaction() as tx:
        await tx.park("billing", [(each, None) for each in rows[:4]])
    async with store.transaction() as tx:
        for each in rows[3:]:
            await tx.park("billing", [(each, None)])
    found = await all_parked(store)
    assert [each._replace(position=NEXT) for each in found] == rows, "not in their order, or not as they were"
    assert len({each.position for each in found}) == len(rows)
    later = found[0]._replace(due=50.0, redeliveries=1, starts=9, queue="other")
    async with store.transaction() as tx:
        await tx.park("billing", [(later, 0)])
    kept = later._replace(starts=found[0].starts, queue="q-0")
    assert (await all_parked(store))[0] == kept, "a later try has another place, or other starts"
    async with aborted(store) as tx:
        assert await tx.parked_keys("billing", "q-0") == {"k": 6}
        assert await tx.parked_keys("billing", "q-1") == {} == await tx.parked_keys("shipping", "q-0")


@case
async def what_waits_behind_others_is_due_when_it_is_the_first_of_its_key(subject: StoreSubject) -> None:
    store, given = subject.store, ids(5)
    first, *behind = (parked(each, NEXT, due=20.0 if not place else BEHIND) for place, each in enumerate(given))
    others = [parked(each, NEXT, due=BEHIND, key=key) for each, key in zip(ids(2), ("l", "k"), strict=True)]
    queued = [each._replace(queue="q-0") for each in (first, *behind, others[0])]
    async with store.transaction() as tx:
        await tx.park("billing", [(each, None) for each in (*queued, others[1]._replace(queue="q-1"))])
        shown = await tx.next_of_key("billing", "q-0", "k", 30.0)
        assert shown is not None and (shown.message_id, shown.due) == (given[0], 20.0), "it is not the first"
        assert [each.due for each in await tx.parked("billing", 100.0)] == [20.0], "somebody is before it"
        head = (await tx.parked("billing", 100.0))[0]
        await tx.unpark("billing", {head.message_id: head.position})
        assert await tx.next_of_key("shipping", "q-0", "k", 30.0) is None, "there is none"
        shown = await tx.next_of_key("billing", "q-0", "k", 30.0)
        assert shown is not None and (shown.message_id, shown.due, shown.queue) == (given[1], 30.0, "q-0")
        found = await tx.parked("billing", 100.0)
    assert [(each.message_id, each.due) for each in found] == [(given[1], 30.0)]


@case
async def a_parked_message_of_no_partition_is_tried_by_one_instance_at_a_time(subject: StoreSubject) -> None:
    store, given = subject.store, ids(4)
    places = [None, None, "q-0", "q-1"]
    rows = [
        parked(each, place, due=10.0 + place)._replace(queue=queue)
        for place, (each, queue) in enumerate(zip(given, places, strict=True))
    ]

    async def claim(
        owner: str, queues: list[str], seconds: float = LONG, due: float = 99.0, node: str = "billing"
    ) -> list[int]:
        async with store.transaction() as tx:
            return [each.position for each in await tx.claim_parked(node, queues, due, 10, owner, seconds)]

    async with store.transaction() as tx:
        await tx.park("billing", [(each, None) for each in rows])
    assert await claim("a", ["q-1"], due=12.0) == [0, 1], "those that are due, and may be tried by this one"
    assert await claim("b", ["q-0", "q-1"]) == [2, 3], "another has claimed the others"
    assert await claim("a", []) == [0, 1], "what one has claimed is its own"
    assert await claim("b", [], node="shipping") == []
    async with store.transaction() as tx:
        await tx.keep_claimed("billing", "b", 0)
    assert await claim("b", []) == []
    async with store.transaction() as tx:
        await tx.keep_claimed("billing", "a", 0)
    assert await claim("b", []) == [0, 1], "it was let go"
    async with store.transaction() as tx:
        await tx.park("billing", [(rows[0]._replace(redeliveries=1), 0)])
    assert await claim("a", []) == [0], "its later try is anybody's"
    if not store.one_writer:
        async with store.transaction() as tx:
            await tx.keep_claimed("billing", "a", 0)
            await tx.keep_claimed("billing", "b", 0)
        async with store.transaction() as tx:
            assert len(await tx.claim_parked("billing", [], 99.0, 1, "a", LONG)) == 1
            async with asyncio.timeout(20):
                assert await claim("b", []) == [1], "it waited for another, or tried the same"


@case
async def starts_of_a_parked_message_are_counted(subject: StoreSubject) -> None:
    store, given = subject.store, ids(3)
    async with store.transaction() as tx:
        await tx.park("billing", [(parked(each, place), None) for place, each in enumerate(given[:2])])
        assert await tx.count_starts("billing", given) == {given[0]: 1, given[1]: 1}
    async with aborted(store) as tx:
        await tx.count_starts("billing", given[:1])
    async with store.transaction() as tx:
        assert await tx.count_starts("billing", given[:1]) == {given[0]: 2}
        assert await tx.count_starts("billing", given[1:], -1) == {given[1]: 0}
        assert await tx.count_starts("shipping", given) == {}
    assert [each.starts for each in await all_parked(store)] == [2, 0]
