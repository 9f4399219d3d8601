"""Cases for stores that have a reader: their tables read as they lie, without an event loop."""

import copy
from typing import Any

from faregate.errors import ConfigurationError
from faregate.ports.store import COLUMNS, Parked, Readable, Sent, StoreReader, Table
from faregate.stores.sql.columns import id_bytes, unpack
from faregate.testing.cases import Cases, refused
from faregate.testing.store_subjects import StoreSubject
from faregate.testing.store_suite.rows import aborted, ids, ledger, letter, outgoing

READER_CASES = Cases[StoreSubject]()
case = READER_CASES.add


def reader_of(subject: StoreSubject) -> StoreReader:
    assert isinstance(subject.store, Readable), f"{type(subject.store).__name__} has no reader()"
    return copy.deepcopy(subject.store.reader())  # as it travels


def read(reader: StoreReader, table: Table) -> list[dict[str, Any]]:
    found = [row for part in reader.parts(table) for rows in reader.rows(part) for row in rows]
    return [dict(zip(COLUMNS[table], row, strict=True)) for row in found]


@case
async def a_reader_gives_the_ledger_as_it_is_committed(subject: StoreSubject) -> None:
    store, given = subject.store, ids(3)
    for message_id, node in zip(given, ("billing", "shipping", "billing"), strict=True):
        async with store.transaction() as tx:
            await tx.record(node, [ledger(message_id, b"digest", at=5.0)])
            await tx.note_sent(node, [Sent(message_id, 2, bytes(15) + b"x")])
    reader = reader_of(subject)
    async with store.transaction() as tx:
        await tx.record("stock", [ledger(ids(1)[0])])
        rows = read(reader, "ledger")
    assert {row["message_id"]: row["node"] for row in rows} == {
        id_bytes(message_id): node for message_id, node in zip(given, ("billing", "shipping", "billing"), strict=True)
    }
    by_commit = [row["message_id"] for row in sorted(rows, key=lambda row: row["written"])]
    assert by_commit == [id_bytes(message_id) for message_id in given], "not in the order of the commits"
    [first] = [row for row in rows if row["message_id"] == id_bytes(given[0])]
    assert (first["key"], first["position"], first["handled_at"], first["outcome"]) == ("key", 7, 5.0, "handled")
    assert (first["digest"], first["sent"], first["sent_ids"]) == (b"digest", 2, bytes(15) + b"x"), f"{first}"
    assert reader.nodes("ledger") >= {"billing", "shipping"}


@case
async def what_a_handler_sent_is_kept_in_its_ledger_row(subject: StoreSubject) -> None:
    store, given = subject.store, ids(4)
    combined = [bytes([number]) * 16 for number in range(3)]
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(message_id) for message_id in given])
        await tx.record("shipping", [ledger(given[0]), ledger(given[1])._replace(sent=3, sent_ids=combined[0])])
        await tx.note_sent("billing", [Sent(given[1], 1, combined[1]), Sent(given[2], 70_000, combined[2])])
        await tx.note_sent("billing", [])
    async with aborted(store) as tx:
        await tx.record("stock", [ledger(given[0])])
        await tx.note_sent("stock", [Sent(given[0], 5, combined[0])])
    rows = sorted(read(reader_of(subject), "ledger"), key=lambda row: (row["node"], row["message_id"]))
    billing = [(0, None), (1, combined[1]), (70_000, combined[2]), (0, None)]
    found = [(row["node"], row["sent"], row["sent_ids"]) for row in rows]
    shipping = [("shipping", 0, None), ("shipping", 3, combined[0])]
    assert found == [*(("billing", *each) for each in billing), *shipping], f"{found}"


@case
async def what_was_sent_is_kept_with_its_own_row_when_others_leave_meanwhile(subject: StoreSubject) -> None:
    store, given = subject.store, ids(7)
    combined = bytes(15) + b"x"
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(message_id) for message_id in given[:3]])
        await tx.unrecord("billing", [given[2]])
        await tx.record("billing", [ledger(given[3])])
        await tx.note_sent("billing", [Sent(given[0], 1, combined), Sent(given[2], 9, combined)])
        await tx.savepoint()
        await tx.record("billing", [ledger(message_id) for message_id in given[4:6]])
        await tx.roll_back_to_savepoint()
        await tx.release_savepoint()
        await tx.record("billing", [ledger(given[6])])
        await tx.note_sent("billing", [Sent(given[4], 9, combined)])
    found = {row["message_id"]: row["sent"] for row in read(reader_of(subject), "ledger")}
    assert found == {id_bytes(given[index]): index == 0 for index in (0, 1, 3, 6)}, f"{found}"


