"""`faregate status`, `pause` and `resume` on buses of this machine, over their control sockets."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

import faregate as fg
from faregate.bus.control_place import find
from faregate.cli import app, running
from faregate.cli.status import Seen
from faregate.ports.presence import Consumed, Heartbeat, OutboxStatus, ScheduleStatus
from faregate.testing import FakeClock
from tests.child import Child
from tests.cli.test_cli import wait_for

ROOT = Path(__file__).parents[2]
LONG = 60.0


class OrderPlaced(fg.Event):
    order_id: str


def make_bus(url: str = "memory:", name: str = "billing", **options: Any) -> fg.Bus:
    shop, billing = fg.Node("shop", publishes=[OrderPlaced]), fg.Node(name)

    @billing.on(OrderPlaced, source="shop")
    async def bill(order: OrderPlaced) -> None: ...

    return fg.Bus(url, nodes=[shop, billing], **{"control": True, **options})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAREGATE_CONTROL_DIR", str(tmp_path / "c"))
    return tmp_path / "c"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What `bus_under_test:bus` names."""
    module = ModuleType("bus_under_test")
    monkeypatch.setitem(sys.modules, "bus_under_test", module)
    return module


async def faregate(*arguments: str) -> tuple[int, str]:
    result = await asyncio.to_thread(CliRunner(env={"COLUMNS": "200"}).invoke, app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit | fg.errors.FaregateError):
        raise result.exception
    error = result.exception if isinstance(result.exception, fg.errors.FaregateError) else ""
    return result.exit_code, f"{result.output}{error}"


def paused(bus: fg.Bus) -> bool:
    return bus.counts()[0].paused


# --- status -----------------------------------------------------------------------------------------------------


async def test_status_shows_a_running_bus_by_each_of_its_names(tmp_path: Path, module: ModuleType) -> None:
    url = f"journal:{tmp_path}/data"
    module.bus = make_bus(url)  # type: ignore[attr-defined]
    async with make_bus(url) as bus:
        await bus.publish(OrderPlaced(order_id="1"))
        await bus.idle(LONG)
        await bus.pause("billing", OrderPlaced)
        [path] = find(bus.control_place)
        for target in ([], [url], ["bus_under_test:bus"], [f"unix:{path}"]):
            code, told = await faregate("status", *target)
            assert code == 0, told
            assert bus.instance in told and "OrderPlaced from shop" in told and "paused: by hand" in told
            code, told = await faregate("status", *target, "--json")
            found = json.loads(told) if target else json.loads(told)[0]
            assert (code, found["url"], found["missing"]) == (0, url, [])
            [billing, _] = found["nodes"]
            [consumed] = billing["consumes"]
            assert (consumed["handled"], consumed["paused"]) == (1, True)


async def test_what_status_says_in_json_is_what_the_bus_itself_says() -> None:
    async with make_bus(clock=FakeClock(), stall_seconds=None) as bus:
        _, told = await faregate("status", "--json")
        [found] = json.loads(told)
        assert found["nodes"] == sorted(msgspec.to_builtins(bus.status().nodes), key=lambda node: node["node"])


async def test_all_processes_of_a_bus_and_all_buses_of_a_user_are_shown() -> None:
    async with make_bus() as one, make_bus() as two, make_bus(name="other") as other:
        code, told = await faregate("status")
        assert code == 0
        assert all(each.instance in told for each in (one, two, other))
        _, told = await faregate("status", "--json")
        found = json.loads(told)
        assert sorted(len(each["nodes"]) for each in found) == [2, 4]


async def test_a_target_that_nobody_runs_is_one_clear_sentence(tmp_path: Path, module: ModuleType) -> None:
    module.bus = make_bus(f"journal:{tmp_path}/data")  # type: ignore[attr-defined]
    await make_bus(f"journal:{tmp_path}/data").prepare()
    for target, told in (
        ([], "no bus runs here as this user"),
        (["bus_under_test:bus"], "no bus of bus_under_test:bus runs here as this user"),
        ([f"journal:{tmp_path}/data"], "runs here as this user, or its program opens no control socket"),
        ([f"journal:{tmp_path}/nowhere"], "there is no journal in"),
        ([f"unix:{tmp_path}/nowhere.sock"], "runs here as this user"),
        (["nothing"], "names neither a bus"),
        (["nowhere:bus"], "there is no module 'nowhere'"),
    ):
        for command in (["status"], ["pause", "billing", "OrderPlaced"], ["resume", "billing", "OrderPlaced"]):
            code, said = await faregate(*command, *target)
            assert (code, told in said) == (1, True), said


async def answered_by(answer: Callable[..., Awaitable[None]], path: Path) -> tuple[int, str]:
    """What the command says of whoever answers so."""
    server = await asyncio.start_unix_server(answer, path)
    try:
        return await faregate("status", f"unix:{path}")
    finally:
        server.close()
        await server.wait_closed()


async def test_a_process_that_does_not_answer_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_SECONDS", 0.05)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    code, said = await answered_by(say_nothing, tmp_path / "c.sock")
    assert (code, "does not answer within 0.05 s" in said) == (1, True), said


