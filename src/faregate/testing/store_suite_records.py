"""The store suite, second part: outbox, identities, dead letters, retention, and the records of mode `tokens`."""

import asyncio

import msgspec

from faregate.message import Envelope
from faregate.ports.store import ClaimRecord, DeadFilter, Known
from faregate.ports.tokens import Token
from faregate.testing.store_rows import aborted, case, ids, ledger, letter, outgoing
from faregate.testing.store_subjects import StoreSubject

# --- outbox -----------------------------------------------------------------------------------------------


@case
async def outgoing_messages_come_back_in_order_and_as_they_were(subject: StoreSubject) -> None:
    store, [cause] = subject.store, ids(1)
    rows = [outgoing("billing", cause, f"{number}", ordinal=number) for number in range(5)]
    async with store.transaction() as tx:
        seqs = await tx.send(rows)
        assert await tx.send([]) == []
        [last] = await tx.send([outgoing("billing", registered=("a",), chosen=("b",), not_after=5.0, version=3)])
    assert seqs == sorted(set(seqs)) and last > seqs[-1], f"seqs {seqs}, then {last}"
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


# --- identities -------------------------------------------------------------------------------------------


@case
async def a_business_key_is_claimed_once_per_handler(subject: StoreSubject) -> None:
    store = subject.store
    async with store.transaction() as tx:
        assert await tx.identify("billing", "bill", "order-17", 1.0)
        assert not await tx.identify("billing", "bill", "order-17", 2.0), "claimed twice"
        assert await tx.identify("billing", "remind", "order-17", 1.0), "another handler"
        assert await tx.identify("shipping", "bill", "order-17", 1.0), "another node"
    async with store.transaction() as tx:
        assert not await tx.identify("billing", "bill", "order-17", 3.0), "claimed twice, in two transactions"
        await tx.unidentify("billing", "remind", "order-17")
    assert await store.has_identity("billing", "bill", "order-17")
    assert not await store.has_identity("billing", "remind", "order-17"), "it was given back"


# --- dead letters -----------------------------------------------------------------------------------------


@case
async def a_dead_letter_comes_back_as_it_was_and_is_known_as_dead(subject: StoreSubject) -> None:
    store, [dead] = subject.store, ids(1)
    added = letter("billing", dead, key="k", tries=3, redeliveries=2, error="Boom\nin line 1", replays=1)
    async with store.transaction() as tx:
        assert await tx.add_dead(added) == added
    assert await store.dead(DeadFilter()) == [added]
    assert await store.known("billing", [dead]) == {dead: Known("dead", None, 1)}
    assert await store.known("shipping", [dead]) == {}, "it is another node's"
    async with store.transaction() as tx:
        assert await tx.record("billing", [ledger(dead)]) == {}, "a dead letter left a ledger row"


@case
async def another_failure_folds_into_the_dead_letter(subject: StoreSubject) -> None:
    store, [dead] = subject.store, ids(1)
    again = letter(
        "billing",
        dead,
        reason="expired",
        error="late",
        tries=4,
        redeliveries=9,
        last_failed_at=20.0,
        first_failed_at=20.0,
    )
    again.envelope = Envelope(publication_id="p", body=b"new")
    async with store.transaction() as tx:
        await tx.add_dead(letter("billing", dead, replays=2))
        await tx.mark_dead("billing", dead, "replayed", by="operator", at=15.0)
        folded = await tx.add_dead(again)
    assert [folded] == await store.dead(DeadFilter(node="billing")), "what it returned is not what is there"
    assert (folded.copies, folded.status, folded.replays) == (2, "open", 3), f"{folded!r}"
    assert (folded.reason, folded.error, folded.tries, folded.redeliveries) == ("expired", "late", 4, 9)
    assert (folded.first_failed_at, folded.last_failed_at, folded.envelope.body) == (10.0, 20.0, b"new")
    async with store.transaction() as tx:
        await tx.fold("billing", dead)
    [counted] = await store.dead(DeadFilter())
    assert (counted.copies, counted.error) == (3, "late"), f"{counted!r}"


