"""Messages with several keys (recovery.md, Order; 002's "can run together"): one runs when all its keys are free, after
every earlier and before every later one of each of them; those without a common key run together; nothing deadlocks.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import faregate as fg
from faregate.bus.several_keys import SeveralKeysLanes
from faregate.message import Envelope
from faregate.ports.keys import Keys, keys_of
from faregate.ports.store import Parked
from faregate.testing.clock import rest
from tests.bus.parted import Parted, Server
from tests.core.rig import committed

LONG = 30  # seconds until a test that hangs is failed; never waited for when the code is right


class Transfer(fg.Event):
    debit: str
    credit: str | None = None
    number: int = 0
    failures: int = 0
    pauses: int = 0


def transfers(*pairs: str, **common: Any) -> list[Transfer]:
    """ "ab" is a transfer from a to b; "a" a withdrawal."""
    return [
        Transfer(debit=pair[0], credit=pair[1:] or None, number=number, **common) for number, pair in enumerate(pairs)
    ]


class Ledger:
    """The handler: notes the order for each account, and whether two of one account ever ran together."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.most = 0
        self.overlapped: set[str] = set()
        self.by_account: dict[str, list[int]] = defaultdict(list)
        """Those that began, by account, each time that they did."""
        self.finished: list[int] = []
        self.tries: Counter[int] = Counter()
        self.gates: dict[int, asyncio.Event] = {}
        """What handlers wait for, by number."""

    async def handle(self, transfer: Transfer, ctx: fg.Context) -> None:
        accounts = {transfer.debit, transfer.credit} - {None}
        assert ctx.keys == tuple(sorted(accounts))
        for account in ctx.keys:
            self.by_account[account].append(transfer.number)
        self.running.update(ctx.keys)
        self.overlapped |= {account for account in ctx.keys if self.running[account] > 1}
        self.most = max(self.most, self.running.total())
        self.tries[transfer.number] += 1
        try:
            for _ in range(transfer.pauses):
                await asyncio.sleep(0)
            if transfer.number in self.gates:
                await self.gates[transfer.number].wait()
            if self.tries[transfer.number] <= transfer.failures:
                raise ValueError("on purpose")
        finally:
            self.running.subtract(ctx.keys)
        self.finished.append(transfer.number)


def bank(ledger: Ledger, **options: Any) -> fg.Node:
    node = fg.Node("bank")
    given = {"key": fg.Each("debit", "credit"), "retry": None, "redeliver": fg.Redeliver(10), **options}
    node.on(Transfer, source="world", **given)(ledger.handle)
    return node


async def handled(sent: list[Transfer], **options: Any) -> tuple[Ledger, dict[str, int]]:
    ledger = Ledger()
    async with asyncio.timeout(LONG), fg.testing.bench(bank(ledger, **options)) as bench:
        for each in sent:
            await bench.publish(each)
        await bench.settle()
        return ledger, bench.outcomes()


# --- on a bus -----------------------------------------------------------------------------------------------

