"""A node's store (README.md, Public API): `store=`, `schema=` and `ctx.db` inside the unit of work."""

import asyncio
import contextlib
import inspect
import sqlite3
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import faregate as fg

LONG = 30  # seconds until a test that hangs is failed
NOTES = "create table if not exists notes(id text primary key, text text)"


class Job(fg.Event):
    name: str


class Noted(fg.Event):
    text: str


class Look(fg.Command):
    """Asks a node what is in its store: the only way to see into `memory:` from outside."""

    sql: str = "select id, text from notes order by id"


@dataclass(frozen=True)
class WriteNote:
    """An effect."""

    name: str


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def looking(node: fg.Node) -> list[tuple[Any, ...]]:
    """Lets `node` answer `Look`; what it found last is in the list."""
    found: list[tuple[Any, ...]] = []

    @node.on(Look, retry=None, redeliver=None)
    async def look(cmd: Look, ctx: fg.Context) -> None:
        found[:] = [tuple(row) for row in await ctx.db.fetchall(cmd.sql)]

    return found


@pytest.fixture(params=["memory-memory", "memory-sqlite", "journal-memory", "journal-sqlite"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    transport, store = request.param.split("-")
    return (
        "memory:" if transport == "memory" else f"journal:{tmp_path}/data",
        "memory:" if store == "memory" else f"sqlite:{tmp_path}/store.db",
    )


async def test_the_example_of_the_design_works_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class OrderPlaced(fg.Event):
        order_id: str
        total: int

    class ChargeCard(fg.Command, wire="charge-card"):
        order_id: str
        amount: int

    class CardCharged(fg.Event):
        order_id: str

    shop = fg.Node("shop")
    billing = fg.Node("billing", schema="create table if not exists invoices(id text primary key, total integer)")
    payments = fg.Node("payments")

    @billing.on(OrderPlaced, source="shop", key="order_id")
    async def bill(order: OrderPlaced, ctx: fg.Context) -> Any:
        await ctx.db.execute("insert into invoices(id, total) values (?, ?)", (order.order_id, order.total))
        return fg.send(ChargeCard(order_id=order.order_id, amount=order.total), to="payments")

    @payments.on(ChargeCard, retry=fg.Retry(2, delay=0.1), redeliver=fg.Redeliver(10, 60, 600))
    async def charge(cmd: ChargeCard, ctx: fg.Context) -> AsyncIterator[Any]:
        yield CardCharged(order_id=cmd.order_id)

    async with fg.Bus("journal:./data", nodes=[shop, billing, payments], store="sqlite:./shop.db") as bus:
        await bus.publish(OrderPlaced(order_id="17", total=40), node="shop", idempotency_key="order-17")
        await bus.idle()
        assert bus.outcomes()["handled"] == 2
        assert await bus.dead_letters() == []
    assert rows(tmp_path / "shop.db", "select id, total from invoices") == [("17", 40)]


async def test_rows_written_by_one_message_are_there_for_the_next(urls: tuple[str, str]) -> None:
    transport, store = urls
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss", order=fg.Serial())
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", (job.name, "from " + job.name))

    async with fg.Bus(transport, nodes=[fg.Node("boss"), node], store=store) as bus:
        await bus.publish(Job(name="a"), node="boss")
        await bus.publish(Job(name="b"), node="boss")
        await bus.idle(timeout=LONG)
        await bus.send(Look(), to="worker", node="boss")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert found == [("a", "from a"), ("b", "from b")]


async def test_every_call_on_the_database_is_awaited_in_an_async_handler(urls: tuple[str, str]) -> None:
    transport, store = urls
    seen: dict[str, Any] = {}
    node = fg.Node("worker", schema=NOTES)

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", ("1", "one"))
        await ctx.db.executemany("insert into notes(id, text) values (?, ?)", [("2", "two"), ("3", None)])
        seen["one"] = await ctx.db.fetchone("select text from notes where id = ?", ("1",))
        seen["none"] = await ctx.db.fetchone("select text from notes where id = ?", ("nobody",))
        seen["all"] = await ctx.db.fetchall("select id, text from notes where id > ? order by id", ("1",))
        seen["no rows"] = await ctx.db.fetchall("select id from notes where id = ?", ("nobody",))

    async with fg.Bus(transport, nodes=[fg.Node("boss"), node], store=store) as bus:
        await bus.publish(Job(name="x"), node="boss")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert tuple(seen["one"]) == ("one",)
    assert seen["none"] is None
    assert [tuple(row) for row in seen["all"]] == [("2", "two"), ("3", None)]
    assert list(seen["no rows"]) == []


async def test_every_call_on_the_database_is_plain_in_a_def_handler(urls: tuple[str, str]) -> None:
    transport, store = urls
    seen: dict[str, Any] = {}
    node = fg.Node("worker", schema=NOTES)

    @node.on(Job, source="boss", retry=None, redeliver=None)
    def work(job: Job, ctx: fg.Context) -> None:
        ctx.db.execute("insert into notes(id, text) values (?, ?)", ("1", "one"))
        ctx.db.executemany("insert into notes(id, text) values (?, ?)", [("2", "two"), ("3", None)])
        seen["one"] = ctx.db.fetchone("select text from notes where id = ?", ("1",))
        seen["none"] = ctx.db.fetchone("select text from notes where id = ?", ("nobody",))
        seen["all"] = ctx.db.fetchall("select id, text from notes where id > ? order by id", ("1",))

    async with fg.Bus(transport, nodes=[fg.Node("boss"), node], store=store) as bus:
        await bus.publish(Job(name="x"), node="boss")
        await bus.idle(timeout=LONG)
        assert await bus.dead_letters() == []
    assert tuple(seen["one"]) == ("one",)
    assert seen["none"] is None
    assert [tuple(row) for row in seen["all"]] == [("2", "two"), ("3", None)]


async def test_an_async_generator_writes_between_its_outputs() -> None:
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss")
    async def work(job: Job, ctx: fg.Context) -> AsyncIterator[Any]:
        for number in range(3):
            await ctx.db.execute("insert into notes(id, text) values (?, ?)", (str(number), job.name))
            row = await ctx.db.fetchone("select count(*) from notes")
            yield Noted(text=str(row[0]))

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        await bench.send(Look())
        await bench.settle()
        assert bench.sent(Noted) == [Noted(text="1"), Noted(text="2"), Noted(text="3")]
    assert found == [("0", "x"), ("1", "x"), ("2", "x")]


async def test_a_plain_generator_writes_between_its_outputs() -> None:
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss")
    def work(job: Job, ctx: fg.Context) -> Iterator[Any]:
        for number in range(3):
            ctx.db.execute("insert into notes(id, text) values (?, ?)", (str(number), job.name))
            yield Noted(text=str(number))

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        await bench.send(Look())
        await bench.settle()
        assert bench.sent(Noted) == [Noted(text="0"), Noted(text="1"), Noted(text="2")]
    assert found == [("0", "x"), ("1", "x"), ("2", "x")]


@pytest.mark.parametrize("kind", ["async def", "def"])
async def test_an_interpreter_writes_in_the_unit_of_work_of_its_message(kind: str) -> None:
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)
    tries = 0

    if kind == "async def":

        @node.interprets(WriteNote)
        async def write(effect: WriteNote, ctx: fg.Context) -> None:
            await ctx.db.execute("insert into notes(id, text) values (?, ?)", (effect.name, "effect"))

    else:

        @node.interprets(WriteNote)
        def write_plainly(effect: WriteNote, ctx: fg.Context) -> None:
            ctx.db.execute("insert into notes(id, text) values (?, ?)", (effect.name, "effect"))

    @node.on(Job, source="boss")
    async def work(job: Job) -> AsyncIterator[Any]:
        nonlocal tries
        tries += 1
        yield WriteNote(f"try {tries}")
        if tries == 1:
            raise RuntimeError("after the effect")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        await bench.send(Look())
        await bench.settle()
        assert bench.dead_letters() == []
    assert found == [("try 2", "effect")], "the effect of the failed try is undone with it"


# Reading: `??` stands for one `?` wherever it is written, also within a quoted text (the only place where SQLite has
# a use for a literal question mark).
async def test_two_question_marks_are_one_literal_question_mark() -> None:
    seen: list[tuple[Any, ...]] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job, ctx: fg.Context) -> None:
        seen.append(tuple(await ctx.db.fetchone("select 'really??', ?", (job.name,))))

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="what?"))
        await bench.settle()
        assert bench.dead_letters() == []
    assert seen == [("really?", "what?")]


