"""Cases of the store suite: the ledger, business keys, retention."""

import asyncio

from faregate.ports.store import Known, Transaction
from faregate.testing.clock import rest
from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.rows import aborted, case, expect, ids, ledger, letter, outgoing


@case
async def a_message_is_recorded_once_per_node(subject: StoreSubject) -> None:
    store, [first] = subject.store, ids(1)
    async with store.transaction() as tx:
        assert await tx.record("billing", [ledger(first, b"digest")]) == {}
    async with store.transaction() as tx:
        assert await tx.record("billing", [ledger(first, b"other")]) == {first: b"digest"}
        assert await tx.record("shipping", [ledger(first, None)]) == {}, "another node has a ledger of its own"
        assert await tx.record("shipping", [ledger(first)]) == {first: None}, "recorded by the same transaction"
    assert (await store.known("billing", [first]))[first] == ("handled", b"digest", 0)
    assert (await store.known("shipping", [first]))[first] == ("handled", None, 0)


@case
async def a_duplicate_in_a_batch_does_not_fail_its_neighbours(subject: StoreSubject) -> None:
    store, given = subject.store, ids(9)
    there = [given[4], given[1]]
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(message_id, message_id.encode()) for message_id in there])
    async with store.transaction() as tx:
        found = await tx.record("billing", [ledger(message_id) for message_id in reversed(given)])
    assert found == {message_id: message_id.encode() for message_id in there}, f"there before: {found}"
    assert set(await store.known("billing", given)) == set(given), "a neighbour was not recorded"


@case
async def an_id_that_is_twice_in_a_batch_is_refused(subject: StoreSubject) -> None:
    [first, second] = ids(2)
    async with aborted(subject.store) as tx:
        twice = tx.record("billing", [ledger(first), ledger(second), ledger(first)])
        await expect(ValueError, twice, "an id twice in one batch")


@case
async def what_was_taken_out_can_be_recorded_again(subject: StoreSubject) -> None:
    store, given = subject.store, ids(3)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(message_id) for message_id in given])
        await tx.unrecord("billing", given[1:])
    assert set(await store.known("billing", given)) == {given[0]}
    async with store.transaction() as tx:
        assert set(await tx.record("billing", [ledger(message_id) for message_id in given])) == {given[0]}


@case
async def a_transaction_knows_what_it_has_recorded_itself(subject: StoreSubject) -> None:
    store, [handled, dead, unknown] = subject.store, ids(3)
    async with aborted(store) as tx:
        assert await tx.known("billing", [handled, dead, unknown]) == {}
        await tx.record("billing", [ledger(handled, b"d")])
        await tx.add_dead(letter("billing", dead))
        found = await tx.known("billing", [unknown, dead, handled])
        assert found == {handled: Known("handled", b"d"), dead: Known("dead", None)}, f"{found}"
        assert await tx.known("shipping", [handled, dead]) == {}, "another node's"
    assert await store.known("billing", [handled, dead]) == {}


@case
async def who_comes_second_waits_for_the_first_and_is_told(subject: StoreSubject) -> None:
    store = subject.store
    for first_commits in (True, False):
        [message_id] = ids(1)
        first, second = store.transaction(), store.transaction()
        await first.begin()
        await first.record("billing", [ledger(message_id, b"first")])

        async def follow(tx: Transaction = second, message_id: str = message_id) -> dict[str, bytes | None]:
            await tx.begin()
            found = await tx.record("billing", [ledger(message_id, b"second")])
            await tx.commit()
            return found

        following = asyncio.ensure_future(follow())
        await rest()
        assert not following.done(), "the second did not wait for the first"
        await (first.commit() if first_commits else first.roll_back())
        found = await following
        assert found == ({message_id: b"first"} if first_commits else {}), f"first commits: {first_commits}, {found}"