plans = st.lists(
    st.tuples(st.sampled_from("abcd"), st.none() | st.sampled_from("abcd"), st.integers(0, 3), st.integers(0, 2)),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(plan=plans, lanes=st.integers(1, 5), prefetch=st.none() | st.integers(1, 8))
def test_each_key_keeps_its_order_whatever_fails_and_nothing_deadlocks(
    plan: list[tuple[str, str | None, int, int]], lanes: int, prefetch: int | None
) -> None:
    sent = [
        Transfer(debit=debit, credit=credit, number=number, pauses=pauses, failures=failures)
        for number, (debit, credit, pauses, failures) in enumerate(plan)
    ]
    ledger, outcomes = asyncio.run(handled(sent, order=fg.ByKey(lanes=lanes), prefetch=prefetch))
    allowed = 2
    assert outcomes["dead"] == sum(each.failures >= allowed for each in sent)
    assert outcomes["handled"] == sum(each.failures < allowed for each in sent)
    assert ledger.overlapped == set()
    for account, began in ledger.by_account.items():
        own = [each for each in sent if account in (each.debit, each.credit)]
        assert began == [each.number for each in own for _ in range(min(each.failures + 1, allowed))]


async def test_transfers_in_opposite_directions_never_wait_for_each_other() -> None:
    ledger, outcomes = await handled(transfers(*["ab", "ba"] * 50, pauses=2), order=fg.ByKey(lanes=8))
    assert outcomes["handled"] == 100
    assert ledger.finished == list(range(100))


async def test_transfers_without_a_common_account_run_together() -> None:
    together = asyncio.Barrier(3)
    node = fg.Node("bank")

    @node.on(Transfer, source="world", key=fg.Each("debit", "credit"), order=fg.ByKey(lanes=3))
    async def handle(transfer: Transfer) -> None:
        await together.wait()  # passes only when three stand here

    async with asyncio.timeout(LONG), fg.testing.bench(node) as bench:
        for each in transfers("ab", "cd", "ef"):
            await bench.publish(each)
        await bench.settle()
        assert bench.outcomes()["handled"] == 3


async def test_a_transfer_waits_for_both_accounts_and_those_behind_it_wait_too() -> None:
    ledger = Ledger()
    ledger.gates = {0: asyncio.Event(), 1: asyncio.Event()}
    async with asyncio.timeout(LONG), fg.testing.bench(bank(ledger, order=fg.ByKey(lanes=9))) as bench:
        for each in transfers("a", "b", "ab", "a", "b", "c"):
            await bench.publish(each)
        await rest(20)
        assert ledger.finished == [5], "only c has nobody before it"
        ledger.gates[0].set()
        await rest(20)
        assert ledger.finished == [5, 0], "a is free, b is not"
        ledger.gates[1].set()
        await bench.settle()
    assert ledger.finished[:4] == [5, 0, 1, 2]
    assert sorted(ledger.finished[4:]) == [3, 4]


async def test_a_transfer_that_waits_for_its_later_try_keeps_both_accounts_waiting() -> None:
    ledger = Ledger()
    async with asyncio.timeout(LONG), fg.testing.bench(bank(ledger)) as bench:
        [failing, *others] = transfers("ab", "a", "bc", "c", "d")
        await bench.publish(Transfer(debit="a", credit="b", failures=1))
        for each in others:
            await bench.publish(each)
        await rest(30)
        assert ledger.finished == [4], "d is the only account that no message before waits for"
        await bench.settle()
    assert ledger.by_account == {"a": [0, 0, 1], "b": [0, 0, 2], "c": [2, 3], "d": [4]}
    assert failing.number == 0


async def test_without_strict_later_ones_pass_a_transfer_that_waits_for_its_later_try() -> None:
    ledger = Ledger()
    async with asyncio.timeout(LONG), fg.testing.bench(bank(ledger, order=fg.ByKey(strict=False))) as bench:
        await bench.publish(Transfer(debit="a", credit="b", failures=1))
        for each in transfers("x", "a", "bc", "c"):
            await bench.publish(each)
        await rest(30)
        assert sorted(ledger.finished) == [0, 1, 2, 3], "and the one that failed is still to come"
        await bench.settle()
    assert ledger.tries[0] == 3
    assert ledger.overlapped == set()


async def test_stores_keep_the_text_of_all_keys(store_url: str) -> None:
    node = fg.Node("bank", schema="create table if not exists seen(key text)")

    @node.on(Transfer, source="world", key=fg.Each("debit", "credit"), retry=None, redeliver=None)
    async def handle(transfer: Transfer, ctx: fg.Context) -> None:
        if transfer.failures:
            raise fg.Permanent("no such account")
        await ctx.db.execute("insert into seen values (?)", (ctx.key,))

    async with asyncio.timeout(LONG), fg.Bus("memory:", nodes=[node, fg.Node("world")], store=store_url) as bus:
        await bus.publish(Transfer(debit="b", credit="a"), node="world")
        await bus.publish(Transfer(debit="a"), node="world")
        await bus.publish(Transfer(debit="c", credit="a", failures=1), node="world")
        await bus.idle()
        [letter] = await bus.dead_letters("bank")
        assert letter.key == '{"a","c"}'
        for table in ("seen", "faregate_ledger"):
            rows = await committed(bus, f"select key from {table} order by key")
            assert [tuple(row) for row in rows] == [("a",), ('{"a","b"}',)]


# --- the journal ---------------------------------------------------------------------------------------------


async def test_a_restart_of_the_journal_keeps_the_order_of_every_key(tmp_path: Path) -> None:
    """The first transfer waits for its later try when the process ends: its accounts go on waiting for it."""
    url = f"journal:{tmp_path}/journal"
    clock = fg.testing.FakeClock()
    before, after = Ledger(), Ledger()
    after.tries = before.tries

    async def until(done: Callable[[], bool], seconds: float = 0.0) -> None:
        while not done():
            await clock.advance(seconds)
            await asyncio.sleep(0.003)

    async with asyncio.timeout(LONG):
        async with fg.Bus(url, nodes=[bank(before), fg.Node("world")], clock=clock) as bus:
            await bus.publish(Transfer(debit="a", credit="b", failures=1), node="world")
            await until(lambda: bus.outcomes()["redelivered"] == 1)
            for each in transfers("x", "bc", "a", "c", "d")[1:]:
                await bus.publish(each, node="world")
            await until(lambda: before.finished == [4])
            assert before.by_account == {"a": [0], "b": [0], "d": [4]}
        async with fg.Bus(url, nodes=[bank(after), fg.Node("world")], clock=clock) as bus:
            await bus.publish(Transfer(debit="d", number=5), node="world")
            await until(lambda: 5 in after.finished)
            assert after.finished == [5]
            await until(lambda: len(after.finished) == 5, seconds=1.0)
    assert after.by_account == {"a": [0, 2], "b": [0, 1], "c": [1, 3], "d": [5]}


# --- a transport without order, as RabbitMQ ---------------------------------------------------------------------


class Branch:
    """Instances of one bank, on one store and one broker that keeps no order but that of its queue."""

    def __init__(self, folder: Path, ledger: Ledger, **options: Any) -> None:
        self.clock = fg.testing.FakeClock()
        self.server = Server(self.clock)
        self.url = f"sqlite:{folder}/bank.db"
        self.ledger = ledger
        self.options = options

    def bus(self) -> fg.Bus:
        nodes = [bank(self.ledger, **self.options), fg.Node("world")]
        return fg.Bus(Parted(self.clock, self.server), nodes=nodes, store=self.url, clock=self.clock)

    async def until(self, done: Callable[[], bool], pace: float = 0.01) -> None:
        async with asyncio.timeout(LONG):
            while not done():
                await self.clock.advance(pace)
                await asyncio.sleep(0.003)

    async def parked(self, bus: fg.Bus) -> list[Parked]:
        store = bus.store_of("bank")
        assert store is not None
        async with store.transaction() as transaction:
            return await transaction.parked("bank")


async def test_what_is_parked_keeps_the_order_of_every_key_and_holds_no_other(tmp_path: Path) -> None:
    ledger = Ledger()
    branch = Branch(tmp_path, ledger)
    async with branch.bus() as bus:
        await bus.publish(Transfer(debit="a", credit="b", failures=1), node="world")
        await branch.until(lambda: ledger.tries[0] == 1)
        for each in transfers("x", "bc", "a", "cd", "d", "ef", "e")[1:]:
            await bus.publish(each, node="world")
        await branch.until(lambda: len(ledger.finished) == 2)
        assert ledger.finished == [5, 6], "only e and f have nobody before them"
        await branch.until(lambda: len(ledger.finished) == 7, pace=0.1)
        assert await branch.parked(bus) == []
        await bus.publish(Transfer(debit="a", credit="b", number=7), node="world")
        await branch.until(lambda: 7 in ledger.finished)
        assert await branch.parked(bus) == [], "nothing waits any more: it need not be parked"
    assert ledger.by_account == {
        "a": [0, 0, 2, 7], "b": [0, 0, 1, 7], "c": [1, 3], "d": [3, 4], "e": [5, 6], "f": [5],
    }  # fmt: skip
    assert ledger.overlapped == set()


async def test_another_instance_finds_who_waits_for_whom(tmp_path: Path) -> None:
    ledger = Ledger()
    branch = Branch(tmp_path, ledger)
    async with branch.bus() as bus:
        await bus.publish(Transfer(debit="a", credit="b", failures=1), node="world")
        await branch.until(lambda: ledger.tries[0] == 1)
        for each in transfers("x", "bc", "a", "cd", "c")[1:]:
            await bus.publish(each, node="world")
        async with asyncio.timeout(LONG):
            while len(await branch.parked(bus)) < 5:
                await branch.clock.advance(0.01)
                await asyncio.sleep(0.003)
    assert ledger.finished == []
    async with branch.bus() as bus:
        await bus.publish(Transfer(debit="d", number=5), node="world")
        await branch.until(lambda: len(ledger.finished) == 6, pace=0.1)
    assert ledger.by_account == {"a": [0, 0, 2], "b": [0, 0, 1], "c": [1, 3, 4], "d": [3, 5]}


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans, lanes=st.integers(1, 5))
def test_each_key_keeps_its_order_whatever_is_parked(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[str, str | None, int, int]], lanes: int
) -> None:
    sent = [
        Transfer(debit=debit, credit=credit, number=number, pauses=pauses, failures=min(failures, 1))
        for number, (debit, credit, pauses, failures) in enumerate(plan)
    ]
    ledger = Ledger()

    async def scenario() -> None:
        branch = Branch(
            tmp_path_factory.mktemp("bank"), ledger, order=fg.ByKey(lanes=lanes), redeliver=fg.Redeliver(0.5)
        )
        async with branch.bus() as bus:
            for each in sent:
                await bus.publish(each, node="world")
            await branch.until(lambda: len(ledger.finished) == len(sent), pace=0.1)

    asyncio.run(scenario())
    assert ledger.overlapped == set()
    for account, began in ledger.by_account.items():
        own = [each for each in sent if account in (each.debit, each.credit)]
        assert began == [each.number for each in own for _ in range(each.failures + 1)]


