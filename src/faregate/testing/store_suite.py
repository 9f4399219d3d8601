"""What every store promises, as named cases; used like `queue_suite`:

    @pytest.mark.parametrize("name", STORE_CASES)
    async def test_memory(name):
        await run_store_case(name, memory_store_subject)

A case raises AssertionError when the promise is broken. There are no capability flags: a store keeps all of them. The
cases about dead letters, retention and mode `tokens` are in `store_suite_records`, and are part of `STORE_CASES`.
"""

import asyncio
from typing import Any

from faregate.errors import ConfigurationError, FaregateError, TransactionMisused
from faregate.ports.store import Sent, Store, Transaction
from faregate.testing import store_suite_records as _records
from faregate.testing.clock import rest
from faregate.testing.store_rows import (
    STORE_CASES,
    aborted,
    case,
    expect,
    ids,
    ledger,
    letter,
    outgoing,
)
from faregate.testing.store_subjects import MakeStore, StoreSubject

__all__ = ["STORE_CASES", "run_store_case"]
assert _records.__name__ in {case.__module__ for case in STORE_CASES.values()}


async def run_store_case(name: str, make: MakeStore) -> None:
    """Run one case against a fresh subject."""
    async with make() as subject:
        await asyncio.wait_for(STORE_CASES[name](subject), timeout=30)


async def goods(store: Store) -> list[Any]:
    """What is committed in the table that the cases use as business data."""
    async with aborted(store) as tx:
        return [name for (name,) in await tx.fetchall("select name from goods order by name")]


async def prepared(subject: StoreSubject) -> Store:
    await subject.store.apply_schema("create table if not exists goods (name text primary key)")
    return subject.store


async def do_everything(tx: Transaction, handled: str, dead: str) -> None:
    """One of each kind of record."""
    assert await tx.record("billing", [ledger(handled)]) == {}
    await tx.execute("insert into goods (name) values (?)", ("ticket",))
    await tx.send([outgoing("billing", handled)])
    assert await tx.identify("billing", "bill", "order-17", 5.0)
    await tx.add_dead(letter("billing", dead))


async def what_is_there(store: Store, handled: str, dead: str) -> list[bool]:
    known = await store.known("billing", [handled, dead])
    return [
        handled in known,
        await goods(store) == ["ticket"],
        len(await store.undispatched(10)) == 1,
        await store.has_identity("billing", "bill", "order-17"),
        dead in known,
    ]


# --- transactions -----------------------------------------------------------------------------------------


@case
async def everything_in_a_transaction_is_committed_together(subject: StoreSubject) -> None:
    store, [handled, dead] = await prepared(subject), ids(2)
    async with store.transaction() as tx:
        await do_everything(tx, handled, dead)
    there = await what_is_there(store, handled, dead)
    assert all(there), f"ledger, business data, outbox, identity, dead letter: {there}"


@case
async def a_transaction_that_is_rolled_back_leaves_nothing(subject: StoreSubject) -> None:
    store, [handled, dead] = await prepared(subject), ids(2)
    async with aborted(store) as tx:
        await do_everything(tx, handled, dead)
    there = await what_is_there(store, handled, dead)
    assert not any(there), f"ledger, business data, outbox, identity, dead letter: {there}"


@case
async def a_block_that_raises_is_rolled_back_and_its_error_is_passed_on(subject: StoreSubject) -> None:
    store, [handled, dead] = await prepared(subject), ids(2)
    try:
        async with store.transaction() as tx:
            await do_everything(tx, handled, dead)
            raise LookupError("the block fails")
    except LookupError:
        pass
    else:
        raise AssertionError("the error of a block was swallowed")
    assert not tx.is_open, "a block that failed left its transaction open"
    there = await what_is_there(store, handled, dead)
    assert not any(there), f"ledger, business data, outbox, identity, dead letter: {there}"


@case
async def a_block_that_is_cancelled_is_rolled_back_and_the_store_goes_on(subject: StoreSubject) -> None:
    store, [handled, dead], inside = await prepared(subject), ids(2), asyncio.Event()

    async def work() -> None:
        async with store.transaction() as tx:
            await do_everything(tx, handled, dead)
            inside.set()
            await asyncio.Event().wait()

    working = asyncio.ensure_future(work())
    await inside.wait()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    assert working.cancelled(), "a block kept its cancellation for itself"
    there = await what_is_there(store, handled, dead)
    assert not any(there), f"ledger, business data, outbox, identity, dead letter: {there}"
    async with asyncio.timeout(5), store.transaction() as after:
        await do_everything(after, handled, dead)
    assert all(await what_is_there(store, handled, dead)), "the store does not go on"


