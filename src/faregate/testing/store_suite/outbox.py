"""Cases of the store suite: the outbox."""

import msgspec

from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.rows import aborted, case, ids, outgoing


@case
async def outgoing_messages_come_back_in_order_and_as_they_were(subject: StoreSubject) -> None:
    store, [cause] = subject.store, ids(1)
    rows = [outgoing("billing", cause, f"{number}", ordinal=number) for number in range(5)]
    async with store.transaction() as tx:
        seqs = await tx.send(rows)
        assert await tx.send([]) == []
        last = await tx.send([outgoing("billing", registered=("a",), chosen=("b",), not_after=5.0, version=3)])
    assert [*seqs, *last] == sorted({*seqs, *last}) and len(last) == 1, f"seqs {seqs}, then {last}"
    found = await store.undispatched(100)
    assert found[:5] == [row._replace(seq=seq) for row, seq in zip(rows, seqs, strict=True)], "not what was sent"
    assert found[5][7:] == (("a",), ("b",), 5.0, 3, None) and found[5].message_id is None, f"{found[5]}"
    assert [row.seq for row in await store.undispatched(2)] == seqs[:2], "the limit takes the first ones"


@case
async def dispatched_messages_leave_the_outbox_and_unknown_ones_are_fine(subject: StoreSubject) -> None:
    store = subject.store
    async with store.transaction() as tx:
        seqs = await tx.send([outgoing("billing") for _ in range(6)])
    for gone, left in (
        ([seqs[1]], 5),
        (seqs[2:4], 3),
        ([seqs[5], seqs[0], seqs[0]], 1),
        ([10**6, *seqs[:4]], 1),
        ([], 1),
    ):
        async with store.transaction() as tx:
            await tx.dispatched(gone)
        assert len(await store.undispatched(100)) == left, f"after {gone}"
    assert [row.seq for row in await store.undispatched(100)] == [seqs[4]]


@case
async def the_number_of_an_outgoing_message_is_never_used_again(subject: StoreSubject) -> None:
    store = subject.store
    used: list[int] = []
    for _ in range(3):
        async with store.transaction() as tx:
            new = await tx.send([outgoing("billing"), outgoing("billing")])
        assert min(new) > max(used, default=0), f"{new} after {used}"
        used += new
        async with store.transaction() as tx:
            await tx.dispatched(used)


@case
async def a_revised_row_keeps_its_place(subject: StoreSubject) -> None:
    store, [cause] = subject.store, ids(1)
    async with store.transaction() as tx:
        seqs = await tx.send([outgoing("billing", cause, text) for text in "abc"])
    rows = await store.undispatched(10)
    changed = [
        row._replace(envelope=msgspec.structs.replace(row.envelope, recipients=("shipping", "audit")), chosen=("a1",))
        for row in rows[1::-1]
    ]
    async with aborted(store) as tx:
        await tx.revise(changed)
    assert await store.undispatched(10) == rows, "a row was revised by a transaction that was rolled back"
    async with store.transaction() as tx:
        assert await tx.revise(changed) == set(seqs[:2])
    found = await store.undispatched(10)
    assert [row.seq for row in found] == seqs, "a revised row is in another place"
    assert found == [*(row._replace(version=1) for row in changed[::-1]), rows[2]], f"{found}"
    assert [row.seq for row in await store.outbox_rows_of("billing", cause)] == seqs


@case
async def rows_are_revised_only_from_the_version_that_was_read(subject: StoreSubject) -> None:
    store = subject.store
    async with store.transaction() as tx:
        await tx.send([outgoing("billing"), outgoing("billing")])
    first, second = await store.undispatched(10)
    async with store.transaction() as tx:
        assert await tx.revise([first._replace(chosen=("a1",))]) == {first.seq}
        late = [first._replace(chosen=("a2",)), first._replace(seq=10**6), second]
        assert await tx.revise(late) == {second.seq}, "revised from an old version, or without a row"
        assert await tx.revise([]) == set()
    assert [row.chosen for row in await store.undispatched(10)] == [("a1",), ()]


@case
async def rows_that_are_marked_as_dispatched_stay_until_they_are_removed(subject: StoreSubject) -> None:
    store, [cause, other] = subject.store, ids(2)
    async with store.transaction() as tx:
        seqs = await tx.send([outgoing("billing", cause), outgoing("billing", cause), outgoing("billing", other)])
        await tx.send([outgoing("shipping", cause)])
    await store.keep_dispatched([seqs[0], 10**6], 5.0)
    await store.keep_dispatched([seqs[0]], 6.0)
    assert seqs[0] not in [row.seq for row in await store.undispatched(10)]
    assert [(row.seq, row.dispatched_at) for row in await store.dispatched_rows(10)] == [(seqs[0], 5.0)]
    assert [row.seq for row in await store.outbox_rows_of("billing", cause)] == [seqs[1]]
    async with store.transaction() as tx:
        await tx.dispatched(seqs[:1])
    assert await store.dispatched_rows(10) == []


@case
async def what_waits_of_keys_is_found_up_to_a_place(subject: StoreSubject) -> None:
    store = subject.store
    rows = [
        outgoing("billing")._replace(key="a"),
        outgoing("billing")._replace(key=None),
        outgoing("shipping")._replace(key="b"),
        outgoing("billing")._replace(key="c"),
        outgoing("billing")._replace(key="d"),
    ]
    async with store.transaction() as tx:
        given = await tx.send(rows)
    seqs = list(given)
    await store.keep_dispatched(seqs[3:4], 10.0)
    found = [(seqs[0], "author.Noted", "a"), (seqs[2], "author.Noted", "b"), (seqs[4], "author.Noted", "d")]
    assert await store.keyed_before(seqs[4] + 1) == found
    assert await store.keyed_before(seqs[4]) == found[:2], "not only those before it"
    assert await store.keyed_before(seqs[4], ["billing", "stock"]) == found[:1], "another node's"