@case
async def a_reader_gives_dead_and_parked_messages(subject: StoreSubject) -> None:
    store, [dead, waits] = subject.store, ids(2)
    added = letter("billing", dead, tries=3)
    async with store.transaction() as tx:
        await tx.add_dead(added)
        await tx.park("billing", [(Parked(waits, 20.0, 4, "k", 9, added.envelope), None)])
    reader = reader_of(subject)
    [row] = read(reader, "dead")
    assert row["message_id"] == id_bytes(dead) and unpack(row["envelope"]) == added.envelope
    assert {name: row[name] for name in row if name not in ("message_id", "envelope")} == {
        name: getattr(added, name) for name in row if name not in ("message_id", "envelope")
    }
    [state] = read(reader, "dead_states")
    assert state == {"node": "billing", "message_id": id_bytes(dead), "last_failed_at": 10.0, "status": "open"}
    [parked] = read(reader, "parked")
    assert [*parked.values()] == ["billing", id_bytes(waits), 20.0, 4, "k", 9], f"{parked}"


@case
async def a_reader_gives_what_waits_in_the_outbox_and_what_nobody_takes(subject: StoreSubject) -> None:
    store, [cause] = subject.store, ids(1)
    rows = [outgoing("billing", cause, "waits"), outgoing("billing", cause, "gone"), outgoing("billing", None, "own")]
    lost = outgoing("billing", cause, "lost").envelope
    async with store.transaction() as tx:
        seqs = await tx.send(rows)
        await tx.add_dead(letter("billing", lost.publication_id, publication_id=lost.publication_id, envelope=lost))
        await tx.add_dead(letter("billing", ids(1)[0]))
    await store.keep_dispatched([seqs[1]], 5.0)
    reader = reader_of(subject)
    found = read(reader, "outbox")
    assert [(row["seq"], row["dispatched_at"]) for row in found] == [(seqs[0], None), (seqs[1], 5.0), (seqs[2], None)]
    assert [row["message_id"] for row in found] == [id_bytes(cause), id_bytes(cause), None]
    assert [unpack(row["envelope"]).body for row in read(reader, "waiting")] == [b"waits"]
    assert [unpack(row["envelope"]).body for row in read(reader, "unroutable")] == [b"lost"]


@case
async def a_reader_tells_floors_low_water_marks_and_what_there_is(subject: StoreSubject) -> None:
    store, [old, young] = subject.store, ids(2)
    async with store.transaction() as tx:
        await tx.record("billing", [ledger(old, at=1.0), ledger(young, at=9.0)])
        await tx.take_business_key("stock", "count", "x", 1.0)
        await tx.advance("billing", "", {"mark": 4})
        await tx.advance("billing", "bill@1", {"key": 5})
        await tx.send([outgoing("billing", young)])
    await store.evict("billing", 5.0, 10)
    reader = reader_of(subject)
    assert reader.floors() == {"billing": 5.0}
    assert reader.low_water() == {("billing", "mark"): 4}, "a handler's position is none"
    assert (reader.nodes("ledger"), reader.nodes("business_keys")) == ({"billing"}, {"stock"})
    found = reader.describe()
    assert (found.version, found.known, found.floors) == (reader.version(), reader.version(), {"billing": 5.0})
    assert found.oldest is not None and found.oldest.message_id == young
    assert found.url == store.url


@case
async def a_reader_runs_a_query_and_changes_nothing(subject: StoreSubject) -> None:
    store = subject.store
    await store.apply_schema("create table goods (name text)")
    async with store.transaction() as tx:
        await tx.executemany("insert into goods (name) values (?)", [("100 %",), ("ticket",)])
    reader = reader_of(subject)
    for limit, names in ((None, [("100 %",), ("ticket",)]), (1, [("100 %",)])):
        found = [row for rows in reader.query("select name from goods order by name;", limit) for row in rows]
        assert found == names, f"{found} with limit {limit}"
    for sql in ("select name from nowhere", "selec 1", "delete from goods", "delete from goods returning name"):
        with refused(ConfigurationError, f"{sql!r} was not refused"):
            list(reader.query(sql))
    async with aborted(store) as tx:
        assert len(await tx.fetchall("select name from goods")) == 2, "a reader changed something"