async def test_a_question_mark_inside_a_parameter_is_data() -> None:
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", ("1", job.name))

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="? ?? '; drop table notes; --"))
        await bench.settle()
        await bench.send(Look())
        await bench.settle()
    assert found == [("1", "? ?? '; drop table notes; --")]


async def test_the_raw_connection_is_the_drivers_own_inside_the_transaction() -> None:
    seen: list[Any] = []
    node = fg.Node("worker", schema=NOTES)

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", ("1", "mine"))
        seen.append(isinstance(ctx.db.raw, sqlite3.Connection))
        seen.append(ctx.db.raw.execute("select text from notes").fetchone()[0])

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        assert bench.dead_letters() == []
    assert seen == [True, "mine"]


@pytest.mark.parametrize("retry", [fg.Retry(2, delay=1), None], ids=["in memory", "by redelivery"])
async def test_a_failed_try_leaves_no_row_and_no_output_to_the_next(retry: Any) -> None:
    before: list[int] = []
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss", retry=retry, redeliver=fg.Redeliver(1, 1))
    async def work(job: Job, ctx: fg.Context) -> None:
        before.append((await ctx.db.fetchone("select count(*) from notes"))[0])
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", ("1", f"try {len(before)}"))
        ctx.publish(Noted(text=f"try {len(before)}"))
        if len(before) < 3:
            raise RuntimeError("not yet")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        await bench.send(Look())
        await bench.settle()
        assert bench.sent(Noted) == [Noted(text="try 3")]
    assert before == [0, 0, 0]
    assert found == [("1", "try 3")]


