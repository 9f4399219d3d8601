"""Tokens in another database, without Spark: which runs are refused, recipient lists, and tasks that die on the way.

What may happen in between, step by step, is in tests/simulation; with Spark itself, in test_matrix.py.
"""

import asyncio
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.journal.reader import JournalReader
from faregate.core.alarms import Alarms
from faregate.core.dedup.claims import claims_of
from faregate.errors import ConfigurationError
from faregate.ports import faults
from faregate.ports.clock import SystemClock
from faregate.ports.schemes import open_store, open_token_store
from faregate.ports.tokens import Token
from faregate.ports.topology import Reading
from faregate.spark.runs.driver import Driver
from faregate.spark.runs.engine import Engine
from faregate.spark.runs.handover import hand_over
from faregate.spark.runs.rows import Places
from faregate.spark.runs.spec import RunSpec
from faregate.spark.runs.views import bindings_of
from tests.spark import run_shop
from tests.spark.run_rig import open_token_shop
from tests.spark.test_run_engine import Noted, Rig


class TokenRig(Rig):
    """A node that deduplicates by tokens, which are in a database of their own."""

    def __init__(self, folder: Path, url: str = "") -> None:
        super().__init__(folder, url, dedup="tokens")
        self.tokens = f"sqlite:{folder / 'tokens.db'}"
        object.__setattr__(self.spec, "tokens", self.tokens)
        self.journal = folder / "journal"
        self.queue = bindings_of(self.node, 1000)[0].queue

    def signals(self, count: int) -> list[tuple[Any, ...]]:
        return [self._row(number, f"t{number % 2}", attempt_id=f"attempt-{number}") for number in range(count)]

    async def make_tokens(self, count: int) -> None:
        store = open_token_store(self.tokens, SystemClock())
        await store.open()
        now = await store.now()
        for number in range(count):
            message_id = fg.ids.message_id(f"00000000-0000-7000-8000-{number:012d}", "reader")
            await store.create([Token(f"attempt-{number}", message_id, "reader", "author", now, now + 60)])
        await store.close()

    async def finish(self) -> None:
        """As the driver does when it has sent everything."""
        store, tokens = open_store(self.url, SystemClock()), open_token_store(self.tokens, SystemClock())
        await store.open()
        await tokens.open()
        claims = claims_of("reader", store, tokens, Alarms(), SystemClock())
        assert claims is not None
        await claims.finish_all(lambda: asyncio.sleep(0))
        await tokens.close()
        await store.close()

    def left(self) -> tuple[int, int]:
        """Tokens and claims."""
        with closing(sqlite3.connect(self.tokens.removeprefix("sqlite:"))) as connection:
            [(tokens,)] = connection.execute("select count(*) from faregate_tokens").fetchall()
        return tokens, int(self._query("select count(*) from faregate_claims")[0][0])

    async def bus(self, *nodes: fg.Node, tokens: str = "") -> None:
        async with fg.Bus(
            f"journal:{self.journal}", nodes=[fg.Node("author"), *nodes], store=self.url, tokens=tokens or self.tokens
        ):
            pass

    def take_log(self) -> None:
        hand_over(self.node, self.journal, open_store(self.url, SystemClock()), "log")

    def begin(self, tokens: str | None) -> dict[str, str]:
        """A driver that begins; how the node is on the recipient list then."""
        driver = Driver(self.node, self.url, self.journal, 1.0, 1000, (), tokens)
        try:
            driver.run(driver.open())
            driver.run(driver.subscribe())
            driver.run(driver.begin("run", {self.queue: Reading("log", 1)}, None, 0))
            assert driver._tokens is not None
            [found] = driver.run(driver._tokens.recipients(["event:author.Noted"])).values()
            return dict(found.modes)
        finally:
            driver.close()


@pytest.fixture
def token_rig(tmp_path: Path, store_url: str) -> TokenRig:
    return TokenRig(tmp_path, store_url)


