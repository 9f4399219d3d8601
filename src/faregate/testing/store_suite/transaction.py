"""Cases of the store suite: transactions, savepoints, and the user's statements."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from faregate.errors import ConfigurationError, FaregateError, TransactionMisused
from faregate.ports.store import Store, Transaction
from faregate.testing.cases import refused
from faregate.testing.clock import rest
from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.rows import aborted, case, expect, ids, ledger, letter, outgoing


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
    assert await tx.take_business_key("billing", "bill", "order-17", 5.0)
    await tx.add_dead(letter("billing", dead))


async def expect_everything(store: Store, handled: str, dead: str, *, there: bool = True) -> None:
    """All of these records are there, or none of them."""
    known = await store.known("billing", [handled, dead])
    found = {
        "ledger": handled in known,
        "business data": await goods(store) == ["ticket"],
        "outbox": len(await store.undispatched(10)) == 1,
        "business key": await store.has_business_key("billing", "bill", "order-17"),
        "dead letter": dead in known,
    }
    assert set(found.values()) == {there}, f"{'not all' if there else 'some'} records are there: {found}"


@asynccontextmanager
async def failing(tx: Transaction, what: str) -> AsyncIterator[None]:
    """A savepoint in which something fails with the driver's own error; then it is undone."""
    await tx.savepoint()
    try:
        yield
    except FaregateError as exc:
        raise AssertionError(f"the user's own error was translated to {exc!r}") from exc
    except Exception:
        await tx.roll_back_to_savepoint()
        await tx.release_savepoint()
    else:
        raise AssertionError(f"{what} raised nothing")


# --- transactions -------------------------------------------------------------------------------------


@case
async def everything_in_a_transaction_is_committed_together(subject: StoreSubject) -> None:
    store, [handled, dead] = await prepared(subject), ids(2)
    async with store.transaction() as tx:
        await do_everything(tx, handled, dead)
    await expect_everything(store, handled, dead)


@case
async def a_transaction_that_is_rolled_back_leaves_nothing(subject: StoreSubject) -> None:
    store, [handled, dead] = await prepared(subject), ids(2)
    async with aborted(store) as tx:
        await do_everything(tx, handled, dead)
    await expect_everything(store, handled, dead, there=False)


@case
async def a_block_that_raises_is_rolled_back_and_its_error_is_passed_on(subject: StoreSubject) -> None:
    store, [handled, dead] = await prepared(subject), ids(2)
    with refused(LookupError, "the error of a block was swallowed"):
        async with store.transaction() as tx:
            await do_everything(tx, handled, dead)
            raise LookupError("the block fails")
    assert not tx.is_open, "a block that failed left its transaction open"
    await expect_everything(store, handled, dead, there=False)


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
    async with asyncio.timeout(5):
        await expect_everything(store, handled, dead, there=False)
        async with store.transaction() as after:
            await do_everything(after, handled, dead)
        await expect_everything(store, handled, dead)


@case
async def what_is_not_committed_is_not_read(subject: StoreSubject) -> None:
    store, [handled, dead] = await prepared(subject), ids(2)
    async with store.transaction() as tx:
        await do_everything(tx, handled, dead)
        assert await store.known("billing", [handled, dead]) == {}, "an open transaction's ledger row was read"
        assert await store.undispatched(10) == [], "an open transaction's outbox row was read"
        assert not await store.has_business_key("billing", "bill", "order-17"), "an open transaction's key was read"
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
    await expect_everything(again, handled, dead)
    assert again.database_id == store.database_id, "the same database has another id now"


# --- savepoints ---------------------------------------------------------------------------------------


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
async def a_statement_that_cannot_be_sent_takes_nothing_with_it_of_what_came_before(subject: StoreSubject) -> None:
    store, insert = await prepared(subject), "insert into goods (name) values (?)"

    async def write(sql: str, row: tuple[Any, ...]) -> None:
        tx.write(sql, row)
        await tx.flush()

    async def run_many(sql: str, row: tuple[Any, ...]) -> None:
        await tx.executemany(sql, [row])

    async with store.transaction() as tx:
        statements: list[Callable[..., Awaitable[Any]]] = [tx.execute, tx.fetchall, run_many, write]
        for number, run in enumerate(statements):
            await tx.savepoint()
            await tx.execute(insert, (f"kept {number}",))
            await tx.release_savepoint()
            async with failing(tx, "a parameter that is a plain object"):
                await run(insert, (object(),))
    assert await goods(store) == [f"kept {number}" for number in range(4)]


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
            async with failing(tx, repr(statement)):
                await tx.execute(statement)
    assert await goods(store) == ["once"]
    assert set(await store.known("billing", [first])) == {first}


