"""What a journal gives back when opened again: queues, order, times, tries, dead letters; and what faults must not do.

A test marked with `bug` shows a fault that is known and not mended yet; once it is mended the mark has to go.
"""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from faregate.broker import durable
from faregate.broker.journal import frame as frames
from faregate.broker.journal.items import SnapshotPoint
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.retention import Retention
from faregate.broker.journal.snapshot import Snapshot
from faregate.broker.journal.spool import Spooled, spool
from faregate.errors import JournalFailed, JournalFull
from faregate.ports.queue import Binding
from tests.journal.station import NOTED, ROOT, Station, noted, station

DEAD_LETTER = "reader-dead-letters"
quiet_threads = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


# --- what comes back --------------------------------------------------------------------------------------


async def test_what_waits_comes_back_in_order_after_a_clean_end_and_after_a_kill() -> None:
    async with station() as it:
        await it.publish(*[noted(str(n)) for n in range(20)])
        await it.restart()
        await it.publish(noted("20"))
        await it.kill()
        assert await it.drain() == [str(n) for n in range(21)]


async def test_what_was_handled_does_not_come_back_however_often_the_journal_is_opened() -> None:
    async with station() as it:
        await it.publish(*[noted(str(n)) for n in range(5)])
        it.consume()
        await it.handle("2")
        for _ in range(3):
            await it.restart()
        assert await it.drain() == ["0", "1", "3", "4"]


async def test_a_delayed_redelivery_keeps_its_time_and_its_counts_after_a_kill() -> None:
    async with station() as it:
        await redeliver_later(it)
        await it.kill()
        await comes_back_in_time(it)


async def test_a_delayed_redelivery_keeps_its_time_and_its_counts_after_a_clean_end() -> None:
    async with station() as it:
        await redeliver_later(it)
        await it.restart()
        await comes_back_in_time(it)


async def redeliver_later(it: Station) -> None:
    await it.publish(noted("a"))
    it.consume()
    delivery = await it.take("a")
    delivery.start()
    await delivery.redeliver(50)


async def comes_back_in_time(it: Station) -> None:
    it.consume()
    assert await it.names() == [], "it came back too early"
    await it.clock.advance(51, it.settled)
    [delivery] = it.got
    assert (delivery.envelope.publication_id, delivery.redeliveries, delivery.redelivered) == ("a", 1, True)


@pytest.mark.parametrize("is_clean", [True, False], ids=["a clean end", "a kill"])
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("moment", ["it waits", "it is at the end", "it runs again"])
async def test_what_goes_behind_everything_is_there_after(moment: str, counted: bool, is_clean: bool) -> None:
    async with station() as it:
        again = it.restart if is_clean else it.kill
        await it.publish(*[noted(name) for name in "abc"])
        it.consume(prefetch=1)
        delivery = await it.take("a")
        delivery.start()
        await delivery.redeliver(50, counted=counted, behind=True)
        if moment != "it waits":
            await it.clock.advance(51, it.settled)
        if moment == "it runs again":
            await it.handle("b", "c")
            await it.publish(noted("e"), noted("f"))
            (await it.take("a")).start()
        for _ in range(3):  # what the first start has found is in the next one's snapshot
            await again()
            await it.clock.advance(1, it.settled)
        await it.publish(noted("d"))
        await it.clock.advance(51, it.settled)
        expected = {"it waits": "bcda", "it is at the end": "bcad", "it runs again": "efad"}
        assert "".join(await it.drain()) == expected[moment]


async def test_a_message_scheduled_for_later_stays_scheduled() -> None:
    async with station() as it:
        await it.publish(noted("later", deliver_at=it.clock.time() + 20), noted("now"))
        await it.kill()
        it.consume()
        assert await it.names() == ["now"]
        await it.clock.advance(21, it.settled)
        assert await it.names() == ["now", "later"]


