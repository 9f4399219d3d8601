"""Handlers on Spark (docs/spark/handlers.md). A handler is written once and runs on either engine, so most of these
tests give the same input to a bus and to Spark, and compare what is in the store, the dead letters and what was
sent."""

import asyncio
import contextlib
import json
import shutil
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from typer.testing import CliRunner

import faregate as fg
from examples.shop import app as shop_app
from examples.shop.messages import OrderPlaced
from faregate.broker.journal import JournalReader
from faregate.cli import app as cli
from faregate.testing.store_subjects import postgres_schema
from faregate.transports.journal import JournalTransport
from tests.presence import address
from tests.spark import nodes as worker_nodes
from tests.spark.nodes import (
    Again,
    Brief,
    Fact,
    Loose,
    Order,
    Ping,
    Probe,
    Step,
    Stepped,
    Turn,
    desk,
    glance,
    mirror,
    probe,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.services

LONG = 60  # seconds until a run, or a bus, that does not end is failed
Letter = tuple[Any, dict[str, Any]]
"""A message, and the options of `bus.publish` (or of `bus.send`, with `to`)."""


class Misread(fg.Event, wire="Step"):
    """What a careless sender makes of a `Step`: its key is a number."""

    key: int


class Place:
    """A journal, a store and a checkpoint in a folder, and what is in them."""

    def __init__(self, folder: Path, store: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.journal = folder / "journal"
        self.store = store or f"sqlite:{folder}/store.db"
        self.checkpoint = folder / "checkpoint"

    def bus(self, *nodes: fg.Node, store: bool = True, **options: Any) -> fg.Bus:
        authors = [fg.Node("author"), fg.Node("second"), fg.Node("third")]
        stores = {node.name: self.store for node in nodes} if store else None
        return fg.Bus(f"journal:{self.journal}", nodes=[*authors, *nodes], store=stores or None, **options)

    def publish(self, letters: Sequence[Letter], *nodes: fg.Node, settle: bool = False, store: bool = True) -> None:
        """As another process would: the bus runs only the nodes that are given."""

        async def main() -> None:
            async with self.bus(*nodes, store=store) as bus:
                await put(bus, letters)
                if settle:
                    await bus.idle(LONG)

        asyncio.run(main())

    def bind(self, *nodes: fg.Node, store: bool = True) -> None:
        self.publish([], *nodes, store=store)

    def run(self, spark: "SparkSession", node: fg.Node = desk, *, store: bool = True, **options: Any) -> Counter[str]:
        """Once, over what is there."""
        run = fg.spark.run(
            node,
            spark,
            source=f"journal:{self.journal}",
            store=self.store if store else None,
            checkpoint=options.pop("checkpoint", self.checkpoint),
            **options,
        )
        try:
            run.await_termination(LONG)
        finally:
            run.stop()
        return Counter(run.outcomes)

    def run_one_batch(self, spark: "SparkSession", messages: int) -> None:
        """Stop in the middle of what there is."""
        seen: list[Any] = []
        run = fg.spark.run(
            desk,
            spark,
            source=f"journal:{self.journal}",
            store=self.store,
            checkpoint=self.checkpoint,
            trigger="10m",
            max_messages_per_trigger=messages,
            on_progress=seen.append,
        )
        deadline = time.time() + LONG
        while not any(progress.outcomes for progress in seen) and time.time() < deadline:
            time.sleep(0.02)
        run.stop()
        assert run.outcomes["handled"] > 0

    def finish(self, spark: "SparkSession", node: fg.Node = desk, **options: Any) -> Counter[str]:
        """Again and again, until nothing is parked."""
        outcomes: Counter[str] = Counter()
        for _ in range(12):
            outcomes.update(self.run(spark, node, **options))
            due = [row[0] for row in self.rows("select due_at from faregate_parked where node = ?", node.name)]
            if not due:
                return outcomes
            time.sleep(max(0.0, min(due) - time.time()) + 0.05)
        raise AssertionError(f"after a dozen runs {len(due)} messages are still parked: {outcomes}")

    def rows(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        if self.store.startswith("sqlite:"):
            with contextlib.closing(sqlite3.connect(self.store.removeprefix("sqlite:"))) as connection:
                return connection.execute(sql, parameters).fetchall()
        import psycopg

        with psycopg.connect(self.store) as connection:
            return connection.execute(sql.replace("?", "%s").encode(), parameters).fetchall()

    def notes(self) -> list[tuple[Any, ...]]:
        return sorted(self.rows("select * from notes"), key=repr)

    def order(self, handler: str, key: str = "-") -> list[int]:
        """The numbers that a handler took of one key, in the order in which it did."""
        return [
            row[0]
            for row in self.rows("select number from notes where handler = ? and key = ? order by seq", handler, key)
        ]

    def handled(self, handler: str) -> dict[str, list[int]]:
        keys: dict[str, list[int]] = defaultdict(list)
        for key, number in self.rows("select key, number from notes where handler = ? order by key, seq", handler):
            keys[key].append(number)
        return dict(keys)

    def dead(self) -> list[tuple[Any, ...]]:
        sql = "select node, type, reason, status, tries, redeliveries, publication_id, message_id from faregate_dead"
        return sorted((*row[:7], _text(row[7])) for row in self.rows(sql))

    def envelopes(self, *types: str) -> list[fg.Envelope]:
        found = [envelope for _, envelope in JournalReader(self.journal).envelopes(0)]
        return [envelope for envelope in found if not types or envelope.type in types]

    def scheduled(self, *types: str) -> list[fg.Envelope]:
        """What a bus keeps until it is due; Spark sends it at once."""
        found: list[tuple[Any, ...]] = []
        with contextlib.suppress(sqlite3.OperationalError):  # there is no store
            found = self.rows("select envelope from faregate_scheduled order by seq")
        envelopes = [msgspec.msgpack.decode(packed, type=fg.Envelope) for (packed,) in found]
        return [envelope for envelope in envelopes if not types or envelope.type in types]

    def sent(self, *types: str) -> list[tuple[Any, ...]]:
        """Everything in the log, and what waits at its sender, but times and places; whoever publishes twice is seen"""
        return sorted(
            (
                (
                    found.publication_id,
                    found.type,
                    found.kind,
                    found.source,
                    found.destination,
                    found.correlation_id or found.publication_id,
                    found.causation_id,
                    found.depth,
                    found.body,
                    found.deliver_at is not None,
                    sorted(item for item in found.headers.items() if item[0] not in ("log", "mended", "until")),
                )
                for found in [*self.envelopes(*types), *self.scheduled(*types)]
            ),
            key=repr,
        )

    def numbers(self, type_: str, key: str | None = None) -> list[int]:
        """The numbers of the messages of one type and key, in the order of the log."""
        bodies = [json.loads(envelope.body) for envelope in self.envelopes(type_)]
        return [body["number"] for body in bodies if key is None or body["key"] == key]

    def handover(self, node: fg.Node, to: str, monkeypatch: pytest.MonkeyPatch, *, store: bool = True) -> str:
        """`faregate spark handover`, as a person gives it; returns what it says."""
        result = self.try_handover(node, to, monkeypatch, store=store)
        assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
        return str(result.output)

    def try_handover(self, node: fg.Node, to: str, monkeypatch: pytest.MonkeyPatch, *, store: bool = True) -> Any:
        monkeypatch.setattr(worker_nodes, "bus", self.bus(node, store=store))
        return CliRunner().invoke(cli, ["spark", "handover", "tests.spark.nodes:bus", node.name, "--to", to])


def _text(message_id: Any) -> str:
    return message_id.hex() if isinstance(message_id, bytes) else str(message_id).replace("-", "")


async def put(bus: fg.Bus, letters: Sequence[Letter]) -> None:
    for message, given in letters:
        options = {"node": "author", **given}
        if "to" in options:
            await bus.send(message, **options)
        else:
            await bus.publish(message, **options)


def keyed(letters: Sequence[Letter], prefix: str = "m") -> list[Letter]:
    """With an idempotency key each, so that two worlds give them the same ids."""
    return [(message, {"idempotency_key": f"{prefix}{n}", **given}) for n, (message, given) in enumerate(letters)]


def steps(key: str, *numbers: int, **fields: Any) -> list[Letter]:
    return keyed([(Step(key=key, number=number, **fields), {}) for number in numbers], f"{key}-{min(numbers)}-")


@contextlib.asynccontextmanager
async def _schemas(count: int) -> AsyncIterator[list[str]]:
    url = address("FAREGATE_TEST_POSTGRES")
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(postgres_schema(url)) for _ in range(count)]


@contextlib.contextmanager
def places(kind: str, folder: Path, *names: str) -> Iterator[list[Place]]:
    """Places with a store of this kind each."""
    if kind == "sqlite":
        yield [Place(folder / name) for name in names]
        return
    with asyncio.Runner() as runner:
        schemas = _schemas(len(names))
        urls = runner.run(schemas.__aenter__())
        try:
            yield [Place(folder / name, url) for name, url in zip(names, urls, strict=True)]
        finally:
            runner.run(schemas.__aexit__(None, None, None))


STORES = pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgres", marks=pytest.mark.full)])


# --- the whole shop, on either engine ---------------------------------------------------------------------


def shop_orders() -> list[Letter]:
    """Some for which the bank is silent for a while, up to a redelivery; some impossible; several customers."""
    wanted = {0: 8, 1: 1, 2: 1, 3: 1, 4: 2}
    ids: list[str] = []
    number = 0
    while any(wanted.values()):
        failures = shop_app.bank.failures_of(f"o{number}")
        if wanted[failures]:
            wanted[failures] -= 1
            ids.append(f"o{number}")
        number += 1
    orders = [OrderPlaced(order_id=id_, customer=f"c{n % 3}", total=n + 1) for n, id_ in enumerate(ids)]
    orders += [OrderPlaced(order_id="impossible", customer="c1", total=0), orders[3]]
    return [(order, {"node": "shop", "idempotency_key": order.order_id}) for order in orders]


SHOP_TABLES = {
    "invoices": "order_id, customer, total, message_id",
    "charges": "order_id, amount, message_id",
    "parcels": "order_id, message_id",
}


@STORES
def test_the_shop_has_the_same_effects_and_ids_on_the_bus_and_on_spark(
    spark: "SparkSession", tmp_path: Path, kind: str
) -> None:
    orders = shop_orders()
    with places(kind, tmp_path, "bus", "spark") as (on_bus, on_spark):

        async def by_bus() -> None:
            nodes = [shop_app.shop, shop_app.billing, shop_app.payments, shop_app.shipping]
            async with fg.Bus(f"journal:{on_bus.journal}", nodes=nodes, store=on_bus.store) as bus:
                await put(bus, orders)
                await bus.idle(LONG)

        async def by_shop() -> None:
            async with fg.Bus(f"journal:{on_spark.journal}", nodes=[shop_app.shop]) as bus:
                await put(bus, orders)

        async def empty() -> None:
            async with fg.Bus(f"journal:{on_spark.journal}", nodes=[shop_app.shop]):
                pass

        asyncio.run(by_bus())
        asyncio.run(empty())
        consumers = [shop_app.billing, shop_app.payments, shop_app.shipping]
        for node in consumers:  # so that they are recipients, and commands to them routable
            on_spark.run(spark, node, checkpoint=on_spark.folder / node.name)
        asyncio.run(by_shop())
        for node in consumers:
            on_spark.finish(spark, node, checkpoint=on_spark.folder / node.name)

        for table, columns in SHOP_TABLES.items():
            rows = sorted(on_spark.rows(f"select {columns} from {table}"))
            assert rows == sorted(on_bus.rows(f"select {columns} from {table}")), table
            assert len(rows) == 13, "every order but the impossible one, once"
        assert on_spark.sent() == on_bus.sent()
        assert on_spark.dead() == on_bus.dead()
        assert len(on_spark.dead()) == 1

        effects = [
            f"{node}:select message_id from {t}"
            for node, t in zip(("billing", "payments", "shipping"), SHOP_TABLES, strict=True)
        ]
        audit = fg.spark.audit(spark, journal=on_spark.journal, store=on_spark.store, effects=effects, at_rest=True)
        assert audit.ok, audit.findings.collect()
        assert {row["node"]: (row["handled"], row["dead"]) for row in audit.table} == {
            "billing": (13, 1),
            "payments": (13, 0),
            "shipping": (13, 0),
        }


# --- a node with everything, on either engine -------------------------------------------------------------


def everything(log: Path) -> list[Letter]:
    logged = {"headers": {"log": str(log)}}
    letters: list[Letter] = [
        (Step(key="a", number=0), logged),
        (Step(key="a", number=1, fails=1), logged),  # parked; the rest of its key waits behind it
        (Step(key="b", number=0, tries=1), {}),  # the second try helps
        (Step(key="b", number=1, permanent=True), logged),
        (Step(key="b", number=2), {}),
        (Step(key="c", number=0, fails=9), {}),  # a dead letter after its redeliveries
        (Step(key="c", number=1), {}),
        (Step(key="a", number=2), {}),
        (Step(key="a", number=3, fails=2), {}),
        (Step(key="a", number=4), {}),
        (Step(key="e", number=0), {"headers": {"skip": "1"}}),
        (Step(key="e", number=1), {"headers": {"twice": "1"}}),
        (Step(key="f", number=0), {"headers": {"lost": "1"}}),
        (Step(key="f", number=1), {}),
        (Misread(key=7), {}),
        *[(Loose(key="l", number=number, fails=int(number == 1)), {}) for number in range(3)],
        *[(Turn(number=number, fails=int(number == 2)), {}) for number in range(5)],
        *[(Ping(key="p", number=number), {}) for number in range(3)],
        (Brief(number=0), {}),
        (Order(number=1), {"to": "desk"}),
        (Order(number=2), {"to": "desk", "delay": 0.2}),
    ]
    for source in ("author", "second", "third"):
        letters += [(Fact(order_no=no, number=n), {"node": source}) for n, no in enumerate(["x", "y", "x", "x"])]
    return keyed(letters)


class Played:
    def __init__(self, bus: Place, spark: Place, outcomes: Counter[str], logs: tuple[str, str]) -> None:
        self.bus, self.spark, self.outcomes, self.logs = bus, spark, outcomes, logs


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.full)])
def played(request: pytest.FixtureRequest, spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same messages, handled by a bus and by Spark."""
    folder = tmp_path_factory.mktemp("everything")
    with places(request.param, folder, "bus", "spark") as (on_bus, on_spark):
        log = folder / "log"
        letters = everything(log)
        on_bus.bind(desk)
        on_bus.publish(letters)
        time.sleep(0.6)  # the brief one expires
        on_bus.publish([], desk, settle=True)
        bus_log = log.read_text()
        log.unlink()

        on_spark.bind()
        on_spark.run(spark)  # takes the subscriptions
        on_spark.publish(letters)
        time.sleep(0.6)
        outcomes = on_spark.finish(spark)
        yield Played(on_bus, on_spark, outcomes, (bus_log, log.read_text()))


def test_both_engines_write_the_same_rows(played: Played) -> None:
    for handler in ("step", "loose", "turn", "ping", "brief", "order"):
        theirs, ours = ([row for row in place.notes() if row[0] == handler] for place in (played.bus, played.spark))
        assert ours == theirs, handler


def test_both_engines_send_the_same_publications_and_each_once(played: Played) -> None:
    ours = played.spark.sent()
    assert max(Counter(row[0] for row in ours).values()) == 1
    mine = [row for row in ours if json.loads(row[8]).get("key") not in ("x", "y")]
    theirs = [row for row in played.bus.sent() if json.loads(row[8]).get("key") not in ("x", "y")]
    assert mine == theirs


def test_both_engines_make_the_same_dead_letters_for_the_same_reasons(played: Played) -> None:
    assert played.spark.dead() == played.bus.dead()
    assert Counter((row[1], row[2]) for row in played.spark.dead()) == {
        ("Step", "permanent"): 1,
        ("Step", "failed"): 1,
        ("Step", "undecodable"): 1,
        ("Brief", "expired"): 1,
        ("Lost", "unroutable"): 1,
    }


def test_a_key_stays_in_order_behind_what_is_parked(played: Played) -> None:
    handled = played.spark.handled("step")
    assert handled["a"] == [0, 1, 2, 3, 4]
    assert handled["b"] == [0, 2]
    assert handled["c"] == [1]
    assert handled["f"] == [0, 1]
    assert played.spark.numbers("Stepped", "a") == [0, 1, 2, 3, 4], "outgoing messages have the order, too"


def test_loose_order_lets_others_pass_what_is_parked_and_serial_order_does_not(played: Played) -> None:
    assert played.spark.order("loose", "l") == [0, 2, 1]
    assert played.spark.order("turn") == played.bus.order("turn") == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("handler", ["fact", "eager", "lazy"])
def test_a_business_key_is_handled_once(played: Played, handler: str) -> None:
    handled = played.spark.handled(handler)
    assert {key: len(numbers) for key, numbers in handled.items()} == {"x": 1, "y": 1}


def test_middlewares_run_around_the_handler_after_it_and_around_what_it_sends(played: Played) -> None:
    theirs, ours = (Counter(log.splitlines()) for log in played.logs)
    assert ours["after dead"] == 1
    assert ours["after redelivered"] == 1
    assert ours["after handled"] >= 2
    assert set(ours) == set(theirs)
    assert {envelope.headers.get("by") for envelope in played.spark.envelopes("Stepped")} == {"desk"}
    assert played.spark.order("step", "e") == played.bus.order("step", "e")


def test_outcomes_say_how_messages_ended(played: Played) -> None:
    outcomes = played.outcomes
    assert outcomes["dead"] == 4
    assert outcomes["skipped"] >= 1
    assert outcomes["redelivered"] == 7, "a1, a3 twice, c0 twice, a loose one, a turn"
    assert outcomes["parked"] >= 4, "a2, a3 and a4 behind a1, c1 behind c0"


def test_nothing_is_left_when_all_is_done(played: Played) -> None:
    for table in ("faregate_parked", "faregate_outbox"):
        assert played.spark.rows(f"select count(*) from {table}") == [(0,)], table


def test_the_audit_holds_for_a_node_with_everything(played: Played, spark: "SparkSession") -> None:
    audit = fg.spark.audit(
        spark,
        journal=played.spark.journal,
        store=played.spark.store,
        at_rest=True,
        unordered=["desk.Loose.author", "desk.Turn.author"],
    )
    assert audit.ok, audit.findings.collect()


# --- scheduled, put off, beyond its time ------------------------------------------------------------------


@pytest.mark.full
def test_a_scheduled_message_is_handled_when_it_is_due_and_holds_nobody_up(
    spark: "SparkSession", tmp_path: Path
) -> None:
    place = Place(tmp_path)
    place.bind()
    place.run(spark)
    later = [(Step(key="d", number=0), {"delay": 20, "idempotency_key": "later"})]
    until = tmp_path / "until"
    put_off = [(Again(number=5), {"to": "desk", "headers": {"until": str(until)}})]
    place.publish([*later, *steps("d", 1, 2), *put_off])
    outcomes = place.run(spark)
    assert place.order("step", "d") == [1, 2], "delayed messages have no order"
    assert outcomes["scheduled"] == 1
    assert place.order("again", "5") == []
    until.touch()
    place.finish(spark)
    assert place.order("step", "d") == [1, 2, 0]
    assert place.order("again", "5") == [5], "RetryAfter uses up no try, and there is no redelivery to use up"
    assert place.dead() == []


# --- dead letters -----------------------------------------------------------------------------------------


@pytest.mark.full
@STORES
def test_a_replayed_dead_letter_is_handled_once_on_spark(spark: "SparkSession", tmp_path: Path, kind: str) -> None:
    with places(kind, tmp_path, "x") as (place,):
        mended = tmp_path / "mended"
        headers = {"mended": str(mended)}
        place.bind()
        place.publish([(Step(key="a", number=0, permanent=True), {"headers": headers}), *steps("a", 1, 2)])
        assert place.run(spark)["dead"] == 1
        [letter] = place.dead()
        assert letter[3] == "open"
        mended.touch()
        for _ in range(2):  # a replay that is asked for twice has one effect
            result = CliRunner().invoke(cli, ["dead", "replay", place.store, "--all", "--status", "open"])
            assert result.exit_code == 0, result.output
            place.run(spark)
        place.finish(spark)
        assert place.order("step", "a") == [1, 2, 0]
        assert [row[3] for row in place.dead()] == ["resolved"]
        assert place.numbers("Stepped", "a") == [1, 2, 0]
        # the original copy, again, by another way
        fg.spark.replay(spark, journal=place.journal, types=["Step"], recipients=["desk"])
        place.publish([])
        outcomes = place.run(spark)
        assert outcomes["handled"] == 0
        assert outcomes["duplicate"] >= 3
        assert place.order("step", "a") == [1, 2, 0]


# --- checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.full
@STORES
def test_a_lost_or_an_older_checkpoint_neither_doubles_nor_loses(
    spark: "SparkSession", tmp_path: Path, kind: str
) -> None:
    with places(kind, tmp_path, "x") as (place,):
        place.bind()
        first = [*steps("a", 0, 1), *steps("a", 2, fails=1), *steps("a", 3), *steps("b", 0, permanent=True)]
        facts: list[Letter] = [(Fact(order_no="x", number=n), {}) for n in range(2)]
        pings: list[Letter] = [(Ping(key="p", number=n), {}) for n in range(3)]
        place.publish([*first, *facts, *pings, *[(Turn(number=n), {}) for n in range(3)]])
        place.run(spark)  # a2 and a3 are parked now
        older = tmp_path / "older"
        shutil.copytree(place.checkpoint, older)
        shutil.rmtree(place.checkpoint)
        place.finish(spark)
        place.publish([*steps("a", 4, 5), (Ping(key="p", number=3), {})])
        place.finish(spark)
        before = (place.notes(), place.sent(), place.dead())
        assert place.handled("step") == {"a": [0, 1, 2, 3, 4, 5]}
        assert place.order("ping", "p") == [0, 1, 2, 3]
        assert place.order("turn") == [0, 1, 2]

        shutil.rmtree(place.checkpoint)
        shutil.copytree(older, place.checkpoint)
        spark.conf.set("spark.sql.shuffle.partitions", "3")
        try:
            place.finish(spark)
        finally:
            spark.conf.set("spark.sql.shuffle.partitions", "2")
        assert (place.notes(), place.sent(), place.dead()) == before
        place.publish(steps("a", 6))
        place.finish(spark)
        assert place.order("step", "a") == [0, 1, 2, 3, 4, 5, 6]
        assert place.numbers("Stepped", "a") == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_a_commit_that_spark_forgot_is_run_again_without_effect(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.bind()
    place.publish([*steps("a", 0, 1, 2), *[(Turn(number=n), {}) for n in range(3)]])
    place.run(spark)
    before = (place.notes(), place.sent())
    commits = [path for path in place.checkpoint.rglob("commits/*") if path.name.isdigit() or path.suffix == ".crc"]
    assert commits
    for path in commits:
        path.unlink()
    outcomes = place.run(spark)
    assert outcomes["handled"] == 0
    assert (place.notes(), place.sent()) == before
    place.publish(steps("a", 3))
    assert place.run(spark)["handled"] == 1
    assert place.handled("step") == {"a": [0, 1, 2, 3]}


# --- who may consume --------------------------------------------------------------------------------------


@pytest.mark.full
def test_one_engine_refuses_while_the_other_has_the_subscription(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    place.bind(desk)
    with pytest.raises(fg.ViewTaken, match="handover"):
        place.run(spark)
    place.handover(desk, "log", monkeypatch)
    with pytest.raises(fg.ViewTaken, match="handover"):
        place.bind(desk)
    place.publish([*steps("a", 0), (Order(number=1), {"to": "desk"})])  # it is still a recipient, and routable
    place.run(spark)
    assert place.handled("step") == {"a": [0]}
    assert place.handled("order") == {"1": [1]}
    place.handover(desk, "queue", monkeypatch)
    with pytest.raises(fg.ViewTaken, match="handover"):
        place.run(spark)
    place.publish(steps("a", 1), desk, settle=True)
    assert place.handled("step") == {"a": [0, 1]}


def test_a_handover_needs_the_bus_stopped_and_a_node_that_is_there(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    place.bind(desk)

    async def beside_a_bus() -> Any:
        async with place.bus():
            return await asyncio.to_thread(place.try_handover, desk, "log", monkeypatch)

    refused = asyncio.run(beside_a_bus())
    assert refused.exit_code != 0
    monkeypatch.setattr(worker_nodes, "bus", place.bus(desk))
    wrong = CliRunner().invoke(cli, ["spark", "handover", "tests.spark.nodes:bus", "dusk", "--to", "log"])
    assert wrong.exit_code != 0
    assert "dusk" in f"{wrong.output}{wrong.exception}"
    place.publish(steps("a", 0), desk, settle=True)  # the bus still has it
    assert place.handled("step") == {"a": [0]}


async def _stop_when(bus: fg.Bus, done: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.full
@STORES
def test_there_and_back_in_mid_stream(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with places(kind, tmp_path, "x") as (place,):

        async def first() -> None:  # the bus handles some, and stops while one waits for its redelivery
            async with place.bus(desk) as bus:
                await put(bus, [*steps("a", 0), *steps("a", 1, fails=1), *steps("a", 2), *steps("b", 0)])
                await put(bus, [(Turn(number=n, fails=int(n == 1)), {}) for n in range(3)])
                await _stop_when(bus, lambda: bus.outcomes()["redelivered"] == 2 and bus.outcomes()["handled"] == 3)

        asyncio.run(first())
        place.publish([*steps("a", 3), *steps("b", 1), (Turn(number=3), {})])  # into the queue that nobody consumes
        place.handover(desk, "log", monkeypatch)
        place.publish([*steps("a", 4), *steps("b", 2, fails=2), *steps("b", 3), *steps("c", 0)])
        place.publish([(Turn(number=4, fails=2), {}), (Turn(number=5), {})])
        place.finish(spark)
        assert place.handled("step") == {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 3], "c": [0]}
        assert sorted(place.order("turn")) == [0, 1, 2, 3, 4, 5]

        place.publish([*steps("a", 5, fails=1), *steps("a", 6), *steps("c", 1), (Turn(number=6, fails=1), {})])
        outcomes = place.run(spark)  # leaves a5, a6 and a turn parked
        assert outcomes["redelivered"] == 2
        place.publish([*steps("a", 7), *steps("c", 2), (Turn(number=7), {})])  # not read by Spark any more
        place.handover(desk, "queue", monkeypatch)
        assert place.rows("select count(*) from faregate_parked") == [(0,)], "the queue has them now"
        place.publish(steps("a", 8), desk, settle=True)
        assert place.handled("step") == {"a": list(range(9)), "b": [0, 1, 2, 3], "c": [0, 1, 2]}
        assert sorted(place.order("turn")) == list(range(8))

        place.publish([*steps("a", 9), *steps("c", 3)])
        place.handover(desk, "log", monkeypatch)
        place.publish(steps("a", 10))
        place.finish(spark)
        assert place.handled("step") == {"a": list(range(11)), "b": [0, 1, 2, 3], "c": [0, 1, 2, 3]}
        assert sorted(place.order("turn")) == list(range(8))
        for key, numbers in place.handled("step").items():
            assert place.numbers("Stepped", key) == numbers
        assert place.dead() == []


@pytest.mark.full
def test_history_that_spark_began_to_read_is_finished_by_the_bus(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was subscribed when these were published. Spark takes them from the beginning of the log, stops in the
    middle, with some parked, and the bus goes on."""
    place = Place(tmp_path)
    place.publish([*steps("a", 0), *steps("a", 1, fails=1), (Turn(number=0), {}), (Turn(number=1, fails=1), {})])
    place.publish([*steps("a", 2, 3), (Turn(number=2), {}), (Turn(number=3), {}), *steps("b", 0)])
    place.run_one_batch(spark, 5)
    assert place.handled("step") in ({"a": [0]}, {"a": [0, 1, 2]}), "what is parked may run between batches"
    place.publish([*steps("a", 4, fails=1), (Turn(number=4), {})])  # by now it is a recipient
    refused = place.try_handover(desk, "queue", monkeypatch)
    if refused.exit_code:  # it says that no queue can hold history; then Spark finishes that first
        assert "Run it on Spark" in f"{refused.output}{refused.exception}"
        place.run(spark)
        place.handover(desk, "queue", monkeypatch)
    place.publish([*steps("a", 5), (Turn(number=5), {})], desk, settle=True)
    assert place.handled("step") == {"a": [0, 1, 2, 3, 4, 5], "b": [0]}
    turns = place.order("turn")
    assert sorted(turns) == [0, 1, 2, 3, 4, 5]
    assert [number for number in turns if number != 1] == [0, 2, 3, 4, 5]
    assert place.dead() == []


def test_a_node_without_a_store_is_handed_over_only_with_an_empty_queue(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)
    place.bind(mirror, store=False)
    place.publish(steps("a", 0))
    refused = place.try_handover(mirror, "log", monkeypatch, store=False)
    assert refused.exit_code != 0, refused.output
    assert place.envelopes("Reflected") == []
    place.publish([], mirror, settle=True, store=False)
    place.handover(mirror, "log", monkeypatch, store=False)
    place.publish(steps("a", 1))
    place.run(spark, mirror, store=False)
    assert place.numbers("Reflected", "a") == [0, 1]
    # All that is left in the log is what it sent itself: nothing waits for it.
    place.handover(mirror, "queue", monkeypatch, store=False)
    place.publish(steps("a", 2), mirror, settle=True, store=False)
    assert place.numbers("Reflected", "a") == [0, 1, 2]


# --- what a handler sees ----------------------------------------------------------------------------------


def probes(ready: float) -> list[Letter]:
    return keyed(
        [
            (Probe(name="plain"), {}),
            (Probe(name="grouped", group=7), {"headers": {"a": "b", "ü": "☃"}}),
            (Probe(name="grouped", group=-7), {}),
            (Probe(name="ü☃" * 400, group=7), {}),  # travels compressed
            (Probe(name="later", what="later"), {}),
            (Probe(name="twins", what="twins"), {}),
            (Probe(name="bare", what="bare"), {}),
            (Probe(name="odd", what="odd"), {}),
            (Probe(name="skipped"), {"headers": {"skip": "1"}}),
            (Probe(name="loop", what="loop"), {}),
            (Probe(name="off", what="unavailable", group=9), {"headers": {"from": f"{ready}"}}),
            (Probe(name="behind", group=9), {}),
        ],
        "probe",
    )


@pytest.mark.parametrize("store", [pytest.param(True, marks=pytest.mark.full), False], ids=["store", "no store"])
def test_a_handler_sees_and_sends_the_same_on_either_engine(spark: "SparkSession", tmp_path: Path, store: bool) -> None:
    on_bus, on_spark = Place(tmp_path / "bus"), Place(tmp_path / "spark")
    letters = probes(time.time() + 1)
    letters = letters if store else letters[:-2]  # without a store nothing can wait

    async def publish(place: Place) -> None:
        async with place.bus(compress_above=100) as bus:
            await put(bus, letters)

    async def dead_letters(place: Place, *nodes: fg.Node) -> list[tuple[Any, ...]]:
        async with place.bus(*nodes, store=store) as bus:
            return sorted(
                (p.node, p.reason, p.envelope.publication_id, p.tries) for p in await bus.dead_letters("probe")
            )

    on_bus.bind(probe, store=store)
    asyncio.run(publish(on_bus))
    on_bus.publish([], probe, settle=True, store=store)
    on_spark.bind()
    asyncio.run(publish(on_spark))
    for _ in range(12):
        outcomes = on_spark.run(spark, probe, store=store)
        parked = on_spark.rows("select count(*) from faregate_parked") if store else [(0,)]
        if outcomes.total() == 0 and parked == [(0,)]:
            break
        time.sleep(0.3)
    ours, theirs = (dict(zip([row[0] for row in rows], rows, strict=True)) for rows in (on_spark.sent(), on_bus.sent()))
    assert ours.keys() == theirs.keys()
    for publication_id, row in ours.items():
        assert row == theirs[publication_id]
    assert len(on_spark.envelopes()) == len(ours), "each once"
    if store:
        columns = "reason, publication_id, status, tries, redeliveries"
        dead = [sorted(place.rows(f"select {columns} from faregate_dead")) for place in (on_spark, on_bus)]
        assert dead[0] == dead[1]
        assert len(dead[0]) == 3
    else:
        gone = asyncio.run(dead_letters(on_spark))
        assert gone == asyncio.run(dead_letters(on_bus, probe))
        assert len(gone) == 3


@pytest.mark.full
def test_two_runs_of_a_node_at_once_double_nothing(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.bind()
    place.run(spark)
    place.publish([*steps("a", 0, 1), *steps("b", 0), *steps("a", 2, fails=1), *steps("a", 3)])
    runs: list[Any] = []
    for name in ("checkpoint", "another"):
        try:
            runs.append(
                fg.spark.run(
                    desk,
                    spark,
                    source=f"journal:{place.journal}",
                    store=place.store,
                    checkpoint=tmp_path / name,
                    trigger="300ms",
                )
            )
        except fg.FaregateError:
            assert runs, "the first one is not refused"
    deadline = time.time() + LONG
    while len(place.notes()) < 5 and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    for run in runs:
        run.stop()
    place.finish(spark)
    assert place.handled("step") == {"a": [0, 1, 2, 3], "b": [0]}
    assert place.numbers("Stepped", "a") == [0, 1, 2, 3]


@pytest.mark.full
def test_what_a_web_request_put_into_the_outbox_is_sent_by_the_run(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.bind()
    place.run(spark)
    with contextlib.closing(sqlite3.connect(place.store.removeprefix("sqlite:"))) as connection:
        for _ in range(2):
            event = Stepped(key="web", number=1)
            publication_id = fg.outbox(connection, node="desk").publish(event, idempotency_key="1")
            connection.commit()
    place.run(spark)
    place.publish([])
    assert {(each.publication_id, each.headers["by"]) for each in place.envelopes("Stepped")} == {
        (publication_id, "desk")
    }
    assert place.numbers("Stepped") == [1]
    assert place.rows("select count(*) from faregate_outbox") == [(0,)]


@pytest.mark.full
def test_a_discarded_dead_letter_and_its_copies_are_never_handled(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.bind()
    mended = tmp_path / "mended"
    headers = {"mended": str(mended)}
    place.publish([(Step(key="a", number=0, permanent=True), {"headers": headers}), *steps("a", 1)])
    place.run(spark)
    for command in (["replay"], ["discard", "--yes"]):  # a replay under way does not run any more
        result = CliRunner().invoke(cli, ["dead", command[0], place.store, "--all", "--status", "open", *command[1:]])
        if command[0] == "discard":
            options = ["--all", "--status", "replayed", "--yes"]
            result = CliRunner().invoke(cli, ["dead", "discard", place.store, *options])
        assert result.exit_code == 0, f"{result.output}{result.exception}"
    mended.touch()
    place.run(spark)
    place.run(spark)
    fg.spark.replay(spark, journal=place.journal, types=["Step"], recipients=["desk"])
    place.publish([])
    place.run(spark)
    assert place.handled("step") == {"a": [1]}
    assert [row[3] for row in place.dead()] == ["discarded"]


@pytest.mark.full
def test_scheduled_messages_and_counts_of_redeliveries_survive_handovers(
    spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path)

    async def first() -> None:
        async with place.bus(desk) as bus:
            at = {"at": time.time() + 10}
            await put(bus, [(Step(key="s", number=1), at), (Step(key="s", number=2), {"at": time.time() + 12})])
            await put(bus, [*steps("c", 0, fails=9), *steps("c", 1)])
            await _stop_when(bus, lambda: bus.outcomes()["redelivered"] == 1)

    began = time.time()
    asyncio.run(first())
    place.handover(desk, "log", monkeypatch)
    outcomes = place.run(spark)
    if time.time() < began + 9:
        assert outcomes["scheduled"] == 2
        assert "s" not in place.handled("step")
    place.handover(desk, "queue", monkeypatch)

    async def last() -> None:
        async with place.bus(desk) as bus:
            await _stop_when(bus, lambda: sum(map(len, place.handled("step").values())) == 3)
            await bus.idle(LONG)

    asyncio.run(last())
    assert place.handled("step") == {"s": [1, 2], "c": [1]}
    assert time.time() > began + 12, "not before they were due"
    [letter] = place.dead()
    assert letter[2] == "failed"
    assert letter[5] == 2, "two redeliveries, whoever made them"


# --- beside a bus, and stopping ---------------------------------------------------------------------------


def test_it_runs_beside_a_bus_shows_progress_and_stops_cleanly(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.bind()
    place.run(spark)  # takes the subscriptions, which needs the journal for itself
    heard: dict[str, list[int]] = defaultdict(list)
    audience = fg.Node("audience")

    @audience.on(Stepped, source="desk", key="key")
    async def hear(message: Stepped) -> None:
        heard[message.key].append(message.number)

    seen: list[Any] = []

    async def main() -> None:
        async with place.bus(audience, store=False) as bus:
            run = await asyncio.to_thread(
                lambda: fg.spark.run(
                    desk,
                    spark,
                    source=f"journal:{place.journal}",
                    store=place.store,
                    checkpoint=place.checkpoint,
                    trigger="200ms",
                    on_progress=seen.append,
                )
            )
            await put(bus, [*steps("a", 0, 1), *steps("b", 0)])
            await put(bus, [*steps("a", 2, fails=1), *steps("a", 3, 4)])
            async with asyncio.timeout(LONG):
                while sum(map(len, heard.values())) < 6:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(run.stop)
            assert run.outcomes["handled"] == 6
            assert sum(progress.outcomes.get("handled", 0) for progress in seen) == 6
            await asyncio.to_thread(run.await_termination, 5)  # it has ended
            await put(bus, steps("b", 1))
            await bus.idle(LONG)

    asyncio.run(main())
    assert heard == {"a": [0, 1, 2, 3, 4], "b": [0]}
    assert place.run(spark)["handled"] == 1, "what came after the stop"


# --- without a store: the fast path -----------------------------------------------------------------------


def fast_letters() -> list[Letter]:
    letters: list[Letter] = [(Step(key=f"k{n % 3}", number=n), {}) for n in range(12)]
    letters[4] = (Step(key="k1", number=4, permanent=True), {})
    letters[7] = (Misread(key=7), {})
    return keyed(letters, "f")


@pytest.mark.full
@pytest.mark.parametrize("name", ["mirror", pytest.param("glance", marks=pytest.mark.full)])
def test_without_a_store_outputs_go_out_once_in_order_under_the_ids_of_the_bus(
    spark: "SparkSession", tmp_path: Path, name: str
) -> None:
    node = {"mirror": mirror, "glance": glance}[name]
    letters = fast_letters()
    if node is mirror:
        letters += keyed([(Step(key="k0", number=20), {"headers": {"lost": "1"}})], "lost")
        letters += keyed([(Step(key="k0", number=21, tries=1), {}), (Step(key="k1", number=22, fails=9), {})], "g")
    on_bus, on_spark = Place(tmp_path / "bus"), Place(tmp_path / "spark")

    async def dead_letters(place: Place, *nodes: fg.Node) -> list[tuple[Any, ...]]:
        async with place.bus(*nodes, store=False) as bus:
            found = await bus.dead_letters(node.name)
            return sorted(
                (p.node, p.reason, p.envelope.type, p.envelope.publication_id, p.envelope.body) for p in found
            )

    on_bus.publish(letters, node, settle=True, store=False)
    on_spark.bind()
    on_spark.publish(letters)
    outcomes = on_spark.run(spark, node, store=False)
    assert on_spark.sent() == on_bus.sent()
    gone = asyncio.run(dead_letters(on_spark))
    assert gone == asyncio.run(dead_letters(on_bus, node))
    assert Counter(row[1] for row in gone) == (
        {"permanent": 1, "undecodable": 1, "unroutable": 1, "failed": 1}
        if node is mirror
        else {"permanent": 1, "undecodable": 1}
    )
    assert outcomes["handled"] == (12 if node is mirror else 10)
    assert outcomes["dead"] == (3 if node is mirror else 2)
    if node is mirror:
        assert on_spark.numbers("Reflected", "k0") == [0, 3, 6, 9, 20, 21]
        assert on_spark.numbers("Reflected", "k1") == [1, 10]

    before = on_spark.sent()
    assert on_spark.run(spark, node, store=False).total() == 0
    shutil.rmtree(on_spark.checkpoint)
    on_spark.run(spark, node, store=False)
    on_spark.publish([])
    assert on_spark.sent() == before, "the journal recognises the ids, also of another query"
    assert len(asyncio.run(dead_letters(on_spark))) >= len(gone)


@pytest.mark.full
def test_without_a_store_what_would_have_to_wait_fails_the_run_and_sends_nothing(
    spark: "SparkSession", tmp_path: Path
) -> None:
    place = Place(tmp_path)
    place.bind()
    due = time.time() + 45  # the first run has begun by then, however busy the machine is
    later: Letter = (Step(key="a", number=1), {"at": due, "idempotency_key": "later"})
    place.publish([*steps("a", 0), later, *steps("a", 2)])
    with pytest.raises(Exception, match=place.envelopes("Step")[1].publication_id):
        place.run(spark, mirror, store=False)
    assert place.envelopes("Reflected") == []
    time.sleep(max(0.0, due - time.time()) + 0.1)
    place.run(spark, mirror, store=False)
    assert sorted(place.numbers("Reflected", "a")) == [0, 1, 2]


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [True, False], ids=["store", "no store"])
def test_a_journal_that_is_missing_is_named(spark: "SparkSession", tmp_path: Path, store: bool) -> None:
    place = Place(tmp_path)
    with pytest.raises(fg.JournalNotFound, match=str(place.journal)):
        place.run(spark, desk if store else mirror, store=store)
    assert not place.journal.exists(), "looking for a journal must not make one"
    assert not place.checkpoint.exists()
    with pytest.raises(Exception, match=str(place.journal)):
        spark.read.format("faregate").load(str(place.journal)).count()


@pytest.mark.full
@pytest.mark.parametrize("store", [True, pytest.param(False, marks=pytest.mark.full)], ids=["store", "no store"])
def test_an_empty_journal_is_no_error(spark: "SparkSession", tmp_path: Path, store: bool) -> None:
    place = Place(tmp_path)
    place.bind()
    node = desk if store else mirror
    assert place.run(spark, node, store=store).total() == 0
    assert spark.read.format("faregate").load(str(place.journal)).count() == 0
    place.publish(steps("a", 0))
    assert place.run(spark, node, store=store)["handled"] == 1


def test_a_journal_written_by_a_newer_version_is_refused(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish(steps("a", 0))
    path = place.journal / "journal.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    for node in (desk, mirror):
        with pytest.raises(fg.JournalTooNew, match="99"):
            place.run(spark, node, store=node is desk)
    with pytest.raises(Exception, match="99"):
        spark.read.format("faregate").load(str(place.journal)).count()


@pytest.mark.full
def test_a_log_that_lost_messages_before_they_were_read_fails_the_run(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)

    async def fill(first: int, count: int) -> None:
        transport = JournalTransport(str(place.journal), segment_size=1 << 14)
        async with fg.Bus(transport, nodes=[fg.Node("author")]) as bus:
            for number in range(first, first + count):
                await bus.publish(Step(key="a" * 500, number=number), node="author")

    asyncio.run(fill(0, 60))
    place.run_one_batch(spark, 10)
    segments = sorted((place.journal / "segments").glob("*.seg"))
    for path in segments[:-1]:  # what retention does, had it not waited for this reader
        path.unlink()
    earliest = JournalReader(place.journal).earliest()
    assert earliest > 20, "the test needs messages to be gone"
    with pytest.raises(Exception, match=rf"\b{earliest}\b"):
        place.run(spark)
    assert place.order("step", "a" * 500) == list(range(10)), "nothing was skipped"
    with pytest.raises(Exception, match=rf"\b{earliest}\b"):
        spark.read.format("faregate").option("startingOffsets", "3").load(str(place.journal)).count()


OPTIONS = {
    "startingOffsets": ("soon", "earliest"),
    "endingOffsets": ("-4", "latest"),
    "failOnDataLoss": ("maybe", "true"),
    "minPartitions": ("0", "1"),
    "columns": ("offset,price", "publication_id"),
    "rows": ("bytes", "ranges"),
    "startingOfsets": ("earliest", "startingOffsets"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_malformed_option_is_named_with_what_is_allowed(spark: "SparkSession", tmp_path: Path, option: str) -> None:
    place = Place(tmp_path)
    place.bind()
    value, allowed = OPTIONS[option]
    with pytest.raises(Exception, match=f"(?i){option}") as caught:
        spark.read.format("faregate").option(option, value).load(str(place.journal)).count()
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"trigger": "sometimes"}, "available-now"),
        ({"trigger": -1}, "trigger"),
        ({"max_messages_per_trigger": 0}, "max_messages_per_trigger"),
        ({"codec": "pickle"}, "codec"),
        ({"retain_ledger": -5}, "retain_ledger"),
    ],
)
def test_a_malformed_argument_of_a_run_is_named(
    spark: "SparkSession", tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    place = Place(tmp_path)
    place.bind()
    with pytest.raises(fg.ConfigurationError, match=named):
        place.run(spark, **options)
    place.bind(desk)  # nothing was taken


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"source": "kafka:there"}, "journal:"),
        ({"store": "mysql://there"}, "sqlite:"),
        ({"store": "memory:"}, "memory"),
        ({"node": "tests.spark.nodes:dusk"}, "dusk"),
        ({"node": "tests.spark.no_such_module:desk"}, "no_such_module"),
        ({"node": "desk"}, "module:"),
        ({"node": fg.Node("made-here")}, "module"),
    ],
)
def test_what_a_run_cannot_use_is_refused_with_the_reason(
    spark: "SparkSession", tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    place = Place(tmp_path)
    place.bind()
    given = {"node": desk, "source": f"journal:{place.journal}", "store": place.store, **changed}
    node = given.pop("node")
    with pytest.raises(fg.ConfigurationError, match=named):
        fg.spark.run(node, spark, checkpoint=place.checkpoint, **given)
    place.bind(desk)  # nothing was taken


@pytest.mark.full
def test_one_bad_row_of_many_does_not_hold_the_others(spark: "SparkSession", tmp_path: Path) -> None:
    from pyspark.sql import functions as F

    place = Place(tmp_path)
    place.bind()
    place.publish([*steps("a", 0, 1), *steps("b", 0, permanent=True), (Misread(key=3), {}), *steps("c", 0)])
    broken = spark.range(2).select(F.lit("Step").alias("type"), F.lit("{not json").alias("body"))
    broken.write.format("faregate").option("source", "author").mode("append").save(str(place.journal))
    place.publish(steps("a", 2))
    outcomes = place.run(spark)
    assert place.handled("step") == {"a": [0, 1, 2], "c": [0]}
    assert Counter(row[2] for row in place.dead()) == {"permanent": 1, "undecodable": 3}
    assert (outcomes["handled"], outcomes["dead"]) == (4, 4)


@pytest.mark.full
def test_a_store_that_cannot_be_reached_fails_the_batch_and_the_next_run_goes_on(
    spark: "SparkSession", tmp_path: Path
) -> None:
    place = Place(tmp_path)
    place.bind()
    place.publish(steps("a", 0, 1))
    place.run(spark)
    place.publish([*steps("a", 2, 3), *steps("b", 0)])
    right = place.store
    place.store = "postgresql://nobody:x@127.0.0.1:9/nothing?connect_timeout=2"
    with pytest.raises(Exception, match=r"127\.0\.0\.1|connect|reach"):
        place.run(spark)
    place.store = right
    outcomes = place.run(spark)
    assert outcomes["handled"] == 3
    assert place.handled("step") == {"a": [0, 1, 2, 3], "b": [0]}
    assert {row[4] for row in place.notes()} == {0}, "no tries are used up"
    assert place.dead() == []


@pytest.mark.full
def test_a_store_that_is_locked_away_in_mid_run_doubles_nothing(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.bind()
    place.publish(steps("a", 0))
    place.run(spark)
    place.publish([*steps("a", 1, 2), *steps("b", 0)])
    hidden = tmp_path / "hidden"
    path = Path(place.store.removeprefix("sqlite:"))
    files = [
        path.with_name(path.name + end) for end in ("", "-wal", "-shm") if path.with_name(path.name + end).exists()
    ]
    hidden.mkdir()
    for file in files:
        shutil.move(file, hidden / file.name)
    path.mkdir()  # where the database was
    with pytest.raises(Exception, match=r"store\.db|open"):
        place.run(spark)
    path.rmdir()
    for file in files:
        shutil.move(hidden / file.name, file)
    assert place.run(spark)["handled"] == 3
    assert place.handled("step") == {"a": [0, 1, 2], "b": [0]}


def try_checkpoint(run: Callable[[], object]) -> None:
    """Refused with the reason, or of no effect: both are safe. Skipping what the other query has read is not."""
    try:
        run()
    except Exception as exc:
        assert "checkpoint" in str(exc)


@pytest.mark.full
def test_the_checkpoint_of_another_query_makes_a_run_skip_nothing(spark: "SparkSession", tmp_path: Path) -> None:
    one, other = Place(tmp_path / "one"), Place(tmp_path / "other")
    for place in (one, other):
        place.bind()
        place.publish(steps("a", 0, 1))
    one.run(spark)
    try_checkpoint(lambda: other.run(spark, checkpoint=one.checkpoint))  # of another journal
    other.run(spark)
    assert other.handled("step") == {"a": [0, 1]}
    try_checkpoint(lambda: one.run(spark, mirror, store=False))  # of another node
    one.run(spark, mirror, store=False, checkpoint=tmp_path / "mirror")
    assert one.numbers("Reflected", "a") == [0, 1]


@pytest.mark.full
def test_the_checkpoint_of_another_node_with_a_store_skips_nothing(spark: "SparkSession", tmp_path: Path) -> None:
    """It says how far desk has come, and billing must not begin behind what it never saw."""
    place = Place(tmp_path)
    place.bind()

    async def order(order_id: str) -> None:
        async with fg.Bus(f"journal:{place.journal}", nodes=[shop_app.shop]) as bus:
            await bus.publish(OrderPlaced(order_id=order_id, customer="c", total=1), node="shop")

    asyncio.run(order("1"))
    place.run(spark)
    asyncio.run(order("2"))
    try_checkpoint(lambda: place.run(spark, shop_app.billing))
    place.run(spark, shop_app.billing, checkpoint=tmp_path / "billing")
    assert place.rows("select order_id from invoices order by 1") == [("1",), ("2",)]


@pytest.mark.full
def test_the_checkpoint_of_another_kind_of_query_is_refused(spark: "SparkSession", tmp_path: Path) -> None:
    """A plain stream of Spark's own has used it."""
    place = Place(tmp_path)
    place.publish(steps("a", 0, 1))
    place.checkpoint.mkdir()
    query = spark.readStream.format("rate").load().writeStream.format("noop")
    query.option("checkpointLocation", str(place.checkpoint)).trigger(once=True).start().awaitTermination(LONG)
    try_checkpoint(lambda: place.run(spark))
    place.run(spark, checkpoint=tmp_path / "own")
    assert place.handled("step") == {"a": [0, 1]}


@pytest.mark.full
def test_a_start_below_the_floor_of_the_ledger_is_refused(spark: "SparkSession", tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.bind()
    place.publish(steps("a", 0, 1))
    floor = time.time()
    place.run(spark)
    with contextlib.closing(sqlite3.connect(place.store.removeprefix("sqlite:"))) as connection:
        # What retention does: the rows go, and the floor says so.
        connection.execute("delete from faregate_ledger")
        connection.execute("insert or replace into faregate_floor(node, floor) values ('desk', ?)", (floor,))
        connection.commit()
    place.publish(steps("a", 2))
    assert place.run(spark)["handled"] == 1, "with its checkpoint it goes on"
    shutil.rmtree(place.checkpoint)
    try:
        place.run(spark)  # the store may know how far it had come
    except fg.FaregateError as exc:
        assert type(exc).__name__ == "BelowFloor"
    assert place.handled("step") == {"a": [0, 1, 2]}
    assert place.dead() == []


@pytest.mark.full
def test_a_read_goes_on_only_with_the_journal_that_its_checkpoint_names(spark: "SparkSession", tmp_path: Path) -> None:
    one, other = Place(tmp_path / "one"), Place(tmp_path / "other")
    for place in (one, other):
        place.publish(steps("a", 0, 1))

    def read(place: Place) -> int:
        rows: list[int] = []
        query = (
            spark.readStream.format("faregate")
            .load(str(place.journal))
            .writeStream.foreachBatch(lambda batch, number: rows.append(batch.count()))
            .option("checkpointLocation", str(tmp_path / "check"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(LONG)
        return sum(rows)

    assert read(one) == 2
    with pytest.raises(Exception, match="journal"):
        read(other)
    one.publish(steps("a", 2))
    assert read(one) == 1


# --- the command ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_command_runs_a_node_and_says_how_it_ended(tmp_path: Path) -> None:
    import subprocess
    import sys

    place = Place(tmp_path)
    place.bind()
    place.publish([*steps("a", 0, 1, 2), *steps("b", 0, permanent=True)])
    command = [sys.executable, "-m", "faregate", "spark", "run", "tests.spark.nodes:desk", "--journal"]
    command += [str(place.journal), "--store", place.store, "--checkpoint", str(place.checkpoint), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(line.get("outcomes", {}).get("handled", 0) for line in lines if "outcomes" in line) >= 3
    assert place.handled("step") == {"a": [0, 1, 2]}
    wrong = subprocess.run(
        [*command[:-1], "--trigger", "sometimes"], capture_output=True, text=True, timeout=120, check=False
    )
    assert wrong.returncode != 0
    assert "available-now" in wrong.stderr
    assert "Traceback" not in wrong.stderr
