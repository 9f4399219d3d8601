"""The failure table of recovery.md, row by row, and the failure patterns of chapter 4 (seed 004), each by its name.

What a row or a pattern means in every detail is tested where it belongs; here is one test for each that says what a
user sees, so that a missing one shows. Breaker, escalation and store outages have theirs beside the code.
"""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.message import Envelope


class Deposit(fg.Event):
    timestamp: str
    account_id: str
    amount: int


class Job(fg.Event):
    name: str


class Ask(fg.Command):
    name: str


class Answer(fg.Event):
    text: str


DEPOSIT = Deposit(timestamp="20170206150030", account_id="100035765", amount=100)
SCHEMA = "create table if not exists credits(account text not null, amount integer not null)"


def credits(**options: Any) -> fg.Node:
    """A node that credits accounts."""
    node = fg.Node("accounts", schema=SCHEMA)

    @node.on(Deposit, source="bank", **options)
    async def credit(deposit: Deposit, ctx: fg.Context) -> None:
        ctx.db.write("insert into credits(account, amount) values (?, ?)", (deposit.account_id, deposit.amount))

    return node


async def credited(bus: fg.Bus) -> list[int]:
    store = bus.store_of("accounts")
    assert store is not None
    async with store.transaction() as transaction:
        return [row[0] for row in await transaction.fetchall("select amount from credits", ())]


# --- the failure table --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("envelope", "reason"),
    [
        (Envelope(publication_id="p-1", type="Job", source="boss", body=b'{"name": 3}'), "undecodable"),
        (Envelope(publication_id="p-1", type="Jab", source="boss", body=b"{}"), "unknown-type"),
        (Envelope(publication_id="p-1", type="Job", source="boss", body=b'{"name": "impossible"}'), "permanent"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_row_undecodable_unknown_type_or_permanent_is_a_dead_letter_at_once_with_its_reason(
    envelope: Envelope, reason: str
) -> None:
    tried: list[str] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss")
    async def work(job: Job) -> None:
        tried.append(job.name)
        if job.name == "impossible":
            raise fg.Permanent("it can never be done")

    async with fg.testing.bench(node) as bench:
        await bench.deliver(envelope)
        await bench.publish(Job(name="next"))
        began = bench.clock.time()
        await bench.settle()
        [dead] = bench.dead_letters()
        assert (dead.reason, bench.clock.time()) == (reason, began), "nothing was waited for"
        assert bench.outcomes()["handled"] == 1
    assert tried.count("impossible") <= 1


async def test_row_any_other_exception_is_retried_then_redelivered_with_a_free_slot_then_a_dead_letter() -> None:
    tries: list[str] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", order=fg.Parallel(1), retry=fg.Retry(1, delay=0.1), redeliver=fg.Redeliver(10, 60))
    async def work(job: Job) -> None:
        tries.append(job.name)
        if job.name == "bad":
            raise ValueError("not today")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="bad"))
        await bench.advance(1)
        await bench.publish(Job(name="good"))
        await bench.advance(1)
        assert tries == ["bad", "bad", "good"], "the slot is free while it waits"
        await bench.settle()
        assert tries == ["bad", "bad", "good", "bad", "bad", "bad", "bad"]
        assert [dead.reason for dead in bench.dead_letters()] == ["failed"]
        assert bench.outcomes()["redelivered"] == 2


async def test_row_retry_after_is_delivered_again_after_so_long_and_uses_up_no_try() -> None:
    tries: list[tuple[float, int]] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job, ctx: fg.Context) -> None:
        tries.append((bench.clock.time(), ctx.redeliveries))
        if len(tries) < 5:
            raise fg.RetryAfter(30)

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="later"))
        await bench.settle()
        assert bench.outcomes()["handled"] == 1 and bench.dead_letters() == []
    assert [redeliveries for _, redeliveries in tries] == [0] * 5
    assert all(later[0] - earlier[0] >= 30 for earlier, later in itertools.pairwise(tries))


