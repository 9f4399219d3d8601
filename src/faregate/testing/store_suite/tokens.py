"""Cases of the store suite: the records of mode `tokens`."""

import asyncio

from faregate.ports.store import ClaimRecord
from faregate.ports.tokens import Token
from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.rows import aborted, case, ids, outgoing


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
async def claims_that_are_done_are_found_and_deleted_together(subject: StoreSubject) -> None:
    store, [done, again, new, others] = subject.store, ids(4)
    for node, message_id in (("billing", done), ("billing", again), ("billing", new), ("shipping", others)):
        await store.insert_claim(node, message_id, "c1", f"a-{message_id}", 5.0)
    async with store.transaction() as tx:
        for node, message_id in (("billing", done), ("billing", again), ("shipping", others)):
            await tx.finish_claim(node, message_id, "c1")
    found = await store.done_claims("billing")
    assert {record.message_id for record in found} == {done, again}, "done is what is DONE, and this node's"
    assert {record.attempt_id for record in found} == {f"a-{done}", f"a-{again}"}
    await store.delete_claim("billing", again, "c1", only_new=False)
    await store.insert_claim("billing", again, "c2", "a2", 6.0)
    async with aborted(store) as tx:
        assert await tx.delete_claims(found) == 1
    async with store.transaction() as tx:
        assert await tx.delete_claims(found) == 1, "a newer claim on the message was deleted, or none"
        assert await tx.delete_claims([]) == 0
    assert await store.claim_record("billing", done) is None
    for node, message_id in (("billing", again), ("billing", new), ("shipping", others)):
        assert await store.claim_record(node, message_id) is not None


@case
async def attempts_change_only_from_the_version_that_was_read(subject: StoreSubject) -> None:
    store, [cause] = subject.store, ids(1)
    async with store.transaction() as tx:
        seqs = await tx.send([outgoing("billing", cause), outgoing("billing", cause)])
    seq, other = seqs
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
async def of_two_that_choose_at_once_one_wins(subject: StoreSubject) -> None:
    async with subject.store.transaction() as tx:
        seqs = await tx.send([outgoing("billing")])
    tries = [subject.store.choose_attempts(seqs[0], 0, [f"a{number}"]) for number in range(5)]
    assert sorted(await asyncio.gather(*tries)) == [False] * 4 + [True]


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
