"""Faults that the journal once had. Each test is the story of one."""

from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.journal import JournalReader
from faregate.broker.journal import frame as frames
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.lock import WriterLock, lock_holder
from faregate.broker.journal.log import Log
from faregate.broker.journal.retention import Retention, apply_retention
from faregate.broker.recent import RecentPublications
from faregate.errors import JournalCorrupt
from faregate.message import Envelope
from faregate.ports.dead_letter import DeadLetter
from faregate.testing import FakeClock
from faregate.transports.journal import JournalTransport
from faregate.transports.journal_log import JournalLog


def open_log(path: Path, segment_size: int = 64 * 1024) -> Log:
    prepare(Layout(path), RealDisk())
    return Log(Layout(path), RealDisk(), segment_size=segment_size)


def append(log: Log, *texts: str) -> None:
    log.append([Envelope(publication_id=text, type="T", body=text.encode()) for text in texts], [-1] * len(texts))
    log.sync()


def texts(path: Path, start: int = 0) -> list[str]:
    return [envelope.body.decode() for _, envelope in JournalReader(path).envelopes(start)]


def test_a_seal_that_was_interrupted_hides_nothing_that_follows(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, "a", "b")
    segment = log._segment
    assert segment is not None
    segment.file.truncate = lambda size: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        log.roll()
    data = Layout(tmp_path).segment(0).read_bytes()
    header = frames.read_segment_header(data)
    assert header is not None
    assert [frame.kind for frame in frames.scan(data, header)][-1] == frames.FOOTER, "the test has to leave a footer"
    log = open_log(tmp_path)
    append(log, "c")
    assert texts(tmp_path) == ["a", "b", "c"]
    log.close()
    assert open_log(tmp_path).next_offset == 3


def test_retention_behind_a_segment_that_stays_leaves_no_hole(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_size=8 * 1024)
    for number in range(12):
        append(log, f"{number}" + "x" * 3000)
    bases = Layout(tmp_path).segment_bases(RealDisk())
    assert len(bases) > 3
    reader = JournalReader(tmp_path)
    apply_retention(Layout(tmp_path), RealDisk(), reader, Retention(seconds=0), [(0, 0)], log.time + 10)
    log.close()
    reopened = open_log(tmp_path)
    assert reopened.next_offset == 12
    reader = JournalReader(tmp_path)
    assert reader.earliest() == bases[-1]
    assert [envelope.publication_id[0] for envelope in reader.load([0])] == ["0"], "what still waits is gone"
    reopened.close()


async def test_a_delayed_redelivery_keeps_its_time_over_a_clean_restart(tmp_path: Path) -> None:
    class Job(fg.Event):
        number: int

    ran: list[float] = []
    clock = FakeClock()

    def nodes() -> list[fg.Node]:
        node = fg.Node("worker")

        @node.on(Job, source="worker", retry=None, redeliver=fg.Redeliver(600))
        async def work(job: Job) -> None:
            ran.append(clock.time())
            raise OSError("down")

        return [node]

    for _ in range(2):
        transport = JournalTransport(f"{tmp_path}/journal", clock=clock)
        async with fg.Bus(transport, nodes=nodes(), clock=clock) as bus:
            if not ran:
                await bus.publish(Job(number=1))
            for _ in range(5):
                await transport.journal.barrier()
                await clock.advance(1)
    assert len(ran) == 1, "it ran again long before it was due"


def test_loading_an_offset_that_is_not_there_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, "a")
    record = DeadLetter.of("n", Envelope(publication_id="p"), "bad", "bad", 0.0, queue="q")
    log.append_dead_letters([record])
    log.sync()
    with pytest.raises(JournalCorrupt, match="offset 1 is not in"):
        JournalReader(tmp_path).load([1])
    log.roll()
    log._start_segment(log.time)
    append(log, "b")
    with pytest.raises(JournalCorrupt, match="offset 1 is not in"):
        JournalReader(tmp_path).load([1])
    log.close()


def test_a_message_larger_than_a_segment_grows_it_under_readers(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_size=4096)
    reader = JournalReader(tmp_path)
    assert list(reader.envelopes()) == []
    append(log, "x" * 20_000)
    append(log, "y")
    assert [len(envelope.body) for _, envelope in reader.envelopes()] == [20_000, 1]
    log.close()


def test_asking_who_has_the_lock_does_not_take_it_from_a_starting_writer(tmp_path: Path) -> None:
    for _ in range(50):
        assert lock_holder(tmp_path) is None
        WriterLock(tmp_path, "wait").release()