async def test_a_def_handler_that_fails_leaves_nothing_either() -> None:
    before: list[int] = []
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss", retry=fg.Retry(1, delay=1), redeliver=None)
    def work(job: Job, ctx: fg.Context) -> Any:
        before.append(ctx.db.fetchone("select count(*) from notes")[0])
        ctx.db.execute("insert into notes(id, text) values (?, ?)", ("1", f"try {len(before)}"))
        if len(before) < 2:
            raise RuntimeError("not yet")
        return Noted(text="done")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        await bench.send(Look())
        await bench.settle()
        assert bench.sent(Noted) == [Noted(text="done")]
    assert before == [0, 0]
    assert found == [("1", "try 2")]


async def test_a_statement_that_fails_may_be_caught_and_the_unit_of_work_goes_on() -> None:
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", ("1", "first"))
        with contextlib.suppress(Exception):  # the key is taken
            await ctx.db.execute("insert into notes(id, text) values (?, ?)", ("1", "second"))
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", ("2", "third"))

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        await bench.send(Look())
        await bench.settle()
        assert bench.dead_letters() == []
    assert found == [("1", "first"), ("2", "third")]


async def test_wrong_sql_fails_its_message_with_the_databases_words_and_the_next_goes_on() -> None:
    node = fg.Node("worker", schema=NOTES)

    @node.on(Job, source="boss", order=fg.Serial(), retry=None, redeliver=None)
    async def work(job: Job, ctx: fg.Context) -> None:
        table = "nowhere" if job.name == "bad" else "notes"
        await ctx.db.execute(f"insert into {table}(id) values (?)", (job.name,))

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="bad"))
        await bench.publish(Job(name="good"))
        await bench.settle()
        [dead] = bench.dead_letters()
        assert bench.outcomes()["handled"] == 1
    assert "nowhere" in dead.error


# --- schema= ----------------------------------------------------------------------------------------------


