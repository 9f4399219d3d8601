"""The journal's lock: one writer, whatever is removed under it, and none when the writer is dead."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import faregate as fg
from faregate.broker.journal import JournalReader
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.journal import Journal
from faregate.broker.journal.layout import Layout, prepare
from faregate.broker.journal.lock import WriterLock, lock_holder
from faregate.broker.journal.repair import repair
from faregate.transports import journal as transports
from faregate.transports.journal import JournalTransport

FORKING = """
import asyncio, os, sys, time
import faregate as fg

class Noted(fg.Event):
    text: str

author, reader = fg.Node("author"), fg.Node("reader")

@reader.on(Noted, source="author")
async def read(noted: Noted):
    pass

async def main():
    async with fg.Bus("journal:" + sys.argv[1], nodes=[author, reader]) as bus:
        await bus.publish(Noted(text="of the writer"), node="author")
        await bus.idle()
        child = os.fork()
        if not child:
            in_child(bus)
            os._exit(0)
        print(child, flush=True)
        sys.stdin.read()

"""

WAITS = FORKING + "def in_child(bus): time.sleep(600)\nasyncio.run(main())"

WRITES = (
    FORKING
    + """
def in_child(bus):
    journal = bus.transport.journal
    try:
        journal.change_topology(lambda topology: topology.add_dead_letter_queue("of-the-child"))
    except fg.JournalFailed as exc:
        print(exc, flush=True)
    journal.release()

asyncio.run(main())
"""
)


@contextmanager
def writer(program: str, path: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_the_lock_of_a_killed_writer_is_free_although_a_child_that_it_forked_lives_on(tmp_path: Path) -> None:
    with writer(WAITS, tmp_path) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert lock_holder(tmp_path) == str(process.pid)
            with pytest.raises(fg.JournalLocked, match=f"is written by process {process.pid}"):
                Journal(tmp_path)
            process.kill()
            process.wait()
            os.kill(child, 0)
            assert lock_holder(tmp_path) is None
            Journal(tmp_path).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_writes_nothing_and_does_not_let_its_parents_lock_go(tmp_path: Path) -> None:
    with writer(WRITES, tmp_path) as process:
        assert process.stdout is not None
        said = {process.stdout.readline(), process.stdout.readline()}
        assert any("was forked from the one that writes the journal" in line for line in said)
        assert lock_holder(tmp_path) == str(process.pid)
        assert JournalReader(tmp_path).topology().queue("of-the-child-dead-letters") is None


def test_removing_the_file_lock_admits_no_second_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    (tmp_path / "lock").unlink()
    with pytest.raises(fg.JournalLocked, match="is written by process unknown: one process runs the nodes"):
        Journal(tmp_path)
    with pytest.raises(fg.JournalLocked, match="stop that process, then repair"):
        repair(tmp_path, act=False)
    assert lock_holder(tmp_path) == "unknown"
    journal.release()
    assert lock_holder(tmp_path) is None


async def test_who_starts_while_the_journal_is_being_made_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_MADE_WITHIN", 60)
    making = WriterLock(tmp_path, "wait")
    transport = JournalTransport(f"journal:{tmp_path}")
    starting = asyncio.create_task(transport.open())
    _, waiting = await asyncio.wait({starting}, timeout=2)  # longer than the lock of a journal is waited for
    assert waiting
    monkeypatch.setattr(transports, "_MOMENT", 60)  # what follows may take its time
    prepare(Layout(tmp_path), RealDisk())
    making.release()
    await asyncio.wait_for(starting, 10)
    await transport.close()


async def test_who_starts_waits_as_long_as_subscriptions_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(tmp_path)
    prepare(layout, RealDisk())
    monkeypatch.setattr(transports, "_MOMENT", 0.001)  # less than the pause between two looks

    class Busy(JournalTransport):
        looks = 0

        def _make_journal(self) -> Journal:
            self.looks += 1
            if self.looks < 5:
                os.utime(layout.topology, ns=(self.looks, self.looks))
            if self.looks < self.tries:
                raise fg.JournalLocked("wait")
            return super()._make_journal()

        tries = 5

    transport = Busy(f"journal:{tmp_path}")
    await transport.open()
    await transport.close()
    stuck = Busy(f"journal:{tmp_path}")
    stuck.tries = 99
    with pytest.raises(fg.JournalLocked):
        await stuck.open()
    assert stuck.looks == 5


async def test_who_waits_for_a_journal_can_be_stopped(tmp_path: Path) -> None:
    making = WriterLock(tmp_path, "wait")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await JournalTransport(f"journal:{tmp_path}").open()
    making.release()
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    assert lock_holder(tmp_path) is None


async def test_a_start_that_is_stopped_while_it_opens_the_journal_leaves_no_lock(tmp_path: Path) -> None:
    class Slow(JournalTransport):
        begun, go_on = threading.Event(), threading.Event()

        def _make_journal(self) -> Journal:
            self.begun.set()
            assert self.go_on.wait(10)
            return super()._make_journal()

    starting = asyncio.create_task(Slow(f"journal:{tmp_path}").open())
    assert await asyncio.to_thread(Slow.begun.wait, 10)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    Slow.go_on.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    await asyncio.sleep(0)
    assert (tmp_path / "journal.json").exists() and lock_holder(tmp_path) is None


def test_a_refused_lock_leaves_the_name_of_its_holder_and_no_open_file(tmp_path: Path) -> None:
    lock = WriterLock(tmp_path, "wait")
    open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (Path opens one of its own)
    with pytest.raises(fg.JournalLocked, match=f"process {os.getpid()}: wait"):
        WriterLock(tmp_path, "wait")
    assert len(os.listdir("/proc/self/fd")) == open_files  # noqa: PTH208
    lock.release()
    lock.release()
    assert lock_holder(tmp_path / "not there") is None