async def test_row_process_dies_and_the_unit_of_work_is_done_once(tmp_path: Path) -> None:
    """Its end without a stop: the bus is left as it is, and another one takes its place. (Real kills: tests/crash.)"""
    node = fg.Node("accounts", schema=SCHEMA)
    began, never = asyncio.Event(), asyncio.Event()
    dying = True

    @node.on(Deposit, source="bank")
    async def credit(deposit: Deposit, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into credits(account, amount) values (?, ?)", (deposit.account_id, deposit.amount))
        if dying:
            began.set()
            await never.wait()

    urls = (f"journal:{tmp_path}/journal", f"sqlite:{tmp_path}/accounts.db")
    bus = fg.Bus(urls[0], nodes=[node, fg.Node("bank")], store=urls[1])
    await bus.start()
    await bus.publish(DEPOSIT, node="bank")
    await began.wait()
    dying = False
    await bus.stop(0)
    async with fg.Bus(urls[0], nodes=[node, fg.Node("bank")], store=urls[1]) as again:
        await again.idle(30)
        assert await credited(again) == [100]


# --- the patterns of seed 004 -------------------------------------------------------------------------------


async def test_pattern_dead_letter_queue_is_drained_to_a_database_where_people_decide() -> None:
    """Not a dumping ground: what is wrong can be looked at, and mended, and the queue itself holds nothing."""
    broken = True
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=None, redeliver=None)
    async def work(job: Job) -> None:
        if broken:
            raise ValueError("a corner case")

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="odd"))
        await bench.settle()
        [dead] = await bench.bus.dead_letters()
        assert "a corner case" in dead.error
        broken = False
        await bench.bus.replay(dead.message_id)
        await bench.settle()
        assert [each.status for each in await bench.bus.dead_letters(status=None)] == ["resolved"]


async def test_pattern_redelivery_count_travels_with_the_message_and_the_handler_sees_it() -> None:
    """JMSRedelivered and JMSXDeliveryCount, by our names."""
    seen: list[tuple[bool, int]] = []
    node = fg.Node("worker")

    @node.on(Job, source="boss", retry=None, redeliver=fg.Redeliver(1, 1))
    async def work(job: Job, ctx: fg.Context) -> None:
        seen.append((ctx.redelivered, ctx.redeliveries))
        raise ValueError

    async with fg.testing.bench(node) as bench:
        await bench.publish(Job(name="again"))
        await bench.settle()
    assert seen == [(False, 0), (True, 1), (True, 2)]


async def test_pattern_local_failure_is_retried_within_the_consumer_and_others_go_on() -> None:
    locked = {"row-1": 2}
    node = fg.Node("worker")
    done: list[str] = []

    @node.on(Job, source="boss", order=fg.Parallel(2), retry=fg.Retry(3, delay=0.1))
    async def work(job: Job) -> None:
        if locked.get(job.name, 0):
            locked[job.name] -= 1
            raise TimeoutError("the record is locked")
        done.append(job.name)

    async with fg.testing.bench(node) as bench:
        for name in ("row-1", "row-2"):
            await bench.publish(Job(name=name))
        await bench.settle()
        assert bench.outcomes()["redelivered"] == bench.outcomes()["dead"] == 0
    assert done == ["row-2", "row-1"]


async def test_pattern_kill_switch_stops_consumption_until_a_checker_finds_all_well_and_ends() -> None:
    """A global failure: no legitimate message is drained into the dead letters."""
    is_up, calls, checks = False, 0, 0

    async def check() -> bool:
        nonlocal checks
        checks += 1
        return is_up

    node = fg.Node("worker", kill_switch=fg.KillSwitch(probe=check))

    @node.on(Job, source="boss")
    async def work(job: Job) -> None:
        nonlocal calls
        calls += 1
        if not is_up:
            raise ConnectionError("the backend is away")

    async with fg.testing.bench(node) as bench:
        await bench.bus.publish_many([Job(name=str(number)) for number in range(100)], node="boss")
        await bench.advance(60)
        called, checked = calls, checks
        await bench.advance(1_200)
        assert calls == called < 100 and checks > checked, "it is the checker that asks, and no handler"
        is_up = True
        await bench.settle()
        checked = checks
        await bench.advance(60)
        assert checks == checked, "it has ended"
        outcomes = bench.outcomes()
        assert (outcomes["handled"], outcomes["redelivered"], outcomes["dead"]) == (100, 0, 0)


