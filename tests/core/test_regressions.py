"""Faults that were found by attacking the bus and its SQLite stores, each of them mended; one test each."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate import ids
from faregate.bus import dispatcher as dispatching
from faregate.bus.attempts import Attempts
from faregate.bus.dead_letters import DeadLetters
from faregate.bus.dispatcher import Dispatcher
from faregate.bus.recipients import Directory
from faregate.core.alarms import Alarms
from faregate.errors import StoreConflict
from faregate.message import Envelope
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store, open_token_store
from faregate.ports.store import OutboxRow, Store
from faregate.stores.sqlite.database import Database
from faregate.testing import FakeClock
from faregate.testing.clock import rest

LONG = 20  # seconds until a test that hangs is failed
MISUSES = [
    ("close", "ledger"),
    ("close", "tokens"),
    ("close", "off"),
    ("commit", "ledger"),
    ("commit", "tokens"),
]
"""Without deduplication, who was committed behind our back is doubled, as documented."""
TABLE = "create table if not exists notes(n integer)"


class Asked(fg.Event):
    n: int


class Answered(fg.Event):
    n: int


class Told(fg.Command):
    n: int


def numbers(count: int, start: int = 0) -> list[Asked]:
    return [Asked(n=n) for n in range(start, start + count)]


async def rows(store: Store, sql: str = "select n from notes order by n") -> list[Any]:
    """The first column of what is committed."""
    transaction = store.transaction()
    await asyncio.wait_for(transaction.begin(), LONG)
    try:
        return [row[0] for row in await transaction.fetchall(sql)]
    finally:
        await transaction.roll_back()


def count_rows(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path, timeout=LONG)) as connection:
        return int(connection.execute(f"select count(*) from {table}").fetchone()[0])


def the_store(bus: fg.Bus) -> Store:
    [store] = bus.stores.values()
    return store


def watch_publish(bus: fg.Bus, monkeypatch: pytest.MonkeyPatch, see: Callable[[Iterable[Envelope]], Any]) -> None:
    """Show `see` everything that goes to the bus' transport, before it does; wait where it wants to."""
    real = bus.transport.publish

    async def publish(envelopes: Any) -> None:
        waiting = see(envelopes)
        if waiting is not None:
            await waiting
        await real(envelopes)

    monkeypatch.setattr(bus.transport, "publish", publish)


def is_output(envelope: Envelope) -> bool:
    return envelope.causation_id is not None


# --- the transaction of a handler -------------------------------------------------------------------------


async def test_two_first_statements_at_once_share_one_transaction_while_the_writer_is_busy() -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    started = asyncio.Event()

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        started.set()
        insert = "insert into notes values (?)"
        await asyncio.gather(ctx.db.execute(insert, (asked.n,)), ctx.db.execute(insert, (asked.n + 100,)))

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        writer = the_store(bus).transaction()
        await writer.begin()
        await bus.publish(Asked(n=1), node="asking")
        await asyncio.wait_for(started.wait(), LONG)
        await rest()  # both statements wait for the writer's turn now
        await writer.roll_back()
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == 1
        assert await rows(the_store(bus)) == [1, 101]


@pytest.mark.usefixtures("one_batch")
async def test_an_error_that_comes_up_at_the_commit_is_judged_by_the_failure_policy() -> None:
    schema = (
        "create table if not exists parents(id integer primary key);"
        "create table if not exists notes(n integer references parents(id) deferrable initially deferred)"
    )
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=schema)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        if asked.n == 3:
            await ctx.db.execute("insert into notes values (7)")

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert bus.outcomes()["handled"] == 5 and bus.outcomes()["dead"] == 1
        assert letter.error.startswith("IntegrityError: FOREIGN KEY")
        assert msgspec.json.decode(letter.envelope.body) == {"n": 3}
        assert await rows(the_store(bus)) == []