def test_a_journal_without_its_topology_is_refused(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    append(log, "a")
    log.close()
    Layout(tmp_path).topology.unlink()
    with pytest.raises(JournalCorrupt, match=r"topology\.json is missing"):
        JournalReader(tmp_path).topology()


def test_publications_that_were_refused_push_no_others_out_of_the_window() -> None:
    recent = RecentPublications(window=10)
    for number in range(5):
        assert recent.add(Envelope(f"old{number}"))
    for _ in range(50):
        assert recent.add(Envelope("refused"))
        recent.forget(Envelope("refused"))
    assert not recent.add(Envelope("old0")), "it was forgotten although the window has room"
    assert recent.add(Envelope("refused"))
    assert all(recent.add(Envelope(f"new{number}")) for number in range(4))
    assert not recent.add(Envelope("refused")), "an old refusal counted against the new publication"


async def test_messages_scheduled_for_later_do_not_keep_others_in_the_journal(tmp_path: Path) -> None:
    class Job(fg.Event):
        number: int

    ran: list[int] = []
    node = fg.Node("worker")

    @node.on(Job, source="worker")
    async def work(job: Job) -> None:
        ran.append(job.number)

    transport = JournalTransport(f"{tmp_path}/journal", resident_bytes=100_000)
    async with fg.Bus(transport, nodes=[node]) as bus:
        later = [fg.publish(Job(number=number), delay=3600) for number in range(500)]
        await bus.publish_many(later)
        await bus.publish_many([Job(number=number) for number in range(1000, 1020)])
        await bus.idle(30)
    assert sorted(ran) == list(range(1000, 1020))


async def test_what_is_dead_lettered_while_the_bus_closes_is_not_waiting_again(tmp_path: Path) -> None:
    class Job(fg.Event):
        number: int

    ran: list[int] = []

    def nodes() -> list[fg.Node]:
        node = fg.Node("worker")

        @node.on(Job, source="worker")
        async def work(job: Job) -> None:
            ran.append(job.number)
            raise fg.Permanent("no")

        return [node]

    url = f"journal:{tmp_path}/journal"
    for _ in range(3):
        async with fg.Bus(url, nodes=nodes()) as bus:
            if not ran:
                await bus.publish_many([Job(number=number) for number in range(50)])
            transport = bus._transport
            assert isinstance(transport, JournalTransport)
            transport.broker.keep()
    async with fg.Bus(url, nodes=nodes()) as bus:
        await bus.idle(30)
        assert sorted(record.envelope.body for record in await bus.dead_letters()) == sorted(
            b'{"number":%d}' % number for number in range(50)
        )


@pytest.mark.parametrize(
    "wrong", [{"correlation_id": None}, {"type": 7}, {"body_digest": "0" * 32}, {"kind": "odd"}, {"depth": 1 << 70}]
)
async def test_an_envelope_made_by_hand_that_could_not_be_read_is_refused(
    wrong: dict[str, Any], tmp_path: Path
) -> None:
    """Neither the bus nor the spool confirms what nobody can read, and everything else of its commit with it."""
    good: dict[str, Any] = {"publication_id": "a", "type": "Placed", "source": "shop", "body": b"{}"}
    bad = Envelope(**{**good, **wrong})
    async with fg.Bus(f"journal:{tmp_path}", nodes=[fg.Node("shop")]) as bus:
        with pytest.raises(fg.Unwritable):
            await bus.publish(bad)
        with pytest.raises(fg.Unwritable):
            JournalLog(tmp_path).append([bad])
        assert await bus.publish(Envelope(**good)) == "a"
    assert [each.publication_id for _, each in JournalReader(tmp_path).envelopes()] == ["a"]


async def test_what_comes_while_another_one_who_took_in_closes_is_taken_in_by_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He holds the lock until the end, so whoever appends meanwhile leaves it to him; and he did not look again."""
    prepare(Layout(tmp_path), RealDisk())
    one, other = JournalLog(tmp_path), JournalLog(tmp_path)
    close, refused = JournalTransport.close, list[bool]()

    async def close_slowly(self: JournalTransport) -> None:
        if not refused:
            other.append([Envelope(publication_id="b", type="T", body=b"b")])
            refused.append(await other.take_in())
        await close(self)

    monkeypatch.setattr(JournalTransport, "close", close_slowly)
    one.append([Envelope(publication_id="a", type="T", body=b"a")])
    assert await one.take_in()
    assert refused == [False] and texts(tmp_path) == ["a", "b"]


async def test_whoever_takes_in_is_not_kept_for_ever_by_those_who_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(Layout(tmp_path), RealDisk())
    one, other = JournalLog(tmp_path), JournalLog(tmp_path)
    close, sent = JournalTransport.close, 0

    async def close_slowly(self: JournalTransport) -> None:
        nonlocal sent
        sent += 1
        other.append([Envelope(publication_id=f"b{sent}", type="T", body=b"b%d" % sent)])
        await close(self)

    monkeypatch.setattr(JournalTransport, "close", close_slowly)
    one.append([Envelope(publication_id="a", type="T", body=b"a")])
    assert not await one.take_in() and 1 < sent < 10
    assert texts(tmp_path) == ["a", *(f"b{number}" for number in range(1, sent))]
    monkeypatch.setattr(JournalTransport, "close", close)
    assert await one.take_in() and len(texts(tmp_path)) == sent + 1