@pytest.mark.parametrize("claim", ["transaction", "eager", "lazy"])
async def test_pattern_idempotent_consumer_by_a_business_key_of_two_fields(claim: Any) -> None:
    """The deposit of the chapter: an upstream replay has another message id and the same timestamp and account."""
    async with fg.testing.bench(credits(identity=("timestamp", "account_id"), claim=claim)) as bench:
        for _ in range(3):
            await bench.publish(DEPOSIT)
        await bench.publish(Deposit(timestamp="20170206150031", account_id="100035765", amount=7))
        await bench.settle()
        assert sorted(await credited(bench.bus)) == [7, 100]
        assert bench.outcomes()["duplicate"] == 2


async def test_pattern_idempotent_repository_survives_a_restart_of_the_consumer(tmp_path: Path) -> None:
    node = credits(identity=("timestamp", "account_id"))
    for _ in range(2):
        bus = fg.Bus("memory:", nodes=[node, fg.Node("bank")], store=f"sqlite:{tmp_path}/accounts.db")
        async with bus:
            await bus.publish(DEPOSIT, node="bank")
            await bus.idle(30)
            assert await credited(bus) == [100]


async def test_pattern_idempotent_eager_claim_is_given_back_when_the_logic_fails() -> None:
    node = fg.Node("accounts", schema=SCHEMA)
    failures = iter([True, False])

    @node.on(Deposit, source="bank", identity=("timestamp", "account_id"), claim="eager", retry=None, redeliver=None)
    async def credit(deposit: Deposit, ctx: fg.Context) -> None:
        if next(failures):
            raise ValueError("the wrapped logic failed")
        ctx.db.write("insert into credits(account, amount) values (?, ?)", (deposit.account_id, deposit.amount))

    async with fg.testing.bench(node) as bench:
        await bench.publish(DEPOSIT)
        await bench.settle()
        await bench.publish(DEPOSIT)
        await bench.settle()
        assert await credited(bench.bus) == [100]


async def test_pattern_request_response_over_messages() -> None:
    node = fg.Node("oracle")

    @node.on(Ask)
    async def answer(ask: Ask) -> fg.Outgoing:
        return fg.reply(Answer(text=f"hello {ask.name}"))

    async with fg.Bus("memory:", nodes=[node, fg.Node("asker")], store="memory:") as bus:
        found = await bus.request(Ask(name="ann"), to="oracle", node="asker", reply=Answer, timeout=30)
    assert found == Answer(text="hello ann")


async def test_pattern_filter_gives_a_consumer_its_subset_of_the_stream() -> None:
    """Without an external filter that drops messages: what a consumer does not want is settled, and counted."""
    taken: list[int] = []
    node = fg.Node("accounts")

    @node.on(Deposit, source="bank", where="amount > 50")
    async def take(deposit: Deposit) -> None:
        taken.append(deposit.amount)

    async with fg.testing.bench(node) as bench:
        for amount in (10, 100, 50, 51):
            await bench.publish(Deposit(timestamp="t", account_id="1", amount=amount))
        await bench.settle()
        outcomes = bench.outcomes()
        assert (outcomes["handled"], outcomes["filtered"], outcomes["dead"]) == (2, 2, 0)
    assert sorted(taken) == [51, 100]


async def test_pattern_related_messages_go_to_one_consumer_at_a_time_in_their_order() -> None:
    running: set[str] = set()
    order: dict[str, list[int]] = {"1": [], "2": []}
    node = fg.Node("accounts")

    @node.on(Deposit, source="bank", key="account_id", order=fg.ByKey(lanes=4))
    async def take(deposit: Deposit) -> None:
        assert deposit.account_id not in running
        running.add(deposit.account_id)
        await asyncio.sleep(0)
        running.discard(deposit.account_id)
        order[deposit.account_id].append(deposit.amount)

    async with fg.testing.bench(node) as bench:
        for amount in range(20):
            await bench.publish(Deposit(timestamp="t", account_id="12"[amount % 2], amount=amount))
        await bench.settle()
    assert order == {"1": list(range(0, 20, 2)), "2": list(range(1, 20, 2))}
