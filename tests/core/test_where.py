"""What a filter does not take: settled as filtered, with no handler, no transaction and no ledger row, in any order of
its key, and the same after a crash; tokens, business keys and dead letters included."""

from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.codec import find_codec
from faregate.core.handling import Handling
from faregate.core.pace import BATCH_LIMIT
from faregate.core.unit import UnitOfWork
from faregate.ports import faults
from tests.core.rig import INSERT, LONG, TABLE, Asked, committed, count, dead_numbers, notes, numbers, run

EVEN = "n in (0, 2, 4, 6, 8)"


async def write(asked: Asked, ctx: fg.Context) -> None:
    await ctx.db.execute(INSERT, (asked.n,))


async def test_what_the_filter_does_not_take_is_filtered_and_counted() -> None:
    seen: list[tuple[int, str]] = []
    around: list[int] = []
    node = fg.Node("answering")

    @node.on(Asked, source="asking", where="n > 1 and header.region = 'north'")
    async def answer(asked: Asked) -> None:
        around.append(asked.n)

    @node.use
    async def enter(ctx: fg.Context, call_next: Any) -> None:
        around.append(ctx.message.n)
        await call_next()

    async def tell(ctx: fg.Context, call_next: Any) -> None:
        seen.append((ctx.message.n, ctx.outcome))
        await call_next()

    node.use(tell, after=True)
    async with fg.testing.bench(node) as bench:
        for n, region in enumerate(["north", "north", "south", "north"]):
            await bench.publish(Asked(n=n), headers={"region": region})
        await bench.settle()
        outcomes = {"handled": 1, "skipped": 0, "filtered": 3, "duplicate": 0, "redelivered": 0, "dead": 0}
        assert bench.outcomes() == outcomes
        [counts] = [each for each in bench.bus.counts() if each.node == "answering"]
        assert (counts.handled, counts.filtered) == (1, 3)
    assert around == [3, 3], "neither middleware nor handler sees the others"
    assert sorted(seen) == [(0, "filtered"), (1, "filtered"), (2, "filtered"), (3, "handled")]


async def test_a_batch_has_only_what_the_filter_takes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: set[int] = set()
    plain = UnitOfWork.__init__

    def noted(self: UnitOfWork, home: Any, works: Any, savepoints: bool) -> None:
        inside.update(work.ctx.message.n for work in works)
        plain(self, home, works, savepoints)

    monkeypatch.setattr(UnitOfWork, "__init__", noted)
    bus, (found, _) = await run(url, write, count=10, where=EVEN)
    assert found == [0, 2, 4, 6, 8] and bus.outcomes()["filtered"] == 5
    assert inside == {0, 2, 4, 6, 8}, "those that were filtered are in no transaction"


async def test_nothing_is_looked_up_opened_or_recorded_for_what_is_filtered(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UnitOfWork, "__init__", _never)
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    answering.on(Asked, source="asking", where="n < 0")(write)
    async with fg.Bus("memory:", nodes=[asking, answering], store=url) as bus:
        await bus.publish_many(numbers(20), node="asking")
        await bus.idle(timeout=LONG)
        assert (bus.outcomes()["filtered"], await count(bus, "ledger")) == (20, 0)


def _never(*_: object) -> None:
    raise AssertionError("there is nothing to do")


async def test_without_a_store_too() -> None:
    taken: list[int] = []
    asking, answering = fg.Node("asking"), fg.Node("answering")

    @answering.on(Asked, source="asking", where=EVEN, order=fg.Serial())
    async def answer(asked: Asked) -> None:
        taken.append(asked.n)

    async with fg.Bus("memory:", nodes=[asking, answering]) as bus:
        await bus.publish_many(numbers(10), node="asking")
        await bus.idle(timeout=LONG)
        assert (taken, bus.outcomes()["filtered"]) == ([0, 2, 4, 6, 8], 5)


async def test_batches_grow_while_the_filter_takes_few() -> None:
    sizes: list[int] = []
    asking, answering = fg.Node("asking"), fg.Node("answering")
    handle = Handling.handle

    async def noted(self: Handling, deliveries: Any) -> Any:
        sizes.append(len(deliveries))
        return await handle(self, deliveries)

    answering.on(Asked, source="asking", where="n < 0", order=fg.Parallel(1))(write)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handling, "handle", noted)
        async with fg.Bus("memory:", nodes=[asking, answering], store="memory:") as bus:
            await bus.publish_many(numbers(2_000), node="asking")
            await bus.idle(timeout=LONG)
            assert bus.outcomes()["filtered"] == 2_000
    assert max(sizes) > BATCH_LIMIT // 2 and len(sizes) < 200


# --- order and failure ----------------------------------------------------------------------------------------


class Step(fg.Event):
    key: str
    n: int


async def test_what_is_filtered_neither_blocks_its_key_nor_passes_for_it() -> None:
    ran: list[int] = []
    node = fg.Node("walking")

    @node.on(Step, source="leading", key="key", where="n <> 1", retry=None, redeliver=fg.Redeliver(10))
    async def walk(step: Step) -> None:
        ran.append(step.n)
        if ran == [0]:
            raise RuntimeError("once")

    async with fg.testing.bench(node) as bench:
        for n in range(4):
            await bench.publish(Step(key="k", n=n))
        await bench.settle()
        outcomes = bench.outcomes()
        assert (outcomes["handled"], outcomes["filtered"], outcomes["redelivered"]) == (3, 1, 1)
    assert ran == [0, 0, 2, 3]