@case
async def a_discarded_dead_letter_only_counts_its_copies(subject: StoreSubject) -> None:
    store, [dead] = subject.store, ids(1)
    async with store.transaction() as tx:
        await tx.add_dead(letter("billing", dead))
        await tx.mark_dead("billing", dead, "discarded", by="operator", at=15.0)
        folded = await tx.add_dead(letter("billing", dead, error="new", reason="other", tries=9, last_failed_at=20.0))
    assert (folded.copies, folded.status, folded.error, folded.reason) == (2, "discarded", "ValueError: no", "failed")
    assert (folded.tries, folded.last_failed_at) == (0, 10.0), f"{folded!r}"
    known = await store.known("billing", [dead])
    assert known == {dead: Known("discarded", None, 0)}, f"a discarded message is not known as such: {known!r}"


@case
async def a_message_that_is_handled_after_all_resolves_its_dead_letter(subject: StoreSubject) -> None:
    store, [dead, handled, other] = subject.store, ids(3)
    async with store.transaction() as tx:
        for message_id in (dead, other):
            await tx.add_dead(letter("billing", message_id))
    async with store.transaction() as tx:
        await tx.resolve("billing", [dead, handled], 30.0)
    [resolved] = await store.dead(DeadFilter(message_id=dead))
    assert (resolved.status, resolved.changed_at) == ("resolved", 30.0), f"{resolved!r}"
    assert set(await store.known("billing", [dead, handled, other])) == {other}, "a resolved one is known as dead"
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(dead, b"d")])
    assert await store.known("billing", [dead]) == {dead: Known("handled", b"d")}


@case
async def an_operator_changes_only_what_waits_for_a_decision(subject: StoreSubject) -> None:
    store, [dead, unknown] = subject.store, ids(2)
    async with store.transaction() as tx:
        await tx.add_dead(letter("billing", dead))
        assert await tx.mark_dead("billing", unknown, "discarded", by="operator", at=1.0) is None
        for replays in (1, 2):
            changed = await tx.mark_dead("billing", dead, "replayed", by="operator", at=2.0)
            assert changed is not None and (changed.replays, changed.status) == (replays, "replayed"), f"{changed!r}"
            assert (changed.changed_by, changed.changed_at) == ("operator", 2.0)
        changed = await tx.mark_dead("billing", dead, "discarded", by="other", at=3.0)
        assert changed is not None and (changed.replays, changed.status, changed.changed_by) == (
            2,
            "discarded",
            "other",
        )
        assert await tx.mark_dead("billing", dead, "replayed", by="operator", at=4.0) is None, "it was discarded"


@case
async def dead_letters_are_found_by_what_is_asked_for(subject: StoreSubject) -> None:
    store, given = subject.store, ids(4)
    async with store.transaction() as tx:
        await tx.add_dead(letter("billing", given[0], last_failed_at=40.0))
        await tx.add_dead(letter("billing", given[1], last_failed_at=30.0, type="Other"))
        await tx.add_dead(letter("billing", given[2], last_failed_at=20.0, reason="expired"))
        await tx.add_dead(letter("shipping", given[3], last_failed_at=10.0))
        await tx.mark_dead("billing", given[2], "discarded", by="operator", at=50.0)

    async def found(limit: int = 1000, **which: object) -> list[int]:
        letters = await store.dead(DeadFilter(**which), limit)  # type: ignore[arg-type]
        return [given.index(one.message_id) for one in letters]

    assert await found() == [3, 2, 1, 0], "not the oldest last failure first"
    assert await found(2) == [3, 2]
    assert await found(node="shipping") == [3]
    assert await found(type="Other") == [1]
    assert await found(reason="expired") == [2]
    assert await found(status="open", node="billing") == [1, 0]
    assert await found(message_id=given[0]) == [0]
    assert await found(since=30.0) == [1, 0]
    assert await found(before=30.0) == [3], "a decision counts as a failure does"
    assert await found(before=50.1) == [3, 2, 1, 0]


