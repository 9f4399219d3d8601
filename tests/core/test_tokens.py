"""Deduplication by tokens (exactly-once.md, Mode `tokens`; seed 001): no memory of what was, only of what is.

The sender creates the inbox record, the recipient claims and deletes it; at rest nothing is left. Either one store
holds everything (the merged form), or the tokens have a store of their own (`fg.Bus(…, tokens=URL)`).
"""

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import faregate as fg
from faregate.core.alarms import Alarms
from faregate.core.dedup.claims import claims_of
from faregate.ports.clock import SystemClock
from faregate.ports.faults import POINTS, Crash
from faregate.ports.schemes import open_store, open_token_store
from faregate.ports.tokens import Token
from tests.core.rig import INSERT, TABLE, Asked, count, notes, numbers

LONG = 30  # seconds until a test that hangs is failed
TRANSIENT = ("faregate_tokens", "faregate_claims", "faregate_outbox")


class Placed(fg.Event):
    name: str


class Charge(fg.Command):
    name: str


class Charged(fg.Event):
    name: str


def schema(node: str) -> str:
    return f"create table if not exists {node}_notes(number integer primary key, text text)"


class World:
    def __init__(self) -> None:
        self.runs: list[str] = []
        self.failures: list[type[Exception]] = []


def shop_nodes(world: World, dedup: str = "tokens", **options: Any) -> list[fg.Node]:
    """shop publishes Placed; billing sends a Charge to payments, which publishes Charged to shipping."""
    billing, payments, shipping = (fg.Node(name, schema=schema(name)) for name in ("billing", "payments", "shipping"))

    @billing.on(Placed, source="shop", dedup=dedup)
    async def bill(placed: Placed, ctx: fg.Context) -> Any:
        world.runs.append(f"billing {placed.name}")
        await ctx.db.execute("insert into billing_notes(text) values (?)", (placed.name,))
        return fg.send(Charge(name=placed.name), to="payments")

    @payments.on(Charge, dedup=dedup, **{"retry": None, "redeliver": fg.Redeliver(0.001, 0.001), **options})
    async def charge(cmd: Charge, ctx: fg.Context) -> AsyncIterator[Any]:
        world.runs.append(f"payments {cmd.name}")
        await ctx.db.execute("insert into payments_notes(text) values (?)", (cmd.name,))
        yield Charged(name=cmd.name)
        if world.failures:
            raise world.failures.pop(0)("on purpose")

    @shipping.on(Charged, source="payments", dedup=dedup)
    async def ship(charged: Charged, ctx: fg.Context) -> None:
        world.runs.append(f"shipping {charged.name}")
        await ctx.db.execute("insert into shipping_notes(text) values (?)", (charged.name,))

    return [fg.Node("shop"), billing, payments, shipping]