# --- what cannot be read -------------------------------------------------------------------------------------


class Spread(fg.Event):
    accounts: list[str]


def accounts_of(message: Spread) -> Any:
    if "junk" in message.accounts:
        return [message.accounts]
    if "endless" in message.accounts:
        return iter(message.accounts)
    if "broken" in message.accounts:
        raise ValueError("no such account")
    return message.accounts


@pytest.mark.parametrize(
    ("accounts", "error"),
    [
        (["junk", "a"], "a list is no key"),
        (["endless"], "iterator is no key"),
        (["broken"], "no such account"),
        ([f"{number}" for number in range(17)], "17 keys"),
    ],
    ids=["junk", "iterator", "broken", "too many"],
)
async def test_a_message_whose_keys_cannot_be_told_is_a_dead_letter_and_holds_nobody(
    accounts: list[str], error: str
) -> None:
    node, seen = fg.Node("bank"), []

    @node.on(Spread, source="world", key=fg.Each(accounts_of))
    async def handle(message: Spread, ctx: fg.Context) -> None:
        seen.append(ctx.keys)

    async with asyncio.timeout(LONG), fg.testing.bench(node) as bench:
        await bench.publish(Spread(accounts=accounts))
        await bench.publish(Spread(accounts=["b", "a", "b"]))
        await bench.publish(Spread(accounts=[]))
        await bench.settle()
        [letter] = await bench.bus.dead_letters("bank")
    assert letter.reason == "unreadable-key"
    assert error in letter.error
    assert seen == [("a", "b"), ()]


