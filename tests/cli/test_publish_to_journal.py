"""`faregate publish` on a journal: beside a running bus, when nothing runs, and before anything ever ran."""

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import faregate as fg
from faregate.broker.journal.disk import RealDisk
from faregate.broker.journal.layout import Layout, prepare, write_json
from faregate.broker.journal.lock import WriterLock
from faregate.cli.publish import _spool
from faregate.ports.queue import Binding
from faregate.ports.topology import Topology
from faregate.transports import journal as transports
from tests.child import Child
from tests.cli.test_cli import running, wait_for

APP = """
import faregate as fg

class Tick(fg.Event):
    number: int

class Stop(fg.Command):
    why: str

clock = fg.Node("clock")
bell = fg.Node("bell")

@bell.on(Tick, source="clock", key="number")
async def ring(tick: Tick):
    print(f"rang {tick.number}", flush=True)

@bell.on(Stop)
async def stop(command: Stop):
    print(f"stopped: {command.why}", flush=True)

bus = fg.Bus("journal:data", nodes=[clock, bell])
"""


def publish(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "faregate", "publish", "ticking:bus", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_beside_a_running_bus(tmp_path: Path) -> None:
    with running(tmp_path, app=APP) as process:
        wait_for(process.stderr, "Ctrl-C drains")
        shown = publish(tmp_path, "Tick", '{"number": 1}')
        assert shown.returncode == 0, shown.stderr
        assert "it is durable in the spool" in shown.stdout
        wait_for(process.stdout, "rang 1")
        assert publish(tmp_path, "Stop", '{"why": "enough"}').returncode == 0
        wait_for(process.stdout, "stopped: enough")


def test_when_nothing_runs_and_nothing_ever_ran(tmp_path: Path) -> None:
    (tmp_path / "ticking.py").write_text(APP)
    results = [json.loads(publish(tmp_path, "Tick", f'{{"number": {n}}}', "--json").stdout) for n in (1, 2)]
    assert all(result["spooled"] for result in results)
    with running(tmp_path, app=APP) as process:
        wait_for(process.stdout, "rang 1")
        wait_for(process.stdout, "rang 2")


def test_into_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "ticking.py").write_text(APP)
    (tmp_path / "data").write_text("a file")
    taken = publish(tmp_path, "Tick", '{"number": 4}')
    (tmp_path / "data").unlink()
    assert publish(tmp_path, "Tick", '{"number": 5}').returncode == 0
    (tmp_path / "data" / "spool").rename(tmp_path / "data" / "away")
    (tmp_path / "data" / "spool").write_text("a file")
    blocked = publish(tmp_path, "Tick", '{"number": 6}')
    for refused in (taken, blocked):
        assert refused.returncode == 1 and "Traceback" not in refused.stderr
        assert "error: JournalFailed\nnothing can be published to the journal data: " in refused.stderr


