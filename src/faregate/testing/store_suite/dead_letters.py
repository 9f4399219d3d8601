"""Cases of the store suite: dead letters."""

from faregate.message import Envelope
from faregate.ports.store import DeadFilter, Known
from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.rows import case, ids, ledger, letter


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
    times = {"first_failed_at": 20.0, "last_failed_at": 20.0}
    anew = Envelope(publication_id="p", body=b"new")
    again = letter("billing", dead, reason="expired", error="late", tries=4, redeliveries=9, envelope=anew, **times)
    async with store.transaction() as tx:
        await tx.add_dead(letter("billing", dead, replays=2))
        await tx.set_dead_status("billing", dead, "replayed", by="operator", at=15.0)
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
        await tx.set_dead_status("billing", dead, "discarded", by="operator", at=15.0)
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
        assert await tx.set_dead_status("billing", unknown, "discarded", by="operator", at=1.0) is None
        for replays in (1, 2):
            changed = await tx.set_dead_status("billing", dead, "replayed", by="operator", at=2.0)
            assert changed is not None and (changed.replays, changed.status) == (replays, "replayed"), f"{changed!r}"
            assert (changed.changed_by, changed.changed_at) == ("operator", 2.0)
        changed = await tx.set_dead_status("billing", dead, "discarded", by="other", at=3.0)
        assert changed is not None and (changed.replays, changed.status) == (2, "discarded"), f"{changed!r}"
        assert changed.changed_by == "other"
        assert await tx.set_dead_status("billing", dead, "replayed", by="operator", at=4.0) is None, "it was discarded"


@case
async def dead_letters_are_found_by_what_is_asked_for(subject: StoreSubject) -> None:
    store, given = subject.store, ids(4)
    async with store.transaction() as tx:
        await tx.add_dead(letter("billing", given[0], last_failed_at=40.0))
        await tx.add_dead(letter("billing", given[1], last_failed_at=30.0, type="Other"))
        await tx.add_dead(letter("billing", given[2], last_failed_at=20.0, reason="expired"))
        await tx.add_dead(letter("shipping", given[3], last_failed_at=10.0))
        await tx.set_dead_status("billing", given[2], "discarded", by="operator", at=50.0)

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
        await tx.set_dead_status("billing", given[2], "replayed", by="operator", at=20.0)
        await tx.resolve("billing", [given[3]], 20.0)
    async with store.transaction() as tx:
        assert await tx.remove_dead([]) == 0
        assert await tx.remove_dead([read[message_id] for message_id in given[:4]]) == 1, "others had changed"
        assert await tx.remove_dead([read[given[0]]]) == 0, "it was gone"
    left = [(one.node, given.index(one.message_id)) for one in await store.dead(DeadFilter())]
    assert sorted(left) == [("billing", 1), ("billing", 2), ("billing", 3), ("billing", 4), ("shipping", 0)], f"{left}"
    assert await store.known("billing", [given[0]]) == {}, "it is known as dead"