# --- lanes ---------------------------------------------------------------------------------------------------


class Handed:
    """A delivery, of which lanes know only the key."""

    redelivered = False

    def __init__(self, number: int, keys: frozenset[str]) -> None:
        self.number = number
        self.key = Keys.of(keys)
        self.envelope = Envelope(publication_id=f"{number}")

    def __repr__(self) -> str:
        return f"{self.number}{list(keys_of(self.key))}"


sets = st.frozensets(st.sampled_from("abcde"), max_size=4)
steps = st.lists(st.one_of(sets, st.integers(0, 30), st.just("back")), max_size=60)


@settings(max_examples=300, deadline=None)
@given(plan=steps, size=st.integers(1, 5), batch=st.integers(1, 3))
def test_lanes_agree_with_a_model_that_is_too_simple_to_be_wrong(plan: list[Any], size: int, batch: int) -> None:
    asyncio.run(agree(plan, size, batch))


async def agree(plan: list[Any], size: int, batch: int) -> None:
    """A set of keys is submitted, a number ends one of those that run, "back" takes back what has not begun."""
    living: list[Handed] = []
    """Submitted and not ended, in order."""
    running: dict[Handed, asyncio.Future[None]] = {}
    taken: set[Handed] = set()

    async def run(deliveries: list[Any]) -> list[Any]:
        taken.update(deliveries)
        for delivery in deliveries:
            check_may_run(delivery)
            running[delivery] = ended = asyncio.get_running_loop().create_future()
            await ended
        for delivery in deliveries:
            living.remove(delivery)
        taken.difference_update(deliveries)
        return []

    def check_may_run(delivery: Handed) -> None:
        own = set(keys_of(delivery.key))
        for other in living[: living.index(delivery)]:
            assert not own & set(keys_of(other.key)), f"{delivery} passed {other}"

    def end(number: int) -> None:
        if running:
            running.pop(list(running)[number % len(running)]).set_result(None)

    lanes = SeveralKeysLanes(size, run)  # type: ignore[arg-type]
    lanes.batch = batch
    for number, step in enumerate(plan):
        if step == "back":
            back = set(lanes.take_back())
            assert not back & taken
            living[:] = [each for each in living if each not in back]
        elif isinstance(step, int):
            end(step)
        else:
            living.append(Handed(number, step))
            lanes.submit(living[-1])  # type: ignore[arg-type]
        await rest(3)
        assert lanes.busy <= size
        if lanes.busy < size:
            wanted: set[str] = set()
            for each in living:
                keys = set(keys_of(each.key))
                assert each in taken or keys & wanted, f"{each} could run, and no lane takes it"
                wanted |= keys
    for _ in range(100):
        if not living:
            break
        end(0)
        await rest(3)
    assert not living, "some never ran"
    assert not lanes._lines and not lanes._waiting, "a key is left behind"
    await lanes.close(0)


async def test_those_that_are_left_when_some_are_taken_back_keep_their_order() -> None:
    began: list[int] = []
    gates: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def run(deliveries: list[Any]) -> list[Any]:
        began.append(deliveries[0].number)
        await gates[deliveries[0].number].wait()
        return []

    lanes = SeveralKeysLanes(9, run)  # type: ignore[arg-type]
    for number, keys in enumerate(["a", "ab", "bc", "c", "ac"]):
        lanes.submit(Handed(number, frozenset(keys)))  # type: ignore[arg-type]
    await rest()
    assert began == [0]
    back = lanes.take_back(lambda delivery: delivery.number == 1)  # type: ignore[attr-defined]
    assert [each.number for each in back] == [1]  # type: ignore[attr-defined]
    await rest()
    assert began == [0, 2], "nobody has b and c any more"
    gates[2].set()
    await rest()
    assert began == [0, 2, 3]
    gates[0].set()
    gates[3].set()
    gates[4].set()
    await rest()
    assert began == [0, 2, 3, 4]
    await lanes.close(0)
    assert not lanes._lines