@case
async def a_dead_letter_is_removed_only_as_it_was_read(subject: StoreSubject) -> None:
    store, given = subject.store, ids(5)
    async with store.transaction() as tx:
        for message_id in given:
            await tx.add_dead(letter("billing", message_id))
        await tx.add_dead(letter("shipping", given[0]))
    read = {one.message_id: one for one in await store.dead(DeadFilter(node="billing"))}
    async with store.transaction() as tx:
        await tx.fold("billing", given[1])
        await tx.mark_dead("billing", given[2], "replayed", by="operator", at=20.0)
        await tx.resolve("billing", [given[3]], 20.0)
    async with store.transaction() as tx:
        assert await tx.remove_dead([]) == 0
        assert await tx.remove_dead([read[message_id] for message_id in given[:4]]) == 1, "others had changed"
        assert await tx.remove_dead([read[given[0]]]) == 0, "it was gone"
    left = [(one.node, given.index(one.message_id)) for one in await store.dead(DeadFilter())]
    assert sorted(left) == [("billing", 1), ("billing", 2), ("billing", 3), ("billing", 4), ("shipping", 0)], f"{left}"
    assert await store.known("billing", [given[0]]) == {}, "it is known as dead"


# --- retention --------------------------------------------------------------------------------------------


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
    await store.mark_dispatched([seqs[1]], 5.0)
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
        for identity, at in (("old", 1.0), ("new", 20.0)):
            await tx.identify("billing", "bill", identity, at)
        await tx.identify("shipping", "bill", "old", 1.0)
    await store.evict("billing", 10.0, 100)
    assert not await store.has_identity("billing", "bill", "old")
    assert await store.has_identity("billing", "bill", "new")
    assert await store.has_identity("shipping", "bill", "old")


# --- mode `tokens` ----------------------------------------------------------------------------------------


@case
async def a_claim_is_inserted_once_and_finished_once(subject: StoreSubject) -> None:
    store, [message_id] = subject.store, ids(1)
    assert await store.claim_record("billing", message_id) is None
    assert await store.insert_claim("billing", message_id, "c1", "a1", 5.0)
    assert not await store.insert_claim("billing", message_id, "c2", "a2", 6.0), "a claim was inserted over another"
    expected = ClaimRecord("billing", message_id, "c1", "a1", "NEW", 5.0)
    assert await store.claim_record("billing", message_id) == expected
    async with aborted(store) as tx:
        assert await tx.finish_claim("billing", message_id, "c1")
    async with store.transaction() as tx:
        assert not await tx.finish_claim("billing", message_id, "c2"), "finished with another claim"
        assert await tx.finish_claim("billing", message_id, "c1"), "what was rolled back counts"
        assert not await tx.finish_claim("billing", message_id, "c1"), "finished twice"
    assert await store.claim_record("billing", message_id) == expected._replace(state="DONE")


@case
async def a_claim_is_deleted_only_by_its_holder(subject: StoreSubject) -> None:
    store, [new, done] = subject.store, ids(2)
    for message_id in (new, done):
        await store.insert_claim("billing", message_id, "c1", "a1", 5.0)
    async with store.transaction() as tx:
        await tx.finish_claim("billing", done, "c1")
    assert not await store.delete_claim("billing", new, "c2", only_new=True), "deleted by another claim"
    assert not await store.delete_claim("billing", done, "c1", only_new=True), "deleted though it was done"
    assert await store.delete_claim("billing", new, "c1", only_new=True)
    assert not await store.delete_claim("billing", new, "c1", only_new=True), "deleted twice"
    assert await store.delete_claim("billing", done, "c1", only_new=False)


