"""Several processes send from one outbox: each its own rows, in the order of each key, and what a dead one left."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from faregate import ids
from faregate.bus.dispatcher import Dispatcher
from faregate.bus.leases import LEASE_SECONDS
from faregate.bus.outbox_place import PLACES, OutboxPlace
from faregate.core.alarms import Alarms
from faregate.message import Envelope
from faregate.ports.store import FROM_OUTSIDE, OutboxRow, Store
from faregate.stores.sqlite import SqliteStore
from faregate.testing import FakeClock

LONG = 15.0


def row(text: str, key: str | None = None, ordinal: int = 0) -> OutboxRow:
    envelope = Envelope(publication_id=ids.root_id(), type="Noted", source="n", body=text.encode())
    return OutboxRow(0, "n", ids.root_id(), ordinal, "n.Noted", key, envelope)


class Process:
    """One that sends from the outbox, over a line that may be cut."""

    def __init__(self, name: str, store: Store, clock: FakeClock, sent: list[tuple[str, str]]) -> None:
        self.name = name
        self.store = store
        self.clock = clock
        self.sent = sent
        self.line = asyncio.Event()
        self.line.set()
        self.place = OutboxPlace(store, name, clock)
        self.dispatcher = Dispatcher(store, self, clock, Alarms(), nodes=["n"], place=self.place)

    async def publish(self, envelopes: Sequence[Envelope]) -> None:
        await self.line.wait()
        self.sent += [(self.name, each.body.decode()) for each in envelopes]

    async def commit(self, *rows: OutboxRow) -> None:
        async with self.store.transaction() as transaction:
            recorded = await self.dispatcher.record_rows(transaction, rows)
        self.dispatcher.committed(recorded)


class Office:
    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.url = f"sqlite:{folder}/outbox.db"
        self.sent: list[tuple[str, str]] = []

    @asynccontextmanager
    async def process(self, name: str) -> AsyncIterator[Process]:
        store = SqliteStore(self.url, clock=self.clock)
        await store.open()
        process = Process(name, store, self.clock, self.sent)
        await process.dispatcher.start()
        try:
            yield process
        finally:
            await process.dispatcher.stop(1)
            await store.close()

    async def left(self, store: Store, *rows: OutboxRow) -> None:
        """By somebody who does not send."""
        async with store.transaction() as transaction:
            await transaction.send(rows)

    async def until(self, done: Callable[[], bool], pace: float = 0.001) -> None:
        async with asyncio.timeout(LONG):
            while not done():
                await self.clock.advance(pace)
                await asyncio.sleep(0.003)

    async def later(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            await self.clock.advance(0.1)
            await asyncio.sleep(0.005)

    @property
    def texts(self) -> list[str]:
        return [text for _, text in self.sent]


@asynccontextmanager
async def two(it: Office) -> AsyncIterator[tuple[Process, Process]]:
    """Two that know of each other."""
    async with it.process("a") as a, it.process("b") as b:
        await it.until(lambda: not a.place.is_alone, pace=0.1)
        assert (a.place.is_lowest, b.place.is_lowest, b.place.is_alone) == (True, False, False)
        yield a, b


async def test_each_sends_what_it_committed_and_nothing_of_the_other(tmp_path: Path) -> None:
    it = Office(tmp_path)
    async with two(it) as (a, b):
        for number in range(10):
            await a.commit(row(f"a{number}", "k"), row(f"a-{number}"))
            await b.commit(row(f"b{number}", "l"), row(f"b-{number}"))
        await it.until(lambda: len(it.sent) == 40, pace=0.02)
        await it.later(1)
    assert len(it.sent) == 40, "something was sent twice"
    assert all(name == text[0] for name, text in it.sent)


async def test_no_row_of_a_key_is_sent_before_an_older_one_that_another_committed(tmp_path: Path) -> None:
    it = Office(tmp_path)
    async with two(it) as (a, b):
        a.line.clear()
        await a.commit(row("first", "k"))
        await b.commit(row("second", "k"), row("other key", "l"), row("no key"), row("third", "k"))
        await it.until(lambda: len(it.sent) == 2, pace=0.01)
        assert it.texts == ["other key", "no key"]
        await it.later(1.5)
        assert len(it.sent) == 2
        a.line.set()
        await it.until(lambda: len(it.sent) == 5, pace=0.01)
        assert it.sent[2:] == [("a", "first"), ("b", "second"), ("b", "third")]


async def test_two_that_wait_for_what_the_other_has_sent_both_go_on(tmp_path: Path) -> None:
    it = Office(tmp_path)
    async with two(it) as (a, b):
        for number in range(6):
            await (a, b)[number % 2].commit(row(f"k{number}", "k"), row(f"l{number}", "l"))
        await it.until(lambda: len(set(it.texts)) == 12, pace=0.05)
        texts = [*dict.fromkeys(it.texts)]  # a copy may follow, where the store was slower than time
        for key in "kl":
            assert [text for text in texts if text[0] == key] == [f"{key}{number}" for number in range(6)]


async def test_what_a_dead_process_left_is_sent_after_a_moment_and_before_newer_ones_of_its_key(tmp_path: Path) -> None:
    it = Office(tmp_path)
    async with two(it) as (a, b):
        await it.left(a.store, row("left 1", "k"), row("left 2"), row("left 3", "k"))
        await a.commit(row("newer", "k"))
        await b.commit(row("newest", "k"), row("free"))
        await it.until(lambda: len(it.sent) == 1, pace=0.01)
        await it.later(1.5)
        assert it.texts == ["free"], "it was not left to who committed it"
        await it.until(lambda: len(it.sent) >= 6, pace=0.05)
        in_order = [text for text in dict.fromkeys(it.texts) if text != "left 2"]  # a copy may follow
        assert in_order == ["free", "left 1", "left 3", "newer", "newest"]
        assert {name for name, text in it.sent if text.startswith("left")} == {"a"}


async def test_what_comes_from_outside_is_sent_by_one_of_them_at_once(tmp_path: Path) -> None:
    it = Office(tmp_path)
    async with two(it) as (a, _):
        await it.left(a.store, row("outside", ordinal=FROM_OUTSIDE))
        await it.until(lambda: bool(it.sent))
        await it.later(1)
    assert it.sent == [("a", "outside")]


async def test_the_other_takes_over_from_one_that_died_and_the_next_process_has_its_place(tmp_path: Path) -> None:
    it = Office(tmp_path)
    store = SqliteStore(it.url, clock=it.clock)
    await store.open()
    assert await store.claim_lease("", PLACES[0], "dead", LEASE_SECONDS)
    async with it.process("b") as b:
        assert (b.place.is_alone, b.place.is_lowest) == (False, False)
        await it.left(store, row("outside", ordinal=FROM_OUTSIDE), row("left", "k"))
        await it.until(lambda: len(it.sent) == 1, pace=0.01)
        await it.until(lambda: len(it.sent) == 2, pace=0.01)
        assert it.clock.monotonic() < LEASE_SECONDS, "it waited for the place of the dead one"
        await it.until(lambda: b.place.is_alone, pace=0.1)
    await store.close()


@pytest.mark.parametrize("others", [0, 1])
async def test_one_alone_asks_nobody_before_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    it, asked = Office(tmp_path), []
    async with it.process("a") as a:
        keyed_before = a.store.keyed_before

        async def note(seq: int, nodes: Sequence[str] | None = None) -> list[tuple[int, str, str]]:
            asked.append(seq)
            return await keyed_before(seq, nodes)

        monkeypatch.setattr(a.store, "keyed_before", note)
        if others:
            await a.store.claim_lease("", PLACES[9], "b", 100)
            await it.until(lambda: not a.place.is_alone, pace=0.1)
        await a.commit(row("one", "k"))
        await it.until(lambda: bool(it.sent))
    assert bool(asked) is bool(others)