async def test_started_tries_count_after_a_kill_so_that_what_kills_the_process_is_dead_lettered() -> None:
    async with station(Binding("reader", "Noted", "event", "author", max_deliveries=3)) as it:
        await it.publish(noted("deadly"))
        for _ in range(3):
            it.consume()
            (await it.take("deadly")).start()
            await it.kill()
        assert await it.drain() == []
        assert await it.drain(DEAD_LETTER) == ["deadly"]


async def test_a_dead_letter_comes_back_and_its_message_does_not() -> None:
    async with station() as it:
        await it.publish(noted("a"), noted("b"))
        it.consume()
        await (await it.take("a")).dead_letter("handler-failed", "it broke")
        await it.kill()
        await it.restart()
        assert await it.drain() == ["b"]
        assert await it.drain(DEAD_LETTER) == ["a"]


async def test_a_message_that_can_expire_keeps_its_place_in_its_key() -> None:
    async with station() as it:
        await it.publish(noted("a", key="k"))
        await it.publish(noted("b", key="k", expires_at=it.clock.time() + 100))
        assert await it.waiting() == ["a", "b"]


async def test_a_backlog_larger_than_memory_is_delivered_in_order_and_never_held_at_once() -> None:
    async with station(resident_bytes=50_000) as it:
        await it.publish(*[noted(str(n), size=100) for n in range(3000)])
        queue = it.broker.queue(NOTED.queue)
        most = 0
        it.consume(prefetch=50)
        taken: list[str] = []
        while len(taken) < 3000:
            await asyncio.sleep(0)
            most = max(most, len(queue._entries))
            for delivery in it.got:
                taken.append(delivery.envelope.publication_id)
                await delivery.settle("handled")
            it.got.clear()
        assert taken == [str(n) for n in range(3000)]
        assert most < 600, f"{most} entries were in memory at once"


async def test_queues_of_nodes_that_do_not_run_go_on_collecting() -> None:
    other = Binding("other", "Noted", "event", "author")
    async with station(NOTED, other) as it:
        await it.publish(noted("1"))
        it.bindings = (NOTED,)
        await it.restart()
        await it.publish(noted("2"))
        it.bindings = (other,)
        await it.restart()
        await it.publish(noted("3"))
        assert await it.drain(other.queue) == ["1", "2", "3"]
        assert await it.drain(NOTED.queue) == ["1", "2", "3"]


# --- time -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
async def test_a_redelivery_goes_on_waiting_after_a_restart_although_the_wall_clock_was_set_before(jump: float) -> None:
    async with station() as it:
        await it.publish(noted("a"))
        it.consume()
        await (await it.take("a")).redeliver(100)
        it.clock.set_wall(jump)
        it.clock.jump(40)
        await it.restart()
        it.consume()
        it.clock.set_wall(-jump)
        it.clock.jump(59)
        await it.settled()
        assert it.got == []
        it.clock.jump(2)
        await it.take("a")


# --- the spool --------------------------------------------------------------------------------------------


async def test_a_spooled_batch_is_appended_once_also_when_its_file_could_not_be_removed_before_a_kill() -> None:
    async with station() as it:
        spool(Layout(ROOT), it.disk, [noted("s1"), noted("s2")], "batch")
        it.broker.take_in_spool()
        await it.settled()
        spool(Layout(ROOT), it.disk, [noted("s1"), noted("s2")], "batch")
        await it.kill()
        it.broker.take_in_spool()
        await it.settled()
        assert it.disk.list(Layout(ROOT).spool) == []
        assert await it.drain() == ["s1", "s2"]


async def test_a_spooled_batch_and_a_publish_in_one_group_are_both_there_after_a_clean_end() -> None:
    async with station() as it:
        spool(Layout(ROOT), it.disk, [noted("s1"), noted("s2")])
        it.broker.take_in_spool()
        await it.publish(noted("p"))
        await it.settled()
        assert sorted(await it.waiting()) == ["p", "s1", "s2"]