async def test_a_schema_is_applied_at_every_start_and_keeps_what_is_there(tmp_path: Path) -> None:
    # Reading: `schema=` may hold several statements and is run at each start; so the user writes "if not exists".
    node = fg.Node("worker", schema=f"{NOTES}; create index if not exists by_text on notes(text);")

    @node.on(Job, source="boss")
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", (job.name, ""))

    for name in ("first", "second", "third"):
        nodes = [fg.Node("boss"), node]
        async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=f"sqlite:{tmp_path}/store.db") as bus:
            await bus.publish(Job(name=name), node="boss")
            await bus.idle(timeout=LONG)
            assert bus.outcomes()["handled"] == 1
    assert rows(tmp_path / "store.db", "select id from notes order by id") == [("first",), ("second",), ("third",)]
    assert rows(tmp_path / "store.db", "select name from sqlite_master where name = 'by_text'") == [("by_text",)]


async def test_the_tables_of_a_schema_are_there_as_soon_as_the_bus_runs(tmp_path: Path) -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("worker", schema=NOTES)], store=f"sqlite:{tmp_path}/store.db"):
        assert rows(tmp_path / "store.db", "select count(*) from notes") == [(0,)]


async def test_a_wrong_schema_stops_the_start_and_is_named_as_the_cause(tmp_path: Path) -> None:
    # Reading: it is the configuration that is wrong, so the start raises one of our errors and not a driver's.
    bus = fg.Bus("memory:", nodes=[fg.Node("worker", schema="create tabel x")], store=f"sqlite:{tmp_path}/store.db")
    with pytest.raises(fg.ConfigurationError, match="schema"):
        async with bus:
            pass


# --- store= -----------------------------------------------------------------------------------------------


def writer(name: str) -> fg.Node:
    """Writes its own name for each job."""
    node = fg.Node(name, schema=NOTES)

    @node.on(Job, source="boss")
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", (name, job.name))

    return node


async def test_one_url_serves_every_node_and_a_mapping_gives_each_its_own(tmp_path: Path) -> None:
    async def run(store: Any) -> None:
        async with fg.Bus("memory:", nodes=[fg.Node("boss"), writer("east"), writer("west")], store=store) as bus:
            await bus.publish(Job(name="x"), node="boss")
            await bus.idle(timeout=LONG)
            assert await bus.dead_letters() == []

    await run(f"sqlite:{tmp_path}/both.db")
    await run({"east": f"sqlite:{tmp_path}/east.db", "west": f"sqlite:{tmp_path}/west.db"})
    assert rows(tmp_path / "both.db", "select id from notes order by id") == [("east",), ("west",)]
    assert rows(tmp_path / "east.db", "select id from notes") == [("east",)]
    assert rows(tmp_path / "west.db", "select id from notes") == [("west",)]


@pytest.mark.parametrize("kind", ["missing in the mapping", "no store at all"])
async def test_a_node_without_a_store_works_until_it_asks_for_the_database(kind: str, tmp_path: Path) -> None:
    handled: list[str] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", order=fg.Serial())
    async def work(job: Job, ctx: fg.Context) -> None:
        if job.name == "wants it":
            await ctx.db.execute("select 1")
        handled.append(job.name)

    store = {"boss": f"sqlite:{tmp_path}/boss.db"} if kind == "missing in the mapping" else None
    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node], store=store) as bus:
        await bus.publish(Job(name="wants it"), node="boss")
        await bus.publish(Job(name="does not"), node="boss")
        await bus.idle(timeout=LONG)
        [dead] = await bus.dead_letters("worker")
    assert handled == ["does not"]
    # Reading: a missing store is a configuration error, so it is a dead letter at the first try.
    assert dead.tries == 1
    assert "worker" in dead.error
    assert "store" in dead.error


@pytest.mark.parametrize("url", ["mysql://localhost/x", "store.db", "", "sqlite:", "redis:6379"])
async def test_a_store_url_that_means_nothing_is_refused_at_the_latest_at_the_start(url: str) -> None:
    with pytest.raises(fg.ConfigurationError, match=r"store|sqlite"):
        async with fg.Bus("memory:", nodes=[fg.Node("worker")], store=url):
            pass