@pytest.mark.parametrize("options", [[], ["--json"]])
async def test_a_process_that_does_not_answer_hides_no_other(
    folder: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_SECONDS", 2.0)
    async with make_bus() as bus, make_bus(name="other") as other:
        stopped = folder / "0-stopped.sock"
        with socket.socket(socket.AF_UNIX) as sock:  # it takes connections, as a stopped process does
            sock.bind(str(stopped))
            sock.listen()
            code, said = await faregate("status", *options)
            assert code == 1 and f"the process behind {stopped} does not answer" in said
            assert bus.instance in said and other.instance in said
            code, said = await faregate("pause", "all", "OrderPlaced")
            assert (code, "does not answer" in said) == (1, True), "it may be one that is meant"


@pytest.mark.parametrize("told", [b"", b"hello\n", b'{"status": 3}\n', b"\xff" * 1000])
async def test_what_is_no_bus_is_told_of(tmp_path: Path, told: bytes) -> None:
    async def say_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(told)
        writer.close()

    code, said = await answered_by(say_nonsense, tmp_path / "c.sock")
    assert (code, "is no bus of this version" in said) == (1, True), said


def test_what_somebody_may_have_to_look_at_is_said_below_the_table() -> None:
    seen = Seen("memory:", ["billing", "gone"])
    consumed = Consumed("[T]", None, [], 0, 1, 2, 3, 4, True, why="kill switch: \x1b[31mbank is down")
    seen.hear(
        Heartbeat(
            "billing", "one", "0", 1.0, 2.0, [consumed], {"stalled": 2, "dead-letter": 1}, state="stopping",
            outbox=OutboxStatus("sqlite:./a.db", 12, 3.25), breaker="open",
        )
    )  # fmt: skip
    console = Console(width=160)
    with console.capture() as captured:
        console.print(seen.shown())
    shown = captured.get()
    assert "one  stopping" in shown and "is paused: kill switch: \\x1b[31mbank is down" in shown
    assert "12 messages wait in the outbox sqlite:./a.db, the oldest for 3.2 s" in shown
    assert "the breaker on sending is open" in shown
    assert "alarms since it started: 1 dead-letter, 2 stalled" in shown
    assert "nobody runs it" in shown


# --- pause and resume -------------------------------------------------------------------------------------------


async def test_pause_and_resume_need_no_target_where_one_bus_is_meant() -> None:
    async with make_bus() as one, make_bus() as two, make_bus(name="other") as other:
        code, told = await faregate("pause", "billing", "OrderPlaced")
        assert code == 0, told
        assert (paused(one), paused(two), paused(other)) == (True, True, False)
        for bus in (one, two):
            assert f"OrderPlaced at billing, {bus.instance}: paused (by hand)" in told
        code, told = await faregate("resume", "billing", "all", "--json")
        assert code == 0
        assert json.loads(told)["command"] == "resume"
        assert [each["follows"] for each in json.loads(told)["subscriptions"]] == [True, True]
        assert not paused(one) and not paused(two)


async def test_what_several_buses_have_is_not_guessed() -> None:
    async with make_bus() as one, make_bus(name="other") as other:
        code, told = await faregate("pause", "all", "OrderPlaced")
        assert (code, "name one of them as TARGET" in told) == (1, True), told
        assert not paused(one) and not paused(other)
        [path] = find(other.control_place)
        code, told = await faregate("pause", "all", "all", f"unix:{path}", "--seconds", "30")
        assert code == 0 and "paused for 30 s" in told
        assert not paused(one) and paused(other)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nobody", "OrderPlaced"], "takes OrderPlaced at node 'nobody'; there are: billing OrderPlaced"),
        (["billing", "Nope"], "takes Nope at node 'billing'; there are: billing OrderPlaced"),
        (["shop", "all"], "takes anything at node 'shop'"),
        (["billing", "Nope", "bus_under_test:bus"], "has no subscription to Nope on this bus; there are: billing"),
    ],
)
async def test_an_unknown_node_or_type_lists_what_there_is(arguments: list[str], told: str, module: ModuleType) -> None:
    module.bus = make_bus  # type: ignore[attr-defined]
    async with make_bus() as bus:
        for command in ("pause", "resume"):
            code, said = await faregate(command, *arguments)
            assert (code, told in said) == (1, True), said
        assert not paused(bus)


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e300", "soon"])
async def test_seconds_that_are_none_are_refused(seconds: str) -> None:
    async with make_bus() as bus:
        code, _ = await faregate("pause", "billing", "OrderPlaced", "--seconds", seconds)
        assert code != 0
        assert not paused(bus)


# --- in processes of their own ----------------------------------------------------------------------------------

APP = """
import faregate as fg

class Tick(fg.Event, key="name"):
    name: str
    number: int

clock = fg.Node("clock", publishes=[Tick])

@clock.on(Tick, source="clock", order=fg.Serial())
async def work(tick: Tick):
    print("handled", tick.number, flush=True)

bus = fg.Bus("journal:./data", nodes=[clock], store="sqlite:./clock.db")
"""