@case
async def old_claims_are_found_oldest_first(subject: StoreSubject) -> None:
    store, given = subject.store, ids(3)
    for message_id, at in zip(given, (3.0, 1.0, 2.0), strict=True):
        await store.insert_claim("billing", message_id, "c", "a", at)
    assert [given.index(record.message_id) for record in await store.claim_records(3.0, 10)] == [1, 2]
    assert [given.index(record.message_id) for record in await store.claim_records(9.0, 1)] == [1]


@case
async def attempts_change_only_from_the_version_that_was_read(subject: StoreSubject) -> None:
    store, [cause] = subject.store, ids(1)
    async with store.transaction() as tx:
        seq, other = await tx.send([outgoing("billing", cause), outgoing("billing", cause)])
    assert await store.register_attempts(seq, 0, ["a1", "a2"], 50.0)
    assert not await store.register_attempts(seq, 0, ["a3"], 60.0), "registered from an old version"
    assert await store.register_attempts(seq, 1, ["a3"], 70.0)
    assert not await store.choose_attempts(seq, 1, ["a1"]), "chosen from an old version"
    assert await store.choose_attempts(seq, 2, ["a3"])
    assert not await store.choose_attempts(seq, 2, ["a1"]), "chosen twice"
    assert not await store.register_attempts(10**6, 0, ["a"], 1.0), "there is no such row"
    row = await store.outbox_row(seq)
    assert row is not None and row[7:] == (("a1", "a2", "a3"), ("a3",), 70.0, 3, None), f"{row}"
    unchanged = await store.outbox_row(other)
    assert unchanged is not None and unchanged.version == 0, "another row changed"
    assert await store.outbox_row(10**6) is None


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
async def of_two_that_choose_at_once_one_wins(subject: StoreSubject) -> None:
    async with subject.store.transaction() as tx:
        [seq] = await tx.send([outgoing("billing")])
    tries = [subject.store.choose_attempts(seq, 0, [f"a{number}"]) for number in range(5)]
    assert sorted(await asyncio.gather(*tries)) == [False] * 4 + [True]


@case
async def rows_that_are_marked_as_dispatched_stay_until_they_are_removed(subject: StoreSubject) -> None:
    store, [cause, other] = subject.store, ids(2)
    async with store.transaction() as tx:
        seqs = await tx.send([outgoing("billing", cause), outgoing("billing", cause), outgoing("billing", other)])
        await tx.send([outgoing("shipping", cause)])
    await store.mark_dispatched([seqs[0], 10**6], 5.0)
    await store.mark_dispatched([seqs[0]], 6.0)
    assert seqs[0] not in [row.seq for row in await store.undispatched(10)]
    assert [(row.seq, row.dispatched_at) for row in await store.dispatched_rows(10)] == [(seqs[0], 5.0)]
    assert [row.seq for row in await store.outbox_rows_of("billing", cause)] == [seqs[1]]
    async with store.transaction() as tx:
        await tx.dispatched(seqs[:1])
    assert await store.dispatched_rows(10) == []


@case
async def tokens_are_created_and_consumed_with_the_transaction(subject: StoreSubject) -> None:
    store, [message_id] = subject.store, ids(1)
    now = subject.now()
    made = [Token(attempt, message_id, "shipping", "billing", now, now + 3600) for attempt in ("a1", "a2", "a3")]
    late = Token("late", message_id, "shipping", "billing", now, now - 3600)
    async with store.transaction() as tx:
        await tx.create_tokens([*made, late])
        await tx.create_tokens(made[:1])
    async with aborted(store) as tx:
        assert await tx.consume_tokens(["a3", "a1"]) == {"a1", "a3"}
    async with store.transaction() as tx:
        found = await tx.consume_tokens(["late", "a3", "unknown", "a1"])
        assert found == {"a1", "a3"}, f"{found} were there"
    async with store.transaction() as tx:
        assert await tx.consume_tokens(["a1", "a2"]) == {"a2"}, "a token was consumed twice"