async def test_a_wrong_store_url_in_a_mapping_is_named() -> None:
    with pytest.raises(fg.ConfigurationError, match="mysql"):
        async with fg.Bus("memory:", nodes=[fg.Node("worker")], store={"worker": "mysql://localhost/x"}):
            pass


async def test_a_mapping_that_names_a_node_that_is_not_there_is_refused() -> None:
    # Reading: as with `bus.pause`, a name that is not on the bus is a mistake and not ignored.
    with pytest.raises(fg.ConfigurationError, match="stranger"):
        async with fg.Bus("memory:", nodes=[fg.Node("worker")], store={"stranger": "memory:"}):
            pass


async def test_two_buses_on_memory_stores_share_nothing() -> None:
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss")
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", (job.name, ""))

    for name in ("first", "second"):
        async with fg.Bus("memory:", nodes=[fg.Node("boss"), node], store="memory:") as bus:
            await bus.publish(Job(name=name), node="boss")
            await bus.idle(timeout=LONG)
            await bus.send(Look(), to="worker", node="boss")
            await bus.idle(timeout=LONG)
        assert found == [(name, "")]


# --- the transaction belongs to the unit of work ----------------------------------------------------------


def misuse(node: fg.Node, misusing: Any) -> None:
    @node.on(Job, source="boss", order=fg.Serial())
    async def work(job: Job, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into notes(id, text) values (?, ?)", (job.name, ""))
        if job.name == "bad":
            answer = misusing(ctx.db)
            if inspect.isawaitable(answer):
                await answer


@pytest.mark.parametrize("name", ["commit", "rollback", "close"])
async def test_a_handler_may_not_end_the_transaction(name: str, tmp_path: Path) -> None:
    node = fg.Node("worker", schema=NOTES)
    misuse(node, lambda db: getattr(db, name)())
    await _dead_for_misuse(node, tmp_path)


@pytest.mark.parametrize("statement", ["commit", "  COMMIT ;", "rollback", "end", "begin", "-- done\ncommit"])
async def test_a_handler_may_not_end_or_begin_a_transaction_in_sql(statement: str, tmp_path: Path) -> None:
    node = fg.Node("worker", schema=NOTES)
    misuse(node, lambda db: db.execute(statement))
    await _dead_for_misuse(node, tmp_path)


async def _dead_for_misuse(node: fg.Node, folder: Path) -> None:
    async with fg.Bus("memory:", nodes=[fg.Node("boss"), node], store=f"sqlite:{folder}/store.db") as bus:
        await bus.publish(Job(name="bad"), node="boss")
        await bus.publish(Job(name="good"), node="boss")
        await bus.idle(timeout=LONG)
        [dead] = await bus.dead_letters("worker")
        assert bus.outcomes()["handled"] == 1
    assert "transaction" in dead.error.lower()
    assert dead.tries == 1, "a configuration error is not tried again"
    assert rows(folder / "store.db", "select id from notes order by id") == [("good",)]


async def test_the_database_is_of_no_use_after_its_message() -> None:
    kept: list[Any] = []
    node = fg.Node("worker", schema=NOTES)
    found = looking(node)

    @node.on(Job, source="boss")
    async def work(job: Job, ctx: fg.Context) -> None:
        kept.append(ctx.db)

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="x"))
        await bench.settle()
        with pytest.raises(fg.FaregateError):
            await kept[0].execute("insert into notes(id, text) values (?, ?)", ("late", ""))
        await bench.send(Look())
        await bench.settle()
    assert found == []


async def test_the_database_is_refused_on_another_event_loop_than_the_bus_runs_on() -> None:
    errors: list[BaseException] = []
    node = fg.Node("shop", schema="create table if not exists seen(n integer)")

    @node.on(Job, source="shop")
    def use_a_loop_of_its_own(job: Job, ctx: fg.Context) -> None:
        async def write() -> None:
            await ctx.db.execute("insert into seen values (1)")

        try:
            asyncio.run(write())
        except fg.WrongEventLoop as exc:
            errors.append(exc)

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="1"))
        await bench.settle()
    assert len(errors) == 1