async def test_of_a_long_spool_no_more_is_read_before_what_was_read_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(durable, "_READ_AHEAD", 5)
    batches = [[f"{number}{letter}" for letter in "abc"] for number in range(6)]
    async with station() as it:
        for number, names in enumerate(batches):
            spool(Layout(ROOT), it.disk, [noted(name) for name in names], f"{number}")
        read, in_the_log = it.journal.intake.read, list[int]()

        def reading(path: Path) -> Spooled | None:
            in_the_log.append(it.journal.next_offset)
            return read(path)

        monkeypatch.setattr(it.journal.intake, "read", reading)
        it.broker.take_in_spool()
        assert it.broker.in_flight.count == 6, "who waits until nothing is in flight waits for all of them"
        while len(in_the_log) < len(batches):
            await it.settled()
        assert in_the_log[2] == 6 and in_the_log[4] == 12, in_the_log
        assert await it.waiting() == [name for names in batches for name in names]


async def test_a_batch_that_nobody_foresaw_holds_up_no_other_and_stays_in_flight_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with station() as it:
        odd, _ = [spool(Layout(ROOT), it.disk, [noted(name)], name) for name in "ab"]
        read = it.journal.intake.read

        def reading(path: Path) -> Spooled | None:
            if path == odd:
                raise OverflowError
            return read(path)

        monkeypatch.setattr(it.journal.intake, "read", reading)
        it.broker.take_in_spool()
        await it.settled()
        assert it.broker.in_flight.count == 1 and it.disk.list(Layout(ROOT).quarantine) == [odd.name]
        assert await it.waiting() == ["b"]


# --- snapshots and retention ------------------------------------------------------------------------------


async def test_what_is_settled_while_a_snapshot_is_being_written_does_not_come_back() -> None:
    async with station() as it:
        await it.publish(noted("a"), noted("b"))
        it.consume()
        delivery = await it.take("a")
        writing = asyncio.ensure_future(it.journal.snapshot(it.broker.snapshot(), it.journal.snapshot_point()))
        await asyncio.sleep(0)
        delivery.start()
        await delivery.settle("handled")
        it.journal._flush_side_logs()
        await writing
        await it.kill()
        assert await it.drain() == ["b"]


async def test_settlements_behind_a_torn_record_count() -> None:
    async with station() as it:
        await it.publish(noted("a"), noted("b"), noted("c"))
        it.consume()
        await it.handle("a")
        await it.settled()
        path = Layout(ROOT).settled_log(0)
        file = it.disk.open(path)
        file.write(it.disk.size(path), (b"torn",))
        file.close()
        await it.kill()
        await it.restart()
        it.consume()
        await it.handle("b")
        await it.kill()
        assert await it.drain() == ["c"]


async def test_a_journal_opens_after_retention_kept_an_old_message_and_not_what_followed() -> None:
    async with station(segment_size=8192, retention=Retention(seconds=0)) as it:
        for n in range(5):
            await it.publish(noted(str(n), size=4000))
        it.consume()
        await it.handle("1", "2")
        await it.broker._keep()
        assert await it.waiting() == ["0", "3", "4"]


async def test_retention_keeps_what_was_published_while_it_was_being_prepared() -> None:
    async with station(segment_size=8192, retention=Retention(seconds=0)) as it:
        await it.publish(noted("0", size=4000))
        write = it.journal.snapshot

        async def slow(snapshot: Snapshot, point: SnapshotPoint) -> None:
            await write(snapshot, point)
            for n in range(1, 5):
                await it.publish(noted(str(n), size=4000))

        it.journal.snapshot = slow  # type: ignore[method-assign]
        await it.broker._keep()
        it.journal.snapshot = write  # type: ignore[method-assign]
        assert await it.waiting() == ["0", "1", "2", "3", "4"]


# --- full and failing disks -------------------------------------------------------------------------------


@quiet_threads
async def test_when_the_disk_is_full_at_a_new_segment_publishing_works_again_once_there_is_room() -> None:
    async with station(segment_size=8192) as it:
        await it.publish(noted("a", size=3000))
        it.disk.full = True
        for _ in range(2):
            with pytest.raises(JournalFull, match="no room"):
                await it.publish(noted("b", size=6000))
        it.disk.full = False
        await it.publish(noted("b", size=6000))
        await it.publish(noted("c"))
        assert await it.waiting() == ["a", "b", "c"]