@contextmanager
def serving(folder: Path) -> Iterator[Child]:
    (folder / "ticking.py").write_text(APP)
    command = [sys.executable, "-m", "faregate", "run", "ticking:bus"]
    with Child(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(process.stderr, "Ctrl-C drains")
            yield process
        finally:
            process.kill()


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "faregate", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
    )


def publish(folder: Path, number: int) -> None:
    shown = run(folder, "publish", "ticking:bus", "Tick", json.dumps({"name": "a", "number": number}))
    assert shown.returncode == 0, shown.stderr


@pytest.mark.timeout(600)  # it starts seven processes
def test_another_process_pauses_a_running_bus_and_lets_it_go_on(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        publish(tmp_path, 1)
        wait_for(process.stdout, "handled 1")
        shown = run(tmp_path, "pause", "clock", "Tick")
        assert shown.returncode == 0, shown.stderr
        assert "paused (by hand)" in shown.stdout
        publish(tmp_path, 2)
        publish(tmp_path, 3)
        [status] = json.loads(run(tmp_path, "status", "--json").stdout)
        [consumed] = status["nodes"][0]["consumes"]
        assert (consumed["handled"], consumed["paused"], consumed["busy"]) == (1, True, 0)
        assert run(tmp_path, "resume", "clock", "Tick", "ticking:bus").returncode == 0
        assert wait_for(process.stdout, "handled") == "handled 2\n"
        assert wait_for(process.stdout, "handled") == "handled 3\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    shown = run(tmp_path, "status", "ticking:bus")
    assert (shown.returncode, "no bus of ticking:bus runs here" in shown.stderr) == (1, True)


@pytest.mark.timeout(600)
def test_a_killed_process_leaves_a_socket_that_harms_nobody(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        process.kill()
        process.wait(20)
        assert len(list((tmp_path / "data" / "control").iterdir())) == 1
        shown = run(tmp_path, "status", "journal:./data")
        assert (shown.returncode, "runs here as this user" in shown.stderr) == (1, True)
    with serving(tmp_path):
        assert len(list((tmp_path / "data" / "control").iterdir())) == 1
        assert json.loads(run(tmp_path, "status", "journal:./data", "--json").stdout)["missing"] == []


def test_schedules_and_what_looks_like_a_mistake_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Seen.shown.__globals__, "room", lambda: None)
    seen = Seen("memory:", [])
    schedules = [
        ScheduleStatus("nightly", "0 3 * * *", "Europe/Madrid", 1_700_100_000.0, 1_700_013_600.0),
        ScheduleStatus("once", "0 0 1 1 *", "UTC", None),
    ]
    notice = "bill waits for events of node 'shpo' (did you mean 'shop'?)"
    seen.hear(Heartbeat("shop", "here", "", 0.0, 0.0, [], {}, schedules=schedules, notices=[notice]))
    console = Console(width=200, record=True, file=StringIO())
    console.print(seen.shown())
    shown = console.export_text()
    assert "nightly: 0 3 * * * Europe/Madrid, next 2023-11-16T02:00:00" in shown
    assert "last 2023-11-15T02:00:00" in shown and "once: 0 0 1 1 *, never again" in shown
    assert f"here: {notice}" in shown
    assert seen.as_json()["nodes"][0]["notices"] == [notice]
    assert seen.as_json()["nodes"][0]["schedules"][0]["name"] == "nightly"


@pytest.mark.parametrize("columns", ["80", "40", None])
def test_long_lines_go_on_below_indented(columns: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen("memory:", [])
    schedules = [ScheduleStatus("nightly", "0 3 * * *", "Europe/Madrid", 1_700_100_000.0, 1_700_013_600.0)]
    why = "kill switch: 12 of 20 messages failed within 30 s; the last: ConnectionError: the bank does not answer"
    consumed = Consumed("charge-card", None, [], 0, 1, 2, 3, 4, True, why=why)
    notice = "bill waits for events of node 'shpo', and nobody is known to run that (did you mean 'shop'?)"
    seen.hear(Heartbeat("shop", "here", "", 0.0, 0.0, [consumed], {}, schedules=schedules, notices=[notice]))
    screen = Console(width=int(columns or 80), file=StringIO())
    monkeypatch.setitem(Seen.shown.__globals__, "room", lambda: columns and int(columns))
    screen.print(seen.shown(), soft_wrap=True)
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(line == line.rstrip() for line in lines)
    for first, indent in (("nightly: ", 4), ("charge-card is paused: ", 4), ("here: bill waits ", 0)):
        at = next(place for place, line in enumerate(lines) if line.startswith(" " * indent + first))
        further = [line for line in lines[at + 1 : at + 2] if columns]
        assert all(line.startswith(" " * (indent + 2)) and line[indent + 2] != " " for line in further)
        assert len(further) == (columns is not None)
    if columns is not None:
        assert max(map(len, lines)) <= int(columns)
    assert why in " ".join(" ".join(lines).split())