def test_while_another_process_makes_the_journal(tmp_path: Path) -> None:
    (tmp_path / "ticking.py").write_text(APP)
    layout = Layout(tmp_path / "data")
    layout.root.mkdir()
    lock = WriterLock(layout.root, "a bus that starts")
    try:
        publishing = Child(
            [sys.executable, "-m", "faregate", "publish", "ticking:bus", "Tick", '{"number": 3}'],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with publishing:
            with pytest.raises(subprocess.TimeoutExpired):  # longer than a lock is waited for
                publishing.wait(3)
            prepare(layout, RealDisk())
            printed, errors = publishing.communicate(timeout=60)
        assert publishing.returncode == 0, errors
        assert "it is durable in the spool" in printed
    finally:
        lock.release()
    with running(tmp_path, app=APP) as process:
        wait_for(process.stdout, "rang 3")


class Tick(fg.Event):
    number: int


async def test_into_a_folder_that_another_process_holds_and_makes_no_journal_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_MADE_WITHIN", 0.1)
    lock = WriterLock(tmp_path, "wait")
    try:
        with pytest.raises(fg.JournalLocked, match="is written by process"):
            await _spool(fg.Bus(f"journal:{tmp_path}", nodes=[fg.Node("clock")]), fg.publish(Tick(number=3)), "clock")
    finally:
        lock.release()


class Wind(fg.Command):
    turns: int


async def test_a_command_for_a_bus_that_has_not_subscribed_yet(tmp_path: Path) -> None:
    prepare(Layout(tmp_path), RealDisk())  # as far as another process had come that was killed
    clock = fg.Node("clock")

    @clock.on(Wind)
    def wind(wind: Wind) -> None: ...

    store = tmp_path.with_suffix(".db")

    def bus() -> fg.Bus:
        return fg.Bus(f"journal:{tmp_path}", nodes=[clock, fg.Node("bell")], store=f"sqlite:{store}")

    for nobody in ("clack", "bell"):
        with pytest.raises(fg.Unroutable):
            await _spool(bus(), fg.send(Wind(turns=3), to=nobody), "clock")
    assert not store.exists(), "nothing needs to be prepared for a command that nobody takes"
    assert (await _spool(bus(), fg.send(Wind(turns=3), to="clock"), "clock"))["spooled"]


async def test_a_command_for_a_bus_that_starts_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, store, clock = Layout(tmp_path), tmp_path.with_suffix(".db"), fg.Node("clock")
    command = importlib.import_module("faregate.cli.publish")  # the package has the function under this name
    clock.on(Wind, name="wind")(lambda wind: None)
    prepare(layout, RealDisk())
    starting = WriterLock(tmp_path, "a bus that starts")

    def spooling() -> asyncio.Task[dict[str, Any]]:
        bus = fg.Bus(f"journal:{tmp_path}", nodes=[clock], store=f"sqlite:{store}")
        return asyncio.create_task(_spool(bus, fg.send(Wind(turns=3), to="clock"), "clock"))

    try:
        monkeypatch.setattr(command, "_MOMENT", 0.01)
        with pytest.raises(fg.Unroutable):
            await spooling()
        monkeypatch.setattr(command, "_MOMENT", 60)
        published = spooling()
        assert (await asyncio.wait({published}, timeout=0.2))[1]
        topology = Topology()
        topology.add(Binding(node="clock", type="Wind", kind="command", remembers="ledger"))
        write_json(layout.topology, RealDisk(), topology)
        assert (await published)["spooled"]
    finally:
        starting.release()
    assert not store.exists(), "the stores are those of the process that runs the nodes"


@pytest.mark.parametrize(
    "arguments",
    [
        ("Tick", '{"number": 1}', "--delay", "1e300"),
        ("Tick", '{"number": 1}', "--header", "a=\udcff"),
        ("Stop", '{"why": "\udcff"}'),
    ],
    ids=["delay", "header", "body"],
)
def test_what_no_journal_can_take_is_one_clear_sentence(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "ticking.py").write_text(APP)
    shown = publish(tmp_path, *arguments)
    assert shown.returncode != 0
    assert "Traceback" not in shown.stderr and shown.stderr.startswith("error: "), shown.stderr


def test_what_expired_before_anything_ran_is_not_handled(tmp_path: Path) -> None:
    (tmp_path / "ticking.py").write_text(APP)
    refused = publish(tmp_path, "Tick", '{"number": 0}', "--expires", "0")
    assert refused.returncode != 0 and "expires must be more than 0 seconds" in refused.stderr
    assert publish(tmp_path, "Tick", '{"number": 1}', "--expires", "0.001").returncode == 0
    assert publish(tmp_path, "Tick", '{"number": 2}', "--expires", "3600").returncode == 0
    with running(tmp_path, app=APP) as process:
        wait_for(process.stderr, "is a dead letter (expired)")
        wait_for(process.stdout, "rang 2")


def test_the_same_idempotency_key_is_handled_once(tmp_path: Path) -> None:
    (tmp_path / "ticking.py").write_text(APP)
    for _ in range(3):
        assert publish(tmp_path, "Tick", '{"number": 7}', "--idempotency-key", "seven").returncode == 0
    assert publish(tmp_path, "Tick", '{"number": 8}').returncode == 0
    with running(tmp_path, app=APP) as process:
        assert wait_for(process.stdout, "rang") == "rang 7\n"
        assert wait_for(process.stdout, "rang") == "rang 8\n"


def test_a_second_writer_is_told_who_has_the_journal(tmp_path: Path) -> None:
    with running(tmp_path, app=APP) as process:
        wait_for(process.stderr, "Ctrl-C drains")
        second = subprocess.run(
            [sys.executable, "-m", "faregate", "run", "ticking:bus"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 1
        assert f"is written by process {process.pid}" in second.stderr
        assert "Traceback" not in second.stderr


async def test_a_command_that_nobody_handles_is_refused_by_the_spool(tmp_path: Path) -> None:
    class Stop(fg.Command):
        why: str

    bus = fg.Bus(f"journal:{tmp_path}/data", nodes=[fg.Node("clock")])
    await bus.prepare()
    with pytest.raises(fg.Unroutable, match="no node 'bell' handles the command Stop"):
        await bus.spool(Stop(why="x"), to="bell")


async def test_a_memory_bus_has_no_spool() -> None:
    class Tick(fg.Event):
        number: int

    bus = fg.Bus("memory:", nodes=[fg.Node("clock")])
    assert not bus.spools
    with pytest.raises(fg.ConfigurationError, match="memory: has no spool"):
        await bus.spool(Tick(number=1))
