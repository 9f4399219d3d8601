"""What opening a journal reads, and when: many short runs at once, and the last publications not before they are asked
for."""

import base64
import random
from array import array
from typing import Any

import msgspec
import pytest

from faregate.broker.journal import reader as reader_module
from faregate.broker.journal import snapshot as snapshot_module
from faregate.broker.journal.content import read_keyed
from faregate.broker.journal.layout import find_json, write_json
from faregate.broker.journal.reader import JournalReader
from faregate.broker.journal.recovery import Found, Runs, Stretch
from faregate.broker.journal.retention import Retention
from faregate.broker.journal.snapshot import QueueSnapshot, Snapshot
from faregate.errors import JournalCorrupt, JournalFailed
from tests.journal.station import Station, noted, station

# --- many runs --------------------------------------------------------------------------------------------


async def every_second_settled(it: Station, count: int) -> list[str]:
    """Publish so many, and handle every second one; what waits then."""
    await it.publish(*[noted(str(number)) for number in range(count)])
    it.consume(prefetch=count)
    await it.settled()
    for delivery in it.got[::2]:
        await delivery.settle("handled")
    return [str(number) for number in range(1, count, 2)]


def kept(it: Station) -> Snapshot:
    found = find_json(it.journal.layout.snapshot, it.disk, Snapshot)
    assert found is not None
    return found


async def test_many_runs_are_packed_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_LISTED", 10)
    async with station() as it:
        waiting = await every_second_settled(it, 300)
        await it.restart()
        assert isinstance(kept(it).queues[1].runs, bytes)
        await it.restart()
        assert await it.drain() == waiting


async def test_a_snapshot_with_all_of_its_runs_in_a_list_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were before many were packed."""
    monkeypatch.setattr(snapshot_module, "_LISTED", 1_000_000)
    async with station() as it:
        waiting = await every_second_settled(it, 300)
        await it.restart()
        assert isinstance(kept(it).queues[1].runs, list)
        monkeypatch.undo()
        assert await it.drain() == waiting


def test_packed_runs_are_numbers_of_64_bits_in_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_LISTED", 1)
    packed = QueueSnapshot.of([(1, 1), (3, 1 << 40)], [])
    numbers = b"".join(number.to_bytes(8, "little") for number in (1, 1, 3, 1 << 40))
    assert msgspec.json.decode(msgspec.json.encode(packed)) == {
        "runs": base64.b64encode(numbers).decode(),
        "returning": [],
    }
    assert packed.bounds() == QueueSnapshot([(1, 1), (3, 1 << 40)]).bounds() == array("q", [1, 1, 3, 1 << 40])


async def test_half_a_run_is_damage() -> None:
    async with station() as it:
        await it.publish(noted("a"))
        await it.close()
        snapshot = kept(it)
        snapshot.queues[1].runs = bytes(8)
        write_json(it.journal.layout.snapshot, it.disk, snapshot)
        with pytest.raises(JournalCorrupt, match="its runs are cut off"):
            await it.open()


@pytest.mark.parametrize("seed", range(20))
def test_runs_taken_together_are_what_they_are_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    edges = sorted(chance.sample(range(500), 2 * chance.randrange(1, 40)))
    runs = [(first, last - 1) for first, last in zip(edges[::2], edges[1::2], strict=True)]
    found, expected = Found(position=chance.randrange(9)), []
    position = found.position
    for first, last in runs:
        position += 1  # something between them is done
        for offset in range(first, last + 1):
            expected.append((position, offset))
            position += 1
    found.scattered(Runs(*(array("q", each) for each in zip(*runs, strict=True))))
    [piece] = found.pieces
    assert isinstance(piece, Stretch) and [*zip(*piece, strict=True)] == expected
    assert found.position > expected[-1][0] + 1, "what follows would follow without a gap"


PLAIN = [f"{number}{letter}" for number in range(5) for letter in "ab" if f"{number}{letter}" != "2b"]


async def publish_with_one_that_is_odd(it: Station, **odd: Any) -> None:
    """Plain ones are not read whole when a journal is opened; that one is."""
    for number in range(5):
        await it.publish(noted(f"{number}a"), noted(f"{number}b", **odd if number == 2 else {}))
    await it.kill()


async def test_one_of_another_topic_among_plain_ones_is_not_taken_for_one_of_them() -> None:
    async with station() as it:
        await publish_with_one_that_is_odd(it, type="Other")
        assert it.broker.in_flight.count == len(PLAIN)
        assert await it.drain() == PLAIN


async def test_one_for_later_among_plain_ones_keeps_its_time() -> None:
    async with station() as it:
        await publish_with_one_that_is_odd(it, deliver_at=it.clock.time() + 50)
        assert it.broker.in_flight.count == len(PLAIN), "it counts though it is for later"
        assert await it.drain() == PLAIN
        await it.clock.advance(51, it.settled)
        assert await it.drain() == ["2b"]


async def test_one_that_expires_among_plain_ones_expires_though_nobody_consumes() -> None:
    async with station() as it:
        await publish_with_one_that_is_odd(it, expires_at=it.clock.time() + 50)
        queue = it.broker.queue(it.bindings[0].queue)
        assert len(queue) == len(PLAIN) + 1
        await it.clock.advance(51, it.settled)
        assert len(queue) == len(PLAIN)
        assert await it.drain() == PLAIN


# --- the last publications --------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where somebody began to read publications."""
    found: list[int] = []
    stored = JournalReader.stored

    def noted_down(self: JournalReader, start: int, stop: int, read: Any) -> Any:
        if read is read_keyed:
            found.append(start)
        return stored(self, start, stop, read)

    monkeypatch.setattr(JournalReader, "stored", noted_down)
    return found