@case
async def what_is_not_committed_is_not_read(subject: StoreSubject) -> None:
    store, [handled, dead] = await prepared(subject), ids(2)
    async with store.transaction() as tx:
        await do_everything(tx, handled, dead)
        assert await store.known("billing", [handled, dead]) == {}, "an open transaction's ledger row was read"
        assert await store.undispatched(10) == [], "an open transaction's outbox row was read"
        assert not await store.has_identity("billing", "bill", "order-17"), "an open transaction's identity was read"
    assert set(await store.known("billing", [handled, dead])) == {handled, dead}


@case
async def ending_a_transaction_once_more_does_nothing(subject: StoreSubject) -> None:
    store, [first] = await prepared(subject), ids(1)
    tx = store.transaction()
    assert not tx.is_open, "it is open before it was begun"
    await tx.begin()
    assert tx.is_open, "it is not open though it was begun"
    await tx.record("billing", [ledger(first)])
    assert tx.is_open, "it is not open after a statement"
    await tx.commit()
    assert not tx.is_open, "it is open after its commit"
    await tx.commit()
    await tx.roll_back()
    assert set(await store.known("billing", [first])) == {first}


@case
async def a_transaction_that_has_ended_cannot_be_used(subject: StoreSubject) -> None:
    store = await prepared(subject)
    async with store.transaction() as tx:
        pass
    await expect(TransactionMisused, tx.execute("insert into goods (name) values ('late')"), "a late statement")
    await expect(TransactionMisused, tx.record("billing", [ledger(ids(1)[0])]), "a late ledger row")
    assert await goods(store) == []


@case
async def a_statement_that_ends_the_transaction_is_refused(subject: StoreSubject) -> None:
    store = await prepared(subject)
    async with aborted(store) as tx:
        await tx.execute("insert into goods (name) values ('x')")
        for sql in ("commit", " /* so */ -- or so\n Commit;", "rollback", "END", "savepoint mine", "BEGIN"):
            await expect(TransactionMisused, tx.execute(sql), sql)
            await expect(TransactionMisused, tx.fetchall(sql), sql)
            await expect(TransactionMisused, tx.executemany(sql, [()]), sql)
        assert tx.is_open
    assert await goods(store) == [], "it was committed by a statement"


@case
async def a_cancelled_commit_is_whole_or_nothing_and_the_store_goes_on(subject: StoreSubject) -> None:
    store = await prepared(subject)
    for turns in range(6):
        handled, dead = ids(2)
        tx = store.transaction()
        await tx.begin()
        await tx.record("billing", [ledger(handled)])
        await tx.execute("insert into goods (name) values (?)", (handled,))
        committing = asyncio.ensure_future(tx.commit())
        for _ in range(turns):
            await asyncio.sleep(0)
        committing.cancel()
        await asyncio.gather(committing, return_exceptions=True)
        await tx.roll_back()
        async with asyncio.timeout(5), store.transaction() as after:
            await after.record("billing", [ledger(dead)])
        known = await store.known("billing", [handled, dead])
        assert dead in known, "the store does not go on after a cancelled commit"
        assert (handled in known) == (handled in await goods(store)), "half of a cancelled commit is there"


@case
async def who_is_cancelled_while_waiting_to_begin_holds_nothing_up(subject: StoreSubject) -> None:
    store, [first] = await prepared(subject), ids(1)

    async def visit() -> None:
        async with aborted(store):
            await asyncio.Event().wait()

    async with store.transaction():
        waiting = [asyncio.ensure_future(visit()) for _ in range(20)]
        await rest()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(5), store.transaction() as tx:
        await tx.record("billing", [ledger(first)])
    assert set(await store.known("billing", [first])) == {first}


@case
async def what_is_committed_is_there_after_reopening(subject: StoreSubject) -> None:
    if subject.reopen is None:
        return
    store, [handled, dead] = await prepared(subject), ids(2)
    async with store.transaction() as tx:
        await do_everything(tx, handled, dead)
    await store.close()
    await store.close()
    again = await subject.reopen()
    await prepared(subject)
    assert all(await what_is_there(again, handled, dead)), "a committed record is gone"
    assert again.database_id == store.database_id, "the same database has another id now"


# --- savepoints -------------------------------------------------------------------------------------------


@case
async def a_savepoint_undoes_what_came_after_it_and_nothing_else(subject: StoreSubject) -> None:
    store, [first, second] = await prepared(subject), ids(2)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(first)])
        await tx.savepoint()
        await tx.record("billing", [ledger(second)])
        await tx.execute("insert into goods (name) values ('undone')")
        await tx.send([outgoing("billing", second)])
        await tx.roll_back_to_savepoint()
        await tx.execute("insert into goods (name) values ('kept')")
        await tx.release_savepoint()
    assert set(await store.known("billing", [first, second])) == {first}
    assert await goods(store) == ["kept"]
    assert await store.undispatched(10) == []


@case
async def a_savepoint_can_be_remade_again_and_again(subject: StoreSubject) -> None:
    store = await prepared(subject)
    async with store.transaction() as tx:
        for number in range(6):
            await tx.savepoint()
            await tx.execute("insert into goods (name) values (?)", (f"try {number}",))
            if number % 2:
                await tx.roll_back_to_savepoint()
            await tx.release_savepoint()
    assert await goods(store) == ["try 0", "try 2", "try 4"]