@case
async def overlapping_batches_in_any_order_do_not_lock_each_other(subject: StoreSubject) -> None:
    store, given = subject.store, ids(60)
    told: list[int] = []

    async def handle(order: list[str]) -> None:
        async with store.transaction() as tx:
            found = await tx.record("billing", [ledger(message_id) for message_id in order])
            await rest(3)
            told.append(len(order) - len(found))

    for _ in range(3):
        await asyncio.gather(handle(given[:40]), handle(given[:19:-1]), handle(given[::-1]), handle(given[1::2]))
    assert sum(told) == len(given), f"{sum(told)} rows were new for somebody, not {len(given)}"


# --- business keys ------------------------------------------------------------------------------------


@case
async def a_business_key_is_taken_once_per_handler(subject: StoreSubject) -> None:
    store = subject.store
    async with store.transaction() as tx:
        assert await tx.take_business_key("billing", "bill", "order-17", 1.0)
        assert not await tx.take_business_key("billing", "bill", "order-17", 2.0), "taken twice"
        assert await tx.take_business_key("billing", "remind", "order-17", 1.0), "another handler"
        assert await tx.take_business_key("shipping", "bill", "order-17", 1.0), "another node"
    async with store.transaction() as tx:
        assert not await tx.take_business_key("billing", "bill", "order-17", 3.0), "taken twice, in two transactions"
        await tx.free_business_key("billing", "remind", "order-17")
    assert await store.has_business_key("billing", "bill", "order-17")
    assert not await store.has_business_key("billing", "remind", "order-17"), "it was freed"


# --- retention ----------------------------------------------------------------------------------------


@case
async def old_ledger_rows_are_evicted_and_the_floor_rises_with_them(subject: StoreSubject) -> None:
    store, given = subject.store, ids(6)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(message_id, at=float(at)) for at, message_id in enumerate(given)])
        await tx.record("shipping", [ledger(given[0], at=0.0)])
    assert await store.floor("billing") is None
    assert await store.evict("billing", 0.0, 100) == 0
    assert await store.floor("billing") is None, "the floor rose though nothing went"
    assert await store.evict("billing", 4.0, 3) == 3, "not as many as the limit"
    assert await store.floor("billing") == 4.0, "rows went and the floor did not rise"
    assert await store.evict("billing", 4.0, 3) == 1
    assert set(await store.known("billing", given)) == set(given[4:])
    assert set(await store.known("shipping", given)) == {given[0]}, "another node's row went"
    assert await store.floor("shipping") is None


@case
async def the_floor_never_sinks(subject: StoreSubject) -> None:
    store, [first, second] = subject.store, ids(2)
    for message_id, before in ((first, 10.0), (second, 5.0)):
        async with store.transaction() as tx:
            await tx.record("billing", [ledger(message_id, at=1.0)])
        assert await store.evict("billing", before, 10) == 1
    assert await store.floor("billing") == 10.0
    async with store.transaction() as tx:
        assert await tx.floor("billing") == 10.0, "a transaction does not see the floor"
        assert await tx.floor("shipping") is None


@case
async def what_has_outputs_to_dispatch_is_not_evicted(subject: StoreSubject) -> None:
    store, given = subject.store, ids(4)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(message_id, at=1.0) for message_id in given])
        seqs = await tx.send([outgoing("billing", given[0]), outgoing("billing", given[1]), outgoing("billing", None)])
        await tx.send([outgoing("shipping", given[2])])
    await store.keep_dispatched([seqs[1]], 5.0)
    assert await store.evict("billing", 10.0, 100) == 3
    assert set(await store.known("billing", given)) == {given[0]}
    async with store.transaction() as tx:
        await tx.dispatched(seqs)
    assert await store.evict("billing", 10.0, 100) == 1


@case
async def business_keys_are_evicted_with_the_ledger(subject: StoreSubject) -> None:
    store, [first] = subject.store, ids(1)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(first, at=1.0)])
        for key, at in (("old", 1.0), ("new", 20.0)):
            await tx.take_business_key("billing", "bill", key, at)
        await tx.take_business_key("shipping", "bill", "old", 1.0)
    await store.evict("billing", 10.0, 100)
    assert not await store.has_business_key("billing", "bill", "old")
    assert await store.has_business_key("billing", "bill", "new")
    assert await store.has_business_key("shipping", "bill", "old")