@quiet_threads
async def test_when_side_logs_cannot_be_written_publishing_goes_on_and_nothing_is_lost() -> None:
    async with station() as it:
        it.broker._careful = 0
        await it.publish(noted("a"), noted("b"))
        it.consume()
        await it.settled()
        it.disk.full = True
        await it.handle("a")
        await it.publish(noted("c"))
        it.disk.full = False
        await it.publish(noted("d"))
        assert await it.waiting() == ["b", "c", "d"]


@quiet_threads
@pytest.mark.parametrize(
    "wrong",
    [
        {"headers": {"text": "\ud800"}},
        {"headers": {"text": 7}},
        {"key": 7},
        {"key": ("a", "b")},
        {"body": "text"},
        {"sent_at": float("nan")},
        {"deliver_at": 1e13},
        {"depth": 1 << 31},
    ],
)
async def test_a_message_that_cannot_be_written_is_refused_alone(wrong: dict[str, Any]) -> None:
    async with station() as it:
        bad = structs.replace(noted("bad"), **wrong)
        told = await asyncio.gather(
            it.publish(noted("a")), it.publish(bad), it.publish(noted("b")), return_exceptions=True
        )
        assert [type(one).__name__ for one in told] == ["NoneType", "Unwritable", "NoneType"]
        assert await it.waiting() == ["a", "b"]


async def test_a_message_that_could_not_become_a_dead_letter_for_lack_of_room_is_not_lost() -> None:
    async with station() as it:
        await it.publish(noted("a"))
        it.consume()
        delivery = await it.take("a")
        fault = it.disk.fail("write", errno.ENOSPC, name="*.seg")
        await delivery.dead_letter("handler-failed", "it broke")
        await it.settled()
        fault.lift()
        await it.restart()
        assert await it.drain() + await it.drain(DEAD_LETTER) == ["a"]


async def test_nothing_is_confirmed_in_a_group_whose_sync_fails() -> None:
    async with station() as it:
        it.disk.fail("sync", errno.EIO)
        told = await asyncio.gather(
            it.broker.dead_letter_unsent("reader", noted("x"), "unroutable", "nobody wants it"),
            it.journal.barrier(),
            return_exceptions=True,
        )
        assert [type(one) for one in told] == [JournalFailed, JournalFailed], "something was confirmed"


async def test_a_repetition_of_a_refused_publication_is_not_confirmed() -> None:
    async with station() as it:
        fault = it.disk.fail("write", errno.ENOSPC, name="*.seg", times=1)
        told = await asyncio.gather(it.publish(noted("x")), it.publish(noted("x")), return_exceptions=True)
        confirmed = sum(one is None for one in told)
        fault.lift()
        waiting = await it.waiting()
        assert len(waiting) == min(1, confirmed), f"{confirmed} were confirmed, and {waiting} is there"


async def test_after_a_failed_sync_every_publish_is_refused_with_the_reason() -> None:
    async with station() as it:
        await it.publish(noted("a"))
        fault = it.disk.fail("sync", errno.EIO)
        for _ in range(2):
            with pytest.raises(JournalFailed, match="nothing more is confirmed"):
                await it.publish(noted("b"))
        fault.lift()
        with pytest.raises(JournalFailed):
            await it.publish(noted("c"))
        await it.restart()
        assert (await it.drain())[0] == "a"


@pytest.mark.parametrize("length", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_what_was_written_ends_at_the_last_byte_that_is_not_zero(length: int) -> None:
    assert {frames.written_end(bytes(length), start) for start in (0, length)} == {0, length}
    for last in {0, length // 2, length - 1} if length else ():
        data = bytearray(length)
        data[last] = 1
        assert frames.written_end(data, 0) == last + 1
        assert frames.written_end(data, length) == length