@case
async def a_transaction_can_be_committed_right_after_undoing_a_failed_statement(subject: StoreSubject) -> None:
    store, [first] = await prepared(subject), ids(1)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(first)])
        async with failing(tx, "a statement on a table that is not there"):
            await tx.execute("insert into nowhere (x) values (1)")
    assert set(await store.known("billing", [first])) == {first}


# --- the user's statements ----------------------------------------------------------------------------


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
async def what_is_written_goes_out_in_order_before_whatever_follows(subject: StoreSubject) -> None:
    store = await prepared(subject)
    insert, rename = "insert into goods (name) values (?)", "update goods set name = ? where name = ?"
    async with store.transaction() as tx:
        tx.write(insert, ("a",))
        tx.write(rename, ("b", "a"))
        tx.write("insert into goods (name) values ('100 %')")
        assert await tx.fetchall("select name from goods order by name") == [("100 %",), ("b",)]
        tx.write(rename, ("c", "b"))
        assert await tx.execute(rename, ("d", "c")) == 1, "a statement came before what was written"
        for name in ("x", "y", "z"):
            tx.write(insert, (name,))
        assert await tx.executemany(rename, [("xx", "x"), ("yy", "y")]) == 2, "many came before what was written"
        tx.write(rename, ("zz", "z"))
        await tx.flush()
        tx.write(rename, ("e", "d"))
    assert await goods(store) == ["100 %", "e", "xx", "yy", "zz"], "the commit came before what was written"


@case
async def the_drivers_connection_comes_behind_what_was_written(subject: StoreSubject) -> None:
    store = await prepared(subject)
    async with aborted(store) as tx:
        tx.write("insert into goods (name) values (?)", ("a",))
        _ = tx.raw
        assert await tx.fetchall("select name from goods") == [("a",)]


@case
async def a_write_that_is_refused_raises_the_drivers_error_and_can_be_undone(subject: StoreSubject) -> None:
    store = await prepared(subject)
    insert = "insert into goods (name) values (?)"
    async with store.transaction() as tx:
        tx.write(insert, ("before",))
        async with failing(tx, "the same name twice"):
            tx.write(insert, ("a",))
            tx.write(insert, ("a",))
            await tx.flush()
        tx.write(insert, ("after",))
    assert await goods(store) == ["after", "before"]


@case
async def what_is_written_is_undone_with_its_savepoint_and_with_its_transaction(subject: StoreSubject) -> None:
    store = await prepared(subject)
    insert = "insert into goods (name) values (?)"
    async with store.transaction() as tx:
        tx.write(insert, ("kept",))
        await tx.savepoint()
        tx.write(insert, ("undone",))
        await tx.roll_back_to_savepoint()
        await tx.release_savepoint()
    async with aborted(store) as tx:
        tx.write(insert, ("rolled back",))
    async with aborted(store) as tx:
        tx.write(insert, ("rolled back, too",))
        await tx.flush()
    assert await goods(store) == ["kept"]


@case
async def a_write_that_ends_the_transaction_is_refused(subject: StoreSubject) -> None:
    store = await prepared(subject)
    for sql in ("commit", " /* so */ Rollback;", "savepoint mine"):
        async with aborted(store) as tx:
            tx.write("insert into goods (name) values ('x')")
            with refused(TransactionMisused, f"{sql} was accepted"):
                tx.write(sql)
                await tx.flush()
    assert await goods(store) == []


@case
async def a_schema_is_applied_whole_or_not_at_all(subject: StoreSubject) -> None:
    store = await prepared(subject)
    await store.apply_schema("create table one (a text); -- first;\ncreate table two (b text default ';');")
    async with aborted(store) as tx:
        assert await tx.fetchall("select * from one, two") == []
    broken = store.apply_schema("create table three (a text); create table one (a text)")
    await expect(ConfigurationError, broken, "a schema with an error in it")
    await store.apply_schema("create table three (a text)")
