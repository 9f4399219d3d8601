"""Cases of the store suite: parked messages and the positions of keys, which log engines keep."""

import asyncio

from faregate.message import Envelope
from faregate.ports.store import Parked, Store
from faregate.testing.clock import rest
from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.rows import aborted, case, ids


def parked(
    message_id: str, position: int, *, due: float = 10.0, redeliveries: int = 0, key: str | None = "k"
) -> Parked:
    envelope = Envelope(publication_id="p", type="Noted", source="author", body=b"x", headers={"a": "b"})
    return Parked(message_id, due, redeliveries, key, position, envelope)


async def all_parked(store: Store, node: str = "billing") -> list[Parked]:
    async with aborted(store) as tx:
        return await tx.parked(node)


@case
async def parked_messages_that_are_due_come_back_as_they_were_in_the_order_of_the_log(subject: StoreSubject) -> None:
    store, given = subject.store, ids(4)
    first, second = parked(given[3], 5, due=30.0, redeliveries=2), parked(given[0], 7, due=20.0, key=None)
    third, other = parked(given[1], 9, due=40.0), parked(given[2], 1, due=1.0)
    async with store.transaction() as tx:
        await tx.park("billing", [(third, None), (second, None), (first, None)])
        await tx.park("shipping", [(other, None)])
    async with aborted(store) as tx:
        assert await tx.parked("billing") == [first, second, third]
        assert await tx.parked("billing", 30.0) == [first, second], "not those that are due"
        assert await tx.parked("billing", 30.0, 1) == [first], "the limit takes the first ones"
        assert await tx.count_parked("billing") == (3, 5)
        assert await tx.count_parked("stock") == (0, None)


@case
async def a_message_is_parked_once_and_again_only_from_the_row_that_was_read(subject: StoreSubject) -> None:
    store, [first] = subject.store, ids(1)
    fresh, later = parked(first, 5), parked(first, 5, due=50.0, redeliveries=1, key="other")
    async with store.transaction() as tx:
        await tx.park("billing", [(fresh, None)])
        await tx.park("billing", [(later, None)])
        assert await tx.parked("billing") == [fresh], "what came from the log twice was parked over itself"
        await tx.park("billing", [(later, 3)])
        assert await tx.parked("billing") == [fresh], "parked again from a row that is another one by now"
        await tx.park("billing", [(later, 0)])
        await tx.park("shipping", [(later, 0)])
    assert await all_parked(store) == [later], "it was not parked again"
    assert await all_parked(store, "shipping") == [], "parked again though it was not parked"


@case
async def what_is_taken_out_is_not_parked_any_more(subject: StoreSubject) -> None:
    store, given = subject.store, ids(4)
    rows = [parked(message_id, place) for place, message_id in enumerate(given[:3])]
    async with store.transaction() as tx:
        await tx.park("billing", [(each, None) for each in rows])
        await tx.park("shipping", [(rows[0], None)])
    async with aborted(store) as tx:
        await tx.unpark("billing", {message_id: place for place, message_id in enumerate(given)})
    assert await all_parked(store) == rows, "taken out by a transaction that was rolled back"
    async with store.transaction() as tx:
        await tx.unpark("billing", {given[3]: 3, given[0]: 0, given[2]: 2})
        await tx.unpark("billing", {})
    assert await all_parked(store) == [rows[1]]
    assert await all_parked(store, "shipping") == [rows[0]], "another node's went"


@case
async def only_the_row_that_was_read_is_taken_out(subject: StoreSubject) -> None:
    """Its dead letter was replayed, and the replay is parked: whoever comes late with the earlier one leaves that."""
    store, [first, second] = subject.store, ids(2)
    rows = [parked(first, 7), parked(second, 8)]
    async with store.transaction() as tx:
        await tx.park("billing", [(each, None) for each in rows])
        await tx.unpark("billing", {first: 3, second: 8})
    assert await all_parked(store) == rows[:1]


@case
async def parked_messages_are_found_by_id_or_key(subject: StoreSubject) -> None:
    store, given = subject.store, ids(700)
    keys = [f"key-{place}" for place in range(len(given))]
    rows = [parked(given[place], place, key=keys[place]) for place in (0, 300, 650)]
    async with aborted(store) as tx:
        assert await tx.parked_with("billing", given, keys) == []
    async with store.transaction() as tx:
        await tx.park("billing", [(each, None) for each in rows])
        await tx.park("shipping", [(parked(given[5], 5, key="key-5"), None)])

    async def found(message_ids: list[str], keys: list[str]) -> list[int]:
        async with aborted(store) as tx:
            return sorted(each.position for each in await tx.parked_with("billing", message_ids, keys))

    assert await found(given, keys) == [0, 300, 650], "not each of them once"
    assert await found(given[300:], []) == [300, 650]
    assert await found([], keys[:301]) == [0, 300]
    assert await found(given[:1], keys[650:]) == [0, 650]
    assert await found([], []) == []


@case
async def the_position_of_a_key_never_goes_back(subject: StoreSubject) -> None:
    store = subject.store
    many = {f"key-{number}": number for number in range(700)}
    async with store.transaction() as tx:
        await tx.advance("billing", "bill@1", many)
        await tx.advance("billing", "bill@1", {"key-1": 50, "key-60": 2})
        await tx.advance("billing", "bill@2", {"key-1": 7})
        await tx.advance("shipping", "bill@1", {"key-1": 8})
        await tx.advance("billing", "bill@1", {})
    async with aborted(store) as tx:
        await tx.advance("billing", "bill@1", {"key-2": 99})
    async with aborted(store) as tx:
        found = await tx.positions("billing", "bill@1", [*many, "unknown"])
        assert found == {**many, "key-1": 50}, "a position is not the highest that was committed"
        assert await tx.positions("billing", "bill@2", ["key-1", "key-2"]) == {"key-1": 7}, "another handler's"
        assert await tx.positions("shipping", "bill@1", ["key-1"]) == {"key-1": 8}, "another node's"
        assert await tx.positions("billing", "bill@1", []) == {}


@case
async def who_wants_a_bucket_waits_for_the_end_of_its_holder(subject: StoreSubject) -> None:
    store = subject.store

    async def change(buckets: list[int], position: int) -> int:
        async with store.transaction() as tx:
            await tx.lock_buckets("billing", buckets)
            before = (await tx.positions("billing", "bill", ["k"])).get("k", 0)
            await tx.advance("billing", "bill", {"k": position})
            return before

    async with store.transaction() as holder:
        await holder.lock_buckets("billing", [5, 3])
        await holder.advance("billing", "bill", {"k": 1})
        following = asyncio.ensure_future(change([3], 2))
        await rest()
        assert not following.done(), "the second did not wait for the first"
    assert await following == 1, "the second did not see what the first had done"
    async with asyncio.timeout(20):
        await asyncio.gather(*(change([1, 2, 63] if number % 2 else [63, 2, 1], number) for number in range(8)))
