import asyncio, errno
import pytest
from faregate.ports.queue import Binding
from faregate.broker.journal.layout import Layout
from faregate.broker.journal.spool import spool
from faregate.broker.journal.retention import Retention
from faregate.broker.journal import errors
from faregate.broker import durable
from faregate.testing.disk import SimulatedDisk
from faregate.testing.clock import rest
from tests.journal.station import ROOT, NOTED, noted, station, Station
from faregate.testing import FakeClock

async def test_handled_stays_handled():
    async with station() as s:
        await s.publish(*[noted(str(n)) for n in range(5)])
        s.consume()
        await s.handle("2")
        await s.restart()
        await s.restart()
        assert await s.drain() == ["0","1","3","4"]

async def test_spool_and_publish_in_one_group():
    async with station() as s:
        spool(Layout(ROOT), s.disk, [noted("s1"), noted("s2")])
        s.broker.take_in_spool()
        await s.publish(noted("p"))
        await s.settled()
        assert sorted(await s.waiting()) == ["p","s1","s2"]

async def test_open_close_without_begin():
    async with station() as s:
        await s.publish(noted("a"))
        await s.close()
        from faregate.broker.journal.journal import Journal
        j = Journal(ROOT, disk=s.disk); j.start()
        b = durable.DurableBroker(s.clock, j)
        b.close(); await b.close_journal()
        await s.open()
        assert await s.drain() == ["a"]

async def test_due_survives():
    async with station() as s:
        await s.publish(noted("a"))
        s.consume()
        d = await s.take("a"); d.start()
        await d.redeliver(50)
        await s.restart()
        s.consume()
        assert await s.names() == []
        await s.clock.advance(51, s.settled)
        assert await s.names() == ["a"]

async def test_due_survives_kill():
    async with station() as s:
        await s.publish(noted("a"))
        s.consume()
        d = await s.take("a"); d.start()
        await d.redeliver(50)
        await s.kill()
        s.consume()
        assert await s.names() == []
        await s.clock.advance(51, s.settled)
        assert await s.names() == ["a"]

async def test_timed_order():
    async with station() as s:
        await s.publish(noted("a", key="k"))
        await s.publish(noted("b", key="k", expires_at=s.clock.time()+100))
        assert await s.waiting() == ["a","b"]

async def test_surrogate():
    async with station() as s:
        e = noted("a"); e.headers = {"x": "\ud800"}
        try:
            await s.publish(e)
        except TimeoutError: raise
        except Exception as exc: print(repr(exc))
        await s.publish(noted("b"))

async def test_side_log_full():
    async with station() as s:
        await s.publish(noted("a"), noted("b"))
        s.consume()
        d = await s.take("a")
        s.disk.full = True
        try: d.start()
        except Exception as exc: print("start", repr(exc))
        try: await d.settle("handled")
        except Exception as exc: print("settle", repr(exc))
        await s.publish(noted("c"))

async def test_side_log_full_in_thread():
    async with station() as s:
        s.broker._careful = 0
        await s.publish(noted("a"), noted("b"))
        s.consume()
        d = await s.take("a")
        s.disk.full = True
        d.start()
        await d.settle("handled")
        await s.publish(noted("c"))

async def test_bury_full():
    async with station(segment_size=4096) as s:
        await s.publish(noted("a", size=2000))
        s.consume()
        d = await s.take("a")
        s.disk.full = True
        s.broker._careful = 0
        f = s.disk.fail("write", errno.ENOSPC, name="*.seg")
        await d.poison("handler-failed", "x")
        await s.settled()
        f.lift(); s.disk.full = False
        await s.restart()
        assert (await s.drain()) + (await s.drain("reader-poison")) == ["a"]

async def test_full_at_roll():
    async with station(segment_size=8192) as s:
        await s.publish(noted("a", size=3000))
        s.disk.full = True
        with pytest.raises(errors.JournalFull):
            await s.publish(noted("b", size=3000))
        with pytest.raises(errors.JournalFull):
            await s.publish(noted("b", size=3000))
        s.disk.full = False
        await s.publish(noted("b", size=3000))
        await s.publish(noted("c"))
        assert await s.waiting() == ["a","b","c"]

async def test_gap_after_compaction():
    async with station(segment_size=8192, retention=Retention(seconds=0)) as s:
        for n in range(5):
            await s.publish(noted(str(n), size=4000))
        s.consume()
        await s.handle("1","2")
        await s.broker._keep()
        assert await s.waiting() == ["0","3","4"]

async def test_retain_race():
    async with station(segment_size=8192, retention=Retention(seconds=0)) as s:
        await s.publish(noted("0", size=4000))
        snap = s.broker.snapshot()
        await s.journal.snapshot(snap)
        for n in range(1,5):
            await s.publish(noted(str(n), size=4000))
        await s.journal.retain({number: queue.runs for number, queue in snap.queues.items()})
        assert await s.waiting() == ["0","1","2","3","4"]

async def test_snapshot_traffic():
    async with station() as s:
        await s.publish(noted("a"), noted("b"))
        s.consume()
        d = await s.take("a"); 
        snap = s.broker.snapshot()
        task = asyncio.ensure_future(s.journal.snapshot(snap))
        await asyncio.sleep(0)
        d.start(); await d.settle("handled")
        s.journal._flush_side_logs()
        await task
        await s.kill()
        assert await s.drain() == ["b"]

async def test_poison_confirm():
    async with station(segment_size=4096) as s:
        s.disk.fail("sync", errno.EIO)
        s.broker.bury("reader", noted("x"), "r", "e")
        with pytest.raises(errors.JournalFailed):
            await s.journal.barrier()

async def test_dup_confirm():
    async with station(segment_size=4096) as s:
        f = s.disk.fail("write", errno.ENOSPC, name="*.seg")
        r = await asyncio.gather(s.publish(noted("x")), s.publish(noted("x")), return_exceptions=True)
        f.lift()
        print(r)
        assert all(isinstance(x, Exception) for x in r)

async def test_misaligned_side_log():
    async with station() as s:
        await s.publish(noted("a"), noted("b"), noted("c"))
        s.consume()
        await s.handle("a")
        await s.settled()
        [log] = [p for p in s.disk.files() if p.suffix == ".log"]
        f = s.disk.open(log); f.write(s.disk.size(log), (b"torn",)); f.close()
        await s.kill()
        await s.restart()
        s.consume()
        await s.handle("b")
        await s.kill()
        assert await s.drain() == ["c"]

async def test_resident_drift():
    async with station(resident_bytes=20_000) as s:
        await s.publish(*[noted(str(n)) for n in range(1000)])
        for r in range(5):
            await s.drain() if r else None
            await s.publish(*[noted(f"t{r}.{n}", expires_at=s.clock.time()+1000) for n in range(300)])
            print(s.broker._resident)
        await s.drain()
        assert s.broker._resident == 0