class Place:
    """Files, in the merged form or with a store of tokens of its own."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.form = folder, form
        self.node_files = {
            name: folder / ("all.db" if form == "merged" else f"{name}.db")
            for name in ("shop", "billing", "payments", "shipping")
        }
        self.files = sorted({*self.node_files.values(), *([] if form == "merged" else [folder / "tokens.db"])})

    def bus(self, nodes: list[fg.Node], transport: str = "journal", journal: str = "data") -> fg.Bus:
        options: dict[str, Any] = {"store": f"sqlite:{self.folder}/all.db"}
        if self.form != "merged":
            options = {
                "store": {name: f"sqlite:{file}" for name, file in self.node_files.items()},
                "tokens": f"sqlite:{self.folder}/tokens.db",
            }
        return fg.Bus(
            "memory:" if transport == "memory" else f"journal:{self.folder}/{journal}", nodes=nodes, **options
        )

    def notes(self, node: str) -> list[str]:
        return sorted(text for (text,) in self.query(self.node_files[node], f"select text from {node}_notes"))

    def everywhere(self) -> dict[str, list[str]]:
        return {node: self.notes(node) for node in ("billing", "payments", "shipping")}

    def left(self, table: str) -> int:
        """How many rows all files together have in this table; it must be in one of them at least.

        Rows of the outbox that are dispatched may stay until stray attempts cannot turn up any more.
        """
        waiting = " where dispatched_at is null" if table == "faregate_outbox" else ""
        counts = [
            self.query(file, f"select count(*) from {table}{waiting}")[0][0]
            for file in self.files
            if self.query(file, f"select name from sqlite_master where name = '{table}'")
        ]
        assert counts, f"no store has the table {table}"
        return sum(counts)

    def assert_nothing_is_left(self) -> None:
        assert {table: self.left(table) for table in TRANSIENT} == dict.fromkeys(TRANSIENT, 0)

    @staticmethod
    def query(file: Path, sql: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(file)) as connection:
            return connection.execute(sql).fetchall()


@pytest.fixture(params=["merged", "tokens of their own"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.param)


@pytest.mark.parametrize("transport", ["memory", "journal"])
async def test_every_effect_happens_once_and_nothing_is_left(place: Place, transport: str) -> None:
    world = World()
    async with place.bus(shop_nodes(world), transport) as bus:
        for number in range(20):
            await bus.publish(Placed(name=f"{number:02}"), node="shop")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
        assert bus.outcomes()["handled"] == 60
    expected = [f"{number:02}" for number in range(20)]
    assert place.everywhere() == {"billing": expected, "payments": expected, "shipping": expected}
    place.assert_nothing_is_left()


async def test_the_ledger_stays_empty(place: Place) -> None:
    # Reading: the ledger's table is faregate_ledger, and it is there also where nobody writes to it.
    async with place.bus(shop_nodes(World())) as bus:
        await bus.publish(Placed(name="1"), node="shop")
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == 3
    assert place.left("faregate_ledger") == 0


async def test_a_failed_try_neither_leaks_nor_doubles(place: Place) -> None:
    world = World()
    world.failures = [RuntimeError, RuntimeError]
    async with place.bus(shop_nodes(world)) as bus:
        await bus.publish(Placed(name="1"), node="shop")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert world.runs.count("payments 1") == 3
    assert world.runs.count("shipping 1") == 1, "the outputs of the failed tries were never sent"
    assert place.everywhere() == {"billing": ["1"], "payments": ["1"], "shipping": ["1"]}
    place.assert_nothing_is_left()


async def test_a_dead_letter_releases_the_token(place: Place) -> None:
    # Reading: "tokens and payloads are released" together with the message that became a dead letter.
    world = World()
    world.failures = [fg.Permanent]
    async with place.bus(shop_nodes(world)) as bus:
        await bus.publish(Placed(name="1"), node="shop")
        await bus.idle(timeout=LONG)
        [dead] = await bus.dead_letters()
    assert (dead.node, dead.reason) == ("payments", "permanent")
    assert place.everywhere() == {"billing": ["1"], "payments": [], "shipping": []}
    place.assert_nothing_is_left()


async def test_the_replay_of_a_dead_message_is_a_new_attempt_with_one_effect(place: Place) -> None:
    world = World()
    world.failures = [fg.Permanent]
    async with place.bus(shop_nodes(world)) as bus:
        await bus.publish(Placed(name="1"), node="shop")
        await bus.idle(timeout=LONG)
        [dead] = await bus.dead_letters("payments")
    message_id = fg.ids.message_id(dead.envelope.publication_id, "payments")
    replayed = subprocess.run(
        [sys.executable, "-m", "faregate", "dead", "replay", f"sqlite:{place.node_files['payments']}", message_id],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    async with place.bus(shop_nodes(world)) as bus:
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert place.everywhere() == {"billing": ["1"], "payments": ["1"], "shipping": ["1"]}
    place.assert_nothing_is_left()


async def test_a_skipped_message_leaves_nothing_either(place: Place) -> None:
    world = World()
    nodes = shop_nodes(world)

    async def skip(ctx: fg.Context, call_next: Any) -> None:
        return None

    nodes[2].use(skip)
    async with place.bus(nodes) as bus:
        await bus.publish(Placed(name="1"), node="shop")
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["skipped"] == 1
    assert place.everywhere() == {"billing": ["1"], "payments": [], "shipping": []}
    place.assert_nothing_is_left()


@pytest.mark.parametrize("point", list(POINTS))
async def test_a_crash_at_any_point_leaves_one_effect_and_no_record(point: str, place: Place) -> None:
    world = World()
    async with asyncio.timeout(60):
        with fg.testing.crash_at(point), contextlib.suppress(Crash, fg.OutcomeUnknown):
            async with place.bus(shop_nodes(world)) as bus:
                await bus.publish(Placed(name="1"), node="shop", idempotency_key="1")
                await bus.idle(timeout=LONG)
        async with place.bus(shop_nodes(world)) as bus:  # the process that comes back
            await bus.idle(timeout=LONG)
            if not place.notes("billing"):  # it died before the publication was accepted: the publisher repeats it
                await bus.publish(Placed(name="1"), node="shop", idempotency_key="1")
                await bus.idle(timeout=LONG)
            assert await bus.dead_letters() == []
    assert place.everywhere() == {"billing": ["1"], "payments": ["1"], "shipping": ["1"]}
    if point == "tokens.created" and place.form != "merged":
        # The token of the attempt that was not chosen is discarded once no attempt can turn up late, after a minute.
        assert place.left("faregate_tokens") <= 1
        assert place.left("faregate_claims") == place.left("faregate_outbox") == 0
    else:
        place.assert_nothing_is_left()


# --- on the bench: copies of signals ----------------------------------------------------------------------


async def test_a_copy_of_a_signal_settles_as_a_duplicate_when_its_token_is_gone() -> None:
    world = World()
    _, *nodes = shop_nodes(world)
    async with fg.testing.bench(*nodes) as bench:
        await bench.publish(Placed(name="1"))
        await bench.settle()
        [signal] = bench.envelopes(Charge)
        assert signal.attempt_id
        before = bench.bus.outcomes().get("duplicate", 0)
        for _ in range(3):
            await bench.deliver(signal)
        await bench.settle()
        assert bench.bus.outcomes().get("duplicate", 0) == before + 3
        assert bench.sent(Charged) == [Charged(name="1")]
        assert bench.dead_letters() == []
    assert world.runs == ["billing 1", "payments 1", "shipping 1"]


async def test_two_copies_of_a_signal_at_once_have_one_effect() -> None:
    world = World()
    _, *nodes = shop_nodes(world)
    async with fg.testing.bench(*nodes) as bench:
        await bench.bus.pause("payments", Charge)
        await bench.publish(Placed(name="1"))
        # While payments is paused the signal waits in its queue; a second copy is put beside it.
        await bench.advance(0.1)
        [signal] = bench.envelopes(Charge)
        await bench.deliver(signal)
        await bench.bus.resume("payments", Charge)
        await bench.settle()
        assert bench.sent(Charged) == [Charged(name="1")]
        assert bench.bus.outcomes().get("duplicate", 0) == 1
    assert world.runs.count("payments 1") == 1


async def test_a_foreign_signal_without_an_attempt_takes_the_ledger_path() -> None:
    world = World()
    _, *nodes = shop_nodes(world)
    foreign = fg.Envelope(
        publication_id=fg.ids.root_id(),
        type="Charge",
        kind="command",
        source="abroad",
        destination="payments",
        body=msgspec.json.encode({"name": "foreign"}),
    )
    async with fg.testing.bench(*nodes) as bench:
        await bench.deliver(foreign)
        await bench.settle()
        assert world.runs == ["payments foreign", "shipping foreign"], "it is never taken for a duplicate"
        await bench.deliver(foreign)
        await bench.settle()
        assert bench.bus.outcomes().get("duplicate", 0) == 1, "the ledger remembers it"
        assert bench.sent(Charged) == [Charged(name="foreign")]
    assert world.runs == ["payments foreign", "shipping foreign"]


async def test_every_signal_on_the_wire_has_an_attempt_of_its_own() -> None:
    _, *nodes = shop_nodes(World())
    async with fg.testing.bench(*nodes) as bench:
        for number in range(10):
            await bench.publish(Placed(name=str(number)))
        await bench.settle()
        attempts = [envelope.attempt_id for envelope in (*bench.envelopes(Charge), *bench.envelopes(Charged))]
    assert None not in attempts
    assert len(set(attempts)) == len(attempts) == 20


async def test_a_ledger_recipient_gets_no_token() -> None:
    _, *nodes = shop_nodes(World(), dedup="ledger")
    async with fg.testing.bench(*nodes) as bench:
        await bench.publish(Placed(name="1"))
        await bench.settle()
        assert [envelope.attempt_id for envelope in bench.envelopes(Charge)] == [None]


# --- mixed and misconfigured ------------------------------------------------------------------------------


async def test_recipients_of_both_modes_get_one_event_once_each(place: Place) -> None:
    world = World()
    nodes = shop_nodes(world)
    payments = nodes[2]

    @payments.on(Placed, source="shop", dedup="ledger")
    async def note(placed: Placed, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into payments_notes(text) values (?)", (f"noted {placed.name}",))

    async with place.bus(nodes) as bus:
        await bus.publish(Placed(name="1"), node="shop")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert place.everywhere() == {"billing": ["1"], "payments": ["1", "noted 1"], "shipping": ["1"]}
    assert place.left("faregate_tokens") == 0
    assert place.left("faregate_claims") == 0
    assert place.left("faregate_ledger") == 1


def setting(event: asyncio.Event) -> Any:
    async def tell(ctx: fg.Context, call_next: Any) -> None:
        await call_next()
        event.set()

    return tell


async def test_a_recipient_that_changes_its_mode_while_messages_wait_loses_and_doubles_nothing(place: Place) -> None:
    world = World()
    for before, after in (("ledger", "tokens"), ("tokens", "ledger")):
        billed = asyncio.Event()
        nodes = shop_nodes(world, dedup=before)

        nodes[1].use(setting(billed), after=True)
        async with asyncio.timeout(LONG), place.bus(nodes) as bus:
            await bus.pause("payments", Charge)
            await bus.publish(Placed(name=f"{before} to {after}"), node="shop")
            await billed.wait()  # leaving the bus sends what is in the outbox; the charge then waits in its queue
        async with place.bus(shop_nodes(world, dedup=after)) as bus:
            await bus.idle(timeout=LONG)
            assert await bus.dead_letters() == []
    expected = ["ledger to tokens", "tokens to ledger"]
    assert place.everywhere() == {"billing": expected, "payments": expected, "shipping": expected}
    assert place.left("faregate_tokens") == 0


async def test_a_root_with_an_idempotency_key_that_is_published_twice_has_one_effect(place: Place) -> None:
    # Reading: the publishing node's store or the broker's window tells the repetition, and it leaves no token behind.
    world = World()
    async with place.bus(shop_nodes(world)) as bus:
        for _ in range(2):
            await bus.publish(Placed(name="1"), node="shop", idempotency_key="order-1")
        await bus.idle(timeout=LONG)
    assert place.everywhere() == {"billing": ["1"], "payments": ["1"], "shipping": ["1"]}
    place.assert_nothing_is_left()


async def test_tokens_without_a_store_that_all_share_are_refused_at_the_start(tmp_path: Path) -> None:
    # Reading: with a file per node and no `tokens=` a sender could not create the recipient's token.
    place = Place(tmp_path, "tokens of their own")
    store = {name: f"sqlite:{file}" for name, file in place.node_files.items()}
    with pytest.raises(fg.ConfigurationError, match="tokens"):
        async with fg.Bus("memory:", nodes=shop_nodes(World()), store=store):
            pass


async def test_tokens_without_any_store_are_refused_at_the_start() -> None:
    node = fg.Node("payments")

    @node.on(Charge, dedup="tokens")
    async def charge(cmd: Charge) -> None:
        return None

    with pytest.raises(fg.ConfigurationError, match=r"store|tokens"):
        async with fg.Bus("memory:", nodes=[fg.Node("shop"), node]):
            pass


async def test_a_wrong_url_for_the_tokens_is_refused() -> None:
    with pytest.raises(fg.ConfigurationError, match="mysql"):
        async with fg.Bus("memory:", nodes=shop_nodes(World()), store="memory:", tokens="mysql://localhost/x"):
            pass


@pytest.mark.parametrize("form", ["ledger", "tokens", "tokens elsewhere"])
async def test_a_dead_letter_of_the_broker_is_in_the_store_when_the_bus_is_idle_and_its_token_is_gone(
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
        assert await bus.transport.dead_letters("answering") == []
        assert Place.query(tokens, "select count(*) from faregate_tokens") == [(0,)]
        assert await count(bus, "claims") == 0


async def test_with_tokens_one_key_is_one_message_and_another_body_under_it_sounds_the_alarm(tmp_path: Path) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

    @answering.on(Asked, source="asking", dedup="tokens")
    async def answer(asked: Asked, ctx: fg.Context) -> None:
        await ctx.db.execute(INSERT, (asked.n,))

    async with fg.Bus("memory:", nodes=[asking, answering], store=f"sqlite:{tmp_path}/all.db") as bus:
        for n in (1, 2):
            await bus.publish(Asked(n=n), node="asking", idempotency_key="key")
            await bus.idle(timeout=LONG)
        assert await notes(bus) == [1]
        assert bus.alarms["disagreement"] == 1
        with contextlib.closing(sqlite3.connect(tmp_path / "all.db", timeout=LONG)) as connection:
            for _ in range(2):
                with connection:
                    fg.outbox(connection, node="asking").publish(Asked(n=3), idempotency_key="other")
                await bus.idle(timeout=LONG)
        assert await notes(bus) == [1, 3]
        assert bus.alarms["disagreement"] == 1
        assert await count(bus, "tokens") == await count(bus, "outbox") == 0


@pytest.mark.parametrize("error", [None, fg.Permanent("never"), ValueError("not now")])
async def test_messages_whose_token_store_was_taken_away_become_dead_letters_that_can_be_replayed(
    tmp_path: Path, error: Exception | None
) -> None:
    """Whatever their handler makes of them meanwhile."""
    runs = 0

    def nodes(dedup: str) -> list[fg.Node]:
        asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)

        @answering.on(Asked, source="asking", dedup=dedup, retry=fg.Retry(0), redeliver=fg.Redeliver())
        async def answer(asked: Asked, ctx: fg.Context) -> None:
            nonlocal runs
            runs += 1
            if error is not None and dedup == "ledger":
                raise error
            await ctx.db.execute(INSERT, (asked.n,))

        return [asking, answering]

    transport, store, tokens = f"journal:{tmp_path}/j", f"sqlite:{tmp_path}/all.db", f"sqlite:{tmp_path}/tokens.db"
    async with fg.Bus(transport, nodes=nodes("tokens"), store=store, tokens=tokens) as bus:
        await bus.pause("answering", Asked)
        for asked in numbers(5):
            await bus.publish(asked, node="asking")
    async with fg.Bus(transport, nodes=nodes("ledger"), store=store) as bus:
        await bus.idle(timeout=LONG)
        named = "UnknownToken" if error is None else type(error).__name__
        assert [letter.error.split(":")[0] for letter in await bus.dead_letters()] == [named] * 5
        assert runs <= 10
        assert await notes(bus) == []
    async with fg.Bus(transport, nodes=nodes("tokens"), store=store, tokens=tokens) as bus:
        await bus.replay(*(letter.message_id for letter in await bus.dead_letters()))
        await bus.idle(timeout=LONG)
        assert await notes(bus) == [0, 1, 2, 3, 4]
        assert [letter.status for letter in await bus.dead_letters(status=None)] == ["resolved"] * 5


async def test_who_drops_an_attempt_leaves_the_claim_of_a_replay_that_has_begun(tmp_path: Path) -> None:
    """Without its claim the replay's token could never be claimed again, and the message would wait for ever."""
    clock = SystemClock()
    store = open_store(f"sqlite:{tmp_path}/a.db", clock)
    tokens = open_token_store(f"sqlite:{tmp_path}/tokens.db", clock)
    await store.open()
    await tokens.open()
    try:
        message, now = fg.ids.message_id(fg.ids.root_id(), "a"), await tokens.now()
        attempts = ["first", "replay"]
        await tokens.create([Token(attempt, message, "a", "shop", now, now + 60) for attempt in attempts])
        await store.insert_claim("a", message, "claim", "replay", now)
        assert await tokens.claim("replay", "claim") == "claimed"
        claims = claims_of("a", store, tokens, Alarms(), clock)
        assert claims is not None

        await claims.drop(message, "first")
        record = await store.claim_record("a", message)
        assert record is not None and record.attempt_id == "replay"
        assert await tokens.read("first") is None and await tokens.read("replay") is not None

        await claims.drop(message, "first", "replay")
        assert await store.claim_record("a", message) is None and await tokens.count() == 0
    finally:
        await tokens.close()
        await store.close()