POINTS = ("tokens.claim-recorded", "tokens.claimed", "unit.before-commit", "bus.before-settle")


@pytest.mark.parametrize("point", POINTS)
async def test_a_task_that_dies_on_the_way_is_repeated(token_rig: TokenRig, point: str) -> None:
    rows = token_rig.signals(4)
    await token_rig.make_tokens(4)
    left = [2]  # at the second message: the first is committed

    async def die(name: str) -> None:
        if name == point:
            left[0] -= 1
            if not left[0]:
                raise faults.Crash

    faults.hook = die
    try:
        async with token_rig.engine() as engine:
            with suppress(faults.Crash):
                await engine.run(rows)
    finally:
        faults.hook = None
    assert left[0] <= 0, f"{point} was not reached"
    async with token_rig.engine() as engine:
        counts = await engine.run(rows)
        assert counts["handled"] + counts.get("duplicate", 0) == 4, counts
        assert token_rig.left() == (4, 4), "a task forgets nothing: what it sent is not out"
        assert await engine.run(rows) == {"duplicate": 4, "last": 3}
        await token_rig.finish()
        assert token_rig.left() == (0, 0)
        assert await engine.run(rows) == {"duplicate": 4, "last": 3}
    token_rig.check(range(4))
    assert token_rig._query("select count(*) from faregate_ledger")[0][0] == 0


async def test_a_zombie_beside_its_retry(token_rig: TokenRig) -> None:
    rows = token_rig.signals(20)
    await token_rig.make_tokens(20)

    async def slow(noted: Noted) -> None:
        await asyncio.sleep(0)

    token_rig.before = slow
    async with token_rig.engine() as one, token_rig.engine() as other:
        await asyncio.gather(one.run(rows), other.run(rows))
        for row in await token_rig.due_rows(one):  # who lost a claim at its commit may have parked it
            await one.run([row])
    token_rig.check(range(20))


async def test_a_dead_letter_takes_its_token_along(token_rig: TokenRig) -> None:
    await token_rig.make_tokens(1)

    async def never(noted: Noted) -> None:
        raise fg.Permanent("never")

    token_rig.before = never
    async with token_rig.engine() as engine:
        assert await engine.run(token_rig.signals(1)) == {"dead": 1, "last": 0}
        assert token_rig.left() == (0, 0)


async def test_the_token_of_another_node_is_not_used(token_rig: TokenRig) -> None:
    """A message from before the node was known, as it was sent to somebody else."""
    await token_rig.make_tokens(1)
    row = token_rig._row(0, "t0", attempt_id="attempt-0", recipients=("another",))
    async with token_rig.engine() as engine:
        assert await engine.run([row]) == {"handled": 1, "last": 0}
        assert token_rig.left() == (1, 0)


def test_a_run_puts_its_node_on_the_recipient_lists(token_rig: TokenRig) -> None:
    asyncio.run(token_rig.bus())
    assert token_rig.begin(token_rig.tokens) == {"reader": "tokens"}
    assert token_rig.begin(token_rig.tokens) == {"reader": "tokens"}


def test_a_run_with_another_token_store_than_before_is_refused(token_rig: TokenRig, tmp_path: Path) -> None:
    """There it would find no token, and take every message for a duplicate."""
    asyncio.run(token_rig.bus(token_rig.node))  # now its queue is there, and senders make tokens
    for _ in range(2):
        for tokens in (f"sqlite:{tmp_path / 'other.db'}", None):
            with pytest.raises(ConfigurationError, match=r"reader.* by tokens, and .* has no list that says so"):
                token_rig.begin(tokens)
        assert token_rig.begin(token_rig.tokens) == {"reader": "tokens"}
        token_rig.take_log()


def test_so_it_is_if_only_spark_ran_it(token_rig: TokenRig, tmp_path: Path) -> None:
    asyncio.run(token_rig.bus())
    with pytest.raises(ConfigurationError, match=r"Say which, with tokens=URL \(--tokens URL\)"):
        token_rig.begin(None)
    token_rig.begin(token_rig.tokens)
    token_rig.take_log()
    with pytest.raises(ConfigurationError, match="has no list that says so"):
        token_rig.begin(f"sqlite:{tmp_path / 'other.db'}")