async def test_the_last_publications_are_read_when_somebody_publishes(asked: list[int]) -> None:
    async with station() as it:
        await it.publish(noted("a"), noted("b"))
        await it.kill()
        asked.clear()
        assert await it.drain() == ["a", "b"] and not asked
        await it.publish(noted("b"), noted("c"))
        await it.publish(noted("a"))
        assert len(asked) == 1 and it.broker.recent.duplicates == 2
        assert await it.drain() == ["c"]


async def test_a_journal_whose_last_publications_cannot_be_read_takes_nothing() -> None:
    """Who publishes again what is damaged would publish it twice."""
    async with station() as it:
        await it.publish(noted("a", size=300))
        it.consume()
        await it.handle("a")
        await it.restart()
        path = it.journal.layout.segment(0)
        content = it.disk.files()[path]  # type: ignore[attr-defined]
        it.disk.open(path).write(content.index(b"a..."), (b"b",))
        for _ in range(2):
            with pytest.raises(JournalFailed, match="is damaged at byte"):
                await it.publish(noted("b"))
        assert it.journal.failure is not None


@pytest.mark.parametrize("seconds", [0, 1e9], ids=["it takes something", "it takes nothing"])
async def test_what_retention_takes_is_known_before(seconds: float, asked: list[int]) -> None:
    async with station(segment_size=8192, retention=Retention(seconds=None)) as it:
        for number in range(5):
            await it.publish(noted(str(number), size=4000))
        await it.drain()
        it.how["retention"] = Retention(seconds=seconds)
        await it.kill()
        asked.clear()
        await it.broker._keep()
        assert len(it.journal.layout.segment_bases(it.disk)) == (1 if not seconds else 5)
        assert len(asked) == (0 if seconds else 1), "it was read too early, or too late"
        await it.publish(noted("0"))
        assert it.broker.recent.duplicates == 1


async def test_opening_does_not_walk_through_what_the_snapshot_has(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = 0
    read_header = reader_module.frames.read_header

    def counted(*args: Any) -> Any:
        nonlocal headers
        headers += 1
        return read_header(*args)

    async with station() as it:
        for number in range(200):
            await it.publish(noted(str(number)))
        await it.drain()
        await it.restart()
        monkeypatch.setattr(reader_module.frames, "read_header", counted)
        await it.kill()
        monkeypatch.undo()
        assert headers < 20, "it walked from the segment's start"
        await it.publish(noted("last"))
        assert await it.drain() == ["last"]