@pytest.mark.usefixtures("one_batch")
async def test_serial_messages_behind_a_filtered_one_go_on() -> None:
    _, (found, _) = await run("memory:", write, count=6, where="n not in (0, 3)", order=fg.Serial())
    assert found == [1, 2, 4, 5]


async def test_what_cannot_be_read_is_a_dead_letter_and_not_filtered() -> None:
    class Wider(fg.Event, wire="Asked"):
        n: str

    node = fg.Node("answering")
    node.on(Asked, source="asking", where="n < 0")(write)
    async with fg.testing.bench(node) as bench:
        await bench.publish(Wider(n="x"))
        await bench.settle()
        assert (bench.outcomes()["dead"], bench.outcomes()["filtered"]) == (1, 0)


class Careless:
    """A codec that decodes numbers as texts."""

    content_type = "application/careless"

    def encoder(self, cls: type) -> Any:
        return find_codec("json").encoder(cls)

    def decoder(self, cls: type) -> Any:
        def decode(body: bytes) -> Any:
            return cls(n="five")

        return decode


async def test_a_value_that_its_class_does_not_allow_ends_as_a_dead_letter() -> None:
    fg.register_codec(Careless())
    asking, answering = fg.Node("asking"), fg.Node("answering")
    answering.on(Asked, source="asking", where="n < 5", retry=None, redeliver=None)(write)
    async with fg.Bus("memory:", nodes=[asking, answering], store="memory:", codec=Careless()) as bus:
        await bus.publish(Asked(n=1), node="asking")
        await bus.idle(timeout=LONG)
        [letter] = await bus.dead_letters()
        assert "TypeError" in letter.error


# --- after a crash --------------------------------------------------------------------------------------------


async def test_a_journal_knows_what_was_filtered(tmp_path: Path) -> None:
    taken: list[int] = []

    def bus() -> fg.Bus:
        asking, answering = fg.Node("asking"), fg.Node("answering")

        @answering.on(Asked, source="asking", where=EVEN)
        async def answer(asked: Asked) -> None:
            taken.append(asked.n)

        return fg.Bus(f"journal:{tmp_path}/journal", nodes=[asking, answering])

    async with bus() as first:
        await first.publish_many(numbers(6), node="asking")
        await first.idle(timeout=LONG)
        assert first.outcomes()["filtered"] == 3
    async with bus() as second:
        await second.idle(timeout=LONG)
        assert not any(second.outcomes().values()), "all of it is settled"
    assert sorted(taken) == [0, 2, 4]


@pytest.mark.parametrize("point", ["bus.before-settle", "bus.after-settle"])
async def test_a_copy_after_a_crash_is_filtered_again(point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    crashed: list[str] = []

    async def crash(name: str) -> None:
        if name == point and not crashed:
            crashed.append(name)
            raise faults.Crash(name)

    monkeypatch.setattr(faults, "hook", crash)
    _, (found, _) = await run("memory:", write, count=4, where=EVEN)
    assert (found, crashed) == ([0, 2], [point])


# --- tokens, business keys, dead letters -----------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True], ids=["merged", "separate"])
async def test_the_token_of_what_is_filtered_goes(tmp_path: Path, apart: bool) -> None:
    store = f"sqlite:{tmp_path}/store.db"
    tokens = f"sqlite:{tmp_path}/tokens.db" if apart else None
    asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
    answering.on(Asked, source="asking", where=EVEN, dedup="tokens")(write)
    async with fg.Bus("memory:", nodes=[asking, answering], store=store, tokens=tokens) as bus:
        await bus.publish_many(numbers(6), node="asking")
        await bus.idle(timeout=LONG)
        assert (bus.outcomes()["filtered"], await notes(bus)) == (3, [0, 2, 4])
        for table in ("tokens", "claims", "outbox"):
            assert await count(bus, table) == 0, table


async def test_what_is_filtered_takes_no_business_key(url: str) -> None:
    node = fg.Node("walking", schema="create table if not exists steps(n integer)")

    @node.on(Step, source="leading", identity="key", where="n > 0")
    async def walk(step: Step, ctx: fg.Context) -> None:
        await ctx.db.execute("insert into steps values (?)", (step.n,))

    async with fg.Bus("memory:", nodes=[fg.Node("leading"), node], store=url) as bus:
        for n in range(3):
            await bus.publish(Step(key="k", n=n), node="leading")
            await bus.idle(timeout=LONG)
        assert await committed(bus, "select n from steps") == [(1,)]
        assert {name: bus.outcomes()[name] for name in ("handled", "filtered", "duplicate")} == {
            "handled": 1,
            "filtered": 1,
            "duplicate": 1,
        }


async def test_a_replay_that_a_newer_filter_does_not_take_resolves_its_dead_letter(url: str, tmp_path: Path) -> None:
    async def fail(asked: Asked, ctx: fg.Context) -> None:
        raise fg.Permanent("never")

    def bus(**options: Any) -> fg.Bus:
        asking, answering = fg.Node("asking"), fg.Node("answering", schema=TABLE)
        answering.on(Asked, source="asking", name="answer", **options)(fail)
        return fg.Bus(f"journal:{tmp_path}/journal", nodes=[asking, answering], store=url)

    async with bus() as first:
        await first.publish(Asked(n=1), node="asking")
        await first.idle(timeout=LONG)
        assert await dead_numbers(first) == [1]
    async with bus(where="n > 1") as second:
        [letter] = await second.dead_letters()
        await second.replay(letter.message_id)
        await second.idle(timeout=LONG)
        assert second.outcomes()["filtered"] == 1
        assert [each.status for each in await second.dead_letters(status=None)] == ["resolved"]