def test_a_run_that_died_before_it_was_on_the_lists_is_repeated(token_rig: TokenRig) -> None:
    asyncio.run(token_rig.bus())
    driver = Driver(token_rig.node, token_rig.url, token_rig.journal, 1.0, 1000, (), token_rig.tokens)
    driver.run(driver.open())
    driver.close()
    token_rig.take_log()
    assert token_rig.begin(token_rig.tokens) == {"reader": "tokens"}


def test_messages_come_from_a_bus_and_go_to_one(tmp_path: Path) -> None:
    """All of it but for Spark: a bus makes tokens, a task handles, the driver makes those of what it sent, and forgets;
    nodes on a bus get that. In between the driver dies, twice."""
    shop = open_token_shop(tmp_path, None)
    shop.place(8)
    given = ("stamping", "tests.spark.run_shop:stamping", None, shop.store, "json", 1 << 20)
    spec = RunSpec("stamping", *given, tokens=shop.tokens)
    places = Places(spec)
    orders = [(at, each) for at, each in JournalReader(shop.journal).envelopes() if each.type == "OrderPlaced"]
    assert all(each.attempt_id is not None for _, each in orders)
    rows = [places.row(0, envelope, offset, 0.0, None) for offset, envelope in orders]

    async def task() -> dict[str, int]:
        engine = Engine(spec)
        await engine.open()
        try:
            return await engine.run(rows)
        finally:
            await engine.close()

    def begin() -> Driver:
        driver = Driver(run_shop.stamping, shop.store, shop.journal, 3600.0, 1 << 20, (), shop.tokens)
        driver.run(driver.open())
        driver.run(driver.subscribe())
        queue = places.bindings[0].queue
        driver.run(driver.begin("run", {queue: JournalReader(shop.journal).topology().reading(queue)}, None, 0))
        return driver

    begin().close()
    assert asyncio.run(task())["handled"] == 8
    assert shop.left() == {"tokens": 8, "claims": 8, "outbox": 16}
    for point in ("tokens.created", "tokens.deleted"):
        faults.hook = _crash_at(point)
        with pytest.raises(faults.Crash):
            begin()
        faults.hook = None
    driver = begin()
    assert asyncio.run(task()) == {"duplicate": 8, "last": rows[-1][0]}
    driver.run(driver.finish_batch(rows[-1][0] + 1))
    driver.close()
    assert shop.left()["claims"] == shop.left()["outbox"] == 0
    sent = shop.log("Stamped")
    assert {each.recipients for each in sent} == {("filing",)} and None not in {each.attempt_id for each in sent}
    shop.check(8)
    shop.run_bus("payments", "filing")
    shop.check(8, "charges")
    shop.check(8, "files")


def _crash_at(point: str) -> Any:
    async def hook(name: str) -> None:
        if name == point:
            raise faults.Crash

    return hook


def test_what_cannot_be_is_refused(token_rig: TokenRig, tmp_path: Path) -> None:
    asyncio.run(token_rig.bus())
    given: dict[str, Any] = {"source": token_rig.journal, "checkpoint": tmp_path / "checkpoint"}
    node = "tests.spark.run_shop:counting"
    spark: Any = object()
    with pytest.raises(ConfigurationError, match="tokens= belongs to a node with a store, and 'counting' has none"):
        fg.spark.run(node, spark, tokens=token_rig.tokens, **given)
    store: Any = object()
    with pytest.raises(ConfigurationError, match="tokens= got a object, an object, which cannot travel"):
        fg.spark.run(node, spark, store=token_rig.url, tokens=store, **given)
    with pytest.raises(ConfigurationError, match="memory: is a database of one process"):
        Driver(token_rig.node, token_rig.url, token_rig.journal, 1.0, 1000, (), "memory:")
