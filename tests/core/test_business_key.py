"""Business keys (exactly-once.md, Business identity; seed 004, the idempotent consumer).

An upstream system that replays its inputs sends the same business facts with new message ids: `identity=` names the
field that tells them apart, and the key is inserted in the transaction of the effect.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.errors import StoreConflict
from faregate.stores.sqlite.database import SqliteDatabase
from tests.core.rig import INSERT, TABLE, Answered, Asked, notes, the_store

LONG = 30  # seconds until a test that hangs is failed
BOOK = "create table if not exists book(number integer primary key, account text, amount integer)"


class Deposit(fg.Event):
    deposit_no: str
    account: str = "a"
    amount: int = 1


class Withdrawal(fg.Event):
    deposit_no: str


class Credited(fg.Event):
    account: str


class Look(fg.Command):
    """Asks the node what is in its book."""


class World:
    def __init__(self) -> None:
        self.runs: list[str] = []
        self.booked: list[tuple[str, int]] = []
        self.failures: list[type[Exception]] = []
        """What the next runs raise, after their write."""


def ledger_node(world: World, name: str = "accounts", **options: Any) -> fg.Node:
    node = fg.Node(name, schema=BOOK)
    options = {"identity": "deposit_no", "order": fg.Serial(), **options}

    @node.on(Deposit, source="bank", **options)
    async def credit(deposit: Deposit, ctx: fg.Context) -> Any:
        world.runs.append(deposit.deposit_no)
        await ctx.db.execute(
            "insert into book(account, amount) values (?, ?)", (f"{name} {deposit.account}", deposit.amount)
        )
        if world.failures:
            raise world.failures.pop(0)("on purpose")
        return Credited(account=deposit.account)

    @node.on(Look)
    async def look(cmd: Look, ctx: fg.Context) -> None:
        found = await ctx.db.fetchall(
            "select account, amount from book where account like ? order by number", (f"{name} %",)
        )
        world.booked = [(row[0], row[1]) for row in found]

    return node


CLAIMS: list[Any] = [{}, {"claim": "eager"}, {"claim": "lazy"}]
NAMES = ["in the transaction", "eager", "lazy"]


@pytest.mark.parametrize("options", CLAIMS, ids=NAMES)
async def test_two_messages_with_one_business_key_have_one_effect(options: dict[str, Any]) -> None:
    world = World()
    async with fg.testing.bench(ledger_node(world, **options)) as bench:
        first = await bench.publish(Deposit(deposit_no="d1", amount=100))
        await bench.settle()
        second = await bench.publish(Deposit(deposit_no="d1", amount=100))
        await bench.publish(Deposit(deposit_no="d2", amount=7))
        await bench.settle()
        outcomes = bench.bus.outcomes()
        assert first != second
        assert (outcomes["handled"], outcomes.get("duplicate", 0), outcomes["dead"]) == (2, 1, 0)
        assert len(bench.sent(Credited)) == 2
        await bench.send(Look())
        await bench.settle()
    assert world.booked == [("accounts a", 100), ("accounts a", 7)]
    assert world.runs == ["d1", "d2"]


async def test_without_a_business_key_they_are_two_messages() -> None:
    world = World()
    async with fg.testing.bench(ledger_node(world, identity=None)) as bench:
        await bench.publish(Deposit(deposit_no="d1"))
        await bench.publish(Deposit(deposit_no="d1"))
        await bench.settle()
        assert bench.bus.outcomes()["handled"] == 2


@pytest.mark.parametrize("options", CLAIMS, ids=NAMES)
async def test_a_try_that_fails_does_not_make_the_next_try_a_duplicate(options: dict[str, Any]) -> None:
    world = World()
    world.failures = [RuntimeError, RuntimeError, RuntimeError]
    node = ledger_node(world, retry=fg.Retry(1, delay=1), redeliver=fg.Redeliver(5), **options)
    async with fg.testing.bench(node) as bench:
        await bench.publish(Deposit(deposit_no="d1", amount=100))
        await bench.settle()
        assert bench.bus.outcomes()["handled"] == 1
        assert bench.dead_letters() == []
        await bench.send(Look())
        await bench.settle()
    assert world.runs == ["d1"] * 4
    assert world.booked == [("accounts a", 100)]


@pytest.mark.parametrize("options", CLAIMS, ids=NAMES)
async def test_the_business_key_is_free_again_when_its_message_is_a_dead_letter(options: dict[str, Any]) -> None:
    world = World()
    world.failures = [fg.Permanent]
    async with fg.testing.bench(ledger_node(world, **options)) as bench:
        await bench.publish(Deposit(deposit_no="d1", amount=100))
        await bench.settle()
        assert len(bench.dead_letters()) == 1
        await bench.publish(Deposit(deposit_no="d1", amount=100))
        await bench.settle()
        assert bench.bus.outcomes()["handled"] == 1
        await bench.publish(Deposit(deposit_no="d1", amount=100))
        await bench.settle()
        assert bench.bus.outcomes().get("duplicate", 0) == 1
        await bench.send(Look())
        await bench.settle()
    assert world.runs == ["d1", "d1"]
    assert world.booked == [("accounts a", 100)]


@pytest.mark.parametrize("options", CLAIMS, ids=NAMES)
async def test_a_business_key_is_remembered_over_a_restart(options: dict[str, Any], tmp_path: Path) -> None:
    world = World()
    for _ in range(2):
        nodes = [fg.Node("bank"), ledger_node(world, **options)]
        async with fg.Bus(f"journal:{tmp_path}/data", nodes=nodes, store=f"sqlite:{tmp_path}/s.db") as bus:
            await bus.publish(Deposit(deposit_no="d1", amount=100), node="bank")
            await bus.idle(timeout=LONG)
            await bus.send(Look(), to="accounts", node="bank")
            await bus.idle(timeout=LONG)
    assert world.runs == ["d1"]
    assert world.booked == [("accounts a", 100)]


async def test_a_business_key_belongs_to_its_node_also_in_a_shared_store(tmp_path: Path) -> None:
    world = World()
    nodes = [fg.Node("bank"), ledger_node(world, "east"), ledger_node(world, "west")]
    async with fg.Bus("memory:", nodes=nodes, store=f"sqlite:{tmp_path}/s.db") as bus:
        await bus.publish(Deposit(deposit_no="d1"), node="bank")
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == 2
        assert bus.outcomes().get("duplicate", 0) == 0


async def test_a_business_key_belongs_to_its_subscription() -> None:
    # Reading: deposit 1 and withdrawal 1 of one node are two things.
    world = World()
    node = ledger_node(world)

    @node.on(Withdrawal, source="bank", identity="deposit_no")
    async def debit(withdrawal: Withdrawal) -> None:
        world.runs.append("withdrawal")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Deposit(deposit_no="1"))
        await bench.publish(Withdrawal(deposit_no="1"))
        await bench.settle()
        assert bench.bus.outcomes()["handled"] == 2
    assert sorted(world.runs) == ["1", "withdrawal"]


async def test_many_copies_at_once_have_one_effect() -> None:
    world = World()
    async with fg.testing.bench(ledger_node(world, order=fg.Parallel(8))) as bench:
        for number in range(40):
            await bench.publish(Deposit(deposit_no=f"d{number % 4}", amount=number % 4))
        await bench.settle()
        outcomes = bench.bus.outcomes()
        assert bench.dead_letters() == []
        assert (outcomes["handled"], outcomes.get("duplicate", 0)) == (4, 36)
        await bench.send(Look())
        await bench.settle()
    assert sorted(world.booked) == [("accounts a", amount) for amount in range(4)]


async def test_an_eager_claim_keeps_a_second_one_from_starting_while_the_first_runs() -> None:
    started, release = asyncio.Event(), asyncio.Event()
    running = most = calls = 0
    node = fg.Node("accounts")

    @node.on(Deposit, source="bank", identity="deposit_no", claim="eager", order=fg.Parallel(4))
    async def credit(deposit: Deposit) -> None:
        nonlocal running, most, calls
        calls += 1
        running += 1
        most = max(most, running)
        started.set()
        await release.wait()
        running -= 1

    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=[fg.Node("bank"), node], store="memory:") as bus:
        await bus.publish(Deposit(deposit_no="d1"), node="bank")
        await started.wait()
        await bus.publish(Deposit(deposit_no="d1"), node="bank")
        for _ in range(50):  # every chance to start too early
            await asyncio.sleep(0)
        release.set()
        await bus.idle(timeout=LONG)
        assert bus.outcomes()["handled"] == 1
        assert bus.outcomes().get("duplicate", 0) == 1
    assert (most, calls) == (1, 1)


async def test_a_message_that_never_had_the_key_does_not_free_it_when_it_fails(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    node = fg.Node("accounts")

    @node.on(Deposit, source="bank", identity="deposit_no", claim="eager", retry=None, redeliver=None)
    async def credit(deposit: Deposit) -> None:
        runs.append(deposit.amount)

    async with fg.Bus("memory:", nodes=[fg.Node("bank"), node], store={"accounts": store_url}) as bus:
        store = the_store(bus)
        real, away = store.known, False

        async def known(name: str, message_ids: Any) -> Any:
            nonlocal away
            if away:
                away = False
                raise fg.StoreUnavailable("it is away for a moment", retry_after=0.01)
            return await real(name, message_ids)

        monkeypatch.setattr(store, "known", known)
        for amount in (1, 2, 3):
            away = amount == 2
            await bus.publish(Deposit(deposit_no="d1", amount=amount), node="bank")
            await bus.idle(timeout=LONG)
        outcomes = {name: n for name, n in bus.outcomes().items() if n}
        assert outcomes == {"handled": 1, "duplicate": 2} and await bus.dead_letters() == []
    assert runs == [1]


async def test_a_lazy_claim_may_repeat_a_call_that_a_crash_cut_off_and_never_loses_it() -> None:
    """The effect is outside of the store: at least once, as documented for lazy."""
    calls: list[str] = []
    node = fg.Node("accounts")

    @node.on(Deposit, source="bank", identity="deposit_no", claim="lazy")
    async def credit(deposit: Deposit) -> None:
        calls.append(deposit.deposit_no)

    async with fg.testing.bench(node) as bench:
        with fg.testing.crash_at("bus.after-handler"):
            await bench.publish(Deposit(deposit_no="d1"))
            await bench.settle()
        assert calls == ["d1", "d1"]
        await bench.publish(Deposit(deposit_no="d1"))
        await bench.settle()
    assert calls == ["d1", "d1"]


@pytest.mark.parametrize(
    "options",
    [{"claim": "eager", "identity": None}, {"claim": "never"}, {"claim": ""}],
    ids=["a claim on nothing", "an unknown claim", "an empty claim"],
)
def test_a_wrong_declaration_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(fg.ConfigurationError, match=r"identity|claim"):
        ledger_node(World(), **options)


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
        await ctx.db.execute(INSERT, (asked.n,))

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert runs == 2 and await notes(bus) == [1]
        assert bus.outcomes()["handled"] == 1 and bus.outcomes()["duplicate"] == 0


async def test_a_message_whose_commit_gave_way_is_not_stopped_by_its_own_eager_claim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    real, refused, armed = SqliteDatabase.commit, 0, False

    async def commit(database: SqliteDatabase) -> None:
        nonlocal armed, refused
        if armed and not refused:
            armed, refused = False, 1
            database.roll_back()
            raise StoreConflict("deadlock")
        await real(database)

    monkeypatch.setattr(SqliteDatabase, "commit", commit)

    @answering.on(Asked, source="asking", identity="n", claim="eager", retry=fg.Retry(2, delay=0.001))
    async def answer(asked: Asked, ctx: fg.Context) -> Answered:
        nonlocal armed
        armed = True
        await ctx.db.execute(INSERT, (asked.n,))
        return Answered(n=asked.n)

    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", drain_seconds=1) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert refused == 1 and await notes(bus) == [1]
        assert bus.outcomes()["handled"] == 1 and bus.outcomes()["duplicate"] == 0
        # The key stays taken: the same again under a new id is a duplicate.
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        assert await notes(bus) == [1] and bus.outcomes()["duplicate"] == 1