@case
async def rows_removed_from_the_outbox_before_a_savepoint_stay_removed(subject: StoreSubject) -> None:
    store = await prepared(subject)
    async with store.transaction() as tx:
        seqs = await tx.send([outgoing("billing"), outgoing("billing")])
    async with store.transaction() as tx:
        await tx.dispatched(seqs[:1])
        await tx.savepoint()
        await tx.dispatched(seqs[1:])
        await tx.roll_back_to_savepoint()
        await tx.release_savepoint()
    assert [row.seq for row in await store.undispatched(10)] == seqs[1:]


@case
async def a_failed_statement_is_the_drivers_own_error_and_can_be_undone(subject: StoreSubject) -> None:
    store, [first] = await prepared(subject), ids(1)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(first)])
        await tx.execute("insert into goods (name) values ('once')")
        for statement in ("insert into goods (name) values ('once')", "insert into nowhere (x) values (1)", "selec 1"):
            await tx.savepoint()
            try:
                await tx.execute(statement)
            except FaregateError as exc:
                raise AssertionError(f"the user's own error was translated to {exc!r}") from exc
            except Exception:
                pass
            else:
                raise AssertionError(f"{statement!r} raised nothing")
            await tx.roll_back_to_savepoint()
            await tx.release_savepoint()
    assert await goods(store) == ["once"]
    assert set(await store.known("billing", [first])) == {first}


@case
async def a_transaction_can_be_committed_right_after_undoing_a_failed_statement(subject: StoreSubject) -> None:
    store, [first] = await prepared(subject), ids(1)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(first)])
        await tx.savepoint()
        try:
            await tx.execute("insert into nowhere (x) values (1)")
        except Exception:
            await tx.roll_back_to_savepoint()
            await tx.release_savepoint()
    assert set(await store.known("billing", [first])) == {first}


# --- the user's statements --------------------------------------------------------------------------------


@case
async def a_question_mark_is_a_parameter_outside_of_quotes(subject: StoreSubject) -> None:
    async with aborted(await prepared(subject)) as tx:
        sql = "select '?', '100 %', 'it''s ?', cast(? as text) as \"a ?\" -- why?\n /* ? */"
        assert await tx.fetchone(sql, ("x",)) == ("?", "100 %", "it's ?", "x")
        assert await tx.fetchone("select '?', '100 %'") == ("?", "100 %"), "without parameters"


@case
async def statements_tell_how_many_rows_they_changed(subject: StoreSubject) -> None:
    async with aborted(await prepared(subject)) as tx:
        changed = await tx.executemany("insert into goods (name) values (?)", [("a",), ("b",), ("c",)])
        assert changed == 3, f"three inserts changed {changed}"
        assert await tx.executemany("insert into goods (name) values (?)", []) == 0
        assert await tx.execute("delete from goods where name > ?", ("a",)) == 2
        assert await tx.fetchall("select name from goods") == [("a",)]
        assert await tx.fetchone("select name from goods where name = ?", ("z",)) is None


@case
async def a_schema_is_applied_whole_or_not_at_all(subject: StoreSubject) -> None:
    store = await prepared(subject)
    await store.apply_schema("create table one (a text); -- first;\ncreate table two (b text default ';');")
    async with aborted(store) as tx:
        assert await tx.fetchall("select * from one, two") == []
    broken = store.apply_schema("create table three (a text); create table one (a text)")
    await expect(ConfigurationError, broken, "a schema with an error in it")
    await store.apply_schema("create table three (a text)")


# --- ledger -----------------------------------------------------------------------------------------------


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
async def what_a_handler_sent_is_kept_in_its_ledger_row(subject: StoreSubject) -> None:
    store, given = subject.store, ids(4)
    combined = [bytes([number]) * 16 for number in range(3)]
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(message_id) for message_id in given])
        await tx.record("shipping", [ledger(given[0])])
        await tx.note_sent("billing", [Sent(given[1], 1, combined[1]), Sent(given[2], 70_000, combined[2])])
        await tx.note_sent("billing", [])
    async with aborted(store) as tx:
        await tx.record("stock", [ledger(given[0])])
        await tx.note_sent("stock", [Sent(given[0], 5, combined[0])])
    async with aborted(store) as tx:
        rows = await tx.fetchall("select node, sent, sent_ids from faregate_ledger order by node, message_id")
    billing = [(0, None), (1, combined[1]), (70_000, combined[2]), (0, None)]
    assert rows == [*(("billing", *each) for each in billing), ("shipping", 0, None)], f"{rows}"


@case
async def who_comes_second_waits_for_the_first_and_is_told(subject: StoreSubject) -> None:
    store = await prepared(subject)
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
