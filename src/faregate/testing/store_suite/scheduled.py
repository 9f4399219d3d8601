"""Cases of the store suite: scheduled messages."""

import msgspec

from faregate.ports.store import SCHEDULE_KEY, OutboxRow
from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.rows import aborted, case, ids, outgoing


def _later(
    due: float, text: str = "x", node: str = "billing", name: str | None = None, cause: str | None = None
) -> OutboxRow:
    row = outgoing(node, cause, text, ordinal=3)
    headers = row.envelope.headers if name is None else {**row.envelope.headers, SCHEDULE_KEY: name}
    return row._replace(envelope=msgspec.structs.replace(row.envelope, deliver_at=due, headers=headers))


@case
async def scheduled_messages_leave_when_they_are_due_in_the_order_of_their_times(subject: StoreSubject) -> None:
    store, [cause] = subject.store, ids(1)
    rows = [_later(30, "c"), _later(10, "a", cause=cause), _later(10, "b"), _later(20, "z", node="shipping")]
    async with store.transaction() as tx:
        await tx.schedule(rows)
        await tx.schedule([])
    assert await store.next_due() == 10 and await store.next_due(["shipping"]) == 20
    assert await store.count_scheduled() == 4 and await store.count_scheduled(["shipping"]) == 1
    assert await store.scheduled(3) == [rows[1], rows[2], rows[3]] and await store.scheduled(9, ["stock"]) == []
    async with aborted(store) as tx:
        assert len(await tx.take_due(100, 10)) == 4
    async with store.transaction() as tx:
        assert await tx.take_due(9.9, 10) == [], "it was not due"
        assert await tx.take_due(25, 10, ["billing"]) == [rows[1], rows[2]], "not what was scheduled, or out of order"
        assert await tx.take_due(100, 1) == [rows[3]], "the limit takes the first ones"
    assert await store.next_due() == 30 and await store.undispatched(10) == []
    async with store.transaction() as tx:
        assert await tx.take_due(100, 10) == [rows[0]]
    assert await store.next_due() is None


@case
async def some_publications_count_as_due_and_some_do_not(subject: StoreSubject) -> None:
    store = subject.store
    rows = [_later(10, "a"), _later(10, "b"), _later(90, "c"), _later(90, "d")]
    async with store.transaction() as tx:
        await tx.schedule(rows)
        named = [row.envelope.publication_id for row in rows]
        assert await tx.take_due(20, 10, also=[named[2], "no-such-id"], but=[named[0]]) == [rows[1], rows[2]]


@case
async def what_is_cancelled_is_never_due(subject: StoreSubject) -> None:
    store = subject.store
    rows = [_later(10, "a"), _later(10, "b", name="order-17"), _later(10, "c", name="order-18")]
    first = rows[0].envelope.publication_id
    async with store.transaction() as tx:
        await tx.schedule(rows)
    async with aborted(store) as tx:
        assert await tx.cancel_scheduled("billing", (first, None)) == 1
    async with store.transaction() as tx:
        assert await tx.cancel_scheduled("shipping", (first, None)) == 0, "another node cancelled it"
        assert await tx.cancel_scheduled("billing", (first, None)) == 1, "a cancellation that was rolled back counted"
        assert await tx.cancel_scheduled("billing", (None, "order-17")) == 1
    async with store.transaction() as tx:
        assert await tx.cancel_scheduled("billing", (first, None)) == 0, "it was cancelled twice"
        assert await tx.take_due(100, 10, also=[first]) == [rows[2]]
        assert await tx.cancel_scheduled("billing", (None, "order-18")) == 0, "what has left was cancelled"
    assert await store.next_due() is None and await store.count_scheduled() == 0


@case
async def a_publication_is_scheduled_once_and_stays_cancelled(subject: StoreSubject) -> None:
    store = subject.store
    row, waiting = _later(10), _later(10)
    async with store.transaction() as tx:
        await tx.schedule([row, waiting])
        await tx.schedule([waiting])
        await tx.cancel_scheduled("billing", (row.envelope.publication_id, None))
        await tx.schedule([row])
    async with store.transaction() as tx:
        assert await tx.take_due(100, 10) == [waiting]
    await store.evict("billing", 10.0, 100)
    async with store.transaction() as tx:
        await tx.schedule([row])
        assert await tx.take_due(100, 10) == [], "what was cancelled was forgotten too early"
    await store.evict("billing", 10.5, 100)
    async with store.transaction() as tx:
        await tx.schedule([row])
        assert await tx.take_due(100, 10) == [row], "what was cancelled is remembered for ever"


@case
async def the_nodes_of_a_store_are_known(subject: StoreSubject) -> None:
    store = subject.store
    assert await store.known_nodes() == []
    await store.note_nodes(["shop", "billing"], 10.0)
    await store.note_nodes(["shop"], 20.0)
    assert await store.known_nodes() == ["billing", "shop"]


@case
async def what_is_not_sent_is_counted_by_node(subject: StoreSubject) -> None:
    store = subject.store
    async with store.transaction() as tx:
        given = await tx.send([outgoing("billing"), outgoing("shop"), outgoing("billing")])
    seqs = list(given)
    assert await store.unsent() == {"billing": (2, seqs[0]), "shop": (1, seqs[1])}
    await store.keep_dispatched(seqs[:1], 5.0)
    assert await store.unsent() == {"billing": (1, seqs[2]), "shop": (1, seqs[1])}