async def test_the_connection_asked_for_in_a_task_group_is_given_at_the_second_run() -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    runs = 0

    @answering.on(Asked, source="asking", retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal runs
        runs += 1

        async def write() -> None:
            ctx.db.raw.execute("insert into notes values (?)", (asked.n,))

        async with asyncio.TaskGroup() as group:
            group.create_task(write())

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert bus.outcomes() == {"handled": 1, "skipped": 0, "duplicate": 0, "redelivered": 0, "dead": 0}
        assert runs == 2 and await rows(the_store(bus)) == [1]


@pytest.mark.parametrize("place", ["memory:", "sqlite:{}/all.db"])
async def test_a_handler_that_closes_the_connection_ends_as_a_dead_letter_and_hurts_nobody_else(
    place: str, tmp_path: Path
) -> None:
    asking, answering, other = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("other")
    heard: list[int] = []

    @answering.on(Asked, source="asking", retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        await ctx.db.execute("insert into notes values (?)", (asked.n,))
        if asked.n == 3:
            ctx.db.raw.close()
        return Answered(n=asked.n)

    @other.on(Asked, source="asking", retry=None, redeliver=None)
    async def note(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes values (?)", (asked.n + 100,))

    @other.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard.append(answered.n)

    nodes = [asking, answering, other]
    async with fg.Bus("memory:", nodes=nodes, store=place.format(tmp_path), drain_seconds=1) as bus:
        await bus.publish(Asked(n=3), node="asking")
        await bus.idle(timeout=LONG)
        await bus.publish(Asked(n=4), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert letter.node == "answering" and letter.error.startswith("TransactionEnded")
        assert await rows(the_store(bus)) == [4, 103, 104]
        assert heard == [4]
        assert dict(bus.alarms) == {"dead-letter": 1}


@pytest.mark.usefixtures("one_batch")
@pytest.mark.parametrize(("how", "dedup"), MISUSES)
async def test_who_shares_a_batch_with_a_handler_that_ends_the_transaction_is_handled_once(
    how: str, dedup: str, tmp_path: Path
) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering", schema=TABLE), fg.Node("hearing")
    heard: list[int] = []

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        heard.append(answered.n)

    @answering.on(Asked, source="asking", order=fg.Parallel(1), dedup=dedup, retry=None, redeliver=None)
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        await ctx.db.execute("insert into notes values (?)", (asked.n,))
        if asked.n == 3:
            getattr(ctx.db.raw, how)()
        return Answered(n=asked.n)

    nodes = [asking, answering, hearing]
    async with fg.Bus("memory:", nodes=nodes, store=f"sqlite:{tmp_path}/all.db", drain_seconds=1) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert letter.error.startswith("TransactionEnded")
        assert msgspec.json.decode(letter.envelope.body) == {"n": 3}
        # What the handler committed itself, against the rules, nobody can take back.
        found = await rows(the_store(bus), "select n from notes where n <> 3 order by n")
        assert found == [0, 1, 2, 4, 5]
        assert sorted(heard) == [0, 1, 2, 4, 5]


async def test_a_store_that_gives_way_again_and_again_uses_up_the_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")
    looked = 0

    @answering.on(Asked, source="asking", retry=fg.Retry(1, delay=0.001), redeliver=None)
    async def answer(asked: Asked) -> None: ...

    async def known(*_: Any) -> Any:
        nonlocal looked
        looked += 1
        raise StoreConflict("held")

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        monkeypatch.setattr(the_store(bus), "known", known)
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert looked == 2
        assert letter.error.startswith("StoreConflict: held")


# --- business keys ----------------------------------------------------------------------------------------


async def test_a_message_whose_first_try_failed_is_not_stopped_by_its_own_eager_claim() -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    runs = 0

    async def look(ctx: fg.Context, call_next: Any) -> None:
        await ctx.db.fetchall("select n from notes")  # the transaction is open around the tries
        await call_next()

    answering.use(look)

    @answering.on(Asked, source="asking", identity="n", claim="eager", retry=fg.Retry(2, delay=0.001))
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise RuntimeError("the first try fails")
        await ctx.db.execute("insert into notes values (?)", (asked.n,))

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert runs == 2 and await rows(the_store(bus)) == [1]
        assert bus.outcomes()["handled"] == 1 and bus.outcomes()["duplicate"] == 0


async def test_a_message_whose_commit_gave_way_is_not_stopped_by_its_own_eager_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    real, refused, armed = Database.commit, 0, False

    async def commit(database: Database) -> None:
        nonlocal armed, refused
        if armed and not refused:
            armed, refused = False, 1
            database.roll_back()
            raise StoreConflict("deadlock")
        await real(database)

    monkeypatch.setattr(Database, "commit", commit)

    @answering.on(Asked, source="asking", identity="n", claim="eager", retry=fg.Retry(2, delay=0.001))
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        nonlocal armed
        armed = True
        await ctx.db.execute("insert into notes values (?)", (asked.n,))
        return Answered(n=asked.n)

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert refused == 1 and await rows(the_store(bus)) == [1]
        assert bus.outcomes()["handled"] == 1 and bus.outcomes()["duplicate"] == 0
        # The key stays taken: the same again under a new id is a duplicate.
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert await rows(the_store(bus)) == [1] and bus.outcomes()["duplicate"] == 1


# --- sending ----------------------------------------------------------------------------------------------


async def test_waiting_for_a_row_that_is_sent_and_being_removed_comes_to_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatching, "_LOOK_SECONDS", 3600.0)  # it does not clean up by itself meanwhile

    sent = asyncio.Event()

    class Transport:
        async def publish(self, envelopes: Any) -> None:
            sent.set()

    clock = SystemClock()
    store = open_store("memory:", clock)
    await store.open()
    dispatcher = Dispatcher(store, Transport(), clock, Alarms())  # type: ignore[arg-type]
    await dispatcher.start()
    envelope = Envelope(publication_id=ids.root_id(2), type="t", kind="event", source="n", body=b"")
    message_id = ids.root_id(1)
    sending = store.transaction()
    await sending.begin()
    recorded = await dispatcher.record(sending, [OutboxRow(0, "n", message_id, 0, "x", None, envelope)])
    await sending.commit()
    dispatcher.committed(recorded)
    await asyncio.wait_for(sent.wait(), LONG)
    await rest()
    assert not dispatcher.busy
    removing = store.transaction()
    await removing.begin()
    removed = await dispatcher.record(removing, ())
    found = await store.outbox_rows_of("n", message_id)
    assert len(found) == 1  # a read of what is committed still sees it
    waiting = asyncio.create_task(dispatcher.dispatch(found))
    await rest()
    await removing.commit()
    dispatcher.committed(removed)
    await asyncio.wait_for(waiting, LONG)
    assert await store.undispatched(10) == []
    await dispatcher.stop(0)
    await store.close()


async def test_rows_of_a_node_wait_for_its_own_bus_while_another_runs_on_the_same_database(tmp_path: Path) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")
    got: list[int] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> None:
        got.append(asked.n)

    url = f"sqlite:{tmp_path}/all.db"
    async with fg.Bus("memory:", nodes=[fg.Node("stranger")], store=url) as other:
        with closing(sqlite3.connect(tmp_path / "all.db", timeout=LONG)) as connection:
            for asked in numbers(50):
                with connection:
                    fg.outbox(connection, node="asking").publish(asked)
        await other.idle(timeout=LONG)  # it has looked for rows to send
        assert count_rows(tmp_path / "all.db", "faregate_outbox") == 50
        async with fg.Bus("memory:", nodes=[asking, answering], store=url) as bus:
            await bus.idle(timeout=LONG)
            assert sorted(got) == list(range(50))
            assert await bus.dead_letters() == [] and not bus.alarms and not other.alarms
            assert count_rows(tmp_path / "all.db", "faregate_outbox") == 0


async def test_of_two_buses_on_one_database_each_sends_the_rows_of_its_own_nodes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering, hearing = fg.Node("asking"), fg.Node("answering"), fg.Node("hearing")
    got: list[str] = []

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> Any:
        yield Answered(n=asked.n)
        yield fg.send(Told(n=asked.n), to="hearing")

    @hearing.on(Answered, source="answering")
    async def hear(answered: Answered) -> None:
        got.append(f"event {answered.n}")

    @hearing.on(Told)
    async def do(told: Told) -> None:
        got.append(f"command {told.n}")

    reached, gate = asyncio.Event(), asyncio.Event()
    strange: list[Envelope] = []

    def hold(envelopes: Iterable[Envelope]) -> Any:
        if not any(map(is_output, envelopes)):
            return None
        reached.set()
        return gate.wait()

    url = f"sqlite:{tmp_path}/all.db"
    async with (
        fg.Bus("memory:", nodes=[asking, answering, hearing], store=url) as bus,
        fg.Bus("memory:", nodes=[fg.Node("stranger")], store=url) as other,
    ):
        watch_publish(bus, monkeypatch, hold)
        watch_publish(other, monkeypatch, strange.extend)
        await bus.publish_many(numbers(10), node="asking")
        await asyncio.wait_for(reached.wait(), LONG)
        await other.idle(timeout=LONG)  # while rows are in the table, it has looked
        gate.set()
        await bus.idle(timeout=LONG)
        assert Counter(got) == Counter(f"{kind} {n}" for kind in ("event", "command") for n in range(10))
        assert strange == [] and await bus.dead_letters() == []
        assert not bus.alarms and not other.alarms


async def test_one_database_written_in_two_ways_is_one_store_and_sends_each_output_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")

    @answering.on(Asked, source="asking")
    async def answer(asked: Asked) -> Any:
        return fg.send(Told(n=asked.n), to="nobody") if asked.n == 100 else Answered(n=asked.n)

    monkeypatch.chdir(tmp_path)
    sent: Counter[str] = Counter()

    def count(envelopes: Iterable[Envelope]) -> None:
        sent.update(envelope.publication_id for envelope in envelopes if envelope.type == "Answered")

    urls = {"asking": "sqlite:all.db", "answering": f"sqlite:{tmp_path}/../{tmp_path.name}/./all.db"}
    async with fg.Bus("memory:", nodes=[asking, answering], store=urls) as bus:
        assert bus.store_of("asking") is bus.store_of("answering") and len(bus.stores) == 1
        watch_publish(bus, monkeypatch, count)
        for asked in numbers(40):
            await bus.publish(asked, node="asking")
        await bus.idle(timeout=LONG)
        assert len(sent) == 40 and set(sent.values()) == {1}
        await bus.publish(Asked(n=100), node="asking")
        await bus.idle(timeout=LONG)
        assert [letter.copies for letter in await bus.dead_letters()] == [1]


# --- dead letters -----------------------------------------------------------------------------------------


async def test_without_deduplication_a_replay_resolves_its_letter_and_a_discard_stops_the_copy_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    working = fg.Node("working")
    broken, runs = True, list[int]()
    arrived = asyncio.Event()

    @working.on(Told, dedup="off", retry=None, redeliver=None)
    async def work(told: Told) -> None:
        runs.append(told.n)
        if broken:
            raise RuntimeError("broken")

    async with fg.Bus("memory:", nodes=[working], store="memory:") as bus:
        await bus.send(Told(n=1), to="working")
        await bus.send(Told(n=2), to="working")
        await bus.idle(timeout=LONG)
        letters = {msgspec.json.decode(each.envelope.body)["n"]: each.message_id for each in await bus.dead_letters()}
        broken = False
        runs.clear()

        async def statuses() -> dict[int, str]:
            found = {each.message_id: each.status for each in await bus.dead_letters(status=None)}
            return {n: found[message_id] for n, message_id in letters.items()}

        await bus.replay(letters[1])
        await bus.idle(timeout=LONG)
        assert runs == [1] and await statuses() == {1: "resolved", 2: "open"}

        await bus.pause("working", Told)
        real = bus.transport.publish

        async def publish(envelopes: Any) -> None:
            await real(envelopes)
            arrived.set()

        monkeypatch.setattr(bus.transport, "publish", publish)
        await bus.replay(letters[2])
        await asyncio.wait_for(arrived.wait(), LONG)
        await bus.discard(letters[2])
        await bus.resume("working", Told)
        await bus.idle(timeout=LONG)
        assert runs == [1] and await statuses() == {1: "resolved", 2: "discarded"}


@pytest.mark.parametrize("form", ["ledger", "tokens", "tokens elsewhere"])
async def test_what_the_broker_gave_up_on_is_a_dead_letter_when_the_bus_is_idle_and_its_token_is_gone(
    form: str, tmp_path: Path
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering")

    @answering.on(Asked, source="asking", dedup=form.split()[0], expires=0.2)
    async def answer(asked: Asked) -> None: ...

    tokens = tmp_path / ("tokens.db" if form == "tokens elsewhere" else "all.db")
    options: dict[str, Any] = {"tokens": f"sqlite:{tokens}"} if form == "tokens elsewhere" else {}
    async with fg.Bus("memory:", nodes=[asking, answering], store=f"sqlite:{tmp_path}/all.db", **options) as bus:
        await bus.pause("answering", Asked)
        for asked in numbers(5):
            await bus.publish(asked, node="asking")
        await bus.idle(timeout=LONG)
        assert [letter.reason for letter in await bus.dead_letters()] == ["expired"] * 5
        assert await bus.transport.poisoned("answering") == []
        assert count_rows(tokens, "faregate_tokens") == 0
        assert count_rows(tmp_path / "all.db", "faregate_claims") == 0


# --- tokens -----------------------------------------------------------------------------------------------


async def test_with_tokens_one_key_is_one_message_and_another_body_under_it_sounds_the_alarm(tmp_path: Path) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

    @answering.on(Asked, source="asking", dedup="tokens")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes values (?)", (asked.n,))

    async with fg.Bus("memory:", nodes=[asking, answering], store=f"sqlite:{tmp_path}/all.db") as bus:
        for n in (1, 2):
            await bus.publish(Asked(n=n), node="asking", idempotency_key="key")
            await bus.idle(timeout=LONG)
        assert await rows(the_store(bus)) == [1]
        assert bus.alarms["disagreement"] == 1
        with closing(sqlite3.connect(tmp_path / "all.db", timeout=LONG)) as connection:
            for _ in range(2):
                with connection:
                    fg.outbox(connection, node="asking").publish(Asked(n=3), idempotency_key="other")
                await bus.idle(timeout=LONG)
        assert await rows(the_store(bus)) == [1, 3]
        assert bus.alarms["disagreement"] == 1
        assert count_rows(tmp_path / "all.db", "faregate_tokens") == 0
        assert count_rows(tmp_path / "all.db", "faregate_outbox") == 0


async def test_messages_whose_token_store_was_taken_away_become_dead_letters_that_can_be_replayed(
    tmp_path: Path,
) -> None:
    def nodes(dedup: str) -> list[fg.Node]:
        asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

        @answering.on(Asked, source="asking", dedup=dedup)
        async def answer(asked: Asked, ctx: fg.Context) -> None:
            await ctx.db.execute("insert into notes values (?)", (asked.n,))

        return [asking, answering]

    transport, store, tokens = f"journal:{tmp_path}/j", f"sqlite:{tmp_path}/all.db", f"sqlite:{tmp_path}/tokens.db"
    async with fg.Bus(transport, nodes=nodes("tokens"), store=store, tokens=tokens) as bus:
        await bus.pause("answering", Asked)
        for asked in numbers(5):
            await bus.publish(asked, node="asking")
    async with fg.Bus(transport, nodes=nodes("ledger"), store=store) as bus:
        await bus.idle(timeout=LONG)
        assert [letter.error.split(":")[0] for letter in await bus.dead_letters()] == ["UnknownToken"] * 5
        assert await rows(the_store(bus)) == []
    async with fg.Bus(transport, nodes=nodes("tokens"), store=store, tokens=tokens) as bus:
        await bus.replay(*(letter.message_id for letter in await bus.dead_letters()))
        await bus.idle(timeout=LONG)
        assert await rows(the_store(bus)) == [0, 1, 2, 3, 4]
        assert [letter.status for letter in await bus.dead_letters(status=None)] == ["resolved"] * 5


# --- the floor --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retained", "age"),
    [(120.0, 300.0)],
)
async def test_a_copy_from_below_the_floor_is_refused_by_a_bus_that_did_not_do_the_eviction(
    retained: float, age: float, tmp_path: Path
) -> None:
    def nodes() -> list[fg.Node]:
        asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

        @answering.on(Asked, source="asking")
        async def answer(asked: Asked, ctx: fg.Context) -> None:
            handled.append(ctx.envelope)
            await ctx.db.execute("insert into notes values (?)", (asked.n,))

        return [asking, answering]

    handled: list[Envelope] = []
    clock, url = FakeClock(), f"sqlite:{tmp_path}/all.db"
    async with (
        fg.Bus("memory:", nodes=nodes(), store=url, clock=clock) as bus,
        fg.Bus("memory:", nodes=nodes(), store=url, clock=clock, retain_ledger=retained) as evicting,
    ):
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        await clock.advance(age)
        await evicting.idle(timeout=LONG)
        assert count_rows(tmp_path / "all.db", "faregate_ledger") == 0
        # As a replay, since the broker's own window is not the subject.
        await bus.transport.publish([msgspec.structs.replace(handled[0], replay=1)])
        await bus.idle(timeout=LONG)
        assert await rows(the_store(bus)) == [1]
        [letter] = await bus.dead_letters()
        assert letter.error.startswith("BelowFloor")


async def test_a_signal_with_a_token_that_one_recipient_did_not_take_is_replayed_to_that_one_alone() -> None:
    clock, gone, sent = SystemClock(), {"gone"}, list[Envelope]()

    class Transport:
        async def publish(self, envelopes: Any) -> None:
            if any(gone.intersection(envelope.recipients) for envelope in envelopes):
                raise fg.Unroutable("it has unsubscribed since")
            sent.extend(envelopes)

    store, tokens = open_store("memory:", clock), open_token_store("memory:", clock)
    await store.open()
    await tokens.open()
    directory = Directory(tokens)
    for node, mode in (("here", "tokens"), ("gone", "tokens"), ("ledger", "ledger")):
        await directory.subscribe("event:n.t", node, mode)  # type: ignore[arg-type]
    envelope = Envelope(publication_id=ids.root_id(2), type="t", kind="event", source="n", body=b"")
    sending = store.transaction()
    await sending.begin()
    await sending.send([OutboxRow(0, "n", None, 0, "n.t", None, envelope)])
    await sending.commit()
    attempts = Attempts(store, directory, clock)
    dispatcher = Dispatcher(store, Transport(), clock, Alarms(), attempts)  # type: ignore[arg-type]
    await asyncio.wait_for(dispatcher.start(), LONG)
    assert sorted(each.recipients for each in sent) == [("here",), ("ledger",)]
    assert await tokens.count() == 1, "the token of the one that did not take it is gone"
    letters = DeadLetters([store], clock)
    [letter] = await letters.letters()
    gone.clear()
    sent.clear()
    await letters.replay([letter.message_id], by="me")
    await asyncio.wait_for(dispatcher.idle(), LONG)
    [again] = sent
    assert again.recipients == ("gone",) and again.attempt_id is not None
    assert await tokens.read(again.attempt_id) is not None
    await dispatcher.stop(0)
    await store.close()
    await tokens.close()
